# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Run the program on copies of images whose headers are damaged.

The headers are those of the format of the dump: ELF header, program headers and notes; the
headers, the bitmaps and the list of pages of a kdump. A run is bad if the program ends with status
70 or by a signal.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memcg_inspect.cli import EXIT_FAULT, main

#: Bytes at the beginning that are damaged: a lab's dump has its bitmaps and notes in them.
HEADERS = 80 << 10
#: Bytes of the headers of an ELF dump of QEMU, notes included.
ELF_HEADERS = 8 << 10
SECONDS = 100
#: Commands that are run in turn. The audit reads most of an image; the others read little of it.
COMMANDS = ("audit", "stock", "tasks")
_ODD = (0, 1, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1)


def runs(core: Path, folder: Path, seeds: range) -> Iterator[dict[str, Any]]:
    """
    Run all seeds on copies of a dump.

    :param folder: where to make the copies
    """
    with core.open("rb") as file:
        is_elf = file.read(4) == b"\x7fELF"
        file.seek(0)
        head = file.read(ELF_HEADERS if is_elf else HEADERS)
    copy = folder / "core"
    shutil.copyfile(core, copy)
    try:
        yield from _on_copy(copy, head, seeds)
    finally:
        copy.unlink()


def _on_copy(copy: Path, head: bytes, seeds: range) -> Iterator[dict[str, Any]]:
    for seed in seeds:
        chance = random.Random(seed)
        data, what = bytearray(head), []
        for _ in range(chance.choice((1, 1, 2, 5))):
            what.append(_damage(data, chance))
        size = chance.randrange(len(head)) if seed % 5 == 0 else None
        with copy.open("r+b") as file:
            file.write(data)
        used = copy
        if size is not None:
            used = copy.with_name("cut")
            used.write_bytes(data[:size])
            what.append(f"cut at {size}")
        command = COMMANDS[seed % len(COMMANDS)]
        yield {"seed": seed, "command": command, "damage": what, **_run(used, command)}


def _damage(data: bytearray, chance: random.Random) -> str:
    # Most of what says lengths is at the beginning, and not 0.
    end = min(len(data), chance.choice((256, 1024, 8192, len(data))))
    filled = [at for at in range(end) if data[at]]
    at = chance.choice(filled) if chance.random() < 0.7 and filled else chance.randrange(end)
    how: dict[str, Callable[[], bytes]] = {
        "flip": lambda: bytes([data[at] ^ 1 << chance.randrange(8)]),
        "byte": lambda: bytes([chance.choice((0, 0xFF, chance.randrange(256)))]),
        "word": lambda: struct.pack("<Q", chance.choice((*_ODD, chance.getrandbits(64)))),
        "half": lambda: struct.pack("<I", chance.choice(_ODD) & 0xFFFFFFFF),
    }
    kind = chance.choice(sorted(how))
    new = how[kind]()[: len(data) - at]
    data[at : at + len(new)] = new
    return f"{kind} at {at:#x}: {new.hex()}"


def _run(core: Path, command: str) -> dict[str, Any]:
    arguments = [command, "-c", str(core), "--debuginfo", "btf", "--json"]
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        status = EXIT_FAULT
        with contextlib.redirect_stdout(io.StringIO()):
            status = main(arguments)
        os._exit(status)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return {"outcome": f"status {code}", "bad": code not in (0, 1, 2, 3)}
