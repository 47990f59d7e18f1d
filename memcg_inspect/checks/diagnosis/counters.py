# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Causes: a counter, a stock or a reference count that is wrong by itself
-----------------------------------------------------------------------

Nothing was charged or freed. The rows that differ are those that compare this one number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from memcg_inspect.checks.diagnosis.cause import Cause, Hypothesis
from memcg_inspect.checks.diagnosis.differences import Signature, View, added
from memcg_inspect.checks.diagnosis.effects import Payer, Place, counter, level, one_row, pool_of
from memcg_inspect.checks.diagnosis.proofs import PROVED
from memcg_inspect.checks.identities import slab
from memcg_inspect.checks.rows import RowKey
from memcg_inspect.model import Unit, counted

__all__ = ("CAUSES",)

#: Rows that compare a counter of memcgs with charges, or with another counter.
_COUNTERS = (
    *("slab", "percpu", "kernel_stack", "pagetable", "vmalloc", "kmem", "zswap", "sock", "swap"),
    *("user_pages", "levels", "page_levels", "hierarchy", "node_levels"),
)
#: Identities whose rows show the node of a counter.
_BY_NODE = (
    *("slab", "kernel_stack", "pagetable", "vmalloc", "user_pages", "node_levels", "local"),
)
_REFERENCES = ("references", "css_refs", "id_refs")
_PAGE_COUNTERS = ("usage", "kmem_usage", "swap_usage", "tcpmem")

#: Where no row shows the node.
_OF_A_NODE = " of a node"


def _counter(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """One value of a counter: of a CPU, folded, or handed up by children."""
    if key.memcg is None:
        return
    if key.identity in ("levels", "page_levels"):
        yield from _of_a_level(view, key, amount)
        return
    if key.identity == "local":
        amount = -amount  # the local counter is compared with this one
    yield from _at(view, key.item, key.memcg, key.nid, amount)


def _of_a_level(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """The counter of the memcg is too high, or that of one of its nodes too low."""
    memcg = key.memcg or 0
    yield from _at(view, key.item, memcg, None, amount)
    nids = {
        other.nid
        for identity in _BY_NODE
        for other in (*view.of_memcg(identity, memcg), *view.of_memcg(identity, None))
        if other.item == key.item and other.nid is not None
    }
    for nid in nids:
        yield from _at(view, key.item, memcg, nid, -amount)
    if not nids:
        # No row shows the node: some counters are compared for all nodes together only.
        for option in _at(view, key.item, memcg, view.snapshot.image.nodes[0], -amount):
            yield option._replace(nid=None, place=option.place + _OF_A_NODE)


def _at(view: View, item: str, memcg: int, nid: int | None, amount: int) -> Iterator[Hypothesis]:
    d = view.differences
    for place in get_args(Place):
        signature = counter(d, item, memcg, nid, place, amount)
        yield _wrong(view, item, memcg, nid, amount, place, signature)


def _wrong(
    view: View,
    item: str,
    memcg: int,
    nid: int | None,
    amount: int,
    place: str,
    signature: Signature,
    cause: str = "counter",
) -> Hypothesis:
    unit: Unit = next((k.unit for k in signature.rows if k.item == item), "pages")
    return Hypothesis(cause, (memcg,), (), nid, item, amount, unit, signature, place)


def _both_levels(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """A charge was counted too often, or too seldom, in the memcg and in its node alike."""
    if key.memcg is None or key.nid is None or key.identity == "node_levels":
        return
    d = view.differences
    for place in ("cpu", "folded"):
        some = [counter(d, key.item, key.memcg, n, place, amount) for n in (key.nid, None)]
        signature = added(*some)
        yield _wrong(view, key.item, key.memcg, key.nid, amount, place, signature, "counted-wrong")


def _node_of_root(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """A counter of any memcg on a node, which only the sum of all memcgs shows."""
    if key.identity != "node_levels":
        return
    for other in view.residuals:
        if other.identity == "page_levels" and other.item == key.item and other.memcg:
            nids = (key.nid,) if key.nid is not None else view.snapshot.image.nodes
            for nid in nids:
                yield from _at(view, key.item, other.memcg, nid, -amount)


def _of_some_memcg(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """A charge was counted too often in a memcg and its node: only the node does not have it."""
    if key.identity == "node_levels":
        signature = one_row(key, amount)
        yield Hypothesis("counted-wrong", (), (), key.nid, key.item, -amount, key.unit, signature)


def _node_counter(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """A counter of a node, charged or not: its total, or a CPU's part of it."""
    if key.memcg is not None:
        return
    totals = RowKey("node_totals", key.item, key.unit)
    if key.identity == "node_totals":
        # The sum of the nodes, or the total itself.
        yield _of_node(view, key.item, None, amount, "the total of all nodes", {key: amount})
        nodes = [k for k in view.residuals if k.item == key.item and k.nid is not None]
        for nid in {k.nid for k in nodes} or {None}:
            rows = _node_rows(view, key.item, nid, -amount) | {key: amount}
            yield _of_node(view, key.item, nid, -amount, "the value of the node", rows)
        return
    rows = _node_rows(view, key.item, key.nid, amount)
    if rows.get(key) != amount:
        rows = {key: amount}
    yield _of_node(view, key.item, key.nid, amount, "a CPU's changes", rows)
    if view.differences.applies(totals):
        rows = rows | {totals: -amount}
        yield _of_node(view, key.item, key.nid, amount, "the value of the node", rows)


def _node_rows(view: View, item: str, nid: int | None, amount: int) -> dict[RowKey, int]:
    """Return the rows that compare a counter of a node."""
    rows: dict[RowKey, int] = {}
    for identity in ("node_slab", "node_stack", "node_pagetable", "node_vmalloc", "node_levels"):
        for unit in ("pages", "KiB"):
            for where in (nid, None):
                key = RowKey(identity, item, unit, nid=where)
                if view.differences.has(key) or key in view.residuals:
                    rows[key] = amount
    cache = RowKey("node_levels", "NR_FILE_PAGES", "pages")
    if item == "NR_SWAPCACHE" and view.differences.applies(cache):
        rows[cache] = -amount
    return rows


def _of_node(
    view: View, item: str, nid: int | None, amount: int, place: str, rows: dict[RowKey, int]
) -> Hypothesis:
    unit = next(iter(rows)).unit
    return Hypothesis("node-counter", (), (), nid, item, amount, unit, Signature(rows), place)


def _local(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """A counter of a memcg without its descendants, with or without what CPUs have folded."""
    if key.memcg is None:
        return
    d, other = view.differences, "local_fold" if key.identity == "local" else "local"
    both = key._replace(identity=other)
    known = d.applies(both) and (other == "local_fold" or d.has(both) or both in view.residuals)
    for rows in ({key: amount}, {key: amount, both: amount}):
        if known or both not in rows:
            place, signature = " and ".join(sorted(row.identity for row in rows)), Signature(rows)
            yield _wrong(
                view, key.item, key.memcg, key.nid, amount, place, signature, "local-counter"
            )


def _page_counter(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """A page counter of one memcg, or of a memcg and all its ancestors."""
    if key.memcg is None:
        return
    d = view.differences
    for place, signature in (
        ("", level(d, key, amount)),
        ("and of all its ancestors", one_row(key, amount)),
    ):
        yield _wrong(view, key.item, key.memcg, None, amount, place, signature, "page-counter")


def _charge_stock(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """Pages in the stock of a CPU that were not charged, or that are gone."""
    if key.memcg is None:
        return
    signature = one_row(key, amount)
    yield _wrong(view, "nr_pages", key.memcg, None, -amount, "", signature, "charge-stock")


def _stock_bytes(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """Bytes in the object stock of a CPU, or left over in an obj_cgroup."""
    page = view.snapshot.image.page_size
    if key.objcg is None or key.memcg is None:
        return
    d, payer = view.differences, Payer(key.memcg, key.objcg)
    for size in (amount, amount - page, amount + page):
        signature = Signature({key: amount}, {pool_of(d, payer): size})
        yield Hypothesis(
            "stock-bytes",
            (key.memcg,),
            (key.objcg,),
            key.nid,
            "nr_bytes",
            -size,
            "bytes",
            signature,
        )


def _stock_slab(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """Slab bytes in the object stock of a CPU that were not counted yet."""
    if key.memcg is None:
        return
    d = view.differences
    some = [counter(d, key.item, key.memcg, n, "cpu", amount) for n in (key.nid, None)]
    yield _wrong(view, key.item, key.memcg, key.nid, amount, "", added(*some), "stock-slab-bytes")


def _leaked(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    if amount > 0:
        yield _referred(view, "reference-leaked", key, amount)


def _lost(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    if amount < 0:
        yield _referred(view, "reference-lost", key, amount)


def _referred(view: View, cause: str, key: RowKey, amount: int) -> Hypothesis:
    rows = {key: amount}
    css = view.snapshot.css.get(key.memcg or 0)
    if key.identity == "id_refs" and css is not None:
        # All references to the ID hold one to the memcg together, see mem_cgroup_id_put().
        held = int(css.id_refs > 0) - int(css.id_refs - amount > 0)
        of_memcg = RowKey("css_refs", "css.refcnt", "references", key.memcg)
        if held and view.differences.has(of_memcg):
            rows[of_memcg] = -held
    return Hypothesis(
        cause,
        () if key.memcg is None else (key.memcg,),
        () if key.objcg is None else (key.objcg,),
        key.nid,
        key.item,
        amount,
        "references",
        Signature(rows),
    )


def _lru_size(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    if key.memcg is not None:
        signature = one_row(key, amount)
        yield _wrong(view, key.item, key.memcg, key.nid, amount, "", signature, "lru-size")


def _cached_stack(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """
    A stack that a CPU keeps for a new task is charged.

    ``exit_task_stack_account()`` takes a stack off the counter of its node and uncharges it. If it
    did neither, the counter shows it, too.
    """
    size = amount * view.snapshot.image.page_size // 1024
    of_node = RowKey("node_stack", "NR_KERNEL_STACK_KB", "KiB", nid=key.nid)
    for rows in ({key: amount, of_node: size}, {key: amount}):
        if of_node not in rows or view.differences.has(of_node):
            yield Hypothesis(
                PROVED["charged-cached-stack"].cause,
                (),
                (),
                key.nid,
                key.item,
                amount,
                "pages",
                Signature(rows),
            )


def _call_site(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    rows = {key: amount}
    yield Hypothesis("call-site", (), (), None, key.item, amount, key.unit, Signature(rows))


def _too(h: Hypothesis) -> str:
    return f"{counted(abs(h.amount), h.unit)} too {'high' if h.amount > 0 else 'low'}"


def _where(h: Hypothesis) -> str:
    node = "" if h.nid is None else f" on node {h.nid}"
    return node + (f" of memcg {h.memcgs[0]:#x}" if h.memcgs else "")


_PLACES = {
    "cpu": "in a CPU's part, or in a flush of it",
    "folded": "in the folded value",
    "handed up": "in what children handed up, or in a flush of it",
}


def _say_counter(h: Hypothesis) -> str:
    wheres = [place.removesuffix(_OF_A_NODE) for place in h.place.split(", ")]
    places = "; or ".join(_PLACES[place] for place in wheres)
    node = " on one of its nodes" if h.place.endswith(_OF_A_NODE) else ""
    return f"{h.item}{_where(h)}{node} is {_too(h)}, {places}"


def _say_both(h: Hypothesis) -> str:
    times = "too much" if h.amount > 0 else "too little"
    whose = _where(h) if h.memcgs else f"{_where(h)} of some memcg"
    return (
        f"{h.item}{whose}, and that of the whole memcg with it, counted "
        f"{counted(abs(h.amount), h.unit)} {times}"
    )


def _say_node(h: Hypothesis) -> str:
    where = "" if h.nid is None else f" of node {h.nid}"
    return f"{h.item}{where} is {_too(h)}, in {h.place.replace(', ', ', or in ')}"


def _say_local(h: Hypothesis) -> str:
    return f"the local counter (state_local) of {h.item}{_where(h)} is {_too(h)}"


def _say_page_counter(h: Hypothesis) -> str:
    place = f" {h.place}" if h.place else ""
    return f"the page counter {h.item}{_where(h)}{place} is {_too(h)}"


def _say_charge_stock(h: Hypothesis) -> str:
    return f"the pages that CPUs have charged in advance{_where(h)} are {_too(h)}"


def _say_stock_bytes(h: Hypothesis) -> str:
    return (
        f"the unused bytes of obj_cgroup {h.objcgs[0] or 0:#x}, in nr_charged_bytes or in the "
        f"stock of a CPU, are {_too(h)}"
    )


def _say_stock_slab(h: Hypothesis) -> str:
    return f"{h.item}{_where(h)} in the object stock of a CPU is {_too(h)}"


def _say_references(h: Hypothesis) -> str:
    subject = f"memcg {h.memcgs[0]:#x}" if h.memcgs else h.item
    if h.objcgs:
        subject = f"obj_cgroup {h.objcgs[0] or 0:#x}"
    number = counted(abs(h.amount), "references")
    if h.amount > 0:
        return f"{h.item} of {subject} has {number} that nothing holds: a leak"
    return f"{h.item} of {subject} lacks {number} that are held: put too often, or not taken"


def _say_lru(h: Hypothesis) -> str:
    return f"the size of the LRU list {h.item}{_where(h)} is {_too(h)}"


def _say_cached_stack(h: Hypothesis) -> str:
    is_ = "is" if h.amount == 1 else "are"
    return f"{counted(h.amount, 'pages')} of cached kernel stacks on node {h.nid} {is_} charged"


def _say_call_site(h: Hypothesis) -> str:
    return f"the counter of the call site {h.item} is {_too(h)}"


_FLUSH = ("mem_cgroup_css_rstat_flush", "mem_cgroup_stat_aggregate")
_STAT = ("__mod_memcg_state", "__mod_memcg_lruvec_state")

CAUSES = (
    Cause(
        "counter",
        (*_COUNTERS, "local"),
        _counter,
        _say_counter,
        (*_STAT, *_FLUSH),
        "one value of a counter is wrong: a CPU's part, the folded value, or what children handed "
        "up; or a flush dropped or doubled a part",
    ),
    Cause("counter", ("node_levels",), _node_of_root, _say_counter, (*_STAT, *_FLUSH), ""),
    Cause(
        "counted-wrong",
        ("slab", "kernel_stack", "pagetable", "vmalloc", "hierarchy"),
        _both_levels,
        _say_both,
        ("mod_objcg_mlstate", *_STAT),
        "a counter of a memcg and that of its node are wrong alike",
        # 6.16 to 6.18 count here if the stock of the CPU is in use; fixed by dccd5ee2625d.
        dict.fromkeys(slab.ITEMS.values(), ("refill_obj_stock", "mod_objcg_mlstate", *_STAT)),
    ),
    Cause("counted-wrong", ("node_levels",), _of_some_memcg, _say_both, _STAT, ""),
    Cause(
        "stock-slab-bytes",
        ("slab",),
        _stock_slab,
        _say_stock_slab,
        ("__account_obj_stock", "drain_obj_stock"),
        "slab bytes that a CPU has in its object stock are wrong",
    ),
    Cause(
        "stock-bytes",
        ("objcg_bytes",),
        _stock_bytes,
        _say_stock_bytes,
        ("consume_obj_stock", "refill_obj_stock", "drain_obj_stock"),
        "the unused bytes of an `obj_cgroup` are wrong",
    ),
    Cause(
        "reference-leaked",
        _REFERENCES,
        _leaked,
        _say_references,
        ("obj_cgroup_put", "css_put", "mem_cgroup_id_put"),
        "a reference count has references that nothing holds",
    ),
    Cause(
        "reference-lost",
        _REFERENCES,
        _lost,
        _say_references,
        ("obj_cgroup_get", "obj_cgroup_put", "css_get", "css_put", "mem_cgroup_id_put"),
        "a reference count lacks references that are held",
    ),
    Cause(
        "page-counter",
        _PAGE_COUNTERS,
        _page_counter,
        _say_page_counter,
        ("page_counter_charge", "page_counter_try_charge", "page_counter_uncharge"),
        "a page counter of one memcg is wrong, or of a memcg and all its ancestors",
    ),
    Cause(
        "charge-stock",
        ("usage",),
        _charge_stock,
        _say_charge_stock,
        ("refill_stock", "consume_stock", "drain_stock"),
        "the pages in the charge stock of a CPU are wrong",
    ),
    Cause(
        "local-counter",
        ("local", "local_fold"),
        _local,
        _say_local,
        (*_FLUSH, "reparent_state_local"),
        "a local counter, which excludes descendants, is wrong",
    ),
    Cause(
        "lru-size",
        ("lru",),
        _lru_size,
        _say_lru,
        ("update_lru_size", "lru_gen_update_size"),
        "the size of an LRU list is not the number of its pages",
    ),
    Cause(
        "node-counter",
        (
            *("node_slab", "node_stack", "node_pagetable", "node_vmalloc", "node_levels"),
            "node_totals",
        ),
        _node_counter,
        _say_node,
        ("mod_node_state", "refresh_cpu_vm_stats", "node_page_state_add"),
        "a counter of a whole node is wrong",
    ),
    Cause(
        PROVED["charged-cached-stack"].cause,
        ("cached_stacks",),
        _cached_stack,
        _say_cached_stack,
        PROVED["charged-cached-stack"].functions,
        PROVED["charged-cached-stack"].meaning,
    ),
    Cause(
        "call-site",
        ("alloc_tags",),
        _call_site,
        _say_call_site,
        ("alloc_tag_add", "alloc_tag_sub"),
        "the counter of a call site is wrong",
    ),
)
