# SPDX-License-Identifier: LGPL-2.1-or-later
"""``stock`` is compared with a plain walk of the per-CPU variables, and with its bounds."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import pytest
from drgn import FaultError, Object, Program, TypeKind
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.slab import for_each_slab_cache
from labkit import seeds
from support.guests import BUILT_KERNELS, KERNELS, PERNODE_KERNELS, GuestImage, Lab
from support.planting import Overlay, change

from memcg_inspect.collect import audit
from memcg_inspect.image.image import image_of
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.linux.mm import memcontrol_stock
from memcg_inspect.tables import Answer, NotRead
from memcg_inspect.views.stock import stock

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]

CPUS, PAGE = 4, 4096
ALL = (*KERNELS, *PERNODE_KERNELS)
#: How images are frozen, and of which workload.
AT_REST, BUSY = {"workload": "mixed"}, {"workload": "churn", "freeze": "busy", "seed": 1}


def rows(answer: Answer, table: int) -> list[dict[str, object]]:
    return [answer.tables[table].values(row) for row in answer.tables[table].rows]


def plain_pages(prog: Program, cpu: int) -> dict[int, tuple[int, int]]:
    """Return memcg and bytes of each slot in use of a charge stock."""
    held = per_cpu(prog["memcg_stock"], cpu)
    try:
        slots = [(held.cached[i], held.nr_pages[i]) for i in range(len(held.cached))]
    except TypeError:  # one pointer
        slots = [(held.cached, held.nr_pages)]
    return {
        i: (memcg.value_(), pages.value_() * PAGE)
        for i, (memcg, pages) in enumerate(slots)
        if memcg and pages
    }


def plain_bytes(prog: Program, cpu: int) -> dict[int, tuple[int, ...]]:
    """Return obj_cgroup, bytes, node and bytes of both kinds of slab memory of each slot."""
    try:
        held = per_cpu(prog["obj_stock"], cpu)
    except KeyError:
        held = per_cpu(prog["memcg_stock"], cpu)
    slab = (held.nr_slab_reclaimable_b.value_(), held.nr_slab_unreclaimable_b.value_())
    if hasattr(held, "cached_objcg"):
        if not held.cached_objcg:
            return {}
        nid = held.cached_pgdat.node_id.value_() if held.cached_pgdat else -1
        return {0: (held.cached_objcg.value_(), held.nr_bytes.value_(), nid, *slab)}
    found: dict[int, tuple[int, ...]] = {}
    for i in range(len(held.cached)):
        if held.cached[i]:
            here = held.index.value_() == i
            nid = held.node_id.value_() if here else -1
            part = slab if here else (0, 0)
            found[i] = (held.cached[i].value_(), held.nr_bytes[i].value_(), nid, *part)
    return found


def with_stocks(image: GuestImage) -> Program:
    """
    Return a program of an image in which both stocks of CPU 0 are in use.

    All may have been drained when the guest was stopped. The first slots get a page of the root,
    and some bytes of an obj_cgroup.
    """
    prog = image.own_program()
    pages = objects = per_cpu(prog["memcg_stock"], 0)
    with suppress(KeyError):
        objects = per_cpu(prog["obj_stock"], 0)
    has_one = hasattr(objects, "cached_objcg")
    cached = objects.cached_objcg if has_one else objects.cached[0]
    objcg = next(row.objcg for row in image.report().rows if row.objcg)
    writes = (
        change(first(pages.cached), prog["root_mem_cgroup"].value_()),
        change(first(pages.nr_pages), 1),
        change(cached, objcg),
        change(first(objects.nr_bytes), 100),
    )
    Overlay(prog).write(writes)
    return prog


def first(slots: Object) -> Object:
    """Return the slot, or the first one of a kernel that has several."""
    return slots[0] if slots.type_.kind == TypeKind.ARRAY else slots


def program(lab: Lab, kernel: str, how: dict[str, object]) -> Program:
    """Return a program of an image, with stocks that are in use if it was stopped under load."""
    image = lab.image(kernel, "4", **how)  # type: ignore[arg-type]
    return with_stocks(image) if how is BUSY else image.program()


@pytest.mark.parametrize("how", [AT_REST, BUSY], ids=["at rest", "busy"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_stocks_are_those_of_the_cpus(lab: Lab, kernel: str, how: dict[str, object]) -> None:
    prog = program(lab, kernel, how)
    charge: dict[int, dict[int, tuple[object, ...]]] = {cpu: {} for cpu in range(CPUS)}
    objects: dict[int, dict[int, tuple[object, ...]]] = {cpu: {} for cpu in range(CPUS)}
    for row in rows(stock(image_of(prog)), 0):
        at = charge if row["stock"] == "charge" else objects
        slab = (row["reclaimable"], row["unreclaimable"])
        nid = -1 if row["node"] is None else row["node"]
        value = (
            (row["memcg_address"], row["charged"])
            if at is charge
            else (row["objcg"], row["charged"], nid, *slab)
        )
        assert row["slot"] not in at[row["cpu"]]  # type: ignore[index]
        at[row["cpu"]][row["slot"]] = value  # type: ignore[index]
    assert charge == {cpu: plain_pages(prog, cpu) for cpu in range(CPUS)}
    assert objects == {cpu: plain_bytes(prog, cpu) for cpu in range(CPUS)}
    # At rest all of them may have been drained.
    if how is BUSY:
        assert any(charge.values())
        assert any(objects.values())


@pytest.mark.parametrize("kernel", KERNELS)
def test_locks_that_do_not_tell_are_not_free(lab: Lab, kernel: str) -> None:
    prog = program(lab, kernel, BUSY)
    of_objects = [row for row in rows(stock(image_of(prog)), 0) if row["stock"] == "object"]
    assert of_objects
    for row in of_objects:
        if kernel.startswith("6."):
            assert isinstance(row["locked"], NotRead)
        else:
            lock = per_cpu(prog["obj_stock"], row["cpu"]).lock  # type: ignore[arg-type]
            assert row["locked"] is bool(lock.acquired)


@pytest.mark.parametrize("kernel", KERNELS)
def test_who_it_is_for(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    for row in rows(stock(image_of(prog)), 0):
        if row["stock"] == "object":
            # today's memcg of the obj_cgroup, or what it is removed into
            memcg = Object(prog, "struct obj_cgroup *", row["objcg"]).memcg
            lineage = set()
            while memcg:
                lineage.add(memcg.value_())
                parent = memcg.css.parent
                memcg = Object(prog, memcg.type_, parent.value_())  # css is its first member
            assert row["memcg_address"] in lineage
        assert str(row["memcg"]).startswith("/")


def expected(prog: Program, kernel: str) -> dict[str, tuple[int, int]]:
    """Return the slots of a CPU and the most that each can hold, by arithmetic."""
    largest = max(cache.size.value_() for cache in for_each_slab_cache(prog)) + 8
    if kernel.startswith("6."):
        # 32 KiB for each of four CPUs, and a pointer for each four bytes
        percpu = 32768 * CPUS + 32768 // 4 * 8
        slab = max(PAGE, largest)
        return {
            "memory.current": (1, 64 * PAGE),
            "kernel": (1, max(percpu, largest) + PAGE - 2),
            "slab_reclaimable": (1, slab),
            "slab_unreclaimable": (1, slab),
        }
    return {
        "memory.current": (7, 64 * PAGE),
        "kernel": (5, 65535),
        "slab_reclaimable": (1, 32767),
        "slab_unreclaimable": (1, 32767),
    }


@pytest.mark.parametrize("how", [AT_REST, BUSY], ids=["at rest", "busy"])
@pytest.mark.parametrize("kernel", ALL)
def test_bounds(lab: Lab, kernel: str, how: dict[str, object]) -> None:
    if kernel in PERNODE_KERNELS:
        how = AT_REST  # there is no other image of them
    prog = program(lab, kernel, how)
    answer = stock(image_of(prog))
    bounds = {str(row["counter"]): row for row in rows(answer, 1)}
    assert {c: (b["slots"], b["each"]) for c, b in bounds.items()} == expected(prog, kernel)
    held: dict[str, Counter[object]] = {counter: Counter() for counter in bounds}
    for row in rows(answer, 0):
        parts = {"kernel": row["charged"], "slab_reclaimable": row["reclaimable"],
                 "slab_unreclaimable": row["unreclaimable"]}  # fmt: skip
        if row["stock"] == "charge":
            parts = {"memory.current": row["charged"]}
        for counter, amount in parts.items():
            assert isinstance(amount, int)
            # refill_stock() adds up to as much again, and then drains the slot.
            over = 64 * PAGE if (counter, how) == ("memory.current", BUSY) else 0
            assert abs(amount) <= bounds[counter]["each"] + over  # type: ignore[operator]
            held[counter][row["cpu"]] += abs(amount)
    for counter, bound in bounds.items():
        assert bound["cpu_bound"] == bound["slots"] * bound["each"]  # type: ignore[operator]
        assert bound["bound"] == CPUS * bound["cpu_bound"]  # type: ignore[operator]
        assert bound["held"] == held[counter].total()
        over = 64 * PAGE if (counter, how) == ("memory.current", BUSY) else 0
        most = bound["cpu_bound"] + over  # type: ignore[operator]
        assert max(held[counter].values(), default=0) <= most
    assert held["kernel"].total() > 0 or how is AT_REST


@pytest.mark.parametrize("kernel", [k for k in BUILT_KERNELS if k in seeds.STOCKS])
def test_what_a_task_that_allocates_has_in_stock(kernel: str) -> None:
    """It may be in the middle of a charge. What is held back is part of the audit."""
    prog = open_program(ImageSource(str(seeds.allocating(kernel))))
    found = [row for row in rows(stock(image_of(prog)), 0) if row["memcg"] == "/objects"]
    held = {(row["objcg"], row["charged"]) for row in found if row["stock"] == "object"}
    plain = {some[:2] for cpu in range(CPUS) for some in plain_bytes(prog, cpu).values()}
    assert held
    assert held <= plain
    assert audit(image_of(prog)).verdict in ("exact", "incomplete")


def test_no_bound_without_the_caches(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    prog = lab.image("6.1", "4", "mixed").program()

    def broken(_: object, type_: str, head: Object, member: str, on_fault: object) -> list[Object]:
        on_fault(FaultError("not there", head.value_()))  # type: ignore[operator]
        return []

    monkeypatch.setattr(memcontrol_stock, "list_entries", broken)
    answer = stock(image_of(prog))
    assert not answer.is_whole
    known = {row["counter"] for row in rows(answer, 1) if not isinstance(row["bound"], NotRead)}
    assert known == {"memory.current"}
