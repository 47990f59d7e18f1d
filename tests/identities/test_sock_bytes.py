# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The identities ``sock`` and ``sock_bytes``, by hand and on images of real kernels.

The workload ``sockqueues`` fills the queues whose bytes sockets count without charging them;
``sockmap`` makes the kernel charge bytes that sockets do not count.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from drgn import Object
from support.findings import by_path, named, touched
from support.guest_files import numbers
from support.guests import (
    BUILT_KERNELS,
    DEBIAN_KERNELS,
    KERNELS,
    GuestImage,
    Lab,
    Plant,
    series,
)
from support.made import A, B, features, ledger, snapshot
from support.sockets import sockets_of

from memcg_inspect.checks.identities.sock_bytes import sock_bytes_rows
from memcg_inspect.checks.identities.usage import usage_rows
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.rows import Missing, RowKey, doubted, make_row
from memcg_inspect.checks.sockets import SockRemainder, SockUsage, UnknownSock
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.linux.net.sock import Sock
from memcg_inspect.report import Report

PAGE = 4096
QUEUES = ("icmp", "timestamps", "zerocopy", "mptcp")
REMAINDERS = (SockRemainder(0x1000, "TCP", 1), SockRemainder(0x2000, "UDP", -100))

newest_kernel = [
    pytest.mark.image,
    pytest.mark.newest_kernel,
    pytest.mark.parametrize("kernel", KERNELS),
]


def test_sockets_are_counted_one_by_one() -> None:
    """Two errors that cancel are two sockets that have not charged whole pages."""
    taken = snapshot(sockets={A: SockUsage(5, REMAINDERS), B: SockUsage(2)})
    rows = {row.memcg: row for row in sock_bytes_rows(taken)}
    assert rows.keys() == {A, B}
    assert (rows[A].found, rows[A].claimed) == ({"whole_pages": 3}, {"sockets": 5})
    assert [rows[A].status, rows[B].status] == ["differs", "exact"]
    [finding] = [x.finding for x in judge(taken).findings if x.finding.identity == "sock_bytes"]
    assert (finding.kind, finding.evidence_is) == ("socket-charge-not-whole-pages", "proof")
    assert [(e.address, e.kind, e.note) for e in finding.evidence] == [
        (0x1000, "TCP", "1 byte above whole pages"),
        (0x2000, "UDP", "100 bytes below whole pages"),
    ]
    assert finding.what == "2 sockets have not charged whole pages"
    taken = snapshot(sockets={A: SockUsage(5, REMAINDERS[:1])})
    [finding] = [x.finding for x in judge(taken).findings if x.finding.identity == "sock_bytes"]
    assert finding.what == "1 socket has not charged whole pages"


def test_sockets_that_could_not_be_read() -> None:
    """They are not among the sockets, so what was read is exact, or differs all the same."""
    charges = ledger({})
    charges.note_missing("sock")
    for remainders, status in (((), "unverifiable"), (REMAINDERS, "differs")):
        taken = snapshot(sockets={A: SockUsage(5, remainders)}, charges=charges)
        [row] = sock_bytes_rows(taken)
        assert row.status == status
        reason = "sockets are not all in the image"
        assert row.reason == (reason if status == "unverifiable" else None)


@pytest.mark.parametrize(("has_remainder", "status"), [(True, "unverifiable"), (False, "exact")])
def test_a_socket_whose_memory_is_not_known(has_remainder: bool, status: str) -> None:
    usage = SockUsage(2, (), (UnknownSock("it is locked", True, has_remainder),))
    [row] = sock_bytes_rows(snapshot(sockets={A: usage}))
    assert row.status == status
    assert row.reason == ("it is locked" if has_remainder else None)


@pytest.mark.parametrize(("is_v2", "status"), [(True, "unverifiable"), (False, "differs")])
def test_memory_usage_has_such_a_socket_on_v2(is_v2: bool, status: str) -> None:
    usage = SockUsage(2, (), (UnknownSock("it is locked", True, False),))
    taken = snapshot(
        features=replace(features(), default_hierarchy=is_v2), sockets={B: usage}, usage={B: 3}
    )
    [row] = [row for row in usage_rows(taken) if row.memcg == B]
    assert (row.status, row.off) == (status, 3)


@pytest.mark.parametrize(
    ("claimed", "either_way", "status"),
    [
        (5, True, "exact"),
        (5, False, "exact"),
        (6, True, "unverifiable"),
        (6, False, "unverifiable"),
        (4, True, "unverifiable"),
        (4, False, "differs"),
    ],
)
def test_a_doubt_says_nothing_of_what_is_exact(claimed: int, either_way: bool, status: str) -> None:
    row = make_row(RowKey("sock", "MEMCG_SOCK", "pages", A), {"sock": 5}, {"folded": claimed})
    assert doubted(row, Missing("lent", either_way)).status == status
    assert doubted(row, None) == row


def field(sock: Sock, member: str) -> str:
    return f"Object(prog, 'struct sock *', {sock.address:#x}).{member}"


def sock_object(image: GuestImage, sock: Sock) -> Object:
    return Object(image.program(), "struct sock *", sock.address)


def with_errors(image: GuestImage) -> list[Sock]:
    """Return the sockets of ``/queues/icmp`` with something in the error queue."""
    return [
        sock for sock in sockets_of(image)["icmp"] if sock_object(image, sock).sk_error_queue.qlen
    ]


def closed_socket(image: GuestImage) -> Sock:
    """Return a UDP socket of ``/queues/timestamps`` with something in its receive queue."""
    sockets = sockets_of(image)["timestamps"]
    return max(sock for sock in sockets if sock.protocol == "UDP" and sock.charged)


def statuses(report: Report) -> dict[str, set[tuple[str, str]]]:
    """Return (identity, status) of the rows about sockets by the last part of the memcg."""
    paths = {address: path for path, address in by_path(report).items()}
    found: dict[str, set[tuple[str, str]]] = {}
    for row in report.rows:
        if row.identity in ("sock", "sock_bytes", "usage"):
            name = paths[row.memcg or 0].rpartition("/")[2]
            found.setdefault(name, set()).add((row.identity, row.status))
    return found


EXACT = {("sock", "exact"), ("sock_bytes", "exact"), ("usage", "exact")}


class TestQueues:
    pytestmark = newest_kernel

    def test_exact(self, lab: Lab, kernel: str) -> None:
        """What was found is what the guest said, although sockets count more, or less."""
        image = lab.image(kernel, "2", "sockqueues")
        report = image.report()
        assert report.verdict == "exact"
        said = {
            path.rpartition("/")[2]: value // PAGE
            for (path, name, _), value in numbers(image.guest / "2/cgroup", "memory.stat").items()
            if name == "sock" and path.startswith("/queues/")
        }
        paths = {address: path for path, address in by_path(report).items()}
        found = {
            paths[row.memcg or 0].rpartition("/")[2]: row.found["sock"]
            for row in report.rows
            if row.identity == "sock" and paths[row.memcg or 0].startswith("/queues/")
        }
        assert found == said
        counted: Counter[str] = Counter()
        for name, socks in sockets_of(image).items():
            for sock in socks:
                sk = sock_object(image, sock)
                counted[name] += int(
                    sk.sk_forward_alloc + sk.sk_backlog.rmem_alloc.counter + sk.sk_wmem_queued
                )
        more = {name for name in said if counted[name] > said[name] * PAGE}
        assert more >= {"icmp", "timestamps", "zerocopy"}
        # In 6.1 and 6.12, MPTCP has a sk_forward_alloc of its own.
        assert (counted["mptcp"] < said["mptcp"] * PAGE) == (series(kernel) in ("6.1", "6.12"))
        assert said.keys() == set(QUEUES)
        for name in ("timestamps", "zerocopy", *(["mptcp"] if kernel in DEBIAN_KERNELS else [])):
            assert said[name] >= 10, name

    def test_bytes_of_sockets(self, lab: Lab, plant: Plant, kernel: str) -> None:
        """One byte, errors that cancel, and a buffer in an error queue, in a memcg each."""
        image = lab.image(kernel, "2", "sockqueues")
        sockets = sockets_of(image)
        byte = max(sockets["zerocopy"])
        one, other = sorted(s for s in sockets["timestamps"] if s.charged)[:2]
        error = max(with_errors(image))
        skb = sock_object(image, error).sk_error_queue.next.value_()
        report = plant(
            image,
            (field(byte, "sk_forward_alloc"), "old + 1"),
            (field(one, "sk_forward_alloc"), "old + 300"),
            (field(other, "sk_forward_alloc"), "old - 300"),
            (f"Object(prog, 'struct sk_buff *', {skb:#x}).truesize", "old - 8"),
        )
        assert named(report, "sock_bytes") == {
            ("/queues/zerocopy", None, "sk_forward_alloc", 1),
            ("/queues/timestamps", None, "sk_forward_alloc", 2),
            ("/queues/icmp", None, "sk_forward_alloc", 1),
        }
        assert len(report.findings) == 3
        proofs = {e.address for finding in report.findings for e in finding.evidence}
        assert proofs == {byte.address, one.address, other.address, error.address}

    def test_pages_of_sockets(self, lab: Lab, plant: Plant, kernel: str) -> None:
        """A page too many, and a socket that is free: both counters of ``sk_free()`` are 0."""
        image = lab.image(kernel, "2", "sockqueues")
        sock, freed = max(sockets_of(image)["zerocopy"]), closed_socket(image)
        report = plant(
            image,
            (field(sock, "sk_forward_alloc"), f"old + {PAGE}"),
            (field(freed, "__sk_common.skc_refcnt.refs.counter"), "0"),
            (field(freed, "sk_wmem_alloc.refs.counter"), "0"),
        )
        assert named(report, "sock") == {
            ("/queues/zerocopy", None, "MEMCG_SOCK", -1),
            ("/queues/timestamps", None, "MEMCG_SOCK", freed.charged // PAGE),
        }
        assert not named(report, "sock_bytes")
        assert touched(report, "/queues/zerocopy", "/queues/timestamps")

    def test_doubtful_sockets(self, lab: Lab, plant: Plant, kernel: str) -> None:
        """
        A task may have changed one counter of a socket that it owns and not the next.

        What is in an error queue without an end is unknown. Rows of other memcgs do not suffer.
        """
        image = lab.image(kernel, "2", "sockqueues")
        locked, broken = max(sockets_of(image)["zerocopy"]), max(with_errors(image))
        skb = sock_object(image, broken).sk_error_queue.next.value_()
        report = plant(
            image,
            (field(locked, "sk_forward_alloc"), f"old + {PAGE + 1}"),
            (field(locked, "sk_lock.owned"), "1"),
            (f"Object(prog, 'struct sk_buff *', {skb:#x}).next", f"{skb}"),
        )
        assert (report.verdict, report.findings) == ("incomplete", ())
        found = statuses(report)
        for name in ("zerocopy", "icmp"):
            assert found[name] == {(identity, "unverifiable") for identity, _ in EXACT}, name
        assert found["timestamps"] == EXACT
        assert found["mptcp"] <= EXACT

    def test_legal_states(self, lab: Lab, plant: Plant, kernel: str) -> None:
        """A locked socket at rest, and one that was closed while buffers were in flight."""
        image = lab.image(kernel, "2", "sockqueues")
        locked, closed = max(sockets_of(image)["zerocopy"]), closed_socket(image)
        report = plant(
            image,
            (field(locked, "sk_lock.owned"), "1"),
            (field(closed, "__sk_common.skc_refcnt.refs.counter"), "0"),
        )
        assert report.verdict == "exact"


class TestSockmap:
    """The program of workload ``sockmap`` holds back 20,000 bytes, which no counter shows."""

    pytestmark = newest_kernel

    def test_messages_held_back(self, lab: Lab, kernel: str) -> None:
        report = lab.image(kernel, "2", "sockmap").report()
        assert (report.verdict, report.findings) == ("incomplete", ())
        found = statuses(report)
        assert found["corked"] == {(identity, "unverifiable") for identity, _ in EXACT}
        assert found["idle"] == EXACT
        paths = by_path(report)
        [row] = [
            r for r in report.rows if r.identity == "sock" and r.memcg == paths["/sockmap/corked"]
        ]
        assert row.difference == -(-20000 // PAGE)
        assert "sk_msg_alloc()" in (row.reason or "")

    def test_a_counter_below(self, lab: Lab, plant: Plant, kernel: str) -> None:
        """A message that is held back adds to the counter: less than was found is a fault."""
        image = lab.image(kernel, "2", "sockmap")
        memcg = by_path(image.report())["/sockmap/corked"]
        slot = StatReader(image_of(image.program()), ["MEMCG_SOCK"]).slots["MEMCG_SOCK"]
        stats = f"Object(prog, 'struct mem_cgroup *', {memcg:#x}).vmstats_percpu"
        report = plant(image, (f"per_cpu_ptr({stats}, 0).state[{slot}]", "old - 7"))
        assert named(report, "sock") == {("/sockmap/corked", None, "MEMCG_SOCK", -2)}
        assert report.verdict == "findings"


@pytest.mark.image
@pytest.mark.parametrize("kernel", [k for k in BUILT_KERNELS if k == "7.3-lab"])
def test_sockets_closed_with_datagrams_in_flight(lab: Lab, kernel: str) -> None:
    """They wait for ARP, in no file and in no hash table: Debian's kernels cannot do this here."""
    image = lab.image(kernel, "2", "closed")
    report = image.report()
    assert report.verdict == "exact"
    said = numbers(image.guest / "2/cgroup", "memory.stat")["/closed/udp", "sock", None]
    assert said // PAGE >= 20
    paths = by_path(report)
    [row] = [r for r in report.rows if r.identity == "sock" and r.memcg == paths["/closed/udp"]]
    assert row.found["sock"] == said // PAGE
    sockets = sockets_of(image)["udp"]
    assert len(sockets) == 3
    assert {int(sock_object(image, s).__sk_common.skc_refcnt.refs.counter) for s in sockets} == {0}
