# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Memcgs, in structures made as the kernel has them.

Every pointer and flag is written down here. Images of real kernels are in test_memcgs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from drgn import FaultError, Object
from support.layouts import MadeImage

from memcg_inspect.linux.mm.memcontrol import (
    csses_made_since,
    find_memcg,
    memcg_children,
    memcg_descendants,
    memcg_path,
    nodeinfo,
    not_accounted,
    on_default_hierarchy,
    payer_of,
    read_memcgs,
    root_memcg,
)
from memcg_inspect.linux.mm.mmzone import possible_nodes
from memcg_inspect.model import Coverage, ImageError, Memcg

VARIABLES, PLACES = 0xFFFFFFFF82000000, 0xFFFF888030000000
#: Flags of include/linux/cgroup-defs.h.
ONLINE, DYING = 2, 16
DEAD, ATOMIC = 2, 1
MISSING = 0xFFFF888077700000

#: Memcgs are a page apart, each with its css, cgroup, kernfs node and name.
ROOT, SHOP, DESK, SAFE, BANK = (PLACES + n * 4096 for n in range(5))
CGROUP, NODE, NAME, PN = 1024, 1280, 1536, 2048

TYPES = """
    struct list_head { struct list_head *next; struct list_head *prev; };
    struct atomic { int counter; };
    struct atomic64 { long counter; };
    struct mutex { struct atomic64 owner; };
    struct static_key { struct atomic enabled; };
    struct static_key_true { struct static_key key; };
    struct percpu_ref { unsigned long percpu_count_ptr; struct percpu_ref_data *data; };
    struct kernfs_node { char *name; struct kernfs_node *parent; unsigned long id; };
    struct cgroup { struct kernfs_node *kn; struct cgroup_root *root; };
    struct cgroup_root { long id; };
    struct xarray { void *xa_head; };
    struct xa_node { unsigned long count; void *slots[4]; };
    struct idr { struct xarray idr_rt; };
    struct cgroup_subsys { struct cgroup_root *root; struct idr css_idr; };
    struct cgroup_subsys_state {
        struct cgroup *cgroup; struct percpu_ref refcnt;
        struct list_head sibling; struct list_head children;
        unsigned int flags; unsigned long serial_nr; struct cgroup_subsys_state *parent;
    };
    struct mem_cgroup_per_node { long id; };
    struct mem_cgroup {
        struct cgroup_subsys_state css; struct mem_cgroup_per_node *nodeinfo[2];
    };
"""
SUBSYS, MUTEX, KEY, SERIAL, XA_NODE = (VARIABLES + n for n in (64, 128, 192, 256, 512))


def kernel() -> MadeImage:
    """Return a kernel with a root memcg that has no children."""
    image = MadeImage()
    image.given[possible_nodes] = (0, 1)
    image.declare(TYPES)
    for name, type_, at in (
        ("root_mem_cgroup", "struct mem_cgroup *", VARIABLES),
        ("memory_cgrp_subsys", "struct cgroup_subsys", SUBSYS),
        ("cgroup_mutex", "struct mutex", MUTEX),
        ("css_serial_nr_next", "unsigned long", SERIAL),
        ("cgrp_dfl_root", "struct cgroup_root", VARIABLES + 384),
    ):
        image.variable(name, type_, at)
    image.words(VARIABLES, ROOT)
    put(image, ROOT, None, b"")
    return image


def at(image: MadeImage, memcg: int, member: str) -> int:
    """Return the address of a member of the css of a memcg."""
    css = image.pointer("struct mem_cgroup *", memcg).css
    return css.member_(member).address_ or 0


def put(
    image: MadeImage, memcg: int, parent: int | None, name: bytes, *, flags: int = ONLINE
) -> None:
    """Make a memcg without children. Its id is the number of its page."""
    ref = ATOMIC | (DEAD if flags & DYING else 0)
    members = {"css.cgroup": memcg + CGROUP, "css.refcnt.percpu_count_ptr": ref}
    members |= {"css.flags": flags, "css.parent": parent or 0}
    image.make("struct mem_cgroup", memcg, members)
    image.make("struct cgroup", memcg + CGROUP, {"kn": memcg + NODE})
    above = parent + NODE if parent else 0
    node = {"name": memcg + NAME, "parent": above, "id": memcg >> 12 & 0xFF}
    image.make("struct kernfs_node", memcg + NODE, node)
    image.write(memcg + NAME, name + b"\0")
    put_children(image, memcg)


def put_children(image: MadeImage, memcg: int, *children: int) -> None:
    """Write the list of the children of a memcg."""
    ring = [at(image, memcg, "children"), *(at(image, child, "sibling") for child in children)]
    for n, link in enumerate(ring):
        image.words(link, ring[(n + 1) % len(ring)], ring[n - 1])


def put_ids(image: MadeImage, *memcgs: int) -> None:
    """Write the idr of all memcgs."""
    image.words(SUBSYS + 8, XA_NODE | 2)
    image.words(XA_NODE, 0, *memcgs, *[0] * (4 - len(memcgs)))


def family() -> MadeImage:
    """Return a kernel with /shop, /shop/desk, /shop/safe, which was removed, and /bank."""
    image = kernel()
    put(image, SHOP, ROOT, b"shop")
    put(image, DESK, SHOP, b"desk")
    put(image, SAFE, SHOP, b"safe", flags=DYING)
    put(image, BANK, ROOT, b"bank")
    put_children(image, ROOT, SHOP, BANK)
    put_children(image, SHOP, DESK, SAFE)
    put_ids(image, ROOT, BANK, DESK, SHOP)
    return image


#: Parents first, and the children of each next to each other.
FAMILY = [
    Memcg(ROOT, "/", 0, "online", None, ROOT),
    Memcg(SHOP, "/shop", 1, "online", ROOT, SHOP),
    Memcg(BANK, "/bank", 4, "online", ROOT, BANK),
    Memcg(DESK, "/shop/desk", 2, "online", SHOP, DESK),
    Memcg(SAFE, "/shop/safe", 3, "dying", SHOP, SHOP, offline=True),
]


def memcg(image: MadeImage, address: int) -> Object:
    return image.pointer("struct mem_cgroup *", address)


def values(memcgs: Sequence[Object]) -> list[int]:
    return [one.value_() for one in memcgs]


# What is accounted

KEYS = ("memcg_kmem_online_key", "memcg_bpf_enabled_key", "memcg_sockets_enabled_key")


def with_keys(**enabled: int) -> MadeImage:
    image = kernel()
    for n, (name, value) in enumerate(enabled.items()):
        image.variable(name, "struct static_key_true", KEY + 4 * n)
        image.write(KEY + 4 * n, bytes([value]))
    return image


def test_what_no_memcg_is_charged_for() -> None:
    """One key for each. 6.1 has another one for kernel memory. A key that is not there is none."""
    names = ("kernel memory", "BPF", "sockets")
    for off, what in enumerate(names):
        coverage = Coverage()
        image = with_keys(**{key: int(n != off) for n, key in enumerate(KEYS)})
        assert not_accounted(image, coverage) == (what,)
        assert (coverage.read, coverage.unreadable) == (3, 0)
    assert not_accounted(with_keys(**dict.fromkeys(KEYS, 0)), Coverage()) == names
    assert not_accounted(with_keys(memcg_kmem_enabled_key=0), Coverage()) == ("kernel memory",)
    assert not_accounted(with_keys(memcg_kmem_enabled_key=1), Coverage()) == ()
    assert not_accounted(kernel(), Coverage()) == ()


def test_a_key_that_is_not_in_the_image() -> None:
    """The other ones are read."""
    image, coverage = with_keys(**dict.fromkeys(KEYS, 0)), Coverage()
    image.variable(KEYS[1], "struct static_key_true", MISSING)
    assert not_accounted(image, coverage) == ("kernel memory", "sockets")
    assert coverage.read == 2
    [missed] = coverage.examples
    assert (missed.what, missed.address) == ("whether BPF is accounted", MISSING)
    assert "not made" in missed.reason


# The tree


def test_kernels_without_a_memory_controller() -> None:
    built = MadeImage()
    with pytest.raises(ImageError, match=r"^this kernel has no memory .* CONFIG_MEMCG is off\)$"):
        root_memcg(built)
    disabled = r"^the memory controller is disabled .*\(cgroup_disable=memory\)$"
    image = with_keys(memory_cgrp_subsys_enabled_key=1)
    assert root_memcg(image).value_() == ROOT
    with pytest.raises(ImageError, match=disabled):
        root_memcg(with_keys(memory_cgrp_subsys_enabled_key=0))
    image.words(VARIABLES, 0)
    with pytest.raises(ImageError, match=disabled):
        root_memcg(image)


def test_walks_down_the_tree() -> None:
    image = family()
    assert values(list(memcg_children(image, memcg(image, SHOP)))) == [DESK, SAFE]
    assert values(list(memcg_descendants(image, memcg(image, SHOP)))) == [SHOP, DESK, SAFE]
    order = [ROOT, SHOP, DESK, SAFE, BANK]
    assert values(list(memcg_descendants(image, root_memcg(image)))) == order
    assert memcg_path(memcg(image, SAFE)) == b"/shop/safe"
    assert memcg_path(memcg(image, ROOT)) == b"/"


def test_a_memcg_that_is_below_itself() -> None:
    """Nothing is returned a second time."""
    image = family()
    put_children(image, SHOP, SHOP)
    walk, seen = memcg_descendants(image, memcg(image, SHOP)), []
    with pytest.raises(FaultError, match="^a memcg is its own ancestor") as raised:
        seen.extend(one.value_() for one in walk)
    assert raised.value.address == SHOP
    image.words(at(image, SHOP, "parent"), SHOP)
    image.write(at(image, SHOP, "flags"), bytes([DYING]))
    with pytest.raises(FaultError, match="^a memcg is its own ancestor") as raised:
        payer_of(image, memcg(image, SHOP))
    assert raised.value.address == SHOP


def test_finding_a_memcg() -> None:
    image = family()
    for path, address in (
        (b"/", ROOT), (b"", ROOT), (b"/shop", SHOP), (b"/shop/safe", SAFE),
        (b"shop//desk/", DESK), (b"/bank", BANK), (b"/shop/bank", 0), (b"/desk", 0),
    ):  # fmt: skip
        found = find_memcg(image, path)
        assert found.value_() == address
        assert found.type_.type_name() == "struct mem_cgroup *"


@pytest.mark.parametrize("dying", [16, 64])
def test_a_memcg_with_the_name_of_a_removed_one(dying: int) -> None:
    """The one that is online is found, wherever it is in the list."""
    image = kernel()
    if dying != DYING:
        image.enum(None, CSS_DYING=dying)
    put(image, DESK, ROOT, b"shop", flags=dying)
    put(image, SHOP, ROOT, b"shop", flags=ONLINE | 64 + 16 - dying)
    for order in ((DESK, SHOP), (SHOP, DESK)):
        put_children(image, ROOT, *order)
        assert find_memcg(image, b"/shop").value_() == SHOP


def test_who_pays() -> None:
    """The nearest memcg that was not removed. The root pays for itself, whatever its flags."""
    image = family()
    put(image, BANK, SAFE, b"bank", flags=DYING | ONLINE)
    for own, payer in ((SHOP, SHOP), (SAFE, SHOP), (BANK, SHOP)):
        assert payer_of(image, memcg(image, own)).value_() == payer
    image.write(at(image, ROOT, "flags"), bytes([DYING]))
    assert payer_of(image, memcg(image, ROOT)).value_() == ROOT


# Memcgs


def test_memcgs_of_a_tree() -> None:
    coverage, names = Coverage(), Coverage()
    found = read_memcgs(family(), coverage, names)
    assert list(found.values()) == FAMILY
    assert list(found) == [one.address for one in FAMILY]
    assert (coverage.read, coverage.unreadable) == (5, 0)
    assert (names.read, names.unreadable) == (4, 0)
    assert list(read_memcgs(family(), Coverage()).values()) == FAMILY


def test_removed_memcgs() -> None:
    """A memcg below a removed one is removed, too. Its charges are those of what is above both."""
    image = family()
    put(image, BANK, SAFE, b"bank", flags=DYING | ONLINE)
    put_children(image, ROOT, SHOP)
    put_children(image, SAFE, BANK)
    found = read_memcgs(image, Coverage())
    assert found[SAFE] == FAMILY[4]
    assert found[BANK] == Memcg(BANK, "/shop/safe/bank", 4, "dying", SAFE, SHOP)


def test_flags_of_other_values() -> None:
    """Debug info may have them."""
    image = kernel()
    image.enum(None, CSS_DYING=64, CSS_ONLINE=32)
    for place, name, flags in ((SHOP, b"a", 64), (DESK, b"b", 96), (BANK, b"c", 16 | 2)):
        put(image, place, ROOT, name, flags=flags)
        ref = ATOMIC | (DEAD if flags & 64 else 0)
        image.words(at(image, place, "refcnt"), ref)
    put_children(image, ROOT, SHOP, DESK, BANK)
    found = read_memcgs(image, Coverage())
    states = {path.path: (path.state, path.offline) for path in found.values()}
    assert states == {
        "/": ("online", False),
        "/a": ("dying", True),
        "/b": ("dying", False),
        "/c": ("online", False),
    }


def test_the_root_is_never_removed() -> None:
    """Its flag is damaged then; it agrees with its reference count all the same."""
    image = family()
    image.write(at(image, ROOT, "flags"), bytes([DYING]))
    coverage = Coverage()
    assert list(read_memcgs(image, coverage).values()) == FAMILY
    assert not coverage.unreadable


@pytest.mark.parametrize("flags", [ONLINE, DYING, DYING | ONLINE])
def test_a_flag_and_a_reference_count_that_do_not_agree(flags: int) -> None:
    """Somebody who holds cgroup_mutex may be between the two. Otherwise one is damaged."""
    image = family()
    put(image, BANK, ROOT, b"bank", flags=flags)
    image.words(at(image, BANK, "refcnt"), ATOMIC if flags & DYING else ATOMIC | DEAD)
    put_children(image, ROOT, SHOP, BANK)
    coverage = Coverage()
    found = read_memcgs(image, coverage)
    assert [(address, one.whole) for address, one in found.items()] == [
        (ROOT, False), (SHOP, True), (DESK, True), (SAFE, True),
    ]  # fmt: skip
    [missed] = coverage.examples
    assert (missed.what, missed.address) == ("memcg", at(image, BANK, "flags"))
    reason = "CSS_DYING and the reference count of a memcg do not agree"
    assert missed.reason.startswith(reason)
    image.words(MUTEX, 1)
    coverage = Coverage()
    assert BANK in read_memcgs(image, coverage)
    assert (coverage.read, coverage.unreadable) == (5, 0)


def test_names_that_are_missing_or_no_text() -> None:
    image, names = family(), Coverage()
    image.write(BANK + NAME, b"b\xffnk\0")
    image.words(SHOP + NODE, MISSING)
    found = read_memcgs(image, Coverage(), names)
    paths = [one.path for one in found.values()]
    shop = f"/<memcg {SHOP:#x}>"
    assert paths == ["/", shop, "/b\\xffnk", f"{shop}/desk", f"{shop}/safe"]
    assert (names.read, names.unreadable) == (3, 1)
    [missed] = names.examples
    assert (missed.what, missed.address) == ("name of a cgroup", MISSING)
    assert "not made" in missed.reason


def test_a_cgroup_that_is_missing() -> None:
    """Neither its name nor its id is known."""
    image = family()
    image.words(at(image, BANK, "cgroup"), MISSING)
    assert read_memcgs(image, Coverage())[BANK] == Memcg(
        BANK, f"/<memcg {BANK:#x}>", None, "online", ROOT, BANK
    )


def test_an_id_that_is_missing() -> None:
    """It may be on another page than the name."""
    image, names = family(), Coverage()
    page = (BANK & -4096) + 0x800_0000
    image.words(page - 16, BANK + NAME, ROOT + NODE)
    image.words(BANK + CGROUP, page - 16)
    bank = read_memcgs(image, Coverage(), names)[BANK]
    assert (bank.path, bank.cgroup_id) == ("/bank", None)
    [missed] = names.examples
    assert (missed.what, missed.address) == ("ID of a cgroup", page)


def break_children(image: MadeImage, memcg: int) -> int:
    """Make a list of children a circle that leads back to its first entry; return that one."""
    first = at(image, SHOP, "sibling")
    image.words(at(image, memcg, "children"), first, first)
    image.words(first, first, first)
    return first


def test_a_list_of_children_that_is_broken() -> None:
    """Those that it does not show are found by their ids, parents first."""
    image, coverage = family(), Coverage()
    put(image, SAFE, BANK, b"safe", flags=DYING)
    put_children(image, SHOP, DESK)
    put_ids(image, SAFE, DESK, BANK, ROOT)
    first = break_children(image, ROOT)
    found = read_memcgs(image, coverage)
    assert found == {
        ROOT: replace(FAMILY[0], whole=False),
        SHOP: FAMILY[1],
        DESK: FAMILY[3],
        BANK: FAMILY[2],
        SAFE: Memcg(SAFE, "/bank/safe", 3, "dying", BANK, BANK, offline=True),
    }
    assert list(found) == [ROOT, SHOP, DESK, BANK, SAFE]
    assert coverage.read == 5
    [missed] = coverage.examples
    assert (missed.what, missed.address) == ("children of a memcg", first)
    assert missed.reason.startswith("the list does not lead back to its head")


def test_children_that_have_no_id_any_more() -> None:
    """The list of a memcg that was found by its id shows them, and so do lists below it."""
    image, coverage = family(), Coverage()
    put(image, DESK, BANK, b"desk")
    put(image, SAFE, DESK, b"safe", flags=DYING)
    put_children(image, DESK, SAFE)
    put_children(image, BANK, DESK)
    put_children(image, SHOP)
    put_ids(image, ROOT, BANK)
    break_children(image, ROOT)
    found = read_memcgs(image, coverage)
    assert set(found) == {ROOT, SHOP, DESK, SAFE, BANK}
    assert found[DESK] == Memcg(DESK, "/bank/desk", 2, "online", BANK, DESK)
    assert found[SAFE].path == "/bank/desk/safe"
    assert (coverage.read, coverage.unreadable) == (5, 1)


def test_a_memcg_that_is_not_in_the_image() -> None:
    """Its parent is not whole. What is below it is not placed, and is not counted again."""
    image, coverage = family(), Coverage()
    put_ids(image, DESK, SHOP, BANK)
    image.forget(SHOP)
    found = read_memcgs(image, coverage)
    assert list(found) == [ROOT, BANK]
    assert not found[ROOT].whole and found[BANK].whole
    assert {one.what for one in coverage.examples} == {"children of a memcg", "memcg"}
    assert coverage.unreadable == 2
    assert coverage.read == 2


def test_a_parent_that_is_not_known() -> None:
    """A list leads to a memcg of which the parent is another one."""
    image, coverage = family(), Coverage()
    image.words(at(image, BANK, "parent"), SHOP + 64)
    found = read_memcgs(image, coverage)
    assert list(found) == [ROOT, SHOP, DESK, SAFE]
    [missed] = coverage.examples
    assert (missed.what, missed.address) == ("memcg", SHOP + 64)
    assert missed.reason.startswith("the parent of a memcg could not be read")


def test_a_list_with_a_memcg_that_is_known() -> None:
    image, coverage = family(), Coverage()
    put_children(image, SHOP, DESK, SAFE, ROOT)
    found = read_memcgs(image, coverage)
    assert [one.address for one in found.values() if not one.whole] == [SHOP]
    [missed] = coverage.examples
    assert (missed.what, missed.address) == ("memcg", ROOT)
    assert coverage.read == 5
    assert missed.reason.startswith("the list of a memcg's children is broken")


def test_a_root_that_is_not_in_the_image() -> None:
    image, coverage = family(), Coverage()
    image.forget(ROOT)
    found = read_memcgs(image, coverage)
    assert found == {ROOT: Memcg(ROOT, "/", None, "online", None, ROOT, whole=False), **{
        one.address: one for one in FAMILY if one.address in (SHOP, DESK, SAFE, BANK)
    }}  # fmt: skip
    whats = [(one.what, one.address) for one in coverage.examples]
    assert ("memcg", at(image, ROOT, "parent")) in whats
    assert {what for what, _ in whats} == {"children of a memcg", "memcg"}


# Serial numbers, hierarchies and nodes


def test_how_many_were_made_since() -> None:
    image, coverage = family(), Coverage()
    for place, serial in ((SHOP, 12), (BANK, 19)):
        image.words(at(image, place, "serial_nr"), serial)
    image.words(SERIAL, 20)
    expected = {SHOP: 7, BANK: 0}
    assert csses_made_since(image, [SHOP, MISSING, BANK], coverage) == expected
    [missed] = coverage.examples
    assert missed.what == "serial number of a memcg"
    assert missed.address == at(image, MISSING, "serial_nr")
    assert "not made" in missed.reason
    image.variable("css_serial_nr_next", "unsigned long", MISSING)
    coverage = Coverage()
    assert csses_made_since(image, [SHOP], coverage) == {}
    [missed] = coverage.examples
    assert (missed.what, missed.address) == ("css_serial_nr_next", MISSING)
    assert "not made" in missed.reason


def test_kernels_that_do_not_show_the_serial_number() -> None:
    """kallsyms has no variables without CONFIG_KALLSYMS_ALL."""
    image, coverage = MadeImage(), Coverage()
    assert csses_made_since(image, [SHOP], coverage) == {}
    assert not coverage.unreadable


@pytest.mark.parametrize("is_v2", [True, False])
def test_the_hierarchy_of_the_controller(is_v2: bool) -> None:
    image, root = kernel(), VARIABLES + (384 if is_v2 else 392)
    image.words(SUBSYS, root)
    image.words(ROOT + CGROUP + 8, root)
    assert on_default_hierarchy(image) is is_v2


def test_a_controller_in_two_hierarchies() -> None:
    image, root = kernel(), VARIABLES + 384
    image.words(SUBSYS, root)
    image.words(ROOT + CGROUP + 8, root + 8)
    why = f"in the cgroup_root {root:#x}, and its root memcg in {root + 8:#x}: one of them"
    with pytest.raises(ImageError, match=why):
        on_default_hierarchy(image)


def test_nodes_of_a_memcg() -> None:
    """A node without memory of its own may have none."""
    image = family()
    first = memcg(image, SHOP).nodeinfo[0].address_ or 0
    image.words(first, 0, SHOP + PN)
    image.words(memcg(image, BANK).nodeinfo[0].address_ or 0, BANK + PN)

    def nodes(address: int) -> list[tuple[int, int]]:
        return [(nid, pn.value_()) for nid, pn in nodeinfo(image, memcg(image, address))]

    assert nodes(SHOP) == [(1, SHOP + PN)]
    assert nodes(BANK) == [(0, BANK + PN)]
    faults: list[FaultError] = []
    assert list(nodeinfo(image, memcg(image, MISSING), faults.append)) == []
    places = memcg(image, MISSING).nodeinfo
    assert [fault.address for fault in faults] == [places[0].address_, places[1].address_]
    with pytest.raises(FaultError):
        nodes(MISSING)
