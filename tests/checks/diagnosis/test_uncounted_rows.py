# SPDX-License-Identifier: LGPL-2.1-or-later
"""A counter that is 0 in every memcg, although memory is charged."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.made_rows import key

from memcg_inspect.checks.diagnosis.uncounted import uncounted
from memcg_inspect.checks.rows import make_row, row_key
from memcg_inspect.report import Diagnosis, Row

TABLE = "NR_PAGETABLE"


def row(
    memcg: int | None,
    pages: int,
    claimed: int | None = 0,
    hierarchy: int | None = 0,
    identity: str = "pagetable",
    item: str = TABLE,
    place: str = "folded",
) -> Row:
    where = key(identity, item, memcg, 0)
    counter = None if claimed is None else {place: claimed}
    return make_row(where, {"kmem": pages}, counter, hierarchy=hierarchy)


def diagnosed(*rows: Row, findings: Sequence[Row] | None = None) -> list[Diagnosis]:
    some = [r for r in rows if r.status == "differs"] if findings is None else findings
    return uncounted(rows, {row_key(r): 10 + n for n, r in enumerate(some)})


THREE = (row(1, 3), row(2, 4), row(3, 5))


def test_a_counter_that_is_kept_for_no_memcg() -> None:
    [found] = diagnosed(*THREE, row(4, 0))
    assert (found.cause, found.confidence) == ("uncounted-item", "only-explanation")
    assert found.what == (
        "no memcg counts NR_PAGETABLE: 12 pages of 3 memcgs are charged, and this counter is 0 in "
        "all memcgs"
    )
    assert (found.memcgs, found.nid, found.amount, found.unit) == ((), None, -12, "pages")
    assert (found.evidence, found.evidence_total, found.findings) == ((), None, (10, 11, 12))
    assert [(e.memcg, e.amount, e.difference) for e in found.signature] == [
        *((1, -3, -3), (2, -4, -4)),
        (3, -5, -5),
    ]
    assert found.functions == ("__pagetable_ctor", "pagetable_dtor")


def test_two_memcgs_are_likely_and_one_is_none() -> None:
    assert [d.confidence for d in diagnosed(*THREE[:2])] == ["likely"]
    assert diagnosed(THREE[0]) == []
    # Two nodes of one memcg are one memcg.
    assert diagnosed(THREE[0], make_row(key("pagetable", TABLE, 1, 1), {"kmem": 2}, {"folded": 0},
                                        hierarchy=0)) == []  # fmt: skip


def test_a_memcg_that_counts_it_is_enough() -> None:
    assert diagnosed(*THREE, row(4, 7, 7)) == []
    assert diagnosed(*THREE, row(4, 0, 0, hierarchy=2)) == []
    assert diagnosed(*THREE, row(4, 7, 7, item="NR_OTHER")) != []


def test_a_counter_that_could_not_be_read_makes_it_likely() -> None:
    [found] = diagnosed(*THREE, row(4, 3, None, None))
    assert found.confidence == "likely"
    assert found.what.endswith("and this counter is 0 in all memcgs that could be read")


def test_several_such_counters_are_likely_not_kept_in_the_dump() -> None:
    stacks = [row(n, 8, identity="kernel_stack", item="NR_KERNEL_STACK_KB") for n in (1, 2, 3)]
    found = diagnosed(*THREE, *stacks)
    assert [(d.confidence, d.amount, d.unit) for d in found] == [
        ("likely", -12, "pages"),
        ("likely", -24, "KiB"),
    ]


def test_rows_of_subtrees_are_explained_too() -> None:
    above = row(9, 12, identity="hierarchy")
    [found] = diagnosed(*THREE, above)
    assert found.findings == (10, 11, 12, 13)
    assert (found.amount, found.confidence) == (-12, "only-explanation")
    other = row(9, 12, identity="hierarchy", item="NR_OTHER")
    [found] = diagnosed(*THREE, other)
    assert found.findings == (10, 11, 12)


@pytest.mark.parametrize(
    "rows",
    [
        [row(n, 3, place="listed") for n in (1, 2, 3)],  # no counter
        [row(n, 3, hierarchy=None) for n in (1, 2, 3)],  # no counter with descendants
        [row(n, 3, identity="page_levels") for n in (1, 2, 3)],  # compared with counters
        [row(None, 3)] * 3,
    ],
)
def test_other_rows_are_not_looked_at(rows: list[Row]) -> None:
    assert diagnosed(*rows) == []


def test_what_is_explained_already_is_not_counted() -> None:
    assert diagnosed(*THREE, findings=THREE[:1]) == []
    [found] = diagnosed(*THREE, findings=THREE[1:])
    assert (found.amount, found.findings, found.confidence) == (-9, (10, 11), "likely")


@pytest.mark.parametrize(
    ("item", "functions"),
    [
        ("NR_KERNEL_STACK_KB", ("account_kernel_stack",)),
        ("NR_VMALLOC", ("vm_area_alloc_pages", "vfree")),
        ("MEMCG_VMALLOC", ("__vmalloc_area_node", "vfree")),
        ("MEMCG_PERCPU_B", ("pcpu_memcg_post_alloc_hook", "pcpu_memcg_free_hook")),
        ("NR_NEW", ("mod_memcg_lruvec_state", "mod_memcg_state")),
    ],
)
def test_functions_that_forget_to_count(item: str, functions: tuple[str, ...]) -> None:
    [found] = diagnosed(*(row(n, 3, item=item) for n in (1, 2, 3)))
    assert found.functions == functions
