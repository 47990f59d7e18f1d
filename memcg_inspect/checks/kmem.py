# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identities of kernel pages
--------------------------

``kernel_stack``, ``pagetable`` and ``vmalloc`` hold pages with ``MEMCG_DATA_KMEM`` against the
counters of what they are used for; ``kmem`` holds all of them, and the bytes of objects,
against ``MEMCG_KMEM``:

    own(m, MEMCG_KMEM) = kmem pages + (slab + percpu + zswap + stock + nr_charged_bytes) / PAGE_SIZE
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from memcg_inspect.checks.ledger import Amount
from memcg_inspect.checks.objcg import objcg_bytes
from memcg_inspect.checks.rows import make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Row, Unit

__all__ = (
    "why_kmem_missing",
    "kmem_pages",
    "kmem_rows",
    "pagetable_rows",
    "stack_rows",
    "vmalloc_rows",
)


def stack_rows(snapshot: Snapshot) -> list[Row]:
    """Hold the pages of kernel stacks against ``NR_KERNEL_STACK_KB``, by memcg and node."""
    return list(_by_node(snapshot, "kernel_stack", "stack", "NR_KERNEL_STACK_KB", "KiB", 1024))


def pagetable_rows(snapshot: Snapshot) -> list[Row]:
    """Hold the pages of page tables against ``NR_PAGETABLE``, by memcg and node."""
    page_size = snapshot.image.page_size
    return list(_by_node(snapshot, "pagetable", "table", "NR_PAGETABLE", "pages", page_size))


def vmalloc_rows(snapshot: Snapshot) -> list[Row]:
    """
    Hold the pages of vmalloc areas, kernel stacks aside, against their counter: by memcg and
    node where that is ``NR_VMALLOC`` (7.2), by memcg where it is ``MEMCG_VMALLOC``.
    """
    page_size = snapshot.image.page_size
    if "NR_VMALLOC" in snapshot.features.items:
        return list(_by_node(snapshot, "vmalloc", "vmalloc", "NR_VMALLOC", "pages", page_size))
    found = snapshot.by_memcg("kmem", "vmalloc")
    return [
        make_row(
            "vmalloc",
            memcg=memcg.address,
            nid=None,
            item="MEMCG_VMALLOC",
            unit="pages",
            found={"vmalloc": found[memcg.address].bytes // page_size},
            claimed=snapshot.own(memcg.address, "MEMCG_VMALLOC"),
            missing=_why_missing(snapshot, "vmalloc", None),
            missing_hides_both=not snapshot.complete("stacks"),
            unread=snapshot.unread(memcg.address),
            hierarchy=snapshot.folded(memcg.address, "MEMCG_VMALLOC"),
        )
        for memcg in snapshot.live()
    ]


def _by_node(
    snapshot: Snapshot, name: str, detail: str, item: str, unit: Unit, size: int
) -> Iterator[Row]:
    found = snapshot.by_node("kmem", detail)
    for memcg in snapshot.live():
        for nid in snapshot.image.nodes:
            amount = found.get((memcg.address, nid), Amount(0, 0))
            yield make_row(
                name,
                memcg=memcg.address,
                nid=nid,
                item=item,
                unit=unit,
                found={detail: amount.bytes // size},
                claimed=snapshot.own(memcg.address, item, nid),
                missing=_why_missing(snapshot, detail, nid),
                # Stacks that are not known to be some pass for other areas.
                missing_hides_both=detail == "vmalloc" and not snapshot.complete("stacks"),
                unread=snapshot.unread(memcg.address),
                hierarchy=snapshot.folded(memcg.address, item, nid),
            )


def _why_missing(snapshot: Snapshot, detail: str, nid: int | None) -> str | None:
    if detail in ("stack", "vmalloc"):
        if not snapshot.complete("vmalloc"):
            return "vmalloc areas are not all in the image"
        if not snapshot.complete("stacks"):
            return "tasks, whose stacks are told from other vmalloc areas, are not all in the image"
    return snapshot.why_missing("kmem", detail, nid)


def kmem_pages(snapshot: Snapshot) -> Mapping[int, dict[str, int]]:
    """
    Return all kernel memory found, in pages, by memcg: pages as they are, and the bytes of
    objects and their left-over as the whole pages that they were taken from.
    """
    page_size = snapshot.image.page_size
    objects: defaultdict[int, int] = defaultdict(int)
    for address in snapshot.objcgs:
        payer = snapshot.payer(address)
        if payer is not None:
            objects[payer] += sum(objcg_bytes(snapshot)[address].values())
    pages = snapshot.by_memcg("kmem")
    return {
        memcg.address: {
            "kmem_pages": pages[memcg.address].bytes // page_size,
            # Not whole only if the identity of an objcg's bytes fails, which names it.
            "objects": round(objects[memcg.address] / page_size),
        }
        for memcg in snapshot.live()
    }


def why_kmem_missing(snapshot: Snapshot, memcg: int) -> str | None:
    """Return why kernel memory may be missing from what was found of a memcg, if it may."""
    return snapshot.why_missing("kmem") or snapshot.why_objects_missing(memcg)


def kmem_rows(snapshot: Snapshot) -> list[Row]:
    """
    Hold all kernel memory against its counter: ``MEMCG_KMEM`` by memcg, or ``NR_KMEM`` by
    memcg and node where the kernel accounts by node.
    """
    if "NR_KMEM" in snapshot.features.items:
        return [
            _kmem_row(snapshot, memcg, nid, "NR_KMEM", found)
            for (memcg, nid), found in _pages_by_node(snapshot).items()
        ]
    pages = kmem_pages(snapshot)
    return [
        _kmem_row(snapshot, memcg.address, None, "MEMCG_KMEM", pages[memcg.address])
        for memcg in snapshot.live()
    ]


def _kmem_row(
    snapshot: Snapshot,
    memcg: int,
    nid: int | None,
    item: str,
    found: Mapping[str, int],
) -> Row:
    return make_row(
        "kmem",
        memcg=memcg,
        nid=nid,
        item=item,
        unit="pages",
        found=found,
        claimed=snapshot.own(memcg, item, nid),
        missing=why_kmem_missing(snapshot, memcg),
        unread=snapshot.unread(memcg),
        hierarchy=snapshot.folded(memcg, item, nid),
    )


def _pages_by_node(snapshot: Snapshot) -> dict[tuple[int, int], dict[str, int]]:
    """
    Kernel memory by memcg and the node of the obj_cgroups that pay, which on such kernels is
    that of the memory; of pages, and of percpu memory, the node is told by the memory.
    """
    page_size = snapshot.image.page_size
    pages = snapshot.by_node("kmem")
    objects: defaultdict[tuple[int, int], int] = defaultdict(int)
    for address, found in objcg_bytes(snapshot).items():
        payer, nid = snapshot.payer(address), snapshot.objcgs[address].nid
        if nid is not None and payer is not None:
            objects[payer, nid] += sum(found.values())
    cells = [(m.address, nid) for m in snapshot.live() for nid in snapshot.image.nodes]
    return {
        cell: {
            "kmem_pages": pages.get(cell, Amount(0, 0)).bytes // page_size,
            "objects": round(objects[cell] / page_size),
        }
        for cell in cells
    }
