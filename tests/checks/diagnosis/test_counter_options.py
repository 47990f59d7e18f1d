# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which wrong counters explain one row that differs, and what else they change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support import made_rows
from support.made import OBJCG_B, ROOT, A, B, features, snapshot
from support.made_rows import Short, key, shown, view

from memcg_inspect.checks.diagnosis.cause import Hypothesis
from memcg_inspect.checks.diagnosis.registry import CAUSES
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import CssRefs, Nodes
from memcg_inspect.model_kernel import LocalItems

SLAB, STACK, TABLE = "NR_SLAB_RECLAIMABLE_B", "NR_KERNEL_STACK_KB", "NR_PAGETABLE"
FILE, SHMEM = "NR_INACTIVE_FILE", "NR_SHMEM"
PAGE = 4096


def kernel(**more: Any) -> Snapshot:
    lruvec = (SLAB, "NR_SLAB_UNRECLAIMABLE_B", STACK, TABLE, FILE)
    known = {"lruvec_items": lruvec, "node_items": (FILE,), "has_local": True}
    more.setdefault("all_nodes", Nodes({FILE: 0}))
    return snapshot(features=features(*lruvec[2:], **known), **more)


def options(
    off: dict[Short, int], exact: Sequence[Short] = (), made: Snapshot | None = None
) -> list[Hypothesis]:
    """Return all faults that explain the first of some rows that differ."""
    return made_rows.options(kernel() if made is None else made, off, exact)


def of(cause: str, some: Sequence[Hypothesis]) -> list[tuple[str, int | None, int]]:
    """Return place, node and amount of the faults of one kind."""
    return [(h.place, h.nid, h.amount) for h in some if h.cause == cause]


def effects(cause: str, some: Sequence[Hypothesis]) -> list[dict[Short, int]]:
    return [shown(h.signature) for h in some if h.cause == cause]


PLACES = ("cpu", "folded", "handed up")


def test_a_counter_can_be_wrong_in_three_places() -> None:
    row = ("kernel_stack", STACK, A, 1)
    found = options({row: 8})
    assert of("counter", found) == [(place, 1, 8) for place in PLACES]
    assert {(h.item, h.unit, h.memcgs, h.objcgs) for h in found if h.cause == "counter"} == {
        (STACK, "KiB", (A,), ())
    }
    assert effects("counter", found)[0] == {row: 8, ("page_levels", STACK, A): -8}


def test_a_local_counter_is_compared_with_that_of_its_memcg() -> None:
    found = options({("local", STACK, A, 1): 8})
    assert of("counter", found) == [(place, 1, -8) for place in PLACES]


def test_of_a_level_the_memcg_or_its_nodes_may_be_wrong() -> None:
    off = {("page_levels", STACK, A): 8}
    alone = options(off)
    # No row shows the node.
    assert of("counter", alone) == [
        *((place, None, 8) for place in PLACES),
        *((f"{place} of a node", None, -8) for place in PLACES),
    ]
    assert options(off, made=kernel(nodes=(0,))) == alone
    shown_by = options(
        {**off, ("kernel_stack", STACK, A, 1): -8, ("kernel_stack", STACK, A, 0): 4,
         ("kernel_stack", TABLE, A, 2): 4, ("local", STACK, B, 3): 4}
    )  # fmt: skip
    assert sorted(of("counter", shown_by)[3:]) == sorted(
        (place, nid, -8) for nid in (0, 1) for place in PLACES
    )
    for identity in ("slab", "pagetable", "vmalloc", "user_pages", "node_levels", "local"):
        for memcg in (A, None):
            known = options({**off, (identity, STACK, memcg, 1): -8})
            assert of("counter", known)[3:] == [(place, 1, -8) for place in PLACES]


def test_a_row_of_no_memcg_is_of_no_counter_of_a_memcg() -> None:
    for row in (("kernel_stack", STACK, None, 1), ("hierarchy", STACK, None, 1)):
        assert options({row: 8}) == []
    for identity in ("usage", "local", "local_fold", "lru", "sock", "percpu"):
        assert options({(identity, "x", None, 1): 8}) == []
    assert options({("objcg_bytes", "bytes of whole pages", None, 0, 0xB0): 8}) == []
    assert of("stock-bytes", options({("objcg_bytes", "x", B, 0, None): 8})) == []


def test_a_charge_may_be_counted_wrong_on_both_levels() -> None:
    row = ("kernel_stack", STACK, A, 1)
    exact = [("hierarchy", STACK, m, *nid) for m in (ROOT, A) for nid in ((), (1,))]
    found = options({row: 8}, exact)
    assert of("counted-wrong", found) == [("cpu", 1, 8), ("folded", 1, 8)]
    on_cpu, folded = effects("counted-wrong", found)
    assert on_cpu == {row: 8, **dict.fromkeys(exact, 8)}
    assert folded == {
        row: 8,
        ("hierarchy", STACK, A): 8,
        ("hierarchy", STACK, A, 1): 8,
    }
    assert of("counted-wrong", options({("hierarchy", STACK, A): 8})) == []
    assert len(of("counted-wrong", options({("hierarchy", STACK, A, 1): 8}))) == 2


def test_the_sum_of_all_memcgs_on_a_node_shows_the_memcg_that_is_wrong() -> None:
    row = ("node_levels", FILE, None, 1)
    found = options({row: -8, ("page_levels", FILE, A): -8, ("page_levels", STACK, B): -8})
    assert of("counter", found) == [(place, 1, 8) for place in PLACES]
    assert {h.memcgs for h in found if h.cause == "counter"} == {(A,)}
    assert of("counter", options({row: -8, ("levels", FILE, A): -8})) == []
    # File pages are compared for all nodes together.
    pages = ("node_levels", "NR_FILE_PAGES")
    found = options({pages: -8, ("page_levels", "NR_FILE_PAGES", A): -8})
    assert of("counter", found) == [(place, nid, 8) for nid in (0, 1) for place in PLACES]


def test_the_sum_of_all_memcgs_may_have_a_charge_that_was_counted_wrong() -> None:
    found = options({("node_levels", FILE, None, 1): -8})
    [wrong] = [h for h in found if h.cause == "counted-wrong"]
    assert (wrong.memcgs, wrong.nid, wrong.item, wrong.amount) == ((), 1, FILE, 8)
    assert (wrong.unit, shown(wrong.signature)) == ("pages", {("node_levels", FILE, None, 1): -8})


def test_a_counter_of_a_node() -> None:
    row, totals = ("node_levels", FILE, None, 1), ("node_totals", FILE)
    found = options({row: -8})
    assert of("node-counter", found) == [
        ("a CPU's changes", 1, -8),
        ("the value of the node", 1, -8),
    ]
    assert effects("node-counter", found) == [{row: -8}, {row: -8, totals: 8}]
    assert {(h.memcgs, h.objcgs, h.item, h.unit) for h in found if h.cause == "node-counter"} == {
        ((), (), FILE, "pages")
    }


@pytest.mark.parametrize(
    ("identity", "item"),
    [
        ("node_slab", SLAB),
        ("node_stack", STACK),
        ("node_pagetable", TABLE),
        ("node_vmalloc", "NR_VMALLOC"),
    ],
)
def test_rows_that_compare_a_counter_of_a_node(identity: str, item: str) -> None:
    unit: Any = "KiB" if item == STACK else "pages"
    one = key(identity, item, None, 1)._replace(unit=unit)
    rows = view(kernel(), {}, [])
    rows = type(rows)(rows.differences, {one: -8, one._replace(nid=0): 3})
    [cause] = [cause for cause in CAUSES if cause.name == "node-counter"]
    assert identity in cause.rows
    first, second = cause.options(rows, one, -8)
    assert first.signature.rows == {one: -8}
    assert (first.unit, first.nid) == (unit, 1)
    assert len(second.signature.rows) == 2
    assert list(cause.options(rows, one._replace(memcg=A), -8)) == []
    # The sum of the nodes is off by as much as the counter of one of them.
    totals = one._replace(identity="node_totals", nid=None)
    rows = type(rows)(rows.differences, {totals: 8, one: -8})
    _, of_node = cause.options(rows, totals, 8)
    assert (of_node.nid, of_node.signature.rows) == (1, {totals: 8, one: -8})


def test_a_kernel_without_totals_has_no_row_of_them() -> None:
    row = ("node_levels", FILE, None, 1)
    found = options({row: -8}, made=kernel(all_nodes=Nodes()))
    assert effects("node-counter", found) == [{row: -8}]


def test_a_counter_of_a_node_that_is_also_in_others() -> None:
    row, pages = ("node_levels", "NR_SWAPCACHE", None, 1), ("node_levels", "NR_FILE_PAGES")
    found = options({row: -8}, [pages])
    assert effects("node-counter", found)[0] == {row: -8, pages: 8}
    other = options({("node_levels", FILE, None, 1): -8}, [pages])
    assert effects("node-counter", other)[0] == {("node_levels", FILE, None, 1): -8}


def test_the_total_of_all_nodes() -> None:
    totals, row = ("node_totals", FILE), ("node_levels", FILE, None, 1)
    found = options({totals: 8, row: -8, ("node_levels", SHMEM, None, 0): 5})
    assert of("node-counter", found) == [
        ("the total of all nodes", None, 8),
        ("the value of the node", 1, -8),
    ]
    assert effects("node-counter", found) == [{totals: 8}, {totals: 8, row: -8}]
    # No row shows the node.
    alone = options({totals: 8})
    assert of("node-counter", alone) == [
        ("the total of all nodes", None, 8),
        ("the value of the node", None, -8),
    ]


def test_a_local_counter_with_and_without_what_was_folded() -> None:
    local, fold = ("local", FILE, A, 1), ("local_fold", FILE, A, 1)
    found = options({local: 8, fold: 8})
    assert of("local-counter", found) == [("local", 1, 8), ("local and local_fold", 1, 8)]
    assert effects("local-counter", found) == [{local: 8}, {local: 8, fold: 8}]
    found = options({fold: 8, local: 8})
    assert of("local-counter", found) == [("local_fold", 1, 8), ("local and local_fold", 1, 8)]
    # Without a row of `local`, it is not known that the kernel keeps it.
    assert of("local-counter", options({fold: 8})) == [("local_fold", 1, 8)]
    assert len(of("local-counter", options({fold: 8}, [local]))) == 2
    assert len(of("local-counter", options({local: 8}))) == 2


@pytest.mark.parametrize("identity", ["usage", "kmem_usage", "swap_usage", "tcpmem"])
def test_a_page_counter_of_one_memcg_or_of_all_above_it(identity: str) -> None:
    item = "memory.usage"
    row, above = (identity, item, B), (identity, item, A)
    found = options({row: 8}, [above])
    assert of("page-counter", found) == [("", None, 8), ("and of all its ancestors", None, 8)]
    assert effects("page-counter", found) == [{row: 8, above: -8}, {row: 8}]


def test_pages_that_were_charged_in_advance() -> None:
    row = ("usage", "memory.usage", B)
    found = options({row: 8})
    assert of("charge-stock", found) == [("", None, -8)]
    assert effects("charge-stock", found) == [{row: 8}]
    assert [(h.item, h.unit) for h in found if h.cause == "charge-stock"] == [("nr_pages", "pages")]


def test_unused_bytes_are_known_modulo_a_page() -> None:
    row = ("objcg_bytes", "bytes of whole pages", B, 0, OBJCG_B)
    found = [h for h in options({row: 100}) if h.cause == "stock-bytes"]
    assert [h.amount for h in found] == [-100, PAGE - 100, -PAGE - 100]
    assert [h.signature.pools for h in found] == [
        {(B, None): 100},
        {(B, None): 100 - PAGE},
        {(B, None): 100 + PAGE},
    ]
    assert {(h.memcgs, h.objcgs, h.nid, h.item, h.unit) for h in found} == {
        ((B,), (OBJCG_B,), 0, "nr_bytes", "bytes")
    }
    assert all(shown(h.signature) == {row: 100} for h in found)


def keeping_local(*items: str) -> Snapshot:
    """Return a kernel that gives these local counters of a removed memcg to its parent."""
    made = kernel()
    local = LocalItems(frozenset(items), frozenset(items))
    return replace(made, features=replace(made.features, local=local))


def test_a_local_counter_that_has_no_row_may_be_wrong() -> None:
    """It has none if it is 0 on both sides."""
    local, fold = key("local", FILE, A, 1), key("local_fold", FILE, A, 1)
    [cause] = [cause for cause in CAUSES if cause.name == "local-counter"]
    rows = view(keeping_local(FILE), {("local_fold", FILE, A, 1): 8})
    rows = type(rows)(rows.differences, {fold: 8, local: 8})
    assert [h.signature.rows for h in cause.options(rows, fold, 8)] == [
        {fold: 8},
        {fold: 8, local: 8},
    ]


def test_a_kernel_without_local_counters_has_none_of_cpus() -> None:
    made = kernel()
    made = replace(made, features=replace(made.features, has_local=False))
    assert of("local-counter", options({("local", FILE, A, 1): 8}, made=made)) == [("local", 1, 8)]


def test_slab_bytes_of_a_stock() -> None:
    row = ("slab", SLAB, B, 0)
    above = [("hierarchy", SLAB, B), ("hierarchy", SLAB, B, 0)]
    # They are not folded yet, so no local counter has them.
    found = options({row: 8}, [*above, ("local", SLAB, B, 0)], keeping_local(SLAB))
    assert of("stock-slab-bytes", found) == [("", 0, 8)]
    # The counter of the memcg with it, so the levels agree.
    assert effects("stock-slab-bytes", found) == [
        {row: 8, ("hierarchy", SLAB, B): 8, ("hierarchy", SLAB, B, 0): 8}
    ]


@pytest.mark.parametrize("identity", ["references", "css_refs", "id_refs"])
@pytest.mark.parametrize(("amount", "cause"), [(3, "leaked"), (-1, "lost"), (1, "leaked")])
def test_references_are_leaked_or_lost(identity: str, amount: int, cause: str) -> None:
    row = (identity, "refcnt", B, 0, OBJCG_B)
    [found] = options({row: amount})
    assert (found.cause, found.amount, found.unit) == (f"reference-{cause}", amount, "references")
    assert (found.memcgs, found.objcgs, found.nid, found.item) == ((B,), (OBJCG_B,), 0, "refcnt")
    assert shown(found.signature) == {row: amount}
    [found] = options({(identity, "refcnt"): amount})
    assert (found.memcgs, found.objcgs, found.nid) == ((), (), None)


@pytest.mark.parametrize(
    ("refs", "amount", "held"),
    [
        (3, 2, 0),  # one of the holders is left
        (3, 3, 1),  # there would be none
        (1, 1, 1),
        (0, -2, -1),
        (2, -2, 0),
    ],
)
def test_references_to_an_id_hold_one_to_the_memcg(refs: int, amount: int, held: int) -> None:
    """See mem_cgroup_id_get_online() and mem_cgroup_id_put_many()."""
    css = {B: CssRefs(9, 77, refs, True, 1)}
    row, of_css = ("id_refs", "id.ref", B), ("css_refs", "css.refcnt", B)
    made = replace(kernel(), css=css)
    [found] = options({row: amount}, [of_css], made)
    assert shown(found.signature) == {row: amount, **({of_css: -held} if held else {})}
    [alone] = options({row: amount}, made=made)
    assert shown(alone.signature) == {row: amount}
    [other] = options({("references", "id.ref", B): amount}, [of_css], made)
    assert shown(other.signature) == {("references", "id.ref", B): amount}


def test_the_size_of_a_list() -> None:
    row = ("lru", "LIST", B, 0)
    found = options({row: 8})
    assert of("lru-size", found) == [("", 0, 8)]
    assert effects("lru-size", found) == [{row: 8}]


def test_a_cached_stack_is_in_the_counter_of_its_node_or_not() -> None:
    row, of_node = ("cached_stacks", "cached_stacks", None, 1), ("node_stack", STACK, None, 1)
    found = options({row: 4}, [of_node])
    assert of("cached-stack", found) == [("", 1, 4), ("", 1, 4)]
    assert effects("cached-stack", found) == [{row: 4, of_node: 16}, {row: 4}]
    assert {(h.memcgs, h.objcgs, h.item, h.unit) for h in found} == {
        ((), (), "cached_stacks", "pages")
    }
    assert effects("cached-stack", options({row: 4})) == [{row: 4}]


def test_a_call_site() -> None:
    row = ("alloc_tags", "fs/inode.c:1 f")
    [found] = options({row: 64})
    assert (found.cause, found.item, found.amount, found.unit) == (
        *("call-site", "fs/inode.c:1 f"),
        *(64, "bytes"),
    )
    assert (found.memcgs, found.objcgs, found.nid) == ((), (), None)
    assert shown(found.signature) == {row: 64}
