# SPDX-License-Identifier: LGPL-2.1-or-later
"""The identities ``local`` and ``local_fold``, by hand and on images of real kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.exact import not_kept
from support.guests import KERNELS, PERNODE_KERNELS, Lab
from support.guests import ROOT as TOP
from support.made import DEAD, ROOT, A, B, family, features, snapshot
from support.planters.local import move
from support.planting import Fault, Subject

from memcg_inspect.checks.counters import Counters
from memcg_inspect.checks.identities.local import local_rows
from memcg_inspect.checks.identities.local_fold import local_fold_rows
from memcg_inspect.checks.identities.slab import ITEMS as SLAB_ITEMS
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Nodes, Stat
from memcg_inspect.model_counters import LocalStat
from memcg_inspect.model_kernel import LocalItems
from memcg_inspect.report import Row

LRU, SLAB = "NR_INACTIVE_ANON", "NR_SLAB_RECLAIMABLE_B"
ITEMS = LocalItems(frozenset({LRU, SLAB}), frozenset({LRU, SLAB}))
Locals = dict[int, int]
#: The LRU lists.
LISTS = {f"NR_{s}_{kind}" for s in ("INACTIVE", "ACTIVE") for kind in ("ANON", "FILE")}
LISTS |= {"NR_UNEVICTABLE"}


def made(local: Locals, item: str = LRU, since: dict[int, int] | None = None) -> Snapshot:
    """
    ``/a/b`` has 30, and ``/a`` 12, of which 5 are on the removed ``/a/dead`` still.

    :param local: other local counters than the right ones
    """
    state = {ROOT: 42, A: 40, B: 30, DEAD: 5}
    pending = {ROOT: 0, A: 2, B: 0, DEAD: 0}
    right = {ROOT: 2, A: 7, B: 30, DEAD: 5} | local
    stats = {m: {item: Stat(state[m], pending[m], 99, right[m])} for m in state}
    return snapshot(
        features=features(LRU, local=ITEMS, has_local=True),
        memcg_stats=stats,
        lruvec_stats={(m, 0): stat for m, stat in stats.items()},
        nodes=(0,),
        csses_since=since or {},
    )


def by_memcg(rows: list[Row], nid: int | None = 0, item: str = LRU) -> dict[int | None, Row]:
    return {row.memcg: row for row in rows if row.nid == nid and row.item == item}


def test_a_memcg_and_those_removed_from_it_have_its_share() -> None:
    rows = local_rows(made({}))
    for nid in (None, 0):
        found = by_memcg(rows, nid)
        assert {row.status for row in found.values()} == {"exact"}
        assert found.keys() == {ROOT, A, B}
        assert found[A].found == {"state": 10, "state_pending": 2}
        assert found[A].claimed == {"state_local": 12}
    # Nor is more shown of slab memory, of which removed memcgs may leave some.
    for since in ({}, {A: 1}):
        [*_, slab] = (row for row in local_rows(made({}, SLAB, since)) if row.memcg == A)
        assert (slab.status, slab.found) == ("exact", {"state": 10, "state_pending": 2})


def test_a_memcg_that_has_only_what_its_children_have_has_no_row() -> None:
    stats = {m: {LRU: Stat(0, 0, 0, 0)} for m in (ROOT, A, B, DEAD)}
    stats |= {ROOT: {LRU: Stat(5, 0, 0, 0)}, A: {LRU: Stat(5, 0, 0, 5)}}
    taken = replace(
        made({}), counters=Counters(family(), stats, {(m, 0): s for m, s in stats.items()})
    )
    assert by_memcg(local_rows(taken)).keys() == {A}


@pytest.mark.parametrize("off", [-1, 1, 4_000])
def test_a_local_counter_that_is_off_is_a_finding(off: int) -> None:
    found = by_memcg(local_rows(made({A: 7 + off})))
    assert (found[A].status, found[A].difference) == ("differs", off)
    assert (found[B].status, found[ROOT].status) == ("exact", "exact")
    findings = [p.finding for p in judge(made({A: 7 + off})).findings]
    kind = "local-counter-above" if off > 0 else "local-counter-below"
    assert {(f.kind, f.memcg, f.difference) for f in findings if f.identity == "local"} == {
        (kind, A, off)
    }


def test_what_a_removed_memcg_did_not_give_to_its_parent_is_missing() -> None:
    memcgs = family()
    del memcgs[DEAD]
    taken = made({})
    stats = {m: {LRU: stat} for m in memcgs if (stat := taken.counters.stat(m, LRU)) is not None}
    freed = snapshot(
        memcgs=memcgs,
        features=taken.features,
        memcg_stats=stats,
        lruvec_stats={(m, 0): stat for m, stat in stats.items()},
        nodes=(0,),
    )
    rows = by_memcg(local_rows(freed))
    assert {m: row.difference for m, row in rows.items()} == {ROOT: 0, A: -5, B: 0}


def test_slab_memory_that_was_in_two_stocks_may_be_left() -> None:
    # 2 CPUs, 32 KiB each
    most = {1: 1 << 16, 3: 3 << 16}
    for memcgs, limit in most.items():
        for off, status in ((1, "exact"), (limit, "exact"), (limit + 1, "differs")):
            rows = local_rows(made({A: 7 + off}, SLAB, {A: memcgs}))
            row = by_memcg(rows, item=SLAB)[A]
            assert (row.status, row.found.get("clamped")) == (
                (status, off) if status == "exact" else (status, None)
            )
    # That of the memcg is the sum of those of its nodes.
    one = made({A: 7 + (2 << 16)}, SLAB, {A: 1})
    assert by_memcg(local_rows(one), None, SLAB)[A].status == "differs"
    assert by_memcg(local_rows(one), 0, SLAB)[A].status == "differs"
    stats = {m: {SLAB: one.counters.stat(m, SLAB) or Stat(0, 0, 0)} for m in family()}
    two = snapshot(
        features=one.features,
        memcg_stats=stats,
        lruvec_stats={(m, nid): stat for m, stat in stats.items() for nid in (0, 1)},
        csses_since={A: 1},
    )
    assert by_memcg(local_rows(two), None, SLAB)[A].status == "exact"
    assert by_memcg(local_rows(two), 0, SLAB)[A].status == "differs"
    too_little = by_memcg(local_rows(made({A: 6}, SLAB, {A: 9})), item=SLAB)[A]
    assert (too_little.status, too_little.difference) == ("differs", -1)
    pages = by_memcg(local_rows(made({A: 8}, LRU, {A: 9})))[A]
    assert (pages.status, pages.difference) == ("differs", 1)


def test_nodes_that_the_kernel_does_not_flush() -> None:
    """What a removed memcg had there is in the local counter of the memcg, but not of others."""
    for memory, statuses in (((0,), ("differs", "differs")), ((), ("unverifiable",) * 2)):
        taken = replace(made({A: 8}), all_nodes=Nodes(with_memory=frozenset(memory)))
        rows = local_rows(taken)
        assert tuple(by_memcg(rows, nid)[A].status for nid in (None, 0)) == statuses


def test_slab_memory_if_it_is_not_known_how_many_memcgs_were_removed() -> None:
    """css_serial_nr_next is not in the image, or has no symbol."""
    found = {
        off: by_memcg(local_rows(made({A: 7 + off}, SLAB)), item=SLAB)[A] for off in (-1, 0, 1)
    }
    status = {off: row.status for off, row in found.items()}
    assert status == {-1: "differs", 0: "exact", 1: "unverifiable"}
    assert found[1].reason == (
        "how many memcgs were removed is not known, which leave slab memory in this counter"
    )
    # Without the number, a memcg may have left as much in each stock as if there were 1 << 32.
    most = (1 << 32) * (2 << 15)
    beyond = [by_memcg(local_rows(made({A: 7 + n}, SLAB)), item=SLAB)[A] for n in (most, most + 1)]
    assert [row.status for row in beyond] == ["unverifiable", "differs"]


def test_kernels_that_lose_local_counters() -> None:
    [outcome] = [i for i in judge(snapshot()).identities if i.name == "local"]
    assert (outcome.status, bool(outcome.reason)) == ("not-kept", True)
    [outcome] = [i for i in judge(snapshot()).identities if i.name == "local_fold"]
    assert (outcome.status, bool(outcome.reason)) == ("not-kept", True)


def test_local_counters_are_what_was_folded() -> None:
    kernel = features(LRU, has_local=True)
    # Counters that are 0 are left out. Those of slab memory have a row all the same, if they were
    # read: here only those of a node were.
    folded = {
        (A, None): {SLAB: LocalStat(96, 96), LRU: LocalStat(4, 4), "NR_SHMEM": LocalStat(3, 4)},
        (DEAD, 1): {SLAB: LocalStat(-8, 0)},
    }
    rows = local_fold_rows(snapshot(features=kernel, local=folded))
    read = [row for row in rows if row.claimed is not None]
    other = next(item for item in SLAB_ITEMS.values() if item != SLAB)
    assert {(row.memcg, row.nid, row.item, row.unit, row.difference) for row in read} == {
        (A, None, SLAB, "bytes", 0),
        (A, None, "NR_SHMEM", "pages", -1),
        (DEAD, 1, SLAB, "bytes", -8),
        (DEAD, 1, other, "bytes", 0),
    }
    # The memcgs' own counters were not read.
    unread = [row for row in rows if row.claimed is None]
    assert {row.nid for row in unread} == {None}
    assert {(row.status, row.reason) for row in unread} == {
        ("unverifiable", "its counter is not in the image")
    }
    assert all(row.found == {} for row in unread)


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", [*KERNELS, *PERNODE_KERNELS])
def test_exact_on_images_with_removed_memcgs(lab: Lab, kernel: str) -> None:
    for workload in ("mixed", "dying"):
        report = lab.image(kernel, "4", workload).report()
        assert any(memcg.state == "dying" for memcg in report.memcgs)
        for name in {"local", "local_fold"} - not_kept(kernel):
            rows = [row for row in report.rows if row.identity == name]
            assert {row.status for row in rows} == {"exact"}
            assert sum(any(row.found.values()) for row in rows) > 10


@pytest.mark.image
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k == "7.3-lab"])
def test_what_cgroup_v1_reparents(lab: Lab, kernel: str) -> None:
    """The LRU lists, and for the memcg what its memory.stat shows; not slab memory."""
    report = lab.image(kernel, "4", "mixed", cgroup="v1").report()
    rows = [row for row in report.rows if row.identity == "local"]
    assert {row.status for row in rows} == {"exact"}
    lists = {row.item for row in rows if row.nid is not None}
    assert lists and lists <= LISTS
    shown = {row.item for row in rows if row.nid is None}
    assert {"NR_FILE_PAGES", *lists} <= shown
    assert not any("SLAB" in item for item in shown)


@pytest.mark.image
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.startswith("7.3")])
def test_a_parent_that_was_given_nothing(lab: Lab, kernel: str) -> None:
    """As if the kernel had not moved the local counters of a removed memcg before it was freed."""
    subject = Subject(lab.image(kernel, "4", "dying").program())
    path, nid = subject.largest("lru")
    pn = subject.memcg(path).nodeinfo[nid]
    local = subject.snapshot.local[subject.paths[path], nid]
    item = max(
        {"NR_INACTIVE_ANON", "NR_ACTIVE_ANON", "NR_INACTIVE_FILE", "NR_ACTIVE_FILE"} & local.keys(),
        key=lambda item: local[item].local,
    )
    lost = local[item].local
    assert lost > 0
    writes = move(subject, pn.lruvec_stats, pn.lruvec_stats_percpu, item, -lost)
    report = subject.audit(Fault(tuple(writes), (path,), set()))
    assert [(f.identity, f.nid, f.item, f.difference) for f in report.findings] == [
        ("local", nid, item, -lost)
    ]


@pytest.mark.long
@pytest.mark.image
@pytest.mark.parametrize("kernel", ["7.3"])
def test_stocks_of_two_cpus_leave_slab_memory(lab: Lab, kernel: str) -> None:
    """
    The parent of removed memcgs may have more than it should, and the kernel is healthy.

    How much depends on the CPUs that the guest's tasks ran on.
    """
    image = lab.image(kernel, "2", run=str(TOP / "fixtures/scenes/removed.sh"))
    report = image.report()
    assert report.findings == () and report.verdict == "exact"
    rows = [row for row in report.rows if row.identity == "local"]
    assert any("SLAB" in row.item for row in rows)
    assert all("SLAB" in row.item for row in rows if "clamped" in row.found)
