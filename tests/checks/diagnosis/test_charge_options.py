# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which charges explain one row that differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support import made_rows
from support.made import LIMITS, ROOT, A, B, features, snapshot
from support.made_rows import Short, key, shown, view

from memcg_inspect.checks.diagnosis.cause import Hypothesis
from memcg_inspect.checks.diagnosis.registry import CAUSES
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import LruLists, Objcg

SLAB, SLAB_R = "NR_SLAB_UNRECLAIMABLE_B", "NR_SLAB_RECLAIMABLE_B"
PAGE = 4096
A0, B0, B1 = 0xA0, 0xB0, 0xB1
OBJCGS = {
    A0: Objcg(A0, A, 0, False, 0),
    B0: Objcg(B0, B, 0, False, 0, siblings=(B0, B1)),
    B1: Objcg(B1, B, 1, False, 0, siblings=(B0, B1)),
}
OF_B = ("references", "refcnt", B, 0, B0)
OF_A = ("references", "refcnt", A, 0, A0)


def kernel(*items: str, **more: Any) -> Snapshot:
    return snapshot(objcgs=OBJCGS, features=features(*items), **more)


def options(
    off: dict[Short, int], exact: Sequence[Short] = (), made: Snapshot | None = None
) -> list[Hypothesis]:
    """Return all charges that explain the first of some rows that differ."""
    some = made_rows.options(kernel() if made is None else made, off, exact)
    return [option for option in some if option.charge is not None]


def of(cause: str, some: Sequence[Hypothesis]) -> list[tuple[Any, ...]]:
    """Return kind, detail, node, bytes and number of references of the charges of one cause."""
    found = []
    for h in some:
        what = h.charge
        if h.cause == cause and what is not None:
            assert (h.nid, h.item, h.amount, h.unit) == (what.nid, what.kind, what.bytes, "bytes")
            found.append((what.kind, what.detail, what.nid, what.bytes, what.references))
    return found


CHARGES: list[tuple[str, str, int | None, int, list[tuple[Any, ...]]]] = [
    ("slab", SLAB, 0, 208, [("slab", "unreclaimable", 0, 208, 1)]),
    ("slab", SLAB_R, 1, PAGE, [("slab", "reclaimable", 1, PAGE, 1)]),
    # Pages of a large kmalloc are counted as slab memory. They hold one reference together.
    (
        *("slab", SLAB, 0, 2 * PAGE),
        [("slab", "unreclaimable", 0, 2 * PAGE, 1), ("kmem", "large_kmalloc", 0, 2 * PAGE, 1)],
    ),
    ("percpu", "MEMCG_PERCPU_B", None, 96, [("percpu", "data", None, 96, 1)]),
    ("zswap", "MEMCG_ZSWAP_B", None, 700, [("zswap", "compressed", None, 700, 1)]),
    (
        *("zswap", "MEMCG_ZSWAP_B", None, PAGE),
        [("zswap", "compressed", None, PAGE, 1), ("zswap", "incompressible", None, PAGE, 1)],
    ),
    ("zswap", "MEMCG_ZSWAPPED", None, 1, []),
    # Each page of a vmalloc area holds a reference, a block of pages holds one.
    (
        *("kernel_stack", "NR_KERNEL_STACK_KB", 0, 16),
        [("kmem", "stack", 0, 4 * PAGE, 4), ("kmem", "stack", 0, 4 * PAGE, 1)],
    ),
    ("kernel_stack", "NR_KERNEL_STACK_KB", 0, 4, [("kmem", "stack", 0, PAGE, 1)]),
    ("kernel_stack", "NR_KERNEL_STACK_KB", 0, 3, []),
    ("pagetable", "NR_PAGETABLE", 1, 1, [("kmem", "table", 1, PAGE, 1)]),
    (
        *("vmalloc", "NR_VMALLOC", 0, 2),
        [("kmem", "vmalloc", 0, 2 * PAGE, 2), ("kmem", "vmalloc", 0, 2 * PAGE, 1)],
    ),
    (
        *("kmem", "MEMCG_KMEM", None, 2),
        [("kmem", "other", None, 2 * PAGE, 2), ("kmem", "other", None, 2 * PAGE, 1)],
    ),
    ("kmem", "MEMCG_KMEM", None, 1, [("kmem", "other", None, PAGE, 1)]),
    ("lru", "LIST", 1, 3, [("lru", "LIST", 1, 3 * PAGE, 1)]),
    ("sock", "MEMCG_SOCK", None, 3, [("sock", "", None, 3 * PAGE, 1)]),
    ("usage", "memory.usage", None, 3, [("lru", "", None, 3 * PAGE, 1)]),
]


@pytest.mark.parametrize(("identity", "item", "nid", "amount", "charges"), CHARGES)
def test_charges_that_a_row_can_be_about(
    identity: str, item: str, nid: int | None, amount: int, charges: list[tuple[Any, ...]]
) -> None:
    """A block of pages whose references no row shows is as good as one page after the other."""
    row = (identity, item, B) if nid is None else (identity, item, B, nid)
    freed = options({row: amount, OF_B: 1})
    assert of("still-charged", freed) == charges
    assert of("not-counted", freed) == []
    new = options({row: -amount, OF_B: -1})
    # With its reference, or, if another fault has it, without.
    expected = []
    for charge in charges:
        if charge[0] != "lru" and charge not in expected:
            expected.append((*charge[:4], 0))
        expected.append(charge)
    assert of("not-counted", new) == expected
    assert of("still-charged", new) == of("charged-twice", new) == []


@pytest.mark.parametrize(("identity", "item", "nid", "amount", "charges"), CHARGES)
def test_a_charge_may_have_been_made_twice(
    identity: str, item: str, nid: int | None, amount: int, charges: list[tuple[Any, ...]]
) -> None:
    row = (identity, item, B) if nid is None else (identity, item, B, nid)
    found = of("charged-twice", options({row: amount, OF_B: 1}))
    assert found == [(*charge[:4], 0) for charge in charges if charge[0] != "lru"]


def test_what_was_freed_and_what_was_not_charged_are_opposite() -> None:
    row, above = ("slab", SLAB, B, 0), ("hierarchy", SLAB, ROOT, 0)
    for cause, sign in (("still-charged", 1), ("not-counted", -1)):
        found = options({row: 208 * sign, OF_B: sign}, [above])
        whole = [h for h in found if h.cause == cause and h.charge and h.charge.references]
        assert [shown(h.signature) for h in whole] == [
            {row: 208 * sign, above: 208 * sign, OF_B: sign}
        ]
        assert [h.signature.pools for h in whole] == [{(B, None): 208 * sign}]
        assert {(h.memcgs, h.objcgs) for h in found} == {((B,), (B0,))}
        # Without its reference, or twice, it is the same but for that.
        rest = [h for h in found if h.charge and not h.charge.references]
        assert [shown(h.signature) for h in rest] == [{row: 208 * sign, above: 208 * sign}]


def test_user_memory_is_compared_with_lists_if_there_are_any() -> None:
    made = kernel(lru=LruLists({}, {}, False))
    assert options({("usage", "memory.usage", B): 3}, made=made) == []


@pytest.mark.parametrize(
    ("identity", "item", "sizes"),
    [
        # Less than a pointer and that to its obj_cgroup, not aligned, or more than the kernel has.
        ("slab", SLAB_R, {12: False, 16: True, 18: False, 20: True, 8200: True, 8204: False}),
        ("percpu", "MEMCG_PERCPU_B", {2: False, 4: True, LIMITS.percpu: True,
                                      LIMITS.percpu + 4: False}),
        ("zswap", "MEMCG_ZSWAP_B", {1: True, PAGE: True, PAGE + 1: False}),
        ("sock", "MEMCG_SOCK", {1: True, 1 << 30: True}),
        ("pagetable", "NR_PAGETABLE", {1: True, LIMITS.block: True, LIMITS.block + 1: False}),
        ("lru", "LIST", {1: True, LIMITS.block: True, LIMITS.block + 1: False}),
    ],
)  # fmt: skip
def test_sizes_that_the_kernel_charges(identity: str, item: str, sizes: dict[int, bool]) -> None:
    nid = () if item.startswith("MEMCG") else (0,)
    for size, is_possible in sizes.items():
        row = (identity, item, B, *nid)
        freed, new = options({row: size, OF_B: 1}), options({row: -size, OF_B: -1})
        of_one = [h for h in (*freed, *new) if h.cause != "zswap-length"]
        alone = [h for h in of_one if h.charge and h.charge.references <= 1]
        assert bool(alone) == is_possible, size


def test_single_pages_of_one_area_are_as_many_as_their_references() -> None:
    row, pages = ("vmalloc", "NR_VMALLOC", B, 0), LIMITS.block + 1
    found = of("still-charged", options({row: pages, OF_B: 9}))
    assert list(dict.fromkeys(found)) == [
        ("kmem", "vmalloc", 0, pages * PAGE, pages),
        ("kmem", "vmalloc", 0, pages * PAGE, 9),
    ]
    # Nothing tells how many references there were.
    assert of("still-charged", options({row: pages})) == []


@pytest.mark.parametrize(
    ("references", "number"),
    [(1, None), (2, 2), (5, 5), (75, 75), (76, None), (-5, None), (0, None)],
)
def test_several_objects_have_lost_as_many_references(references: int, number: int | None) -> None:
    """Each has 16 bytes at least."""
    row = ("slab", SLAB, B, 0)
    found = [h.charge for h in options({row: 1200, OF_B: references}) if h.cause == "still-charged"]
    several = [what for what in found if what is not None and what.together]
    assert [(what.references, what.number) for what in several] == (
        [] if number is None else [(number, number)]
    )


def test_several_pages_have_a_page_each_at_least() -> None:
    row = ("pagetable", "NR_PAGETABLE", B, 0)
    for references, several in ((3, True), (4, True), (5, False)):
        found = options({row: 4, OF_B: references})
        assert any(h.charge and h.charge.together for h in found) == several


def test_several_objects_may_be_larger_together_than_one_can_be() -> None:
    row = ("slab", SLAB, B, 0)
    found = options({row: 5 * 8200, OF_B: 5})
    assert of("still-charged", found) == [("slab", "unreclaimable", 0, 5 * 8200, 5)]
    assert of("still-charged", options({row: 5 * 8200 + 4, OF_B: 5})) == []
    new = options({row: -5 * 8200, OF_B: -5})
    assert of("not-counted", new) == [("slab", "unreclaimable", 0, 5 * 8200, 5)]


def test_a_charge_that_another_memcg_has() -> None:
    was, now = ("slab", SLAB, B, 0), ("slab", SLAB, A, 0)
    for off in ({was: 208, now: -208}, {now: -208, was: 208}):
        moved = [h for h in options({**off, OF_B: 1, OF_A: -1}) if h.cause == "object-owner"]
        assert [(h.memcgs, h.objcgs) for h in moved] == [((B, A), (B0, A0))]
        assert shown(moved[0].signature) == {was: 208, now: -208, OF_B: 1, OF_A: -1}
        assert moved[0].signature.pools == {(B, None): 208, (A, None): -208}
        assert of("object-owner", moved) == [("slab", "unreclaimable", 0, 208, 1)]


def test_a_page_that_another_memcg_has() -> None:
    was, now = ("pagetable", "NR_PAGETABLE", B, 0), ("pagetable", "NR_PAGETABLE", A, 0)
    for off in ({was: 1, now: -1}, {now: -1, was: 1}):
        moved = [h for h in options({**off, OF_B: 1, OF_A: -1}) if h.cause == "object-owner"]
        assert {h.memcgs for h in moved} == {(B, A)}
        assert of("object-owner", moved) == [("kmem", "table", 0, PAGE, 1)]


def test_several_objects_that_another_memcg_has() -> None:
    off = {("slab", SLAB, B, 0): 800, ("slab", SLAB, A, 0): -800}
    found = options({**off, OF_B: 4, OF_A: -4})
    assert of("object-owner", found) == [
        ("slab", "unreclaimable", 0, 800, 1),
        ("slab", "unreclaimable", 0, 800, 4),
    ]
    # Each owner may have lost references by another fault.
    some = of("object-owner", options({**off, OF_B: 4, OF_A: -2}))
    assert [charge[-1] for charge in some] == [1, 2, 4]


def test_a_row_of_no_memcg_is_about_no_charge() -> None:
    for identity in ("slab", "percpu", "kmem", "sock", "zswap", "kernel_stack", "lru"):
        assert options({(identity, SLAB, None, 0): 208}) == []
        assert options({(identity, SLAB, None, 0): -208}) == []
    moved = options({("slab", SLAB, B, 0): 208, ("slab", SLAB, None, 0): -208, OF_B: 1})
    assert of("object-owner", moved) == []


def test_the_bytes_of_an_obj_cgroup_tell_one_fault_from_another() -> None:
    """Where two faults add to one counter, those of one are the bytes of its obj_cgroup."""
    row, percpu = ("slab", SLAB, B, 0), ("percpu", "MEMCG_PERCPU_B", B)
    of_objcg = ("objcg_bytes", "bytes of whole pages", B, 0, B0)
    zswapped = ("zswap", "MEMCG_ZSWAPPED", B)
    found = options({of_objcg: 208, row: 1000, percpu: 208, zswapped: 5, OF_B: 1})
    assert of("still-charged", found) == [("slab", "unreclaimable", 0, 208, 1)]
    stored = options({of_objcg: 208, ("zswap", "MEMCG_ZSWAP_B", B): 1000, OF_B: 1})
    assert of("still-charged", stored) == [("zswap", "compressed", None, 208, 1)]
    new = options({of_objcg: -208, row: 1000, OF_B: -1})
    assert ("slab", "unreclaimable", 0, 208, 1) in of("not-counted", new)


def test_the_length_of_a_zswap_entry() -> None:
    row, number = ("zswap", "MEMCG_ZSWAP_B", B), ("zswap", "MEMCG_ZSWAPPED", B)
    for amount in (50, -50):
        some = options({row: amount, OF_B: 1}, [number])
        [found] = [h for h in some if h.cause == "zswap-length"]
        assert (found.amount, found.memcgs, found.objcgs) == (amount, (B,), (B0,))
        assert shown(found.signature) == {row: amount}
        assert found.signature.pools == {(B, None): amount}
    assert not of("zswap-length", options({("zswap", "MEMCG_ZSWAPPED", B): 50, OF_B: 1}))
    assert not of("zswap-length", options({("zswap", "MEMCG_ZSWAP_B", None): 50, OF_B: 1}))


@pytest.mark.parametrize("amount", [1, -1, 3, -3])
def test_a_socket_that_charged_no_whole_pages(amount: int) -> None:
    row, proof = ("sock", "MEMCG_SOCK", B), ("sock_bytes", "sk_forward_alloc", B)
    usage = ("usage", "memory.usage", B)
    [cause] = [cause for cause in CAUSES if cause.name == "socket-bytes"]
    # The reference of the socket is held.
    css = ("css_refs", "css.refcnt", B)
    rows = view(kernel(), {row: amount, proof: 2}, [usage, css])
    [found] = cause.options(rows, key(*row), amount)
    assert (found.memcgs, found.nid, found.amount, found.unit) == ((B,), None, 2, "references")
    assert (found.item, found.objcgs) == ("sk_forward_alloc", ())
    assert shown(found.signature) == {proof: 2, row: amount, usage: amount}
    assert list(cause.options(rows, key("sock", "MEMCG_SOCK"), amount)) == []
    assert list(cause.options(view(kernel(), {row: amount}), key(*row), amount)) == []


def test_an_object_that_was_counted_on_another_node() -> None:
    counted, found_on = ("slab", SLAB, B, 0), ("slab", SLAB, B, 1)
    other = ("slab", SLAB_R, B, 1)
    above = [("hierarchy", SLAB, m, nid) for m in (ROOT, A, B) for nid in (0, 1)]
    off = {counted: 208, found_on: -208, other: -208}
    [wrong] = [h for h in options(off, above) if h.cause == "wrong-node"]
    assert (wrong.memcgs, wrong.nid, wrong.item, wrong.amount) == ((B,), 1, SLAB, 208)
    assert (wrong.place, wrong.objcgs, wrong.unit) == ("node 0", (), "bytes")
    expected = {counted: 208, found_on: -208}
    expected |= {row: 208 if row[3] == 0 else -208 for row in above}
    assert shown(wrong.signature) == expected
    assert wrong.signature.pools == {}
    # Nothing is on the node that counts less than it has.
    assert "wrong-node" not in {h.cause for h in options({found_on: -208, counted: 208})}
    assert "wrong-node" not in {h.cause for h in options({counted: 208, found_on: 208})}
    assert "wrong-node" not in {h.cause for h in options({counted: 208, found_on: 1})}
    # No object is of this size.
    assert "wrong-node" not in {h.cause for h in options({counted: 9000, found_on: -9000})}


def test_an_object_that_was_counted_as_another_item() -> None:
    counted, is_ = ("slab", SLAB, B, 0), ("slab", SLAB_R, B, 0)
    off = {counted: 208, is_: -208, ("slab", SLAB_R, B, 1): -208}
    [wrong] = [h for h in options(off) if h.cause == "wrong-item"]
    assert (wrong.memcgs, wrong.nid, wrong.item, wrong.amount) == ((B,), 0, SLAB_R, 208)
    assert wrong.place == SLAB
    assert shown(wrong.signature) == {counted: 208, is_: -208}
    assert wrong.charge is not None
    assert (wrong.charge.detail, wrong.charge.references) == ("reclaimable", 1)


def test_any_obj_cgroup_may_be_the_payer_if_no_row_tells() -> None:
    row = ("slab", SLAB, B, 0)
    found = options({row: 208}, [OF_B, ("references", "refcnt", B, 1, B1)])
    assert {h.objcgs for h in found if h.cause == "still-charged"} == {(B0,), (B1,)}
    sock = options({("sock", "MEMCG_SOCK", B): 3, OF_B: 1})
    assert {h.objcgs for h in sock if h.cause == "still-charged"} == {(None,)}


def by_node(off: dict[Short, int], **more: Any) -> list[tuple[tuple[int, int], ...]]:
    """Return what each node has of a percpu allocation, on a kernel that accounts by node."""
    made = replace(kernel("NR_KMEM", accounting="kmem-per-node"), **more)
    found = options(off, [OF_B, ("references", "refcnt", B, 1, B1)], made)
    several = [h for h in found if h.charge is not None and h.charge.parts]
    assert {h.cause for h in several} <= (
        {"not-counted"} if off[PERCPU] < 0 else {"still-charged", "charged-twice"}
    )
    for h in several:
        assert (h.item, h.nid, h.objcgs) == ("percpu", None, (None,))
    return list(dict.fromkeys(h.charge.parts for h in several if h.charge is not None))


PERCPU = ("percpu", "MEMCG_PERCPU_B", B)
ON_0 = ("objcg_bytes", "bytes of whole pages", B, 0, B0)
ON_1 = ("objcg_bytes", "bytes of whole pages", B, 1, B1)
PAGES_0, PAGES_1 = ("kmem", "NR_KMEM", B, 0), ("kmem", "NR_KMEM", B, 1)


def test_an_allocation_of_several_nodes_is_in_the_rows_of_their_obj_cgroups() -> None:
    assert by_node({PERCPU: 300, ON_0: 100, ON_1: 200}) == [((0, 100), (1, 200))]
    # Whole pages, and what is beyond them, which may be less.
    assert by_node({PERCPU: 8500, ON_0: 400, ON_1: -92, PAGES_0: 1, PAGES_1: 1}) == [
        ((0, PAGE + 400), (1, PAGE - 92))
    ]
    # Less than a page of each node, if no row of pages tells.
    assert by_node({PERCPU: 4104, ON_0: 100, ON_1: -92}) == [((0, 100), (1, 4004))]
    assert by_node({PERCPU: 3 * PAGE + 300, ON_0: 100, PAGES_0: 1, ON_1: 200, PAGES_1: 2}) == [
        ((0, PAGE + 100), (1, 2 * PAGE + 200))
    ]
    assert by_node({PERCPU: 300, ON_0: 1, ON_1: 299}) == [((0, 1), (1, 299))]
    assert by_node({PERCPU: -300, ON_0: -100, ON_1: -200}) == [((0, 100), (1, 200))]
    # Rows without a node are of none of them.
    of_none: dict[Short, int] = {("objcg_bytes", "bytes of whole pages", B): 50}
    assert by_node({PERCPU: 300, ON_0: 100, ON_1: 200, **of_none}) == [((0, 100), (1, 200))]
    of_none = {("kmem", "MEMCG_KMEM", B): 1}
    assert by_node({PERCPU: 300, ON_0: 100, ON_1: 200, **of_none}) == [((0, 100), (1, 200))]
    # One node has no whole page, or only whole pages.
    more = ((0, 100), (1, PAGE + 200))
    assert by_node({PERCPU: PAGE + 300, ON_0: 100, PAGES_1: 1, ON_1: 200, **of_none}) == [more]
    assert by_node({PERCPU: PAGE + 100, ON_0: 100, PAGES_1: 1}) == [((0, 100), (1, PAGE))]
    assert by_node({PERCPU: 301, ON_0: 100, ON_1: 200}) == []
    assert by_node({PERCPU: 300, ON_0: 300}) == []
    assert by_node({PERCPU: 300, ON_0: -100, ON_1: 400}) == []


def test_an_allocation_of_several_nodes_that_another_memcg_has() -> None:
    a1 = 0xA1
    objcgs = {
        **OBJCGS,
        A0: Objcg(A0, A, 0, False, 0, siblings=(A0, a1)),
        a1: Objcg(a1, A, 1, False, 0, siblings=(A0, a1)),
    }
    off: dict[Short, int] = {PERCPU: 300, ON_0: 100, ON_1: 200, ("percpu", PERCPU[1], A): -300}
    off |= {("objcg_bytes", ON_0[1], A, 0, A0): -100, ("objcg_bytes", ON_0[1], A, 1, a1): -200}
    made = replace(kernel("NR_KMEM", accounting="kmem-per-node"), objcgs=objcgs)
    found = [h for h in options(off, made=made) if h.charge is not None and h.charge.parts]
    moved = [h for h in found if h.cause == "object-owner"]
    assert {h.charge.parts for h in moved if h.charge} == {((0, 100), (1, 200))}
    # Several obj_cgroups of each memcg pay for it.
    assert {(h.memcgs, h.objcgs) for h in moved} == {((B, A), (None, None))}
    assert shown(moved[0].signature) == off


def test_a_set_without_an_obj_cgroup_of_a_node_has_paid_for_nothing_there() -> None:
    off = {PERCPU: 300, ON_0: 100, ON_1: 200}
    for siblings in ((B0,), (), (B0, 0xBAD), (B0, 0)):
        objcgs = {o: replace(objcg, siblings=siblings) for o, objcg in OBJCGS.items()}
        assert by_node(off, objcgs=objcgs) == []


def test_half_a_page_of_a_node_may_be_rounded_up_or_down() -> None:
    half = PAGE // 2
    for pages in (0, 1):
        off = {PERCPU: half + 100, ON_0: half, ON_1: 100}
        if pages:
            off[PAGES_0] = pages
        assert by_node(off) == [((0, half), (1, 100))]
    assert by_node({PERCPU: 3 * half + 100, ON_0: half, ON_1: 100, PAGES_0: 1}) == [
        ((0, 3 * half), (1, 100))
    ]
    off = {PERCPU: half + PAGE + 100, ON_0: half, ON_1: 100, PAGES_1: 1}
    for pages in ({}, {PAGES_0: 1}):
        assert by_node({**off, **pages}) == [((0, half), (1, PAGE + 100))]
    both = by_node({PERCPU: 2 * half, ON_0: half, ON_1: half})
    assert both == [((0, half), (1, half))]


def test_a_kernel_without_kernel_memory_by_node_has_no_such_allocation() -> None:
    found = options({PERCPU: 300, ON_0: 100, ON_1: 200})
    assert not [h for h in found if h.charge is not None and h.charge.parts]


def test_a_user_page_and_what_it_counts_in() -> None:
    """The counters that are off by as much as the list are those that the folio counts in."""
    off: dict[Short, int] = {
        ("lru", "LIST", B, 1): 3,
        ("user_pages", "NR_SHMEM", B, 1): 3,
        ("user_pages", "NR_FILE_PAGES", B): 3,
        ("user_pages", "NR_ANON_MAPPED", B, 0): 3,  # on another node
        ("user_pages", "NR_FILE_DIRTY", B, 1): 2,
        OF_B: 1,
    }
    made = kernel("NR_SHMEM", "NR_FILE_PAGES", "NR_ANON_MAPPED", "NR_FILE_DIRTY")
    found = [h for h in options(off, made=made) if h.cause == "still-charged"]
    assert [h.charge.states for h in found if h.charge] == [("NR_SHMEM", "NR_FILE_PAGES"), ()]
    rows = shown(found[0].signature)
    assert rows["user_pages", "NR_SHMEM", B, 1] == 3
    assert rows["user_pages", "NR_FILE_PAGES", B] == 3
    assert not {("user_pages", "NR_ANON_MAPPED", B, 0)} & rows.keys()
