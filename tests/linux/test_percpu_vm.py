# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Nodes of percpu pages, whose page tables are written down here.

``tests/linux/test_percpu_memory.py`` compares them with those that drgn finds.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from drgn import FaultError
from support.layouts import FRAMES, NODE_1, MadeImage

from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm import percpu_vm
from memcg_inspect.linux.mm.percpu_vm import PcpuPages
from memcg_inspect.model import Coverage

#: The first of the pages, and the page frames that they are mapped to, in tables of four. Those of
#: a block of the memory map (512) are on node 0, on node 1, on both in turn, and missing.
START = 0xFFFFC90000000000
FIRST_OF = {"node 0": 0, "node 1": 512, "both": 1024, "missing": 1536}
FRAMES_OF = [5, 6, 1024, 1025, 512, 1027, 600, 7, 1536, 8]
NODES = [0, 0, 0, 1, 1, 1, 1, 0, -1, 0]


class Machine:
    """
    :ivar can_read: whether page tables are read as whole tables
    :ivar walked: the addresses that were looked up one by one
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.image, self.can_read = MadeImage(), True
        self.walked: list[int] = []
        for block, first in FIRST_OF.items():
            for pfn in range(first, first + 512) if block != "missing" else ():
                on_1 = block == "node 1" or block == "both" and pfn % 2
                self.image.words(FRAMES.page(pfn), NODE_1 if on_1 else 0)
        machine = self

        class Tables:
            """In place of KernelTables."""

            def __init__(self, image: Image, coverage: Coverage) -> None:
                self.can_read = machine.can_read

            def frames(self, start: int, size: int) -> Iterator[list[int]]:
                first = (start - START) // 4096
                for number in range(first, min(first + size // 4096, len(FRAMES_OF))):
                    yield [FRAMES_OF[number]]

        def kernel_page(image: Image, address: int) -> int:
            self.walked.append(address)
            number = (address - START) // 4096
            if not 0 <= number < len(FRAMES_OF):
                raise FaultError("not mapped", address)
            return FRAMES.page(FRAMES_OF[number])

        monkeypatch.setattr(percpu_vm, "KernelTables", Tables)
        monkeypatch.setattr(percpu_vm, "kernel_page", kernel_page)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def at(number: int) -> int:
    return START + 4096 * number


def test_nodes_of_pages_that_follow_each_other(machine: Machine) -> None:
    pages = PcpuPages(machine.image)
    assert pages.nids(START, 8) == NODES[:8]
    assert pages.nids(at(2), 3) == NODES[2:5]
    assert (pages.coverage.read, pages.coverage.unreadable) == (11, 0)
    assert machine.walked == []
    before = machine.image.memory.reads
    assert pages.nids(START, 8) == NODES[:8]
    assert machine.image.memory.reads == before  # each block is read once


def test_a_page_whose_struct_page_is_not_in_the_image(machine: Machine) -> None:
    """It has no node, and is counted as missing once. Those beside it have theirs."""
    pages = PcpuPages(machine.image)
    for _ in range(2):
        assert pages.nids(at(7), 3) == NODES[7:]
        assert (pages.coverage.read, pages.coverage.unreadable) == (2, 1)
    [example] = pages.coverage.examples
    assert (example.what, example.address) == ("node of a percpu page", at(8))
    assert machine.walked == [at(7), at(8), at(9)]


def test_pages_that_are_not_mapped(machine: Machine) -> None:
    pages = PcpuPages(machine.image)
    assert pages.nids(at(9), 2) == [0, -1]
    assert pages.nid(at(11) + 4095) == -1
    assert (pages.coverage.read, pages.coverage.unreadable) == (1, 2)


def test_page_tables_that_are_not_known(machine: Machine) -> None:
    machine.can_read = False
    pages = PcpuPages(machine.image)
    assert pages.nids(START, 8) == NODES[:8]
    assert machine.walked == [at(number) for number in range(8)]
    pages.expect(START, 8)
    assert pages.coverage.read == 8


def test_a_running_kernel(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are freed and mapped again meanwhile: none is kept for others."""
    monkeypatch.setattr(MadeImage, "is_moving", True)
    pages = PcpuPages(machine.image)
    pages.expect(START, 8)
    assert pages.nids(START, 8) == NODES[:8]
    assert machine.walked == [at(number) for number in range(8)]


def test_pages_that_are_expected(machine: Machine) -> None:
    """They are found together, and counted when they are asked for."""
    pages = PcpuPages(machine.image)
    pages.expect(at(1), 6)
    pages.expect(at(7), 2)
    assert pages.coverage.read == 0
    assert [pages.nid(at(number) + 8) for number in (1, 2, 3, 6, 7, 3)] == [0, 0, 1, 1, 0, 1]
    assert pages.coverage.read == 5
    assert machine.walked == []
    assert pages.nid(at(8)) == -1
    assert machine.walked == [at(8)]
    pages.expect(at(8), 4)  # not all of them are mapped
    assert pages.nid(at(9)) == 0
    assert machine.walked == [at(8), at(9)]


def test_addresses_that_wrap_around(machine: Machine) -> None:
    """The offset of a CPU may be above the address, and is added as in C."""
    pages = PcpuPages(machine.image)
    assert pages.nid(START + 4096 * 3 + (1 << 64)) == 1
    assert pages.nids(START - (1 << 64), 4) == NODES[:4]
    assert pages.nids(START + (1 << 64), 4) == NODES[:4]
    assert machine.walked == [at(3)]


def test_readers_of_a_session_share_what_was_found(machine: Machine) -> None:
    machine.image.keeps_walks = True
    first, second = PcpuPages(machine.image), PcpuPages(machine.image)
    assert [first.nid(at(3)), second.nid(at(3))] == [1, 1]
    assert machine.walked == [at(3)]
    assert (first.coverage.read, second.coverage.read) == (1, 1)


def test_how_many_blocks_are_kept(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the blocks on several nodes, and those that are missing, the oldest goes first."""

    def blocks(most: int) -> list[int]:
        monkeypatch.setattr(percpu_vm, "_MOST_BLOCKS", most)
        pages, read = PcpuPages(machine.image), list[int]()
        find = pages._block

        def block(number: int) -> int | list[int] | None:
            read.append(number)
            return find(number)

        monkeypatch.setattr(pages, "_block", block)
        for first, count in ((2, 2), (8, 1), (8, 1), (2, 2), (0, 1), (0, 1)):
            pages.nids(at(first), count)
        return read

    assert blocks(2) == [2, 3, 0]
    assert blocks(1) == [2, 3, 2, 0]


def test_page_tables_that_are_not_in_the_image(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page is looked up."""

    def tables(image: Image, coverage: Coverage) -> None:
        raise FaultError("missing", 0)

    monkeypatch.setattr(percpu_vm, "KernelTables", tables)
    pages = PcpuPages(machine.image)
    assert pages.nids(START, 3) == NODES[:3]
    assert machine.walked == [at(0), at(1), at(2)]


def test_why_the_node_of_a_page_is_missing(machine: Machine) -> None:
    pages = PcpuPages(machine.image)
    assert pages.nids(at(8), 3) == [-1, 0, -1]
    place = FRAMES.page(FRAMES_OF[8])
    assert [(one.what, one.address, one.reason) for one in pages.coverage.examples] == [
        ("node of a percpu page", at(8), f"not made: {place:#x}"),
        ("node of a percpu page", at(10), f"not mapped: {at(10):#x}"),
    ]
    assert pages.coverage.read == 1


def test_pages_that_are_expected_and_missing(machine: Machine) -> None:
    """They are looked up when they are asked for, and counted as missing then."""
    pages = PcpuPages(machine.image)
    pages.expect(at(7), 3)
    assert pages.coverage == Coverage()
    assert [pages.nid(at(number)) for number in (7, 8, 9)] == NODES[7:]
    assert machine.walked == [at(8)]
    assert (pages.coverage.read, pages.coverage.unreadable) == (2, 1)
