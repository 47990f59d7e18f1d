# SPDX-License-Identifier: LGPL-2.1-or-later
"""Memcgs and their obj_cgroups are those that a plain walk finds, and what is missing is missed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from drgn import Object, Program, container_of, sizeof
from drgn.helpers.linux.list import list_for_each_entry
from support.guests import DEBIAN_KERNELS, GuestImage, Lab
from support.missing_pages import excluded
from support.planting import Overlay, Write

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.memcontrol import (
    csses_made_since,
    keeps_original_objcgs,
    nodeinfo,
    objcg_owners,
    read_memcgs,
    read_objcgs,
    recover_objcgs,
)
from memcg_inspect.model import Coverage, Memcg, Objcg, ObjcgPlace

pytestmark = [
    pytest.mark.image,
    pytest.mark.each_kernel,
    pytest.mark.parametrize("kernel", DEBIAN_KERNELS),
]

NODES = 4


@pytest.fixture
def image(lab: Lab, kernel: str) -> GuestImage:
    """An image with memcgs that were removed, some below others."""
    return lab.image(kernel, str(NODES), "dying")


def children(memcg: Object) -> list[Object]:
    head = memcg.css.children.address_of_()
    found = list_for_each_entry("struct cgroup_subsys_state", head, "sibling")
    return [container_of(css, "struct mem_cgroup", "css") for css in found]


def below(memcg: Object) -> Iterator[Object]:
    """Return a memcg and those below it, parents first."""
    yield memcg
    for child in children(memcg):
        yield from below(child)


def tree(prog: Program) -> list[Object]:
    return list(below(prog["root_mem_cgroup"].read_()))


def parent_of(memcg: Object) -> Object | None:
    css = memcg.css.parent.read_()
    return container_of(css, "struct mem_cgroup", "css") if css else None


def has_flag(memcg: Object, flag: str) -> bool:
    return bool(int(memcg.css.flags) & memcg.prog_[flag].value_())


def path_of(memcg: Object) -> str:
    parent = parent_of(memcg)
    if parent is None:
        return "/"
    name = memcg.css.cgroup.kn.name.string_().decode()
    return f"{path_of(parent).rstrip('/')}/{name}"


def plain(memcg: Object) -> Memcg:
    parent, payer = parent_of(memcg), memcg
    while has_flag(payer, "CSS_DYING"):
        above = parent_of(payer)
        assert above is not None
        payer = above
    dying = has_flag(memcg, "CSS_DYING")
    return Memcg(
        address=memcg.value_(),
        path=path_of(memcg),
        cgroup_id=int(memcg.css.cgroup.kn.id),
        state="dying" if dying else "online",
        parent=None if parent is None else parent.value_(),
        payer=payer.value_(),
        offline=dying and not has_flag(memcg, "CSS_ONLINE"),
    )


def a_parent(prog: Program) -> Object:
    """Return a memcg with children and a parent."""
    return next(memcg for memcg in tree(prog)[1:] if children(memcg))


def test_memcgs_are_those_below_the_root(image: GuestImage) -> None:
    prog = image.program()
    coverage, names = Coverage(), Coverage()
    found = read_memcgs(image_of(prog), coverage, names)
    assert found == {memcg.value_(): plain(memcg) for memcg in tree(prog)}
    order = list(found)
    assert order[0] == prog["root_mem_cgroup"].value_()
    assert all(order.index(m.parent) < order.index(m.address) for m in found.values() if m.parent)
    assert {memcg.state for memcg in found.values()} == {"online", "dying"}
    assert (coverage.read, coverage.unreadable) == (len(found), 0)
    assert (names.read, names.unreadable) == (len(found) - 1, 0)


def test_a_name_that_is_missing(image: GuestImage) -> None:
    """The paths below have the address instead of the name."""
    prog = image.own_program()
    parent = a_parent(prog)
    number, old = len(tree(prog)), path_of(parent)
    paths = {memcg.value_(): path_of(memcg) for memcg in tree(prog)}
    new = f"{old.rpartition('/')[0]}/<memcg {parent.value_():#x}>"
    prog.add_memory_segment(parent.css.cgroup.kn.name.value_(), 1, excluded, False)
    coverage, names = Coverage(), Coverage()
    found = read_memcgs(image_of(prog), coverage, names)
    assert {address: memcg.path for address, memcg in found.items()} == {
        address: new + path[len(old) :] if f"{path}/".startswith(f"{old}/") else path
        for address, path in paths.items()
    }
    assert (coverage.read, coverage.unreadable) == (number, 0)
    assert (names.read, names.unreadable) == (number - 2, 1)
    assert all(memcg.whole for memcg in found.values())


def test_an_id_that_is_missing(image: GuestImage) -> None:
    prog = image.own_program()
    memcg = a_parent(prog)
    expected = replace(plain(memcg), cgroup_id=None)
    node = memcg.css.cgroup.kn
    prog.add_memory_segment(node.id.address_ or 0, 8, excluded, False)
    assert read_memcgs(image_of(prog), Coverage())[memcg.value_()] == expected


def test_a_list_of_children_that_is_missing(image: GuestImage) -> None:
    """The children are found by their ids."""
    prog = image.own_program()
    parent, every = a_parent(prog), [plain(memcg) for memcg in tree(prog)]
    head = parent.css.children
    prog.add_memory_segment(head.address_ or 0, sizeof(head), excluded, False)
    coverage = Coverage()
    found = read_memcgs(image_of(prog), coverage)
    assert found == {
        memcg.address: replace(memcg, whole=memcg.address != parent.value_()) for memcg in every
    }
    assert (coverage.read, coverage.unreadable) == (len(every), 1)
    assert coverage.examples[0].what == "children of a memcg"


def test_a_memcg_that_is_missing(image: GuestImage) -> None:
    """Its parent is not whole, and what is below it cannot be placed."""
    prog = image.own_program()
    gone = a_parent(prog)
    hidden = {memcg.value_() for memcg in below(gone)}
    every = [plain(memcg) for memcg in tree(prog)]
    prog.add_memory_segment(gone.css.flags.address_ or 0, 4, excluded, False)
    coverage = Coverage()
    found = read_memcgs(image_of(prog), coverage)
    above = next(memcg.parent for memcg in every if memcg.address == gone.value_())
    assert found == {
        memcg.address: replace(memcg, whole=memcg.address != above)
        for memcg in every
        if memcg.address not in hidden
    }
    assert coverage.read == len(found)
    assert [missed.what for missed in coverage.examples] == ["memcg"]


def test_a_root_that_is_missing(image: GuestImage) -> None:
    """Its path and its state are known, and what is below it is found."""
    prog = image.own_program()
    root, every = prog["root_mem_cgroup"], [plain(memcg) for memcg in tree(prog)]
    prog.add_memory_segment(root.css.flags.address_ or 0, 4, excluded, False)
    coverage = Coverage()
    found = read_memcgs(image_of(prog), coverage)
    first = replace(every[0], cgroup_id=None, whole=False)
    assert found == {memcg.address: memcg for memcg in [first, *every[1:]]}
    assert (coverage.read, coverage.unreadable) == (len(every) - 1, 1)


def test_a_memcg_that_is_its_own_child(image: GuestImage) -> None:
    """A list of children that leads to a memcg that is known is broken."""
    prog = image.own_program()
    parent = a_parent(prog)
    child = children(parent)[0]
    head, sibling = parent.css.children, parent.css.sibling.address_ or 0
    address = head.address_ or 0
    Overlay(prog).write(
        (
            Write(address, sibling.to_bytes(8, "little")),
            Write(sibling, address.to_bytes(8, "little") * 2),
        )
    )
    coverage = Coverage()
    found = read_memcgs(image_of(prog), coverage)
    assert child.value_() in found  # by its id
    assert not found[parent.value_()].whole
    assert coverage.unreadable
    reasons = [missed.reason for missed in coverage.examples]
    assert f"the list of a memcg's children is broken: {parent.value_():#x}" in reasons


def test_how_many_were_made_after_a_memcg(image: GuestImage) -> None:
    prog = image.own_program()
    memcgs = tree(prog)
    addresses = [memcg.value_() for memcg in memcgs]
    latest = int(prog["css_serial_nr_next"]) - 1
    expected = {memcg.value_(): latest - int(memcg.css.serial_nr) for memcg in memcgs}
    coverage = Coverage()
    assert csses_made_since(image_of(prog), addresses, coverage) == expected
    assert min(expected.values()) >= 0
    assert not coverage.unreadable
    last = memcgs[-1]
    prog.add_memory_segment(last.css.serial_nr.address_ or 0, 8, excluded, False)
    del expected[last.value_()]
    assert csses_made_since(image_of(prog), addresses, coverage) == expected
    assert [m.what for m in coverage.examples] == ["serial number of a memcg"]
    prog.add_memory_segment(prog["css_serial_nr_next"].address_ or 0, 8, excluded, False)
    assert csses_made_since(image_of(prog), addresses, coverage) == {}
    assert [m.what for m in coverage.examples][1:] == ["css_serial_nr_next"]


# obj_cgroups


def holders(memcg: Object) -> list[tuple[int | None, Object]]:
    """Return what holds the obj_cgroups of a memcg: the memcg, or its nodes (7.1)."""
    if memcg.type_.type.has_member("objcg"):
        return [(None, memcg)]
    return [(nid, memcg.nodeinfo[nid]) for nid in range(NODES)]


def held(holder: Object) -> list[tuple[str, int]]:
    names = [n for n in ("objcg", "orig_objcg") if holder.type_.type.has_member(n)]
    return [(name, holder.member_(name).value_()) for name in names if holder.member_(name)]


def plain_places(prog: Program) -> dict[int, list[ObjcgPlace]]:
    found: dict[int, list[ObjcgPlace]] = {}
    for memcg in tree(prog):
        for nid, holder in holders(memcg):
            refs: list[tuple[str, int]] = held(holder)
            if holder.objcg or parent_of(memcg) is None:
                head = holder.objcg_list.address_of_()
                listed = list_for_each_entry("struct obj_cgroup", head, "list")
                refs += [("objcg_list", objcg.value_()) for objcg in listed]
            for member, objcg in refs:
                place = ObjcgPlace(memcg.value_(), nid, member)  # type: ignore[arg-type]
                found.setdefault(objcg, []).append(place)
    return found


def read(prog: Program) -> tuple[dict[int, Objcg], Coverage, set[int]]:
    coverage, unreadable = Coverage(), set[int]()
    memcgs = read_memcgs(image_of(prog), Coverage())
    return read_objcgs(image_of(prog), memcgs, coverage, unreadable), coverage, unreadable


def test_obj_cgroups_are_those_of_the_memcgs(image: GuestImage) -> None:
    prog = image.program()
    found, coverage, unreadable = read(prog)
    places = plain_places(prog)
    assert found.keys() == places.keys()
    assert (coverage.read, coverage.unreadable, unreadable) == (len(found), 0, set())
    for address, got in found.items():
        objcg = Object(prog, "struct obj_cgroup", address=address)
        assert got.places == tuple(places[address])
        assert got.memcg_refs == len([p for p in places[address] if p.member != "objcg_list"])
        assert got.nid == places[address][0].nid
        assert (got.address, got.memcg) == (address, objcg.memcg.value_())
        assert got.nr_charged_bytes == objcg.nr_charged_bytes.counter.value_()
        assert got.is_root == (bool(objcg.is_root) if hasattr(objcg, "is_root") else False)
        assert (got.siblings, got.set) == ((), 0)
        assert got.refs is not None
        assert got.is_root or got.refs >= got.memcg_refs  # those of the root are not counted
    assert len({got.memcg for got in found.values()}) > 3


def test_the_memcgs_that_obj_cgroups_were_made_for(image: GuestImage) -> None:
    prog = image.program()
    memcgs = tree(prog)
    coverage = Coverage()
    assert objcg_owners(image_of(prog), [m.value_() for m in memcgs], coverage) == {
        objcg: memcg.value_() for memcg in memcgs for _, h in holders(memcg) for _, objcg in held(h)
    }
    assert not coverage.unreadable
    # A memcg that was removed keeps them since 6.7.
    kept = any(n == "orig_objcg" for m in memcgs for _, h in holders(m) for n, _ in held(h))
    assert keeps_original_objcgs(image_of(prog)) == kept


def test_obj_cgroups_of_a_memcg_that_are_missing(image: GuestImage) -> None:
    """Of one node, if each node has its own: those of the others are read."""
    prog = image.own_program()
    before = read(prog)[0]
    memcg = next(m for m in tree(prog)[1:] if not children(m) and holders(m)[-1][1].objcg)
    _, holder = holders(memcg)[-1]
    own = {objcg for _, objcg in held(holder)}
    prog.add_memory_segment(holder.objcg.address_ or 0, 8, excluded, False)
    found, coverage, unreadable = read(prog)
    assert before.keys() - found.keys() <= before.keys() & own | {
        address for address, got in before.items() if got.memcg == memcg.value_()
    }
    assert own - found.keys()
    assert unreadable == {memcg.value_()}
    assert (coverage.read, coverage.unreadable) == (len(found), 1)
    missed = Coverage()
    owners = objcg_owners(image_of(prog), [m.value_() for m in tree(prog)], missed)
    assert not own & owners.keys()
    assert missed.unreadable == 1


def test_a_node_of_a_memcg_that_is_missing(image: GuestImage) -> None:
    prog = image.own_program()
    memcg = tree(prog)[-1]
    whole = [(nid, memcg.nodeinfo[nid].value_()) for nid in range(NODES)]
    assert [(nid, pn.value_()) for nid, pn in nodeinfo(image_of(prog), memcg)] == whole
    prog.add_memory_segment(memcg.nodeinfo[1].address_ or 0, 8, excluded, False)
    faults: list[Exception] = []
    left = [(nid, pn.value_()) for nid, pn in nodeinfo(image_of(prog), memcg, faults.append)]
    assert left == [pair for pair in whole if pair[0] != 1]
    assert len(faults) == 1
    with pytest.raises(type(faults[0])):
        list(nodeinfo(image_of(prog), memcg))


def test_obj_cgroups_that_only_charges_point_to(image: GuestImage) -> None:
    prog = image.program()
    known = read(prog)[0]
    coverage, memcgs = Coverage(), {memcg.value_() for memcg in tree(prog)}
    nowhere = 0x1000
    found = recover_objcgs(image_of(prog), memcgs, True, [*known, nowhere], coverage)
    assert found == {
        address: replace(objcg, refs=None, nid=None, memcg_refs=0, places=())
        for address, objcg in known.items()
    }
    assert (coverage.read, coverage.unreadable) == (len(known), 1)
    # If all memcgs were read, one that refers to another memcg is none.
    strange = next(iter(memcgs & {objcg.memcg for objcg in known.values()}))
    others = {address for address, objcg in known.items() if objcg.memcg != strange}
    rest, missed = memcgs - {strange}, Coverage()
    assert recover_objcgs(image_of(prog), rest, True, known, missed).keys() == others
    assert missed.read == len(others) < len(known)
    assert recover_objcgs(image_of(prog), rest, False, known, Coverage()).keys() == known.keys()
