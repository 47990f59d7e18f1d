# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What ended in a traceback, hung, or was called exact, each planted into a real image.

The fuzzer found these. It finds them again only by chance.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import drgn
import pytest
from drgn import FaultError, Object, container_of, offsetof, sizeof
from drgn.helpers.linux.bpf import bpf_map_for_each
from drgn.helpers.linux.fs import d_path, for_each_mount
from drgn.helpers.linux.list import hlist_for_each_entry, list_for_each_entry
from drgn.helpers.linux.mm import follow_phys
from drgn.helpers.linux.module import for_each_module
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import find_task
from drgn.helpers.linux.slab import slab_object_info
from fuzz.attempt import patience
from fuzz.damage import PAGE, damaged
from support.guests import GuestImage, Lab
from support.messages import part_of_message
from support.missing_pages import without

from memcg_inspect.checks.evidence_query import MOST_EVIDENCE
from memcg_inspect.collect import audit
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.image.layout import has_member
from memcg_inspect.linux.fs.inode import dentry_name
from memcg_inspect.linux.lib.list import rbtree_entries
from memcg_inspect.linux.mm.debug import read_page
from memcg_inspect.linux.mm.kfence import kfence_pool
from memcg_inspect.linux.mm.memcontrol import find_memcg, memcg_path
from memcg_inspect.linux.mm.mm_types import page_layout, pages_per_piece, scan_pages
from memcg_inspect.linux.mm.mmzone import (
    mem_map,
    online_cpus,
    online_nodes,
    page_ranges,
    possible_cpus,
    possible_nodes,
)
from memcg_inspect.linux.mm.pagewalk import PageTableReader
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.linux.mm.slab import SlabReader
from memcg_inspect.linux.mm.swap_cgroup import swap_ids
from memcg_inspect.linux.mm.vmalloc import vm_areas
from memcg_inspect.linux.mm.zswap import ZswapReader
from memcg_inspect.linux.net.skbuff import unix_socket_pages
from memcg_inspect.model import Coverage, ImageError
from memcg_inspect.report import Report
from memcg_inspect.views.pages import pages

pytestmark = pytest.mark.image

WORD, INT = 8, 4
OLD_AND_NEW = pytest.mark.parametrize(
    "kernel", ["7.3", pytest.param("6.1", marks=pytest.mark.long)]
)
NEW = pytest.mark.parametrize("kernel", ["7.3"])


@pytest.fixture
def image(lab: Lab, kernel: str) -> GuestImage:
    return lab.image(kernel, "4", "mixed")


def place(thing: Object) -> int:
    """Return the address of an object."""
    assert thing.address_ is not None
    return int(thing.address_)


def number(value: int, size: int = INT) -> bytes:
    return value.to_bytes(size, "little")


def check_incomplete(report: Report, where: str) -> None:
    """Nothing is called exact, nothing is accused, and what cannot be right is named."""
    assert report.verdict == "incomplete"
    assert report.findings == ()
    assert report.coverage[where].unreadable


# Counts and lengths


@OLD_AND_NEW
@pytest.mark.parametrize(
    ("name", "value"), [("pcpu_nr_slots", 1 << 30), ("pcpu_unit_pages", 1 << 20)]
)
def test_counts_of_percpu_memory(image: GuestImage, name: str, value: int) -> None:
    found = audit(damaged(image.core, (place(image.program()[name]), number(value))))
    check_incomplete(found, "percpu")


@OLD_AND_NEW
def test_the_first_percpu_chunk_is_behind_the_static_variables(image: GuestImage) -> None:
    base = image.program()["pcpu_first_chunk"].base_addr
    found = damaged(image.core, (place(base), base.value_() + (1 << 40)))
    assert audit(found).coverage["percpu"].unreadable


@NEW
@pytest.mark.parametrize("value", [0, 1 << 31, (1 << 32) - 1])
def test_the_number_of_vmap_nodes(image: GuestImage, value: int) -> None:
    nodes = place(image.program()["nr_vmap_nodes"])
    check_incomplete(audit(damaged(image.core, (nodes, number(value)))), "vmalloc")


@NEW
def test_a_module_that_is_missing(image: GuestImage) -> None:
    """It may be an NFS client, which counts pages of nodes only."""
    module = next(iter(for_each_module(image.program())))
    check_incomplete(audit(damaged(image.core, (module.value_(), "missing"))), "node_stats")


@OLD_AND_NEW
def test_types_of_bpf_maps_that_are_missing(image: GuestImage) -> None:
    """Maps that hold references, and are on no list, cannot be told from other objects."""
    types = place(image.program()["bpf_map_types"])
    found = audit(damaged(image.core, (types, "missing")))
    assert found.verdict == "incomplete"
    assert found.findings == ()
    assert {missed.what for missed in found.coverage["bpf"].examples} == {"types of BPF maps"}


@NEW
def test_the_number_of_memcgs_that_were_removed(image: GuestImage) -> None:
    """Each may leave slab memory in the local counter of its parent, which then is exact."""
    serial = place(image.program()["css_serial_nr_next"])
    check_incomplete(audit(damaged(image.core, (serial, "missing"))), "css")


@OLD_AND_NEW
def test_an_area_has_no_more_pages_than_addresses(image: GuestImage) -> None:
    stack = find_task(image.program(), 1).stack_vm_area
    changed = damaged(image.core, (place(stack.nr_pages), number(1 << 27)))
    coverage = Coverage()
    addresses = {area.address for area in vm_areas(changed, coverage, Coverage())}
    assert coverage.unreadable == 1
    assert len(addresses) > 100 and stack.addr.value_() not in addresses


@NEW
def test_the_number_of_zswap_trees(image: GuestImage) -> None:
    trees = place(image.program()["nr_zswap_trees"][0])
    check_incomplete(audit(damaged(image.core, (trees, number((1 << 32) - 1)))), "zswap")


@OLD_AND_NEW
@pytest.mark.parametrize("bits", [20, 32])
def test_the_number_of_swap_entries(image: GuestImage, bits: int) -> None:
    """Of a swap device; up to 6.13, of the pages that have the IDs of its memcgs."""
    prog = image.program()
    count = place(prog["swap_info"][0].max)
    if has_member(image_of(prog), "struct swap_cgroup_ctrl", "length"):
        count, bits = place(prog["swap_cgroup_ctrl"][0].length), 2 * bits - 1
    whole, coverage = Coverage(), Coverage()
    assert swap_ids(image_of(prog), whole)
    assert whole.read and not whole.unreadable
    changed = damaged(image.core, (count, ((1 << bits) - 1).to_bytes(-(-bits // 32) * 4, "little")))
    assert not swap_ids(changed, coverage)
    assert (coverage.read, coverage.unreadable) == (0, 1)
    assert "bytes in memory of" in coverage.examples[0].reason


@OLD_AND_NEW
def test_a_process_has_no_more_page_tables_than_it_counts(image: GuestImage) -> None:
    mm = find_task(image.program(), 1).mm
    counted = mm.pgtables_bytes.counter
    whole, coverage = Coverage(), Coverage()
    pages = PageTableReader(image_of(image.program())).walk(mm.value_(), whole)
    assert pages.pages.total() > 100 and not whole.unreadable
    changed = damaged(image.core, (place(counted), 2 * PAGE))
    left = PageTableReader(changed).walk(mm.value_(), coverage)
    assert left.missing and coverage.unreadable
    assert left.pages.total() < pages.pages.total()
    assert "more page tables than it counts" in coverage.examples[0].reason


@OLD_AND_NEW
def test_the_cpus_and_nodes_that_are_online(image: GuestImage) -> None:
    mask = place(image.program()["__cpu_online_mask"])
    assert online_cpus(image_of(image.program())) == (0, 1, 2, 3)
    nodes = place(image.program()["node_states"][image.program()["N_ONLINE"]])
    assert online_nodes(image_of(image.program())) == (0, 1, 2, 3)
    for word in (0, 1 << 4 | 1, (1 << 64) - 1):
        with pytest.raises(ImageError, match="__cpu_online_mask is damaged"):
            online_cpus(damaged(image.core, (mask, word)))
        with pytest.raises(ImageError, match="node_states is damaged"):
            mem_map(damaged(image.core, (nodes, word)))


@OLD_AND_NEW
@pytest.mark.parametrize("value", [0, 1, 1 << 20, (1 << 32) - 1])
def test_the_size_of_the_objects_of_a_cache(image: GuestImage, value: int) -> None:
    slab = next(s for s in slabs(image_of(image.program())) if s.charged)
    cache = Object(image.program(), "struct kmem_cache *", slab.cache.address)
    report = audit(damaged(image.core, (place(cache.size), number(value))))
    assert report.verdict in ("incomplete", "findings")
    assert report.coverage["slab_pages"].unreadable


@OLD_AND_NEW
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nr_cpu_ids", (1 << 32) - 1),
        ("nr_cpu_ids", 0),
        ("nr_node_ids", 1 << 22),
        ("nr_node_ids", 0),
    ],
)
def test_counts_of_cpus_and_nodes(image: GuestImage, name: str, value: int) -> None:
    changed = damaged(image.core, (place(image.program()[name]), number(value)))
    with pytest.raises(ImageError):
        audit(changed)
    find = possible_cpus if name == "nr_cpu_ids" else possible_nodes
    with pytest.raises(ImageError, match=f"{name} is {value}"):
        find(changed)


@OLD_AND_NEW
def test_masks_of_cpus_and_nodes(image: GuestImage) -> None:
    prog = image.program()
    cpus, nodes = prog["__cpu_possible_mask"], prog["node_states"][prog["N_POSSIBLE"]]
    for mask, find in ((cpus, possible_cpus), (nodes, possible_nodes)):
        assert list(find(image_of(prog))) == [0, 1, 2, 3]
        for word in (0, (1 << 64) - 1):
            with pytest.raises(ImageError, match="is 4, and the possible"):
                find(damaged(image.core, (place(mask), word)))


@OLD_AND_NEW
def test_two_cpus_with_the_same_percpu_memory(image: GuestImage) -> None:
    offsets = image.program()["__per_cpu_offset"]
    with pytest.raises(ImageError, match="two CPUs have the same percpu memory"):
        audit(damaged(image.core, (place(offsets[1]), offsets[2].value_())))


@OLD_AND_NEW
@pytest.mark.parametrize("bit", [12, 28, 32, 40])
def test_where_the_direct_map_and_the_memory_map_begin(image: GuestImage, bit: int) -> None:
    prog = image.program()
    base = prog.symbol("page_offset_base").address
    section = prog["mem_section"][0][0].section_mem_map
    for address, said in ((base, "direct map"), (place(section), "memory map")):
        value = prog.read_u64(address) ^ 1 << bit
        with pytest.raises(ImageError, match=f"the {said} does not begin at {value & ~0xFF:#x}"):
            mem_map(damaged(image.core, (address, value)))


@OLD_AND_NEW
def test_sections_that_are_not_there(image: GuestImage) -> None:
    """drgn looks at all that there could be, and audit() must not ask it again and again."""
    roots = image.program()["mem_section"]
    changed = damaged(image.core, (place(roots), roots.value_() + (1 << 12)))
    most, began = patience(image.core), time.process_time()
    with pytest.raises(ImageError, match="mem_section cannot be read"):
        audit(changed)
    assert time.process_time() - began < most


# Bits and words


@OLD_AND_NEW
def test_a_percpu_chunk_without_bounds(image: GuestImage) -> None:
    """Each of its allocations has size 0, or reaches to the end: none is counted."""
    reader = PercpuReader(image_of(image.program()))
    chunk = next(c for c in reader.chunks() if reader.charged(c))
    bounds = Object(image.program(), "struct pcpu_chunk *", chunk.address).bound_map.value_()
    size = chunk.nr_pages * PAGE // 4 // 8 + 1
    parts = range(bounds, bounds + size, 512)
    changed = damaged(image.core, *((p, bytes(min(512, bounds + size - p))) for p in parts))
    most, before = patience(image.core), time.process_time()
    report = audit(changed)
    assert time.process_time() - before < most
    assert report.verdict in ("incomplete", "findings")
    assert report.coverage["percpu"].unreadable


@OLD_AND_NEW
@pytest.mark.parametrize("byte", [0x55, 0xFF])
def test_a_percpu_chunk_of_many_allocations(image: GuestImage, byte: int) -> None:
    """An allocation begins at each of its units, or at every other."""
    reader = PercpuReader(image_of(image.program()))
    chunk = next(c for c in reader.chunks() if reader.charged(c))
    found = Object(image.program(), "struct pcpu_chunk *", chunk.address)
    size = chunk.nr_pages * PAGE // 4 // 8
    parts = [
        (start + at, bytes([byte]) * min(512, size - at))
        for start in (found.bound_map.value_(), found.alloc_map.value_())
        for at in range(0, size, 512)
    ]
    changed = damaged(image.core, *parts)
    most, before = patience(image.core), time.process_time()
    audit(changed)
    again = PercpuReader(changed)
    assert max(sum(1 for _ in again.allocations(c)) for c in again.chunks()) > 3 * size
    assert time.process_time() - before < most


@OLD_AND_NEW
def test_a_slab_of_many_objects_whose_owner_changes(image: GuestImage) -> None:
    """Each of them can be the evidence for each row."""
    whole = image_of(image.program())
    known = sorted({objcg for slab in slabs(whole) for objcg in slab.charged})
    slab = max(
        (s for s in slabs(whole) if s.vector and s.objects * s.vector.stride <= PAGE),
        key=lambda s: s.objects,
    )
    assert slab.vector is not None and slab.objects > 50
    writes = [
        (slab.vector.address + n * slab.vector.stride, known[n % len(known)])
        for n in range(slab.objects)
    ]
    changed = damaged(image.core, *writes)
    most, before = patience(image.core), time.process_time()
    report = audit(changed)
    assert time.process_time() - before < most
    assert report.verdict == "findings"
    assert all(len(finding.evidence) <= MOST_EVIDENCE for finding in report.findings)


@OLD_AND_NEW
@pytest.mark.parametrize("order", [1 << 62, 64, 255])
def test_the_order_of_a_free_block_is_an_order(image: GuestImage, order: int) -> None:
    prog = image.program()
    for start, end in page_ranges(image_of(prog)):
        pages = (mem_map(image_of(prog)).page(pfn) for pfn in range(start, end))
        page = next((p for p in pages if read_page(image_of(prog), p).type == "buddy"), None)
        if page is not None:
            break
    assert page is not None
    private = place(Object(prog, "struct page *", page).private)
    found = read_page(damaged(image.core, (private, order)), page)
    assert (found.page, found.order) == (page, 0)


@OLD_AND_NEW
def test_a_head_on_the_last_page_of_a_piece(image: GuestImage) -> None:
    """The order of a compound page is in its second page, which is in the next piece."""
    whole = image_of(image.program())
    start = page_ranges(whole)[0].start
    page = mem_map(whole).page(start + pages_per_piece(whole) - 1)
    head = page_layout(whole).head
    flags = image.program().read(page + head.offset, 1)[0] | head.mask
    changed = damaged(image.core, (page + head.offset, bytes([flags])))
    assert sum(1 for _ in scan_pages(changed)) == sum(1 for _ in scan_pages(whole))
    assert audit(changed).verdict in ("exact", "findings", "incomplete")


@OLD_AND_NEW
def test_a_null_pointer_faults(image: GuestImage) -> None:
    """QEMU gives each segment of a dump its physical address as virtual one."""
    for address in (0, 0x1000, 0x3FFFF000):
        with pytest.raises(FaultError, match="address is not mapped"):
            image.program().read(address, WORD)


@OLD_AND_NEW
def test_a_disk_that_fails(image: GuestImage) -> None:
    """Where nothing can be read without the page, the command is refused; else it is a gap."""
    cpus = place(image.program()["nr_cpu_ids"])
    with pytest.raises(ImageError, match="the image cannot be read: Input/output error"):
        audit(damaged(image.core, (cpus, "eio")))
    frames = mem_map(image_of(image.program()))
    page = frames.page(page_ranges(image_of(image.program()))[0].start)
    report = audit(damaged(image.core, (page, "eio")))
    check_incomplete(report, "pages")
    # The header of an object of zsmalloc is beside its data.
    reader = ZswapReader(image_of(image.program()))
    parts = (reader.parts(entry) for entry in reader.entries())
    data = next(found[0].page for found in parts if found)
    report = audit(damaged(image.core, (frames.virt(data), "eio")))
    check_incomplete(report, "zswap_nodes")


# Circles


@OLD_AND_NEW
def test_a_list_of_vmalloc_areas(image: GuestImage) -> None:
    prog = image.program()
    try:
        head = prog["vmap_nodes"][0].busy.head
    except KeyError:  # until 6.8
        head = prog["vmap_area_list"]
    link = head.next
    whole, coverage = Coverage(), Coverage()
    areas = {area.address for area in vm_areas(image_of(prog), whole, Coverage())}
    changed = damaged(image.core, (place(link.next), link.value_()))
    found = {area.address for area in vm_areas(changed, coverage, Coverage())}
    assert (whole.unreadable, coverage.unreadable) == (0, 1)
    assert found == areas  # from the other end


@OLD_AND_NEW
def test_parents_of_a_cgroup(image: GuestImage) -> None:
    memcg = find_memcg(image_of(image.program()), b"/files/web")
    node = memcg.css.cgroup.kn
    parent = "__parent" if node.type_.type.has_member("__parent") else "parent"
    assert memcg_path(memcg) == b"/files/web"
    changed = damaged(image.core, (place(node.member_(parent).member_(parent)), node.value_()))
    with pytest.raises(FaultError, match="circle"):
        memcg_path(Object(changed.prog, "struct mem_cgroup *", memcg.value_()))


@NEW
def test_an_xarray(image: GuestImage) -> None:
    prog = image.program()
    whole = set(ZswapReader(image_of(prog)).addresses())
    trees = (prog["zswap_trees"][0][i] for i in range(prog["nr_zswap_trees"][0].value_()))
    entry = next(tree.xa_head.value_() for tree in trees if tree.xa_head)
    assert entry & 3 == 2  # a node
    slot = Object(prog, "struct xa_node *", entry - 2).slots[3]
    reader = ZswapReader(damaged(image.core, (place(slot), entry)))
    found = set(reader.addresses())
    assert found <= whole and len(whole) > 10
    assert reader.coverage.unreadable == 1
    assert "twice" in reader.coverage.examples[0].reason


@pytest.mark.parametrize("kernel", ["6.1"])
def test_a_red_black_tree(image: GuestImage) -> None:
    """zswap keeps its entries in such trees there."""

    def found(where: Image, faults: list[FaultError]) -> set[int]:
        root = where.prog["vmap_area_root"].address_of_()
        areas = rbtree_entries(where, "struct vmap_area", root, "rb_node", faults.append)
        return {area.value_() for area in areas}

    faults: list[FaultError] = []
    whole = found(image_of(image.program()), faults)
    assert len(whole) > 100 and faults == []
    node = image.program()["vmap_area_root"].rb_node
    rest = found(damaged(image.core, (place(node.rb_left), node.value_())), faults)
    assert rest < whole
    assert [str(fault).partition(":")[0] for fault in faults] == ["the tree has a node twice"]


def queues(prog: drgn.Program) -> Iterator[Object]:
    """Return the receive queues of AF_UNIX sockets that have buffers."""
    buckets = prog["init_net"].unx.table.buckets
    for i in range(512):
        for sock in hlist_for_each_entry(
            "struct sock", buckets[i].address_of_(), "__sk_common.skc_node"
        ):
            if sock.sk_receive_queue.qlen:
                yield sock.sk_receive_queue


def shared_info(skb: Object) -> Object:
    place_of = skb.head.value_() + int(skb.end)
    return Object(skb.prog_, "struct skb_shared_info", address=place_of)


@OLD_AND_NEW
@pytest.mark.parametrize("what", ["namespaces", "sockets", "buffers", "fragments", "count", "head"])
def test_lists_of_sockets_and_buffers(image: GuestImage, what: str) -> None:
    prog = image.program()
    queue = next(queues(prog))
    skb = queue.next
    sock = container_of(queue.address_of_(), "struct sock", "sk_receive_queue")
    node = sock.__getattribute__("__sk_common").skc_node
    net = next(
        iter(list_for_each_entry("struct net", prog["net_namespace_list"].address_of_(), "list"))
    )
    change: tuple[int, bytes | int] = {
        "namespaces": (place(net.list.next), place(net.list)),
        "sockets": (place(node.next), place(node)),
        "buffers": (place(skb.next), skb.value_()),
        "fragments": (place(shared_info(skb).frag_list), skb.value_()),
        "count": (place(shared_info(skb).nr_frags), b"\xff"),
        # its end is beyond the last address
        "head": (place(skb.head), (1 << 64) - 256),
    }[what]
    whole, coverage = Coverage(), Coverage()
    pages = list(unix_socket_pages(image_of(prog), whole))
    found = list(unix_socket_pages(damaged(image.core, change), coverage))
    assert whole.unreadable == 0
    assert coverage.unreadable == 1
    assert set(found) <= set(pages)


@OLD_AND_NEW
def test_parents_of_a_dentry(image: GuestImage) -> None:
    prog = image.program()
    points = (mount.mnt_mountpoint.read_() for mount in for_each_mount(prog))
    # e.g. /sys/fs/cgroup: its parent is no root either
    dentry = next(d for d in points if d.d_parent.d_parent != d.d_parent)
    parent = dentry.d_parent
    assert dentry_name(image_of(prog), dentry) == d_path(dentry).decode()
    changed = damaged(image.core, (place(parent.d_parent), dentry.value_()))
    again = Object(changed.prog, "struct dentry *", dentry.value_())
    with pytest.raises(FaultError, match="parents of a dentry are a circle"):
        dentry_name(changed, again)


# Exact in spite of damage


@OLD_AND_NEW
@pytest.mark.parametrize("task", ["missing", 0x1000])
def test_a_cpu_whose_task_cannot_be_read(image: GuestImage, task: int | str) -> None:
    """It may have been at work on anything: a page that is off is neither exact nor explained."""
    prog = image.program()
    usage = find_memcg(image_of(prog), b"/files/web").memory.usage.counter
    current = place(per_cpu(prog["runqueues"], 1).curr)
    changed = damaged(image.core, (place(usage), int(usage) + 1), (current, task))
    report = audit(changed)
    assert report.verdict in ("incomplete", "findings")
    rows = [r for r in report.rows if r.identity == "usage" and r.difference]
    assert rows
    assert {row.status for row in rows} <= {"unverifiable", "differs"}


@OLD_AND_NEW
def test_a_task_without_cgroups(image: GuestImage) -> None:
    task = find_task(image.program(), 1)
    check_incomplete(audit(damaged(image.core, (place(task.cgroups), 0))), "tasks")


@OLD_AND_NEW
def test_a_zswap_entry_at_a_low_address(image: GuestImage) -> None:
    prog = image.program()
    trees = prog["zswap_trees"][0]
    if trees.type_.type.unaliased().type_name() == "struct xarray":
        number = prog["nr_zswap_trees"][0].value_()
        head = next(
            tree.xa_head.value_() for tree in (trees[i] for i in range(number)) if tree.xa_head
        )
        where = dict(slots(prog, head))
    else:
        where = {trees.rbroot.rb_node.value_(): place(trees.rbroot.rb_node)}
    coverage = ZswapReader(image_of(prog))
    whole = {entry.address for entry in coverage.entries()}
    reader = ZswapReader(damaged(image.core, (next(iter(where.values())), 0x1000)))
    found = {entry.address for entry in reader.entries()}
    assert found < whole
    assert reader.coverage.unreadable and not coverage.coverage.unreadable


@OLD_AND_NEW
def test_a_live_bpf_map_without_its_id(image: GuestImage) -> None:
    """It is not being freed: what it holds is not explained."""
    prog = image.program()
    maps = [m for m in bpf_map_for_each(prog) if m.objcg]
    assert maps
    pointers = dict(slots(prog, prog["map_idr"].idr_rt.xa_head.value_()))
    bpf_map = next(m for m in maps if m.value_() in pointers)
    report = audit(damaged(image.core, (pointers[bpf_map.value_()], 0)))
    assert report.verdict != "exact"
    assert {r.status for r in report.rows if r.identity == "references"} > {"exact"}


@OLD_AND_NEW
def test_a_task_of_an_unknown_memcg(image: GuestImage) -> None:
    task = find_task(image.program(), 1)
    css = task.cgroups.subsys[image.program()["memory_cgrp_id"]]
    report = audit(damaged(image.core, (place(css), css.value_() + 64)))
    assert report.verdict == "incomplete"
    reasons = [example.reason for example in report.coverage["tasks"].examples]
    assert any("is not among those that were read" in reason for reason in reasons)


@OLD_AND_NEW
def test_an_online_memcg_with_the_flag_of_a_removed_one(image: GuestImage) -> None:
    """Its rows would vanish into those of its parent."""
    report = image.report()
    memcg = next(m for m in report.memcgs if m.state == "online" and m.path.count("/") == 2)
    css = Object(image.program(), "struct mem_cgroup *", memcg.address).css
    dying = 1 << 4
    assert not int(css.flags) & dying
    found = audit(damaged(image.core, (place(css.flags), number(int(css.flags) | dying))))
    assert found.verdict in ("incomplete", "findings")
    assert found.coverage["memcgs"].unreadable


def slots(prog: drgn.Program, entry: int) -> Iterator[tuple[int, int]]:
    """Return the entries below a node of an XArray, and where they are."""
    node = Object(prog, "struct xa_node *", entry - 2)
    for slot in (node.slots[i] for i in range(64)):
        if slot and node.shift:
            yield from slots(prog, slot.value_())
        elif slot:
            yield slot.value_(), place(slot)


def slabs(image: Image) -> Iterator:  # type: ignore[type-arg]
    """Return the slabs of an image."""
    reader = SlabReader(image)
    for piece in scan_pages(image):
        for page in piece.slabs:
            slab = reader.slab(page)
            if slab is not None and slab.charged:
                yield slab


def test_the_end_of_the_metadata_of_kfence(lab: Lab) -> None:
    """The size of the pool is found from them, and objects without them are not known."""
    image = lab.image("7.2", "4", "mixed", append="kfence.sample_interval=1")
    whole = kfence_pool(Image(image.program()))
    number = len(whole.pages) // 2 - 2
    last = place(image.program()["kfence_metadata"][number])
    changed = damaged(image.core, (last, "missing"))
    found = kfence_pool(changed)
    assert found.pages == whole.pages and not whole.unreadable
    assert found.unreadable[-1] == last
    check_incomplete(audit(changed), "kfence")


@OLD_AND_NEW
def test_an_object_that_may_be_a_map(image: GuestImage) -> None:
    """Every charged object of its size is looked at, and one that cannot be read is told of."""
    smallest = sizeof(image.program().type("struct bpf_map"))
    address = part_of_message(image.program(), smallest)
    report = audit(damaged(image.core, (address, "eio")))
    assert report.verdict == "incomplete"
    assert report.coverage["bpf"].unreadable
    # A user may write what looks like a map that has no operations yet.
    bpf_map = image.program().type("struct bpf_map")
    ops, kind = offsetof(bpf_map, "ops"), offsetof(bpf_map, "map_type")
    words = bytearray(b"\x81" * smallest)
    words[ops : ops + WORD], words[kind : kind + INT] = bytes(WORD), number(1)
    assert audit(damaged(image.core, (address, bytes(words)))).verdict == "exact"


@pytest.mark.parametrize("kernel", ["6.1"])
def test_an_object_that_was_a_memcg(image: GuestImage) -> None:
    """Who has it now wrote over its pointers. The memcg of old is gone, and nothing is missing."""
    memcg = image.program().type("struct mem_cgroup")
    size = sizeof(memcg)
    # The data of a message are in the caches that memcgs were in, and nothing depends on them.
    address = part_of_message(image.program(), size)
    cache = slab_object_info(image.program(), address).slab_cache
    assert cache.name.string_().startswith(b"kmalloc-")
    assert size <= int(cache.object_size) < 2 * size
    words = bytearray(b"\x81" * size)
    start = offsetof(memcg, "css.ss")
    words[start : start + WORD] = number(place(image.program()["memory_cgrp_subsys"]), WORD)
    report = audit(damaged(image.core, (address, bytes(words))))
    assert {name: c for name, c in report.coverage.items() if c.unreadable} == {}
    assert report.verdict == "exact"


@OLD_AND_NEW
def test_a_pool_of_more_memory_than_there_is(image: GuestImage) -> None:
    """Each of its page frames was a conflict: a list of them took all memory."""
    prog = image.program()
    chunks = []
    for name in ("atomic_pool_kernel", "atomic_pool_dma32", "atomic_pool_dma"):
        pool = prog[name]
        if pool.type_.unaliased_kind() != drgn.TypeKind.POINTER:
            pool = pool.pool
        if pool:
            head = pool.chunks.address_of_()
            chunks += list_for_each_entry("struct gen_pool_chunk", head, "next_chunk")
    chunk = chunks[0]
    start, end = chunk.start_addr.value_(), chunk.end_addr.value_()
    found = [row.found for row in pages(image_of(prog)).tables[1].rows]
    # The last address, or the first one, is far away: before the other, too.
    for field, value in (
        (chunk.end_addr, end | (1 << 63) | (1 << 62)),
        (chunk.end_addr, end & ~(1 << 62)),
        (chunk.start_addr, start & ~(1 << 62)),
        (chunk.phys_addr, 1 << 61),
        (chunk.phys_addr, (1 << 64) - PAGE),
    ):
        answer = pages(damaged(image.core, (place(field), value)))
        if value not in (start, end):
            assert answer.coverage["owners"].unreadable > 0
        assert [row.found for row in answer.tables[1].rows] == found


@OLD_AND_NEW
def test_whether_kernel_memory_is_accounted_may_be_missing(image: GuestImage) -> None:
    """With the key, EXACT would hold where both sides are 0, too."""
    prog = image.program()
    names = ("memcg_kmem_online_key", "memcg_kmem_enabled_key")
    (key,) = [s.address for name in names for s in prog.symbols(name)]
    frames = mem_map(image_of(prog))
    pfn = follow_phys(prog["init_mm"].address_of_(), key).value_() >> frames.page_shift
    report = audit(image_of(without(image, [pfn])))
    assert report.verdict == "incomplete"
    examples = report.coverage["static_keys"].examples
    assert "whether kernel memory is accounted" in [example.what for example in examples]
    assert audit(image_of(prog)).coverage["static_keys"].unreadable == 0
