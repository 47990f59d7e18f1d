# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What the kernel's arithmetic makes of one fault
-----------------------------------------------

Each function returns the :class:`~memcg_inspect.checks.diagnosis.differences.Signature` of an
elementary fault. Causes are made of these.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

from memcg_inspect.checks.diagnosis.differences import Differences, Pool, Signature, added
from memcg_inspect.checks.identities import kmem, node_levels, slab, user_pages
from memcg_inspect.checks.identities.page_levels import unit_of
from memcg_inspect.checks.ledger import ChargeKind
from memcg_inspect.checks.rows import RowKey
from memcg_inspect.checks.snapshot import OBJECTS

__all__ = (
    "Charge",
    "Payer",
    "Place",
    "counter",
    "level",
    "one_row",
    "pool_of",
    "row_of_references",
    "taken_from",
    "taken_from_all",
)

#: Where a counter of a memcg is wrong: ``cpu``, in changes that are not folded, or in what a flush
#: made of them; ``folded``, in the value that its readers see; ``handed up``, in what children have
#: handed up to it.
Place = Literal["cpu", "folded", "handed up"]

_BY_USE = {"stack": "NR_KERNEL_STACK_KB", "table": "NR_PAGETABLE", "vmalloc": "NR_VMALLOC"}


class Charge(NamedTuple):
    """
    One charge, or several of one payer together.

    :ivar kind: kind of the charge
    :ivar detail: as in :class:`~memcg_inspect.checks.ledger.Entry`; of ``lru``, the name of the
        list in rows of ``lru``
    :ivar nid: backing node; ``None`` if no row shows it
    :ivar bytes: bytes
    :ivar references: number of references that it holds
    :ivar number: number of charges; 0 if it is only a part of one
    :ivar together: whether it is several charges, of which only the sum of the bytes is known
    :ivar parts: bytes by node, if the obj_cgroup of each node pays for what is there, and holds
        references of its own; else empty
    :ivar states: counters that ``user_pages`` compares, and that all of its pages count in
    """

    kind: ChargeKind
    detail: str
    nid: int | None
    bytes: int
    references: int = 1
    number: int = 1
    together: bool = False
    parts: tuple[tuple[int, int], ...] = ()
    states: tuple[str, ...] = ()


class Payer(NamedTuple):
    """
    Who pays for a charge.

    :ivar memcg: ``struct mem_cgroup *``
    :ivar objcg: ``struct obj_cgroup *``; ``None`` if it is not known, or if there is none
    """

    memcg: int
    objcg: int | None


def one_row(key: RowKey, amount: int) -> Signature:
    """Return the signature of a fault that a single row shows."""
    return Signature({key: amount})


def taken_from(d: Differences, payer: Payer, what: Charge) -> Signature:
    """Return the signature of a charge that was counted for a payer, and is not found there."""
    rows: Counter[RowKey] = Counter()
    pages = -(-what.bytes // d.page)
    for item, nid, amount in _counted(d, what):
        _count(d, rows, item, payer.memcg, nid, amount)
    for item in what.states:
        _count(d, rows, item, payer.memcg, _node_of(d, item, what.nid), pages)
    if what.kind in ("kmem", "lru", "sock"):
        usage = RowKey("usage", "memory.usage", "pages", payer.memcg)
        if d.has(usage) and (what.kind != "sock" or d.snapshot.features.default_hierarchy):
            rows[usage] += pages
        name = {"kmem": "kmem", "sock": "tcpmem"}.get(what.kind, "")
        key = RowKey(f"{name}_usage" if name == "kmem" else name, f"{name}.usage", "pages")
        if d.has(key._replace(memcg=payer.memcg)):
            rows[key._replace(memcg=payer.memcg)] += pages
    if what.kind == "lru" and what.detail:
        rows[RowKey("lru", what.detail, "pages", payer.memcg, what.nid)] += pages
    pools: Counter[Pool] = Counter()
    for part, size in _parts(d, payer, what):
        _count_references(d, rows, part, what)
        if what.kind in OBJECTS:
            _count_bytes(d, rows, part, size)
            pools[pool_of(d, part)] += size
    return Signature(rows, pools)


def _parts(d: Differences, payer: Payer, what: Charge) -> list[tuple[Payer, int]]:
    """Return who pays for each part of a charge."""
    if not what.parts or payer.objcg is None:
        return [(payer, what.bytes)]
    siblings = d.snapshot.objcgs[payer.objcg].siblings
    return [(Payer(payer.memcg, siblings[nid]), size) for nid, size in what.parts]


def _count_bytes(d: Differences, rows: Counter[RowKey], payer: Payer, size: int) -> None:
    if payer.objcg is None:
        return
    nid = d.snapshot.objcgs[payer.objcg].nid
    key = RowKey("objcg_bytes", "bytes of whole pages", "bytes", payer.memcg, nid, payer.objcg)
    if d.has(key):
        rows[key] += size


def taken_from_all(d: Differences, address: int, memcg: int) -> Signature:
    """
    Return the signature of all that is charged to an obj_cgroup or memcg, without its references.

    :param address: ``struct obj_cgroup *`` or ``struct mem_cgroup *``
    :param memcg: the live memcg that counted it
    """
    some = []
    for entry, amount in d.snapshot.ledger:
        if entry.payer == address:
            # A list of the LRU is no detail of the charge.
            detail = "" if entry.kind == "lru" else entry.detail
            what = Charge(entry.kind, detail, entry.nid, amount.bytes, 0, amount.charges)
            some.append(taken_from(d, Payer(memcg, None), what))
    rows, pools = added(Signature({}), *some, _states_of(d, address, memcg))
    pool = pool_of(d, Payer(memcg, address if address in d.snapshot.objcgs else None))
    return Signature(rows, {pool: sum(pools.values())} if pools else {})


def _states_of(d: Differences, address: int, memcg: int) -> Signature:
    """Return what user pages that an obj_cgroup or memcg pays for count, as if for a memcg."""
    rows: Counter[RowKey] = Counter()
    for (payer, nid, item), pages in d.snapshot.user_pages.pages.items():
        if payer == address:
            _count(d, rows, item, memcg, _node_of(d, item, nid), pages)
    return Signature(rows)


def _node_of(d: Differences, item: str, nid: int | None) -> int | None:
    """Return the node of the row of a counter of user pages."""
    return nid if user_pages.has_nodes(d.snapshot, item) else None


def pool_of(d: Differences, payer: Payer) -> Pool:
    """Return the pages that the objects of a payer are charged from."""
    by_node = kmem.BY_NODE in d.snapshot.features.items
    nid = d.snapshot.objcgs[payer.objcg].nid if by_node and payer.objcg is not None else None
    return payer.memcg, nid


def _counted(d: Differences, what: Charge) -> list[tuple[str, int | None, int]]:
    """Return the counters that count a charge: item, node and amount."""
    pages = -(-what.bytes // d.page)
    if what.kind == "slab":
        return [(slab.ITEMS[what.detail], what.nid, what.bytes)]
    if what.kind == "percpu":
        return [("MEMCG_PERCPU_B", None, what.bytes)]
    if what.kind == "zswap":
        entries: list[tuple[str, int | None, int]] = [
            ("MEMCG_ZSWAP_B", None, what.bytes),
            ("MEMCG_ZSWAPPED", None, what.number),
        ]
        if what.detail == "incompressible":
            entries.append(("MEMCG_ZSWAP_INCOMP", None, what.number))
        return entries
    if what.kind == "sock":
        return [("MEMCG_SOCK", None, pages)]
    if what.kind != "kmem":
        return []
    by_node = kmem.BY_NODE in d.snapshot.features.items
    counted: list[tuple[str, int | None, int]] = [
        (kmem.BY_NODE, what.nid, pages) if by_node else (kmem.BY_MEMCG, None, pages)
    ]
    if what.detail == "large_kmalloc":
        counted.append((slab.ITEMS["unreclaimable"], what.nid, what.bytes))
    elif what.detail in _BY_USE:
        item = _BY_USE[what.detail]
        amount = what.bytes // 1024 if unit_of(item) == "KiB" else pages
        if item == "NR_VMALLOC" and item not in d.snapshot.features.items:
            counted.append(("MEMCG_VMALLOC", None, amount))
        else:
            counted.append((item, what.nid, amount))
    return counted


def _count(
    d: Differences, rows: Counter[RowKey], item: str, memcg: int, nid: int | None, amount: int
) -> None:
    """Add an amount to a counter of a memcg, and so to that of its subtree and its ancestors'."""
    key = d.counter(item, memcg, nid)
    if key is not None:
        rows[key] += amount
    _count_in_subtrees(d, rows, item, d.chain(memcg), nid, amount)


def _count_in_subtrees(
    d: Differences,
    rows: Counter[RowKey],
    item: str,
    memcgs: tuple[int, ...],
    nid: int | None,
    amount: int,
) -> None:
    for memcg in memcgs:
        above = RowKey("hierarchy", item, unit_of(item), memcg, nid)
        if d.has(above):
            rows[above] += amount


def _count_references(d: Differences, rows: Counter[RowKey], payer: Payer, what: Charge) -> None:
    # A row with 0 would say that it tells who has the charge.
    key = row_of_references(d, payer, what.kind) if what.references else None
    if key is not None:
        rows[key] += what.references


def row_of_references(d: Differences, payer: Payer, kind: ChargeKind) -> RowKey | None:
    """Return the row of the references that charges of a kind hold; ``None`` if there is none."""
    of_objcg = kind != "sock" and (kind != "lru" or d.snapshot.features.lru_holds_objcg)
    if not of_objcg:
        key = RowKey("css_refs", "css.refcnt", "references", payer.memcg)
    elif payer.objcg is not None:
        nid = d.snapshot.objcgs[payer.objcg].nid
        key = RowKey("references", "refcnt", "references", payer.memcg, nid, payer.objcg)
    else:
        return None
    return key if d.has(key) else None


def counter(
    d: Differences, item: str, memcg: int, nid: int | None, place: Place, amount: int
) -> Signature:
    """Return the signature of a counter of a live memcg that is too high by an amount."""
    rows: Counter[RowKey] = Counter()
    chain = d.chain(memcg)
    above = chain[1] if len(chain) > 1 else None
    # A parent's own share is its folded value less that of its children.
    shares = [(memcg, amount)]
    if place == "folded" and above is not None:
        shares.append((above, -amount))
    for payer, share in shares:
        key = d.counter(item, payer, nid)
        if key is not None:
            rows[key] += share
        level_key = _level_row(d, item, payer)
        if level_key is not None:
            rows[level_key] += share if nid is None else -share
        if place != "cpu":
            local = RowKey("local", item, unit_of(item), payer, nid)
            items = d.snapshot.features.local
            kept = item in (items.of_memcgs if nid is None else items.of_nodes)
            if kept and d.applies(local):
                rows[local] -= share
    of = chain[:1] if place == "folded" else chain
    _count_in_subtrees(d, rows, item, of, nid, amount)
    if nid is not None and d.snapshot.memcgs[of[-1]].parent is None:
        _count_in_node(d, rows, item, nid, amount)
    return Signature(rows)


def _level_row(d: Differences, item: str, memcg: int) -> RowKey | None:
    """Return the row that compares a counter of a memcg with the same one of its nodes."""
    if item in slab.ITEMS.values():
        key = RowKey("levels", item, "bytes", memcg)
    elif item in d.snapshot.features.lruvec_items:
        key = RowKey("page_levels", item, unit_of(item), memcg)
    else:
        return None
    return key if d.applies(key) else None


def _count_in_node(d: Differences, rows: Counter[RowKey], item: str, nid: int, amount: int) -> None:
    """Add what is too much in the root memcg's counter of a node."""
    if item not in (*node_levels.EXACT, *node_levels.AT_LEAST):
        return
    if item not in d.snapshot.features.lruvec_items:
        return
    key = RowKey("node_levels", item, unit_of(item), nid=None if item == _FILE_PAGES else nid)
    if d.applies(key):
        rows[key] -= amount


_FILE_PAGES = "NR_FILE_PAGES"


def level(d: Differences, key: RowKey, amount: int) -> Signature:
    """
    Return the signature of a page counter that is too high by an amount, with its children right.

    :param key: the row of the memcg
    """
    chain = d.chain(key.memcg or 0)
    rows = {key: amount}
    if len(chain) > 1 and d.has(key._replace(memcg=chain[1])):
        rows[key._replace(memcg=chain[1])] = -amount
    if key.identity == "usage":
        # On cgroup v1, memsw counts memory, too.
        for memcg, share in ((m.memcg, s) for m, s in list(rows.items())):
            both = RowKey("swap_usage", "memsw.usage", "pages", memcg)
            if d.has(both):
                rows[both] = -share
        if len(chain) == 2:
            root = RowKey("swap_usage", "memsw.usage", "pages", chain[1])
            if d.has(root):
                rows[root] = amount
    return Signature(rows)
