# SPDX-License-Identifier: LGPL-2.1-or-later
"""Removed memcgs: what keeps each alive, and what they have left behind."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from drgn import FaultError

from memcg_inspect.checks.ledger import Amount, ChargeKind, Entry
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect import collect
from memcg_inspect.collect.examples import Examples, find_examples
from memcg_inspect.image.image import Image
from memcg_inspect.linux.fs.inode import mapping_name
from memcg_inspect.linux.mm.memcontrol import keeps_original_objcgs, objcg_owners
from memcg_inspect.model import NUMA_NO_NODE, ChargeStock, Coverage, Memcg, counted
from memcg_inspect.tables import (
    Answer,
    Field,
    MemcgAddress,
    NotRead,
    Table,
    UsageError,
    Value,
    columns_of,
)
from memcg_inspect.views.view import Argument, View

__all__ = ("VIEW", "LeftRow", "MemcgRow", "SummaryRow", "dying")

#: Number of files to name for each memcg; the others are counted.
MOST_FILES = 5
#: Rows of the summary; the others are added up by kind.
MOST_ROWS = 20

#: ``page->mapping``, and whether pages are in the swap cache.
File = tuple[int, bool]

KINDS: tuple[ChargeKind, ...] = ("lru", "kmem", "slab", "percpu", "zswap", "sock")
#: In the order in which rows are listed.
KIND_ORDER = (
    "removal",
    "child",
    "task",
    "mm",
    "stock",
    "swap",
    "writeback",
    "notify",
    "event",
    "cursor",
    *KINDS,
)

#: Charges that hold a css reference to their memcg. Since 7.1 user pages hold an obj_cgroup.
_HOLDERS: tuple[ChargeKind, ...] = ("sock",)
_HOLDERS_BEFORE_7_2: tuple[ChargeKind, ...] = ("sock", "lru")

_NO_REFS = NotRead("references to the memcg could not be read")
_NO_CGROUP = NotRead("the cgroup could not be read")


@dataclass(frozen=True)
class MemcgRow:
    """One removed memcg that still exists."""

    memcg: Annotated[str, Field("memcg", "path that it had")]
    memcg_address: MemcgAddress
    cgroup_id: Annotated[
        Value, Field("number", "id of its cgroup; ids increase with time", priority=3)
    ]
    offline: Annotated[bool, Field("flag", "whether it is offline already", shown=False)]
    paid_by: Annotated[Value, Field("memcg", "memcg that pays for what it left behind", priority=4)]
    references: Annotated[
        Value, Field("count", "references that keep it alive: css.refcnt", priority=8)
    ]
    explained: Annotated[int, Field("count", "references whose holders were found")]
    unexplained: Annotated[Value, Field("count", "the other references", priority=8)]
    lru: Annotated[
        Value, Field("bytes", "user pages and page cache that it was charged for", total=True)
    ]
    kmem: Annotated[Value, Field("bytes", "kernel pages that it was charged for", total=True)]
    slab: Annotated[Value, Field("bytes", "slab objects that it was charged for", total=True)]
    percpu: Annotated[Value, Field("bytes", "percpu memory that it was charged for", total=True)]
    zswap: Annotated[Value, Field("bytes", "compressed pages that it was charged for", total=True)]
    sock: Annotated[Value, Field("bytes", "memory of sockets that it was charged for", total=True)]
    swap: Annotated[Value, Field("bytes", "swap space of entries that hold its id", total=True)]


@dataclass(frozen=True)
class LeftRow:
    """Charges or references of one kind that a removed memcg left behind."""

    memcg: Annotated[
        Value,
        Field("memcg", "the removed memcg; none if it is freed already or is not known"),
    ]
    memcg_address: MemcgAddress
    kind: Annotated[
        str,
        Field(
            "text",
            "lru, kmem, slab, percpu, zswap, sock: charges; swap: swap entries; child: child "
            "memcgs; stock: charged in advance by a CPU; task: css_sets of tasks that were in it; "
            "mm: address spaces on its list; removal: its removal is not finished; writeback: "
            "writeback of files; notify: groups of inotify and fanotify; event: events of cgroup "
            "v1; cursor: zswap writes back its pages next",
            priority=9,
        ),
    ]
    pins: Annotated[bool, Field("flag", "whether it keeps the memcg alive", priority=6)]
    node: Annotated[int, Field("node", "backing node")]
    charged_node: Annotated[
        int | None, Field("node", "node of the obj_cgroup that is charged", priority=3)
    ]
    references: Annotated[
        int, Field("count", "references to the memcg that the row explains", total=True, priority=7)
    ]
    count: Annotated[
        int,
        Field(
            "count",
            "number of charges or objects; percpu memory is counted on one node",
            priority=7,
        ),
    ]
    bytes: Annotated[int | None, Field("bytes", "size of all of them", total=True, priority=8)]
    detail: Annotated[Value, Field("text", "file of user pages; more about the kind", priority=8)]
    objcg: Annotated[
        int | None, Field("address", "struct obj_cgroup * that is charged", shown=False)
    ]
    paid_by: Annotated[Value, Field("memcg", "memcg that pays for it now", shown=False)]
    examples: Annotated[str | None, Field("text", "addresses of some of them", priority=2)]


@dataclass(frozen=True)
class SummaryRow:
    """What several removed memcgs left behind of one kind and detail, for one memcg to pay."""

    memcgs: Annotated[int, Field("count", "number of removed memcgs that have such a row")]
    kind: Annotated[str, Field("text", "as in the table of all rows", priority=9)]
    pins: Annotated[bool, Field("flag", "whether it keeps the memcgs alive", priority=5)]
    detail: Annotated[Value, Field("text", "file of user pages; more about the kind", priority=9)]
    references: Annotated[
        int, Field("count", "references to these memcgs that it explains", total=True, priority=6)
    ]
    count: Annotated[int, Field("count", "number of charges or objects", priority=7)]
    bytes: Annotated[
        int | None, Field("bytes", "size of all of them", total=True, priority=8, shares=True)
    ]
    least: Annotated[
        int | None, Field("bytes", "size of those of the memcg that has least", priority=3)
    ]
    most: Annotated[
        int | None, Field("bytes", "size of those of the memcg that has most", priority=3)
    ]
    paid_by: Annotated[Value, Field("memcg", "memcg that pays for it now", priority=8)]


class Holder(NamedTuple):
    """Charges of one kind that a memcg left behind, or holders of references to it."""

    memcg: int | None
    kind: str
    nid: int
    references: int
    number: int
    bytes: int | None
    detail: Value
    payer: int | None
    objcg: int | None
    examples: tuple[int, ...]


def dying(image: Image, most_files: int = MOST_FILES) -> Answer:
    """
    Return the removed memcgs that still exist, and what removed memcgs have left behind.

    :param most_files: number of files to name for each memcg
    """
    view = image.keep(_Dying).naming(most_files)
    snapshot = view.snapshot
    holders = list(view.holders())
    by_memcg: defaultdict[int | None, list[Holder]] = defaultdict(list)
    for holder in holders:
        by_memcg[holder.memcg].append(holder)
    summary = view.summary(holders)
    tables = (
        Table(
            "dying",
            "removed memcgs that still exist",
            columns_of(MemcgRow),
            [view.row(memcg, by_memcg[address]) for address, memcg in view.removed.items()],
            empty="there are none",
        ),
        Table(
            "left",
            "what keeps them alive, and what removed memcgs have left behind",
            columns_of(LeftRow),
            [view.detail_row(holder) for holder in holders],
            empty="nothing",
        ),
        Table(
            "summary",
            f"what {counted(len(view.removed), 'removed memcgs')} have left behind",
            columns_of(SummaryRow),
            summary,
            empty="nothing",
        ),
    )
    coverage = dict(snapshot.coverage) | dict(view.coverage)
    return Answer("dying", snapshot.image, tables, coverage, tuple(view.notes(holders)))


class _Group(NamedTuple):
    """What a row of the summary has in common."""

    kind: str
    pins: bool
    detail: Value
    payer: int | None


#: Detail of the files of a memcg that are not named.
_MORE = "(more files)"


class _Dying:
    """
    Find removed memcgs, and what they left behind, in one image.

    :ivar removed: removed memcgs by address, the oldest first
    :ivar owners: memcgs that obj_cgroups were made for, as far as they are known
    :ivar left: obj_cgroups that belonged to a removed memcg
    :ivar names: names of files that were read so far
    """

    def __init__(self, image: Image) -> None:
        self.image = image
        self.most_files = MOST_FILES
        self.names: dict[File, Value] = {}
        # From the audit's own pass, so that the amounts agree with the audit.
        self.snapshot: Snapshot = collect(image)
        self.coverage: defaultdict[str, Coverage] = defaultdict(Coverage)
        memcgs = self.snapshot.memcgs
        self.removed: dict[int, Memcg] = {
            memcg.address: memcg
            for memcg in sorted(memcgs.values(), key=lambda m: m.cgroup_id or 0)
            if memcg.state == "dying"
        }
        self.owners = objcg_owners(image, memcgs, self.coverage["owners"])
        # An obj_cgroup of no memcg belonged to a removed one, if all memcgs could be read.
        self.is_whole = self.snapshot.complete("memcgs", "objcgs") and not (
            self.coverage["owners"].unreadable
        )
        self.left = {
            address
            for address, objcg in self.snapshot.objcgs.items()
            if not objcg.is_root
            and (self.owners[address] in self.removed if address in self.owners else self.is_whole)
        }
        self.css = {
            address: css
            for address, css in self.snapshot.css.items()
            if address in self.removed and css.whole
        }
        self.entries = [
            (entry, amount)
            for entry, amount in self.snapshot.ledger
            if entry.payer in self.removed or entry.payer in self.left
        ]
        kinds = {entry.kind for entry, _ in self.entries}
        self.examples = Examples()
        if kinds:
            self.examples = find_examples(
                image, self.left, self.removed.keys(), kinds, self.coverage
            )

    def naming(self, most_files: int) -> _Dying:
        """Return the same, with so many files of each memcg named."""
        made = copy(self)
        made.most_files, made.names = most_files, {}
        made.coverage = defaultdict(Coverage)
        for subject, found in self.coverage.items():
            made.coverage[subject].add(found)
        return made

    def holders(self) -> Iterator[Holder]:
        """Return everything that is left, by memcg."""
        by_memcg: defaultdict[int | None, list[Holder]] = defaultdict(list)
        for holder in (*self._references(), *self._charges()):
            by_memcg[holder.memcg].append(holder)
        for memcg in (*self.removed, None):
            yield from sorted(
                by_memcg[memcg],
                key=lambda h: (not h.references, KIND_ORDER.index(h.kind), -(h.bytes or 0)),
            )

    def _references(self) -> Iterator[Holder]:
        page_size = self.snapshot.image.page_size
        others = self.snapshot.css_holders
        children: defaultdict[int | None, list[int]] = defaultdict(list)
        for memcg in self.snapshot.memcgs.values():
            children[memcg.parent].append(memcg.address)
        stocks: defaultdict[int, list[ChargeStock]] = defaultdict(list)
        for stock in self.snapshot.charge_stocks:
            stocks[stock.memcg].append(stock)
        for address in self.removed:
            yield from self._held(address, "child", tuple(children[address]))
            yield from self._counted(address, "child", others["released"].get(address, 0))
            yield from self._counted(address, "notify", others["notify"].get(address, 0))
            yield from self._counted(address, "cursor", others["zswap"].get(address, 0))
            for stock in stocks[address]:
                charged = stock.nr_pages * page_size
                yield self._holder(address, "stock", 1, 1, charged, f"CPU {stock.cpu}")
            css = self.css.get(address)
            if css is None:
                continue
            yield from self._held(address, "task", css.css_sets)
            yield from self._held(address, "mm", css.mms)
            yield from self._held(address, "writeback", css.writebacks)
            yield from self._counted(address, "event", css.events)
            # The references to the ID hold one to the memcg together.
            entries = css.id_refs - css.is_online
            if entries > 0:
                held = 0 if css.is_online else 1
                yield self._holder(address, "swap", held, entries, entries * page_size, None)
            removal = css.base + (css.is_online and css.id_refs > 0)
            if removal:
                yield self._holder(address, "removal", removal, 1, None, None)

    def _held(self, memcg: int, kind: str, holders: tuple[int, ...]) -> Iterator[Holder]:
        if holders:
            count = len(holders)
            yield self._holder(memcg, kind, count, count, None, None, holders[:3])

    def _counted(self, memcg: int, kind: str, number: int) -> Iterator[Holder]:
        if number:
            yield self._holder(memcg, kind, number, number, None, None)

    def _holder(
        self,
        memcg: int,
        kind: str,
        references: int,
        count: int,
        size: int | None,
        detail: str | None,
        examples: tuple[int, ...] = (),
    ) -> Holder:
        payer = self.removed[memcg].payer
        return Holder(
            memcg, kind, NUMA_NO_NODE, references, count, size, detail, payer, None, examples
        )

    def _charges(self) -> Iterator[Holder]:
        sums: defaultdict[Entry, Amount] = defaultdict(lambda: Amount(0, 0))
        for entry, amount in self.entries:
            # Percpu memory is charged in two parts; one of them has the address.
            detail = "" if entry.kind == "percpu" else entry.detail
            key = entry._replace(detail=detail)
            sums[key] = sums[key].plus(amount)
        for entry, amount in sums.items():
            if entry.kind == "lru":
                continue
            examples = self.examples.addresses.get(entry, [])
            yield self._charge(entry, amount, entry.detail or None, tuple(examples))
        yield from self._user_pages()

    def _charge(
        self, entry: Entry, amount: Amount, detail: Value, examples: tuple[int, ...]
    ) -> Holder:
        memcg = self._memcg(entry.payer)
        objcg = entry.payer if entry.payer in self.left else None
        # A charge to the memcg itself holds a css reference; one to an obj_cgroup does not.
        references = amount.charges if objcg is None else 0
        payer = self.snapshot.payer(entry.payer)
        return Holder(
            memcg, entry.kind, entry.nid, references, amount.charges, amount.bytes, detail, payer,
            objcg, examples,
        )  # fmt: skip

    def _user_pages(self) -> Iterator[Holder]:
        """Return user pages by file: the largest files of each memcg, and the sum of the others."""
        pages: defaultdict[int | None, Counter[File]] = defaultdict(Counter)
        for (payer, _, mapping, swap_cache), group in self.examples.folios.items():
            pages[self._memcg(payer)][mapping, swap_cache] += group.pages
        names: dict[int | None, dict[File, Value]] = {
            memcg: {file: self._name(file) for file, _ in files.most_common(self.most_files)}
            for memcg, files in pages.items()
        }
        page_size = self.snapshot.image.page_size
        rest: defaultdict[Entry, Amount] = defaultdict(lambda: Amount(0, 0))
        files: Counter[Entry] = Counter()
        for (payer, nid, mapping, swap_cache), group in self.examples.folios.items():
            entry = Entry(payer, "lru", "lru", nid)
            amount = Amount(group.pages * page_size, group.folios)
            known = names[self._memcg(payer)]
            if (mapping, swap_cache) in known:
                name = known[mapping, swap_cache]
                yield self._charge(entry, amount, name, tuple(group.addresses))
            else:
                rest[entry] = rest[entry].plus(amount)
                files[entry] += 1
        for entry, amount in rest.items():
            more = f"({files[entry]} more {'file' if files[entry] == 1 else 'files'})"
            yield self._charge(entry, amount, more, ())

    def _memcg(self, payer: int) -> int | None:
        """Return the removed memcg that was charged."""
        return payer if payer in self.removed else self.owners.get(payer)

    def _name(self, file: File) -> Value:
        """Return the name of a file. Thousands of memcgs may have pages of the same one."""
        if file not in self.names:
            self.names[file] = self._read_name(file)
        return self.names[file]

    def _read_name(self, file: File) -> Value:
        try:
            name = mapping_name(self.image, *file)
            self.coverage["files"].read += 1
            return name
        except FaultError as error:
            self.coverage["files"].miss("file of user pages", error.address, str(error))
            return NotRead("the file could not be read")

    def summary(self, holders: Iterable[Holder]) -> list[SummaryRow]:
        """
        Return what is left, added up by kind, detail and payer.

        What most memcgs have comes first. After :data:`MOST_ROWS`, only the kind is told apart.
        """
        groups: defaultdict[_Group, dict[int | None, list[Holder]]] = defaultdict(dict)
        for holder in holders:
            detail = _MORE if holder.kind == "lru" and _is_more(holder.detail) else holder.detail
            # The CPU of a stock, and why something could not be read, tell nothing of a sum.
            if holder.kind == "stock" or isinstance(detail, NotRead):
                detail = None
            group = _Group(holder.kind, holder.references > 0, detail, holder.payer)
            groups[group].setdefault(holder.memcg, []).append(holder)
        ordered = sorted(
            groups, key=lambda g: (not g.pins, -len(groups[g]), KIND_ORDER.index(g.kind))
        )
        rest: defaultdict[_Group, dict[int | None, list[Holder]]] = defaultdict(dict)
        number: Counter[_Group] = Counter()
        for group in ordered[MOST_ROWS:]:
            merged = group._replace(detail=None, payer=None)
            number[merged] += 1
            for memcg, some in groups[group].items():
                rest[merged].setdefault(memcg, []).extend(some)
        rows = [self._summary_row(group, groups[group]) for group in ordered[:MOST_ROWS]]
        for merged, found in rest.items():
            detail = f"({counted(number[merged], 'more rows')})"
            rows.append(self._summary_row(merged._replace(detail=detail), found))
        return rows

    def _summary_row(
        self, group: _Group, found: Mapping[int | None, Sequence[Holder]]
    ) -> SummaryRow:
        holders = [holder for some in found.values() for holder in some]
        sizes = [sum(h.bytes or 0 for h in some) for some in found.values()]
        has_size = any(holder.bytes is not None for holder in holders)
        return SummaryRow(
            # Charges without a memcg are of one that is freed, or not known: none is counted.
            memcgs=sum(memcg is not None for memcg in found),
            kind=group.kind,
            pins=group.pins,
            detail=group.detail,
            references=sum(holder.references for holder in holders),
            count=sum(holder.number for holder in holders),
            bytes=sum(sizes) if has_size else None,
            least=min(sizes) if has_size else None,
            most=max(sizes) if has_size else None,
            paid_by=self._path(group.payer),
        )

    def row(self, memcg: Memcg, mine: Sequence[Holder]) -> MemcgRow:
        """
        Return a row of the first table.

        :param mine: what this memcg left behind
        """
        css = self.css.get(memcg.address)
        explained = sum(holder.references for holder in mine)
        total: Counter[str] = Counter()
        for holder in mine:
            total[holder.kind] += holder.bytes or 0
        refs: Value = _NO_REFS
        unexplained: Value = _NO_REFS
        if css is not None:
            missing = self._why_missing()
            refs = css.refs
            unexplained = css.refs - explained if missing is None else NotRead(missing)
        return MemcgRow(
            memcg=memcg.path,
            memcg_address=memcg.address,
            cgroup_id=_NO_CGROUP if memcg.cgroup_id is None else memcg.cgroup_id,
            offline=memcg.offline,
            paid_by=self._path(memcg.payer),
            references=refs,
            explained=explained,
            unexplained=unexplained,
            swap=total["swap"] if css else _NO_REFS,
            **{kind: self._bytes(kind, total) for kind in KINDS},
        )

    def _why_missing(self) -> str | None:
        """Return why holders of references may be missing; ``None`` if none is."""
        for kind in _HOLDERS_BEFORE_7_2 if not self._has_objcgs_on_lru else _HOLDERS:
            if self.snapshot.ledger.may_miss(kind):
                return f"{kind} memory, which holds references, is not all in the image"
        if not self.snapshot.complete(
            "memcgs", "released", "charge_stock", "other_socks", "notify", "zswap_cursor"
        ):
            return "memcgs or other holders of references are not all in the image"
        return None

    @property
    def _has_objcgs_on_lru(self) -> bool:
        return self.snapshot.features.lru_holds_objcg

    def _bytes(self, kind: ChargeKind, total: Mapping[str, int]) -> Value:
        to_memcg = kind == "sock" or (kind == "lru" and not self._has_objcgs_on_lru)
        if not to_memcg and not keeps_original_objcgs(self.image):
            return None  # not known on this kernel: see the notes
        if self.snapshot.ledger.may_miss(kind):
            return NotRead(f"{kind} memory is not all in the image")
        return total[kind]

    def detail_row(self, holder: Holder) -> LeftRow:
        """Return a row of the second table."""
        return LeftRow(
            memcg=self._path(holder.memcg),
            memcg_address=holder.memcg,
            kind=holder.kind,
            pins=holder.references > 0,
            node=holder.nid,
            charged_node=self._charged_node(holder.objcg),
            references=holder.references,
            count=holder.number,
            bytes=holder.bytes,
            detail=holder.detail,
            objcg=holder.objcg,
            paid_by=self._path(holder.payer),
            examples=" ".join(f"{address:#x}" for address in holder.examples) or None,
        )

    def _charged_node(self, objcg: int | None) -> int | None:
        return None if objcg is None else self.snapshot.objcgs[objcg].nid

    def _path(self, memcg: int | None) -> Value:
        return None if memcg is None else self.snapshot.memcgs[memcg].path

    def notes(self, holders: Iterable[Holder]) -> Iterator[str]:
        """Return notes about references and charges that could not be assigned."""
        explained = Counter[int | None]()
        for holder in holders:
            explained[holder.memcg] += holder.references
        unexplained = any(css.refs > explained[memcg] for memcg, css in self.css.items())
        if unexplained and self._why_missing() is None:
            yield (
                "Unexplained references may be leaked. They may also be held for a moment by a "
                "task in the kernel, by a request of a loop device, or by a module that is not "
                "part of the kernel: audit (css_refs) tells."
            )
        if self.removed and self.image.is_moving:
            yield (
                "References and their holders were not read at the same time. If memcgs are made "
                "or removed meanwhile, the numbers may not agree: try again, or use --pause."
            )
        if self.removed and not keeps_original_objcgs(self.image):
            yield (
                "This kernel does not record which obj_cgroups a removed memcg had. Charges to "
                "them are listed without a memcg."
            )
        if not self.is_whole:
            yield "Not all memcgs could be read: charges left behind by freed memcgs are missing."


def _is_more(detail: Value) -> bool:
    return isinstance(detail, str) and detail.endswith((" more file)", " more files)"))


def _run(image: Image, args: Namespace) -> Answer:
    if args.files < 0:
        raise UsageError(f"--files {args.files}: the number of files must not be negative")
    answer = dying(image, args.files)
    if args.json or args.scripted:
        return answer
    chosen = args.each or args.fields or args.memcg or args.node
    first = {table.name: table for table in answer.tables}
    sort = (args.sort or "").partition(":")[0]
    if chosen or (sort and not first["summary"].has(sort)):
        return replace(answer, tables=(first["dying"], first["left"]))
    notes = answer.notes
    if first["left"].rows:
        notes += ("--each shows each memcg, and --memcg PATH a single one.",)
    return replace(answer, tables=(first["summary"],), notes=notes)


VIEW = View(
    name="dying",
    description="Sums up what keeps memcgs alive that were removed but not freed, and the charges "
    "that removed memcgs have left for others to pay. With --each, or with a choice of memcgs, "
    "nodes or fields, lists them, with all references to each and what holds them.",
    run=_run,
    records=(MemcgRow, LeftRow, SummaryRow),
    arguments=(
        Argument(("--each",), {"action": "store_true", "help": "show each memcg"}),
        Argument(
            ("--files",),
            {
                "metavar": "N",
                "type": int,
                "default": MOST_FILES,
                "help": f"name this many files of each memcg (default: {MOST_FILES})",
            },
        ),
    ),
)
