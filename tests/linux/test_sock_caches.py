# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which slab caches may have sockets, and which sockets wait to be destroyed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from drgn import FaultError, Object
from support.guests import DEBIAN_KERNELS, ROOT, Lab

from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.mm.memcontrol import read_memcgs
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.slab import Slab, SlabCache, SlabReader
from memcg_inspect.linux.net import sock_destruct
from memcg_inspect.linux.net.sock import SockReader
from memcg_inspect.model import Coverage

TOGGLED = ROOT / "fixtures" / "scenes" / "toggled.sh"

pytestmark = [
    pytest.mark.image,
    pytest.mark.newest_kernel,
    pytest.mark.parametrize("kernel", DEBIAN_KERNELS),
]


def all_slabs(image: Image, slabs: SlabReader) -> Iterator[Slab]:
    for piece in scan_pages(image):
        yield from filter(None, map(slabs.slab, piece.slabs))


def cache(name: str, size: int, address: int = 0x1000) -> SlabCache:
    return SlabCache(address, name, size, size, 0, False, size + 8)


def test_caches_of_kmalloc_that_are_too_small_are_left_out(lab: Lab, kernel: str) -> None:
    image = image_of(lab.image(kernel).program())
    reader = SockReader(image, SlabReader(image))
    size = image.type("struct sock").size
    assert size is not None
    assert reader.may_read(cache("kmalloc-cg-2k", 2048))
    assert reader.may_read(cache("kmalloc-exact", size))
    assert not reader.may_read(cache("kmalloc-cg-64", 64))
    assert not reader.may_read(cache("dentry", 2048))
    assert all(reader.may_read(cache("TCP", 64, address)) for address in reader.caches)
    assert reader.caches


def test_a_worker_that_has_begun_may_have_freed_the_socket(
    lab: Lab, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sock_diag_broadcast_destroy_work() frees it; the work item is pending until it begins."""
    image = image_of(lab.image(kernel).program())
    works = {"waits": object(), "runs": object()}
    socks = {works["waits"]: 0x1000, works["runs"]: 0x2000}

    def broadcast(work: object, type_: str, member: str) -> SimpleNamespace:
        return SimpleNamespace(sk=SimpleNamespace(value_=lambda: socks[work]))

    monkeypatch.setattr(image, "symbol", lambda name: SimpleNamespace(address=0x10))
    monkeypatch.setattr(sock_destruct, "works_of", lambda image, function, fault: works.values())
    monkeypatch.setattr(sock_destruct, "is_pending", lambda work: work is works["waits"])
    monkeypatch.setattr(sock_destruct, "container_of", broadcast)
    assert sock_destruct._broadcast(image) == {0x1000}


#: Protocols whose sockets kmalloc() allocates.
WITHOUT_CACHE = {b"NETLINK", b"PACKET", b"tun", b"ALG"}


def is_without_cache(sock: Object) -> bool:
    """Return whether an object of kmalloc() is such a socket, and in use."""
    try:
        common = sock.member_("__sk_common")
        name = common.skc_prot.name.string_()
    except FaultError:
        return False
    return name in WITHOUT_CACHE and int(common.skc_refcnt.refs.counter) > 0


def test_sockets_without_a_cache_are_found_wherever_in_a_slab(lab: Lab, kernel: str) -> None:
    """Those that a plain walk over all objects of caches of kmalloc() finds."""
    modules = (("+tun", ""), ("+af_alg", ""))
    guest = lab.image(kernel, "1", "families", modules=modules, run=str(TOGGLED))
    prog = guest.program()
    image, memcgs = image_of(prog), read_memcgs(image_of(prog), Coverage())
    slabs = SlabReader(image)
    reader = SockReader(image, slabs)
    found, plain, places, in_use = set[int](), set[int](), set[int](), 0
    for slab in all_slabs(image, slabs):
        if not reader.may_read(slab.cache):
            continue
        read = {sock.address for sock in reader.read(slab, memcgs)}
        if slab.cache.address in reader.caches:
            assert read <= set(reader.in_use(slab))
            in_use += len(read)
            continue
        found |= read
        for number, address in enumerate(slabs.objects(slab)):
            sock = Object(prog, "struct sock", address=address)
            if is_without_cache(sock) and sock.sk_memcg.value_() in memcgs:
                plain.add(address)
                places.add(number)
    assert plain <= found
    assert len(places) > 1
    assert in_use


@pytest.mark.long
def test_what_mptcp_has_charged_is_not_known(lab: Lab, kernel: str) -> None:
    """Its sockets lend bytes to one another: __mptcp_move_skb(), mptcp_rfree()."""
    image = image_of(lab.image(kernel, "2", "sockqueues").program())
    memcgs, slabs = read_memcgs(image, Coverage()), SlabReader(image)
    reader = SockReader(image, slabs)
    reasons = Counter[str]()
    for slab in all_slabs(image, slabs):
        for sock in reader.read(slab, memcgs) if reader.may_read(slab.cache) else ():
            if sock.protocol.startswith("MPTCP"):
                assert sock.unknown is not None
                reasons[sock.unknown.reason] += 1
    assert list(reasons) == [
        "MPTCP sockets may be charged for buffers that they are about to exchange"
    ]
