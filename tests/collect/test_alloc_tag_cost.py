# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The memory that profiling takes, part by part.

``tests/views/test_view_allocinfo.py`` compares it with the log of kernels that profile.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from drgn import FaultError

from memcg_inspect.collect import alloc_tag_cost as module
from memcg_inspect.collect.alloc_tag_cost import Cost, read_costs, total_memory
from memcg_inspect.linux.mm.mm_types_orders import WrongOrder
from memcg_inspect.model import Coverage

#: ``PAGE_EXT_INVALID``
INVALID = 1


class Made:
    """
    What profiling has made of a machine with three CPUs.

    :ivar sections: ``page_ext`` of each section of page frames
    :ivar page_ext: bytes of a tag in ``struct page_ext``
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sections = [0x1000, 0, 0x2000 | INVALID, 0x3000]
        self.page_ext = 16
        self.lost: FaultError | None = None
        self.coverage: dict[str, Coverage] = {}
        self.image: Any = SimpleNamespace(
            prog="prog",
            type={"struct alloc_tag_counters": 16, "struct mem_section": 32}.__getitem__,
            memory=SimpleNamespace(word_size=8, word_at=self._word_at),
        )
        sites = {n: SimpleNamespace(counters=at) for n, at in enumerate((0x10, 0x20, 0, 0x10))}
        found: dict[str, Any] = {
            "read_call_sites": self._call_sites(sites),
            "tag_ranges": lambda image, coverage: [(0x100, 0x160), (0x900, 0x940)],
            "possible_cpus": lambda _: (0, 1, 2),
            "sizeof": lambda size: size,
            "offsetof": lambda of, member: {(32, "page_ext"): 24}[of, member],
            "page_ext_bytes": lambda _: self.page_ext,
            "section_nr_to_pfn": lambda prog, number: 1000 * number,
            "present_sections": lambda _: range(len(self.sections)),
            "scan_pages": lambda _: self._pieces(),
            "miss_lost_pages": lambda _, pages: pages.miss("memory map of a zone", 0x900, "why"),
            "SlabReader": lambda _: self._slabs(),
            "PercpuReader": lambda _: self._percpu(),
            "totalram_pages": {"prog": 250}.__getitem__,
            "mem_map": lambda _: SimpleNamespace(page_shift=12),
        }
        for name, value in found.items():
            monkeypatch.setattr(module, name, value)

    def _call_sites(self, sites: Any) -> Any:
        def read(image: Any, coverage: Coverage) -> Any:
            coverage.read = 5
            return sites

        return read

    def _word_at(self, section: int, offset: int) -> int:
        assert offset == 24
        if self.lost is not None and section == 3:
            raise self.lost
        return self.sections[section]

    def _pieces(self) -> Iterator[Any]:
        wrong = [
            WrongOrder(page, 1, 35, "it is damaged", kind)
            for page, kind in ((0x740, "slab"), (0x780, "kmem"), (0x7C0, None))
        ]
        yield SimpleNamespace(
            pages=64, unreadable=None, slabs=["inside", "none", "lost"], wrong=wrong
        )
        yield SimpleNamespace(pages=0, unreadable=0x700, slabs=[], wrong=[])
        yield SimpleNamespace(
            pages=32, unreadable=None, slabs=["apart", "inside", "apart"], wrong=[]
        )

    def _slabs(self) -> Any:
        objects = {"inside": 7, "none": 100, "apart": 30}
        return SimpleNamespace(
            slab=lambda name: (
                SimpleNamespace(name=name, objects=objects[name]) if name in objects else None
            ),
            codetags=lambda slab: None if slab.name == "none" else slab.name,
            page_of=lambda slab, vector: 0x5000 if vector == "apart" else None,
            coverage=Coverage(3),
        )

    def _percpu(self) -> Any:
        chunks = [SimpleNamespace(vector=v, number=n) for v, n in ((0x1, 40), (0, 500), (0x2, 2))]
        return SimpleNamespace(
            chunks=lambda: chunks, units=lambda chunk: chunk.number, coverage=Coverage(4)
        )

    def costs(self) -> list[Cost]:
        self.coverage = {}
        return read_costs(self.image, self.coverage)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


def test_parts(made: Made) -> None:
    """Tags may share counters, or have none, and a section may have no ``page_ext``."""
    assert made.costs() == [
        Cost("tags", 4, 0x60 + 0x40),
        Cost("counters", 2, 2 * 16 * 3),
        Cost("page_ext", 2000, 2000 * 16),
        Cost("slab_exts", 60, 60 * 8),
        Cost("slab_exts_inside", 14, 14 * 8),
        Cost("percpu_exts", 42, 42 * 8),
    ]
    assert {subject: part.read for subject, part in made.coverage.items()} == {
        "call_sites": 5,
        "sections": 4,
        "pages": 96,
        "slab": 3,
        "percpu": 4,
    }
    assert [(missed.what, missed.address) for missed in made.coverage["pages"].examples] == [
        ("struct pages", 0x700),
        ("order of a compound page", 0x740),
        ("memory map of a zone", 0x900),
    ]
    pages, order, lost = (missed.reason for missed in made.coverage["pages"].examples)
    assert order == WrongOrder(0x740, 1, 35, "it is damaged", "slab").reason
    assert (pages, lost) == ("not in the image", "why")
    assert made.coverage["sections"].unreadable == 0


def test_sections_that_are_not_in_the_image(made: Made) -> None:
    """Those before count."""
    made.lost = FaultError("not in the image", 0x1230)
    assert made.costs()[2] == Cost("page_ext", 1000, 16000)
    (missed,) = made.coverage["sections"].examples
    assert (missed.what, missed.address) == ("sections of page frames", 0x1230)


def test_tags_in_flags_of_pages(made: Made) -> None:
    """Then they take no memory, and no section is read."""
    made.page_ext = 0
    assert made.costs()[2] == Cost("page_ext", 0, 0)
    assert made.coverage["sections"].read == 0


def test_the_memory_of_the_machine(made: Made) -> None:
    assert total_memory(made.image) == 250 * 4096
