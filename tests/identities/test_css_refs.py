# SPDX-License-Identifier: LGPL-2.1-or-later
"""The identity ``css_refs``, by hand and on images of real kernels."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from drgn import Object
from drgn.helpers.linux.block import disk_name, for_each_disk
from drgn.helpers.linux.cpumask import for_each_online_cpu
from drgn.helpers.linux.percpu import per_cpu_ptr
from drgn.helpers.linux.sched import cpu_curr
from support.charge_module import GUESTS, guest_image
from support.findings import by_path, named
from support.guests import (
    BUILT_KERNELS,
    DEBIAN_KERNELS,
    KERNELS,
    PERNODE_KERNELS,
    ROOT,
    GuestImage,
    Lab,
)
from support.live_guest import from_outside, kept
from support.made import DEAD, A, B, features, ledger, snapshot
from support.planters.css_refs import of_memcg
from support.planting import Subject
from support.stack_words import check_is_found, undoubted

from memcg_inspect.checks.identities.css_refs import css_ref_rows
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.ledger import ChargeKind
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.kernel.stacktrace import read_running
from memcg_inspect.model import ChargeStock, Coverage, CssRefs, StackRef
from memcg_inspect.model_tasks import ActiveMemcg
from memcg_inspect.report import Finding, Report, Row, RowStatus
from memcg_inspect.views.dying import MemcgRow, dying

#: References to ``/a``, ``/a/b`` and the removed ``/a/dead``, with every kind of holder.
REFS = {
    A: CssRefs(11, 5, 1, True, 1, css_sets=(1, 2), mms=(3,), writebacks=(4,), events=1),
    B: CssRefs(4, 6, 1, True, 1),
    DEAD: CssRefs(3, 7, 2, False, 0),
}


def made(off: int = 0, **more: object) -> Snapshot:
    """Return a snapshot in which ``/a/b`` may have references that nothing holds."""
    held: dict[str, object] = {
        "css": REFS | {B: REFS[B]._replace(refs=REFS[B].refs + off)},
        "charge_stocks": [ChargeStock(0, A, 7), ChargeStock(1, B, 0)],
        "css_holders": {"notify": {B: 1}, "zswap": {DEAD: 1}, "released": {A: 1}},
        "charges": ledger(
            {(DEAD, "sock", "TCP", -1): (4096, 1), (A, "lru", "lru", 0): (8192, 2)},
        ),
    }
    return snapshot(**(held | more))


def row_of(memcg: int, taken: Snapshot) -> Row:
    [row] = [row for row in css_ref_rows(taken) if row.memcg == memcg]
    return row


def findings(taken: Snapshot) -> list[Finding]:
    found = [pending.finding for pending in judge(taken).findings]
    return [finding for finding in found if finding.identity == "css_refs"]


def status(taken: Snapshot, memcg: int = B) -> RowStatus:
    [row] = [r for r in judge(taken).rows if r.identity == "css_refs" and r.memcg == memcg]
    return row.status


def test_each_holder_counts() -> None:
    rows = {row.memcg: row for row in css_ref_rows(made())}
    assert rows.keys() == {A, B, DEAD}
    assert {row.status for row in rows.values()} == {"exact"}
    found = {memcg: Counter(row.found) for memcg, row in rows.items()}
    assert +found[A] == {
        "memcg": 1,
        "id": 1,
        "css_set": 2,
        "mm": 1,
        "writeback": 1,
        "event": 1,
        "child": 2,
        "released": 1,
        "stock": 1,
    }
    # A slot of the stock that has used all its pages refers to the memcg still (up to 6.15).
    assert +found[B] == {"memcg": 1, "id": 1, "stock": 1, "notify": 1}
    # Swap entries hold one reference together.
    assert +found[DEAD] == {"id": 1, "sock": 1, "zswap": 1}


def test_an_id_without_references_holds_none() -> None:
    """mem_cgroup_id_put() dropped the one of the ID with the last reference to it."""
    for references, held in ((0, 0), (1, 1), (2, 1)):
        css = REFS | {B: REFS[B]._replace(id_refs=references)}
        assert row_of(B, made(css=css)).found["id"] == held


def test_user_pages_hold_references_up_to_7_1() -> None:
    before = made(features=features(lru_holds_objcg=False))
    assert row_of(A, before).found["lru"] == 2
    assert status(before, A) == "differs"


@pytest.mark.parametrize(
    ("off", "kind"), [(1, "unknown-references"), (-1, "missing-references"), (-4, None)]
)
def test_other_references_than_were_found(off: int, kind: str | None) -> None:
    [finding] = findings(made(off))
    assert (finding.memcg, finding.item, finding.difference) == (B, "css.refcnt", off)
    assert finding.kind == (kind or "missing-references")


def test_holders_that_could_not_be_read() -> None:
    for subject, holders in (
        ("memcgs", "memcgs, which hold references to their parents,"),
        ("charge_stock", "charge stocks"),
        ("other_socks", "sockets of protocols without a slab cache"),
        ("notify", "groups of inotify and fanotify"),
        ("zswap_cursor", "zswap's cursors"),
    ):
        coverage = {subject: Coverage(1, 1)}
        row = row_of(B, made(1, coverage=coverage))
        reason = f"{holders} are not all in the image"
        assert (row.status, row.reason) == ("unverifiable", reason)
        # What is missing can only add to what was found.
        assert status(made(-1, coverage=coverage)) == "differs"
    broken = REFS | {B: REFS[B]._replace(whole=False)}
    row = row_of(B, made(css=broken))
    assert (row.status, row.reason) == (
        *("unverifiable", "lists of what holds references to it are not all in the image"),
    )
    assert status(made(css={A: REFS[A], DEAD: REFS[DEAD]})) == "unverifiable"
    lost = made(1)
    lost.ledger.note_missing("sock")
    assert status(lost) == "unverifiable"


@pytest.mark.parametrize(
    ("kind", "before", "reason"),
    [
        ("sock", False, "sockets are not all in the image"),
        (
            "slab",
            False,
            "slabs, which contain groups of inotify and fanotify, are not all in the image",
        ),
        ("lru", False, None),
        ("lru", True, "user pages are not all in the image"),
        ("percpu", True, None),
    ],
)
def test_charges_that_could_not_be_read(kind: ChargeKind, before: bool, reason: str | None) -> None:
    """
    User pages refer to a memcg up to 7.1 only.

    :param before: whether the kernel is one of these
    """
    taken = made(1, features=features(lru_holds_objcg=not before))
    taken.ledger.note_missing(kind)
    row = row_of(B, taken)
    assert (row.status, row.reason) == ("unverifiable" if reason else "differs", reason)


def holding(*functions: str, words: int = 1, cpu: int | None = None) -> dict[int, list[StackRef]]:
    return {B: [StackRef(7, "sh", cpu, words, functions)]}


def test_a_task_that_holds_a_reference_for_a_moment() -> None:
    sleeping = holding("schedule_timeout", "mem_cgroup_handle_over_high")
    assert status(made(1, css_stacks=sleeping)) == "in-flight"
    assert status(made(-1, css_stacks=sleeping)) == "in-flight"
    # It has one pointer to the memcg, so it does not hold two references.
    assert status(made(2, css_stacks=sleeping)) == "differs"
    # It takes the reference of the page before that refers to the memcg.
    twice = holding("__rcu_read_unlock", "charge_memcg", words=9, cpu=1)
    assert status(made(2, css_stacks=twice)) == "in-flight"
    assert status(made(3, css_stacks=twice)) == "differs"
    more = holding("shrink_node", "try_charge_memcg", words=9, cpu=1)
    assert status(made(2, css_stacks=more)) == "in-flight"
    assert status(made(3, css_stacks=more)) == "differs"
    # One for all pages, and that of the page which no longer refers to the memcg.
    freeing = holding("uncharge_folio", "shrink_node", words=9, cpu=1)
    assert status(made(3, css_stacks=freeing)) == "in-flight"
    assert status(made(4, css_stacks=freeing)) == "differs"
    # Reclaim because of memory.high, in a charge.
    high = holding(
        "try_to_free", "shrink_node", "__mem_cgroup_handle_over_high", "try_charge", words=9
    )
    assert status(made(3, css_stacks=high)) == "in-flight"
    assert status(made(4, css_stacks=high)) == "differs"
    # A walk of zswap, and reclaim under another name, hold one each.
    both = holding("zswap_shrinker_count", "memory_reclaim", words=9)
    assert status(made(2, css_stacks=both)) == "in-flight"
    assert status(made(3, css_stacks=both)) == "differs"
    # A task that points to another memcg explains nothing here.
    other = {A: more[B]}
    assert status(made(1, css_stacks=other)) == "differs"


def test_a_pointer_that_may_be_left_over() -> None:
    for functions in ((), ("do_sys_poll", "schedule")):
        assert status(made(1, css_stacks=holding(*functions))) == "unverifiable"
        assert status(made(2, css_stacks=holding(*functions))) == "differs"
    # Of functions that hold none, one reference at most is left over, however many words there are.
    assert status(made(2, css_stacks=holding("do_sys_poll", words=9))) == "differs"


def test_a_task_whose_registers_are_not_known() -> None:
    """One that runs has no stack to unwind in a running guest: it may charge and reclaim."""
    unknown = holding(words=12, cpu=3)
    assert status(made(6, css_stacks=unknown)) == "unverifiable"
    assert status(made(7, css_stacks=unknown)) == "differs"


def test_a_reason_names_the_tasks() -> None:
    taken = made(1, css_stacks={B: [*holding("schedule")[B], *holding(cpu=3)[B]]})
    assert row_of(B, taken).reason == (
        "sh (7), sh (7) on CPU 3 may hold references to the memcg: a stack or register may point "
        "to it"
    )
    taken = made(
        1, css_stacks={B: [*holding("f", "shrink_node")[B], *holding("css_put", cpu=3)[B]]}
    )
    [row] = [r for r in judge(taken).rows if r.identity == "css_refs" and r.memcg == B]
    assert row.reason == (
        "at most 1 reference of sh (7), in shrink_node; "
        "at most 1 reference of sh (7) on CPU 3, in css_put"
    )


def test_interrupts_that_charge_the_memcg() -> None:
    """set_active_memcg() in an interrupt holds a reference, and a charge one more."""
    cpu = ActiveMemcg(B, "CPU 1", None, None, "softirq", None)
    for cpus in (1, 2):
        active = [cpu] * cpus
        row = row_of(B, made(2 * cpus, active_memcgs=active))
        assert (row.status, row.reason) == (
            "unverifiable",
            "interrupts of CPU 1 charge the memcg, and may hold references",
        )
        assert row_of(B, made(2 * cpus + 1, active_memcgs=active)).status == "differs"
    # of another memcg, or by a task, whose stack shows it
    for other in (cpu._replace(memcg=A), cpu._replace(task=0x7000, owner=A)):
        assert row_of(B, made(1, active_memcgs=[other])).status == "differs"


def test_holders_that_nobody_can_count() -> None:
    taken = made(3, css_others="the out-of-tree module zfs may hold references")
    row = row_of(B, taken)
    assert (row.status, row.reason) == ("unverifiable", taken.css_others)
    # That something holds more explains nothing where references are missing.
    assert status(replace(made(-3), css_others=taken.css_others)) == "differs"
    assert status(replace(made(), css_others=taken.css_others)) == "exact"


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_exact_on_images_and_not_for_want_of_holders(lab: Lab, kernel: str) -> None:
    held: Counter[str] = Counter()
    for workload, freeze in (("mixed", "settled"), ("dying", "settled"), ("churn", "busy")):
        image = lab.image(kernel, "4", workload, freeze=freeze)
        report = image.report()
        rows = [row for row in report.rows if row.identity == "css_refs"]
        assert len(rows) == len(report.memcgs) - 1
        if freeze == "settled":
            assert {row.status for row in rows} == {"exact"}
        # A task may have been stopped with a reference that its stack does not prove, or a CPU
        # while it called callbacks of RCU.
        assert {row.status for row in rows} <= {"exact", "in-flight", "unverifiable"}
        for row in rows:
            held.update(row.found)
    assert {kind for kind, number in held.items() if number} >= {
        *("memcg", "id", "child", "css_set", "mm", "sock", "stock"),
        *(("lru",) if kernel.startswith("6.") else ()),
    }


def held(report: Report) -> dict[str, Row]:
    """Return the rows of an image of ``fixtures/workloads/holders.c``, by path."""
    paths = {memcg.address: memcg.path for memcg in report.memcgs}
    return {paths[r.memcg or 0]: r for r in report.rows if r.identity == "css_refs"}


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", [*KERNELS, *PERNODE_KERNELS])
def test_holders_beside_tasks_and_memory(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "2", "holders")
    report = image.report()
    assert report.verdict == "exact"
    removed = {memcg.path for memcg in report.memcgs if memcg.state == "dying"}
    assert {"/holders/gone"} <= removed <= {"/holders/gone", "/holders/wrote"}
    rows = held(report)
    # 3 groups of inotify; one of fanotify where there is any, which Debian's kernels have.
    assert rows["/holders/notify"].found["notify"] == 3 + (kernel in DEBIAN_KERNELS)
    # Nothing but a group of inotify and a socket of netlink keep this one. Up to 7.0 pages do, too.
    assert +Counter(rows["/holders/gone"].found) - Counter(lru=9) == {"notify": 1, "sock": 1}
    # Nothing but writeback and pages keep that one. When the file was written, after half a minute,
    # cleanup_offline_cgwbs_workfn() lets go of it.
    if "/holders/wrote" in rows:
        wrote = +Counter(rows["/holders/wrote"].found) - Counter(lru=9)
        assert wrote in (Counter(), Counter(writeback=1))
    assert rows["/holders/writes"].found["writeback"] == 1
    throttled = rows.pop("/holders/high")
    assert {row.status for row in rows.values()} == {"exact"}
    # get_mem_cgroup_from_mm() in __mem_cgroup_handle_over_high(), which sleeps
    assert (throttled.status, throttled.difference) == ("in-flight", 1)
    assert "mem_cgroup_handle_over_high" in (throttled.reason or "")
    # The view counts the same holders.
    for row in dying(image_of(image.program())).tables[0].rows:
        assert isinstance(row, MemcgRow)
        assert (row.memcg, row.references, row.unexplained) == (row.memcg, row.explained, 0)


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_throttled_task_excuses_one_reference(lab: Lab, kernel: str) -> None:
    subject = Subject(lab.image(kernel, "2", "holders").program())
    path = "/holders/high"
    assert held(subject.report)[path].difference == 1
    check_is_found(subject, subject.paths[path], path, 1, holders=1)


TOGGLED = Path(__file__).parents[2] / "fixtures/scenes/toggled.sh"


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_sockets_without_a_cache_and_zombies_of_another_memcg(lab: Lab, kernel: str) -> None:
    modules = (("+tun", ""), ("+af_alg", ""))
    image = lab.image(kernel, "1", "families", modules=modules, run=str(TOGGLED))
    subject = Subject(image.program())
    rows = held(subject.report)
    assert subject.report.verdict == "exact"
    named_sockets = [e for e, _ in subject.snapshot.ledger if e.kind == "sock"]
    assert {"NETLINK", "PACKET", "ALG", "tun", "UNIX", "TCP"} <= {e.detail for e in named_sockets}
    # The cgroup has a new memcg. Zombies are in the old ones.
    old = [m.address for m in subject.snapshot.memcgs.values() if m.state == "dying"]
    sets = Counter(len(subject.snapshot.css[memcg].css_sets) for memcg in old)
    assert sets[1] >= 2
    assert rows["/toggled/c"].found["css_set"] == 1
    path = "/families/all"
    for off in (1, -1):
        check_is_found(subject, subject.paths[path], path, off)


@pytest.mark.image
@pytest.mark.parametrize("kernel", [k for k in BUILT_KERNELS if k in ("6.12-lab", "7.3-lab")])
def test_events_of_cgroup_v1(lab: Lab, kernel: str) -> None:
    report = lab.image(kernel, "2", "holders", cgroup="v1").report()
    assert report.verdict == "exact"
    rows = held(report)
    assert rows["/holders/event"].found["event"] == 1
    assert {row.status for row in rows.values()} == {"exact"}


@pytest.mark.image
@pytest.mark.parametrize("kernel", [k for k in BUILT_KERNELS if k == "7.3-lab"])
def test_requests_of_loop_devices_may_hold_references(lab: Lab, kernel: str) -> None:
    subject = Subject(lab.image(kernel, "2", "holders").program())
    path = undoubted(subject, 1, ("/holders/notify", *subject.victims()))
    fault = of_memcg(subject, subject.paths[path], path, 1)
    loop = next(d for d in for_each_disk(subject.prog) if disk_name(d) == b"loop0")
    in_flight = per_cpu_ptr(loop.part0.bd_stats, 1).in_flight[0].a
    busy = fault._replace(writes=(*fault.writes, subject.add(in_flight, 1)))
    row = held(subject.audit(busy))[path]
    assert (row.status, row.difference) == ("unverifiable", 1)
    assert "loop0" in (row.reason or "")


@pytest.mark.image
@pytest.mark.parametrize(("kernel", "append"), [g for g in GUESTS if g[0] == "7.3-lab"][:1])
def test_modules_that_are_not_part_of_the_kernel_may_hold_references(
    lab: Lab, kernel: str, append: str, tmp_path: Path
) -> None:
    subject = Subject(guest_image(lab, kernel, append, tmp_path).program())
    # References that are missing are found: a module explains none of these.
    path = undoubted(subject, -1, subject.victims())
    more = of_memcg(subject, subject.paths[path], path, 1)
    row = held(subject.audit(more))[path]
    assert (row.status, row.difference) == ("unverifiable", 1)
    assert "module charge" in (row.reason or "")


@pytest.mark.image
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_a_throttled_task_of_a_running_kernel(kernel: str, tmp_path: Path) -> None:
    """It sleeps longer than all samples take, always with the same reference."""
    guest = ("--nodes", "2", "--workload", "holders", "--freeze", "none")
    with kept(tmp_path, kernel, *guest) as qmp:
        # Between two sleeps it runs for some ms, and may be paused then.
        seen = {(): set[str](), ("--pause",): set[str]()}
        for options in 3 * (*seen,):
            if seen[options] & {"in-flight", "moving"}:
                continue
            report = from_outside(qmp, *options)["report"]
            assert report["findings"] == []
            names = {memcg["address"]: memcg["path"] for memcg in report["memcgs"]}
            rows = {
                names[row["memcg"]]: row for row in report["rows"] if row["identity"] == "css_refs"
            }
            assert rows.keys() == set(names.values()) - {"/"}
            seen[options].add(rows["/holders/high"]["status"])
            assert rows["/holders/writes"]["status"] == "exact"
        assert all(found & {"in-flight", "moving"} for found in seen.values())
        assert "differs" not in set().union(*seen.values())


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_sockets_that_wait_for_a_grace_period(lab: Lab, kernel: str) -> None:
    """Sockets of UDP that are closed hold hundreds of references, and look free."""
    # The kernel ignores the word. A guest can be stopped when a grace period has just ended.
    for number in range(6):
        append = f"lab.try={number}" * (number > 0)
        image = lab.image(kernel, "2", "sockclose", freeze="busy", append=append)
        subject = Subject(image.program())
        rows = held(subject.report)
        assert named(subject.report, "css_refs") == set()
        # A task may have been stopped while it made a socket, or a CPU while it called RCU
        # callbacks.
        doubtful = [row for row in rows.values() if row.status == "unverifiable"]
        assert all("hold references" in (row.reason or "") for row in doubtful)
        calling = any("rcu_do_batch" in cpu.functions for cpu in read_running(subject.image))
        path = "/sockclose/other"
        row = held(subject.audit(of_memcg(subject, subject.paths[path], path, 5_000)))[path]
        assert row.status == "differs" or (
            calling and "callbacks that CPU" in (row.reason or "")
        ), row
        if sum(row.found.get("closing", 0) for row in rows.values()) > 10:
            break
    else:
        raise AssertionError("no socket waits for a grace period")


def freeing_a_socket(lab: Lab, kernel: str) -> tuple[GuestImage, Object, int]:
    """
    Return a guest that was stopped in sk_destruct(), before its first instruction.

    :return: the guest, the task, and the ``struct mem_cgroup *`` of the socket, which is online
    """
    # The kernel ignores the word. The memcg of the socket may be the root, or removed.
    for number in range(8):
        append = f"lab.try={number}" * (number > 0)
        image = lab.image(kernel, "4", "churn", freeze="in:sk_destruct", seed=0, append=append)
        prog, online = image.program(dwarf=True), by_path(image.report())
        begin = prog.symbol("sk_destruct").address
        for cpu in for_each_online_cpu(prog):
            task = cpu_curr(prog, cpu)
            [frame, *_] = prog.stack_trace(task)
            # Another CPU may have been further in, and have dropped the reference.
            if frame.pc == begin:
                memcg = frame["sk"].sk_memcg.value_()
                if memcg in online.values() and memcg != online["/"]:
                    return image, task, memcg
        assert named(image.report(), "css_refs") == set()
    raise AssertionError("the memcgs of all sockets are the root, or removed")


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_socket_that_a_task_is_freeing(lab: Lab, kernel: str) -> None:
    """Its slot looks free, and no stack has a pointer to its memcg, only one to the socket."""
    image, task, memcg = freeing_a_socket(lab, kernel)
    subject = Subject(image.program())
    assert named(subject.report, "css_refs") == set()
    path = next(path for path, address in subject.paths.items() if address == memcg)
    freeing = f"{task.comm.string_().decode()} ({task.pid.value_()})"
    # The socket holds one reference. Other tasks may hold some, and callbacks of RCU, too.
    others = re.compile(rf"callbacks that CPU|\w \((?!{task.pid.value_()}\))|at most [2-9]")
    before = held(subject.report)[path]
    reason = before.reason or ""
    assert before.status in ("in-flight", "unverifiable"), before
    assert freeing in reason or others.search(reason), before
    row = held(subject.audit(of_memcg(subject, memcg, path, 5_000)))[path]
    assert row.status == "differs" or "callbacks that CPU" in (row.reason or ""), row
    row = held(subject.audit(of_memcg(subject, memcg, path, 1)))[path]
    assert row.difference == (before.difference or 0) + 1
    assert row.status == "differs" or others.search(row.reason or ""), row


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize(
    ("kernel", "functions"),
    [
        *(("6.1", "call_rcu"), ("6.12", "__call_rcu_common"), ("7.3", "__call_rcu_common")),
        ("7.3-lab", "__call_rcu_common.constprop.0"),
    ],
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_socket_whose_callback_is_not_queued_yet(
    lab: Lab, kernel: str, functions: str, seed: int
) -> None:
    """
    The task has a pointer to its ``struct rcu_head``; sk_destruct() jumped to call_rcu().

    There is one CPU, so nothing calls callbacks of RCU meanwhile.
    """
    freeze = f"in:inet_release/{functions}/rcu_segcblist_enqueue"
    subject = Subject(
        lab.image(kernel, "1", "sockclose", freeze=freeze, seed=seed, cpus=1).program()
    )
    assert not subject.report.findings
    path = "/sockclose/other"
    row = held(subject.audit(of_memcg(subject, subject.paths[path], path, 5_000)))[path]
    assert row.status == "differs"


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "freeze",
    [
        "busy",
        pytest.param("in:sock_diag_broadcast_destroy", marks=pytest.mark.long),
        pytest.param("in:sock_diag_broadcast_destroy_work", marks=pytest.mark.long),
        # Those that free the socket may all have jumped to it, and left no trace of themselves.
        pytest.param("in:inet_release/__queue_work", marks=pytest.mark.long),
    ],
)
def test_sockets_whose_end_is_reported(lab: Lab, kernel: str, freeze: str) -> None:
    """A work item frees each while somebody listens (ss -E). Until then it looks free."""
    subject = Subject(lab.image(kernel, "2", "sockdiag", freeze=freeze, seed=1).program())
    assert named(subject.report, "css_refs") == set()
    path = "/sockdiag/other"
    row = held(subject.audit(of_memcg(subject, subject.paths[path], path, 5_000)))[path]
    assert row.status == "differs" or "callbacks that CPU" in (row.reason or "")


@pytest.mark.long
@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_socket_whose_refcount_is_never_dropped(lab: Lab, kernel: str) -> None:
    """The slot of the last one still looks as if it had a user: sk_free() was called alone."""
    # Another CPU could be calling callbacks, which may free anything.
    image = lab.image(kernel, "1", "testrun", freeze="in:bpf_prog_test_run_skb", cpus=1)
    subject, path = Subject(image.program()), "/testrun/one"
    assert subject.report.verdict == "exact"
    assert held(subject.report)[path].status == "exact"
    assert held(subject.report)[path].found["sock"] == 0
    for off in (-1, 1):
        check_is_found(subject, subject.paths[path], path, off)


CHARGE = "charge_memcg/__rcu_read_unlock"
#: It takes a reference for all pages that it uncharges, then drops that of the page. That of a page
#: of the kernel's memory is a third one, so a file is truncated.
UNCHARGE = "shmem_undo_range/uncharge_folio/__rcu_read_unlock/__rcu_read_lock"


@pytest.mark.image
@pytest.mark.parametrize(
    ("kernel", "functions"),
    [
        ("6.1", CHARGE),
        pytest.param("6.1", UNCHARGE, marks=pytest.mark.long),
        pytest.param("6.12", UNCHARGE, marks=pytest.mark.long),
    ],
)
def test_a_task_holds_two_references_while_it_charges_a_page(
    lab: Lab, kernel: str, functions: str
) -> None:
    """A guest that was stopped between the reference of the page, and the page's pointer."""
    subject = stopped_between(lab, kernel, functions)
    memcg = subject.paths["/faults"]
    [row] = [r for r in subject.report.rows if (r.identity, r.memcg) == ("css_refs", memcg)]
    assert (row.difference, row.status) == (2, "in-flight")


def stopped_between(lab: Lab, kernel: str, functions: str) -> Subject:
    """
    Return a guest that was stopped in functions, which are called one after the other.

    The tick that was due while the guest stood still may come in between, and calls some, too.
    """
    scene = str(ROOT / "fixtures" / "scenes" / "faults.sh")
    # Both are inlined: only debug info has them.
    place = "css_get" if functions == CHARGE else "css_put"
    for number in range(6):
        image = lab.image(
            *(kernel, "1", "idle"),
            freeze=f"in:{functions}",
            cpus=1,
            run=scene,
            append=f"lab.attempt={number}",
        )
        prog = image.program(dwarf=True)
        if place in [frame.name for frame in prog.stack_trace(cpu_curr(prog, 0))]:
            break
    return Subject(image.program())
