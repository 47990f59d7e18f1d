# SPDX-License-Identifier: LGPL-2.1-or-later
"""The wording of findings, the other memcgs that they name, and the evidence they ask for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.made import (
    DEAD,
    OBJCG_A,
    OBJCG_B,
    OBJCG_DEAD,
    RECLAIMABLE,
    ROOT,
    UNRECLAIMABLE,
    A,
    B,
    family,
    family_objcgs,
    features,
    ledger,
    snapshot,
    zero,
)

from memcg_inspect.checks.evidence_query import MOST_EVIDENCE, Candidates, EvidenceQuery, Rank
from memcg_inspect.checks.findings import (
    PendingFinding,
    attach,
    candidate_sizes,
    freed_findings,
    orphan_findings,
    row_findings,
    skew_findings,
)
from memcg_inspect.checks.identities.slab import slab_rows
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.registry import CHECKS
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.checks.skew import skew_matrix
from memcg_inspect.checks.snapshot import OBJECTS, Snapshot
from memcg_inspect.model import (
    Accounting,
    Coverage,
    FreedPage,
    Memcg,
    Objcg,
    Stat,
    Unit,
    Vectors,
)
from memcg_inspect.model_tasks import TaskCharge
from memcg_inspect.report import Evidence, Finding, Skew

SIBLING = 0x6000


def slab_findings(taken: Snapshot) -> list[PendingFinding]:
    """Return the findings of the slab identity."""
    return row_findings(taken, slab_rows(taken))


def off(*amounts: tuple[int, int]) -> Snapshot:
    """An empty image in which own values of NR_SLAB_RECLAIMABLE_B on node 0 are wrong."""
    memcgs = {**family(), SIBLING: Memcg(SIBLING, "/c", 6, "online", ROOT, SIBLING)}
    stats = zero(memcgs, (0, 1))
    for address, amount in amounts:
        before = stats[address, 0][RECLAIMABLE]
        stats[address, 0] = {
            RECLAIMABLE: before._replace(percpu=before.percpu + amount),
            UNRECLAIMABLE: Stat(0, 0, 0),
        }
    return snapshot(memcgs=memcgs, lruvec_stats=stats)


def test_a_difference_alone() -> None:
    [pending] = slab_findings(off((B, 1064)))
    finding = pending.finding
    assert (finding.memcg, finding.nid, finding.item) == (B, 0, RECLAIMABLE)
    assert finding.difference == 1064
    assert finding.kind == "counter-above-objects"
    assert finding.what.startswith("NR_SLAB_RECLAIMABLE_B on node 0 claims 1,064 bytes more than")
    assert finding.evidence_is == "candidates"
    # No object explains a counter that is too large, and no memcg has too many objects.
    assert pending.queries == ()


@pytest.mark.parametrize(("amount", "side"), [(1, "above"), (-1, "below")])
def test_a_difference_of_one_byte(amount: int, side: str) -> None:
    [pending] = slab_findings(off((B, amount)))
    assert pending.finding.kind == f"counter-{side}-objects"


def test_too_many_objects_are_the_candidates() -> None:
    [pending] = slab_findings(off((A, -504)))
    assert pending.finding.kind == "counter-below-objects"
    assert pending.finding.what.startswith(
        "NR_SLAB_RECLAIMABLE_B on node 0 claims 504 bytes less than"
    )
    [query] = pending.queries
    # what the removed memcg left is /a's, too
    assert query.payers == {OBJCG_A, OBJCG_DEAD}
    assert (query.kind, query.detail, query.nid) == ("slab", "reclaimable", 0)
    assert (query.amount, query.modulo) == (504, 0)
    assert query.neighbours == frozenset()


def test_parent_and_child_that_offset_each_other() -> None:
    findings = {pending.finding.memcg: pending for pending in slab_findings(off((B, 8), (A, -8)))}
    assert set(findings) == {A, B}
    assert findings[B].finding.what.split("; ")[1] == (
        "its parent differs by as much in the opposite direction: either the folded counter of "
        "this memcg alone or the owner of a charge is wrong"
    )
    assert findings[A].finding.what.split("; ")[1] == (
        "a child, whose counter is subtracted from this memcg's, differs by as much in the "
        "opposite direction"
    )
    # Candidates for both are the objects of the one that has too many.
    for pending in findings.values():
        [query] = pending.queries
        assert query.payers == {OBJCG_A, OBJCG_DEAD}
        assert query.neighbours == {OBJCG_B}


def test_strangers_that_offset_each_other() -> None:
    findings = {
        pending.finding.memcg: pending for pending in slab_findings(off((B, 8), (SIBLING, -8)))
    }
    assert set(findings) == {B, SIBLING}
    for pending in findings.values():
        assert pending.finding.what.split("; ")[1] == (
            "another memcg differs by as much in the opposite direction: a charge may have changed "
            "owner"
        )


def test_a_stranger_of_the_root() -> None:
    """Which has no parent."""
    findings = [pending.finding for pending in slab_findings(off((ROOT, 8), (B, -8)))]
    assert [finding.memcg for finding in findings] == [ROOT, B]
    assert all("; another memcg differs" in finding.what for finding in findings)


def test_no_partner_unless_amount_and_place_agree() -> None:
    findings = slab_findings(off((B, 8), (SIBLING, -16)))
    assert len(findings) == 2
    assert all(";" not in pending.finding.what for pending in findings)


def test_rows_that_do_not_differ_make_no_finding() -> None:
    taken = snapshot(coverage={"stock": Coverage(0, 1)})
    rows = slab_rows(taken)
    assert {row.status for row in rows} == {"unverifiable"}
    assert row_findings(taken, rows) == []


def test_orphan_pointer_is_proof() -> None:
    taken = snapshot(
        charges=ledger(
            {
                (0xBAD, "slab", "reclaimable", 1): (512, 1),
                (OBJCG_B, "slab", "reclaimable", 1): (0, 0),
            }
        )
    )
    [pending] = orphan_findings(taken)
    finding = pending.finding
    assert (finding.kind, finding.evidence_is) == ("unknown-objcg", "proof")
    assert (finding.memcg, finding.objcg, finding.nid) == (None, 0xBAD, 1)
    assert (finding.difference, finding.unit) == (None, "bytes")
    assert finding.what == (
        "slab memory is charged to 0xbad, which is not an obj_cgroup of any memcg"
    )
    assert pending.queries == (EvidenceQuery("slab", frozenset({0xBAD})),)


def test_orphan_pointer_on_several_nodes_names_none() -> None:
    charges = ledger(
        {
            (0xBAD, "slab", "reclaimable", 0): (512, 1),
            (0xBAD, "slab", "unreclaimable", 1): (64, 1),
        }
    )
    [pending] = orphan_findings(snapshot(charges=charges))
    assert pending.finding.nid is None


@pytest.mark.parametrize(("number", "findings"), [(100, 100), (101, 1)])
def test_very_many_orphan_pointers_are_one_finding(number: int, findings: int) -> None:
    """A vector was overwritten: nobody reads a finding for each of its elements."""
    others = {(0xBAD000 + n, "percpu", "data", 0): (64, 1) for n in range(number)}
    charges = ledger({**others, (0xBAD, "slab", "reclaimable", 1): (512, 1)})
    found = orphan_findings(snapshot(charges=charges))
    assert len(found) == findings + 1
    if findings == 1:
        first = found[0]
        assert (first.finding.objcg, first.finding.nid) == (None, 0)
        assert "101 addresses that are not obj_cgroups" in first.finding.what
        assert "0xbad000" in first.finding.what
        assert first.queries == (EvidenceQuery("percpu", frozenset(p for p, *_ in others)),)


@pytest.mark.parametrize("subject", ["objcgs", "memcgs"])
def test_orphan_pointer_may_be_to_what_could_not_be_read(subject: str) -> None:
    taken = snapshot(
        charges=ledger({(0xBAD, "slab", "reclaimable", 0): (512, 1)}),
        coverage={subject: Coverage(3, 1)},
    )
    assert orphan_findings(taken) == []


def skewed(accounting: Accounting) -> Snapshot:
    """/a's objcg of node 0 pays for 300 bytes there and 200 on node 1."""
    return snapshot(
        charges=ledger(
            {
                (OBJCG_A, "slab", "reclaimable", 0): (300, 3),
                (OBJCG_A, "slab", "reclaimable", 1): (120, 1),
                (OBJCG_A, "slab", "unreclaimable", 1): (80, 1),
                (OBJCG_DEAD, "slab", "reclaimable", 0): (40, 1),
            }
        ),
        accounting=accounting,
    )


def test_skew_matrix_adds_up_by_charged_and_backing_node() -> None:
    assert set(skew_matrix(skewed("objcg-per-node"))) == {
        # 300 of /a and 40 that the removed memcg left to it
        Skew(A, "slab", 0, 0, 340, 4),
        Skew(A, "slab", 0, 1, 200, 2),
    }


def test_skew_matrix_has_no_charged_node_where_objcgs_have_none() -> None:
    objcgs = {a: Objcg(a, o.memcg, None, False, 0) for a, o in family_objcgs().items()}
    taken = snapshot(objcgs=objcgs, charges=ledger({(OBJCG_B, "slab", "reclaimable", 1): (8, 1)}))
    assert skew_matrix(taken) == [Skew(B, "slab", None, 1, 8, 1)]


def test_skew_is_a_fault_only_where_memory_is_counted_per_node() -> None:
    for accounting in ("memcg", "objcg-per-node"):
        taken = skewed(accounting)  # type: ignore[arg-type]
        assert skew_findings(taken, skew_matrix(taken)) == []
    taken = skewed("kmem-per-node")
    # One of the node that pays for memory of that node is no candidate.
    taken = replace(taken, objcgs={**taken.objcgs, 0xA1: Objcg(0xA1, A, 1, False, 0)})
    [pending] = skew_findings(taken, skew_matrix(taken))
    finding = pending.finding
    assert (finding.memcg, finding.nid, finding.difference) == (A, 1, 200)
    assert (finding.kind, finding.evidence_is, finding.unit) == ("skew", "proof", "bytes")
    assert finding.what == "200 bytes of slab memory on node 1 are charged to node 0"
    # what the removed memcg left is /a's, too
    payers = frozenset({OBJCG_A, OBJCG_DEAD})
    assert pending.queries == (EvidenceQuery("slab", payers, nid=1),)


def test_kernel_memory_is_skewed_where_it_is_counted_per_node() -> None:
    charges = {(OBJCG_A, kind, "", 1): (4096, 1) for kind in ("kmem", "slab", "percpu")}
    taken = snapshot(charges=ledger(charges), accounting="kmem-per-node")
    found = [pending.finding for pending in skew_findings(taken, skew_matrix(taken))]
    assert [(f.identity, f.item, f.difference) for f in found] == [
        ("kmem", "kmem", 4096),
        ("slab", "slab", 4096),
    ]


def test_skew_of_user_pages_is_a_fault_only_where_they_are_charged_to_their_node() -> None:
    charges = ledger({(OBJCG_A, "lru", "", 1): (8192, 2)})
    for own_node in (False, True):
        supported = features(lru_charged_to_own_node=own_node)
        taken = snapshot(charges=charges, accounting="objcg-per-node", features=supported)
        found = [p.finding for p in skew_findings(taken, skew_matrix(taken))]
        assert [(f.memcg, f.nid, f.difference) for f in found] == [(A, 1, 8192)] * own_node


def test_at_most_ten_pieces_of_evidence() -> None:
    [pending] = slab_findings(off((A, -504)))
    [query] = pending.queries
    some = Candidates()
    some.add(Rank(True), (Evidence(address, "slab") for address in range(50)), 50)
    finding = attach(pending, {query: some})
    assert finding.evidence == tuple(Evidence(a, "slab", rank=1) for a in range(MOST_EVIDENCE))
    assert (finding.evidence_total, finding.evidence_tied) == (50, 40)
    none = attach(pending, {})
    assert (none.evidence, none.evidence_total, none.evidence_tied) == ((), None, None)
    none = attach(pending, {query: Candidates()})
    assert (none.evidence, none.evidence_total, none.evidence_tied) == ((), 0, 0)


def test_candidates_of_one_size_are_those_of_all_queries() -> None:
    [pending] = slab_findings(off((A, -504)))
    one, other, not_searched = (EvidenceQuery("slab", frozenset({n})) for n in range(3))
    first, second = Candidates(), Candidates()
    first.sizes.update({("slab", 208, OBJCG_A): 3})
    second.sizes.update({("slab", 208, OBJCG_A): 4, ("slab", 104, OBJCG_B): 1})
    pending = pending._replace(queries=(one, other, not_searched))
    sizes = candidate_sizes(pending, {one: first, other: second})
    assert sizes == {("slab", 208, OBJCG_A): 7, ("slab", 104, OBJCG_B): 1}


def test_what_proves_a_finding_has_no_rank() -> None:
    taken = snapshot(charges=ledger({(0xBAD, "slab", "reclaimable", 1): (512, 12)}))
    [pending] = orphan_findings(taken)
    some = Candidates()
    some.add(Rank(False), (Evidence(address, "slab") for address in range(12)), 12)
    finding = attach(pending, {pending.queries[0]: some})
    assert finding.evidence == tuple(Evidence(a, "slab") for a in range(MOST_EVIDENCE))
    assert (finding.evidence_total, finding.evidence_tied) == (12, None)


def rows(taken: Snapshot, identity: str) -> list[Finding]:
    """Findings of one identity."""
    return [
        pending.finding for pending in judge(taken).findings if pending.finding.identity == identity
    ]


def test_dangling_vector_is_proof() -> None:
    dangling = tuple((0xF00 + n, 1, 0xE00 + n) for n in range(12))
    [finding] = rows(snapshot(vectors={0: Vectors(20, 5, dangling)}), "placement")
    assert (finding.kind, finding.evidence_is) == ("dangling-vector", "proof")
    assert (finding.nid, finding.difference) == (0, 12)
    assert (len(finding.evidence), finding.evidence_total) == (MOST_EVIDENCE, 12)
    first = finding.evidence[0]
    assert (first.address, first.nid, first.page) == (0xF00, 1, 0xE00)


def test_task_with_another_memcgs_objcg_is_proof() -> None:
    tasks = [
        TaskCharge(0x7000, 7, "good", A, (OBJCG_A,), False, True),
        TaskCharge(0x8000, 8, "bad", A, (OBJCG_B,), False, True),
    ]
    [finding] = rows(snapshot(tasks=tasks), "task_objcg")
    assert (finding.kind, finding.evidence_is) == ("stale-task-objcg", "proof")
    assert (finding.memcg, finding.difference) == (A, 1)
    [evidence] = finding.evidence
    assert (evidence.address, evidence.objcg, evidence.memcg) == (0x8000, OBJCG_B, A)
    assert evidence.note == "bad (8)"


@pytest.mark.parametrize(("refs", "kind"), [(5, "unknown-references"), (1, "missing-references")])
def test_references_that_do_not_add_up(refs: int, kind: str) -> None:
    objcgs = {OBJCG_B: Objcg(OBJCG_B, B, 0, False, 0, refs=refs, memcg_refs=1)}
    charges = ledger({(OBJCG_B, "slab", "reclaimable", 0): (16, 2)})
    [finding] = rows(snapshot(objcgs=objcgs, charges=charges), "references")
    assert (finding.kind, finding.memcg, finding.objcg) == (kind, B, OBJCG_B)
    assert finding.difference == refs - 3


#: What an identity's candidates are: kind, part, bytes of one unit of its rows.
CANDIDATES: dict[str, tuple[str, str | None, int]] = {
    "slab": ("slab", "reclaimable", 1),
    "percpu": ("percpu", None, 1),
    "kernel_stack": ("kmem", None, 1024),
    "pagetable": ("kmem", None, 4096),
    "vmalloc": ("kmem", None, 4096),
    "zswap": ("zswap", None, 1),
}


@pytest.mark.parametrize("identity", CANDIDATES)
def test_candidates_are_charges_of_the_identity(identity: str) -> None:
    kind, detail, size = CANDIDATES[identity]
    unit: Unit = {1: "bytes", 1024: "KiB", 4096: "pages"}[size]  # type: ignore[assignment]
    key = RowKey(identity, RECLAIMABLE if identity == "slab" else "ITEM", unit, B, 1)
    [pending] = row_findings(snapshot(), [make_row(key, {"x": 12}, {"y": 5})])
    [query] = pending.queries
    assert query == EvidenceQuery(kind, frozenset({OBJCG_B}), detail, 1, 7 * size)  # type: ignore[arg-type]
    # a claim that is too large has no candidates, since nobody has too much
    assert row_findings(snapshot(), [make_row(key, {"x": 5}, {"y": 12})])[0].queries == ()


def test_other_identities_have_no_candidates() -> None:
    named = {check.name for check in CHECKS if check.charges is not None}
    assert named == CANDIDATES.keys() | {"objcg_bytes"}


@pytest.mark.parametrize(("off", "amount"), [(-8, 8), (8, 4088), (2048, 2048)])
def test_a_remainder_may_be_too_much_of_either(off: int, amount: int) -> None:
    """Bytes that are 8 short of whole pages may be 4,088 too many, or 8 too few."""
    key = RowKey("objcg_bytes", "bytes of whole pages", "bytes", B, 0, OBJCG_B)
    row = make_row(key, {"slab": 8192}, {"whole_pages": 8192 + off})
    [pending] = row_findings(snapshot(), [row])
    payers = frozenset({OBJCG_B})
    assert pending.queries == tuple(
        EvidenceQuery(kind, payers, None, None, amount, 4096) for kind in OBJECTS
    )
    # The kernel splits percpu memory among obj_cgroups of several nodes.
    [pending] = row_findings(snapshot(accounting="kmem-per-node"), [row])
    assert [query.kind for query in pending.queries] == ["slab", "zswap"]
    # Nor does cgroup v1 charge what is in zswap.
    v1 = snapshot(features=features(default_hierarchy=False))
    [pending] = row_findings(v1, [row])
    assert [query.kind for query in pending.queries] == ["slab", "percpu"]


def test_an_obj_cgroup_is_off_against_one_of_any_node() -> None:
    key = RowKey("objcg_bytes", "bytes of whole pages", "bytes", A, 0, OBJCG_A)
    other = key._replace(memcg=B, nid=1, objcg=OBJCG_B)
    rows = [make_row(key, {"slab": 8}, {"whole_pages": 0}), make_row(other, {"slab": 0}, {"x": 8})]
    for pending in row_findings(snapshot(), rows):
        # 8 bytes too many of the one, or a page less 8 of the other
        asked = {(q.payers, q.amount, q.modulo, q.neighbours, q.nid) for q in pending.queries}
        ours, theirs = frozenset({OBJCG_A}), frozenset({OBJCG_B})
        assert asked == {(ours, 8, 4096, theirs, None), (theirs, 4088, 4096, ours, None)}
        # no memcg's counter is wrong, so none is named
        assert ";" not in pending.finding.what
    # rows of memcgs are compared on the same node only
    rows = [replace(row, identity="pagetable", objcg=None) for row in rows]
    assert [pending.finding.what.count(";") for pending in row_findings(snapshot(), rows)] == [0, 0]
    rows[1] = replace(rows[1], nid=0)
    assert [pending.finding.what.count(";") for pending in row_findings(snapshot(), rows)] == [1, 1]


@pytest.mark.parametrize(
    ("identity", "more", "less"),
    [
        ("sock", "ITEM claims {} more than was found", "ITEM claims {} less than was found"),
        (
            "hierarchy",
            "ITEM claims {} more than was found in its whole subtree",
            "ITEM claims {} less than was found in its whole subtree",
        ),
        (
            "references",
            "the refcount of obj_cgroup 0xb0 is {} more than found: a leak, or an unknown holder",
            "the refcount of obj_cgroup 0xb0 is {} less than found: something uses it without a "
            "reference",
        ),
        (
            "css_refs",
            "ITEM is {} more than found: a leak; the memcg is never freed",
            "ITEM is {} less than found: the memcg can be freed while it is used",
        ),
        (
            "id_refs",
            "ITEM is {} more than found: the memcg and its ID are never freed",
            "ITEM is {} less than found: the ID is freed while it is used",
        ),
    ],
)
def test_wording(identity: str, more: str, less: str) -> None:
    unit: Unit = "pages" if identity in ("sock", "hierarchy") else "references"
    objcg = OBJCG_B if identity == "references" else None
    key = RowKey(identity, "ITEM", unit, B, None, objcg)
    for number in (1, 2):
        amount = f"{number} {unit.removesuffix('s')}{'s' * (number > 1)}"
        for difference, what in ((number, more), (-number, less)):
            row = make_row(key, {"x": 5}, {"y": 5 + difference})
            [pending] = row_findings(snapshot(), [row])
            assert pending.finding.what == what.format(amount)
            on_node = row_findings(snapshot(), [replace(row, nid=1)])[0].finding.what
            assert on_node == (pending.finding.what.replace("ITEM claims", "ITEM on node 1 claims"))


def test_wording_of_a_remainder() -> None:
    key = RowKey("objcg_bytes", "bytes of whole pages", "bytes", B, None, OBJCG_B)
    for difference, off in ((8, "8 short of"), (1, "1 short of"), (-1, "1 beyond")):
        row = make_row(key, {"x": 8192}, {"y": 8192 + difference})
        [pending] = row_findings(snapshot(), [row])
        assert pending.finding.what == (
            f"the bytes charged to obj_cgroup 0xb0 are {off} whole pages"
        )


@pytest.mark.parametrize(
    ("number", "nid", "what"),
    [
        (1, 0, "the memcg is offline, but 1 obj_cgroup of node 0 still belongs to it"),
        (2, 0, "the memcg is offline, but 2 obj_cgroups of node 0 still belong to it"),
        (2, None, "the memcg is offline, but 2 obj_cgroups still belong to it"),
    ],
)
def test_obj_cgroups_that_were_not_reparented(number: int, nid: int | None, what: str) -> None:
    memcgs = {**family(), DEAD: replace(family()[DEAD], offline=True)}
    objcgs = {0xD0 + n: Objcg(0xD0 + n, DEAD, nid, False, 0) for n in range(number)}
    [finding] = rows(snapshot(memcgs=memcgs, objcgs=objcgs), "reparenting")
    assert (finding.kind, finding.memcg, finding.nid) == ("not-reparented", DEAD, nid)
    assert (finding.difference, finding.evidence_is) == (-number, "proof")
    assert finding.what == f"{what} and not to its parent"
    assert [evidence.address for evidence in finding.evidence] == list(objcgs)


def test_free_pages_that_are_still_charged() -> None:
    """One finding for each memcg and node, whatever the counters say."""
    pages = [(0x10, OBJCG_A, 0), (0x20, OBJCG_A, 0), (0x30, OBJCG_B, 1), (0x40, 0xBAD, 1)]
    freed = [FreedPage(*page) for page in pages]
    found = [pending.finding for pending in freed_findings(snapshot(freed=freed))]
    assert [(f.memcg, f.nid, f.evidence_total, f.difference) for f in found] == [
        (A, 0, 2, None),
        (B, 1, 1, None),
        (None, 1, 1, None),
    ]
    assert {(f.identity, f.kind, f.item, f.unit, f.evidence_is) for f in found} == {
        ("kmem", "charged-free-page", "free pages", "pages", "proof")
    }
    assert [evidence.address for evidence in found[0].evidence] == [0x10, 0x20]
    assert found[0].what == (
        "2 pages in the page allocator's free lists on node 0 are still charged as kernel memory"
    )
    assert "1 page in the page allocator's free lists on node 1 is" in found[1].what
