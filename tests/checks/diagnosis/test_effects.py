# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What one fault adds to rows.

Expected values follow from mm/memcontrol.c: which counters each charge changes, and how a flush
hands them up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.made import ROOT, A, B, features, ledger, snapshot
from support.made_rows import Short, exact, shown

from memcg_inspect.checks.diagnosis.differences import Signature
from memcg_inspect.checks.diagnosis.effects import (
    Charge,
    Payer,
    counter,
    level,
    one_row,
    pool_of,
    row_of_references,
    taken_from,
    taken_from_all,
)
from memcg_inspect.checks.ledger import ChargeKind
from memcg_inspect.checks.rows import RowKey
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Objcg
from memcg_inspect.model_kernel import LocalItems

PAGE = 4096
#: obj_cgroups of B for nodes 0 and 1; two of the removed memcg, which A pays for, are left out.
B0, B1 = 0xB0, 0xB1
OBJCGS = {
    0xA1: Objcg(0xA1, A, 1, False, 0),
    B0: Objcg(B0, B, 0, False, 0, siblings=(B0, B1)),
    B1: Objcg(B1, B, 1, False, 0, siblings=(B0, B1)),
}
SLAB, SLAB_R = "NR_SLAB_UNRECLAIMABLE_B", "NR_SLAB_RECLAIMABLE_B"
STACK, TABLE, VMALLOC = "NR_KERNEL_STACK_KB", "NR_PAGETABLE", "NR_VMALLOC"
LIST = "lru_zone_size[ZONE_NORMAL][LRU_INACTIVE_FILE]"


def kernel(*items: str, **more: Any) -> Snapshot:
    """Return a kernel whose counters of nodes are these, apart from those of slabs."""
    lruvec = (SLAB, SLAB_R, *items)
    return snapshot(objcgs=OBJCGS, features=features(*items, lruvec_items=lruvec, **more))


def of_charges() -> list[Short]:
    """Return the rows of B, and of its ancestors, that charges change."""
    identities = {
        SLAB: "slab",
        SLAB_R: "slab",
        STACK: "kernel_stack",
        TABLE: "pagetable",
        VMALLOC: "vmalloc",
        "NR_KMEM": "kmem",
        "MEMCG_KMEM": "kmem",
        "MEMCG_PERCPU_B": "percpu",
        "MEMCG_ZSWAP_B": "zswap",
        "MEMCG_ZSWAPPED": "zswap",
        "MEMCG_ZSWAP_INCOMP": "zswap",
        "MEMCG_SOCK": "sock",
        "MEMCG_VMALLOC": "vmalloc",
    }
    rows: list[Short] = []
    for item, identity in identities.items():
        for nid in (None,) if item.startswith("MEMCG") else (0, 1):
            rows.append((identity, item, B, nid))
            rows += (("hierarchy", item, memcg, nid) for memcg in (ROOT, A, B))
    for memcg in (A, B):
        rows += [("usage", "memory.usage", memcg), ("kmem_usage", "kmem.usage", memcg)]
        rows += [("tcpmem", "tcpmem.usage", memcg), ("css_refs", "css.refcnt", memcg)]
    for objcg, nid in ((B0, 0), (B1, 1)):
        rows += [("references", "refcnt", B, nid, objcg)]
        rows += [("objcg_bytes", "bytes of whole pages", B, nid, objcg)]
    return rows


def in_tree(identity: str, item: str, nid: int | None, amount: int) -> dict[Short, int]:
    """Return what a counter of B adds to its own row, and to those of B with its ancestors."""
    where = () if nid is None else (nid,)
    above = {("hierarchy", item, memcg, *where): amount for memcg in (ROOT, A, B)}
    return {(identity, item, B, *where): amount} | above


USAGE = ("usage", "memory.usage", B)
KMEM_USAGE = ("kmem_usage", "kmem.usage", B)
REFERENCE = ("references", "refcnt", B, 0, B0)
BYTES = ("objcg_bytes", "bytes of whole pages", B, 0, B0)


@pytest.mark.parametrize(
    ("kind", "detail", "size", "number", "rows"),
    [
        ("slab", "unreclaimable", 200, 1, in_tree("slab", SLAB, 0, 200) | {BYTES: 200}),
        ("slab", "reclaimable", 200, 1, in_tree("slab", SLAB_R, 0, 200) | {BYTES: 200}),
        ("percpu", "data", 96, 1, in_tree("percpu", "MEMCG_PERCPU_B", None, 96) | {BYTES: 96}),
        (
            *("zswap", "compressed", 700, 2),
            in_tree("zswap", "MEMCG_ZSWAP_B", None, 700)
            | in_tree("zswap", "MEMCG_ZSWAPPED", None, 2)
            | {BYTES: 700},
        ),
        (
            *("zswap", "incompressible", PAGE, 1),
            in_tree("zswap", "MEMCG_ZSWAP_B", None, PAGE)
            | in_tree("zswap", "MEMCG_ZSWAPPED", None, 1)
            | in_tree("zswap", "MEMCG_ZSWAP_INCOMP", None, 1)
            | {BYTES: PAGE},
        ),
        (
            *("kmem", "other", 2 * PAGE, 1),
            in_tree("kmem", "MEMCG_KMEM", None, 2) | {USAGE: 2, KMEM_USAGE: 2},
        ),
        (
            *("kmem", "stack", 4 * PAGE, 1),
            in_tree("kmem", "MEMCG_KMEM", None, 4)
            | in_tree("kernel_stack", STACK, 0, 16)
            | {USAGE: 4, KMEM_USAGE: 4},
        ),
        (
            *("kmem", "table", PAGE, 1),
            in_tree("kmem", "MEMCG_KMEM", None, 1)
            | in_tree("pagetable", TABLE, 0, 1)
            | {USAGE: 1, KMEM_USAGE: 1},
        ),
        (
            *("kmem", "vmalloc", PAGE, 1),
            in_tree("kmem", "MEMCG_KMEM", None, 1)
            | in_tree("vmalloc", VMALLOC, 0, 1)
            | {USAGE: 1, KMEM_USAGE: 1},
        ),
        (
            *("kmem", "large_kmalloc", 4 * PAGE, 1),
            in_tree("kmem", "MEMCG_KMEM", None, 4)
            | in_tree("slab", SLAB, 0, 4 * PAGE)
            | {USAGE: 4, KMEM_USAGE: 4},
        ),
    ],
)
def test_a_charge(
    kind: ChargeKind, detail: str, size: int, number: int, rows: dict[Short, int]
) -> None:
    d = exact(kernel(STACK, TABLE, VMALLOC), *of_charges())
    what = Charge(kind, detail, 0, size, 1, number)
    found = taken_from(d, Payer(B, B0), what)
    assert shown(found) == rows | {REFERENCE: 1}
    assert found.pools == ({} if kind == "kmem" else {(B, None): size})
    unknown = taken_from(d, Payer(B, None), what)
    assert shown(unknown) == {row: n for row, n in rows.items() if row != BYTES}
    several = taken_from(d, Payer(B, B0), what._replace(references=5))
    assert shown(several) == rows | {REFERENCE: 5}
    part = taken_from(d, Payer(B, B0), what._replace(references=0))
    assert shown(part) == rows
    # Nor is there a row with 0: rows of references tell who has a charge.
    assert all(row.unit != "references" for row in part.rows)


def test_rows_that_are_not_there_are_not_changed() -> None:
    d = exact(kernel(), ("slab", SLAB, B, 0))
    what = Charge("slab", "unreclaimable", 0, 64)
    assert shown(taken_from(d, Payer(B, B0), what)) == {("slab", SLAB, B, 0): 64}
    assert shown(taken_from(d, Payer(B, B0), Charge("kmem", "other", 0, PAGE))) == {}


def test_a_counter_of_vmalloc_that_no_node_has() -> None:
    d = exact(kernel(STACK), *of_charges())
    found = taken_from(d, Payer(B, B0), Charge("kmem", "vmalloc", 0, PAGE))
    assert shown(found) == (
        in_tree("kmem", "MEMCG_KMEM", None, 1)
        | in_tree("vmalloc", "MEMCG_VMALLOC", None, 1)
        | {USAGE: 1, KMEM_USAGE: 1, REFERENCE: 1}
    )


def test_kernel_memory_by_node() -> None:
    made = kernel("NR_KMEM")
    d = exact(made, *of_charges())
    found = taken_from(d, Payer(B, B1), Charge("kmem", "other", 1, PAGE))
    assert shown(found) == in_tree("kmem", "NR_KMEM", 1, 1) | {
        USAGE: 1,
        KMEM_USAGE: 1,
        ("references", "refcnt", B, 1, B1): 1,
    }
    assert pool_of(d, Payer(B, B1)) == (B, 1)
    assert pool_of(d, Payer(B, None)) == (B, None)
    assert pool_of(exact(kernel()), Payer(B, B1)) == (B, None)


def test_an_allocation_that_several_nodes_pay_for() -> None:
    d = exact(kernel("NR_KMEM"), *of_charges())
    what = Charge("percpu", "data", None, 300, parts=((0, 100), (1, 200)))
    found = taken_from(d, Payer(B, B1), what)
    assert shown(found) == in_tree("percpu", "MEMCG_PERCPU_B", None, 300) | {
        BYTES: 100,
        ("objcg_bytes", "bytes of whole pages", B, 1, B1): 200,
        REFERENCE: 1,
        ("references", "refcnt", B, 1, B1): 1,
    }
    assert found.pools == {(B, 0): 100, (B, 1): 200}
    assert taken_from(d, Payer(B, None), what).pools == {(B, None): 300}


@pytest.mark.parametrize("default_hierarchy", [True, False])
def test_sockets_are_in_the_usage_of_cgroup_v2_only(default_hierarchy: bool) -> None:
    d = exact(kernel(default_hierarchy=default_hierarchy), *of_charges())
    found = taken_from(d, Payer(B, None), Charge("sock", "", None, 3 * PAGE, 2))
    assert shown(found) == in_tree("sock", "MEMCG_SOCK", None, 3) | {
        **({USAGE: 3} if default_hierarchy else {}),
        ("tcpmem", "tcpmem.usage", B): 3,
        ("css_refs", "css.refcnt", B): 2,
    }


@pytest.mark.parametrize("holds", [True, False])
def test_user_pages(holds: bool) -> None:
    d = exact(kernel(lru_holds_objcg=holds), *of_charges())
    reference = REFERENCE if holds else ("css_refs", "css.refcnt", B)
    found = taken_from(d, Payer(B, B0), Charge("lru", LIST, 0, 2 * PAGE))
    assert shown(found) == {USAGE: 2, ("lru", LIST, B, 0): 2, reference: 1}
    unlisted = taken_from(d, Payer(B, B0), Charge("lru", "", 0, 2 * PAGE))
    assert shown(unlisted) == {USAGE: 2, reference: 1}
    assert unlisted.pools == {}


def test_rows_of_references() -> None:
    d = exact(kernel(), *of_charges())
    css = RowKey("css_refs", "css.refcnt", "references", B)
    assert row_of_references(d, Payer(B, None), "sock") == css
    assert row_of_references(d, Payer(B, None), "slab") is None
    assert row_of_references(d, Payer(B, B1), "kmem") == RowKey(
        "references", "refcnt", "references", B, 1, B1
    )
    assert row_of_references(exact(kernel()), Payer(B, B1), "kmem") is None


def test_all_that_is_charged_to_an_obj_cgroup() -> None:
    charges = ledger(
        {
            (B0, "slab", "unreclaimable", 1): (600, 3),
            (B0, "kmem", "other", 0): (2 * PAGE, 1),
            (B0, "lru", LIST, 0): (PAGE, 1),
            (B0, "sock", "TCP", -1): (PAGE, 1),
            (B1, "slab", "unreclaimable", 0): (10_000, 9),
        }
    )
    d = exact(replace(kernel("NR_KMEM"), ledger=charges), *of_charges())
    found = taken_from_all(d, B0, B)
    assert shown(found) == (
        in_tree("slab", SLAB, 1, 600)
        | in_tree("kmem", "NR_KMEM", 0, 2)
        | in_tree("sock", "MEMCG_SOCK", None, 1)
        | {USAGE: 4, KMEM_USAGE: 2, ("tcpmem", "tcpmem.usage", B): 1}
    )
    assert found.pools == {(B, 0): 600}
    # What is charged to a memcg itself is in no obj_cgroup's pages.
    moved = replace(d.snapshot, ledger=ledger({(0x99, "slab", "reclaimable", 0): (8, 1)}))
    assert taken_from_all(exact(moved), 0x99, B).pools == {(B, None): 8}
    assert taken_from_all(exact(moved), B0, B) == Signature({}, {})


def levels(item: str = STACK) -> list[Short]:
    """Return the rows that compare a counter of memcgs and of node 1."""
    rows: list[Short] = [("node_levels", item, None, 1), ("node_levels", item)]
    for memcg in (ROOT, A, B):
        for nid in (None, 1):
            rows += [("hierarchy", item, memcg, nid), ("local", item, memcg, nid)]
        rows.append(("kernel_stack", item, memcg, 1))
        rows.append(("levels" if item.endswith("_B") else "page_levels", item, memcg))
    return rows


def at(place: Any, nid: int | None, item: str = STACK, memcg: int = A) -> dict[Short, int]:
    d = exact(
        kernel(
            *(STACK, "NR_INACTIVE_FILE", "NR_FILE_MAPPED", "NR_FILE_PAGES"),
            local=LocalItems(frozenset((STACK,)), frozenset((SLAB,))),
            has_local=True,
        ),
        *levels(item),
    )
    return shown(counter(d, item, memcg, nid, place, 40))


def test_changes_of_a_cpu_are_in_a_counter_and_above_it() -> None:
    assert at("cpu", 1) == {
        ("kernel_stack", STACK, A, 1): 40,
        ("page_levels", STACK, A): -40,
        **{("hierarchy", STACK, memcg, 1): 40 for memcg in (ROOT, A)},
    }
    assert at("cpu", None) == {
        ("page_levels", STACK, A): 40,
        **{("hierarchy", STACK, memcg): 40 for memcg in (ROOT, A)},
    }


def test_what_is_folded_was_handed_up_to_the_parent() -> None:
    """The parent has its own share in what its children have not."""
    assert at("folded", 1) == {
        ("kernel_stack", STACK, A, 1): 40,
        ("kernel_stack", STACK, ROOT, 1): -40,
        ("page_levels", STACK, A): -40,
        ("page_levels", STACK, ROOT): 40,
        ("hierarchy", STACK, A, 1): 40,
    }
    assert at("folded", 1, memcg=ROOT) == {
        ("kernel_stack", STACK, ROOT, 1): 40,
        ("page_levels", STACK, ROOT): -40,
        ("hierarchy", STACK, ROOT, 1): 40,
    }
    # Local counters of memcgs are kept for this item, those of nodes are not.
    assert at("folded", None) == {
        ("page_levels", STACK, A): 40,
        ("page_levels", STACK, ROOT): -40,
        ("local", STACK, A): -40,
        ("local", STACK, ROOT): 40,
        ("hierarchy", STACK, A): 40,
    }


def test_what_children_handed_up_is_in_all_above_it() -> None:
    assert at("handed up", None) == {
        ("page_levels", STACK, A): 40,
        ("local", STACK, A): -40,
        **{("hierarchy", STACK, memcg): 40 for memcg in (ROOT, A)},
    }


def test_levels_that_are_not_compared_are_not_changed() -> None:
    d = exact(kernel(), ("slab", SLAB, A, 1))
    assert shown(counter(d, SLAB, A, 1, "cpu", 40)) == {("slab", SLAB, A, 1): 40}


def test_one_charge_is_one_object_with_one_reference() -> None:
    what = Charge("zswap", "compressed", None, 700)
    assert (what.references, what.number, what.together, what.parts) == (1, 1, False, ())


def test_a_counter_of_slab_memory_has_levels_of_its_own() -> None:
    assert at("folded", 1, SLAB) == {
        ("kernel_stack", SLAB, A, 1): 40,
        ("kernel_stack", SLAB, ROOT, 1): -40,
        ("levels", SLAB, A): -40,
        ("levels", SLAB, ROOT): 40,
        ("local", SLAB, A, 1): -40,
        ("local", SLAB, ROOT, 1): 40,
        ("hierarchy", SLAB, A, 1): 40,
    }


@pytest.mark.parametrize(
    ("item", "nid", "changed"),
    [
        ("NR_INACTIVE_FILE", 1, {("node_levels", "NR_INACTIVE_FILE", None, 1): -40}),
        ("NR_FILE_MAPPED", 1, {("node_levels", "NR_FILE_MAPPED", None, 1): -40}),
        ("NR_FILE_PAGES", 1, {("node_levels", "NR_FILE_PAGES"): -40}),
        ("NR_INACTIVE_FILE", None, {}),
        # Not a counter of lruvecs of this kernel.
        ("NR_SHMEM", 1, {}),
        # Compared with nothing, since not all of it is charged.
        (STACK, 1, {}),
    ],
)
def test_the_sum_of_all_memcgs_is_compared_with_the_node(
    item: str, nid: int | None, changed: dict[Short, int]
) -> None:
    found = at("cpu", nid, item)
    assert {row: n for row, n in found.items() if row[0] == "node_levels"} == changed
    # What is folded below the root was not added to the root's value.
    assert not any(row[0] == "node_levels" for row in at("folded", nid, item))


def test_a_page_counter() -> None:
    usage, memsw = "memory.usage", "memsw.usage"
    rows = [("usage", usage, m) for m in (ROOT, A, B)]
    rows += [("swap_usage", memsw, m) for m in (ROOT, A, B)]
    d = exact(kernel(), *rows)
    key = RowKey("usage", usage, "pages", B)
    assert shown(level(d, key, 7)) == {
        ("usage", usage, B): 7,
        ("usage", usage, A): -7,
        ("swap_usage", memsw, B): -7,
        ("swap_usage", memsw, A): 7,
    }
    # The root of cgroup v1 has no usage of its own to compare with.
    assert shown(level(d, key._replace(memcg=A), 7)) == {
        ("usage", usage, A): 7,
        ("usage", usage, ROOT): -7,
        ("swap_usage", memsw, A): -7,
        ("swap_usage", memsw, ROOT): 7,
    }
    # The root has no parent.
    assert shown(level(d, key._replace(memcg=ROOT), 7)) == {
        ("usage", usage, ROOT): 7,
        ("swap_usage", memsw, ROOT): -7,
    }
    assert shown(one_row(key, 7)) == {("usage", usage, B): 7}
    swap = RowKey("swap_usage", memsw, "pages", B)
    assert shown(level(d, swap, 7)) == {("swap_usage", memsw, B): 7, ("swap_usage", memsw, A): -7}
    alone = exact(kernel(), ("usage", usage, A))
    assert shown(level(alone, key._replace(memcg=A), 7)) == {("usage", usage, A): 7}
    # A root without a usage has the memory of its children in memsw.
    without = exact(kernel(), ("usage", usage, A), ("swap_usage", memsw, ROOT))
    assert shown(level(without, key._replace(memcg=A), 7)) == {
        ("usage", usage, A): 7,
        ("swap_usage", memsw, ROOT): 7,
    }
