# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Damage to the memory of an image, chosen from what the readers read.

:class:`Trace` records every read of a command: the address, the length, and the line of the package
that asked for it. A target is drawn from the lines first and from the reads of that line then, so
a line that reads one pointer is hit as often as one that reads a gigabyte. A new reader is covered
as soon as a command calls it. Nothing here knows a structure or a field.

:class:`Memory` puts itself before the pages that are damaged. drgn reads all others itself.
"""

from __future__ import annotations

import errno
import random
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import drgn
from drgn.helpers.linux.mm import follow_phys

import memcg_inspect
from memcg_inspect.image.image import Image
from memcg_inspect.image.program import ImageSource, open_program

PAGE = 4096
WORD = 8
HIGH_HALF = 1 << 63
_PACKAGE = str(Path(memcg_inspect.__file__).parent)
#: Methods and functions that read the same in two ways: tasks are in an idr and on a list, nodes of
#: percpu pages are looked up one by one if they cannot be together. Also that of the most that one
#: operation charges, which has a larger bound then, and matters only to rows that differ; and that
#: of the name of the machine, which no identity needs, and those of page frames around the one that
#: a page table maps.
_REDUNDANT = frozenset(
    {
        ("sched.py", "find_tasks"),
        ("percpu_vm.py", "_together"),
        ("memcontrol_limits.py", "read_limits"),
        ("image_info.py", "_host"),
        ("pagewalk.py", "_read"),
    }
)
_COMMON = ("image/", "linux/lib/")
_ODD_WORDS = (0, 1, 7, 64, 0x1000, (1 << 31) - 1, (1 << 32) - 1, 1 << 47, 1 << 63, (1 << 64) - 1)


class Read(NamedTuple):
    """One read: its virtual address, its length, and the line that asked for it."""

    address: int
    size: int
    line: str


class Change(NamedTuple):
    """
    One change.

    :ivar kind: what is done
    :ivar read: the read that it was chosen for
    :ivar address: physical address of the first byte that changes
    :ivar data: the new bytes; ``None`` if the whole page cannot be read
    """

    kind: str
    read: Read
    address: int
    data: bytes | None

    def __str__(self) -> str:
        new = "" if self.data is None else self.data[:16].hex()
        read = f"{self.read.address:#x}+{self.read.size}"
        return f"{self.kind} {self.read.line} {self.address:#x} ({read}) {new}"


def line_of_package() -> str:
    """
    Return the line of the package that is running, e.g. ``linux/mm/slab.py:300``.

    That is the line that called for the read, not those of bulk reads and of walkers of lists.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE):
            name = name[len(_PACKAGE) + 1 :]
            if not name.startswith(_COMMON):
                return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


def _is_redundant() -> bool:
    """
    Return whether what is read now is found in another way if it is missing, or is not needed.

    BTF of a module has types that no identity needs.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if (Path(name).name, frame.f_code.co_name) in _REDUNDANT or name.startswith(
            f"{_PACKAGE}/btf/"
        ):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Trace:
    """
    Reads of the commands that run on a program.

    :ivar lines: the reads by the line that asked for them, without repetitions
    """

    def __init__(self, prog: drgn.Program, under: drgn.Program) -> None:
        """:param under: a program of the same image, which does the reading"""
        self.begin()

        def read(address: int, count: int, offset: int, physical: bool) -> bytes:
            self._note(Read(address, count, line_of_package()))
            data: bytes = under.read(address, count)
            return data

        prog.add_memory_segment(HIGH_HALF, HIGH_HALF, read, False)

    def begin(self) -> None:
        """Forget the reads so far: another command begins."""
        self._seen: set[Read] = set()
        self.lines: dict[str, list[Read]] = defaultdict(list)

    def _note(self, read: Read) -> None:
        if read not in self._seen:
            self._seen.add(read)
            self.lines[read.line].append(read)


class Memory:
    """
    The physical memory of a program, with damage.

    :ivar faults: number of reads that damage made impossible
    """

    def __init__(self, prog: drgn.Program, under: drgn.Program) -> None:
        """:param under: a program of the same image, which reads what is not damaged"""
        self.faults = 0
        self._prog, self._under = prog, under
        self._covered: set[int] = set()
        self._missing: dict[int, str] = {}
        self._changed: dict[int, list[tuple[int, bytes]]] = defaultdict(list)

    def apply(self, changes: Iterable[Change]) -> None:
        """Damage the memory. A change lies on one page."""
        for change in changes:
            page = change.address // PAGE
            if page not in self._covered:
                self._covered.add(page)
                self._prog.add_memory_segment(page * PAGE, PAGE, self._read, True)
            if change.data is None:
                self._missing[page] = change.kind
            else:
                self._changed[page].append((change.address, change.data))

    def only(self, change: Change | None) -> None:
        """Repair the memory; then damage it, unless there is no change."""
        self.faults = 0
        for pages in (self._missing, self._changed):
            pages.clear()
        self.apply([] if change is None else [change])

    def _read(self, address: int, count: int, offset: int, physical: bool) -> bytes:
        page = address // PAGE
        how = self._missing.get(page)
        if how is not None:
            self.faults += not _is_redundant()
            if how == "eio":
                raise OSError(errno.EIO, "Input/output error")
            raise drgn.FaultError("Excluded page", address)
        data = bytearray(self._under.read(address, count, True))
        for at, new in self._changed.get(page, ()):
            first, last = max(at, address), min(at + len(new), address + len(data))
            if first < last:
                data[first - address : last - address] = new[first - at : last - at]
        return bytes(data)


class Chooser:
    """
    Chooses changes: the same for the same seed and reads.

    :param lines: reads by line, of :class:`Trace`
    :param under: a program of the same image
    """

    def __init__(self, lines: dict[str, list[Read]], under: drgn.Program) -> None:
        self._lines, self._under = lines, under
        self._names = sorted(lines)
        self._init_mm = under["init_mm"].address_of_()

    def changes(self, seed: int) -> list[Change]:
        """Return one change, sometimes two or three."""
        chance = random.Random(seed)
        number = chance.choice((1, 1, 1, 2, 3))
        return [change for _ in range(number) for change in self._one(chance)]

    def _one(self, chance: random.Random) -> list[Change]:
        for _ in range(100):
            line = chance.choice(self._names)
            read = chance.choice(self._lines[line])
            kind = chance.choice(_KINDS)
            # One page, of a read that may have many
            start = read.address + chance.randrange(max(read.size, 1)) // WORD * WORD
            try:
                address = follow_phys(self._init_mm, start).value_()
                data = self._new(kind, chance, read, start)
            except (drgn.FaultError, ValueError):
                continue
            if data is not None:
                data = data[: PAGE - address % PAGE]
            return [Change(kind, read, address, data)]
        return []

    def _new(self, kind: str, chance: random.Random, read: Read, start: int) -> bytes | None:
        left = read.address + read.size - start
        if kind in ("missing", "eio"):
            return None
        if kind in ("zero", "ones"):
            return bytes([0 if kind == "zero" else 0xFF]) * min(left, PAGE)
        if kind == "flip":
            bit = chance.randrange(8 * min(left, WORD))
            old: bytes = self._under.read(start, min(left, WORD))
            word = int.from_bytes(old, "little") ^ 1 << bit
            return word.to_bytes(len(old), "little")
        if kind == "word":
            word = chance.choice((*_ODD_WORDS, chance.getrandbits(64), chance.getrandbits(20)))
            return word.to_bytes(WORD, "little")[:left]
        other = chance.choice(self._lines[read.line])
        if kind == "copy":  # of another read of the same line: lists that meet, owners that change
            copied: bytes = self._under.read(other.address, min(other.size, left, PAGE))
            return copied
        # A pointer to what is read nearby: circles, and one thing taken for another
        target = chance.choice((read.address, start, other.address, self._any(chance).address))
        return (target + chance.choice((0, 0, 0, 8, 16, 1))).to_bytes(WORD, "little")

    def _any(self, chance: random.Random) -> Read:
        return chance.choice(self._lines[chance.choice(self._names)])


_KINDS = (
    "missing",
    "eio",
    "zero",
    "ones",
    "flip",
    "flip",
    "word",
    "word",
    "copy",
    "pointer",
    "pointer",
)


def damaged(core: Path, *writes: tuple[int, bytes | int | str]) -> Image:
    """
    Open an image, with types from its BTF, and change its memory.

    :param writes: an address, and what is there: bytes, a word, or ``missing`` or ``eio`` for a
        page that cannot be read
    """
    whole = open_program(ImageSource(core=str(core), debuginfo="btf"))
    init_mm = whole["init_mm"].address_of_()
    prog = open_program(ImageSource(core=str(core), debuginfo="btf"))
    memory = Memory(prog, whole)
    for address, data in writes:
        place = follow_phys(init_mm, address).value_()
        if isinstance(data, str):
            memory.apply([Change(data, Read(address, 1, ""), place, None)])
            continue
        new = data.to_bytes(WORD, "little") if isinstance(data, int) else data
        assert place % PAGE + len(new) <= PAGE
        memory.apply([Change("word", Read(address, len(new), ""), place, new)])
    return Image(prog)
