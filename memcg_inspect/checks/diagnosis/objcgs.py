# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Cause: an obj_cgroup that belongs to another memcg
--------------------------------------------------

Everything that is charged to the obj_cgroup moves with it, to the counters of a memcg that never
counted it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

from memcg_inspect.checks.diagnosis.cause import Cause, Hypothesis
from memcg_inspect.checks.diagnosis.differences import Differences, Pool, Signature, View, added
from memcg_inspect.checks.diagnosis.effects import (
    Charge,
    Payer,
    pool_of,
    taken_from,
    taken_from_all,
)
from memcg_inspect.checks.diagnosis.proofs import PROVED
from memcg_inspect.checks.identities import kmem
from memcg_inspect.checks.rows import RowKey
from memcg_inspect.model import Objcg, counted

__all__ = ("CAUSES",)


def _owner_changed(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """Yield the obj_cgroups in a list of a memcg that belong neither to it nor to its parent."""
    d, snapshot = view.differences, view.snapshot
    listed = snapshot.memcgs.get(key.memcg or 0)
    if listed is None:
        return
    for objcg, number in d.listed(key.memcg, key.nid):
        now = snapshot.payer(objcg.address)
        if number != amount or now == listed.payer:
            continue
        yield Hypothesis(
            PROVED["misplaced-objcg"].cause,
            (listed.payer,) if now is None else (listed.payer, now),
            (objcg.address,),
            objcg.nid,
            "objcg->memcg",
            number,
            "references",
            d.remembered((objcg, listed.payer, now), partial(_moved, d, objcg, listed.payer, now)),
            place=f"{objcg.memcg:#x}" if now is None else "",
        )


def _node_changed(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """
    Yield the obj_cgroups of a memcg and a node that say that they are of another node.

    On kernels that count kernel memory by node, what is charged to one is looked for there.
    """
    d, snapshot = view.differences, view.snapshot
    if key.nid is None or kmem.BY_NODE not in snapshot.features.items:
        return
    for objcg, number in d.listed(key.memcg, key.nid):
        payer = snapshot.payer(objcg.address)
        if number != amount or payer is None or objcg.nid in (None, key.nid):
            continue
        rows = {key: number}
        if objcg.set:
            # The set has this obj_cgroup as the entry of its own node.
            of_set = d.set_row(objcg.set)
            rows.update({of_set: 1} if of_set is not None else {})
        size = sum(snapshot.objcg_bytes[objcg.address].values())
        pools: dict[Pool, int] = {(payer, key.nid): size, (payer, objcg.nid): -size}
        yield Hypothesis(
            PROVED["misplaced-objcg"].cause,
            (payer,),
            (objcg.address,),
            key.nid,
            "objcg->nid",
            number,
            "references",
            Signature(rows, pools),
            place=f"node {objcg.nid}",
        )


def _moved(d: Differences, objcg: Objcg, was: int, now: int | None) -> Signature:
    """
    Return the signature of an obj_cgroup with another memcg.

    :param now: who pays for it; ``None`` if it refers to no memcg
    """
    snapshot = d.snapshot
    rows: Counter[RowKey] = Counter()
    for place in objcg.places:
        rows[RowKey("objcg_lists", "objcg_list", "references", place.memcg, place.nid)] += 1
    for task in snapshot.tasks:
        if objcg.address in task.objcgs and task.memcg != now and not task.stale:
            payer = snapshot.payer(task.memcg) or 0
            rows[RowKey("task_objcg", "task->objcg", "references", payer)] += 1
    # If it is that of a memcg that was removed, it looks as if it had not been reparented.
    rows[RowKey("reparenting", "objcg->memcg", "references", objcg.memcg, objcg.nid)] -= 1
    listed = Signature({k: v for k, v in rows.items() if d.has(k)})
    signature = added(listed, _held(d, objcg, was, was))
    if now is None:
        return signature
    return added(signature, _held(d, objcg, now, objcg.memcg), sign=-1)


def _left_behind(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """Yield the obj_cgroups of a removed memcg that are on its parent's list, and still its own."""
    d, snapshot = view.differences, view.snapshot
    memcg = snapshot.memcgs.get(key.memcg or 0)
    if memcg is None:
        return
    objcgs = [o for o in snapshot.objcgs.values() if (o.memcg, o.nid) == (memcg.address, key.nid)]
    if len(objcgs) != -amount:
        return
    rows = Counter({key: amount})
    for objcg in objcgs:
        for place in objcg.places:
            listed = RowKey("objcg_lists", "objcg_list", "references", place.memcg, place.nid)
            if place.memcg == memcg.payer and d.has(listed):
                rows[listed] += 1
    yield Hypothesis(
        PROVED["not-reparented"].cause,
        (memcg.address,),
        tuple(objcg.address for objcg in objcgs),
        key.nid,
        key.item,
        amount,
        "references",
        added(
            added(Signature(rows), *(_on_lists(d, o, memcg.payer) for o in objcgs)),
            *(_on_lists(d, o, memcg.address) for o in objcgs),
            sign=-1,
        ),
    )


def _on_lists(d: Differences, objcg: Objcg, memcg: int) -> Signature:
    """Return the pages of an obj_cgroup that are on LRU lists, as if on those of a memcg."""
    lru = d.snapshot.lru
    return Signature(
        {
            RowKey("lru", item, "pages", memcg, nid): number
            for (owner, nid, item), number in (lru.pages.items() if lru is not None else ())
            if owner == objcg.address
        }
    )


def _held(d: Differences, objcg: Objcg, memcg: int, listed: int) -> Signature:
    """
    Return everything that is charged to an obj_cgroup, as if a memcg paid for it.

    :param listed: the memcg on whose lists its pages are, which may have been removed
    """
    snapshot, payer = d.snapshot, Payer(memcg, None)
    pool = pool_of(d, Payer(memcg, objcg.address))
    some = [taken_from_all(d, objcg.address, memcg), _on_lists(d, objcg, listed)]
    for stock in snapshot.stocks:
        if stock.objcg != objcg.address:
            continue
        some.append(Signature({}, {pool: stock.nr_bytes}))
        for detail, size in (
            ("reclaimable", stock.reclaimable),
            ("unreclaimable", stock.unreclaimable),
        ):
            if stock.nid is not None and size:
                counted = taken_from(d, payer, Charge("slab", detail, stock.nid, -size, 0))
                some.append(counted._replace(pools={}))
    some.append(Signature({}, {pool: objcg.nr_charged_bytes}))
    return added(*some)


def _cached_another(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """A task has cached another obj_cgroup: it holds the reference of the one that it had."""
    snapshot = view.snapshot
    if key.memcg is None:
        return
    references = (
        RowKey("references", "refcnt", "references", snapshot.payer(o), objcg.nid, o)
        for o in view.differences.cached(key.memcg)
        if (objcg := snapshot.objcgs.get(o)) is not None
    )
    without = [has for has in references if view.residuals.get(has) == -1]
    for had in view.of_memcg("references", key.memcg):
        if view.residuals[had] != 1:
            continue
        for has in without:
            rows = {key: amount, had: 1, has: -1}
            yield Hypothesis(
                PROVED["stale-task-objcg"].cause,
                (key.memcg,) if has.memcg is None else (key.memcg, has.memcg),
                (had.objcg, has.objcg),
                key.nid,
                key.item,
                amount,
                "references",
                Signature(rows),
            )


def _say_cached(h: Hypothesis) -> str:
    return (
        f"a task of memcg {h.memcgs[0]:#x} had cached obj_cgroup {h.objcgs[0] or 0:#x}, and has "
        f"{h.objcgs[1] or 0:#x} of memcg {h.memcgs[-1]:#x} in its place"
    )


def _say(h: Hypothesis) -> str:
    if h.item == "objcg->nid":
        return (
            f"obj_cgroup {h.objcgs[0] or 0:#x} is the one of memcg {h.memcgs[0]:#x} for node "
            f"{h.nid}, and says that it is of {h.place}"
        )
    if len(h.memcgs) == 1:
        return (
            f"obj_cgroup {h.objcgs[0] or 0:#x} is one of memcg {h.memcgs[0]:#x}, and refers to "
            f"{h.place}, which is no memcg: nothing pays for its charges"
        )
    return (
        f"obj_cgroup {h.objcgs[0] or 0:#x} is one of memcg {h.memcgs[0]:#x}, and refers to memcg "
        f"{h.memcgs[1]:#x}, to which all its charges went"
    )


def _say_left_behind(h: Hypothesis) -> str:
    node = "" if h.nid is None else f" of node {h.nid}"
    return (
        f"memcg {h.memcgs[0]:#x} is offline, but {counted(-h.amount, 'obj_cgroups')}{node} still "
        f"{'belongs' if h.amount == -1 else 'belong'} to it and not to its parent"
    )


CAUSES = (
    Cause(
        PROVED["stale-task-objcg"].cause,
        ("task_objcg",),
        _cached_another,
        _say_cached,
        PROVED["stale-task-objcg"].functions,
        PROVED["stale-task-objcg"].meaning,
    ),
    Cause(
        PROVED["misplaced-objcg"].cause,
        ("objcg_lists",),
        _owner_changed,
        _say,
        PROVED["misplaced-objcg"].functions,
        PROVED["misplaced-objcg"].meaning,
    ),
    Cause(
        PROVED["misplaced-objcg"].cause,
        ("objcg_lists",),
        _node_changed,
        _say,
        PROVED["misplaced-objcg"].functions,
        "",
    ),
    Cause(
        PROVED["not-reparented"].cause,
        ("reparenting",),
        _left_behind,
        _say_left_behind,
        PROVED["not-reparented"].functions,
        PROVED["not-reparented"].meaning,
    ),
)
