# SPDX-License-Identifier: LGPL-2.1-or-later
"""References of the parts of a folio that is being split."""

from __future__ import annotations

import pytest
from support.made import OBJCG_A, OBJCG_B, A, B, snapshot

from memcg_inspect.checks.inflight import mark_in_flight
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.model import Held, Running
from memcg_inspect.report import Row

PAGE = 4096
IN_SPLIT = ("folio_split_memcg_refs", "__folio_split", "madvise_cold_or_pageout_pte_range")


def status(
    difference: int,
    held: tuple[Held, ...] | None,
    functions: tuple[str, ...] = IN_SPLIT,
    waiting: bool = False,
) -> str:
    """Return the status of a row of ``css_refs``, which user pages count in up to 7.0."""
    key = RowKey("css_refs", "css.refcnt", "references", A)
    cpu = Running(1, 7, "sh", functions, True, held, waiting=waiting)
    return judged(make_row(key, {"lru": 3}, {"refcnt": 3 + difference}), cpu).status


def judged(row: Row, *cpus: Running) -> Row:
    [found] = mark_in_flight(snapshot(running=cpus), [row])
    return found


def folio(payer: int, pages: int) -> Held:
    return Held("folio", 0x5000 + pages, payer, 0, pages * PAGE)


@pytest.mark.parametrize(
    ("difference", "expected"),
    [(511, "in-flight"), (1, "in-flight"), (512, "differs"), (-1, "differs")],
)
def test_one_reference_for_each_part(difference: int, expected: str) -> None:
    held = (folio(A, 16), folio(A, 512), folio(B, 1024))
    assert status(difference, held) == expected


def test_what_is_no_split() -> None:
    huge = (folio(A, 512),)
    assert status(1, huge, ("split_huge_pmd_locked", "__split_huge_pmd")) == "differs"
    assert status(1, (folio(B, 512),)) == "differs"
    assert status(1, (folio(A, 1),)) == "differs"
    # Interrupts are off: the task cannot be preempted.
    assert status(1, huge, waiting=True) == "differs"


def test_an_obj_cgroup_of_a_folio() -> None:
    key = RowKey("references", "refcnt", "references", A, 0, OBJCG_A)
    row = make_row(key, {"lru": 1}, {"refcnt": 512})
    cpu = Running(1, 7, "sh", IN_SPLIT, True, (folio(OBJCG_A, 512),))
    found = judged(row, cpu)
    assert (found.status, found.reason) == (
        "in-flight",
        "at most 511 references for the parts of folio 0x5200, which CPU 1 (sh, 7) splits in "
        "folio_split_memcg_refs",
    )
    other = cpu._replace(held=(folio(OBJCG_B, 512),))
    assert judged(row, other).status == "differs"
