# SPDX-License-Identifier: LGPL-2.1-or-later
"""The identity ``updated``, by hand and on images of real kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from drgn import Object
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.percpu import per_cpu_ptr
from support.guests import KERNELS, PERNODE_KERNELS, Lab
from support.made import ROOT, A, B, family, snapshot
from support.planters.updated import unfolded
from support.planting import Fault, Subject

from memcg_inspect.checks.identities.updated import updated_rows
from memcg_inspect.checks.inflight import mark_in_flight
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Running
from memcg_inspect.model_counters import Unfolded

#: On no list of either CPU, or on that of CPU 0 or CPU 1.
NONE, FIRST, SECOND = ({0: cpu == 0, 1: cpu == 1} for cpu in (None, 0, 1))
MANY = ("NR_ANON_MAPPED", "NR_FILE_PAGES", "NR_PAGETABLE", "PGFAULT")


def left(
    changed: Mapping[int, tuple[str, ...]] | None = None,
    updated: Mapping[int, bool] = NONE,
    pending: tuple[str, ...] = (),
) -> Unfolded:
    return Unfolded(changed or {}, pending, updated)


def made(**by_name: Unfolded) -> Snapshot:
    """Return a snapshot of memcgs ``a`` and ``b`` on two CPUs; others have no changes."""
    found = {memcg: left() for memcg in family()}
    found |= {{"a": A, "b": B}[name]: unfolded for name, unfolded in by_name.items()}
    return snapshot(unfolded=found)


def statuses(taken: Snapshot, *running: Running) -> dict[int | None, str]:
    """Return the status of rows that are not exact, with CPUs that were stopped."""
    taken = replace(taken, running=running)
    rows = mark_in_flight(taken, updated_rows(taken))
    return {row.memcg: row.status for row in rows if row.status != "exact"}


def test_changes_on_a_list_will_be_folded() -> None:
    rows = {row.memcg: row for row in updated_rows(made(a=left({0: MANY}, FIRST, ("NR_SHMEM",))))}
    assert {row.status for row in rows.values()} == {"exact"}
    assert (rows[A].found, rows[A].claimed) == ({"listed": 5}, {"changed": 5})
    assert rows[ROOT].found == {"listed": 0}
    # A single one is not lost if it is on a list.
    rows = {row.memcg: row for row in updated_rows(made(a=left({0: ("PGFAULT",)}, FIRST)))}
    assert (rows[A].found, rows[A].claimed) == ({"listed": 1}, {"changed": 1})


def test_the_list_of_another_cpu_does_not_fold_them() -> None:
    taken = made(a=left({0: MANY}, SECOND))
    [finding] = [p.finding for p in judge(taken).findings if p.finding.identity == "updated"]
    assert (finding.kind, finding.memcg, finding.difference) == ("never-folded", A, 4)
    assert [evidence.note for evidence in finding.evidence] == [f"CPU 0: {', '.join(MANY)}"]
    assert [evidence.kind for evidence in finding.evidence] == ["mem_cgroup"]
    assert (finding.item, finding.unit) == ("unfolded counters", "references")


def test_one_lost_update_is_legal_and_many_are_not() -> None:
    one = made(a=left({0: ("PGFAULT",)}))
    assert statuses(one) == {}
    assert {row.memcg: row.found for row in updated_rows(one)}[A] == {"listed": 0, "lost": 1}
    # Others may be in what could not be read.
    unread = left({0: ("PGFAULT",)})._replace(complete=False)
    assert statuses(made(a=unread)) == {A: "unverifiable"}
    assert statuses(made(a=left({0: MANY[:3]}), b=left({1: ("PGFAULT",)}))) == {}
    three = made(a=left({0: ("PGFAULT",), 1: ("PGFAULT",)}), b=left({1: ("PGFAULT",)}))
    assert statuses(three) == {A: "differs", B: "differs"}


def test_more_updates_may_be_lost_where_there_are_many_memcgs() -> None:
    """One in 64 pairs of a memcg and a CPU, and two: of 64 memcgs on 2 CPUs, four."""
    child = family()[B]
    memcgs = {ROOT: family()[ROOT]} | {
        n: replace(child, address=n, parent=ROOT, payer=n) for n in range(1, 64)
    }

    def lost(number: int) -> set[str]:
        found = {n: left({0: ("PGFAULT",)} if 0 < n <= number else {}) for n in memcgs}
        return {row.status for row in updated_rows(snapshot(memcgs=memcgs, unfolded=found))}

    assert lost(4) == {"exact"}
    assert "differs" in lost(5)


def test_a_finding_names_what_is_lost_beyond_what_is_legal() -> None:
    """CPU 1 has lost one update, which is legal. What is pending is on no list either."""
    taken = made(a=left({0: MANY, 1: ("PGFAULT",)}, NONE, ("NR_SHMEM",)))
    [finding] = [p.finding for p in judge(taken).findings if p.finding.identity == "updated"]
    assert (finding.memcg, finding.difference) == (A, 5)
    of_cpu, pending = f"CPU 0: {', '.join(MANY)}", "state_pending: NR_SHMEM"
    assert finding.what == (
        "changes of 5 counters are not folded, and the memcg is on no list to fold them from "
        f"({of_cpu}; {pending})"
    )
    assert [(e.address, e.note) for e in finding.evidence] == [(A, of_cpu), (A, pending)]
    # What is pending will be folded from any list.
    taken = made(a=left({0: MANY}, SECOND, ("NR_SHMEM",)))
    [finding] = [p.finding for p in judge(taken).findings if p.finding.identity == "updated"]
    assert [e.note for e in finding.evidence] == [of_cpu]


def test_what_children_handed_up_needs_any_list() -> None:
    assert statuses(made(a=left({}, SECOND, ("NR_SHMEM",)))) == {}
    assert statuses(made(a=left({}, NONE, ("NR_SHMEM",)))) == {A: "differs"}


def test_lists_that_could_not_be_read() -> None:
    assert statuses(made(a=left({0: MANY}, {1: False}))) == {A: "unverifiable"}
    assert statuses(made(a=left({1: MANY}, {1: False}))) == {A: "differs"}
    assert statuses(made(a=left({}, {1: False}, ("NR_SHMEM",)))) == {A: "unverifiable"}
    gone = snapshot(unfolded={memcg: left() for memcg in family() if memcg != B})
    assert statuses(gone) == {B: "unverifiable"}
    [row] = [r for r in updated_rows(made(a=left({0: MANY}, {1: False}))) if r.memcg == A]
    assert row.reason == "lists of updated memcgs are not all in the image"


def test_changes_on_a_node_that_had_no_memory_for_a_time() -> None:
    """They may be on no list. Changes on other nodes may not."""
    for cpu, updated, status in ((0, SECOND, "unverifiable"), (0, FIRST, "exact")):
        taken = made(a=left({}, updated)._replace(unsteady={cpu: 2}))
        assert statuses(taken) == ({A: status} if status != "exact" else {})
    assert statuses(made(a=left({}, FIRST)._replace(unsteady={None: 2}))) == {}
    assert statuses(made(a=left({}, NONE)._replace(unsteady={None: 2}))) == {A: "unverifiable"}
    assert statuses(made(a=left({0: MANY}, SECOND)._replace(unsteady={0: 2}))) == {A: "differs"}


def test_counters_that_could_not_be_read() -> None:
    """They may be changed, and on no list; what was read and is on no list differs all the same."""
    partial = left({1: MANY}, SECOND)._replace(complete=False)
    assert statuses(made(a=partial)) == {A: "unverifiable"}
    assert statuses(made(a=partial._replace(updated=NONE))) == {A: "differs"}
    [row] = [row for row in updated_rows(made(a=partial)) if row.memcg == A]
    assert row.reason == "counters of the memcg, or of one of its nodes, are not in the image"


def test_a_flush_that_was_stopped() -> None:
    """It took the memcgs off the list of one CPU."""
    off = made(a=left({0: MANY}), b=left({0: MANY}))
    frames = ("mem_cgroup_css_rstat_flush", "css_rstat_flush", "process_one_work")
    flushing = Running(1, 7, "kworker", frames, True)
    assert statuses(off, flushing) == {A: "unverifiable", B: "unverifiable"}
    assert statuses(off, flushing._replace(functions=("unknown",))) == statuses(off, flushing)
    row, *_ = mark_in_flight(replace(off, running=(flushing,)), updated_rows(off)[1:])
    assert row.reason == "a flush may be half done: CPU 1 (kworker, 7)"
    assert statuses(off, flushing._replace(busy=False)) == {A: "differs", B: "differs"}
    elsewhere = flushing._replace(functions=("osq_lock", *frames[2:], "kthread"))
    assert statuses(off, elsewhere) == {A: "differs", B: "differs"}
    two = made(a=left({0: MANY}), b=left({1: MANY}))
    assert statuses(two, flushing) == {A: "differs", B: "differs"}


def changes(now: Object, before: Object) -> set[int]:
    pairs = zip(now.read_(), before.read_(), strict=True)
    return {n for n, (a, b) in enumerate(pairs) if a.value_() != b.value_()}


def pending_of(memcg: Object) -> int:
    """Return the most counters that children may have handed up."""
    stats = memcg.vmstats
    return len(stats.state_pending) + len(stats.events_pending)


def check_lists(lab: Lab, kernel: str, nodes: str, workload: str, **more: str) -> None:
    """
    Check that nothing is off the lists, and that a plain walk finds as many changes.

    A healthy machine may have lost an update, or be stopped in a flush.
    """
    image = lab.image(kernel, nodes, workload, **more)
    rows = [row for row in image.report().rows if row.identity == "updated"]
    assert len(rows) == len(image.report().memcgs)
    off = {(row.status, row.reason) for row in rows if row.status != "exact"}
    assert {status for status, _ in off} <= {"unverifiable"}
    assert all(reason and reason.endswith("flushing, or may have been") for _, reason in off)
    prog = image.program(dwarf=True)
    nodes_of = range(prog["nr_node_ids"].value_())
    for row in rows:
        memcg = Object(prog, "struct mem_cgroup *", row.memcg)
        per_node = [memcg.nodeinfo[nid].lruvec_stats_percpu for nid in nodes_of]
        changed = 0
        for cpu in for_each_possible_cpu(prog):
            own = per_cpu_ptr(memcg.vmstats_percpu, cpu)
            slots = changes(own.state, own.state_prev)
            for stats in per_node:
                of_node = per_cpu_ptr(stats, cpu)
                slots |= changes(of_node.state, of_node.state_prev)
            changed += len(slots) + len(changes(own.events, own.events_prev))
        assert row.claimed is not None
        assert row.claimed["changed"] >= changed >= row.claimed["changed"] - pending_of(memcg)


@pytest.mark.long
@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", [*KERNELS, *PERNODE_KERNELS])
def test_changes_are_on_lists(lab: Lab, kernel: str) -> None:
    check_lists(lab, kernel, "4", "traffic", freeze="busy")
    check_lists(lab, kernel, "4", "mixed")


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("nodes", ["2cpu+6mem"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_nodes_without_cpus(lab: Lab, kernel: str, nodes: str) -> None:
    check_lists(lab, kernel, nodes, "mixed")


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", [*KERNELS, *PERNODE_KERNELS])
def test_a_cpu_that_lost_its_list(lab: Lab, kernel: str) -> None:
    """Changes of several memcgs on one CPU: the list that they were on is empty."""
    subject = Subject(lab.image(kernel, "4", "mixed").program())
    left = {path: subject.snapshot.unfolded[subject.paths[path]] for path in subject.victims()}
    free = [path for path, u in left.items() if not u.updated[1] and 1 not in u.changed]
    # One in 64 pairs of a memcg and a CPU, and 2, may have lost an update. Some may have lost one
    # in the guest.
    lost = {row.memcg: row.found["lost"] for row in subject.report.rows if "lost" in row.found}
    pairs = sum(
        cpu in u.changed and not on
        for u in subject.snapshot.unfolded.values()
        for cpu, on in u.updated.items()
    )
    legal = 2 + len(subject.snapshot.memcgs) * subject.snapshot.image.cpus // 64 - pairs
    assert 0 < legal < len(free)
    for number in (legal, legal + 1):
        chosen = free[:number]
        # Totals of ancestors change once. That is another fault, of other identities.
        writes = {w.address: w for path in chosen for w in unfolded(subject, path, 1, 1)}
        report = subject.audit(Fault(tuple(writes.values()), tuple(chosen), set()))
        found = [f for f in report.findings if f.identity == "updated"]
        planted = {subject.paths[path] for path in chosen}
        assert {f.memcg for f in found} == (set() if number == legal else planted | lost.keys())
        assert all(f.kind == "never-folded" for f in found)
        assert all("CPU 1" in f.what for f in found if f.memcg in planted)
