# SPDX-License-Identifier: LGPL-2.1-or-later
"""What words on a stack point to, and which of them may be the size of an allocation."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from drgn import Object, Program, container_of, offsetof, sizeof
from drgn.helpers.linux.mm import (
    compound_head,
    compound_order,
    follow_page,
    page_to_pfn,
    page_to_virt,
    virt_to_page,
)
from drgn.helpers.linux.mmzone import for_each_online_pgdat
from drgn.helpers.linux.pid import for_each_task
from drgn.helpers.linux.slab import find_slab_cache, slab_object_info
from support.free_pages import free_page
from support.guests import DEBIAN_KERNELS, Lab
from support.layouts import MadeImage
from support.planting import Overlay, Write

from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.kernel import stacktrace_pointers
from memcg_inspect.linux.kernel.stacktrace_pointers import PointerReader
from memcg_inspect.linux.mm.debug import read_page
from memcg_inspect.linux.mm.memcontrol_limits import read_limits
from memcg_inspect.linux.mm.vmalloc_vfree import PartialAreaReader
from memcg_inspect.linux.mm.zswap import ZswapReader
from memcg_inspect.model import Held

#: Of include/linux/percpu.h: PCPU_MIN_ALLOC_SIZE and PCPU_MIN_UNIT_SIZE.
LEAST, MOST = 4, 32 << 10


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_sizes_of_percpu_allocations(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4").program()
    reader = PointerReader(image_of(prog), (), (), ())
    words = [0, 1, LEAST, LEAST, 6, 64, MOST, MOST + LEAST, 1 << 63]
    found = list(reader.percpu(words))
    assert [held.address for held in found] == [LEAST, 64, MOST]
    # Four copies, and a pointer to the obj_cgroup for each four bytes.
    assert [held.bytes for held in found] == [6 * size for size in (LEAST, 64, MOST)]
    assert {held.kind for held in found} == {"percpu"}


#: ``LIST_POISON1`` of include/linux/poison.h: no address.
POISON = 0xDEAD000000000100
PAGE = 4096
#: ``SLAB_RECLAIM_ACCOUNT`` where it is a macro, and where it is a bit of an enumeration.
RECLAIMABLE = 0x20000

on_images = (
    pytest.mark.image,
    pytest.mark.each_kernel,
    pytest.mark.parametrize("kernel", DEBIAN_KERNELS),
)


@pytest.fixture
def prog(lab: Lab, kernel: str) -> Program:
    return lab.image(kernel, "4", "mixed").program()


@pytest.fixture
def task(prog: Program) -> Object:
    """A task in a memcg below the root, made by a task in one."""
    return next(
        t
        for t in for_each_task(prog)
        if t.mm and memcg_of(t).css.parent and payer_of(t.stack_vm_area.pages[0])
    )


def memcg_of(task: Object) -> Object:
    css = task.cgroups.subsys[task.prog_["memory_cgrp_id"]]
    return container_of(css, "struct mem_cgroup", "css")


def payer_of(page: Object) -> int:
    return int(page.memcg_data.value_()) & ~7


def nid_of(page: Object) -> int:
    """Return the node whose range of page frames a page is in."""
    pfn = page_to_pfn(page)
    for node in for_each_online_pgdat(page.prog_):
        if node.node_start_pfn <= pfn < node.node_start_pfn + node.node_spanned_pages:
            return int(node.node_id)
    raise AssertionError


def is_on_image(test: Callable[..., None]) -> Callable[..., None]:
    for mark in on_images:
        test = mark(test)
    return test


@is_on_image
def test_memcgs_and_their_obj_cgroups(prog: Program, task: Object) -> None:
    memcg = memcg_of(task)
    address, parent = memcg.value_(), memcg.css.parent.value_()
    # The reader takes any address for an obj_cgroup: this one is in memory that holds no memcg.
    node, objcg = memcg.nodeinfo[2], task.stack.value_()
    held = Held("memcg", address, address)
    parts = [
        (address, sizeof(memcg[0]), held),
        (node.value_(), sizeof(node[0]), held._replace(nid=2)),
    ]
    reader = PointerReader(image_of(prog), [address], [objcg])
    released = PointerReader(image_of(prog), [], [], [address])
    for start, size, found in parts:
        for word in (start, start + 1, start + size - 1):
            assert reader.read([word]) == (found,)
            assert released.read([word]) == (found._replace(payer=parent),)
        for word in (start - 1, start + size):
            assert found not in reader.read([word])
    size = sizeof(prog.type("struct obj_cgroup"))
    of_objcg = Held("objcg", objcg, objcg)
    assert reader.read([objcg, objcg + size - 1]) == (of_objcg,)
    assert of_objcg not in reader.read([objcg - 1, objcg + size])
    # Each thing once, in the order of the words.
    assert reader.read([objcg, 0, address, objcg, 1, POISON]) == (of_objcg, held)


@is_on_image
def test_a_released_memcg_that_is_gone(prog: Program, task: Object) -> None:
    """The others are found all the same."""
    address = memcg_of(task).value_()
    reader = PointerReader(image_of(prog), [], [], [POISON, address])
    assert [held.kind for held in reader.read([address, POISON])] == ["memcg"]


@is_on_image
def test_slab_objects_and_caches(prog: Program, task: Object) -> None:
    reader = PointerReader(image_of(prog), [], [])
    for name in ("task_struct", "dentry"):
        cache = find_slab_cache(prog, name)
        detail = "reclaimable" if int(cache.flags) & RECLAIMABLE else "unreclaimable"
        [held] = reader.read([cache.value_()])
        # A pointer to the obj_cgroup for each object.
        size = int(cache.size) + 8
        assert held == Held("cache", cache.value_(), bytes=size, detail=detail)
    slab = compound_head(virt_to_page(task))
    cache, nid = slab_object_info(task).slab_cache, nid_of(slab)
    [of_slab] = reader.read([slab.value_()])
    assert (of_slab.kind, of_slab.address, of_slab.nid) == ("cache", cache.value_(), nid)
    [found] = reader.read([task.value_() + 100])
    assert reader.read([task.value_()]) == (found,)
    assert found == of_slab._replace(kind="object", address=task.value_(), payer=found.payer)
    assert found.payer


@is_on_image
def test_pages(prog: Program, task: Object) -> None:
    reader = PointerReader(image_of(prog), [], [])
    # A page of a kernel stack, by its struct page and by what is in it.
    page = task.stack_vm_area.pages[0]
    held = Held("kmem", page.value_(), payer_of(page), nid_of(page), PAGE, "")
    assert held.payer
    data = page_to_virt(page).value_()
    for word in (page.value_(), data, data + PAGE - 1):
        assert reader.read([word]) == (held,)
    # A page of a process: to its ``struct page`` only.
    page = follow_page(task.mm, task.mm.start_code)
    head = compound_head(page)
    size = PAGE << int(compound_order(head))
    held = Held("folio", head.value_(), payer_of(head), nid_of(head), size, "")
    assert reader.read([page.value_()]) == (held,)
    assert reader.read([page_to_virt(page).value_()]) == ()
    # A free page.
    page = Object(prog, "struct page *", free_page(prog, other_than=-1))
    assert reader.read([page.value_(), page_to_virt(page).value_()]) == ()


@is_on_image
def test_numbers_of_bytes_that_were_in_a_stock(prog: Program) -> None:
    """An int in a register is extended with zeros, or with its sign."""
    image = image_of(prog)
    limits = read_limits(image)
    most = limits.slab_stock + limits.slab_object
    numbers = PointerReader(image, [], []).numbers
    assert most < 1 << 31
    for number in (PAGE + 1, most):
        for word in (number, (1 << 64) - number, (1 << 32) - number):
            assert numbers([word]) == {number}
    for number in (0, 1, PAGE, most + 1):
        assert numbers([number, (1 << 64) - number, (1 << 32) - number]) == set()
    assert numbers([1 << 31, 1 << 63, (1 << 64) - (1 << 31), (1 << 32) + PAGE + 1]) == set()


@is_on_image
def test_pages_that_are_uncharged_together(prog: Program) -> None:
    """``struct uncharge_gather`` on the stack of uncharge_batch()."""
    image, payer = image_of(prog), 0xFFFF888000100000
    gather = prog.type("struct uncharge_gather")
    first = "objcg" if gather.has_member("objcg") else "memcg"
    reader, limits = PointerReader(image, [], [payer]), read_limits(image)

    def batches(
        nr_memory: int, pgpgout: int, nr_kmem: int, *, who: int = payer, cut: int = 0
    ) -> list[int]:
        words = [7] * 2 + [0] * (sizeof(gather) // 8)
        values = {first: who, "nr_memory": nr_memory, "pgpgout": pgpgout, "nr_kmem": nr_kmem}
        for name, value in values.items():
            words[2 + offsetof(gather, name) // 8] = value
        last = 3 + max(offsetof(gather, name) // 8 for name in values)
        found = [h for h in reader.read(words[: last - cut]) if h.kind == "batch"]
        assert {(h.address, h.payer) for h in found} <= {(payer, payer)}
        return [h.bytes for h in found]

    assert batches(5, 3, 2) == [5 * PAGE, 3 * PAGE, 2 * PAGE]
    assert batches(5, 5, 0) == [5 * PAGE]
    assert batches(1, 0, 1) == [PAGE]
    most = limits.folio_batch * limits.block
    assert batches(most, 1, 0) == [most * PAGE, PAGE]
    # What is no such structure: more pages of a kind than of all, more than a batch has, or none.
    for counts in ((5, 6, 0), (5, 0, 6), (most + 1, 1, 0), (0, 0, 0)):
        assert batches(*counts) == []
    assert batches(5, 3, 2, who=payer + 8) == []
    assert batches(5, 3, 2, cut=1) == []


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", ["7.3"])
def test_entries_of_zswap(prog: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in a tree is being stored while it is on no list; one in no tree is being freed."""
    address = next(ZswapReader(image_of(prog)).addresses())
    entry = Object(prog, "struct zswap_entry *", address)
    objcg, lru = entry.objcg.value_(), entry.lru
    overlay = Overlay(prog)

    def put(thing: Object, value: int) -> None:
        overlay.write((Write(thing.address_ or 0, value.to_bytes(sizeof(thing), "little")),))

    def held(*payers: int) -> list[Held]:
        found = PointerReader(Image(prog), [], payers).read([address])
        assert [h.kind for h in found][0] == "object"
        return list(found[1:])

    being_stored = Held("zswap", address, 0, bytes=100, detail="compressed")
    try:
        put(entry.length, 100)
        assert held(objcg) == []
        for link in (lru.next, lru.prev):
            put(link, lru.address_ or 0)
        assert held(objcg) == [being_stored]
        monkeypatch.setattr(ZswapReader, "addresses", lambda _: iter(()))
        assert held(objcg) == [being_stored._replace(payer=objcg)]
        # What an entry has for an obj_cgroup before it is charged may be anything.
        assert held() == [being_stored]
        put(entry.length, 1)
        assert held() == [being_stored._replace(bytes=1)]
        # A page that does not compress is stored as it is. Otherwise it is no entry.
        put(entry.length, PAGE)
        assert held() == [being_stored._replace(bytes=PAGE, detail="incompressible")]
        for length in (0, PAGE + 1):
            put(entry.length, length)
            assert held() == []
    finally:
        overlay.clear()


#: Where a kernel with memory allocation profiling has its ``struct alloc_tag``.
TAGS, TAG, CODE = 0xFFFFFFFFF0000000, 48, {"__start_alloc_tags": 0, "__stop_alloc_tags": 3 * 48}


@is_on_image
def test_call_sites(prog: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """``struct alloc_tag`` of the kernel itself, with memory allocation profiling."""
    symbol, type_ = Image.symbol, Image.type
    counters = prog.array_type(prog.type("char"), TAG)

    def with_tags(image: Image, place: str | int) -> Any:
        if place in CODE:
            return SimpleNamespace(address=TAGS + CODE[str(place)])
        return symbol(image, place)

    assert PointerReader(Image(prog), [], []).read([TAGS, 0, 1]) == ()
    monkeypatch.setattr(Image, "symbol", with_tags)
    monkeypatch.setattr(
        Image, "type", lambda image, n: counters if n == "struct alloc_tag" else type_(image, n)
    )
    reader = PointerReader(Image(prog), [], [])
    for number in range(3):
        for word in (TAGS + TAG * number, TAGS + TAG * number + TAG - 1):
            assert reader.read([word]) == (Held("call site", TAGS + TAG * number),)
    assert reader.read([TAGS - 1, TAGS + 3 * TAG]) == ()


@is_on_image
def test_areas_are_looked_for_among_objects(prog: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(PartialAreaReader, "read", lambda _, *args: asked.append(args) or ())
    held = [Held("object", 8), Held("memcg", 16, 16), Held("object", 24, 1), Held("cache", 32)]
    assert PointerReader(Image(prog), [], []).areas(held, [1, 2]) == ()
    assert asked == [([8, 24], [1, 2])]


@is_on_image
def test_large_kmallocs(prog: Program, task: Object, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a type of their own since 6.15, and need not be charged."""
    page = task.stack_vm_area.pages[0]
    info, word = read_page(Image(prog), page.value_()), page_to_virt(page).value_() + 8
    reader = PointerReader(Image(prog), [], [])
    for kind, order, detail in (("large_kmalloc", 2, "unreclaimable"), ("large_kmalloc", 0, "")):
        made = info._replace(is_kmem=False, payer=0, type=kind, order=order)
        monkeypatch.setattr(stacktrace_pointers, "read_page", lambda *_, made=made: made)
        held = Held("kmem", info.head, 0, info.nid, PAGE << order, detail)
        assert reader.read([word]) == (held,)
    for order, kinds in ((30, ["folio"]), (31, [])):
        made = info._replace(is_kmem=False, type="", order=order)
        monkeypatch.setattr(stacktrace_pointers, "read_page", lambda *_, made=made: made)
        assert reader.read([word]) == ()
        assert [held.kind for held in reader.read([page.value_()])] == kinds


def test_a_kernel_that_does_not_gather_pages_to_uncharge() -> None:
    assert stacktrace_pointers._gather(MadeImage()) == ()
