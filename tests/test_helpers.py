# SPDX-License-Identifier: LGPL-2.1-or-later
"""Helpers are compared with drgn's and with the files of the guest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from os import fsdecode
from pathlib import PurePosixPath

import drgn
import pytest
from drgn import FaultError, Object, Program, container_of
from drgn.helpers.linux.cgroup import cgroup_get_from_path, css_for_each_descendant_pre
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.mm import for_each_page, page_to_virt
from drgn.helpers.linux.percpu import per_cpu_ptr
from drgn.helpers.linux.slab import for_each_slab_cache, slab_object_info
from support.guest_files import path_of, still
from support.guests import DEBIAN_KERNELS, KERNELS, PERNODE_KERNELS, GuestImage, Lab
from support.missing_pages import excluded, opened
from support.sessions import converse

import memcg_inspect
from memcg_inspect.image.image import image_of
from memcg_inspect.views.stock import stock

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def image(kernel: str, lab: Lab) -> GuestImage:
    return lab.image(kernel, workload="mixed")


def guest_paths(image: GuestImage) -> set[str]:
    folder = image.guest / "2/cgroup"
    return {path_of(file, folder) for file in folder.glob("**/memory.stat")}


def test_memcgs_are_the_guests(image: GuestImage) -> None:
    prog = image.program()
    memcgs = list(memcg_inspect.for_each_memcg(prog))
    assert {memcg.type_.type_name() for memcg in memcgs} == {"struct mem_cgroup *"}
    assert len({memcg.value_() for memcg in memcgs}) == len(memcgs)
    paths = [memcg_inspect.memcg_path(memcg) for memcg in memcgs]
    assert paths[0] == b"/"
    assert guest_paths(image) <= {fsdecode(path) for path in paths}
    for n, memcg in enumerate(memcgs):
        assert n == 0 or memcg.css.parent in [other.css.address_of_() for other in memcgs[:n]]


def test_memcgs_are_found_by_their_paths(image: GuestImage) -> None:
    prog = image.program()
    for path in guest_paths(image):
        memcg = memcg_inspect.find_memcg(prog, path)
        assert memcg.css.cgroup == cgroup_get_from_path(prog, path)
        assert fsdecode(memcg_inspect.memcg_path(memcg)) == path
        for other in (path.encode(), PurePosixPath(path), path + "/"):
            assert memcg_inspect.find_memcg(prog, other) == memcg
    removed = [
        memcg
        for memcg in memcg_inspect.for_each_memcg(prog)
        if fsdecode(memcg_inspect.memcg_path(memcg)) not in guest_paths(image)
    ]
    assert removed
    for memcg in removed:
        path = memcg_inspect.memcg_path(memcg)
        assert memcg_inspect.memcg_path(memcg_inspect.find_memcg(prog, path)) == path


@pytest.mark.parametrize("path", ["/nowhere", b"/nowhere", "/files/nowhere"])
def test_what_is_not_found_is_null(image: GuestImage, path: str | bytes) -> None:
    memcg = memcg_inspect.find_memcg(image.program(), path)
    assert not memcg
    assert memcg.type_.type_name() == "struct mem_cgroup *"
    with pytest.raises(ValueError, match="NULL"):
        next(memcg_inspect.for_each_charged_slab_object(image.program(), memcg=memcg))
    with pytest.raises(ValueError, match="NULL"):
        next(memcg_inspect.for_each_pcpu_alloc(image.program(), memcg=memcg))


def pending(memcg: Object, item: str) -> int:
    """Return what is not folded yet of a counter, of a memcg and of those below it."""
    prog, sum_ = memcg.prog_, 0
    slot = int(prog[item].value_())
    with suppress(KeyError):
        slot = int(prog["mem_cgroup_stats_index"][slot].value_())
    for css in css_for_each_descendant_pre(memcg.css.address_of_()):
        below = container_of(css, "struct mem_cgroup", "css")
        sum_ += int(below.vmstats.state_pending[slot])
        for cpu in for_each_possible_cpu(prog):
            local = per_cpu_ptr(below.vmstats_percpu, cpu)
            sum_ += int(local.state[slot]) - int(local.state_prev[slot])
    return sum_


def test_counters_are_the_guests(image: GuestImage) -> None:
    prog = image.program()
    compared = 0
    for memcg in memcg_inspect.for_each_memcg(prog):
        path = memcg_inspect.memcg_path(memcg)
        if memcg != memcg_inspect.find_memcg(prog, path):
            continue
        for item, name in (("NR_SLAB_RECLAIMABLE_B", "slab_reclaimable"), ("MEMCG_SOCK", "sock")):
            said = still(image, "memory.stat").get((fsdecode(path), name, None))
            if said is not None:
                value = memcg_inspect.memcg_counter(memcg, item)
                unit = 1 if item.endswith("_B") else 4096
                # A reader of the file flushes only if much is pending.
                assert (path, value.folded * unit) == (path, said)
                assert value.exact == value.folded + pending(memcg, item)
                compared += said > 0
    assert compared > 5
    root = memcg_inspect.find_memcg(prog, "/")
    whole = memcg_inspect.memcg_counter(root, "NR_SLAB_UNRECLAIMABLE_B").exact
    nodes = [memcg_inspect.memcg_counter(root, "NR_SLAB_UNRECLAIMABLE_B", nid) for nid in range(4)]
    assert sum(value.exact for value in nodes) == whole > 0


@pytest.mark.parametrize(
    ("item", "nid"), [("NO_SUCH_ITEM", None), ("NR_SLAB_RECLAIMABLE_B", 99), ("MEMCG_SOCK", 0)]
)
def test_counters_that_do_not_exist(image: GuestImage, item: str, nid: int | None) -> None:
    root = memcg_inspect.find_memcg(image.program(), "/")
    with pytest.raises(ValueError, match=f"no counter {item} of memcgs"):
        memcg_inspect.memcg_counter(root, item, nid)


def test_slab_objects_are_drgns(image: GuestImage) -> None:
    prog = image.program()
    seen: Counter[int] = Counter()
    slabs = {}
    for thing in memcg_inspect.for_each_charged_slab_object(prog):
        cache = thing.slab_cache.value_()
        seen[cache] += 1
        if seen[cache] <= 3:
            slabs[thing.address] = thing
    assert sum(seen.values()) > 1000
    assert set(seen) <= {cache.value_() for cache in for_each_slab_cache(prog)}
    for address, thing in slabs.items():
        info = slab_object_info(prog, address)
        assert info is not None
        assert (info.address, info.slab, info.slab_cache) == (address, thing.slab, thing.slab_cache)
        assert thing.slab_cache.type_.type_name() == "struct kmem_cache *"
        assert thing.size == thing.slab_cache.size.value_()
        index = (address - info.slab_cache.red_left_pad.value_() - first(thing)) // thing.size
        assert memcg_inspect.slab_objcg(thing.slab, index) == thing.objcg
        assert memcg_inspect.page_to_nid(thing.slab) == thing.nid
    some = next(thing for thing in slabs.values() if online(prog, thing.objcg))
    memcg = memcg_inspect.objcg_memcg(some.objcg)
    mine = list(memcg_inspect.for_each_charged_slab_object(prog, memcg=memcg, nid=some.nid))
    assert some in mine
    assert {thing.nid for thing in mine} == {some.nid}
    for index in (100_000, -1):
        none = memcg_inspect.slab_objcg(some.slab, index)
        assert (bool(none), none.type_.type_name()) == (False, "struct obj_cgroup *")


def online(prog: Program, objcg: Object) -> bool:
    return not int(objcg.memcg.css.flags) & prog.constant("CSS_DYING")


def first(thing: memcg_inspect.ChargedSlabObject) -> int:
    return int(page_to_virt(drgn.cast("struct page *", thing.slab)).value_())


def objcgs_by_node(prog: Program) -> Iterator[tuple[int, Object]]:
    """Return every obj_cgroup of kernels with one for each node, with drgn's own helpers."""
    for memcg in memcg_inspect.for_each_memcg(prog):
        for nid in range(4):
            pn = memcg.nodeinfo[nid].read_()
            held = [pn.objcg.read_(), pn.orig_objcg.read_()]
            yield from ((nid, objcg) for objcg in held if objcg)
            # Only the head of a memcg that was not removed is part of its list.
            if not int(memcg.css.flags) & prog.constant("CSS_DYING"):
                head = pn.objcg_list.address_of_()
                for objcg in list_for_each_entry("struct obj_cgroup", head, "list"):
                    yield nid, objcg


def test_nodes_of_objcgs(image: GuestImage) -> None:
    prog = image.program()
    charged = memcg_inspect.for_each_charged_slab_object(prog)
    objcgs = {thing.objcg.value_(): thing.objcg for thing in charged}
    assert len(objcgs) > 5
    if image.report().image.accounting == "memcg":
        assert {memcg_inspect.objcg_nid(objcg) for objcg in objcgs.values()} == {None}
        return
    by_node = list(objcgs_by_node(prog))
    assert set(objcgs) <= {objcg.value_() for _, objcg in by_node}
    assert {nid for nid, _ in by_node} == {0, 1, 2, 3}
    for nid, objcg in by_node:
        assert memcg_inspect.objcg_nid(objcg) == nid


@pytest.mark.parametrize("kernel", PERNODE_KERNELS)
def test_nodes_of_objcgs_that_have_one(lab: Lab, kernel: str) -> None:
    """The per-memcg-per-node series adds obj_cgroup.nid."""
    prog = lab.image(kernel).program()
    by_node = list(objcgs_by_node(prog))
    assert {nid for nid, _ in by_node} == {0, 1, 2, 3}
    for nid, objcg in by_node:
        assert memcg_inspect.objcg_nid(objcg) == nid


def test_nodes_of_pages_are_drgns(lab: Lab) -> None:
    prog = lab.image(DEBIAN_KERNELS[-1]).program()
    starts = {
        nid: int(prog["node_data"][nid].node_start_pfn) for nid in range(4)
    }  # a node's page frames begin there
    nids = Counter()
    for number, page in enumerate(for_each_page(prog)):
        if number % 997 == 0:
            pfn = (page.value_() - prog["vmemmap"].value_()) // drgn.sizeof(page[0])
            nid = max((n for n in starts if starts[n] <= pfn), key=lambda n: starts[n], default=0)
            assert memcg_inspect.page_to_nid(page) == nid
            nids[nid] += 1
    assert len(nids) == 4


def test_percpu_is_the_guests(image: GuestImage) -> None:
    prog = image.program()
    said = {
        path: v for (path, name, _), v in still(image, "memory.stat").items() if name == "percpu"
    }
    by_memcg: Counter[int] = Counter()
    for alloc in memcg_inspect.for_each_pcpu_alloc(prog):
        by_memcg[memcg_inspect.objcg_memcg(alloc.objcg).value_()] += alloc.charge
        assert sum(alloc.nodes.values()) == 4 * alloc.size
    compared = 0
    paths = [
        fsdecode(memcg_inspect.memcg_path(memcg)) for memcg in memcg_inspect.for_each_memcg(prog)
    ]
    for path, percpu in said.items():
        if path != "/" and not any(other.startswith(path + "/") for other in paths):
            memcg = memcg_inspect.find_memcg(prog, path)
            found = memcg_inspect.for_each_pcpu_alloc(prog, memcg=memcg)
            value = memcg_inspect.memcg_counter(memcg, "MEMCG_PERCPU_B")
            # A reader of the file flushes only if much is pending.
            assert (path, value.folded) == (path, percpu)
            assert sum(alloc.charge for alloc in found) == value.exact, path
            assert by_memcg[memcg.value_()] <= value.exact
            compared += percpu > 0
    assert compared > 3


def test_percpu_pointers_are_the_kernels(image: GuestImage) -> None:
    """The counters of a memcg are percpu memory that its parent pays for."""
    prog = image.program()
    pointers = {alloc.pointer.value_() for alloc in memcg_inspect.for_each_pcpu_alloc(prog)}
    memcgs = list(memcg_inspect.for_each_memcg(prog))[1:]
    held = [memcg.vmstats_percpu for memcg in memcgs]
    assert sum(pointer.value_() in pointers for pointer in held) > 3
    assert per_cpu_ptr(held[-1], 0).value_()


def overlaid(image: GuestImage, address: int, size: int, read: Callable[..., bytes]) -> Program:
    """Return a new program that reads a range of kernel addresses with a function."""
    prog = opened(image.core)
    prog.add_memory_segment(address, size, read)
    return prog


def test_unreadable_memcgs_are_faults(image: GuestImage) -> None:
    """If one memcg cannot be read, a helper that needs it raises, and leaves nothing out."""
    whole = image.program()
    memcgs = list(memcg_inspect.for_each_memcg(whole))
    last = memcgs[-1]
    path = memcg_inspect.memcg_path(last)
    start = last.value_() & ~0xFFF
    prog = overlaid(image, start, 4096, excluded)
    with pytest.raises(FaultError):
        list(memcg_inspect.for_each_memcg(prog))
    with pytest.raises(FaultError):
        memcg_inspect.find_memcg(prog, path)
    with pytest.raises(FaultError):
        memcg_inspect.memcg_path(Object(prog, "struct mem_cgroup *", last))
    root = Object(prog, "struct mem_cgroup *", memcgs[0])
    with pytest.raises(FaultError):
        memcg_inspect.memcg_counter(root, "MEMCG_SOCK")


def test_unreadable_charges_are_faults(image: GuestImage) -> None:
    whole = image.program()
    thing = next(memcg_inspect.for_each_charged_slab_object(whole))
    vector = (
        thing.slab.obj_exts
        if thing.slab.type_.type.has_member("obj_exts")
        else thing.slab.memcg_data
    ).value_() & ~0xFFF
    prog = overlaid(image, vector, 4096, excluded)
    with pytest.raises(FaultError):
        list(memcg_inspect.for_each_charged_slab_object(prog))
    with pytest.raises(FaultError):
        memcg_inspect.slab_objcg(Object(prog, "struct slab *", thing.slab), 0)
    chunk = whole["pcpu_first_chunk"]
    prog = overlaid(image, chunk.alloc_map.value_() & ~0xFFF, 4096, excluded)
    with pytest.raises(FaultError):
        list(memcg_inspect.for_each_pcpu_alloc(prog))


class Reads:
    """Return a program that counts all reads of kernel memory."""

    def __init__(self, image: GuestImage) -> None:
        self.whole = image.program()
        self.count = 0
        self.prog = overlaid(image, 1 << 63, 1 << 63, self._read)

    def _read(self, address: int, count: int, offset: int, physical: bool) -> bytes:
        self.count += 1
        return self.whole.read(address, count)

    def of(self, call: Callable[[], object]) -> int:
        before = self.count
        call()
        return self.count - before


def test_one_call_reads_little(image: GuestImage) -> None:
    """A call about one object does not read all memcgs."""
    reads = Reads(image)
    memcgs = list(memcg_inspect.for_each_memcg(reads.prog))
    assert len(memcgs) > 20
    for memcg in memcgs:
        path = memcg_inspect.memcg_path(memcg)
        # drgn reads strings by the character.
        most = len(path) + 12 * (path.count(b"/") + 1)
        assert 0 < reads.of(lambda memcg=memcg: memcg_inspect.memcg_path(memcg)) <= most
    for memcg in memcgs:
        pn = memcg.nodeinfo[0].read_()
        objcg = (pn if pn.type_.type.has_member("objcg") else memcg).objcg.read_()
        if objcg:
            assert reads.of(lambda objcg=objcg: memcg_inspect.objcg_memcg(objcg)) == 1
            assert reads.of(lambda objcg=objcg: memcg_inspect.objcg_nid(objcg)) <= 16


def test_in_a_session(lab: Lab) -> None:
    image = lab.image(DEBIAN_KERNELS[-1], workload="mixed")
    audited, stocks, missing, nonsense, text, verdict, _, path, number = converse(
        image,
        "%memcg audit --json | grep -c verdict",
        "%memcg stock --scripted --fields cpu | wc -l",
        "%memcg stat /nowhere",
        "%memcg nonsense",
        "%memcg audit",
        "_.verdict",
        "import memcg_inspect",
        "memcg_inspect.memcg_path(memcg_inspect.find_memcg('/dying'))",
        "sum(1 for m in memcg_inspect.for_each_memcg())",
    )
    assert audited == "1"
    # How many slots are in use, and of which CPUs, depends on the image.
    assert int(stocks) == len(stock(image_of(image.program())).tables[0].rows)
    assert missing.startswith("drgn: error: there is no memcg /nowhere")
    assert "invalid choice: 'nonsense'" in nonsense
    assert text.startswith("EXACT")
    assert "Checked: " in text
    assert verdict == "'exact'"
    assert path == "b'/dying'"
    assert int(number) == len(image.report().memcgs)
