# SPDX-License-Identifier: LGPL-2.1-or-later
"""Owners of pages that nothing marks, each of which takes the place of a reader."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from drgn import FaultError
from support.layouts import FRAMES

from memcg_inspect.collect import unmarked_owners as module
from memcg_inspect.collect.slab_owners import SlabOwners
from memcg_inspect.collect.unmarked_owners import UnmarkedOwners
from memcg_inspect.model import Coverage

IMAGE: Any = object()
#: The page frame after the last one.
END = 0x100
#: Owners that give pages, and owners that give addresses: the subject whose coverage they count.
PAGES = {
    "swap_cgroup_pages": "swap",
    "socket_fragments": "page_frags",
    "unix_socket_pages": "page_frags",
    "task_fragments": "page_frags",
}
ADDRESSES = {
    "ring_buffer_pages": "ftrace",
    "perf.perf_pages": "perf",
    "virtqueue_rings": "virtqueues",
    "hash_tables": "hash_tables",
    "vmcoreinfo_pages": "vmcoreinfo",
    "large_kmallocs": "large_kmallocs",
}
PIPES = {"pipe.pipe_pages": "pipes", "pipe.spare_pages": "pipes"}


class Read:
    """
    Owners, by the name of their reader.

    :ivar pfns: page frames of each
    :ivar broken: readers that meet memory that is not in the image
    :ivar asked: what each was asked for, but for the image and the coverage
    """

    def __init__(self) -> None:
        self.pfns: dict[str, list[int]] = {}
        self.broken: set[str] = set()
        self.asked: dict[str, tuple[Any, ...]] = {}
        self.coverage: defaultdict[str, Coverage] = defaultdict(Coverage)

    def reader(self, name: str, subject: str) -> Any:
        def read(image: Any, *args: Any) -> Iterator[int]:
            assert image is IMAGE
            assert args[-1] is self.coverage[subject]
            self.asked[name] = args[:-1]
            is_page = name in PAGES or name in PIPES
            for pfn in self.pfns.get(name, ()):
                yield FRAMES.page(pfn) if is_page else FRAMES.direct_map + pfn * 4096 + 8
            if name in self.broken:
                raise FaultError("not in the image", 0x1230)

        return read

    def find(self, in_slabs: SlabOwners | None = None) -> dict[int, str]:
        return UnmarkedOwners(IMAGE, in_slabs or SlabOwners(), self.coverage).find()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    found = Read()
    monkeypatch.setattr(module, "mem_map", lambda _: FRAMES)
    monkeypatch.setattr(module, "memory_map_end", lambda _: END)
    marks(monkeypatch, False)
    for name, subject in (PAGES | ADDRESSES | PIPES).items():
        where: Any = module
        *others, last = name.split(".")
        for other in others:
            where = getattr(where, other)
        monkeypatch.setattr(where, last, found.reader(name, subject))
    return found


def marks(monkeypatch: pytest.MonkeyPatch, value: bool) -> None:
    """Choose whether the kernel marks large kmallocs."""
    layout = SimpleNamespace(has_large_kmalloc=value)
    monkeypatch.setattr(module, "page_layout", lambda _: layout)


def test_kinds(read: Read) -> None:
    """One page frame of each owner."""
    names = [*PIPES, *PAGES, *ADDRESSES]
    read.pfns = {name: [number] for number, name in enumerate(names, 10)}
    assert read.find() == dict(
        enumerate(
            [
                *("pipe", "pipe", "swap_cgroup", "page_frag", "page_frag", "page_frag"),
                *("trace", "perf", "virtqueue", "hash_table", "vmcoreinfo", "large_kmalloc"),
            ],
            10,
        )
    )
    assert read.coverage["owners"].unreadable == 0


def test_owners_of_owners(read: Read) -> None:
    """Files and sockets that were found in slabs own pages: of pipes, of both sorts."""
    files = {"pipefifo_fops": {1, 2}, "pipeanon_fops": {3}, "perf_fops": {4}}
    read.find(SlabOwners({5, 6}, files))
    assert read.asked["pipe.pipe_pages"] == read.asked["pipe.spare_pages"] == ({1, 2, 3},)
    assert read.asked["perf.perf_pages"] == ({4},)
    assert read.asked["socket_fragments"] == ({5, 6},)
    read.find(SlabOwners())
    assert read.asked["pipe.pipe_pages"] == read.asked["perf.perf_pages"] == (set(),)


def test_large_kmallocs_that_are_marked(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found page by page."""
    marks(monkeypatch, True)
    read.pfns = {"large_kmallocs": [10]}
    assert read.find() == {}


def test_addresses_of_other_memory(read: Read) -> None:
    """Tables may be in vmalloc areas. They are in no page frame of the direct map."""
    read.pfns = {"hash_tables": [-1, 0, END - 1, END]}
    assert read.find() == {0: "hash_table", END - 1: "hash_table"}


@pytest.mark.parametrize("name", ["pipe.pipe_pages", "ring_buffer_pages"])
def test_what_can_be_read_of_an_owner_counts(read: Read, name: str) -> None:
    read.pfns, read.broken = {name: [10, 11], "hash_tables": [20]}, {name}
    kind = "pipe" if name == "pipe.pipe_pages" else "trace"
    assert read.find() == {10: kind, 11: kind, 20: "hash_table"}
    (missed,) = read.coverage["owners"].examples
    assert (missed.what, missed.address) == ("owner of pages", 0x1230)
