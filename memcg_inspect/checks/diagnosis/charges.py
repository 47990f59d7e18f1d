# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Causes: a charge that is found elsewhere, or not at all
-------------------------------------------------------

A row of charges says how many bytes one charge may have. Whether it is another memcg's, or
nobody's, follows from the other rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, islice
from typing import NamedTuple

from memcg_inspect.checks.diagnosis.cause import Cause, Hypothesis
from memcg_inspect.checks.diagnosis.differences import Signature, View, added
from memcg_inspect.checks.diagnosis.effects import Charge, Payer, row_of_references, taken_from
from memcg_inspect.checks.diagnosis.proofs import PROVED
from memcg_inspect.checks.identities import kmem, slab
from memcg_inspect.checks.rows import RowKey
from memcg_inspect.model import counted

__all__ = ("CAUSES",)

_DETAILS = {item: detail for detail, item in slab.ITEMS.items()}
_OBJECTS = ("slab", "percpu", "zswap")
_ROWS = (
    *("slab", "percpu", "zswap", "kmem", "usage", "sock", "kernel_stack", "pagetable", "vmalloc"),
    *("lru", "objcg_bytes"),
)
_USES = {"kernel_stack": "stack", "pagetable": "table", "vmalloc": "vmalloc"}
#: Of one charge, and of several.
_NAMES = {
    "slab": ("a slab object", "slab objects"),
    "percpu": ("a percpu allocation", "percpu allocations"),
    "zswap": ("a zswap entry", "zswap entries"),
    "sock": ("socket memory", "pieces of socket memory"),
    "lru": ("user memory or page cache", "folios of user memory or page cache"),
}
_USED_FOR = {
    "stack": ("memory of a kernel stack", "blocks of kernel stacks"),
    "table": ("memory of page tables", "blocks of page tables"),
    "vmalloc": ("memory of a vmalloc area", "blocks of vmalloc areas"),
    "large_kmalloc": ("a large kmalloc", "large kmallocs"),
    "other": ("a block of kernel memory", "blocks of kernel memory"),
}
#: The least that one object can be charged with: a pointer, and that to its obj_cgroup.
_LEAST = 16
#: Objects and percpu allocations (PCPU_MIN_ALLOC_SIZE) are aligned at least like this.
_LEAST_WORD = 4
#: Ways to share out half pages among nodes that are tried.
_MOST_HALVES = 8


def _starts(view: View, key: RowKey, amount: int) -> Iterator[tuple[RowKey, int]]:
    """
    Yield rows of charges that a fault can be recognized from, and what it adds to them.

    Where another fault adds to the same counter, the obj_cgroup shows the bytes of the first.
    """
    if key.identity != "objcg_bytes":
        yield key, amount
        return
    for identity in _OBJECTS:
        for other in view.of_memcg(identity, key.memcg):
            if other.unit == "bytes" and view.residuals[other] != amount:
                yield other, amount


def _charges(view: View, key: RowKey, size: int) -> Iterator[Charge]:
    """
    Yield the charges that a row can be about.

    :param size: what the row is off by, in its unit
    """
    page = view.snapshot.image.page_size
    if key.identity == "slab":
        yield Charge("slab", _DETAILS[key.item], key.nid, size)
        if size % page == 0 and key.item == slab.ITEMS["unreclaimable"]:
            yield Charge("kmem", "large_kmalloc", key.nid, size)
    elif key.identity == "percpu":
        yield Charge("percpu", "data", None, size)
        yield from _of_several_nodes(view, key, size)
    elif key.identity == "zswap" and key.item == "MEMCG_ZSWAP_B":
        yield Charge("zswap", "compressed", None, size)
        if size == page:
            yield Charge("zswap", "incompressible", None, size)
    elif key.identity in _USES and key.memcg is not None:
        size = size * 1024 if key.unit == "KiB" else size * page
        if size % page == 0:
            yield from _pages(view, _USES[key.identity], key.nid, size)
    elif key.identity == "kmem":
        yield from _pages(view, "other", key.nid, size * page)
    elif key.identity == "lru":
        what = Charge("lru", key.item, key.nid, size * page)
        states = _states(view, key)
        if states:
            yield what._replace(states=states)
        yield what
    elif key.identity == "usage" and not view.differences.keeps("lru"):
        yield Charge("lru", "", None, size * page)
    elif key.identity == "sock":
        yield Charge("sock", "", None, size * page)


def _states(view: View, key: RowKey) -> tuple[str, ...]:
    """Return the counters of user pages that are off by as much as the size of an LRU list."""
    return tuple(
        other.item
        for other in view.of_memcg("user_pages", key.memcg)
        if view.residuals[other] == view.residuals[key] and other.nid in (None, key.nid)
    )


def _of_several_nodes(view: View, key: RowKey, size: int) -> Iterator[Charge]:
    """
    Yield a percpu allocation that the obj_cgroups of several nodes pay for.

    On kernels that count kernel memory by node, each pays for the pages on its node. The node of
    the page of a CPU that is not online is that of the CPU that allocated it, so only the rows
    tell how much each node has: ``kmem`` in pages, and ``objcg_bytes`` what is beyond these.
    """
    if kmem.BY_NODE not in view.snapshot.features.items:
        return
    sign, page = 1 if view.residuals[key] > 0 else -1, view.snapshot.image.page_size
    beyond = {
        row.nid: sign * view.residuals[row]
        for row in view.of_memcg("objcg_bytes", key.memcg)
        if row.nid is not None
    }
    whole = {
        row.nid: sign * view.residuals[row] * page
        for row in view.of_memcg("kmem", key.memcg)
        if row.nid is not None
    }
    less_than_a_page = {nid: part % page for nid, part in beyond.items()}
    for parts in (*_sums(whole, beyond, size, page), less_than_a_page):
        if len(parts) > 1 and sum(parts.values()) == size and min(parts.values()) > 0:
            yield Charge("percpu", "data", None, size, parts=tuple(sorted(parts.items())))


def _sums(
    whole: Mapping[int, int], beyond: Mapping[int, int], size: int, page: int
) -> Iterator[dict[int, int]]:
    """
    Yield what each node can have of an allocation, in bytes.

    Rows of whole pages are rounded, so half a page may be in them or not.

    :param whole: whole pages by node, in bytes
    :param beyond: bytes beyond whole pages by node, half a page at most
    :param size: sum of all nodes
    """
    halves = [nid for nid, part in beyond.items() if abs(part) == page // 2]
    parts = {nid: whole.get(nid, 0) + beyond.get(nid, 0) for nid in (*whole, *beyond)}
    parts |= {nid: whole.get(nid, 0) - page // 2 for nid in halves}
    more = (size - sum(parts.values())) // page
    if 0 <= more <= len(halves):
        for chosen in islice(combinations(halves, more), _MOST_HALVES):
            some = parts | {nid: parts[nid] + page for nid in chosen}
            yield {nid: part for nid, part in some.items() if part}


def _pages(view: View, detail: str, nid: int | None, size: int) -> Iterator[Charge]:
    """Yield a block of pages that holds one reference, and single pages that hold one each."""
    number = size // view.snapshot.image.page_size
    yield Charge("kmem", detail, nid, size, number)
    if number > 1:
        yield Charge("kmem", detail, nid, size, 1)


def _together(view: View, what: Charge, *payers: tuple[Payer, int]) -> Iterator[Charge]:
    """
    Yield a charge, and the same bytes as those of several charges.

    One fault, such as a range of a vector that was overwritten, changes several objects of a slab.
    Then the references tell how many.

    :param payers: who lost charges (1) or has too many (-1)
    """
    if _is_possible(view, what, *(payer for payer, _ in payers)):
        yield what
    if what.parts:
        return
    keys = [(row_of_references(view.differences, p, what.kind), sign) for p, sign in payers]
    numbers = {sign * view.residuals.get(key, 0) for key, sign in keys if key is not None}
    least = _LEAST if what.kind in _OBJECTS else view.snapshot.image.page_size
    for number in sorted(numbers - {what.references}):
        if number > 1 and number * least <= what.bytes:
            several = what._replace(references=number, number=number, together=True)
            if _is_possible(view, several):
                yield several


def _is_possible(view: View, what: Charge, *payers: Payer) -> bool:
    """Return whether the kernel makes charges of this size."""
    limits, page = view.snapshot.limits, view.snapshot.image.page_size
    if what.kind == "sock":
        return True  # all that one socket has charged
    if what.kind == "slab" and what.bytes < _LEAST:
        return False
    if what.kind in ("slab", "percpu") and what.bytes % _LEAST_WORD:
        return False
    most = {"slab": limits.slab_object, "percpu": limits.percpu, "zswap": page}
    # References of single pages, such as those of a vmalloc area, tell how many there are.
    rows = (row_of_references(view.differences, payer, what.kind) for payer in payers)
    is_told = what.kind == "kmem" and any(rows)
    number = what.references if what.together or is_told else 1
    return what.bytes <= number * most.get(what.kind, limits.block * page)


def _payers(view: View, memcg: int, what: Charge) -> list[Payer]:
    if what.kind == "sock":
        return [Payer(memcg, None)]
    if what.parts:
        return _first_of_each_set(view, memcg, what)
    return [Payer(memcg, objcg) for objcg in view.objcgs(memcg)]


def _first_of_each_set(view: View, memcg: int, what: Charge) -> list[Payer]:
    """Return one obj_cgroup of each set that has one for all nodes of a charge."""
    objcgs, first = view.snapshot.objcgs, dict[tuple[int, ...], Payer]()
    for objcg in view.objcgs(memcg):
        siblings = objcgs[objcg].siblings if objcg is not None else ()
        if all(nid < len(siblings) and siblings[nid] in objcgs for nid, _ in what.parts):
            first.setdefault(siblings, Payer(memcg, objcg))
    return list(first.values())


def _owner_changed(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """A charge was counted for one memcg, and belongs to another one: one row each way."""
    for start, size in _starts(view, key, amount):
        if start.memcg is None:
            continue
        for what in _charges(view, start, abs(size)):
            for other in view.opposite(start, size):
                if other.memcg is None:
                    continue
                was, now = (start.memcg, other.memcg) if size > 0 else (other.memcg, start.memcg)
                for first in _payers(view, was, what):
                    for second in _payers(view, now, what):
                        for some in _together(view, what, (first, 1), (second, -1)):
                            yield _moved(view, some, first, second)


def _moved(view: View, what: Charge, first: Payer, second: Payer) -> Hypothesis:
    d = view.differences
    signature = added(taken_from(d, first, what), taken_from(d, second, what), sign=-1)
    return Hypothesis(
        "object-owner",
        (first.memcg, second.memcg),
        (None, None) if what.parts else (first.objcg, second.objcg),
        what.nid,
        what.kind,
        what.bytes,
        "bytes",
        signature,
        charge=what,
    )


def _not_found(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """A charge was counted, and no object refers to the memcg for it."""
    for start, size in _starts(view, key, amount):
        if start.memcg is None or size < 0:
            continue
        for what in _charges(view, start, size):
            for payer in _payers(view, start.memcg, what):
                for some in _together(view, what, (payer, 1)):
                    yield _of_one(view, "still-charged", payer, some)


def _twice(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """A charge was counted twice: as if there were a second one, without its reference."""
    for start, size in _starts(view, key, amount):
        if start.memcg is None or size < 0:
            continue
        for what in _charges(view, start, size):
            if what.kind == "lru":
                continue  # a folio is on one list
            if not _is_possible(view, what):
                continue
            for payer in _payers(view, start.memcg, what):
                yield _of_one(view, "charged-twice", payer, what._replace(references=0))


def _not_counted(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """An object refers to the memcg, and was not counted, with or without its reference."""
    for start, size in _starts(view, key, amount):
        if start.memcg is None or size > 0:
            continue
        for what in _charges(view, start, -size):
            for payer in _payers(view, start.memcg, what):
                if what.kind != "lru" and _is_possible(view, what):
                    alone = what._replace(references=0)
                    yield _of_one(view, "not-counted", payer, alone, sign=-1)
                for some in _together(view, what, (payer, -1)):
                    yield _of_one(view, "not-counted", payer, some, sign=-1)


def _of_one(view: View, cause: str, payer: Payer, what: Charge, sign: int = 1) -> Hypothesis:
    found = taken_from(view.differences, payer, what)
    signature = added(Signature({}), found, sign=sign)
    objcgs = (None,) if what.parts else (payer.objcg,)
    return Hypothesis(
        cause,
        (payer.memcg,),
        objcgs,
        what.nid,
        what.kind,
        what.bytes,
        "bytes",
        signature,
        charge=what,
    )


def _resized(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """The bytes of a charge were changed after it was counted; its number was not."""
    if key.memcg is None or (key.identity, key.item) != ("zswap", "MEMCG_ZSWAP_B"):
        return
    what = Charge("zswap", "compressed", None, amount, 0, 0)
    for payer in _payers(view, key.memcg, what):
        yield _of_one(view, "zswap-length", payer, what)


def _socket_bytes(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """A socket has charged no whole pages, and what is missing changes the pages, too."""
    if key.memcg is None:
        return
    d, page = view.differences, view.snapshot.image.page_size
    for other in view.of_memcg("sock_bytes", key.memcg):
        what = Charge("sock", "", None, abs(amount) * page, 0)
        whole = taken_from(d, Payer(key.memcg, None), what)
        proof = Signature({other: view.residuals[other]})
        yield Hypothesis(
            PROVED["socket-charge-not-whole-pages"].cause,
            (key.memcg,),
            (),
            None,
            "sk_forward_alloc",
            view.residuals[other],
            "references",
            added(proof, whole, sign=1 if amount > 0 else -1),
        )


def _counted_elsewhere(view: View, key: RowKey, amount: int, cause: str) -> Iterator[Hypothesis]:
    """A slab object was counted on another node, or as another item, of the same memcg."""
    if key.memcg is None or amount < 0:
        return
    for other in view.of_memcg("slab", key.memcg):
        same_item, same_node = other.item == key.item, other.nid == key.nid
        wanted = (True, False) if cause == "wrong-node" else (False, True)
        if view.residuals[other] > 0 or (same_item, same_node) != wanted:
            continue
        counted_as = Charge("slab", _DETAILS[key.item], key.nid, amount, 0)
        found_as = Charge("slab", _DETAILS[other.item], other.nid, amount)
        if not _is_possible(view, found_as):
            continue
        payer = Payer(key.memcg, None)
        signature = added(
            taken_from(view.differences, payer, counted_as),
            taken_from(view.differences, payer, found_as),
            sign=-1,
        )
        yield Hypothesis(
            cause,
            (key.memcg,),
            (),
            other.nid,
            other.item,
            amount,
            "bytes",
            signature._replace(pools={}),  # wherever it was counted, it was charged
            place=f"node {key.nid}" if same_item else key.item,
            charge=found_as,
        )


def _wrong_node(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    yield from _counted_elsewhere(view, key, amount, "wrong-node")


def _wrong_item(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    yield from _counted_elsewhere(view, key, amount, "wrong-item")


def _name(h: Hypothesis) -> str:
    what = h.charge
    if what is None:
        return "a charge"
    one, several = _USED_FOR[what.detail] if what.kind == "kmem" else _NAMES[what.kind]
    where = "" if what.nid is None else f" on node {what.nid}"
    if what.parts:
        where = f" on {counted(len(what.parts), 'nodes')}"
    size = counted(abs(h.amount), "bytes")
    if what.together:
        return f"{what.references:,} {several} of {size} together{where}"
    return f"{one} of {size}{where}"


class _Words(NamedTuple):
    """Words of a sentence about one charge, or about several."""

    was: str = "was"
    is_: str = "is"
    refers: str = "refers"
    it: str = "it"
    its_owner: str = "its owner"


_ONE, _SEVERAL = _Words(), _Words("were", "are", "refer", "them", "their owners")


def _words(h: Hypothesis) -> _Words:
    return _SEVERAL if h.charge is not None and h.charge.together else _ONE


def _of(h: Hypothesis, number: int) -> str:
    objcg = h.objcgs[number] if number < len(h.objcgs) else None
    memcg = f"memcg {h.memcgs[number]:#x}"
    return memcg if objcg is None else f"obj_cgroup {objcg:#x} of {memcg}"


def _say_moved(h: Hypothesis) -> str:
    word = _words(h)
    if len(h.memcgs) == len(h.objcgs):
        now = _of(h, 1)
    elif h.objcgs[-1] is None:
        now = "what is no obj_cgroup"
    else:
        now = f"{h.objcgs[-1]:#x}, which is no obj_cgroup"
    return f"{_name(h)} {word.was} charged to {_of(h, 0)}, and now {word.refers} to {now}"


def _say_not_found(h: Hypothesis) -> str:
    word = _words(h)
    return (
        f"{_name(h)} {word.is_} charged to {_of(h, 0)}, and nothing refers to "
        f"{word.it}: freed, or {word.its_owner} lost"
    )


def _say_twice(h: Hypothesis) -> str:
    return f"{_name(h)} was charged twice to {_of(h, 0)}, or was freed without being uncharged"


def _say_not_counted(h: Hypothesis) -> str:
    word = _words(h)
    return f"{_name(h)} {word.refers} to {_of(h, 0)}, and {word.was} not charged"


def _say_resized(h: Hypothesis) -> str:
    more = "longer" if h.amount > 0 else "shorter"
    return (
        f"a zswap entry was {counted(abs(h.amount), 'bytes')} {more} when it was charged to "
        f"{_of(h, 0)} than its length says"
    )


def _say_socket_bytes(h: Hypothesis) -> str:
    return f"{counted(h.amount, 'sockets')} of {_of(h, 0)} charged no whole number of pages"


def _say_wrong_node(h: Hypothesis) -> str:
    return f"{_name(h)} was counted on {h.place}"


def _say_wrong_item(h: Hypothesis) -> str:
    return f"{_name(h)} was counted as {h.place}, and is {h.item}"


#: By kind of charge.
_SET_OWNER = {
    "slab": ("__memcg_slab_post_alloc_hook",),
    "percpu": ("pcpu_memcg_post_alloc_hook",),
    "zswap": ("zswap_store", "zswap_store_page"),
    "kmem": ("__memcg_kmem_charge_page", "split_page_memcg"),
    "lru": ("charge_memcg", "mem_cgroup_migrate"),
    "sock": ("mem_cgroup_sk_alloc",),
}
_CHARGE = {
    "slab": ("__memcg_slab_post_alloc_hook",),
    "percpu": ("pcpu_memcg_post_alloc_hook",),
    "zswap": ("obj_cgroup_charge_zswap",),
    "kmem": ("__memcg_kmem_charge_page",),
    "lru": ("charge_memcg",),
    "sock": ("__sk_mem_raise_allocated",),
}
_UNCHARGE = {
    "slab": ("__memcg_slab_free_hook",),
    "percpu": ("pcpu_memcg_free_hook",),
    "zswap": ("zswap_entry_free", "obj_cgroup_uncharge_zswap"),
    "kmem": ("__memcg_kmem_uncharge_page",),
    "lru": ("uncharge_folio",),
    "sock": ("__sk_mem_reduce_allocated",),
}
_BOTH = {kind: (*_CHARGE[kind], *_UNCHARGE[kind]) for kind in _CHARGE}

CAUSES = (
    Cause(
        PROVED["socket-charge-not-whole-pages"].cause,
        ("sock", "tcpmem"),
        _socket_bytes,
        _say_socket_bytes,
        PROVED["socket-charge-not-whole-pages"].functions,
        PROVED["socket-charge-not-whole-pages"].meaning,
    ),
    Cause(
        "object-owner",
        _ROWS,
        _owner_changed,
        _say_moved,
        (),
        "the owner of an object, of pages, of an allocation or of an entry was changed",
        _SET_OWNER,
    ),
    Cause(
        "still-charged",
        _ROWS,
        _not_found,
        _say_not_found,
        (),
        "something was freed, or its owner lost, and it is still charged",
        _UNCHARGE,
    ),
    Cause(
        "not-counted",
        _ROWS,
        _not_counted,
        _say_not_counted,
        (),
        "something refers to a memcg that was not charged for it",
        _CHARGE,
    ),
    Cause(
        "charged-twice",
        _ROWS,
        _twice,
        _say_twice,
        (),
        "something was charged twice, or its reference was put without uncharging it",
        _BOTH,
    ),
    Cause(
        "zswap-length",
        ("zswap",),
        _resized,
        _say_resized,
        ("zswap_store_page", "zswap_entry_free"),
        "the length of a zswap entry is not the one that was charged",
    ),
    Cause(
        "wrong-node",
        ("slab",),
        _wrong_node,
        _say_wrong_node,
        ("account_slab", "mod_objcg_mlstate", "__account_obj_stock"),
        "a slab object was counted on another node than its own",
    ),
    Cause(
        "wrong-item",
        ("slab",),
        _wrong_item,
        _say_wrong_item,
        ("cache_vmstat_idx", "mod_objcg_mlstate"),
        "a slab object was counted as reclaimable and is not, or the other way round",
    ),
)
