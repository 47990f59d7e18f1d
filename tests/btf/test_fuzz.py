# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Damaged BTF gives an error of one line or a working subset: no crash, no hang, no excess memory.

The tests damage at most 64 KiB of a kernel's BTF at random and look up everything in it. They do
so in child processes, because a crash of drgn would end the test, too.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import tempfile
from pathlib import Path

import drgn
import pytest
from drgn import Architecture, Platform, PlatformFlags, Program, TypeKind
from labkit import kernels
from support.btf_builder import Builder, Order, subset
from support.guests import DEBIAN_KERNELS

from memcg_inspect.btf import load_btf
from memcg_inspect.btf.parse import Btf, BtfKind
from memcg_inspect.btf.source import from_file
from memcg_inspect.model import ImageError

SIZE = 40 << 10
MEMORY = 1 << 30
#: Seconds for one child's cases.
PATIENCE = 300

_SPELLED = {
    BtfKind.STRUCT: "struct ",
    BtfKind.UNION: "union ",
    BtfKind.ENUM: "enum ",
    BtfKind.ENUM64: "enum ",
    BtfKind.TYPEDEF: "",
}


def whole(vmlinux: Path) -> Builder:
    btf = Btf(from_file(str(vmlinux)).data)
    return subset(btf, ["list_head", "xarray", "kmem_cache", "color", "PG_head", "page"], SIZE)


def damage(good: bytes, chance: random.Random) -> bytes:
    data = bytearray(good)
    how = chance.randrange(10)
    if how == 0:
        return bytes(data[: chance.randrange(len(data))])
    # Mostly a few bits of the types, at times of anything, at times whole words.
    types = int.from_bytes(good[12:16], "little" if good[0] == 0x9F else "big")
    for _ in range(chance.choice([1, 1, 2, 4, 16, 64])):
        end = len(data) if how < 3 else 24 + types
        at = chance.randrange(0 if how < 3 else 24, end)
        if how < 8:
            data[at] ^= 1 << chance.randrange(8)
        else:
            at &= ~3
            word = chance.choice([0, 1, 0xFF, 0xFFFF, 0xFFFFFFFF, chance.getrandbits(12)])
            data[at : at + 4] = word.to_bytes(4, chance.choice(["little", "big"]))
    return bytes(data[: len(good)])


def ask_for_everything(prog: Program, names: dict[str, str]) -> int:
    """Use each type in every way that reads its definition; return how many could be used."""
    useful = 0
    for name, spelled in names.items():
        try:
            type_ = prog.type(spelled + name)
            str(type_)
            for member in type_.members or () if type_.kind in COMPOUND else ():
                str(member.type)
            if type_.kind in COMPOUND and (type_.size or 0) <= 1 << 16:
                str(drgn.Object.from_bytes_(prog, type_, bytes(type_.size or 0)))
            for enumerator in type_.enumerators or () if type_.kind == TypeKind.ENUM else ():
                prog[enumerator.name]
            useful += 1
        except (ImageError, LookupError) as error:
            assert "\n" not in str(error)
    return useful


COMPOUND = (TypeKind.STRUCT, TypeKind.UNION)


def _case(path: str, good: bytes, names: dict[str, str], order: Order, seed: int) -> int:
    Path(path).write_bytes(damage(good, random.Random(seed)))
    flags = PlatformFlags.IS_64_BIT
    if order == "little":
        flags |= PlatformFlags.IS_LITTLE_ENDIAN
    prog = Program(Platform(Architecture.UNKNOWN, flags))
    try:
        load_btf(prog, path)
    except ImageError as error:
        assert "\n" not in str(error)
        return 0
    return ask_for_everything(prog, names)


def _child(
    images: dict[Order, bytes], names: dict[str, str], seeds: range, says: multiprocessing.Queue
) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    signal.alarm(PATIENCE)
    useful = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            order: Order = "big" if seed % 2 else "little"
            says.put(("case", seed))
            try:
                useful += _case(f"{folder}/btf", images[order], names, order, seed) > 0
            except BaseException as error:
                says.put(("failed", f"seed {seed}: {type(error).__name__}: {error}"))
                return
    says.put(("done", useful))


def test_damage(request: pytest.FixtureRequest) -> None:
    cases = max(500, request.config.getoption("--fuzz", default=0))
    builder = whole(kernels.debug_info(DEBIAN_KERNELS[0]))
    images: dict[Order, bytes] = {o: builder.data(o) for o in ("little", "big")}
    assert len(images["little"]) <= 64 << 10
    btf = Btf(images["little"])
    names = {btf.name_of(n): _SPELLED[btf.kind(n)] for n in btf.of_kind(*_SPELLED)}
    names.pop("", None)
    assert ask_for_everything_works(images, names)
    fork = multiprocessing.get_context("fork")
    useful, step = 0, 250
    for start in range(0, cases, step):
        says = fork.Queue()
        child = fork.Process(
            target=_child, args=(images, names, range(start, min(start + step, cases)), says)
        )
        child.start()
        last: object = None
        while True:
            try:
                word, value = says.get(timeout=1)
            except Exception:
                assert child.is_alive(), f"{last} ended the child: {child.exitcode}"
                continue
            assert word != "failed", value
            if word == "done":
                useful += value
                break
            last = value
        child.join()
    assert useful > cases // 10


def ask_for_everything_works(images: dict[Order, bytes], names: dict[str, str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "btf")
        Path(path).write_bytes(images["little"])
        prog = Program(Platform(Architecture.X86_64))
        load_btf(prog, path)
        return ask_for_everything(prog, names) > len(names) // 2
