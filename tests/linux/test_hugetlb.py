# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Huge pages of hugetlb, their sizes, and the cgroups that are charged for them.

Memory maps are made by hand as in the sources of releases; the tree of cgroups is that of an image.
"""

from __future__ import annotations

import pytest
from drgn import FaultError, Object, Program, container_of
from drgn.helpers.linux.cgroup import cgroup_path, css_for_each_descendant_pre
from fuzz.damage import damaged
from support.guests import GuestImage, Lab
from support.layouts import FRAMES, NODE_1, MadeImage
from support.made_pages import NO_TYPE, TYPES, kernel_with_pages, put_compound
from support.planting import Overlay, Write

from memcg_inspect.image.image import Image, image_of
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.hugetlb import HugetlbPages, huge_page_orders, most_compound_order
from memcg_inspect.linux.mm.hugetlb_cgroup import (
    HugetlbChargeReader,
    hugetlb_sizes,
    is_hugetlb_lock_held,
    moves_usage,
    read_hugetlb_cgroups,
    why_no_hugetlb_cgroups,
)
from memcg_inspect.linux.mm.mm_types import RawPiece, scan_range
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.model import Coverage
from memcg_inspect.model_hugetlb import HugetlbSize

SIZE = FRAMES.size
VARIABLES = 0xFFFFFFFF82000000
OWNER, OTHER = 0xFFFF888000700000, 0xFFFF888000800000


# Which pages are of hugetlb


@pytest.mark.parametrize(
    ("release", "constants", "page_type"),
    [
        ("6.10", {"PG_hugetlb": 0x800}, NO_TYPE & ~0x800),
        ("6.11", {"PG_hugetlb": 0x04000000}, NO_TYPE & ~0x04000000),
        ("6.13", {"PGTY_hugetlb": 0xF4}, 0xF4FFFFFF),
        ("7.1", {"PGTY_hugetlb": 0xF4}, 0xF4FFFFFF),
    ],
)
def test_pages_with_a_type(release: str, constants: dict[str, int], page_type: int) -> None:
    """Since 6.10 (include/linux/page-flags.h)."""
    image = kernel_with_pages(TYPES[release])
    image.enum(None, **constants)
    # The slab has another type; nothing marks the last one.
    for first, found in ((0, NO_TYPE), (2, page_type), (4, TYPES[release].slab), (6, page_type)):
        put_compound(image, TYPES[release], first, 1, 0, found, 0)
    reader, data = HugetlbPages(image), image.memory.read(FRAMES.page(0), 8 * SIZE)
    assert [reader.begins(data, i) for i in (0, 2, 4, 6)] == [False, True, False, True]
    assert reader.begins(data[: 7 * SIZE], 6)  # its type is in its first page


@pytest.mark.parametrize("bit", [5, 13])
def test_pages_with_a_flag_of_the_second_page(bit: int) -> None:
    """PG_hugetlb of 6.6 to 6.9, one of the flags that the first page uses for something else."""
    image = kernel_with_pages(TYPES["6.6"])
    image.enum(None, PG_hugetlb=bit)
    for first in (0, 2, 4):
        put_compound(image, TYPES["6.6"], first, 1, 0, NO_TYPE, 0)
    word = image.memory.word(FRAMES.page(3))
    image.words(FRAMES.page(3), word | 1 << bit)
    image.words(FRAMES.page(4), image.memory.word(FRAMES.page(4)) | 1 << bit)
    reader, data = HugetlbPages(image), image.memory.read(FRAMES.page(0), 6 * SIZE)
    assert [reader.begins(data, i) for i in (0, 2, 4)] == [False, True, False]
    assert not reader.begins(data[: 3 * SIZE], 2)  # a piece ends before the second page


@pytest.mark.parametrize("release", ["6.2", "6.3"])
def test_pages_with_a_destructor(release: str) -> None:
    """HUGETLB_PAGE_DTOR up to 6.5, in the second page (include/linux/mm.h)."""
    image = kernel_with_pages(TYPES[release])
    image.enum("compound_dtor_id", NULL_COMPOUND_DTOR=0, COMPOUND_PAGE_DTOR=1, HUGETLB_PAGE_DTOR=2)
    for first, destructor in ((0, 1), (2, 2), (4, 3), (6, 0)):
        put_compound(image, TYPES[release], first, 1, 0, NO_TYPE, 0)
        image.write(FRAMES.page(first + 1) + 16, bytes([destructor]))
    reader, data = HugetlbPages(image), image.memory.read(FRAMES.page(0), 8 * SIZE)
    assert [reader.begins(data, i) for i in (0, 2, 4, 6)] == [False, True, False, False]


@pytest.mark.parametrize("constants", [{}, {"PG_hugetlb": 64}])
def test_kernels_without_huge_pages(constants: dict[str, int]) -> None:
    """Without CONFIG_HUGETLB_PAGE, nothing has the mark; a flag is one of the 64 of a word."""
    image = kernel_with_pages(TYPES["6.6"])
    image.enum(None, **constants)
    put_compound(image, TYPES["6.6"], 0, 1, (1 << 63) - 1, 0, 0)
    image.words(FRAMES.page(1), (1 << 64) - 1)
    assert not HugetlbPages(image).begins(image.memory.read(FRAMES.page(0), 2 * SIZE), 0)


# Their sizes


def with_sizes(image: MadeImage, orders: list[int], number: int | None = None) -> MadeImage:
    """Make ``hstates`` of mm/hugetlb.c."""
    image.declare("struct hstate { int next_nid_to_alloc; unsigned int order; };")
    image.variable("hugetlb_max_hstate", "int", VARIABLES)
    image.variable("hstates", "struct hstate[16]", VARIABLES + 64)
    number = len(orders) if number is None else number
    image.write(VARIABLES, (number % (1 << 32)).to_bytes(4, "little"))
    for n, order in enumerate(orders):
        image.make("struct hstate", VARIABLES + 64 + 8 * n, {"order": order})
    return image


def test_sizes_are_named_as_the_files_of_cgroups() -> None:
    """``mem_fmt()`` of mm/hugetlb_cgroup.c, as hugetlb.64KB.max."""
    orders = [4, 7, 8, 9, 13, 17, 18, 22]
    names = ["64KB", "512KB", "1MB", "2MB", "32MB", "512MB", "1GB", "16GB"]
    image = with_sizes(MadeImage(), orders)
    assert huge_page_orders(image) == tuple(orders)
    assert hugetlb_sizes(image) == tuple(map(HugetlbSize, names, orders))
    assert huge_page_orders(with_sizes(MadeImage(), [])) == ()


@pytest.mark.parametrize(
    ("orders", "number", "why"),
    [
        ([9] * 16, 17, "17 sizes"),
        ([9], -1, "-1 sizes"),
        ([9, 31], None, "no order"),
    ],
)
def test_sizes_that_cannot_be(orders: list[int], number: int | None, why: str) -> None:
    image = with_sizes(MadeImage(), orders, number)
    with pytest.raises(FaultError, match=why) as raised:
        huge_page_orders(image)
    assert raised.value.address == VARIABLES + (64 if number is None else 0)


def test_the_most_sizes_and_the_largest() -> None:
    assert huge_page_orders(with_sizes(MadeImage(), [30] * 16)) == (30,) * 16


@pytest.mark.parametrize(
    ("orders", "number", "most"),
    [([9, 18], None, 18), ([4], None, 10), ([], None, 10), ([9], 17, 30)],
)
def test_the_largest_compound_page(orders: list[int], number: int | None, most: int) -> None:
    """Of hugetlb or of the buddy allocator. If the sizes are damaged, any size of any machine."""
    image = with_sizes(MadeImage(), orders, number)
    image.declare("struct zone { unsigned long free_area[11]; };")
    assert most_compound_order(image) == most


def test_the_largest_compound_page_without_hugetlb() -> None:
    image = MadeImage()
    image.declare("struct zone { unsigned long free_area[9]; };")
    assert most_compound_order(image) == 8


# Who is charged


def with_controller(release: str, enabled: int | None = None) -> MadeImage:
    image = with_sizes(kernel_with_pages(TYPES[release]), [2, 4])
    image.declare("""
        struct page_counter { unsigned long usage; };
        struct hugetlb_cgroup { struct page_counter hugepage[2]; void *nodeinfo[2]; };
    """)
    if enabled is not None:
        image.declare("""
            struct atomic { int counter; };
            struct static_key { struct atomic enabled; };
            struct static_key_true { struct static_key key; };
        """)
        key = "hugetlb_cgrp_subsys_enabled_key"
        image.variable(key, "struct static_key_true", VARIABLES + 512)
        image.write(VARIABLES + 512, enabled.to_bytes(4, "little"))
    return image


def test_why_no_cgroup_is_charged() -> None:
    assert why_no_hugetlb_cgroups(with_controller("7.1")) is None
    assert why_no_hugetlb_cgroups(with_controller("7.1", 1)) is None
    disabled = why_no_hugetlb_cgroups(with_controller("7.1", 0))
    assert disabled == "the hugetlb controller is disabled (cgroup_disable=hugetlb)"
    old = MadeImage()
    not_built = "this kernel was built without CONFIG_CGROUP_HUGETLB"
    assert why_no_hugetlb_cgroups(old) == not_built
    old.declare("struct hugetlb_cgroup { unsigned long hugepage[2]; };")  # up to 5.16
    assert why_no_hugetlb_cgroups(old) == not_built


def charged(image: MadeImage, pages: int) -> list[tuple[tuple[int, int, int], int]]:
    reader, found = HugetlbChargeReader(image), []
    for piece in scan_range(image, PageRange(0, pages)):
        assert isinstance(piece.raw, RawPiece)
        found += reader.read(piece.raw)
    return found


def put_huge(image: MadeImage, release: str, first: int, order: int, owner: int, node: int) -> None:
    """Put a page of hugetlb whose owner is where the release has it."""
    page_type = 0xF4FFFFFF if release == "7.1" else NO_TYPE
    put_compound(image, TYPES[release], first, order, node, page_type, 0)
    if release == "7.1":  # folio->_hugetlb_cgroup
        image.words(FRAMES.page(first + 2) + 32, owner)
    else:  # page[SUBPAGE_INDEX_CGROUP].private
        image.write(FRAMES.page(first + 1) + 16, b"\2")
        image.words(FRAMES.page(first + 2) + 40, owner)


@pytest.mark.parametrize("release", ["6.2", "7.1"])
def test_huge_pages_that_are_charged(release: str) -> None:
    """include/linux/hugetlb_cgroup.h: up to 6.2 in a page, since 6.3 in the folio."""
    image = with_controller(release)
    if release == "7.1":
        image.enum(None, PGTY_hugetlb=0xF4)
        image.declare("""
            struct folio { struct page page; struct page __page_1;
                           unsigned long _flags_2; unsigned long _head_2; void *pad[2];
                           void *_hugetlb_cgroup; };
        """)
    else:
        image.enum(None, HUGETLB_PAGE_DTOR=2, SUBPAGE_INDEX_CGROUP=2)
    put_huge(image, release, 0, 2, OWNER, 0)
    put_huge(image, release, 4, 2, 0, 0)  # free, or charged to nobody
    put_huge(image, release, 8, 3, OTHER, 0)  # no size of huge pages
    put_compound(image, TYPES[release], 16, 2, 0, NO_TYPE, 0)  # not of hugetlb
    image.words(FRAMES.page(18) + 32, OTHER, OTHER)
    put_huge(image, release, 32, 4, OTHER, NODE_1)
    put_huge(image, release, 48, 2, OWNER, NODE_1)
    for pfn in range(20, 32):
        image.make("struct page", FRAMES.page(pfn), {"page_type": NO_TYPE})
    of_all = [((OWNER, 2, 0), 4), ((OTHER, 4, 1), 16), ((OWNER, 2, 1), 4)]
    assert charged(image, 52) == of_all
    # The part of the memory map ends before what refers to the owner.
    assert charged(image, 50) == of_all[:2]
    image.write(VARIABLES, b"\x63")
    assert charged(image, 52) == []  # no size is known, and read_hugetlb_cgroups() says so


def test_owners_in_no_known_place() -> None:
    image = with_controller("6.2")
    image.enum(None, HUGETLB_PAGE_DTOR=2)
    with pytest.raises(UnknownKernelError, match="in no place that is known"):
        HugetlbChargeReader(image)
    # Without the controller, no place is needed.
    assert charged(kernel_with_pages(TYPES["6.2"]), 0) == []


# The tree of cgroups


def cgroups_image(lab: Lab, kernel: str = "7.3") -> GuestImage:
    return lab.image(kernel, "2", "hugetlbs")


def walked(prog: Program) -> list[Object]:
    """Return the ``struct hugetlb_cgroup *`` of all cgroups as drgn's helper walks them."""
    root = prog["hugetlb_cgrp_subsys"].root.cgrp.subsys[prog["hugetlb_cgrp_id"]]
    return [
        container_of(css, "struct hugetlb_cgroup", "css")
        for css in css_for_each_descendant_pre(root)
    ]


@pytest.mark.image
def test_the_tree_of_cgroups(lab: Lab) -> None:
    prog = cgroups_image(lab).program()
    sizes, coverage = int(prog["hugetlb_max_hstate"]), Coverage()
    found = read_hugetlb_cgroups(image_of(prog), sizes, coverage)
    expected = walked(prog)
    assert list(found) == [cgroup.value_() for cgroup in expected]
    assert (coverage.read, coverage.unreadable) == (len(expected), 0)
    for cgroup in expected:
        one, parent = found[cgroup.value_()], cgroup.css.parent
        assert one.address == cgroup.value_()
        above = container_of(parent, "struct hugetlb_cgroup", "css").value_() if parent else None
        assert one.parent == above
        if one.is_online:
            assert one.path == cgroup_path(cgroup.css.cgroup).decode()
        is_dying = bool(cgroup.css.flags & prog["CSS_DYING"])
        assert one.is_online == (parent.value_() == 0 or not is_dying)
        assert one.usage == tuple(cgroup.hugepage[n].usage.counter.value_() for n in range(sizes))
        assert one.on_nodes == {
            (n, nid): cgroup.nodeinfo[nid].usage[n].value_()
            for nid in range(2)
            for n in range(sizes)
        }
    assert {one.is_online for one in found.values()} == {True, False}
    assert any(sum(one.on_nodes.values()) for one in found.values())


@pytest.mark.image
def test_cgroups_that_cannot_be_read(lab: Lab) -> None:
    image = cgroups_image(lab)
    prog = image.program()
    root, *others = walked(prog)
    whole = read_hugetlb_cgroups(image_of(prog), 1, Coverage())
    subsys, coverage = prog["hugetlb_cgrp_subsys"].root.address_, Coverage()
    assert read_hugetlb_cgroups(damaged(image.core, (subsys, 0)), 1, coverage) == {}
    assert [e.what for e in coverage.examples] == ["root of the hugetlb controller"]
    # A usage of a node that cannot be read: the cgroup is missed, and those below it.
    victim = next(c for c in others if whole[c.value_()].path == "/huge")
    changed = damaged(image.core, (victim.nodeinfo[0].address_, 8))
    coverage = Coverage()
    found = read_hugetlb_cgroups(changed, 1, coverage)
    below = {a for a, one in whole.items() if one.path.startswith("/huge")}
    assert set(found) == set(whole) - below
    assert [e.what for e in coverage.examples] == ["hugetlb cgroup"]
    assert (coverage.read, coverage.unreadable) == (len(found), 1)
    # The root itself is on the list of its children.
    coverage = Coverage()
    changed = damaged(image.core, (root.css.children.next.address_, root.css.sibling.address_))
    read_hugetlb_cgroups(changed, 1, coverage)
    assert "hugetlb cgroup" in {e.what for e in coverage.examples}


@pytest.mark.image
def test_nodes_without_a_usage(lab: Lab) -> None:
    image = cgroups_image(lab)
    root = walked(image.program())[0]
    changed = damaged(image.core, (root.nodeinfo[0].address_, 0))
    found = read_hugetlb_cgroups(changed, 1, Coverage())
    assert {nid for _, nid in found[root.value_()].on_nodes} == {1}


@pytest.mark.image
def test_the_lock_of_huge_pages(lab: Lab) -> None:
    prog = cgroups_image(lab).own_program()
    lock = prog.symbol("hugetlb_lock").address
    assert is_hugetlb_lock_held(image_of(prog)) is False
    overlay = Overlay(prog)
    overlay.write((Write(lock, (1).to_bytes(4, "little")),))
    assert is_hugetlb_lock_held(Image(prog)) is True
    assert is_hugetlb_lock_held(MadeImage()) is None
    missing = damaged(cgroups_image(lab).core, (lock, "missing"))
    assert is_hugetlb_lock_held(missing) is None


@pytest.mark.image
@pytest.mark.parametrize(("kernel", "moves"), [("7.3", True), ("6.1", False)])
def test_kernels_that_move_the_usage_of_a_node(lab: Lab, kernel: str, moves: bool) -> None:
    """6.1 has no symbol ``hugetlb_cgroup_move_usage``."""
    image = lab.image(kernel)
    assert moves_usage(image_of(image.program())) is moves
