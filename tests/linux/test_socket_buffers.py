# SPDX-License-Identifier: LGPL-2.1-or-later
"""Buffers in the queues of sockets, made as net/core/skbuff.c and net/unix/af_unix.c link them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from drgn import FaultError, offsetof, sizeof
from support.layouts import MadeImage

from memcg_inspect.linux.net.skbuff import (
    SkbReader,
    fragments,
    socket_fragments,
    unix_socket_pages,
)
from memcg_inspect.model import Coverage, Unreadable

AT, MISSING = 0xFFFFFFFF82000000, 0xFFFF888077700000
SOCKS, SKBS, HEADS = 0xFFFF888000111000, 0xFFFF888000222000, 0xFFFF888000400000
BUCKETS, PAGES = 0xFFFF888000333000, 0xFFFFEA0000100000
#: Where the data of a buffer ends, and the shared info begins.
END = 192
#: Where the node of a tree is in a buffer. It is where the links are, but for this test.
NODE = 16
#: ``PACKET_OUTGOING``, and ``SKBFL_PURE_ZEROCOPY`` with ``SKBFL_ZEROCOPY_FRAG``.
OUTGOING, PURE, ZEROCOPY = 4, 4, 3
STRUCTURES = """
    struct list_head { struct list_head *next; struct list_head *prev; };
    struct hlist_node { struct hlist_node *next; struct hlist_node **pprev; };
    struct hlist_head { struct hlist_node *first; };
    struct rb_node { long parent; struct rb_node *rb_right; struct rb_node *rb_left; };
    struct rb_root { struct rb_node *rb_node; };
    struct page_frag { struct page *page; int offset; int size; };
    struct sk_buff { struct sk_buff *next; struct sk_buff *prev; struct rb_node rbnode;
        struct sock *sk; unsigned char cloned : 1; unsigned char pkt_type : 3;
        unsigned int truesize; unsigned int end; unsigned char *head; };
    struct skb_shared_info { unsigned char flags; unsigned char nr_frags;
        struct sk_buff *frag_list; struct skb_frag frags[17]; };
    struct sk_buff_head { struct sk_buff *next; struct sk_buff *prev; int qlen; };
    struct sock_common { int skc_family; struct hlist_node skc_node; };
    struct sock { struct sock_common __sk_common; struct page_frag sk_frag;
        struct sk_buff_head sk_receive_queue; struct sk_buff_head sk_write_queue;
        struct sk_buff_head sk_error_queue; struct rb_root tcp_rtx_queue; };
    struct unix_sock { struct sock sk; };
    struct unix_table { void *locks; struct hlist_head *buckets; };
    struct netns_unix { struct unix_table table; };
    struct net { int ifindex; struct list_head list; struct netns_unix unx; };
"""
#: A fragment up to 6.8, and since.
FRAGMENTS = {
    "6.8": "struct skb_frag { struct page *bv_page; unsigned int bv_len; int bv_offset; };",
    "7.3": "struct skb_frag { unsigned long netmem; unsigned int len; unsigned int offset; };",
}


def machine(release: str = "7.3", structures: str = STRUCTURES) -> MadeImage:
    """Return a machine with four sockets, whose queues are empty."""
    image = MadeImage()
    image.declare(FRAGMENTS[release] + structures)
    image.enum(None, SKBFL_PURE_ZEROCOPY=PURE)
    for number in range(4):
        image.make("struct sock", sock(number), {})
        for name in ("sk_receive_queue", "sk_write_queue", "sk_error_queue"):
            queue(image, number, name)
    return image


def sock(number: int) -> int:
    return SOCKS + 512 * number


def at(image: MadeImage, number: int, member: str) -> int:
    return image.pointer("struct sock *", sock(number)).member_(member).address_ or 0


def queue(image: MadeImage, number: int, member: str, *buffers: int) -> None:
    """Make a queue of buffers."""
    ring = [at(image, number, member), *buffers]
    for place, one in enumerate(ring):
        image.words(one, ring[(place + 1) % len(ring)], ring[place - 1])


def buffer(
    image: MadeImage, number: int, pages: Sequence[int] = (), *, flags: int = 0, **more: int
) -> int:
    """Make a buffer with some pages, and return its address."""
    address, head = SKBS + 256 * number, HEADS + 1024 * number
    fields = {"head": head, "end": END, "truesize": 1000} | more
    image.make("struct sk_buff", address, fields)
    image.make("struct skb_shared_info", head + END, {"flags": flags, "nr_frags": len(pages)})
    shared = image.pointer("struct skb_shared_info *", head + END)
    for page, frag in zip(pages, shared.frags, strict=False):
        image.words(frag.address_ or 0, page)
    return address


def pages(number: int, count: int) -> list[int]:
    return [PAGES + 0x1000 * number + 64 * n for n in range(count)]


def test_the_page_of_the_next_fragment() -> None:
    image = machine()
    frag = image.pointer("struct sock *", sock(0)).sk_frag
    assert list(fragments(frag)) == []
    image.words(frag.address_ or 0, PAGES)
    assert list(fragments(frag)) == [PAGES]


@pytest.mark.parametrize("release", FRAGMENTS)
def test_pages_of_sockets(release: str) -> None:
    image, coverage = machine(release), Coverage()
    image.words(at(image, 1, "sk_frag"), PAGES)
    queue(
        image,
        1,
        "sk_receive_queue",
        buffer(image, 0, pages(1, 2)),
        buffer(image, 1),
        buffer(image, 2, pages(2, 17)),
    )
    queue(image, 1, "sk_write_queue", buffer(image, 3, pages(3, 1)))
    queue(image, 1, "sk_error_queue", buffer(image, 4, pages(4, 1)))
    tree = [buffer(image, number, pages(number, 1)) for number in (5, 6, 7)]
    image.words(at(image, 1, "tcp_rtx_queue"), tree[0] + NODE)
    image.words(tree[0] + NODE + 8, tree[1] + NODE, tree[2] + NODE)
    found = list(socket_fragments(image, [sock(0), sock(1)], coverage))
    wanted = [PAGES, *pages(1, 2), *pages(2, 17), *(p for n in range(3, 8) for p in pages(n, 1))]
    assert sorted(found) == sorted(wanted)
    assert coverage == Coverage(read=2)


def test_ends_of_buffers_that_are_pointers() -> None:
    """Without NET_SKBUFF_DATA_USES_OFFSET."""
    image = machine(structures=STRUCTURES.replace("unsigned int end;", "unsigned char *end;"))
    buffers = [buffer(image, n, pages(n, n), end=HEADS + 1024 * n + END) for n in (1, 2)]
    queue(image, 0, "sk_write_queue", *buffers)
    found = list(socket_fragments(image, [sock(0)], Coverage()))
    assert found == [*pages(1, 1), *pages(2, 2)]


def test_memory_that_is_no_page_has_bit_0_set() -> None:
    image = machine()
    queue(image, 0, "sk_write_queue", buffer(image, 0, [PAGES, PAGES + 1, PAGES + 64]))
    assert list(socket_fragments(image, [sock(0)], Coverage())) == [PAGES, PAGES + 64]


def test_buffers_in_buffers() -> None:
    """A buffer of a list of fragments can have such a list itself."""
    image, coverage = machine(), Coverage()
    outer, inner, deep = (buffer(image, n, pages(n, 1)) for n in range(3))
    last, other = buffer(image, 3, pages(3, 1)), buffer(image, 4, pages(4, 1))
    image.words(HEADS + END + 8, inner)
    image.words(inner, last)
    image.words(HEADS + 1024 + END + 8, deep)
    queue(image, 0, "sk_receive_queue", outer, other)
    found = list(socket_fragments(image, [sock(0)], coverage))
    assert sorted(found) == [page for n in range(5) for page in pages(n, 1)]
    assert coverage == Coverage(read=1)


@pytest.mark.parametrize("what", ["circle", "fragments", "missing", "head"])
def test_queues_that_are_broken(what: str) -> None:
    image, coverage = machine(), Coverage()
    one, two = buffer(image, 0, pages(0, 1)), buffer(image, 1, pages(1, 1))
    queue(image, 0, "sk_receive_queue", one, two)
    image.words(at(image, 1, "sk_frag"), PAGES + 64 * 50)
    if what == "circle":
        image.words(two, one)
    elif what == "fragments":
        image.write(HEADS + 1024 + END + 1, b"\x12")  # 18 of 17
    elif what == "missing":
        image.words(one, MISSING)
    else:
        image.make("struct sk_buff", two, {"head": MISSING, "end": END})
    found = list(socket_fragments(image, [sock(0), sock(1)], coverage))
    assert found[0] == PAGES
    assert found[-1] == PAGES + 64 * 50
    assert (coverage.read, coverage.unreadable) == (1, 1)
    [missed] = coverage.examples
    reason, fault = {
        "circle": ("the queue has a buffer twice", one),
        "fragments": ("18 fragments of a socket buffer", HEADS + 1024 + END),
        "missing": ("not made", MISSING + offsetof(image.type("struct sk_buff"), "end")),
        "head": ("not made", MISSING + END + 1),
    }[what]
    assert missed == Unreadable("queue of a socket", sock(0), f"{reason}: {fault:#x}")


def unix(image: MadeImage, *nets: dict[int, list[int]]) -> None:
    """Make network namespaces, with sockets in buckets of their tables."""
    image.variable("net_namespace_list", "struct list_head", AT)
    links = [AT, *(AT + 0x800 + 64 * n + 8 for n in range(len(nets)))]
    for place, one in enumerate(links):
        image.words(one, links[(place + 1) % len(links)], links[place - 1])
    for number, buckets in enumerate(nets):
        table = BUCKETS + 0x4000 * number
        image.words(AT + 0x800 + 64 * number + 32, table)
        image.write(table, bytes(512 * 8))
        for bucket, socks in buckets.items():
            image.words(table + 8 * bucket, *[sock(socks[0]) + 8])
            for one, following in zip(socks, [*socks[1:], None], strict=True):
                image.words(sock(one) + 8, 0 if following is None else sock(following) + 8)


def test_pages_of_unix_sockets() -> None:
    image, coverage = machine(), Coverage()
    for number in range(4):
        queue(image, number, "sk_receive_queue", buffer(image, number, pages(number, number)))
    unix(image, {0: [1], 511: [2]}, {256: [3, 0]}, {})
    found = list(unix_socket_pages(image, coverage))
    assert found == [*pages(1, 1), *pages(2, 2), *pages(3, 3)]
    assert coverage == Coverage()


def test_unix_sockets_that_are_not_in_the_image() -> None:
    image, coverage = machine(), Coverage()
    for number in range(4):
        queue(image, number, "sk_receive_queue", buffer(image, number, pages(number, number)))
    unix(image, {5: [1], 6: [2], 7: [3]})
    image.words(at(image, 1, "sk_receive_queue"), MISSING)
    image.words(sock(2) + 8, MISSING)
    assert list(unix_socket_pages(image, coverage)) == [*pages(2, 2), *pages(3, 3)]
    # A queue, and of the second bucket the socket that is missing and the list.
    assert coverage.unreadable == 3
    assert {one.what for one in coverage.examples} == {"AF_UNIX sockets"}


def test_a_kernel_without_unix_sockets() -> None:
    image = MadeImage()
    assert list(unix_socket_pages(image, Coverage())) == []
    image.declare("struct unix_sock { int sk; }; struct net { int ifindex; };")
    assert list(unix_socket_pages(image, Coverage())) == []


def errors(image: MadeImage, counted: int) -> int:
    return SkbReader(image).in_error_queue(sock(0), at(image, 0, "sk_error_queue"), counted)


def test_bytes_of_an_error_queue() -> None:
    """Notifications of MSG_ZEROCOPY are not among them: they are counted elsewhere."""
    image = machine()
    assert errors(image, 0) == 0
    own = {"sk": sock(0), "pkt_type": OUTGOING}
    buffers = [
        buffer(image, 0, (), truesize=1300, **own),
        buffer(image, 1, truesize=700, sk=sock(0), pkt_type=OUTGOING - 1),
        buffer(image, 2, (), truesize=500, **own),
    ]
    queue(image, 0, "sk_error_queue", *buffers)
    assert errors(image, 1800) == 1800
    assert errors(image, 5000) == 1800
    with pytest.raises(FaultError, match="^the error queue has more bytes") as error:
        errors(image, 1799)
    assert error.value.address == buffers[2]


def test_a_buffer_of_another_socket() -> None:
    image = machine()
    wrong = buffer(image, 0, sk=sock(1), pkt_type=OUTGOING)
    queue(image, 0, "sk_error_queue", wrong)
    with pytest.raises(FaultError, match="^a buffer in the error queue is") as error:
        errors(image, 5000)
    assert error.value.address == wrong


@pytest.mark.parametrize("what", ["circle", "small", "missing"])
def test_an_error_queue_that_is_broken(what: str) -> None:
    image = machine()
    size = sizeof(image.type("struct sk_buff"))
    own = {"sk": sock(0), "pkt_type": OUTGOING}
    one, two = (buffer(image, n, (), truesize=size, **own) for n in (0, 1))
    queue(image, 0, "sk_error_queue", one, two)
    assert errors(image, 2 * size) == 2 * size  # no buffer is smaller than itself
    if what == "circle":
        image.words(two, one)
    elif what == "small":
        buffer(image, 1, (), truesize=size - 1, **own)
        image.words(two, at(image, 0, "sk_error_queue"))
    else:
        image.words(two, MISSING)
    reason, address = {
        "circle": ("the queue does not lead back to its head", one),
        "small": ("not a socket buffer", two),
        "missing": ("not made", MISSING),
    }[what]
    with pytest.raises(FaultError, match=f"^{reason}") as error:
        errors(image, 5000)
    assert error.value.address == address


def zerocopy(image: MadeImage, counted: int) -> int:
    reader = SkbReader(image)
    head, root = at(image, 0, "sk_write_queue"), at(image, 0, "tcp_rtx_queue")
    return reader.pure_zerocopy(head, root, counted)


def test_bytes_that_belong_to_user_space() -> None:
    """What is charged of such a buffer is SKB_TRUESIZE(skb_end_offset(skb)): with its headers."""
    image = machine()
    assert zerocopy(image, 0) == 0
    lines = [
        -(-sizeof(image.type(f"struct {n}")) // 64) * 64 for n in ("sk_buff", "skb_shared_info")
    ]
    own = sum(lines) + END
    written = [
        buffer(image, 0, flags=PURE | ZEROCOPY, truesize=own + 4096),
        buffer(image, 1, flags=ZEROCOPY, truesize=9000),
        buffer(image, 2, flags=PURE, truesize=own - 100),
    ]
    queue(image, 0, "sk_write_queue", *written)
    sent = [buffer(image, n, flags=PURE, truesize=own + 100 * n) for n in (3, 4, 5)]
    image.words(at(image, 0, "tcp_rtx_queue"), sent[0] + NODE)
    image.words(sent[0] + NODE + 8, sent[1] + NODE, 0)
    image.words(sent[1] + NODE + 8, 0, sent[2] + NODE)
    total = own + 4096 + 9000 + own - 100 + 3 * own + 1200
    assert zerocopy(image, total) == 4096 + 1200
    with pytest.raises(FaultError, match="^the queue has more bytes than its") as error:
        zerocopy(image, total - 1)
    assert error.value.address == sent[2]
    image.words(sent[2] + NODE + 8, 0, sent[0] + NODE)
    with pytest.raises(FaultError, match="^the tree has a node twice"):
        zerocopy(image, total)
    image.words(sent[2] + NODE + 8, 0, MISSING)
    with pytest.raises(FaultError):
        zerocopy(image, total)


def test_a_kernel_that_charges_all_buffers_of_zerocopy() -> None:
    image = MadeImage()
    image.declare(FRAGMENTS["6.8"] + STRUCTURES)
    for name in ("sk_receive_queue", "sk_write_queue", "sk_error_queue"):
        queue(image, 0, name)
    image.words(at(image, 0, "tcp_rtx_queue"), 0)
    queue(image, 0, "sk_write_queue", buffer(image, 0, flags=0xFF, truesize=9000))
    assert zerocopy(image, 9000) == 0
