# SPDX-License-Identifier: LGPL-2.1-or-later
"""What one socket has charged: an idle socket of TCP in an image, in which members are changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from drgn import FaultError, Object, Program, offsetof, sizeof
from drgn.helpers.linux.list import list_for_each_entry
from support.guests import Lab
from support.layouts import MadeImage
from support.planting import Overlay, Write

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.memcontrol import read_memcgs
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.slab import Slab, SlabReader
from memcg_inspect.linux.net import sock as module
from memcg_inspect.linux.net.skbuff import SkbReader
from memcg_inspect.linux.net.sock import Protocol, Sock, SockReader, socket_caches
from memcg_inspect.model import Coverage

pytestmark = pytest.mark.image

PAGE = 4096
#: ``SK_USER_DATA_PSOCK``
PSOCK = 4


class Idle:
    """
    An idle socket of TCP, which has charged nothing.

    :ivar sock: ``struct sock *``
    :ivar reader: the reader that has read the socket last
    """

    def __init__(self, prog: Program) -> None:
        self.prog, self.image, self.overlay = prog, Image(prog), Overlay(prog)
        self.memcgs = set(read_memcgs(self.image, Coverage()))
        self.slabs = SlabReader(self.image)
        self.reader = SockReader(self.image, self.slabs)
        self.slab, address = self._find()
        self.sock = Object(prog, "struct sock *", address)
        protos = Object(prog, "struct list_head *", prog.symbol("proto_list").address)
        self.protos = list(list_for_each_entry("struct proto", protos, "node"))

    def _find(self) -> tuple[Slab, int]:
        for piece in scan_pages(self.image):
            for slab in filter(None, map(self.slabs.slab, piece.slabs)):
                if slab.cache.name == "TCP":
                    for sock in self.reader.read(slab, self.memcgs):
                        if not sock.charged:
                            return slab, sock.address
        raise AssertionError("no idle socket of TCP")

    def put(self, thing: Object | int, value: int | bytes, size: int = 8) -> None:
        """Change a member, or memory at an address."""
        if isinstance(thing, Object):
            assert thing.address_ is not None
            thing, size = thing.address_, sizeof(thing)
        if isinstance(value, int):
            value = (value % 2 ** (8 * size)).to_bytes(size, "little")
        self.overlay.write((Write(thing, value),))

    def forward(self, size: int) -> None:
        self.put(self.sock.sk_forward_alloc, size)

    def proto(self, name: str) -> Object:
        """Return a ``struct proto *``."""
        return next(proto for proto in self.protos if proto.name.string_() == name.encode())

    def be(self, name: str) -> None:
        """Make it a socket of a protocol that accounts memory, by another name."""
        proto = self.proto("UDPv6")
        self.put(self.sock.member_("__sk_common").skc_prot, proto.value_())
        self.put(proto.name.address_ or 0, name.encode() + b"\0")

    def all(self) -> dict[int, Sock]:
        """Return the sockets of its slab."""
        self.reader = SockReader(self.image, self.slabs, {self.slab.cache.address: TCP})
        return {sock.address: sock for sock in self.reader.read(self.slab, self.memcgs)}

    def read(self) -> Sock:
        return self.all()[self.sock.value_()]

    def why(self) -> tuple[str, bool]:
        """Return why what it has charged is not known."""
        unknown = self.read().unknown
        assert unknown is not None
        return unknown.reason, unknown.either_way


TCP = Protocol("TCP", True)


@pytest.fixture(scope="module", params=["7.3", "6.1"])
def of_module(lab: Lab, request: pytest.FixtureRequest) -> Idle:
    return Idle(lab.image(request.param, "4", "mixed").program())


@pytest.fixture
def idle(of_module: Idle) -> Iterator[Idle]:
    yield of_module
    of_module.overlay.clear()


@pytest.mark.parametrize(
    ("size", "charged", "remainder"),
    [
        (0, 0, 0),
        (PAGE, PAGE, 0),
        (3 * PAGE, 3 * PAGE, 0),
        (PAGE + 100, PAGE, 100),
        (2 * PAGE - 100, 2 * PAGE, -100),
        (PAGE // 2, PAGE, -PAGE // 2),
        (PAGE // 2 - 1, 0, PAGE // 2 - 1),
        (-PAGE, -PAGE, 0),
    ],
)
def test_a_socket_charges_whole_pages(idle: Idle, size: int, charged: int, remainder: int) -> None:
    """The nearest number of pages: what is left is the remainder."""
    idle.forward(size)
    found = idle.read()
    assert found == Sock(
        idle.sock.value_(), idle.sock.sk_memcg.value_(), charged, "TCP", True, remainder
    )
    assert idle.reader.coverage.unreadable == idle.reader.queues.unreadable == 0


def test_bytes_in_queues_are_charged(idle: Idle) -> None:
    idle.forward(1000)
    idle.put(idle.sock.sk_backlog.rmem_alloc, 2000)
    idle.put(idle.sock.sk_wmem_queued, 1096)
    assert idle.read()[2:6] == (PAGE, "TCP", True, 0)


def test_a_slot_is_a_socket_if_it_is_in_use_and_refers_to_a_memcg(idle: Idle) -> None:
    whole, memcg = idle.all(), idle.sock.sk_memcg
    others = whole.keys() - {idle.sock.value_()}
    assert idle.reader.coverage.read == len(whole)
    for thing, value in ((memcg, 0x1000), (memcg, 0), (idle.sock.sk_wmem_alloc, 0)):
        idle.put(thing, value)
        assert idle.all().keys() == others
        assert idle.reader.coverage.read == len(others)
        idle.overlay.clear()
    assert idle.all() == whole


def test_sockets_that_a_protocol_made(idle: Idle) -> None:
    """Whether they refer to a memcg or not; a protocol that is on no list has made none."""

    def in_use() -> bool:
        idle.all()
        return idle.sock.value_() in set(idle.reader.in_use(idle.slab))

    assert in_use()
    idle.put(idle.sock.sk_memcg, 0)
    assert in_use()
    idle.put(idle.sock.sk_wmem_alloc, 0)
    assert not in_use()
    idle.put(idle.sock.sk_wmem_alloc, 1)
    idle.put(idle.sock.sk_prot_creator, 0x1000)
    assert not in_use()
    other = idle.slab._replace(cache=idle.slab.cache._replace(address=0x1000))
    idle.put(idle.sock.sk_prot_creator, idle.proto("TCP").value_())
    assert in_use()
    assert list(idle.reader.in_use(other)) == []


def test_a_protocol_that_is_not_in_the_image(idle: Idle) -> None:
    """Then it is that of the cache."""
    idle.put(idle.sock.member_("__sk_common").skc_prot, 0x1000)
    assert idle.read().protocol == "TCP"
    (missed,) = idle.reader.coverage.examples
    assert (missed.what, missed.address) == ("protocol of a socket", 0x1000)


def test_a_protocol_that_does_not_account_memory(idle: Idle) -> None:
    """Its sockets hold a reference to the memcg, and charge nothing."""
    idle.put(idle.sock.member_("__sk_common").skc_prot, idle.proto("RAW").value_())
    idle.forward(PAGE)
    assert idle.read() == Sock(idle.sock.value_(), idle.sock.sk_memcg.value_(), 0, "RAW")


def test_a_socket_that_a_task_has_locked(idle: Idle) -> None:
    idle.put(idle.sock.sk_lock.owned, 1)
    reason, either_way = idle.why()
    assert "locked by a task" in reason
    assert either_way


def test_a_socket_of_sockmap(idle: Idle) -> None:
    """Bit 2 of ``sk_user_data`` says that it is one. Other bits do not."""
    idle.put(idle.sock.sk_user_data, 3)
    assert idle.read().unknown is None
    idle.put(idle.sock.sk_user_data, 0x10 | PSOCK)
    reason, either_way = idle.why()
    assert reason == "kTLS and sockmap charge messages that no counter shows (sk_msg_alloc())"
    assert not either_way


def ulp_of(idle: Idle, name: int) -> None:
    """Let an upper layer protocol have its name at an address."""
    prog = idle.prog
    ops = name - offsetof(prog.type("struct tcp_ulp_ops"), "name")
    inet = Object(prog, "struct inet_connection_sock *", idle.sock.value_())
    idle.put(inet.icsk_ulp_ops, ops)


@pytest.mark.parametrize("protocol", ["TCP", "TCPv6"])
def test_a_socket_with_an_upper_layer_protocol(idle: Idle, protocol: str) -> None:
    """That of MPTCP lends bytes to other sockets, so that it need not charge whole pages."""
    spare = idle.proto("RAW").name.address_ or 0
    idle.be(protocol)
    for name, words in ((b"tls\0", "kTLS"), (b"\0", "kTLS"), (b"mptcp\0", "MPTCP")):
        idle.put(spare, name)
        ulp_of(idle, spare)
        idle.forward(PAGE + 100)
        reason, either_way = idle.why()
        assert reason.startswith(words)
        assert not either_way
    assert idle.read()[2:6] == (PAGE + 100, protocol, True, 0)


def test_an_upper_layer_protocol_that_is_not_in_the_image(idle: Idle) -> None:
    ulp_of(idle, 0x2000)
    idle.forward(PAGE)
    reason, either_way = idle.why()
    assert reason.startswith("the queues of a TCP socket are not all in the image")
    assert either_way
    assert idle.read().charged == PAGE
    assert [missed.what for missed in idle.reader.queues.examples] == ["queue of a socket"]


@pytest.mark.parametrize("name", ["UDP", "UDPv6", "UDP-Lite", "UDPLITEv6", "SCTP", "SCTPv6"])
def test_protocols_that_charge_what_is_in_queues(idle: Idle, name: str) -> None:
    idle.be(name)
    idle.forward(PAGE)
    assert idle.read() == Sock(idle.sock.value_(), idle.sock.sk_memcg.value_(), PAGE, name, True)


def test_a_protocol_of_which_nothing_is_known(idle: Idle) -> None:
    idle.be("QUIC")
    assert idle.why() == ("how QUIC sockets charge memory is not known", True)


@pytest.mark.parametrize("name", ["SCTP", "SCTPv6"])
def test_what_sctp_sends_is_not_all_charged(idle: Idle, name: str) -> None:
    idle.be(name)
    idle.put(idle.sock.sk_wmem_queued, 512)
    reason, either_way = idle.why()
    assert reason == "SCTP counts a struct sctp_chunk for each chunk, and does not charge it"
    assert either_way


@pytest.mark.parametrize("name", ["MPTCP", "MPTCPv6"])
def test_mptcp_has_a_counter_of_its_own_for_what_it_receives(idle: Idle, name: str) -> None:
    """Up to 6.12; its sockets need not charge whole pages."""
    idle.be(name)
    idle.forward(PAGE)
    mptcp = idle.prog.type("struct mptcp_sock")
    more = 0
    if mptcp.has_member("rmem_fwd_alloc"):
        idle.put(idle.sock.value_() + offsetof(mptcp, "rmem_fwd_alloc"), 77, 4)
        more = 77
    found = idle.read()
    assert found[2:6] == (PAGE + more, name, True, 0)
    assert idle.why()[0].startswith("MPTCP")
    assert bool(more) == mptcp.has_member("rmem_fwd_alloc")


def test_an_error_queue_that_is_not_in_the_image(idle: Idle) -> None:
    """What the counters say is charged is all that is known."""
    idle.put(idle.sock.sk_error_queue.next, 0x1000)
    idle.forward(PAGE + 1)
    reason, either_way = idle.why()
    assert reason.startswith("the queues of a TCP socket are not all in the image")
    assert either_way
    assert idle.read()[2:6] == (PAGE, "TCP", True, 1)
    assert idle.reader.queues.unreadable == 1


def test_a_task_that_reads_an_error_queue(idle: Idle, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a buffer that is counted and in no queue, so the remainder is no wonder."""
    monkeypatch.setattr(module, "socks_with_error_readers", lambda *_: [idle.sock.value_()])
    assert idle.read().unknown is None
    idle.forward(PAGE + 100)
    reason, either_way = idle.why()
    assert "is reading the error queue" in reason
    assert either_way
    idle.put(idle.sock.sk_lock.owned, 1)
    assert "locked by a task" in idle.why()[0]
    monkeypatch.setattr(module, "socks_with_error_readers", lambda *_: [0x1000])
    idle.put(idle.sock.sk_lock.owned, 0)
    assert idle.read()[5:] == (100, None)


def test_protocols_that_share_a_cache(idle: Idle) -> None:
    """One that accounts memory is preferred, wherever it is on the list."""
    names = ("TCP", "UDP", "RAW", "PING", "UNIX-STREAM")
    protos = [idle.proto(name) for name in names]
    cache = protos[0].slab.value_()
    for accounting in protos[:2]:
        for proto in protos:
            idle.put(proto.slab, cache)
            is_one = proto.value_() == accounting.value_()
            idle.put(proto.memory_allocated, proto.value_() if is_one else 0)
        coverage = Coverage()
        found = socket_caches(Image(idle.prog), coverage)
        assert found[cache] == Protocol(accounting.name.string_().decode(), True)
        assert coverage.unreadable == 0
    for proto in protos:
        idle.put(proto.slab, 0)
    assert cache not in socket_caches(Image(idle.prog), Coverage())


def test_a_list_of_protocols_that_is_broken(idle: Idle) -> None:
    """Those before and behind the place are read; the list ends on both sides."""
    first = idle.protos[0]
    idle.put(first.node.next, 0x1000)
    coverage = Coverage()
    found = socket_caches(Image(idle.prog), coverage)
    assert len(found) > 3
    assert {missed.what for missed in coverage.examples} == {"protocol of sockets"}


def test_protocols_that_are_known_are_not_read_again(idle: Idle) -> None:
    given = {0x1000: TCP}
    assert SockReader(idle.image, idle.slabs, given).caches == given
    assert SockReader(idle.image, idle.slabs).caches.keys() >= {idle.slab.cache.address}


@pytest.mark.parametrize("member", ["sk_write_queue", "tcp_rtx_queue"])
def test_queues_that_are_read_of_tcp_that_sends(idle: Idle, member: str) -> None:
    """Their buffers may be of pages that are not charged; other protocols have no such queues."""
    queue = idle.sock.member_(member)
    link = queue.next if member == "sk_write_queue" else queue.rb_node
    idle.put(link, 0x1000)
    idle.forward(PAGE - 512)
    assert idle.read().unknown is None
    idle.put(idle.sock.sk_wmem_queued, 512)
    assert idle.why()[0].startswith("the queues of a TCP socket are not all in the image")
    idle.be("UDP")
    assert idle.read()[2:] == (PAGE, "UDP", True, 0, None)


def test_other_protocols_have_no_upper_layer_protocol(idle: Idle) -> None:
    """What is there in memory is something else."""
    ulp_of(idle, 0x2000)
    idle.be("UDP")
    idle.forward(PAGE)
    assert idle.read()[2:] == (PAGE, "UDP", True, 0, None)


@pytest.mark.parametrize(
    ("whole", "remainder", "number"), [(1, 0, 1), (2, 0, 2), (4, 0, 4), (5, 100, 4)]
)
def test_a_socket_that_changes_while_it_is_read(
    idle: Idle, monkeypatch: pytest.MonkeyPatch, whole: int, remainder: int, number: int
) -> None:
    """On a running kernel: it is read up to four times, until it has charged whole pages."""
    memory, reads = idle.image.memory, list[int]()
    read, size = memory.read, sizeof(idle.prog.type("struct sock"))

    def changing(address: int, length: int) -> bytes:
        if (address, length) == (idle.sock.value_(), size):
            reads.append(address)
            idle.forward(PAGE if len(reads) == whole else PAGE + 100)
        return read(address, length)

    monkeypatch.setattr(memory, "read", changing)
    assert idle.read()[2:6] == (PAGE, "TCP", True, remainder)
    assert len(reads) == number


# Slabs


def unreadable(idle: Idle, monkeypatch: pytest.MonkeyPatch, *addresses: int) -> None:
    """Let reads fail that begin at some addresses."""
    read = idle.image.memory.read

    def failing(address: int, length: int) -> bytes:
        if address in addresses:
            raise FaultError("left out", address)
        return read(address, length)

    monkeypatch.setattr(idle.image.memory, "read", failing)


def test_a_slot_that_is_not_in_the_image(idle: Idle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the slab was freed meanwhile, a socket may be missing."""
    others, address = idle.all().keys() - {idle.sock.value_()}, idle.sock.value_()
    unreadable(idle, monkeypatch, address)
    assert idle.all().keys() == others
    coverage = idle.reader.coverage
    assert [(one.what, one.address) for one in coverage.examples] == [("socket", address)]
    assert set(idle.reader.in_use(idle.slab)) >= others
    assert address not in set(idle.reader.in_use(idle.slab))
    monkeypatch.setattr(SlabReader, "has_freed", lambda *_: True)
    assert idle.all().keys() == others
    assert idle.reader.coverage.unreadable == 0


def test_a_socket_of_kfence_that_is_not_in_the_image(
    idle: Idle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is somewhere in its page."""

    def missing(*_: object) -> None:
        raise FaultError("left out", 0x1000)

    monkeypatch.setattr(module, "kfence_object", missing)
    assert idle.all()
    monkeypatch.setattr(module, "kfence_pages", lambda _: {idle.slab.page})
    assert idle.all() == {}
    coverage = idle.reader.coverage
    assert [(one.what, one.address) for one in coverage.examples] == [("socket", 0x1000)]


class General:
    """The slab of an idle socket, as if kmalloc() had allocated it."""

    def __init__(self, idle: Idle, name: str = "kmalloc-cg-4k", size: int = 4096) -> None:
        self.idle, cache = idle, idle.slab.cache
        cache = cache._replace(address=0x1000, name=name, object_size=size)
        self.slab = idle.slab._replace(cache=cache)
        self.proto = idle.proto("TCP")
        idle.put(self.proto.slab, 0)
        self.reader = SockReader(idle.image, idle.slabs, {})

    def read(self) -> dict[int, Sock]:
        self.reader = SockReader(self.idle.image, self.idle.slabs, {})
        return {sock.address: sock for sock in self.reader.read(self.slab, self.idle.memcgs)}


@pytest.mark.parametrize("name", ["kmalloc-cg-4k", "kmem_cache 0xffff888000100000"])
def test_sockets_from_kmalloc(idle: Idle, name: str) -> None:
    whole = idle.all()
    general = General(idle, name)
    assert general.read() == {a: s for a, s in whole.items() if s.protocol == "TCP"}
    assert idle.sock.value_() in whole
    assert general.reader.others.read == len(general.read())
    assert general.reader.coverage.read == general.reader.others.unreadable == 0
    idle.put(idle.sock.sk_wmem_alloc, 0)
    assert general.read().keys() == whole.keys() - {idle.sock.value_()}
    idle.put(idle.sock.sk_wmem_alloc, 1)
    idle.put(general.proto.slab, 0x1000)
    assert general.read() == {}  # a protocol with a cache


def test_sizes_of_sockets_from_kmalloc(idle: Idle) -> None:
    """A socket is not smaller than its first member, and fits into the object."""
    least = sizeof(idle.prog.type("struct sock"))
    for size, is_one in ((least - 1, False), (least, True), (4096, True), (4097, False)):
        general = General(idle)
        idle.put(general.proto.obj_size, size)
        assert (idle.sock.value_() in general.read()) == is_one
    idle.put(general.proto.obj_size, least)
    assert idle.sock.value_() in General(idle, size=least).read()
    assert General(idle, size=least - 1).read() == {}
    assert General(idle, name="dentry").read() == {}


def test_what_only_looks_like_a_socket_from_kmalloc(idle: Idle) -> None:
    """What would be its protocol is not in the image."""
    general = General(idle)
    idle.put(idle.sock.sk_prot_creator, 0x1000)
    assert idle.sock.value_() not in general.read()
    assert general.reader.others.unreadable == 0


def test_a_slab_of_kmalloc_that_is_not_in_the_image(
    idle: Idle, monkeypatch: pytest.MonkeyPatch
) -> None:
    general, first = General(idle), idle.slabs.address(idle.slab, 0)
    unreadable(idle, monkeypatch, first)
    assert general.read() == {}
    assert [(one.what, one.address) for one in general.reader.others.examples] == [
        ("slab that may have sockets", first)
    ]
    general.slab = general.slab._replace(objects=0)
    assert general.read() == {}
    assert general.reader.others.unreadable == 0
    general = General(idle)
    monkeypatch.setattr(SlabReader, "has_freed", lambda *_: True)
    assert general.read() == {}
    assert general.reader.others.unreadable == 0


def test_a_queue_of_a_running_kernel(idle: Idle, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have changed while it was read, which is no damage."""
    idle.put(idle.sock.sk_error_queue.next, 0x1000)
    monkeypatch.setattr(Image, "is_moving", True)
    assert idle.why()[0].startswith("the queues of a TCP socket are not all in the image")
    assert idle.reader.queues.unreadable == 0


def test_bytes_that_are_counted_and_not_charged(
    idle: Idle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the error queue, and what MSG_ZEROCOPY sends of user space."""
    asked: list[tuple[int, ...]] = []
    sock, reader = idle.sock, module.SkbReader
    errors = (sock.value_(), sock.sk_error_queue.address_)
    sends = (sock.sk_write_queue.address_, sock.tcp_rtx_queue.address_)

    def answer(size: int) -> Callable[..., int]:
        def ask(_: SkbReader, *args: int) -> int:
            # Other sockets of its slab may have something in their queues, too.
            if args[:2] in (errors, sends):
                asked.append(args)
            return size

        return ask

    monkeypatch.setattr(reader, "in_error_queue", answer(500))
    monkeypatch.setattr(reader, "pure_zerocopy", answer(300))
    idle.put(sock.sk_backlog.rmem_alloc, PAGE + 500)
    idle.put(sock.sk_error_queue.next, 0x1000)
    assert idle.read()[2:6] == (PAGE, "TCP", True, 0)
    assert set(asked) == {(*errors, PAGE + 500)}
    idle.put(sock.sk_wmem_queued, 2 * PAGE + 300)
    asked.clear()
    assert idle.read()[2:6] == (3 * PAGE, "TCP", True, 0)
    assert asked[1:] == [(*sends, 2 * PAGE + 300)]


def test_a_kernel_without_sockets() -> None:
    """CONFIG_NET=n"""
    assert socket_caches(MadeImage(), Coverage()) == {}


def test_a_list_of_protocols_that_a_kernel_does_not_have(
    idle: Idle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then no protocol can have made a socket."""
    find = Image.object

    def without(image: Image, name: str) -> Object:
        if name == "proto_list":
            raise UnknownKernelError("CONFIG_NET=n")
        return find(image, name)

    monkeypatch.setattr(Image, "object", without)
    reader = SockReader(idle.image, idle.slabs, {idle.slab.cache.address: TCP})
    assert list(reader.in_use(idle.slab)) == []
    assert socket_caches(idle.image, Coverage()) == {}
