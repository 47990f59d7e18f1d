# SPDX-License-Identifier: LGPL-2.1-or-later
"""A mistake of the kernel that shows in the counters of many memcgs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
            ledger.add(Entry(10 * memcg, kind, "data", 0), 64, 3)  # type: ignore[arg-type]
    snapshot = SimpleNamespace(
        image=SimpleNamespace(page_size=PAGE),
        ledger=ledger,
        payer=lambda objcg: objcg // 10,
        ancestors=lambda memcg: (memcg, ROOT),
    )
    return mistakes(snapshot, dict(enumerate(findings, 20)))  # type: ignore[arg-type]


THREE = [*moved(1, 5, 10), *moved(2, 6, 20), *moved(3, 7, 30)]


def test_memory_that_is_charged_to_other_nodes() -> None:
    sums = [finding("hierarchy", ROOT, 0, 18), finding("hierarchy", ROOT, 1, -17)]
    other = [finding("percpu", 1, None, 64), finding("kmem", 4, 0, 3)]
    [found] = diagnosed([*THREE, *sums, *other])
    assert (found.cause, found.confidence) == ("charged-to-node", "likely")
    total = 18 * PAGE + 60
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


def test_one_node_is_not_another_one() -> None:
    alone = [finding("kmem", 4, 0, 2), finding("objcg_bytes", 4, 0, -PAGE)]
    [found] = diagnosed([*THREE, *alone])
    assert 4 not in found.memcgs


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
    findings += [finding("objcg_bytes", memcg, None, 5) for memcg in (1, 2)]
    percpu = finding("percpu", 1, None, 2 * PAGE + 5)
    [found] = diagnosed([*findings, percpu], percpu=(1, 2, 3, 4), zswap=(1, 2, 3))
    assert f"{6 * PAGE + 10:,} bytes too much" in found.what
    assert "3 memcgs that have zswap memory" in found.what
    assert found.functions[0] == "obj_cgroup_charge_zswap"
    assert found.findings == (20, 21, 22, 23, 24)


def test_counters_of_whole_pages_may_be_wrong_by_themselves() -> None:
    """A charge of another size leaves bytes beside the pages in most of its obj_cgroups."""
    assert diagnosed([finding("kmem", memcg, 1, 1) for memcg in MEMCGS]) == []
    one = finding("objcg_bytes", 1, 1, 5)
    assert diagnosed([one, *(finding("kmem", memcg, 1, 1) for memcg in (1, 2, 3))]) == []
    # Those of several nodes do not add up to nothing by chance.
    whole = [finding("kmem", m, nid, off) for m in MEMCGS for nid, off in ((0, 1), (1, -1))]
    assert [found.cause for found in diagnosed(whole)] == ["charged-to-node"]


@pytest.mark.parametrize(("off", "is_explained"), [(3, True), (-3, True), (4, False), (-4, False)])
@pytest.mark.parametrize(("charge", "nid"), [(little, 7), (moved, 1)])
def test_no_more_references_than_charges(
    charge: Callable[..., list[Finding]], nid: int, off: int, is_explained: bool
) -> None:
    """Each memcg has 3."""
    findings = [finding("references", 1, nid, off)]
    findings += [f for memcg in (1, 2, 3) for f in charge(memcg, memcg, 7)]
    [found] = diagnosed(findings, percpu=(1, 2, 3))
    assert (20 in found.findings) == is_explained


@pytest.mark.parametrize(
    ("off", "is_explained"),
    [(-2 * PAGE - 100, True), (-PAGE - 100, True), (-99, False), (2 * PAGE, False), (1, False)],
)
def test_the_counter_of_percpu_memory_is_off_by_the_same(off: int, is_explained: bool) -> None:
    """The sum over the nodes is known modulo a page of each obj_cgroup."""
    findings = [*little(1, 2), *little(2, 3), *little(3, 4), finding("percpu", 1, None, off)]
    [found] = diagnosed(findings, percpu=(1, 2, 3))
    assert (26 in found.findings) == is_explained


def test_bytes_of_several_obj_cgroups_of_a_node_are_known_modulo_pages() -> None:
    several = [*little(1, 2), *little(2, 3), *little(3, 4), finding("objcg_bytes", 1, 1, -50)]
    [found] = diagnosed(several, percpu=(1, 2, 3))
    assert found.what.startswith(f"about {9 * PAGE + 350:,} bytes too little are charged")
    [found] = diagnosed([*THREE, *(finding("objcg_bytes", 1, nid, 0) for nid in (0, 1))])
    assert not found.what.startswith("about")


def test_no_kind_of_memory_explains_it() -> None:
    three = [*little(1, 2), *little(2, 3), *little(3, 4)]
    assert diagnosed(three, percpu=(1, 2)) == []  # one has none
    assert diagnosed(three, percpu=range(1, 7))
    assert diagnosed(three, percpu=range(1, 8)) == []  # of most it is right
    assert diagnosed(three[:4], percpu=(1, 2)) == []  # too few
    assert diagnosed([*three, finding("kmem", 4, 1, 1)]) == []  # in both directions
