# SPDX-License-Identifier: LGPL-2.1-or-later
"""obj_cgroups, in structures made as the kernel has them, and the memcgs that refer to them."""

from __future__ import annotations

import pytest
from drgn import FaultError, Object
from support.layouts import MadeImage

from memcg_inspect.linux.mm.memcontrol import (
    accounting,
    has_node_objcgs,
    keeps_original_objcgs,
    objcg_nid,
    objcg_owners,
    read_objcgs,
    recover_objcgs,
)
from memcg_inspect.linux.mm.mmzone import possible_nodes
from memcg_inspect.linux.mm.percpu_defs import percpu_offsets
from memcg_inspect.model import Coverage, Memcg, Objcg, ObjcgPlace

PLACES, MISSING = 0xFFFF888030000000, 0xFFFF888077700000
ROOT, SHOP, GONE = (PLACES + n * 4096 for n in range(3))
#: Both nodes of a memcg, in the order of the nodes.
PNS = (1024, 1536)
OLD, NEW, THIRD, LOST = (PLACES + 0x10000 + n * 512 for n in range(4))
DATA, SET = 256, PLACES + 0x20000

#: How kernels hold obj_cgroups: with which members of what.
HOLD = "struct obj_cgroup *objcg; struct list_head objcg_list;"
KEEP = "struct obj_cgroup *objcg; struct obj_cgroup *orig_objcg; struct list_head objcg_list;"


def kernel(*, of_memcg: str = "", of_node: str = "", of_objcg: str = "") -> MadeImage:
    """Return a kernel with the root, /shop, and a memcg below it that was removed."""
    image = MadeImage()
    image.given |= {possible_nodes: (0, 1), percpu_offsets: {}}
    image.declare(
        f"""
        struct list_head {{ struct list_head *next; struct list_head *prev; }};
        struct atomic {{ int counter; }};
        struct atomic64 {{ long counter; }};
        struct percpu_ref_data {{ struct atomic64 count; }};
        struct percpu_ref {{ unsigned long percpu_count_ptr; struct percpu_ref_data *data; }};
        struct obj_cgroup_set {{ long refs; struct obj_cgroup *objcgs[2]; }};
        struct obj_cgroup {{
            unsigned long id; struct percpu_ref refcnt; struct mem_cgroup *memcg;
            struct atomic nr_charged_bytes; struct list_head list; {of_objcg}
        }};
        struct mem_cgroup_per_node {{ unsigned long id; {of_node} }};
        struct mem_cgroup {{
            unsigned long id; {of_memcg} struct mem_cgroup_per_node *nodeinfo[2];
        }};
        """
    )
    for memcg in (ROOT, SHOP, GONE):
        image.make("struct mem_cgroup", memcg, {})
        for at in PNS:
            image.make("struct mem_cgroup_per_node", memcg + at, {})
        image.words(place(image, memcg, "nodeinfo"), *(memcg + at for at in PNS))
        for holder in holders(image, memcg):
            ring(image, holder.objcg_list.address_ or 0)
    return image


def place(image: MadeImage, memcg: int, member: str) -> int:
    return image.pointer("struct mem_cgroup *", memcg).member_(member).address_ or 0


def holders(image: MadeImage, memcg: int) -> list[Object]:
    """Return what holds the obj_cgroups of a memcg: itself, or its nodes."""
    found = image.pointer("struct mem_cgroup *", memcg)
    if found.type_.type.has_member("objcg"):
        return [found]
    return [image.pointer("struct mem_cgroup_per_node *", memcg + at) for at in PNS]


def ring(image: MadeImage, *links: int) -> None:
    """Write a list: its head, and the links of its entries."""
    for n, link in enumerate(links):
        image.words(link, links[(n + 1) % len(links)], links[n - 1])


def put(
    image: MadeImage, objcg: int, memcg: int, *, refs: int = 1, left: int = 0, **other: int
) -> int:
    """Make an obj_cgroup, on a list of its own; return its link."""
    ref = {"refcnt.percpu_count_ptr": 1, "refcnt.data": objcg + DATA}
    members = {"memcg": memcg, "nr_charged_bytes": left, **ref, **other}
    image.make("struct obj_cgroup", objcg, members)
    image.words(objcg + DATA, refs)
    return image.pointer("struct obj_cgroup *", objcg).list.address_ or 0


def refer(image: MadeImage, holder: Object, **members: int) -> None:
    """Make a memcg, or a node of it, refer to obj_cgroups."""
    for name, objcg in members.items():
        image.words(holder.member_(name).address_ or 0, objcg)


def head(holder: Object) -> int:
    return holder.objcg_list.address_ or 0


MEMCGS = {
    ROOT: Memcg(ROOT, "/", 1, "online", None, ROOT),
    SHOP: Memcg(SHOP, "/shop", 2, "online", ROOT, SHOP),
    GONE: Memcg(GONE, "/shop/gone", 3, "dying", SHOP, SHOP, offline=True),
}


def read(image: MadeImage) -> tuple[dict[int, Objcg], Coverage, set[int]]:
    coverage, unreadable = Coverage(), set[int]()
    return read_objcgs(image, MEMCGS, coverage, unreadable), coverage, unreadable


def missed(coverage: Coverage) -> list[tuple[str, int]]:
    assert all("not made" in one.reason for one in coverage.examples)
    return [(one.what, one.address) for one in coverage.examples]


# What kernels have


def test_how_kernel_memory_is_accounted() -> None:
    """By memcg, by node since 7.1, and with a counter for each node."""
    old, newer = kernel(of_memcg=KEEP), kernel(of_node=KEEP)
    assert (accounting(old), has_node_objcgs(old)) == ("memcg", False)
    assert (accounting(newer), has_node_objcgs(newer)) == ("objcg-per-node", True)
    by_node = kernel(of_node=HOLD, of_objcg="int nid;")
    assert accounting(by_node) == "objcg-per-node"
    by_node = kernel(of_node=HOLD, of_objcg="int nid;")
    by_node.enum(None, NR_KMEM=3)
    assert accounting(by_node) == "kmem-per-node"
    other = kernel(of_node=HOLD)
    other.enum(None, NR_KMEM=3)
    assert accounting(other) == "objcg-per-node"


def test_whether_removed_memcgs_keep_their_obj_cgroups() -> None:
    """Since 6.7."""
    assert not keeps_original_objcgs(kernel(of_memcg=HOLD))
    assert keeps_original_objcgs(kernel(of_memcg=KEEP))
    assert not keeps_original_objcgs(kernel(of_node=HOLD))
    assert keeps_original_objcgs(kernel(of_node=KEEP))


# obj_cgroups of memcgs


def test_obj_cgroups_of_memcgs() -> None:
    """A removed memcg refers to its first one only. Its list is that of its parent."""
    image = kernel(of_memcg=KEEP)
    (shop,), (gone,) = holders(image, SHOP), holders(image, GONE)
    links = [put(image, NEW, SHOP, refs=7, left=48), put(image, OLD, SHOP, refs=2)]
    refer(image, shop, objcg=NEW, orig_objcg=NEW)
    refer(image, gone, orig_objcg=OLD)
    ring(image, head(shop), links[1])
    image.words(head(gone), links[1], links[1])  # never reinitialized
    found, coverage, unreadable = read(image)
    assert list(found.values()) == [
        Objcg(
            *(NEW, SHOP, None, False, 48),
            refs=7,
            memcg_refs=2,
            places=(ObjcgPlace(SHOP, None, "objcg"), ObjcgPlace(SHOP, None, "orig_objcg")),
        ),
        Objcg(
            *(OLD, SHOP, None, False, 0),
            refs=2,
            memcg_refs=1,
            places=(ObjcgPlace(SHOP, None, "objcg_list"), ObjcgPlace(GONE, None, "orig_objcg")),
        ),
    ]
    assert list(found) == [NEW, OLD]
    assert (coverage.read, coverage.unreadable, unreadable) == (2, 0, set())
    owners = objcg_owners(image, MEMCGS, coverage)
    assert owners == {NEW: SHOP, OLD: GONE}
    assert not coverage.unreadable


def test_a_list_without_an_obj_cgroup_in_use() -> None:
    """In 6.x the root has none, and its list is valid all the same."""
    image = kernel(of_memcg=HOLD)
    for memcg, objcg in ((ROOT, OLD), (SHOP, NEW)):
        [holder] = holders(image, memcg)
        ring(image, head(holder), put(image, objcg, memcg))
    found, coverage, _ = read(image)
    assert list(found) == [OLD]
    assert found[OLD].places == (ObjcgPlace(ROOT, None, "objcg_list"),)
    assert found[OLD].memcg_refs == 0
    assert objcg_owners(image, MEMCGS, coverage) == {}
    assert (coverage.read, coverage.unreadable) == (1, 0)


def test_obj_cgroups_of_nodes() -> None:
    """Since 7.1. is_root is a member since 7.1, too."""
    image = kernel(of_node=KEEP, of_objcg="unsigned char is_root;")
    for memcg, objcgs in ((ROOT, (OLD, THIRD)), (SHOP, (NEW, 0))):
        for holder, objcg in zip(holders(image, memcg), objcgs, strict=True):
            if objcg:
                put(image, objcg, memcg, is_root=int(memcg == ROOT))
                refer(image, holder, objcg=objcg)
    found, coverage, _ = read(image)
    assert {o.address: (o.memcg, o.nid, o.is_root, o.memcg_refs) for o in found.values()} == {
        OLD: (ROOT, 0, True, 1),
        THIRD: (ROOT, 1, True, 1),
        NEW: (SHOP, 0, False, 1),
    }
    assert found[THIRD].places == (ObjcgPlace(ROOT, 1, "objcg"),)
    assert objcg_owners(image, MEMCGS, coverage) == {OLD: ROOT, THIRD: ROOT, NEW: SHOP}
    assert (coverage.read, coverage.unreadable) == (3, 0)


def test_obj_cgroups_that_name_their_node() -> None:
    """With the set that they are in, where they find those of the other nodes."""
    more = "int nid; struct obj_cgroup_set *set;"
    image = kernel(of_node=HOLD, of_objcg=more)
    image.make("struct obj_cgroup_set", SET, {})
    image.words(SET + 8, OLD, NEW)
    first, second = holders(image, SHOP)
    for holder, objcg, set_ in ((first, OLD, SET), (second, NEW, MISSING)):
        put(image, objcg, SHOP, nid=1, set=set_)
        refer(image, holder, objcg=objcg)
    found, coverage, unreadable = read(image)
    assert (found[OLD].nid, found[OLD].siblings, found[OLD].set) == (1, (OLD, NEW), SET)
    assert (found[NEW].nid, found[NEW].siblings, found[NEW].set) == (1, (), MISSING)
    assert missed(coverage) == [("siblings of an objcg", MISSING + 8)]
    assert (coverage.read, unreadable) == (2, set())


# What is missing


def test_an_obj_cgroup_that_is_not_in_the_image() -> None:
    """Those that are on the list are read."""
    image = kernel(of_memcg=KEEP)
    [shop] = holders(image, SHOP)
    ring(image, head(shop), put(image, OLD, SHOP))
    refer(image, shop, objcg=MISSING)
    found, coverage, unreadable = read(image)
    assert list(found) == [OLD]
    assert missed(coverage) == [("objcgs of a memcg", MISSING)]
    assert (coverage.read, unreadable) == (1, {SHOP})


def test_references_that_are_not_in_the_image() -> None:
    image = kernel(of_memcg=KEEP)
    for memcg, objcg in ((SHOP, NEW), (GONE, OLD)):
        put(image, objcg, memcg, refs=3)
        refer(image, holders(image, memcg)[0], orig_objcg=objcg)
    data = image.pointer("struct obj_cgroup *", NEW).refcnt.data.address_ or 0
    image.words(data, MISSING)
    found, coverage, unreadable = read(image)
    assert [(o.address, o.refs) for o in found.values()] == [(NEW, None), (OLD, 3)]
    assert missed(coverage) == [("references of an objcg", MISSING)]
    assert (coverage.read, unreadable) == (2, set())


def test_a_memcg_that_is_not_in_the_image() -> None:
    """Its list is not read, and it is one that is unreadable."""
    image = kernel(of_memcg=KEEP)
    refer(image, holders(image, SHOP)[0], orig_objcg=NEW)
    put(image, NEW, SHOP)
    image.forget(ROOT)
    found, coverage, unreadable = read(image)
    assert list(found) == [NEW]
    at = place(image, ROOT, "objcg")
    assert missed(coverage) == [("objcgs of a memcg", at)]
    assert (coverage.read, unreadable) == (1, {ROOT})
    coverage = Coverage()
    assert objcg_owners(image, MEMCGS, coverage) == {NEW: SHOP}
    assert missed(coverage) == [("objcgs of a memcg", at)]


def test_nodes_of_a_memcg_that_are_not_in_the_image() -> None:
    image = kernel(of_node=KEEP)
    refer(image, holders(image, SHOP)[0], objcg=NEW)
    put(image, NEW, SHOP)
    image.words(place(image, SHOP, "nodeinfo") + 8, MISSING)
    found, coverage, unreadable = read(image)
    assert list(found) == [NEW]
    assert missed(coverage) == [("objcgs of a memcg", MISSING + 8)]
    assert (coverage.read, unreadable) == (1, {SHOP})
    coverage = Coverage()
    assert objcg_owners(image, [SHOP, MISSING], coverage) == {NEW: SHOP}
    places = [place(image, MISSING, "nodeinfo") + 8 * nid for nid in (0, 1)]
    assert missed(coverage) == [("objcgs of a memcg", at) for at in (MISSING + 8, *places)]


# obj_cgroups that charges refer to


def test_obj_cgroups_that_only_charges_refer_to() -> None:
    image = kernel(of_memcg=KEEP)
    for objcg, memcg in ((OLD, SHOP), (NEW, LOST)):
        put(image, objcg, memcg, refs=4, left=8)
    coverage = Coverage()
    found = recover_objcgs(image, MEMCGS, True, [MISSING, NEW, OLD], coverage)
    assert found == {OLD: Objcg(OLD, SHOP, None, False, 8)}
    assert missed(coverage) == [("objcg", MISSING)]
    assert coverage.read == 1
    coverage = Coverage()
    assert list(recover_objcgs(image, MEMCGS, False, [NEW, OLD], coverage)) == [NEW, OLD]
    assert (coverage.read, coverage.unreadable) == (2, 0)


# The node of an obj_cgroup


def nid(image: MadeImage, objcg: int) -> int | None:
    return objcg_nid(image, image.pointer("struct obj_cgroup *", objcg))


def test_the_node_of_an_obj_cgroup() -> None:
    """It is that of the node that holds it, or of the list that it was moved to."""
    image = kernel(of_node=KEEP)
    first, second = holders(image, SHOP)
    for holder, objcg, moved in ((first, NEW, OLD), (second, THIRD, LOST)):
        ring(image, head(holder), put(image, moved, SHOP))
        put(image, objcg, SHOP)
        refer(image, holder, objcg=objcg)
    assert [nid(image, objcg) for objcg in (NEW, OLD, THIRD, LOST)] == [0, 0, 1, 1]
    link = put(image, LOST, SHOP)
    ring(image, link)  # on no list of its memcg
    assert nid(image, LOST) is None
    refer(image, second, objcg=0, orig_objcg=LOST)
    assert nid(image, LOST) == 1


def test_kernels_where_it_has_no_node_or_names_it() -> None:
    image = kernel(of_memcg=KEEP)
    put(image, NEW, SHOP)
    assert nid(image, NEW) is None
    image = kernel(of_node=HOLD, of_objcg="int nid;")
    put(image, NEW, SHOP, nid=1)
    assert nid(image, NEW) == 1


def test_a_node_that_cannot_be_read() -> None:
    image = kernel(of_node=KEEP)
    put(image, NEW, MISSING)
    with pytest.raises(FaultError, match="not made"):
        nid(image, NEW)
    put(image, NEW, SHOP)
    image.words(place(image, SHOP, "nodeinfo"), MISSING)
    with pytest.raises(FaultError, match="not made"):
        nid(image, NEW)
