# SPDX-License-Identifier: LGPL-2.1-or-later
"""
A small model of how the kernel keeps the counters of memcgs.

It is written from the kernel's source, and shares only the records of the data model with the
package. It models

* per-CPU ``state`` that is never reset, ``state_prev``, ``state`` and ``state_pending``, folded
  for one memcg and one CPU at a time, as mem_cgroup_css_rstat_flush() does
* a stock of slab bytes on each CPU that are not booked yet
* memcgs that are removed in steps: marked dying, their objcg reparented, and finally folded and
  freed

It also keeps the objects themselves, which the counters must match.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from memcg_inspect.checks.counters import Counters
from memcg_inspect.checks.ledger import Entry, Ledger
from memcg_inspect.model import Memcg, Objcg, ObjStock, Stat

#: The counter of each kind of slab memory.
ITEMS = {"reclaimable": "NR_SLAB_RECLAIMABLE_B", "unreclaimable": "NR_SLAB_UNRECLAIMABLE_B"}

#: A counter: an item, of a node or (``None``) of the memcg as a whole.
Key = tuple[str, "int | None"]


@dataclass(eq=False)
class Objects:
    """An ``obj_cgroup``, and the memcg that pays for it."""

    address: int
    group: Group


@dataclass(eq=False)
class Group:
    """A ``mem_cgroup``."""

    address: int
    parent: Group | None
    cpus: int
    dying: bool = False
    offline: bool = False
    children: list[Group] = field(default_factory=list)
    objcgs: list[Objects] = field(default_factory=list)
    state: Counter[Key] = field(default_factory=Counter)
    pending: Counter[Key] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.percpu: list[Counter[Key]] = [Counter() for _ in range(self.cpus)]
        self.prev: list[Counter[Key]] = [Counter() for _ in range(self.cpus)]


@dataclass
class Stock:
    """One CPU's slab bytes that are not booked yet."""

    objcg: Objects | None = None
    nid: int = 0
    amounts: Counter[str] = field(default_factory=Counter)


class Kernel:
    """
    Memcgs, their counters, and objects.

    :param redirects: whether changes on a dying memcg are booked on the nearest one that is
        not, as 7.3 does; older kernels do so only once its objcg has been handed over
    """

    def __init__(self, cpus: int, nodes: int, redirects: bool) -> None:
        self.cpus, self.nodes, self.redirects = cpus, nodes, redirects
        self._next = 0x1000
        self.groups: list[Group] = []
        self.objects: list[tuple[Objects, str, int, int]] = []  # objcg, detail, nid, size
        self.stocks = [Stock() for _ in range(cpus)]
        self.mkdir(None)

    def _address(self) -> int:
        self._next += 0x100
        return self._next

    def mkdir(self, parent: Group | None) -> Group:
        group = Group(self._address(), parent, self.cpus)
        group.objcgs.append(Objects(self._address(), group))
        if parent is not None:
            parent.children.append(group)
        self.groups.append(group)
        return group

    def rmdir(self, group: Group) -> None:
        """css_killed: only a memcg without online children can be removed."""
        if group.parent is not None and all(child.dying for child in group.children):
            group.dying = True

    def reparent(self, group: Group) -> None:
        """memcg_reparent_objcgs(), children first."""
        if group.dying and not group.offline and all(c.offline for c in group.children):
            assert group.parent is not None
            for objcg in group.objcgs:
                objcg.group = group.parent
            group.parent.objcgs += group.objcgs
            group.objcgs, group.offline = [], True

    def release(self, group: Group) -> None:
        """css_release(): the last reference went, so it is folded and freed."""
        if group.offline and not group.children:
            assert group.parent is not None
            for cpu in range(self.cpus):
                self.flush(group, cpu)
            group.parent.children.remove(group)
            self.groups.remove(group)

    def allocate(self, objcg: Objects, cpu: int, nid: int, detail: str, size: int) -> None:
        self.objects.append((objcg, detail, nid, size))
        self._account(objcg, cpu, nid, detail, size)

    def free(self, number: int, cpu: int) -> None:
        objcg, detail, nid, size = self.objects.pop(number)
        self._account(objcg, cpu, nid, detail, -size)

    def _account(self, objcg: Objects, cpu: int, nid: int, detail: str, size: int) -> None:
        stock = self.stocks[cpu]
        if stock.objcg is not objcg or stock.nid != nid:
            self.drain(cpu)
            self.stocks[cpu] = stock = Stock(objcg, nid)
        stock.amounts[detail] += size
        if abs(stock.amounts[detail]) > 4096:
            self._book(objcg, cpu, nid, detail, stock.amounts.pop(detail))

    def drain(self, cpu: int) -> None:
        stock = self.stocks[cpu]
        if stock.objcg is not None:
            for detail, amount in stock.amounts.items():
                self._book(stock.objcg, cpu, stock.nid, detail, amount)
        self.stocks[cpu] = Stock()

    def _book(self, objcg: Objects, cpu: int, nid: int, detail: str, amount: int) -> None:
        group = objcg.group
        while self.redirects and group.dying and group.parent is not None:
            group = group.parent
        for key in ((ITEMS[detail], nid), (ITEMS[detail], None)):
            group.percpu[cpu][key] += amount

    def flush(self, group: Group, cpu: int) -> None:
        """mem_cgroup_stat_aggregate(), for every counter of one memcg on one CPU."""
        for key in {*group.pending, *group.percpu[cpu]}:
            delta = group.pending.pop(key, 0)
            value = group.percpu[cpu][key]
            delta += value - group.prev[cpu][key]
            group.prev[cpu][key] = value
            group.state[key] += delta
            if group.parent is not None:
                group.parent.pending[key] += delta

    # What an image of it holds, in records of the package.

    def payer(self, group: Group) -> Group:
        while group.dying and group.parent is not None:
            group = group.parent
        return group

    def memcgs(self) -> dict[int, Memcg]:
        made: dict[int, Memcg] = {}
        todo = [self.groups[0]]
        while todo:
            group = todo.pop()
            made[group.address] = Memcg(
                address=group.address,
                path=f"/{group.address:x}",
                cgroup_id=0,
                state="dying" if group.dying else "online",
                parent=None if group.parent is None else group.parent.address,
                payer=self.payer(group).address,
            )
            todo += group.children
        return made

    def objcgs(self) -> dict[int, Objcg]:
        return {
            objcg.address: Objcg(objcg.address, group.address, None, False, 0)
            for group in self.groups
            for objcg in group.objcgs
        }

    def ledger(self) -> Ledger:
        ledger = Ledger()
        for objcg, detail, nid, size in self.objects:
            ledger.add(Entry(objcg.address, "slab", detail, nid), size, 1)
        return ledger

    def obj_stocks(self) -> list[ObjStock]:
        return [
            ObjStock(
                cpu=cpu,
                slot=0,
                objcg=stock.objcg.address,
                nr_bytes=0,
                nid=stock.nid,
                reclaimable=stock.amounts["reclaimable"],
                unreclaimable=stock.amounts["unreclaimable"],
                locked=False,
            )
            for cpu, stock in enumerate(self.stocks)
            if stock.objcg is not None
        ]

    def stat(self, group: Group, key: Key) -> Stat:
        return Stat(
            state=group.state[key],
            pending=group.pending[key],
            percpu=sum(
                now[key] - prev[key] for now, prev in zip(group.percpu, group.prev, strict=True)
            ),
        )

    def stats(self, nid: int | None) -> dict[int, dict[str, Stat]]:
        return {
            group.address: {item: self.stat(group, (item, nid)) for item in ITEMS.values()}
            for group in self.groups
        }

    def counters(self, unread: frozenset[int] = frozenset()) -> Counters:
        """Return the counters, except those of some memcgs."""
        whole = {a: stats for a, stats in self.stats(None).items() if a not in unread}
        by_node = {
            (address, nid): stats
            for nid in range(self.nodes)
            for address, stats in self.stats(nid).items()
            if address not in unread
        }
        return Counters(self.memcgs(), whole, by_node)

    def paid(self) -> Counter[tuple[int, str, int]]:
        """Return the bytes of all objects by (payer, item, nid)."""
        truth: Counter[tuple[int, str, int]] = Counter()
        for objcg, detail, nid, size in self.objects:
            truth[self.payer(objcg.group).address, ITEMS[detail], nid] += size
        return truth

    def in_stock(self) -> dict[tuple[int, str, int], int]:
        """Return the bytes in object stocks by (payer, item, nid)."""
        found: defaultdict[tuple[int, str, int], int] = defaultdict(int)
        for stock in self.stocks:
            if stock.objcg is not None:
                payer = self.payer(stock.objcg.group).address
                for detail, amount in stock.amounts.items():
                    found[payer, ITEMS[detail], stock.nid] += amount
        return found
