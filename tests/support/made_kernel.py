# SPDX-License-Identifier: LGPL-2.1-or-later
"""
A small kernel that charges memory, for tests of diagnoses.

It does what ``mm/memcontrol.c`` does, one step after the other, with plain numbers in place of
structures. A test lets it run, changes one of its numbers or pointers, and takes a snapshot. It
knows nothing of identities, rows or causes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from memcg_inspect.checks.ledger import ChargeKind, Entry, Ledger
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import (
    ChargeStock,
    CssRefs,
    LruLists,
    Memcg,
    NodeStat,
    Objcg,
    ObjStock,
    Stat,
)
from memcg_inspect.model import Nodes as AllNodes
from memcg_inspect.model_counters import LocalStat
from memcg_inspect.model_freeing import Transient
from memcg_inspect.model_kernel import LocalItems
from support.made import features, snapshot

__all__ = ("LIST", "NODES", "PAGE", "Kernel", "Thing", "busy")

PAGE = 4096
NODES = (0, 1)
LIST = "lru_zone_size[ZONE_NORMAL][LRU_INACTIVE_FILE]"

ROOT, SHOP, WEB, MAIL, BATCH, GONE = 0x1000, 0x2000, 0x3000, 0x4000, 0x5000, 0x6000
PARENTS = {ROOT: None, SHOP: ROOT, WEB: SHOP, MAIL: SHOP, BATCH: ROOT, GONE: SHOP}
LEAVES = (WEB, MAIL, BATCH)

#: Counters of lruvecs, which memcgs have, too.
LRUVEC = (
    *("NR_SLAB_RECLAIMABLE_B", "NR_SLAB_UNRECLAIMABLE_B"),
    *("NR_KERNEL_STACK_KB", "NR_PAGETABLE", "NR_VMALLOC", "NR_ANON_MAPPED", "NR_INACTIVE_FILE"),
)
#: Counters of memcgs only.
ALONE = (
    *("MEMCG_KMEM", "MEMCG_PERCPU_B", "MEMCG_ZSWAP_B", "MEMCG_ZSWAPPED", "MEMCG_SOCK"),
    "MEMCG_SWAP",
)
SLAB = {"reclaimable": LRUVEC[0], "unreclaimable": LRUVEC[1]}

Cell = tuple[int, str, "int | None"]


@dataclass
class Thing:
    """Something that is charged: an object, a page, an entry or a socket."""

    kind: ChargeKind
    detail: str
    nid: int
    bytes: int
    payer: int


@dataclass
class Kernel:
    """All numbers and pointers of the kernel, which tests change."""

    things: list[Thing] = field(default_factory=list)
    cpu: Counter[Cell] = field(default_factory=Counter)
    flushed: Counter[Cell] = field(default_factory=Counter)
    state: Counter[Cell] = field(default_factory=Counter)
    pending: Counter[Cell] = field(default_factory=Counter)
    local: Counter[Cell] = field(default_factory=Counter)
    vm_stat: Counter[tuple[int, str]] = field(default_factory=Counter)
    vm_total: Counter[str] = field(default_factory=Counter)
    left: Counter[int] = field(default_factory=Counter)
    refs: Counter[int] = field(default_factory=Counter)
    css: Counter[int] = field(default_factory=Counter)
    usage: Counter[int] = field(default_factory=Counter)
    stock: Counter[int] = field(default_factory=Counter)
    lists: Counter[tuple[int, int]] = field(default_factory=Counter)
    swap: Counter[int] = field(default_factory=Counter)
    obj_stock: dict[int, list[int]] = field(default_factory=dict)
    #: Memcgs that were released, in no list, and that nothing will free.
    forgotten: set[int] = field(default_factory=set)

    def objcg(self, memcg: int, nid: int) -> int:
        """Return the obj_cgroup of a memcg and a node."""
        return memcg + 0x100 * (nid + 1)

    def memcg_of(self, payer: int) -> int:
        """Return the memcg that pays today; that of a removed one was reparented."""
        memcg = payer & ~0xFFF
        return SHOP if memcg == GONE else memcg

    # What the kernel does

    def mod_state(self, memcg: int, item: str, nid: int | None, amount: int) -> None:
        """``__mod_memcg_lruvec_state()`` with a node, ``__mod_memcg_state()`` without."""
        self.cpu[memcg, item, None] += amount
        if nid is not None:
            self.cpu[memcg, item, nid] += amount
            if item not in SLAB.values():
                self.vm_stat[nid, item] += amount
                self.vm_total[item] += amount

    def charge_pages(self, memcg: int, pages: int) -> None:
        """``page_counter_charge()``, for a memcg and its ancestors."""
        above: int | None = memcg
        while above is not None:
            self.usage[above] += pages
            above = PARENTS[above]

    def charge_kmem(self, memcg: int, pages: int) -> None:
        """``obj_cgroup_charge_pages()``."""
        self.charge_pages(memcg, pages)
        self.mod_state(memcg, "MEMCG_KMEM", None, pages)

    def charge_bytes(self, objcg: int, size: int) -> None:
        """``obj_cgroup_charge()``: whole pages, of which bytes are handed out."""
        if self.left[objcg] < size:
            pages = -(-(size - self.left[objcg]) // PAGE)
            self.charge_kmem(self.memcg_of(objcg), pages)
            self.left[objcg] += pages * PAGE
        self.left[objcg] -= size

    def slab(self, objcg: int, nid: int, size: int, detail: str) -> None:
        self.charge_bytes(objcg, size)
        self.mod_state(self.memcg_of(objcg), SLAB[detail], nid, size)
        self._hold(Thing("slab", detail, nid, size, objcg))

    def percpu(self, objcg: int, size: int) -> None:
        self.charge_bytes(objcg, size)
        self.mod_state(self.memcg_of(objcg), "MEMCG_PERCPU_B", None, size)
        self._hold(Thing("percpu", "data", 0, size, objcg))

    def zswap(self, objcg: int, size: int) -> None:
        self.charge_bytes(objcg, size)
        self.mod_state(self.memcg_of(objcg), "MEMCG_ZSWAP_B", None, size)
        self.mod_state(self.memcg_of(objcg), "MEMCG_ZSWAPPED", None, 1)
        self._hold(Thing("zswap", "compressed", 0, size, objcg))

    def kmem(self, objcg: int, nid: int, use: str) -> None:
        memcg = self.memcg_of(objcg)
        self.charge_kmem(memcg, 1)
        item = {"stack": "NR_KERNEL_STACK_KB", "table": "NR_PAGETABLE", "vmalloc": "NR_VMALLOC"}
        if use in item:
            self.mod_state(memcg, item[use], nid, 4 if use == "stack" else 1)
        self._hold(Thing("kmem", use, nid, PAGE, objcg))

    def user_page(self, objcg: int, nid: int) -> None:
        memcg = self.memcg_of(objcg)
        self.charge_pages(memcg, 1)
        self.mod_state(memcg, "NR_INACTIVE_FILE", nid, 1)
        self.lists[memcg, nid] += 1
        self._hold(Thing("lru", "lru", nid, PAGE, objcg))

    def sock(self, memcg: int, pages: int) -> None:
        self.charge_pages(memcg, pages)
        self.mod_state(memcg, "MEMCG_SOCK", None, pages)
        self.css[memcg] += 1
        self.things.append(Thing("sock", "TCP", -1, pages * PAGE, memcg))

    def swap_out(self, memcg: int, pages: int) -> None:
        """``mem_cgroup_try_charge_swap()``, without its page counter."""
        self.mod_state(memcg, "MEMCG_SWAP", None, pages)
        self.swap[memcg] += pages

    def forget(self, memcg: int) -> None:
        """Release a memcg, and free it never: it keeps its references to its obj_cgroups."""
        self.forgotten.add(memcg)
        for nid in NODES:
            self.refs[self.objcg(memcg, nid)] += 1

    def _hold(self, thing: Thing) -> None:
        self.refs[thing.payer] += 1
        self.things.append(thing)

    def fold(self) -> None:
        """``mem_cgroup_css_rstat_flush()`` of the whole tree, children first."""
        for memcg in sorted(PARENTS, reverse=True):
            if memcg in (SHOP, ROOT):
                continue
            self._fold(memcg)
        self._fold(SHOP)
        self._fold(ROOT)

    def _fold(self, memcg: int) -> None:
        for item in (*LRUVEC, *ALONE):
            for nid in (None, *NODES):
                cell, parent = (memcg, item, nid), PARENTS[memcg]
                change = self.cpu.pop(cell, 0)
                self.flushed[cell] += change
                self.local[cell] += change
                total = change + self.pending.pop(cell, 0)
                self.state[cell] += total
                if parent is not None:
                    self.pending[parent, item, nid] += total

    # What the program reads

    def snapshot(self) -> Snapshot:
        """Return what the readers would have read."""
        ledger = Ledger()
        for thing in self.things:
            if thing.kind == "sock" and thing.payer in self.forgotten:
                continue  # the reader of sockets knows the memcgs in lists only
            ledger.add(Entry(thing.payer, thing.kind, thing.detail, thing.nid), thing.bytes, 1)
        memcgs = {
            address: Memcg(
                address,
                f"/{address:x}",
                address,
                "dying" if address == GONE else "online",
                parent,
                SHOP if address == GONE else address,
                offline=address == GONE,
            )
            for address, parent in PARENTS.items()
            if address not in self.forgotten
        }
        made = snapshot(
            memcgs=memcgs,
            objcgs=dict(self._objcgs()),
            charges=ledger,
            memcg_stats={
                m: {i: self._stat((m, i, None)) for i in (*LRUVEC, *ALONE)} for m in memcgs
            },
            lruvec_stats={
                (m, nid): {i: self._stat((m, i, nid)) for i in LRUVEC}
                for m in memcgs
                for nid in NODES
            },
            local={
                (m, nid): {
                    i: LocalStat(self.local[m, i, nid], self.flushed[m, i, nid])
                    for i in (LRUVEC if nid is not None else (*LRUVEC, *ALONE))
                }
                for m in memcgs
                for nid in (None, *NODES)
            },
            usage={m: self.usage[m] for m in memcgs},
            stocks=[
                ObjStock(0, n, objcg, nr_bytes, nid, amount, 0, False)
                for n, (objcg, (nr_bytes, nid, amount)) in enumerate(self.obj_stock.items())
            ],
            charge_stocks=[ChargeStock(0, m, n) for m, n in self.stock.items() if n],
            lru=LruLists(
                pages=Counter((t.payer, t.nid, LIST) for t in self.things if t.kind == "lru"),
                sizes={
                    (m, nid): {LIST: {"lru_zone_size": n}} for (m, nid), n in self.lists.items()
                },
                by_generation=True,
            ),
            node_stats={
                (nid, i): NodeStat(self.vm_stat[nid, i], 0) for nid in NODES for i in _IN_NODES
            },
            all_nodes=AllNodes({i: self.vm_total[i] for i in _IN_NODES}, frozenset(NODES)),
            swap_ids={m >> 12: n for m, n in self.swap.items()},
            swap_entries={m: self.swap[m] for m in memcgs},
            transients=dict(self._transients()),
            css_holders={"released": Counter(PARENTS[m] for m in self.forgotten)},
            features=self._features(),
        )
        css = {memcg: refs for memcg, refs in self._css() if memcg in memcgs}
        return replace(made, css=css)

    def _transients(self) -> Iterator[tuple[int, list[Transient]]]:
        some = [
            Transient(
                "memcg that was released",
                memcg,
                parent=PARENTS[memcg],
                swap_id=memcg >> 12,
                sock_pages=self.state[memcg, "MEMCG_SOCK", None],
            )
            for memcg in self.forgotten
        ]
        yield 0, some
        for transient in some:
            for nid in NODES:
                yield self.objcg(transient.address, nid), [transient]

    def _css(self) -> Iterator[tuple[int, CssRefs]]:
        for memcg, parent in PARENTS.items():
            online = int(memcg != GONE)
            children = sum(above == memcg for above in PARENTS.values())
            # One of its own, one of its ID.
            refs = 2 * online + children + bool(self.stock[memcg]) + self.css[memcg]
            if parent is not None:
                yield memcg, CssRefs(refs, memcg, online, bool(online), online)

    def _objcgs(self) -> dict[int, Objcg]:
        made = {}
        for memcg in PARENTS:
            for nid in NODES:
                address = self.objcg(memcg, nid)
                stocked = int(address in self.obj_stock)
                made[address] = Objcg(
                    address,
                    self.memcg_of(address),
                    nid,
                    memcg == ROOT,
                    self.left[address],
                    refs=self.refs[address] + 1 + stocked,
                    memcg_refs=1,
                )
        return made

    def _stat(self, cell: Cell) -> Stat:
        return Stat(self.state[cell], self.pending[cell], self.cpu[cell], self.local[cell])

    def _features(self) -> Any:
        return features(
            *LRUVEC,
            *ALONE,
            lruvec_items=LRUVEC,
            memcg_items=ALONE,
            node_items=_IN_NODES,
            local=LocalItems(frozenset(), frozenset(("NR_INACTIVE_FILE", *SLAB.values()))),
            has_local=True,
        )


_IN_NODES = ("NR_ANON_MAPPED", "NR_INACTIVE_FILE")


def busy(seed: int) -> Kernel:
    """Return a kernel that was used for a while, and is at rest."""
    kernel, chance = Kernel(), random.Random(seed)
    for _ in range(300):
        objcg = kernel.objcg(chance.choice((*LEAVES, SHOP, GONE)), chance.choice(NODES))
        nid = chance.choice(NODES)
        what = chance.randrange(8)
        if what < 3:
            size = chance.choice((40, 104, 200, 264, 520, 1032, 1288, 2056)) + 8
            kernel.slab(objcg, nid, size, chance.choice(tuple(SLAB)))
        elif what == 3:
            kernel.percpu(objcg, chance.choice((24, 48, 96, 672)) * 4)
        elif what == 4:
            kernel.zswap(objcg, chance.randrange(100, 3000))
        elif what == 5:
            kernel.kmem(objcg, nid, chance.choice(("stack", "table", "vmalloc", "other")))
        elif what == 6:
            kernel.user_page(objcg, objcg >> 8 & 3 and (objcg >> 8 & 3) - 1)
        else:
            kernel.sock(chance.choice(LEAVES), chance.randrange(1, 9))
        if not chance.randrange(40):
            kernel.fold()
    return kernel
