# SPDX-License-Identifier: LGPL-2.1-or-later
"""A mistake of the kernel that shows in the counters of many memcgs."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from memcg_inspect.checks.diagnosis.mistakes import mistakes
from memcg_inspect.checks.ledger import Entry, Ledger
from memcg_inspect.report import Diagnosis, Finding

PAGE = 4096
#: Memcgs below the root, 9. Each has an obj_cgroup for each node: 10 times the memcg, and the node.
MEMCGS, ROOT = range(1, 9), 9


def finding(identity: str, memcg: int, nid: int | None, off: int) -> Finding:
    items = {"kmem": "NR_KMEM", "hierarchy": "NR_KMEM", "percpu": "MEMCG_PERCPU_B"}
    is_objcg = identity in ("objcg_bytes", "references")
    return Finding(
        identity=identity,
        kind="counter-above-objects",
        memcg=memcg,
        objcg=10 * memcg + (nid or 0) if is_objcg else None,
        nid=nid,
        item=items.get(identity, "x"),
        unit="pages",
        difference=off,
        what="",
        evidence_is="candidates",
    )


def moved(memcg: int, pages: int, rest: int = 0, by: int = 0) -> list[Finding]:
    """Return the findings on a memcg whose memory is on node 1, and charged to node 0."""
    return [
        finding("kmem", memcg, 0, pages),
        finding("kmem", memcg, 1, -pages),
        finding("objcg_bytes", memcg, 0, rest),
        finding("objcg_bytes", memcg, 1, by - rest),
        finding("references", memcg, 1, -3),
    ]


def little(memcg: int, pages: int, nid: int = 1) -> list[Finding]:
    """Return the findings on a memcg that is charged for too few bytes."""
    return [finding("kmem", memcg, nid, -pages), finding("objcg_bytes", memcg, nid, -100)]


def diagnosed(
    findings: Iterable[Finding], percpu: Iterable[int] = MEMCGS, zswap: Iterable[int] = ()
) -> list[Diagnosis]:
    ledger = Ledger()
    for kind, memcgs in (("percpu", percpu), ("zswap", zswap)):
        for memcg in memcgs:
            ledger.add(Entry(10 * memcg, kind, "data", 0), 64, 1)  # type: ignore[arg-type]
    snapshot = SimpleNamespace(
        image=SimpleNamespace(page_size=PAGE),
        ledger=ledger,
        payer=lambda objcg: objcg // 10,
        ancestors=lambda memcg: (memcg, ROOT),
    )
    return mistakes(snapshot, dict(enumerate(findings, 20)))  # type: ignore[arg-type]


THREE = [*moved(1, 5, 10), *moved(2, 6), *moved(3, 7)]


def test_memory_that_is_charged_to_other_nodes() -> None:
    sums = [finding("hierarchy", ROOT, 0, 18), finding("hierarchy", ROOT, 1, -17)]
    other = [finding("percpu", 1, None, 64), finding("kmem", 4, 0, 3)]
    [found] = diagnosed([*THREE, *sums, *other])
    assert (found.cause, found.confidence) == ("charged-to-node", "likely")
    total = 18 * PAGE + 10
    assert found.what == (
        f"{total:,} bytes of kernel memory of 3 memcgs that have percpu memory are charged to "
        "other nodes than theirs: the kernel chooses the wrong node for such charges"
    )
    assert (found.amount, found.unit, found.nid, found.memcgs) == (total, "bytes", None, (3, 2, 1))
    # All of the three memcgs, and the sum that follows.
    assert found.findings == tuple(range(20, 36))
    assert [effect.amount for effect in found.signature][:2] == [5, -5]


def test_memcgs_without_percpu_memory_are_not_said_to_have_it() -> None:
    [found] = diagnosed(THREE, percpu=(1, 2), zswap=())
    assert "3 memcgs are charged" in found.what
    [found] = diagnosed(THREE, zswap=(1, 2, 3))
    assert "3 memcgs that have percpu and zswap memory are charged" in found.what


@pytest.mark.parametrize(
    ("by", "is_found"), [(0, True), (1, False), (PAGE, True), (2 * PAGE, True), (3 * PAGE, False)]
)
def test_what_a_memcg_has_beside_whole_pages_is_known_modulo_a_page(
    by: int, is_found: bool
) -> None:
    """It has two obj_cgroups, and each may be off by a page."""
    [found] = diagnosed([*THREE, *moved(4, 2, 5, by)])
    assert (4 in found.memcgs) == is_found


def test_two_memcgs_may_have_faults_of_their_own() -> None:
    assert diagnosed([*moved(1, 5), *moved(2, 6)]) == []
    # A third one that is off by a page is not enough.
    assert diagnosed([*moved(1, 5), *moved(2, 6), *moved(3, 6, 5, PAGE)]) == []


def test_memory_that_is_charged_with_another_size() -> None:
    findings = [
        *(*little(1, 2), *little(2, 3), *little(3, 4), *little(4, 5)),
        *(finding("percpu", 1, None, -2 * PAGE), finding("percpu", 2, None, 64)),
        *(finding("usage", 1, None, -2), finding("usage", 2, None, -6)),
        *(finding("hierarchy", ROOT, 1, -14), finding("hierarchy", ROOT, 0, -14)),
        *(finding("references", 1, 1, -3), finding("references", 1, 0, -3)),
        finding("slab", 1, 1, -3),
    ]
    [found] = diagnosed(findings)
    total = 14 * PAGE + 400
    assert (found.cause, found.confidence, found.amount) == ("charged-size", "likely", total)
    assert found.what == (
        f"{total:,} bytes too little are charged for kernel memory of 4 memcgs that have percpu "
        "memory: the kernel charges, or uncharges, another size than such memory has"
    )
    assert found.memcgs == (4, 3, 2, 1)
    assert found.findings == (*range(20, 29), 30, 32, 34)
    assert found.functions[0] == "pcpu_memcg_pre_alloc_hook"


@pytest.mark.parametrize(("off", "is_explained"), [(-4, True), (-5, False), (-1, True), (0, False)])
def test_the_page_counter_has_whole_pages(off: int, is_explained: bool) -> None:
    """Bytes of a node that fill no page are in a page that is charged, or are not."""
    findings = [*little(1, 2), *little(2, 3), *little(3, 4), finding("usage", 1, None, off)]
    [found] = diagnosed(findings, percpu=(1, 2, 3))
    assert (26 in found.findings) == is_explained


def test_too_much_of_zswap() -> None:
    findings = [finding("kmem", memcg, None, 2) for memcg in (1, 2, 3)]
    percpu = finding("percpu", 1, None, 64)
    [found] = diagnosed([*findings, percpu], percpu=(1, 2, 3, 4), zswap=(1, 2, 3))
    assert f"{6 * PAGE:,} bytes too much" in found.what
    assert "3 memcgs that have zswap memory" in found.what
    assert found.findings == (20, 21, 22)


def test_no_kind_of_memory_explains_it() -> None:
    three = [*little(1, 2), *little(2, 3), *little(3, 4)]
    assert diagnosed(three, percpu=(1, 2)) == []  # one has none
    assert diagnosed(three, percpu=range(1, 7))
    assert diagnosed(three, percpu=range(1, 8)) == []  # of most it is right
    assert diagnosed(three[:4], percpu=(1, 2)) == []  # too few
    assert diagnosed([*three, finding("kmem", 4, 1, 1)]) == []  # in both directions
