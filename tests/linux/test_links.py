# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Walks along the links of an image end, wherever the links lead.

The memory is made by hand. A circle is reported with its address, and so is a node that is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from drgn import FaultError, Object
from support.made_memory import BASE, MadeMemory

from memcg_inspect.image.strings import c_string
from memcg_inspect.linux.block.loop import busy_loops
from memcg_inspect.linux.fs.d_path import dentry_path
from memcg_inspect.linux.fs.kernfs import kernfs_name, kernfs_path
from memcg_inspect.linux.kernel.module import has_module
from memcg_inspect.linux.lib import list as lists
from memcg_inspect.linux.lib import maple_tree, xarray
from memcg_inspect.linux.lib.list import hlist_entries, idr_entries, list_entries, rbtree_entries
from memcg_inspect.linux.lib.maple_tree import maple_entries
from memcg_inspect.linux.lib.xarray import xa_entries
from memcg_inspect.linux.mm.memcontrol import memcg_path, payer_of
from memcg_inspect.linux.mm.vma import vmas

NODE = 256
#: Places for things, far enough apart for any of them.
AT = [BASE + 0x1000 + n * 0x400 for n in range(64)]
LAST = (1 << 64) - 1


@pytest.fixture
def made() -> MadeMemory:
    return MadeMemory()


# Maple trees


@pytest.fixture
def tree(made: MadeMemory) -> Object:
    """An empty ``struct maple_tree``, with the types of its nodes."""
    metadata = made.struct("maple_metadata", [("end", made.char), ("gap", made.char)])
    padded = made.struct(None, [("pad", made.array(made.word, 15)), ("meta", metadata)])
    slots = made.struct(None, [("slot", made.array(made.word, 16)), ("", padded)], union=True)
    range_64 = made.struct(
        "maple_range_64",
        [("parent", made.word), ("pivot", made.array(made.word, 15)), ("", slots)],
    )
    arange_64 = made.struct(
        "maple_arange_64",
        [
            ("parent", made.word),
            ("pivot", made.array(made.word, 9)),
            ("slot", made.array(made.word, 10)),
            ("gap", made.array(made.word, 10)),
            ("meta", metadata),
        ],
    )
    either = made.struct(None, [("mr64", range_64), ("ma64", arange_64)], union=True)
    made.struct("maple_node", [("", either)])
    type_ = made.struct("maple_tree", [("ma_root", made.word)])
    return made.at(type_, AT[0])


def leaf(made: MadeMemory, address: int, *entries: int, last: int = LAST) -> int:
    """Write a leaf; return the pointer to it."""
    made.write(address, bytes(NODE))
    for n, entry in enumerate(entries):
        made.write(address + 8 * (16 + n), entry)
        if n < len(entries) - 1:
            made.write(address + 8 * (1 + n), 0x1000 * (n + 1))
    if len(entries) < 15:
        made.write(address + 8 * 31, len(entries) - 1, 1)
    elif len(entries) == 15:
        made.write(address + 8 * 15, last)
    return address | 1 << 3 | 4


def inner(made: MadeMemory, address: int, *children: int) -> int:
    """Write a node with gaps; return the pointer to it."""
    made.write(address, bytes(NODE))
    for n, child in enumerate(children):
        made.write(address + 8 * (10 + n), child)
        if n < len(children) - 1:
            made.write(address + 8 * (1 + n), 0x100000 * (n + 1))
    made.write(address + 8 * 30, len(children) - 1, 1)
    return address | 3 << 3 | 4


def inner_without_gaps(made: MadeMemory, address: int, *children: int) -> int:
    """Write a node of a tree that does not find gaps; return the pointer to it."""
    node = leaf(made, address, *children)
    return node & ~(1 << 3) | 2 << 3


def root_of(node: int) -> int:
    return node & ~4 | 2


def test_a_maple_tree_without_gaps(made: MadeMemory, tree: Object) -> None:
    """Trees without MT_FLAGS_ALLOC_RANGE have nodes of type maple_range_64 above the leaves."""
    first, second = leaf(made, AT[1], AT[10], AT[11]), leaf(made, AT[2], AT[12])
    made.write(AT[0], root_of(inner_without_gaps(made, AT[3], first, second)))
    assert set(maple_entries(made.image, tree)) == {AT[10], AT[11], AT[12]}


def test_a_maple_tree(made: MadeMemory, tree: Object) -> None:
    assert list(maple_entries(made.image, tree)) == []
    made.write(AT[0], AT[9])
    assert list(maple_entries(made.image, tree)) == [AT[9]]
    # XA_ZERO_ENTRY and what is behind the end are left out.
    small = leaf(made, AT[1], AT[10], 0, 257 << 2 | 2, AT[11])
    made.write(AT[1] + 8 * (16 + 9), AT[12])
    made.write(AT[0], root_of(small))
    assert set(maple_entries(made.image, tree)) == {AT[10], AT[11]}
    full = leaf(made, AT[2], *AT[20:36])
    up_to_last = leaf(made, AT[3], *AT[40:55], last=0x200000)
    made.write(AT[3] + 8 * (16 + 15), AT[60])
    made.write(AT[0], root_of(inner(made, AT[4], small, up_to_last, full)))
    assert set(maple_entries(made.image, tree)) == {AT[10], AT[11], *AT[20:36], *AT[40:55]}


def test_a_node_with_all_slots_but_one(made: MadeMemory, tree: Object) -> None:
    """Its last pivot is 0: then ``meta``, which is where the last slot is, has the number."""
    leaves = [leaf(made, place, place) for place in AT[10:25]]
    made.write(AT[0], root_of(inner_without_gaps(made, AT[1], *leaves)))
    made.write(AT[1] + 8 * 15, 0)
    made.write(AT[1] + 8 * 31, 14, 1)
    assert set(maple_entries(made.image, tree)) == set(AT[10:25])


def test_a_full_root_of_a_maple_tree(made: MadeMemory, tree: Object) -> None:
    """It is for all indexes. If its last pivot is the largest one, no slot follows."""
    made.write(AT[0], root_of(leaf(made, AT[1], *AT[20:35])))
    made.write(AT[1] + 8 * (16 + 15), AT[60])
    assert set(maple_entries(made.image, tree)) == set(AT[20:35])
    made.write(AT[1] + 8 * 15, LAST - 1)
    assert set(maple_entries(made.image, tree)) == {*AT[20:35], AT[60]}


def test_values_in_a_maple_tree_are_no_pointers(made: MadeMemory, tree: Object) -> None:
    """``xa_is_value()``: bit 0 is set."""
    made.write(AT[0], root_of(leaf(made, AT[1], AT[10], 5 << 1 | 1, 6 << 1 | 1, AT[11])))
    assert set(maple_entries(made.image, tree)) == {AT[10], AT[11]}


def test_types_of_nodes_of_maple_trees_are_those_of_the_kernel(
    made: MadeMemory, tree: Object
) -> None:
    """``enum maple_type``: its values were never different, and may be."""
    for name, value in (("maple_leaf_64", 5), ("maple_range_64", 6), ("maple_arange_64", 7)):
        made.constant(name, value)
    low = leaf(made, AT[1], AT[10], AT[11]) & ~(15 << 3) | 5 << 3
    middle = inner_without_gaps(made, AT[2], low) & ~(15 << 3) | 6 << 3
    top = inner(made, AT[3], middle) & ~(15 << 3) | 7 << 3
    made.write(AT[0], root_of(top))
    assert set(maple_entries(made.image, tree)) == {AT[10], AT[11]}


def test_the_last_of_the_children_of_a_node(made: MadeMemory, tree: Object) -> None:
    """The pivot of a node's parent says which index is its last one."""
    first = leaf(made, AT[1], *AT[20:35], last=0xFFFFF)
    second = leaf(made, AT[2], *AT[40:55])
    for node in (AT[1], AT[2]):
        made.write(node + 8 * (16 + 15), node)
    made.write(AT[0], root_of(inner(made, AT[3], first, second)))
    # 0xfffff is not 0x100000, so the first one has a slot more.
    assert set(maple_entries(made.image, tree)) == {*AT[20:35], AT[1], *AT[40:55]}


def test_a_maple_tree_that_is_broken(made: MadeMemory, tree: Object) -> None:
    def check(node: int, reason: str, address: int) -> None:
        made.write(AT[0], root_of(node))
        with pytest.raises(FaultError, match=f"^({reason})") as raised:
            list(maple_entries(made.image, tree))
        assert raised.value.address == address

    below = leaf(made, AT[1], AT[10])
    check(inner(made, AT[2], below, AT[2] | 3 << 3 | 4), "the maple tree has a node twice", AT[2])
    check(inner(made, AT[2], below, below), "the maple tree has a node twice", AT[1])
    check(inner(made, AT[2], below, AT[3] | 9 << 3 | 4), "not a node of a maple tree", AT[3])
    check(inner(made, AT[2], 0x1000 | 1 << 3), "could not find memory|memory", 0x1000)
    node = inner(made, AT[2], below)
    for end, slots in ((255, 256), (10, 11)):
        made.write(AT[2] + 8 * 30, end, 1)
        check(node, f"{slots} slots", AT[2])


def test_memory_areas(made: MadeMemory, tree: Object) -> None:
    made.struct("vm_area_struct", [("vm_start", made.word)])
    mm = made.struct("mm_struct", [("mm_mt", tree.type_.type)])
    made.write(AT[0], root_of(leaf(made, AT[1], AT[10], AT[11])))
    assert [a.value_() for a in vmas(made.image, made.at(mm, AT[0]))] == AT[10:12]


def test_memory_areas_on_a_list(made: MadeMemory) -> None:
    """Until 6.0."""
    made.struct("vm_area_struct", [("vm_next", made.link("vm_area_struct"))])
    mm = made.at(made.struct("mm_struct", [("mmap", made.link("vm_area_struct"))]), AT[0])
    for place, to in ((AT[0], AT[1]), (AT[1], AT[2])):
        made.write(place, to)
    assert [a.value_() for a in vmas(made.image, mm)] == AT[1:3]
    made.write(AT[2], AT[1])
    check_circle(vmas(made.image, mm), AT[1])


def check_circle(walk: Iterator[Object], address: int) -> None:
    """A walk ends with a fault at an address."""
    words = "circle|twice|does not lead back|own ancestor"
    with pytest.raises(FaultError, match=rf"^(the|a) [A-Za-z ]*({words})") as raised:
        list(walk)
    assert raised.value.address == address


# Lists


@pytest.fixture
def links(made: MadeMemory) -> MadeMemory:
    """Memory with the types of the links of all lists and trees."""
    made.struct("list_head", [("next", made.link("list_head")), ("prev", made.link("list_head"))])
    made.struct("hlist_node", [("next", made.link("hlist_node"))])
    made.struct("hlist_head", [("first", made.link("hlist_node"))])
    rb = [("rb_right", made.link("rb_node")), ("rb_left", made.link("rb_node"))]
    made.struct("rb_node", rb)
    made.struct("rb_root", [("rb_node", made.link("rb_node"))])
    for name in ("list_head", "hlist_node", "rb_node"):
        made.struct(f"entry_of_{name}", [("link", made.prog.type(f"struct {name}"))])
    return made


def raising(error: FaultError) -> None:
    raise error


def ring(made: MadeMemory, *places: int) -> None:
    """Write a list: its head, and the links of its entries."""
    for n, place in enumerate(places):
        made.write(place, places[(n + 1) % len(places)])
        made.write(place + 8, places[n - 1])


def test_a_list(links: MadeMemory) -> None:
    made, entry = links, "struct entry_of_list_head"
    ring(made, *AT[:5])
    head = made.at(made.prog.type("struct list_head"), AT[0])
    walk = [e.value_() for e in list_entries(made.image, entry, head, "link", raising)]
    assert walk == AT[1:5]
    made.write(AT[3], AT[1])
    faults: list[FaultError] = []
    walk = [e.value_() for e in list_entries(made.image, entry, head, "link", faults.append)]
    assert walk == [*AT[1:4], AT[4]]  # the last one from the other end
    assert [fault.address for fault in faults] == [AT[1]]
    check_circle(list_entries(made.image, entry, head, "link", raising), AT[1])


def test_what_does_not_end(links: MadeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that are all different, and more than there can be."""
    monkeypatch.setattr(lists, "MOST_NODES", 10)
    monkeypatch.setattr(xarray, "MOST_NODES", 10)
    made = links
    ring(made, *AT[:60])
    head = made.at(made.prog.type("struct list_head"), AT[0])
    walk = list_entries(made.image, "struct entry_of_list_head", head, "link", raising)
    check_too_many(walk, "list does not end")
    made.write(AT[59], 0)
    chain = made.at(made.prog.type("struct hlist_head"), AT[0])
    walk = hlist_entries(made.image, "struct entry_of_hlist_node", chain, "link", raising)
    check_too_many(walk, "list is a circle, or does not end")
    for n in range(30):
        made.write(AT[n] + 8, 0)
    root = made.at(made.prog.type("struct rb_root"), AT[0])
    walk = rbtree_entries(made.image, "struct entry_of_rb_node", root, "link", raising)
    check_too_many(walk, "tree does not end")
    made.struct("xa_node", [("slots", made.array(made.word, 1))])
    for n in range(30):
        made.write(AT[n], AT[n + 1] | 2)
    xa = made.at(made.struct("xarray", [("xa_head", made.word)]), AT[0])
    check_too_many(xa_entries(made.image, xa), "XArray has a node twice, or too many")


def test_a_maple_tree_that_does_not_end(
    made: MadeMemory, tree: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = leaf(made, AT[1], AT[10]), leaf(made, AT[2], AT[12])
    made.write(AT[0], root_of(inner(made, AT[3], first, second)))
    monkeypatch.setattr(maple_tree, "MOST_NODES", 3)
    assert set(maple_entries(made.image, tree)) == {AT[10], AT[12]}
    monkeypatch.setattr(maple_tree, "MOST_NODES", 2)
    with pytest.raises(FaultError, match="^the maple tree has a node twice, or too many"):
        list(maple_entries(made.image, tree))


def check_too_many(walk: Iterable[object], reason: str) -> None:
    with pytest.raises(FaultError, match=f"^the {reason}: 0x") as raised:
        list(walk)
    assert raised.value.address == AT[11]


def test_a_list_with_one_pointer_as_head(links: MadeMemory) -> None:
    made, entry = links, "struct entry_of_hlist_node"
    for n in range(3):
        made.write(AT[n], AT[n + 1])
    head = made.at(made.prog.type("struct hlist_head"), AT[0])
    walk = hlist_entries(made.image, entry, head, "link", raising)
    assert [e.value_() for e in walk] == AT[1:4]
    made.write(AT[3], AT[2])
    check_circle(hlist_entries(made.image, entry, head, "link", raising), AT[2])


def test_a_red_black_tree(links: MadeMemory) -> None:
    made, entry = links, "struct entry_of_rb_node"
    made.write(AT[0], AT[1])
    made.write(AT[1], AT[2])
    made.write(AT[1] + 8, AT[3])
    root = made.at(made.prog.type("struct rb_root"), AT[0])
    walk = rbtree_entries(made.image, entry, root, "link", raising)
    assert {e.value_() for e in walk} == set(AT[1:4])
    made.write(AT[3], AT[1])
    check_circle(rbtree_entries(made.image, entry, root, "link", raising), AT[1])


def test_an_xarray(made: MadeMemory) -> None:
    made.struct("xa_node", [("shift", made.word), ("slots", made.array(made.word, 64))])
    xa = made.at(made.struct("xarray", [("xa_head", made.word)]), AT[0])
    made.write(AT[0], AT[1] | 2)
    made.write(AT[1] + 8, AT[2] | 2)
    # The first slot and the last one, and what is not in a slot.
    for n, entry in enumerate((AT[7], AT[3], *[0] * 62, AT[4], AT[8])):
        made.write(AT[2] + 8 * n, entry)
    # A value, the sibling of another slot, and XA_ZERO_ENTRY.
    for n, entry in enumerate((5 << 1 | 1, 62 << 2 | 2, 257 << 2 | 2)):
        made.write(AT[2] + 8 * (20 + n), entry)
    assert list(xa_entries(made.image, xa)) == [AT[3], AT[4]]
    made.write(AT[2] + 8 * 5, AT[1] | 2)
    check_circle(xa_entries(made.image, xa), AT[1])
    faults: list[FaultError] = []
    assert list(xa_entries(made.image, xa, faults.append)) == [AT[3], AT[4]]
    assert [fault.address for fault in faults] == [AT[1]]


def test_an_xarray_of_one(made: MadeMemory) -> None:
    """An entry with index 0 and no other needs no node."""
    xa = made.at(made.struct("xarray", [("xa_head", made.word)]), AT[0])
    made.struct("xa_node", [("slots", made.array(made.word, 64))])
    assert list(xa_entries(made.image, xa)) == []
    made.write(AT[0], AT[1])
    assert list(xa_entries(made.image, xa)) == [AT[1]]


def test_an_idr(made: MadeMemory) -> None:
    """One that is left out of the image has no entries, and the fault is known."""
    made.struct("xa_node", [("slots", made.array(made.word, 64))])
    root = made.struct("xarray", [("xa_head", made.word)])
    type_ = made.struct("idr", [("idr_rt", root)])
    made.struct("entry", [("first", made.word)])
    made.write(AT[0], AT[1])
    faults: list[FaultError] = []

    def walk(address: int) -> list[int]:
        idr = made.at(type_, address)[0]
        found = list(idr_entries(made.image, "struct entry", idr, faults.append))
        assert all(one.type_.type_name() == "struct entry *" for one in found)
        return [one.value_() for one in found]

    assert (walk(AT[0]), faults) == ([AT[1]], [])
    assert walk(0x1000) == []
    assert [fault.address for fault in faults] == [0x1000]


def test_there_can_be_as_many_as_there_are_pids() -> None:
    """``PID_MAX_LIMIT`` is 4 * 1024 * 1024 where a ``long`` has more than 4 bytes."""
    assert xarray.MOST_NODES == 4 * 1024 * 1024


def test_modules(links: MadeMemory) -> None:
    made, list_head = links, links.prog.type("struct list_head")
    made.struct("module", [("list", list_head), ("name", made.array(made.char, 56))])
    made.variable("modules", list_head, AT[0])
    ring(made, *AT[:3])
    made.write(AT[2] + 16, b"nfs")
    assert has_module(made.image, b"nfs") and not has_module(made.image, b"ext4")
    made.write(AT[2], AT[1])
    with pytest.raises(FaultError, match="^the list does not lead back to its head"):
        has_module(made.image, b"ext4")


def test_disks(links: MadeMemory) -> None:
    """Partitions and other classes are passed over, and may be a circle, too."""
    made, list_head = links, links.prog.type("struct list_head")
    made.struct("class", [("name", made.word)])
    made.struct("kset", [("list", list_head)])
    kobject = made.struct("kobject", [("entry", list_head)])
    kset = made.struct(None, [("kobj", kobject)])
    klist = made.struct("klist", [("k_list", list_head)])
    made.struct(
        "subsys_private",
        [("subsys", kset), ("class", made.link("class")), ("klist_devices", klist)],
    )
    node = made.struct("klist_node", [("n_node", list_head)])
    made.struct("device", [("kobj", made.word)])
    made.struct("device_private", [("knode_class", node), ("device", made.link("device"))])
    flags = made.struct("atomic_t", [("counter", made.int)])
    made.typedef("u8", made.prog.int_type("unsigned char", 1, False))
    made.struct(
        "block_device",
        [
            ("bd_device", made.prog.type("struct device")),
            ("__bd_flags", flags),
            ("bd_disk", made.link("gendisk")),
        ],
    )
    made.struct("gendisk", [("disk_name", made.array(made.char, 32))])
    made.variable("block_class", made.prog.type("struct class"), AT[0])
    made.variable("class_kset", made.pointer("kset"), AT[1])
    kset_at, other, block, disk, partition, gendisk = AT[2:8]
    made.write(AT[1], kset_at)
    ring(made, kset_at, other, block)
    made.write(block + 16, AT[0])
    devices = block + 24
    ring(made, devices, disk, partition)
    for private, number in ((disk, 0), (partition, 1)):
        bdev = private + 0x100
        made.write(private + 16, bdev)
        made.write(bdev + 8, number, 4)
        made.write(bdev + 16, gendisk)
    made.write(gendisk, b"sda")
    assert list(busy_loops(made.image)) == []
    made.write(partition, partition)
    check_circle(busy_loops(made.image), partition)
    made.write(other, other)
    check_circle(busy_loops(made.image), other)


# Parents


def test_parents_of_a_dentry(made: MadeMemory) -> None:
    name = made.struct("qstr", [("name", made.pointer(made.char))])
    made.struct("dentry", [("d_parent", made.link("dentry")), ("d_name", name)])
    for n, place in enumerate(AT[:3]):
        made.write(place, AT[max(n - 1, 0)])
        made.write(place + 8, place + 16)
        made.write(place + 16, b"/ab"[n : n + 1])
    dentry = made.at(made.prog.type("struct dentry"), AT[2])
    assert dentry_path(dentry) == b"a/b"
    made.write(AT[1], AT[2])
    with pytest.raises(FaultError, match="^the parents of a dentry are a circle") as raised:
        dentry_path(dentry)
    assert raised.value.address == AT[2]


@pytest.mark.parametrize("parent", ["parent", "__parent"])
def test_parents_of_a_cgroup(made: MadeMemory, parent: str) -> None:
    """``__parent`` since 6.15."""
    node = made.struct(
        "kernfs_node", [(parent, made.link("kernfs_node")), ("name", made.pointer(made.char))]
    )
    for n, place in enumerate(AT[:3]):
        made.write(place, AT[n - 1] if n else 0)
        made.write(place + 8, place + 16)
        made.write(place + 16, (b"", b"user", b"shell")[n])
    nodes = [made.at(node, place) for place in AT[:3]]
    assert [kernfs_path(n) for n in nodes] == [b"/", b"/user", b"/user/shell"]
    assert [kernfs_name(n) for n in nodes] == [b"/", b"user", b"shell"]
    cgroup = made.struct("cgroup", [("kn", made.pointer("kernfs_node"))])
    css = made.struct(None, [("cgroup", made.pointer(cgroup))])
    memcg = made.at(made.struct("mem_cgroup", [("css", css)]), AT[8])
    made.write(AT[8], AT[9])
    made.write(AT[9], AT[2])
    assert memcg_path(memcg) == b"/user/shell"
    made.write(AT[0], AT[2])
    with pytest.raises(FaultError, match="^the parents of a kernfs node are a circle") as raised:
        memcg_path(memcg)
    assert raised.value.address == AT[2]


def test_parents_of_a_memcg(made: MadeMemory) -> None:
    made.struct(
        "cgroup_subsys_state",
        [("parent", made.link("cgroup_subsys_state")), ("flags", made.int)],
    )
    css = made.prog.type("struct cgroup_subsys_state")
    memcg = made.at(made.struct("mem_cgroup", [("css", css)]), AT[2])
    for n, place in enumerate(AT[:3]):
        made.write(place, AT[n - 1] if n else 0)
        made.write(place + 8, 16 if n else 2, 4)
    assert payer_of(made.image, memcg).value_() == AT[0]
    made.write(AT[1], AT[2])
    with pytest.raises(FaultError, match="own ancestor") as raised:
        payer_of(made.image, memcg)
    assert raised.value.address == AT[2]


def test_a_string_that_does_not_end(made: MadeMemory) -> None:
    pointer = Object(made.prog, made.pointer(made.char), AT[0])
    made.write(AT[0], b"a name")
    assert c_string(pointer) == b"a name"
    made.write(AT[0], b"x" * 0x3000)
    with pytest.raises(FaultError, match="does not end"):
        c_string(pointer)
    assert made.reads < 1 << 14
