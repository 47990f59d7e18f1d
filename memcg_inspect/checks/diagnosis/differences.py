# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Differences to explain
----------------------

A :class:`Signature` is what a cause adds to the differences of rows. Signatures are added up and
compared with the rows as they were read. Most rows are linear. These are not:

* ``objcg_bytes`` compares bytes modulo whole pages;
* rows that contain all kernel memory of a memcg (``kmem``, ``kmem_usage``, ``usage``, and
  ``hierarchy`` of the same counter) add up the bytes of objects, and round to whole pages. So a
  signature has these bytes by themselves, as *pools*;
* a local counter of slab memory, and a counter of a node that also counts what is not charged, may
  be too high in the image without a difference.

What is not known to be exact (``in-flight``, ``moving``, ``unverifiable``) may have any difference.
But if a cause leaves nothing of it, or exactly what a stopped CPU may have half done, the row
speaks for this cause.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from memcg_inspect.checks.identities import kmem, node_levels, slab
from memcg_inspect.checks.registry import CHECKS, check_of
from memcg_inspect.checks.rows import RowKey, row_key
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Objcg
from memcg_inspect.report import Row

__all__ = ("Differences", "Pool", "Signature", "View", "added")

#: ``struct mem_cgroup *`` whose pages objects are charged from, and the node of these pages on
#: kernels that account by node
Pool = tuple[int, int | None]

#: Identities that leave out rows in which both sides are 0.
_SPARSE = frozenset(
    (
        *("lru", "user_pages", "page_levels", "local", "local_fold", "node_levels"),
        *("node_totals", "alloc_tags"),
        *("zone_free", "zone_free_area", "zone_lru", "zone_totals"),
        *("hugetlb_usage", "hugetlb_nodes"),
    )
)
#: Rows, and obj_cgroups, that are tried as the other side of a charge that was moved, if none
#: differs by as much.
_MOST_PARTNERS = 4
#: Rows that are tried if they differ by as much. Of more, no row tells which one is the other side.
_MOST_SAME = 64
_SLAB_ITEMS = frozenset(slab.ITEMS.values())
_KMEM_ITEMS = frozenset(kmem.CHECK.items)


class Signature(NamedTuple):
    """
    What a cause adds to the differences of rows (claimed less found).

    :ivar rows: amounts by row, in the unit of the row
    :ivar pools: bytes of objects that were charged and not found
    """

    rows: Mapping[RowKey, int]
    pools: Mapping[Pool, int] = {}


def added(*signatures: Signature, sign: int = 1) -> Signature:
    """Return the sum of signatures, of which all but the first are taken *sign* times."""
    rows, pools = dict(signatures[0].rows), dict(signatures[0].pools)
    for other in signatures[1:]:
        for key, amount in other.rows.items():
            rows[key] = rows.get(key, 0) + sign * amount
        for pool, size in other.pools.items():
            pools[pool] = pools.get(pool, 0) + sign * size
    return Signature(
        {key: amount for key, amount in rows.items() if amount},
        {pool: size for pool, size in pools.items() if size},
    )


class Differences:
    """
    The rows of a report, as far as causes have to explain them.

    :param findings: rows that differ and that are findings. Others are explained already.
    :ivar snapshot: what was read
    :ivar goal: if given, the differences to explain instead of those that were read
    """

    def __init__(
        self, snapshot: Snapshot, rows: Sequence[Row], findings: Collection[RowKey]
    ) -> None:
        self.snapshot = snapshot
        self._findings = findings
        self.page = snapshot.image.page_size
        self.goal: Signature | None = None
        self._rows = {row_key(row): row for row in rows}
        self._observed: dict[RowKey, int | None] = {}
        self._kept = {c.name for c in CHECKS if c.why_not_kept(snapshot) is None}
        self._counters: dict[tuple[str, int, int | None], RowKey] = {}
        for key, row in self._rows.items():
            if key.memcg is None or key.identity == "hierarchy" or check_of(row).counters_only:
                continue
            if row.claimed is None or "folded" in row.claimed:
                self._counters[key.item, key.memcg, key.nid] = key
        self._half_done = frozenset(
            held.bytes
            for cpu in snapshot.running
            if cpu.busy
            for held in cpu.held or ()
            if held.bytes
        )
        self._doubtful: defaultdict[tuple[str, str, int | None], list[RowKey]]
        self._doubtful = defaultdict(list)
        for key, row in self._rows.items() if self._half_done else ():
            if row.status in ("in-flight", "unverifiable") and row.difference:
                self._doubtful[key.identity, key.item, key.nid].append(key)
        self._speaking = frozenset(key for some in self._doubtful.values() for key in some)
        self._made: dict[object, Signature] = {}
        self._of_pools: dict[Pool, tuple[RowKey, ...]] = {}
        self._chains: dict[int, tuple[int, ...]] = {}
        self._objcgs: defaultdict[int | None, list[int]] = defaultdict(list)
        self._listed: defaultdict[tuple[int | None, int | None], Counter[int]]
        self._listed = defaultdict(Counter)
        for address, objcg in snapshot.objcgs.items():
            self._objcgs[snapshot.payer(address)].append(address)
            for place in objcg.places:
                self._listed[place.memcg, place.nid][address] += 1
        # In the order of the tasks.
        self._cached: defaultdict[int | None, dict[int, None]] = defaultdict(dict)
        for task in snapshot.tasks:
            self._cached[snapshot.payer(task.memcg)].update(dict.fromkeys(task.objcgs))
        self._of_sets = {
            snapshot.objcgs[key.objcg].set: key
            for key in self._rows
            if key.identity == "objcg_sets" and key.objcg is not None
        }
        of_objcgs = (k for k in self._rows if k.identity in ("references", "objcg_bytes"))
        self._hiding = frozenset(k.memcg for k in of_objcgs if self.observed(k) is None)

    def remembered(self, key: object, make: Callable[[], Signature]) -> Signature:
        """Return a signature that is made once: it takes a walk over all charges."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def of_goal(self, goal: Signature) -> Differences:
        """Return the same rows with the differences that one cause makes."""
        other = object.__new__(Differences)
        # What was observed is that of another goal.
        other.__dict__ |= self.__dict__ | {"_observed": {}}
        other.goal = goal
        return other

    def differing(self) -> dict[RowKey, int]:
        """Return the rows that differ, with their differences."""
        if self.goal is None:
            return {
                key: row.off
                for key, row in self._rows.items()
                if row.status == "differs" and row.difference and key in self._findings
            }
        none = Signature({})
        return {k: r for k in self.touched(self.goal) if (r := self.residual(k, none))}

    def keeps(self, identity: str) -> bool:
        """Return whether the kernel keeps an identity."""
        return identity in self._kept

    def has(self, key: RowKey) -> bool:
        """Return whether there is such a row."""
        return key in self._rows

    def applies(self, key: RowKey) -> bool:
        """Return whether there is such a row, or would be if one of its sides were not 0."""
        return key in self._rows or (key.identity in _SPARSE and key.identity in self._kept)

    def row(self, key: RowKey) -> Row | None:
        """Return a row; ``None`` if it was left out."""
        return self._rows.get(key)

    def counter(self, item: str, memcg: int, nid: int | None) -> RowKey | None:
        """Return the row in which charges are compared with a counter of a memcg."""
        return self._counters.get((item, memcg, nid))

    def chain(self, memcg: int) -> tuple[int, ...]:
        """Return a live memcg and its ancestors."""
        if memcg not in self._chains:
            self._chains[memcg] = tuple(self.snapshot.ancestors(memcg))
        return self._chains[memcg]

    def observed(self, key: RowKey) -> int | None:
        """Return the difference of a row to explain; ``None`` if it may have any."""
        if key not in self._observed:
            self._observed[key] = self._observe(key)
        return self._observed[key]

    def _observe(self, key: RowKey) -> int | None:
        row = self._rows.get(key)
        known = row is None or row.status == "exact"
        known = known or (row is not None and row.status == "differs" and key in self._findings)
        if not known or not self.applies(key):
            return None
        if self.goal is not None:
            least, most = self._range(key, self.goal)
            return least or most
        return 0 if row is None else row.off

    def residual(self, key: RowKey, total: Signature) -> int:
        """Return what is left of a difference to explain after some causes."""
        wanted = self.observed(key)
        if wanted is None:
            return 0
        least, most = self._range(key, total)
        if key.identity == "objcg_bytes":
            left = (wanted - least) % self.page
            return left if left <= self.page // 2 else left - self.page
        if least <= wanted <= most:
            return 0
        return wanted - least if abs(wanted - least) < abs(wanted - most) else wanted - most

    def speaks_for(self, key: RowKey, total: Signature) -> bool:
        """
        Return whether a row that may have any difference has the one that causes explain.

        That is what they add to it, and with it a charge that a CPU may have left half done.
        """
        if self.goal is not None or key not in self._speaking:
            return False
        least, most = self._range(key, total)
        off = self._rows[key].off
        return (least, most) != (0, 0) and any(
            self._is_half_done(key, off - amount) for amount in range(least, most + 1)
        )

    def _is_half_done(self, key: RowKey, rest: int) -> bool:
        """Return whether a difference is none, or what a CPU may have left half done."""
        if key.identity == "objcg_bytes":
            sizes = (0, *self._half_done)
            return any((rest - s) % self.page == 0 or (rest + s) % self.page == 0 for s in sizes)
        scale = {"bytes": 1, "KiB": 1024, "pages": self.page}.get(key.unit, 0)
        return not rest or abs(rest) * scale in self._half_done

    def opposite(self, key: RowKey, amount: int) -> Iterator[RowKey]:
        """
        Yield rows that may have any difference, and that may show the other side of a charge.

        :param key: the row of one side, whose difference is the amount
        """
        if self.goal is not None:
            return
        for other in self._doubtful.get((key.identity, key.item, key.nid), ()):
            off = self._rows[other].off
            if other.memcg != key.memcg and self._is_half_done(other, off + amount):
                yield other

    def touched(self, signature: Signature) -> Iterator[RowKey]:
        """Yield the rows that a signature changes."""
        yield from signature.rows
        for pool in signature.pools:
            yield from self._rows_of_pool(pool)

    def objcgs(self, memcg: int) -> list[int]:
        """Return the obj_cgroups of a live memcg."""
        return self._objcgs.get(memcg, [])

    def listed(self, memcg: int | None, nid: int | None) -> Iterator[tuple[Objcg, int]]:
        """Yield the obj_cgroups that a memcg, or its node, refers to, and how many times."""
        for address, number in self._listed.get((memcg, nid), {}).items():
            yield self.snapshot.objcgs[address], number

    def cached(self, memcg: int) -> Iterable[int]:
        """Return the obj_cgroups that tasks of a live memcg have cached."""
        return self._cached.get(memcg, {})

    def set_row(self, address: int) -> RowKey | None:
        """Return the row of a set of obj_cgroups."""
        return self._of_sets.get(address)

    def may_hide(self, memcg: int) -> bool:
        """Return whether the rows of some obj_cgroup of a memcg may have any difference."""
        return "references" not in self._kept or memcg in self._hiding

    def _rows_of_pool(self, pool: Pool) -> tuple[RowKey, ...]:
        if pool not in self._of_pools:
            memcg, nid = pool
            item = kmem.BY_MEMCG if nid is None else kmem.BY_NODE
            keys = [
                RowKey("kmem", item, "pages", memcg, nid),
                RowKey("usage", "memory.usage", "pages", memcg),
                RowKey("kmem_usage", "kmem.usage", "pages", memcg),
                *(RowKey("hierarchy", item, "pages", m, nid) for m in self.chain(memcg)),
            ]
            self._of_pools[pool] = tuple(key for key in keys if key in self._rows)
        return self._of_pools[pool]

    def _range(self, key: RowKey, total: Signature) -> tuple[int, int]:
        """Return the least and the most that causes add to a row."""
        least = most = total.rows.get(key, 0)
        if key.identity in ("kmem", "usage", "kmem_usage") or (
            key.identity == "hierarchy" and key.item in _KMEM_ITEMS
        ):
            for size in self._sizes(key, total.pools):
                low, high = _rounded(size, self.page)
                least, most = least + low, most + high
        elif key.identity == "local" and key.item in _SLAB_ITEMS:
            return min(least, 0), max(most, 0)
        elif key.identity == "node_levels" and key.item in node_levels.AT_LEAST:
            return min(least, 0), 0
        return least, most

    def _sizes(self, key: RowKey, pools: Mapping[Pool, int]) -> Iterable[int]:
        """Return the bytes of objects in a row that are rounded together."""
        sizes: defaultdict[tuple[int, int | None], int] = defaultdict(int)
        for (memcg, nid), size in pools.items():
            if key.identity == "hierarchy":
                if key.nid == nid and key.memcg in self.chain(memcg):
                    sizes[memcg, nid] += size
            elif memcg == key.memcg and (key.identity != "kmem" or key.nid == nid):
                sizes[memcg, None] += size
        return sizes.values()


def _rounded(size: int, page: int) -> tuple[int, int]:
    """Return bytes as whole pages, which are two numbers for half a page."""
    return -(-(2 * size - page) // (2 * page)), (2 * size + page) // (2 * page)


class View:
    """
    The rows that still differ after some causes.

    :ivar differences: all rows
    :ivar residuals: what is left of the differences, by row
    """

    def __init__(self, differences: Differences, residuals: Mapping[RowKey, int]) -> None:
        self.differences = differences
        self.snapshot = differences.snapshot
        self.residuals = residuals

    # Few causes need these, and there may be a row for each call site of the kernel.

    @cached_property
    def _by_sign(self) -> Mapping[tuple[str, str, int | None, bool], list[RowKey]]:
        found: defaultdict[tuple[str, str, int | None, bool], list[RowKey]] = defaultdict(list)
        for key, amount in self.residuals.items():
            found[key.identity, key.item, key.nid, amount > 0].append(key)
        return found

    @cached_property
    def _by_amount(self) -> Mapping[tuple[str, str, int | None, int], list[RowKey]]:
        found: defaultdict[tuple[str, str, int | None, int], list[RowKey]] = defaultdict(list)
        for key, amount in self.residuals.items():
            found[key.identity, key.item, key.nid, amount].append(key)
        return found

    @cached_property
    def _by_memcg(self) -> Mapping[tuple[str, int | None], list[RowKey]]:
        found: defaultdict[tuple[str, int | None], list[RowKey]] = defaultdict(list)
        for key in self.residuals:
            found[key.identity, key.memcg].append(key)
        return found

    def opposite(self, key: RowKey, amount: int) -> list[RowKey]:
        """
        Return the rows of the same counter and node that differ in the other direction.

        Those that differ by as much come first. Others may have another fault, too.
        """
        counter = key.identity, key.item, key.nid
        of_amount = self._by_amount.get((*counter, -amount), ())
        same = list(islice((o for o in of_amount if o.memcg != key.memcg), _MOST_SAME))
        rest = (
            other
            for other in self._by_sign.get((*counter, amount < 0), ())
            if self.residuals[other] != -amount and other.memcg != key.memcg
        )
        doubtful = islice(self.differences.opposite(key, amount), _MOST_PARTNERS)
        return [*same, *islice(rest, max(0, _MOST_PARTNERS - len(same))), *doubtful]

    def of_memcg(self, identity: str, memcg: int | None) -> list[RowKey]:
        """Return the rows of an identity and a memcg that differ."""
        return self._by_memcg.get((identity, memcg), [])

    def objcgs(self, memcg: int) -> list[int | None]:
        """
        Return the obj_cgroups of a memcg that a charge can concern: those whose rows differ.

        :return: ``None`` stands for any, if their rows are not known
        """
        keys = self.of_memcg("references", memcg) + self.of_memcg("objcg_bytes", memcg)
        some: list[int | None] = list(dict.fromkeys(key.objcg for key in keys))
        if some:
            return some
        if self.differences.may_hide(memcg):
            return [None]
        # Another fault can cancel what a charge does to the rows of its obj_cgroup.
        return [*self.differences.objcgs(memcg)[:_MOST_PARTNERS]]
