# SPDX-License-Identifier: LGPL-2.1-or-later
"""Damaged lists of free pages, on a machine that is stopped and on one that runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from drgn import Object, Program, offsetof
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.list import list_for_each
from drgn.helpers.linux.mmzone import for_each_online_pgdat
from drgn.helpers.linux.percpu import per_cpu_ptr
from drgn.helpers.linux.slab import for_each_slab_cache, slab_cache_for_each_allocated_object
from support.guests import DEBIAN_KERNELS, Lab
from support.planting import Overlay, Write

from memcg_inspect.image.image import Image
from memcg_inspect.views.pages import pages

pytestmark = pytest.mark.image

LIST_POISON1 = 0xDEAD000000000100


def place(thing: Object) -> int:
    assert thing.address_ is not None
    return int(thing.address_)


def long_lists(prog: Program) -> Iterator[list[int]]:
    """Yield the links of lists of free pages of CPUs that have at least three."""
    for pgdat in for_each_online_pgdat(prog):
        for zone in pgdat.node_zones:
            for cpu in for_each_possible_cpu(prog) if zone.present_pages else ():
                for head in per_cpu_ptr(zone.per_cpu_pageset, cpu).lists:
                    links = [link.value_() for link in list_for_each(head.address_of_())]
                    if len(links) > 2:
                        yield links


def link_of_slab(prog: Program) -> int:
    """Return the address of ``page->lru`` of a page with slab objects."""
    cache = max(for_each_slab_cache(prog), key=lambda found: int(found.size))
    obj = next(iter(slab_cache_for_each_allocated_object(cache, "void")))
    page = prog["vmemmap"] + (obj.value_() - prog["page_offset_base"].value_() >> 12)
    return int(page.value_()) + offsetof(prog.type("struct page"), "lru")


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("kernel", [DEBIAN_KERNELS[0], DEBIAN_KERNELS[-1]])
def test_damaged_links(lab: Lab, monkeypatch: pytest.MonkeyPatch, kernel: str, runs: bool) -> None:
    """NULL, a cycle, the middle of a page, poison, a page in use: each list is reported."""
    prog = lab.image(kernel, "4", "mixed").own_program()
    lists = long_lists(prog)
    writes, wrong = [], set()
    for to in (0, None, 8, LIST_POISON1, link_of_slab(prog)):
        first, second, third, *_ = next(lists)
        to = {None: first, 8: third + 8}.get(to, to)
        writes.append(Write(second, to.to_bytes(8, "little")))
        wrong.add(to)
    zone = next(iter(for_each_online_pgdat(prog))).node_zones[1]
    if zone.type_.has_member("trylock_free_pages"):
        writes.append(Write(place(zone.trylock_free_pages), (0x5000).to_bytes(8, "little")))
        wrong.add(0x5000)
    image = Image(prog)
    before = pages(image).coverage["free_lists"]
    Overlay(prog).write(tuple(writes))
    monkeypatch.setattr(Image, "is_moving", runs)
    answer = pages(Image(prog))
    after = answer.coverage["free_lists"]
    assert before.unreadable == 0
    assert {example.address for example in after.examples} == wrong
    assert (after.read, after.unreadable) == (before.read - 5, len(wrong))
    # Pages of lists that are damaged are unknown.
    assert any("The kernel ran while" in note for note in answer.notes) == runs
