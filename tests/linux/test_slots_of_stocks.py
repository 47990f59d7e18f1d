# SPDX-License-Identifier: LGPL-2.1-or-later
"""The object stock of a CPU has several slots since 7.2; the slab bytes belong to one of them."""

from __future__ import annotations

import pytest
from drgn import Object, Program, sizeof
from drgn.helpers.linux.percpu import per_cpu
from support.guests import DEBIAN_KERNELS, Lab
from support.missing_pages import excluded
from support.planting import Overlay, Write

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.memcontrol_stock import (
    obj_stock_name,
    read_charge_stocks,
    read_obj_stocks,
)
from memcg_inspect.model import ChargeStock, Coverage, ObjStock

pytestmark = [
    pytest.mark.image,
    pytest.mark.newest_kernel,
    pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:]),
]

CPUS = 4
#: Addresses of obj_cgroups, which nothing reads here
FIRST, SECOND = 0xFFFF888000111000, 0xFFFF888000222000


def put(place: Object, value: int) -> Write:
    data = (value % (1 << 8 * sizeof(place))).to_bytes(sizeof(place), "little")
    return Write(place.address_ or 0, data)


def filled(prog: Program) -> tuple[Object, tuple[Write, ...]]:
    """Return the stock of CPU 1, and what fills two of its slots. The last one has slab bytes."""
    stock = per_cpu(prog["obj_stock"], 1)
    last = len(stock.cached) - 1
    writes = [put(slot, 0) for slot in stock.cached]
    writes += [
        put(stock.cached[1], FIRST),
        put(stock.nr_bytes[1], 70),
        put(stock.cached[last], SECOND),
        put(stock.nr_bytes[last], 4095),
        put(stock.index, last),
        put(stock.node_id, 3),
        put(stock.nr_slab_reclaimable_b, -900),
        put(stock.nr_slab_unreclaimable_b, 1000),
        put(stock.lock.acquired, 1),
    ]
    return stock, tuple(writes)


def test_slots_of_objects(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").own_program()
    stock, writes = filled(prog)
    last = len(stock.cached) - 1
    before = [s for s in read_obj_stocks(image_of(prog), Coverage()) if s.cpu != 1]
    Overlay(prog).write(writes)
    coverage = Coverage()
    found = read_obj_stocks(image_of(prog), coverage)
    assert [s for s in found if s.cpu == 1] == [
        ObjStock(1, 1, FIRST, 70, None, 0, 0, True),
        ObjStock(1, last, SECOND, 4095, 3, -900, 1000, True),
    ]
    assert [s for s in found if s.cpu != 1] == before
    assert (coverage.read, coverage.unreadable) == (CPUS, 0)
    assert obj_stock_name(image_of(prog)) == "obj_stock"


def test_stocks_of_a_cpu_that_are_missing(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").own_program()
    for name in ("obj_stock", "memcg_stock"):
        stock = per_cpu(prog[name], 2)
        prog.add_memory_segment(stock.address_ or 0, sizeof(stock), excluded, False)
    objects, pages = Coverage(), Coverage()
    assert 2 not in {s.cpu for s in read_obj_stocks(image_of(prog), objects)}
    assert 2 not in {s.cpu for s in read_charge_stocks(image_of(prog), pages)}
    for coverage, what in ((objects, "object stock of CPU 2"), (pages, "charge stock of CPU 2")):
        assert (coverage.read, coverage.unreadable) == (CPUS - 1, 1)
        assert coverage.examples[0].what == what


def test_slots_of_pages(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    expected = [
        ChargeStock(cpu, memcg.value_(), int(stock.nr_pages[slot]), slot)
        for cpu in range(CPUS)
        for stock in [per_cpu(prog["memcg_stock"], cpu)]
        for slot, memcg in enumerate(stock.cached)
        if memcg
    ]
    coverage = Coverage()
    assert read_charge_stocks(image_of(prog), coverage) == expected
    assert (coverage.read, coverage.unreadable) == (CPUS, 0)
