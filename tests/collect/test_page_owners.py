# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Who owns page frames: drgn's helpers lead from owners to page frames, and owners that claim what is
not theirs are noticed.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import pytest
from drgn import FaultError, Object, Program
from drgn.helpers.linux.mm import follow_page, for_each_vmap_area, page_to_pfn
from drgn.helpers.linux.module import for_each_module
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import for_each_task
from support.guests import Lab
from support.planting import Overlay, Write

from memcg_inspect.collect import page_owners
from memcg_inspect.collect.page_owners import Claim, Owners
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.kernel.dma.pool import atomic_pools
from memcg_inspect.linux.kernel.resource import MemoryResource
from memcg_inspect.linux.mm.init_mm import KernelTables
from memcg_inspect.linux.mm.mmzone import mem_map, memory_map_end
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.linux.mm.vmalloc import vm_areas
from memcg_inspect.model import Coverage

pytestmark = pytest.mark.image

#: Bytes of a page, and ``PCPU_MIN_ALLOC_SIZE``.
PAGE, UNIT = 4096, 4


@pytest.fixture(scope="module")
def prog(lab: Lab) -> Program:
    return lab.image("7.3", "4", "mixed").program()


@pytest.fixture(scope="module")
def owners(prog: Program) -> Owners:
    found, coverage = owners_of(prog)
    assert not any(part.unreadable for part in coverage.values())
    assert found.conflicts == []
    return found


def owners_of(prog: Program) -> tuple[Owners, dict[str, Coverage]]:
    coverage: defaultdict[str, Coverage] = defaultdict(Coverage)
    return Owners(Image(prog), coverage), coverage


def claim_of(owners: Owners, pfn: int) -> Claim | None:
    """Return the claim of a page frame, by a look at all of them."""
    return next((claim for claim in owners.claims if claim.start <= pfn < claim.end), None)


def pfn_of(prog: Program, address: int) -> int:
    """Return the page frame behind a kernel address, from the kernel's page tables."""
    return page_to_pfn(follow_page(prog["init_mm"].address_of_(), address)).value_()


def kind_behind(prog: Program, owners: Owners, address: int) -> str | None:
    found = claim_of(owners, pfn_of(prog, address))
    return None if found is None else found.kind


def test_claims_are_in_order_and_do_not_overlap(prog: Program, owners: Owners) -> None:
    claims = owners.claims
    assert all(claim.start < claim.end for claim in claims)
    assert all(a.end <= b.start for a, b in zip(claims, claims[1:], strict=False))
    assert claims[-1].end <= memory_map_end(image_of(prog))
    kinds = {claim.kind for claim in claims}
    assert kinds >= {
        *("stack", "vmalloc", "text", "pagetables", "kernel_pagetables", "memmap"),
        *("percpu", "percpu_first"),
    }


def test_claims_within_a_range_are_cut_to_it(owners: Owners) -> None:
    chance = random.Random(5)
    for _ in range(30):
        claim = chance.choice(owners.claims)
        start = claim.start + chance.randrange(-3, 4)
        end = start + chance.randrange(1, 40)
        expected = [
            each._replace(start=max(each.start, start), end=min(each.end, end))
            for each in owners.claims
            if each.start < end and each.end > start
        ]
        assert list(owners.within(start, end)) == expected
    last = owners.claims[-1].end
    assert list(owners.within(last, last + 10)) == []
    assert list(owners.within(last - 1, last)) == [owners.claims[-1]._replace(start=last - 1)]


def test_stacks_and_modules(prog: Program, owners: Owners) -> None:
    stacks = [task.stack.value_() for task in for_each_task(prog) if task.stack_vm_area]
    found = Counter(kind_behind(prog, owners, at + n * PAGE) for at in stacks for n in range(4))
    assert found == {"stack": 4 * len(stacks)}
    texts = [module.mem[0].base.value_() for module in for_each_module(prog)]
    assert {kind_behind(prog, owners, at) for at in texts} == {"text"}
    pfns = {pfn_of(prog, at) for at in texts}
    callers = {claim.caller for pfn in pfns if (claim := claim_of(owners, pfn)) is not None}
    assert all(caller and not caller.startswith("0x") for caller in callers)


def test_page_tables_and_the_memory_map(prog: Program, owners: Owners) -> None:
    def in_direct_map(pointer: Object) -> str | None:
        frames = mem_map(image_of(prog))
        found = claim_of(owners, frames.pfn(frames.virt_to_page(pointer.value_())))
        return None if found is None else found.kind

    tables = {in_direct_map(task.mm.pgd) for task in for_each_task(prog) if task.mm}
    assert tables == {"pagetables"}
    first = prog["vmemmap"].value_()
    frames = mem_map(image_of(prog))
    for pfn in (0x100, 0x8000):
        assert kind_behind(prog, owners, first + pfn * frames.size) == "memmap"


def test_a_memory_map_in_small_pages(prog: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page frames that are mapped together are a range, others are one by one."""
    first, frames_of = prog["vmemmap"].value_(), KernelTables.frames
    code = pfn_of(prog, prog.symbol("_stext").address)  # nobody else claims it

    def frames(self: KernelTables, start: int, size: int) -> Iterator[Sequence[int]]:
        if start < first:
            return frames_of(self, start, size)
        run = range(code, code + 4)
        return iter([run, (code + 8, code + 4), run])

    monkeypatch.setattr(KernelTables, "frames", frames)
    found, _ = owners_of(prog)
    claims = [(claim.start, claim.end) for claim in found.claims if claim.kind == "memmap"]
    assert claims == [(code, code + 5), (code + 8, code + 9)]


def test_pools_for_dma(prog: Program, owners: Owners) -> None:
    """``tests/linux/test_dma_pools.py`` compares their sizes with the log of the guest."""
    pools = list(atomic_pools(image_of(prog), Coverage()))
    assert pools
    for start, end in pools:
        pfns = range(start // PAGE, end // PAGE)
        assert list(owners.within(pfns[0], pfns[-1] + 1)) == [
            Claim(pfns[0], pfns[-1] + 1, "dma_pool")
        ]


def test_pages_of_kfence(lab: Lab) -> None:
    prog = lab.image("7.2", "4", "mixed", append="kfence.sample_interval=1").program()
    owners, _ = owners_of(prog)
    frames, pool = mem_map(image_of(prog)), prog["__kfence_pool"].value_()
    first = frames.pfn(frames.virt_to_page(pool))
    [claim] = [claim for claim in owners.claims if claim.kind == "kfence"]
    # KFENCE_POOL_SIZE: two pages for each object, and two more; 255 objects by default.
    assert (claim.start, claim.end) == (first, first + 2 * (255 + 1))


def test_percpu_memory(prog: Program, owners: Owners) -> None:
    """Each byte of an allocation is paid for where it is; runqueues are static variables."""
    for cpu in (0, 3):
        at = per_cpu(prog["runqueues"], cpu).address_ or 0
        assert kind_behind(prog, owners, at) == "percpu_first"
    reader = PercpuReader(image_of(prog))
    of_percpu = [claim for claim in owners.claims if claim.kind == "percpu"]
    claims = {pfn: claim for claim in of_percpu for pfn in range(claim.start, claim.end)}
    charged, pages = 0, 0
    for chunk in reader.chunks(place=False):
        struct = Object(prog, "struct pcpu_chunk *", chunk.address)
        if struct.value_() != prog["pcpu_first_chunk"].value_():
            bits = [struct.populated[i // 64] >> i % 64 & 1 for i in range(int(struct.nr_pages))]
            pages += sum(map(int, bits)) * len(reader.unit_offsets())
        paid = defaultdict[int, Counter[int]](Counter)
        for area in reader.charged(chunk):
            for byte in range(area.offset, area.offset + area.size, UNIT):
                paid[byte // PAGE][area.objcg] += UNIT
        taken = Counter[int]()
        for area in reader.allocations(chunk):
            for byte in range(area.offset, area.offset + area.size, UNIT):
                taken[byte // PAGE] += UNIT
        for number, payers in list(paid.items())[::4]:
            for offset in reader.unit_offsets():
                share = claims[pfn_of(prog, chunk.base + number * PAGE + offset)].share
                assert share is not None
                assert dict(share.paid) == payers
                assert share.used == taken[number]
                charged += 1
    assert charged
    assert len(claims) == pages > 0


@pytest.fixture
def overlay(prog: Program) -> Iterator[Overlay]:
    made = Overlay(prog)
    yield made
    made.clear()


def areas_with_pages(prog: Program) -> tuple[list[int], list[int]]:
    """Return the pages of a stack, and where the pointers to those of another area are."""
    areas = list(vm_areas(Image(prog), Coverage(), Coverage()))
    stack = next(area.pages for area in areas if area.is_stack)
    address = next(a.address for a in areas if not a.is_stack and len(a.pages) > 2)
    area = next(
        found
        for found in (Object(prog, "struct vm_struct *", at) for at in vm_structs(prog))
        if found.addr.value_() == address
    )
    return stack, [area.pages[n].address_of_().value_() for n in range(2)]


def vm_structs(prog: Program) -> Iterator[int]:
    for area in for_each_vmap_area(prog):
        if area.vm:
            yield area.vm.value_()


def test_regions_that_end_within_a_page(prog: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages that a region has a byte of are in it. What only is named so is no memory."""
    resources = [
        MemoryResource("Kernel data", 0x1002001, 0x1003001, False, True),
        MemoryResource("Kernel code", 0x1000800, 0x1001000, False, True),
        MemoryResource("Kernel rodata", 0x8000, 0x9000, False, False),
        MemoryResource("Crash kernel", 0x5000FFF, 0x6000001, False, True),
    ]
    monkeypatch.setattr(page_owners, "memory_resources", lambda image: resources)
    pools = [(0x7000001, 0x7002001)]
    monkeypatch.setattr(page_owners, "swiotlb_pools", lambda image, coverage: pools)
    found, _ = owners_of(prog)
    assert found.regions == [
        (0x5000, 0x6001, "crash_kernel"),
        (0x1000, 0x1004, "image"),
        (0x7000, 0x7003, "swiotlb"),
    ]


def test_regions_that_are_not_in_the_image(prog: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were read before count."""

    def resources(image: Image) -> Iterator[MemoryResource]:
        yield MemoryResource("Kernel code", 0x1000000, 0x1001000, False, True)
        raise FaultError("not in the image", 0x5000)

    monkeypatch.setattr(page_owners, "memory_resources", resources)
    monkeypatch.setattr(page_owners, "swiotlb_pools", lambda image, coverage: [])
    found, coverage = owners_of(prog)
    assert found.regions == [(0x1000, 0x1001, "image")]
    [missed] = coverage["resources"].examples
    assert (missed.what, missed.address) == ("iomem_resource", 0x5000)


def test_a_page_that_two_owners_claim_is_a_conflict(prog: Program, overlay: Overlay) -> None:
    stack, slots = areas_with_pages(prog)
    before, _ = owners_of(prog)
    overlay.write((Write(slots[0], stack[0].to_bytes(8, "little")),))
    found, coverage = owners_of(prog)
    pfn = mem_map(image_of(prog)).pfn(stack[0])
    ((number, *kinds),) = found.conflicts
    assert number == pfn
    assert "stack" in kinds
    assert set(kinds) & {"vmalloc", "text"}
    assert not coverage["owners"].unreadable
    # The page has one owner all the same, and the other one has a page less.
    sizes = [sum(c.end - c.start for c in each.claims) for each in (before, found)]
    assert sizes[0] - sizes[1] == 1
    claims = found.claims
    assert all(a.end <= b.start for a, b in zip(claims, claims[1:], strict=False))


def test_what_is_beyond_the_memory_map_has_no_owner(prog: Program, overlay: Overlay) -> None:
    _, slots = areas_with_pages(prog)
    image = image_of(prog)
    end, frames = memory_map_end(image), mem_map(image)
    overlay.write((Write(slots[0], frames.page(end + 5).to_bytes(8, "little")),))
    found, coverage = owners_of(prog)
    assert found.conflicts == []
    assert coverage["owners"].unreadable == 1
    assert f"of page frames {end + 5:#x} to {end + 6:#x}" in coverage["owners"].examples[0].reason
    assert found.claims[-1].end <= end
