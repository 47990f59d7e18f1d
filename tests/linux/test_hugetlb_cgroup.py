# SPDX-License-Identifier: LGPL-2.1-or-later
"""Cgroups of the hugetlb controller, in structures made as mm/hugetlb_cgroup.c has them."""

from __future__ import annotations

import pytest
from support.layouts import MadeImage

from memcg_inspect.linux.mm.hugetlb_cgroup import (
    is_hugetlb_lock_held,
    moves_usage,
    read_hugetlb_cgroups,
)
from memcg_inspect.linux.mm.mmzone import possible_nodes
from memcg_inspect.model import Coverage
from memcg_inspect.model_hugetlb import HugetlbCgroup

VARIABLES, PLACES = 0xFFFFFFFF82000000, 0xFFFF888030000000
MISSING = 0xFFFF888077700000
#: Cgroups are a page apart, each with its cgroup, kernfs node, name, and usages of two nodes.
ROOT, SHOP, DESK, BANK = (PLACES + n * 4096 for n in range(4))
CGROUP, NODE, NAME, USAGES = 1024, 1280, 1536, (2048, 2304)
TOP = PLACES + 0x10000
#: Number of the controller.
ID = 3
DYING = 16


def kernel() -> MadeImage:
    """Return a kernel with /, /shop, /shop/desk and /bank, and two sizes of huge pages."""
    image = MadeImage()
    image.given[possible_nodes] = (0, 1)
    image.declare(
        """
        struct list_head { struct list_head *next; struct list_head *prev; };
        struct kernfs_node { char *name; struct kernfs_node *parent; };
        struct cgroup_subsys_state {
            struct cgroup *cgroup; struct list_head sibling; struct list_head children;
            unsigned int flags; struct cgroup_subsys_state *parent;
        };
        struct cgroup { struct kernfs_node *kn; struct cgroup_subsys_state *subsys[8]; };
        struct cgroup_root { long id; struct cgroup cgrp; };
        struct cgroup_subsys { struct cgroup_root *root; };
        struct page_counter { long id; long usage; long min; };
        struct hugetlb_cgroup {
            struct cgroup_subsys_state css; struct page_counter hugepage[3]; void *nodeinfo[2];
        };
        """
    )
    image.enum(None, hugetlb_cgrp_id=ID)
    image.variable("hugetlb_cgrp_subsys", "struct cgroup_subsys", VARIABLES)
    image.words(VARIABLES, TOP)
    image.make("struct cgroup_root", TOP, {})
    subsys = image.pointer("struct cgroup_root *", TOP).cgrp.subsys
    image.words(subsys[ID].address_ or 0, ROOT)
    put(image, ROOT, None, b"", (9, 1))
    put(image, SHOP, ROOT, b"shop", (7, -1))
    put(image, DESK, SHOP, b"de\xffsk", (2, 0), flags=DYING)
    put(image, BANK, ROOT, b"bank", (1, 1))
    children(image, ROOT, SHOP, BANK)
    children(image, SHOP, DESK)
    return image


def put(
    image: MadeImage,
    address: int,
    parent: int | None,
    name: bytes,
    usage: tuple[int, int],
    *,
    flags: int = 0,
) -> None:
    """Make a cgroup. The usages of node 0 are 10 and 20 more than those, those of node 1 100."""
    image.make("struct hugetlb_cgroup", address, {"css.cgroup": address + CGROUP})
    cgroup = image.pointer("struct hugetlb_cgroup *", address)
    image.write(cgroup.css.flags.address_ or 0, bytes([flags]))
    for n, pages in enumerate(usage):
        image.words(cgroup.hugepage[n].usage.address_ or 0, pages % (1 << 64))
    image.words(cgroup.nodeinfo.address_ or 0, *(address + at for at in USAGES))
    image.words(address + USAGES[0], usage[0] + 10, (usage[1] + 20) % (1 << 64))
    image.words(address + USAGES[1], usage[0] + 100, (-usage[1]) % (1 << 64))
    image.make("struct cgroup", address + CGROUP, {"kn": address + NODE})
    members = {"name": address + NAME, "parent": parent + NODE if parent else 0}
    image.make("struct kernfs_node", address + NODE, members)
    image.write(address + NAME, name + b"\0")
    children(image, address)


def at(image: MadeImage, cgroup: int, member: str) -> int:
    """Return the address of a member of the css of a cgroup."""
    css = image.pointer("struct hugetlb_cgroup *", cgroup).css
    return css.member_(member).address_ or 0


def children(image: MadeImage, cgroup: int, *below: int) -> None:
    """Write the list of the children of a cgroup."""
    ring = [at(image, cgroup, "children"), *(at(image, child, "sibling") for child in below)]
    for n, link in enumerate(ring):
        image.words(link, ring[(n + 1) % len(ring)], ring[n - 1])


def nodes(first: tuple[int, int], second: tuple[int, int]) -> dict[tuple[int, int], int]:
    """Return the usages of both nodes by size and node."""
    found = {(size, 0): pages for size, pages in enumerate(first)}
    return found | {(size, 1): pages for size, pages in enumerate(second)}


CGROUPS = {
    ROOT: HugetlbCgroup(ROOT, "/", None, True, (9, 1), nodes((19, 21), (109, -1))),
    SHOP: HugetlbCgroup(SHOP, "/shop", ROOT, True, (7, -1), nodes((17, 19), (107, 1))),
    DESK: HugetlbCgroup(*(DESK, "/shop/de\\xffsk", SHOP, False, (2, 0)), nodes((12, 20), (102, 0))),
    BANK: HugetlbCgroup(BANK, "/bank", ROOT, True, (1, 1), nodes((11, 21), (101, -1))),
}


def read(image: MadeImage, sizes: int = 2) -> tuple[dict[int, HugetlbCgroup], Coverage]:
    coverage = Coverage()
    return read_hugetlb_cgroups(image, sizes, coverage), coverage


def missed(coverage: Coverage) -> list[tuple[str, int]]:
    return [(one.what, one.address) for one in coverage.examples]


def test_cgroups_of_a_tree() -> None:
    found, coverage = read(kernel())
    assert found == CGROUPS
    assert list(found) == [ROOT, SHOP, DESK, BANK]
    assert (coverage.read, coverage.unreadable) == (4, 0)


def test_sizes_that_the_kernel_does_not_have() -> None:
    """``HUGE_MAX_HSTATE`` may be more than there are sizes."""
    found, _ = read(kernel(), 1)
    assert [one.usage for one in found.values()] == [(9,), (7,), (2,), (1,)]
    assert found[BANK].on_nodes == {(0, 0): 11, (0, 1): 101}
    assert found.keys() == CGROUPS.keys()
    assert read(kernel(), 0)[0][BANK].on_nodes == {}


def test_the_root_is_online() -> None:
    """Whatever its flags are."""
    image = kernel()
    image.write(at(image, ROOT, "flags"), bytes([DYING]))
    assert read(image)[0] == CGROUPS


def test_a_flag_of_another_value() -> None:
    image = kernel()
    image.enum(None, CSS_DYING=2)
    image.write(at(image, BANK, "flags"), bytes([2]))
    found, _ = read(image)
    assert [one.is_online for one in found.values()] == [True, True, True, False]


def test_a_node_without_usages() -> None:
    """It is no possible node."""
    image = kernel()
    place = image.pointer("struct hugetlb_cgroup *", BANK).nodeinfo.address_ or 0
    image.words(place, 0)
    assert read(image)[0][BANK].on_nodes == {(0, 1): 101, (1, 1): -1}


def test_a_root_that_is_not_in_the_image() -> None:
    image = kernel()
    image.words(VARIABLES, MISSING)
    found, coverage = read(image)
    assert found == {}
    assert coverage.read == 0
    subsys = image.pointer("struct cgroup_root *", MISSING).cgrp.subsys
    assert missed(coverage) == [("root of the hugetlb controller", subsys[ID].address_)]
    assert "not made" in coverage.examples[0].reason


@pytest.mark.parametrize("what", ["usage of a node", "name"])
def test_a_cgroup_that_cannot_be_read(what: str) -> None:
    """Those below it are not found."""
    image = kernel()
    if what == "name":
        image.words(SHOP + NODE, MISSING)
    else:
        place = image.pointer("struct hugetlb_cgroup *", SHOP).nodeinfo.address_ or 0
        image.words(place, MISSING)
    found, coverage = read(image)
    assert found == {address: CGROUPS[address] for address in (ROOT, BANK)}
    assert missed(coverage) == [("hugetlb cgroup", MISSING)]
    assert "not made" in coverage.examples[0].reason
    assert coverage.read == 2


def test_a_list_of_children_that_is_broken() -> None:
    image = kernel()
    link = at(image, SHOP, "sibling")
    image.words(link, link)
    found, coverage = read(image)
    assert found == CGROUPS  # the last one from the other end
    assert missed(coverage) == [("children of a hugetlb cgroup", link)]
    assert coverage.examples[0].reason.startswith("the list does not lead back to its head")


def test_a_cgroup_on_two_lists() -> None:
    image = kernel()
    children(image, SHOP, DESK, ROOT)
    found, coverage = read(image)
    assert found == CGROUPS
    assert missed(coverage) == [("hugetlb cgroup", ROOT)]
    assert coverage.examples[0].reason.startswith("a hugetlb cgroup is on two lists")
    assert coverage.read == 4


def test_whether_usages_move_with_a_page() -> None:
    image = kernel()
    assert moves_usage(image) is False
    image = kernel()
    image.symbol_at("hugetlb_cgroup_move_usage", VARIABLES + 512)
    assert moves_usage(image) is True


def test_the_lock() -> None:
    """A queued spinlock of x86: its lowest byte is 1 while it is held."""
    assert is_hugetlb_lock_held(kernel()) is None
    image = kernel()
    image.declare("""
        struct atomic { int counter; };
        struct qspinlock { struct atomic val; };
        struct raw_spinlock { struct qspinlock raw_lock; };
        struct spinlock { struct raw_spinlock rlock; };
    """)
    for place, value in ((VARIABLES + 1024, 1), (VARIABLES + 1032, 0)):
        image.variable("hugetlb_lock", "struct spinlock", place)
        image.words(place, value)
        assert is_hugetlb_lock_held(image) is bool(value)
    image.variable("hugetlb_lock", "struct spinlock", MISSING)
    assert is_hugetlb_lock_held(image) is None
