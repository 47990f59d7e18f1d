# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Copies of many ranges of percpu memory, which are read together, in memory made by hand.

``tests/linux/test_percpu_memory.py`` compares those of images with a read for each copy.
"""

from __future__ import annotations

import pytest
from drgn import FaultError
from support.layouts import MadeImage

from memcg_inspect.linux.mm import percpu_defs
from memcg_inspect.linux.mm.percpu_defs import PercpuRange, percpu_offsets, read_percpu
from memcg_inspect.model import ImageError

DATA, VARIABLES = 0xFFFF888030000000, 0xFFFFFFFF82000000
#: Where the copies of the CPUs are.
OFFSETS = {0: DATA, 1: DATA + 0x100000, 2: DATA + 0x200000}


def kernel(pages: int = 8) -> MadeImage:
    """Return a kernel with some pages of percpu memory, which are all zeros."""
    image = MadeImage()
    image.given[percpu_offsets] = OFFSETS
    for offset in OFFSETS.values():
        for page in range(pages):
            image.words(offset + page * 4096, 0)
    return image


def read(image: MadeImage, *ranges: tuple[int, int]) -> list[tuple[tuple[int, int], object]]:
    found = read_percpu(image, [PercpuRange(*one) for one in ranges])
    return [(tuple(one), copies) for one, copies in found]


def reads(image: MadeImage, *ranges: tuple[int, int]) -> int:
    before = image.memory.reads
    assert len(read(image, *ranges)) == len(set(ranges))
    return image.memory.reads - before


def test_copies_that_are_not_zeros() -> None:
    image = kernel()
    image.write(OFFSETS[0] + 8, b"\1\2")
    image.write(OFFSETS[1] + 15, b"\3\4")
    image.write(OFFSETS[2] + 4, b"\5")  # between the ranges
    assert read(image, (16, 4), (8, 8), (16, 4), (100, 2)) == [
        ((8, 8), {0: b"\1\2" + bytes(6), 1: bytes(7) + b"\3"}),
        ((16, 4), {1: b"\4" + bytes(3)}),
        ((100, 2), {}),
    ]


def test_copies_of_cpus_that_are_alike() -> None:
    """Those that hold nothing, but have the same between the ranges, are compared as a whole."""
    image = kernel()
    for cpu in (0, 1, 2):
        image.write(OFFSETS[cpu] + 12, b"\7")
    assert read(image, (8, 4), (16, 4)) == [((8, 4), {}), ((16, 4), {})]
    # The same data on two CPUs that is in a range is the copy of both.
    for cpu in (0, 2):
        image.write(OFFSETS[cpu] + 16, b"\7")
    data = b"\7" + bytes(3)
    assert read(image, (8, 4), (16, 4)) == [((8, 4), {}), ((16, 4), {0: data, 2: data})]


def test_ranges_that_overlap() -> None:
    image = kernel()
    image.write(OFFSETS[1] + 20, b"\1")
    long, short = bytes(20) + b"\1" + bytes(79), bytes(4) + b"\1" + bytes(3)
    assert read(image, (0, 100), (16, 8)) == [((0, 100), {1: long}), ((16, 8), {1: short})]


def test_ranges_that_are_not_in_the_image() -> None:
    """Only those that a missing page has a part of are not read."""
    image = kernel()
    image.write(OFFSETS[0] + 4090, b"\1")
    image.forget(OFFSETS[1] + 4096)
    (first, kept), (second, fault), (third, other) = read(image, (4090, 6), (4090, 7), (8192, 4))
    assert (first, second, third) == ((4090, 6), (4090, 7), (8192, 4))
    assert (kept, other) == ({0: b"\1" + bytes(5)}, {})
    assert isinstance(fault, FaultError)
    assert fault.address == OFFSETS[1] + 4096


def test_ranges_that_are_read_together() -> None:
    """Between them is less than a page, so memory that nobody has is not read."""
    image = kernel()
    assert reads(image, (0, 8)) == 3
    assert reads(image, (0, 8), (8 + 4095, 8)) == 3
    assert reads(image, (0, 8), (8 + 4096, 8)) == 6
    # A range may end behind those that follow it.
    assert reads(image, (0, 100), (10, 10), (100 + 4095, 8)) == 3
    assert reads(image, (0, 100), (10, 10), (100 + 4096, 8)) == 6
    assert read(image) == []


@pytest.mark.parametrize(
    ("cpus", "size", "most"), [(1, 4096, 16), (128, 4096, 16), (256, 4096, 8), (8192, 2048, 2)]
)
def test_how_much_is_read_together(cpus: int, size: int, most: int) -> None:
    """64 KiB of each CPU, 8 MiB of all CPUs, but a page of each at least."""
    image = kernel(32)
    image.given[percpu_offsets] = dict.fromkeys(range(cpus), DATA)
    ranges = [(n * size, size) for n in range(most + 1)]
    assert reads(image, *ranges[:-1]) == cpus
    assert reads(image, *ranges) == 2 * cpus


def test_runs_of_ranges() -> None:
    def runs(most: int, *ranges: tuple[int, int]) -> list[list[tuple[int, int]]]:
        found = percpu_defs._runs([PercpuRange(*one) for one in ranges], most)
        return [[tuple(one) for one in run] for run in found]

    ranges = ((0, 8), (8, 8), (16, 8))
    assert runs(24, *ranges) == [list(ranges)]
    assert runs(23, *ranges) == [[(0, 8), (8, 8)], [(16, 8)]]
    assert runs(4, *ranges) == [[one] for one in ranges]
    # Each run has bounds of its own.
    assert runs(16, (0, 8), (8, 8), (16, 8), (24, 8)) == [[(0, 8), (8, 8)], [(16, 8), (24, 8)]]
    assert runs(16) == []


def test_offsets_of_cpus() -> None:
    image = MadeImage()
    image.variable("__per_cpu_offset", "unsigned long[2]", VARIABLES)
    image.words(VARIABLES, DATA, DATA + 4096)
    assert percpu_offsets(image) == {0: DATA, 1: DATA + 4096}
    image = MadeImage()
    image.variable("__per_cpu_offset", "unsigned long[2]", VARIABLES)
    image.words(VARIABLES, DATA, DATA)
    why = "^two CPUs have the same percpu memory: __per_cpu_offset or __cpu_possible_mask is"
    with pytest.raises(ImageError, match=why + " damaged$"):
        percpu_offsets(image)
