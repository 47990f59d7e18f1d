# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Percpu memory is read in large pieces: the same is found as with a read for each copy.
"""

from __future__ import annotations

import pytest
from drgn import FaultError, Object, sizeof
from drgn.helpers.linux.mm import follow_page
from drgn.helpers.linux.percpu import per_cpu_ptr
from support.guests import GuestImage, Lab
from support.missing_pages import without

from memcg_inspect.collect.counters import read_counters
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.lib.percpu_refcount import percpu_ref_count, percpu_ref_counts
from memcg_inspect.linux.mm.memcontrol import nodeinfo, read_memcgs
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader, memcg_items
from memcg_inspect.linux.mm.mmzone import mem_map, possible_cpus
from memcg_inspect.linux.mm.percpu import PercpuReader, largest_percpu_size, set_bits
from memcg_inspect.linux.mm.percpu_defs import PercpuRange, read_percpu
from memcg_inspect.linux.mm.percpu_vm import PcpuPages
from memcg_inspect.model import Coverage

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]


@pytest.fixture(scope="module")
def guest(lab: Lab) -> GuestImage:
    return lab.image("7.3", "4", "mixed")


def counters(image: Image) -> list[Object]:
    """Return the ``__percpu`` pointers of the counters of all memcgs."""
    found = []
    for address in read_memcgs(image, Coverage()):
        memcg = Object(image.prog, "struct mem_cgroup *", address)
        found.append(memcg.vmstats_percpu.read_())
        found += [pn.lruvec_stats_percpu.read_() for _, pn in nodeinfo(image, memcg)]
    return found


def one_by_one(image: Image, pointer: Object) -> dict[int, bytes] | None:
    """Return the copies of all CPUs that are not zeros; ``None`` if one is unreadable."""
    size, found = sizeof(pointer.type_.type), {}
    for cpu in possible_cpus(image):
        try:
            data = image.prog.read(per_cpu_ptr(pointer, cpu), size)
        except FaultError:
            return None
        if any(data):
            found[cpu] = data
    return found


def check_copies(image: Image) -> list[dict[int, bytes] | None]:
    """Check what read_percpu() returns, and return it."""
    pointers = {p.value_(): p for p in counters(image)}
    ranges = [PercpuRange(at, sizeof(p.type_.type)) for at, p in pointers.items()]
    found = dict(read_percpu(image, ranges))
    assert found.keys() == set(ranges)
    copies = []
    for one, got in found.items():
        copies.append(None if isinstance(got, FaultError) else got)
        assert copies[-1] == one_by_one(image, pointers[one.pointer])
    return copies


def test_copies_are_those_of_each_cpu(guest: GuestImage) -> None:
    copies = check_copies(image_of(guest.program()))
    assert len(copies) > 100
    assert None not in copies
    assert any(copies)


def test_a_missing_page_hides_its_own_copies_alone(guest: GuestImage) -> None:
    image = image_of(guest.program())
    middle = sorted(counters(image), key=lambda p: int(p.value_()))[100]
    hidden = per_cpu_ptr(middle, 0).value_()
    page = follow_page(image.prog["init_mm"].address_of_(), hidden)
    copies = check_copies(image_of(without(guest, {mem_map(image).pfn(page.value_())})))
    # A copy has about 1 KiB, and some continue on the next page.
    assert 1 <= copies.count(None) <= 12
    assert len(copies) > 100


def test_counters_take_few_reads(guest: GuestImage) -> None:
    image = image_of(guest.program())
    memcgs = read_memcgs(image, Coverage())
    reader = StatReader(image, memcg_items(image))
    before, coverage = image.memory.reads, Coverage()
    read_counters(image, reader, memcgs, coverage)
    holders, copies = coverage.read, coverage.read * len(possible_cpus(image))
    assert copies > 1_000
    # One read for what was flushed, and a few for all copies.
    assert image.memory.reads - before - holders < copies / 10


def test_references_are_those_of_one_after_the_other(guest: GuestImage) -> None:
    image = image_of(guest.program())
    memcgs = [
        Object(image.prog, "struct mem_cgroup *", at) for at in read_memcgs(image, Coverage())
    ]
    # References to the root are not counted.
    refs = [memcg.css.refcnt.address_of_() for memcg in memcgs if memcg.css.parent]
    together = percpu_ref_counts(image, refs)
    assert together == {ref.value_(): percpu_ref_count(image, ref) for ref in refs}


def test_pages_are_on_the_nodes_that_drgn_finds(guest: GuestImage) -> None:
    image = image_of(guest.program())
    reader = PercpuReader(image)
    addresses = [
        chunk.base + (page << 12) + offset
        for chunk in reader.chunks(place=False)
        for page in set_bits(reader.populated(chunk))
        for offset in reader.unit_offsets()
    ]
    pages, alone, before = PcpuPages(image), PcpuPages(image), image.memory.reads
    found = [nid for address in addresses for nid in pages.nids(address, 1)]
    assert image.memory.reads - before < len(addresses) / 10
    assert found == [alone.nid(address) for address in addresses]
    assert set(found) == {0, 1, 2, 3}
    assert pages.coverage.read == alone.coverage.read == len(addresses) > 1_000


def test_the_allocation_at_an_offset(guest: GuestImage) -> None:
    """Each byte of an allocation leads to it, and what is free leads to none."""
    image = image_of(guest.program())
    percpu = PercpuReader(image)
    charged = free = 0
    for chunk in percpu.chunks():
        found = list(percpu.allocations(chunk))
        for area in found:
            for offset in (area.offset, area.offset + area.size - 1):
                assert percpu.alloc_at(chunk, offset) == area
            charged += bool(area.objcg)
        ends = {area.offset + area.size for area in found} - {area.offset for area in found}
        for offset in (end for end in ends if end < chunk.end):
            assert percpu.alloc_at(chunk, offset) is None
            free += 1
    assert charged > 10
    assert free > 10


def test_the_largest_allocation(guest: GuestImage) -> None:
    """PCPU_MIN_UNIT_SIZE of include/linux/percpu.h is 32 KiB, and a unit is not smaller."""
    prog = guest.program()
    assert largest_percpu_size(image_of(prog)) == 0x8000 <= int(prog["pcpu_unit_size"])
