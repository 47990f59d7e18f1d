# SPDX-License-Identifier: LGPL-2.1-or-later
"""Paths and names of files, open files, and groups of fanotify. The memory is made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from drgn import FaultError
from support.made_memory import BASE, SIZE, MadeMemory

from memcg_inspect.image.image import Image
from memcg_inspect.linux.fs.d_path import d_path
from memcg_inspect.linux.fs.file_table import FileReader, OpenFile
from memcg_inspect.linux.fs.inode import mapping_name
from memcg_inspect.linux.fs.notify import Group, GroupReader

#: ``MNT_INTERNAL`` of include/linux/mount.h.
INTERNAL = 0x4000


class Tree:
    """
    Dentries and mounts of two filesystems.

    :ivar is_list: whether mounts of a filesystem are on a list with a head (up to 6.17)
    """

    def __init__(self, *, is_list: bool = False, has_name: bool = False) -> None:
        made = self.made = MadeMemory()
        self.is_list, self._next = is_list, BASE + 0x1000
        link = made.struct(
            "list_head", [("next", made.link("list_head")), ("prev", made.link("list_head"))]
        )
        node = made.struct("hlist_node", [("next", made.word)])
        alias = made.struct(None, [("d_alias", node)], union=True)
        name = made.struct("qstr", [("name", made.pointer(made.char))])
        operations = made.struct("dentry_operations", [("d_dname", made.word)])
        kind = made.struct("file_system_type", [("name", made.pointer(made.char))])
        mounts = link if is_list else made.link("mount")
        made.struct(
            "super_block",
            [
                ("s_type", made.pointer(kind)),
                ("s_id", made.array(made.char, 32)),
                ("s_mounts", mounts),
            ],
        )
        made.struct(
            "dentry",
            [
                ("d_parent", made.link("dentry")),
                ("d_name", name),
                ("d_sb", made.link("super_block")),
                ("d_op", made.pointer(operations)),
                ("d_u", alias) if has_name else ("d_alias", node),
            ],
        )
        vfsmount = made.struct(
            "vfsmount", [("mnt_root", made.link("dentry")), ("mnt_flags", made.int)]
        )
        made.struct(
            "mount",
            [
                ("mnt_parent", made.link("mount")),
                ("mnt_mountpoint", made.link("dentry")),
                ("mnt", vfsmount),
                ("mnt_instance", link) if is_list else ("mnt_next_for_sb", made.link("mount")),
            ],
        )

    def new(self, *words: int | bytes) -> int:
        """Write a structure; return its address."""
        address, self._next = self._next, self._next + 0x100
        for n, word in enumerate(words):
            self.made.write(address + 8 * n, word)
        return address

    def filesystem(self) -> int:
        """Make a filesystem of a device."""
        self.type_name = self.new(b"tmpfs")
        kind = self.new(self.type_name)
        block = self.new(kind, b"vda1")
        if self.is_list:
            self.made.write(block + 40, block + 40)
            self.made.write(block + 48, block + 40)
        return block

    def dentry(self, name: bytes, parent: int | None, block: int, operations: int = 0) -> int:
        """Make a dentry; one without a parent is the root of a filesystem."""
        address = self.new(0, self.new(name), block, operations)
        self.made.write(address, address if parent is None else parent)
        return address

    def mount(self, block: int, root: int, on: tuple[int, int] | None, flags: int = 0) -> int:
        """
        Mount a filesystem.

        :param root: the dentry that the mount shows as its root
        :param on: the mount and the dentry that it is mounted on; ``None`` for no other
        """
        address = self.new(0, root, root, flags)
        parent, point = on or (address, root)
        self.made.write(address, parent)
        self.made.write(address + 8, point)
        if self.is_list:  # list_add_tail()
            head = block + 40
            last = int.from_bytes(self.made.prog.read(head + 8, 8), "little")
            for at, to in (
                (last, address + 32),
                (head + 8, address + 32),
                (address + 32, head),
                (address + 40, last),
            ):
                self.made.write(at, to)
        else:
            place, after = block + 40, int.from_bytes(self.made.prog.read(block + 40, 8), "little")
            while after:
                place = after + 32
                after = int.from_bytes(self.made.prog.read(place, 8), "little")
            self.made.write(place, address)
        return address

    def path(self, dentry: int, mount: int | None = None) -> str:
        image = self.made.image
        vfsmount = None if mount is None else image.pointer("struct mount *", mount).mnt
        through = None if vfsmount is None else vfsmount.address_of_()
        return d_path(image, image.pointer("struct dentry *", dentry), through).decode()


@pytest.fixture(params=[False, True], ids=["pointer", "list"])
def tree(request: pytest.FixtureRequest) -> Tree:
    return Tree(is_list=request.param)


def test_paths_through_mounts(tree: Tree) -> None:
    outer, inner = tree.filesystem(), tree.filesystem()
    root = tree.dentry(b"/", None, outer)
    srv = tree.dentry(b"srv", tree.dentry(b"var", root, outer), outer)
    top = tree.dentry(b"/", None, inner)
    a = tree.dentry(b"a", top, inner)
    b, c = tree.dentry(b"b", a, inner), tree.dentry(b"c", top, inner)
    first = tree.mount(outer, root, None)
    with pytest.raises(FaultError, match="^the filesystem of a dentry is") as raised:
        tree.path(b)
    assert raised.value.address == inner
    # A mount of the kernel's own is taken if there is no other.
    tree.mount(inner, top, None, INTERNAL)
    assert tree.path(b) == "/a/b"
    tree.mount(inner, a, None, INTERNAL)
    assert tree.path(b) == "/a/b"
    whole = tree.mount(inner, top, (first, srv))
    assert tree.path(b) == "/var/srv/a/b"
    # A bind mount of a directory, which does not show what is beside it.
    bound = tree.mount(inner, a, (first, srv))
    assert tree.path(b) == "/var/srv/a/b"
    assert [tree.path(d, bound) for d in (b, a)] == ["/var/srv/b", "/var/srv"]
    assert [tree.path(d, bound) for d in (c, top)] == ["/c", "/"]
    assert [tree.path(d, whole) for d in (c, top)] == ["/var/srv/c", "/var/srv"]
    assert [tree.path(d, first) for d in (srv, root)] == ["/var/srv", "/"]


def test_mounts_that_are_a_circle(tree: Tree) -> None:
    block = tree.filesystem()
    root = tree.dentry(b"/", None, block)
    first = tree.mount(block, root, None)
    second = tree.mount(block, root, (first, root), INTERNAL)
    tree.made.write(first, second)
    with pytest.raises(FaultError, match="^the mounts are a circle") as raised:
        tree.path(root, second)
    assert raised.value.address == second
    # Of those of a filesystem, all are internal.
    tree.made.write(first + 24, INTERNAL, 4)
    tree.made.write(second + 32, second + 32 if tree.is_list else second)
    reason = "list does not lead back to its head" if tree.is_list else "mounts of a filesystem are"
    with pytest.raises(FaultError, match=f"^the {reason}"):
        tree.path(root)


@pytest.mark.parametrize("has_name", [False, True])
def test_names_of_mappings(has_name: bool) -> None:
    """``d_alias`` is in a union with a name up to 7.0."""
    tree = Tree(has_name=has_name)
    made, block = tree.made, tree.filesystem()
    root = tree.dentry(b"/", None, block)
    file = tree.dentry(b"x\xff", tree.dentry(b"tmp", root, block), block)
    tree.mount(block, root, None)
    head = made.struct("hlist_head", [("first", made.pointer("hlist_node"))])
    made.struct(
        "inode",
        [
            ("i_sb", made.link("super_block")),
            ("i_dentry", head),
            ("i_ino", made.word),
            ("i_nlink", made.int),
        ],
    )
    made.struct("address_space", [("host", made.link("inode"))])
    inode = tree.new(block, file + 32, 7, 1)
    mapping = tree.new(inode)

    def name(word: int, *, swap_cache: bool = False) -> str:
        return mapping_name(made.image, word, swap_cache)

    assert name(0) == "(no file)"
    assert name(0, swap_cache=True) == "(swap cache)"
    # FOLIO_MAPPING_ANON, FOLIO_MAPPING_KSM, PAGE_MAPPING_MOVABLE
    assert [name(mapping + n) for n in (1, 3, 2)] == ["(anonymous)", "(anonymous)", "(movable)"]
    assert name(mapping) == "/tmp/x\\xff"
    made.write(inode + 24, 0, 4)
    assert name(mapping) == "/tmp/x\\xff (deleted)"
    # No name leads to it, as to a file that was opened by its number.
    made.write(inode + 8, 0)
    assert name(mapping) == "(inode 7 of tmpfs vda1)"
    made.write(tree.type_name, b"t\xff")
    made.write(block + 8, b"vd\xff")
    assert name(mapping) == "(inode 7 of t\\xffpfs vd\\xff1)"
    made.write(mapping, 0)
    assert name(mapping) == "(no file)"
    # d_dname() makes a name without a directory.
    operations = tree.new(1)
    for parent, found in ((root, "memfd:a"), (None, "memfd:a")):
        memfd = tree.dentry(b"memfd:a", parent, block, operations)
        made.write(inode + 8, memfd + 32)
        made.write(inode + 24, 1, 4)
        made.write(mapping, inode)
        assert name(mapping) == found
    # Operations without d_dname() change nothing.
    made.write(operations, 0)
    assert name(tree.new(tree.new(block, memfd + 32, 7, 1))) == "/"


class Slabs:
    """What is used of ``SlabReader``: the objects of a slab are one behind the other."""

    is_freed = False

    def objects(self, slab: Any) -> list[int]:
        return [slab.start + n * slab.cache.size for n in range(slab.objects)]

    def address(self, slab: Any, number: int) -> int:
        return self.objects(slab)[number]

    def has_freed(self, slab: Any) -> bool:
        return self.is_freed


def slab_of(name: str, start: int, objects: int, *, size: int = 64, address: int = 0) -> Any:
    cache = SimpleNamespace(name=name, size=size, object_size=size, address=address)
    return SimpleNamespace(start=start, objects=objects, cache=cache)


@pytest.mark.parametrize(
    ("count", "least"), [("f_count", 1), ("f_ref", 0)], ids=["6.12", "since 6.13"]
)
def test_open_files(count: str, least: int) -> None:
    """A slab has closed files, too. ``f_ref`` is one less than the number of references."""
    made = MadeMemory()
    made.symbol("pipefifo_fops", BASE + 0x100, 64)
    made.symbol("shmem_file_operations", BASE + 0x200, 64)
    long = made.prog.int_type("long", 8, True)
    type_ = long if count == "f_count" else made.struct("file_ref_t", [("refcnt", long)])
    made.struct("file", [("f_op", made.word), ("private_data", made.word), (count, type_)])
    slab = slab_of("filp", BASE + 0x1000, 5, address=BASE + 0x800)
    pipe, other = BASE + 0x100, BASE + 0x200
    for n, words in enumerate(
        [(pipe, 5, least), (pipe, 6, least - 1), (other, 7, least), (pipe, 0, least), (0, 9, 9)]
    ):
        for at, word in enumerate(words):
            made.write(BASE + 0x1000 + 64 * n + 8 * at, word % (1 << 64))
    files = [OpenFile("pipefifo_fops", 5, True), OpenFile("pipefifo_fops", 6, False)]

    def reader() -> FileReader:
        slabs: Any = Slabs()
        return FileReader(Image(made.prog), slabs, "not_in_this_kernel", "pipefifo_fops")

    # The pointer to the cache may be in the kernel's code only. Its name is known then.
    assert not reader().can_read
    assert list(reader().read(slab)) == files
    assert list(reader().read(slab_of("dentry", BASE + 0x1000, 4))) == []
    made.symbol("filp_cachep", BASE + 0x300, 8)
    made.write(BASE + 0x300, BASE + 0x800)
    assert reader().can_read
    assert list(reader().read(slab)) == files
    assert list(reader().read(slab_of("filp", BASE + 0x1000, 4, address=BASE + 0x900))) == []
    made.symbol("filp_cachep", BASE + SIZE, 8)
    assert not reader().can_read


def test_groups_of_fanotify() -> None:
    """``struct fsnotify_group`` is in the smallest cache of kmalloc() that it fits in."""
    made = MadeMemory()
    words = [(f"more{n}", made.word) for n in range(6)]
    members = [("ops", made.word), ("refcnt", made.int), ("memcg", made.word), *words]
    made.struct("fsnotify_group", members)
    made.symbol("fanotify_fsnotify_ops", BASE + 0x100, 64)
    memcg, start, size = BASE + 0x400, BASE + 0x1000, 96
    slab = slab_of("kmalloc-cg-96", start, 5, size=size)

    def group(n: int, ops: int, count: int, memcg: int) -> None:
        for at, word in ((0, ops), (8, count), (16, memcg)):
            made.write(start + size * n + at, word)

    group(0, BASE + 0x100, 1, memcg)
    group(1, BASE + 0x100, 0, memcg)  # it is being freed
    group(2, BASE + 0x108, 1, memcg)  # another object
    group(3, BASE + 0x100, 1, memcg + 8)  # of no memcg
    group(4, BASE + 0x100, 1 << 24, memcg)
    slabs: Any = Slabs()
    reader = GroupReader(made.image, slabs)
    found = [Group(start, memcg), Group(start + 4 * size, memcg)]
    assert list(reader.read(slab, {memcg})) == found
    assert (reader.coverage.read, reader.coverage.unreadable) == (2, 0)
    assert list(reader.read(slab_of("kmalloc-cg-96", start, 0, size=size), {memcg})) == []
    sizes = {72: True, 71: False, 143: True, 144: False}
    for name, may in (("kmalloc-cg-96", True), ("kmem_cache 0xffff", True), ("dentry", False)):
        for size, fits in sizes.items():
            cache: Any = slab_of(name, start, 1, size=size).cache
            assert reader.may_read(cache) is (may and fits)
    # A slab that is missing counts, but for an object that KFENCE has freed.
    for is_freed, unreadable in ((True, 0), (False, 1)):
        slabs.is_freed = is_freed
        assert list(reader.read(slab_of("kmalloc-96", BASE + SIZE, 1, size=96), {memcg})) == []
        assert reader.coverage.unreadable == unreadable
    [missed] = reader.coverage.examples
    assert (missed.what, missed.address) == ("slab that may have groups", BASE + SIZE)


@pytest.mark.parametrize("members", [["ops", "refcnt"], ["ops", "refcnt", "memcg"]])
def test_kernels_without_groups_of_memcgs(members: list[str]) -> None:
    """CONFIG_MEMCG, and CONFIG_FANOTIFY or CONFIG_INOTIFY_USER."""
    made = MadeMemory()
    made.struct("fsnotify_group", [(name, made.word) for name in members])
    if "memcg" not in members:
        made.symbol("fanotify_fsnotify_ops", BASE + 0x100, 64)
    slabs: Any = Slabs()
    reader = GroupReader(made.image, slabs)
    slab = slab_of("kmalloc-32", BASE, 1, size=32)
    assert not reader.may_read(slab.cache)
    assert list(reader.read(slab, {0})) == []
