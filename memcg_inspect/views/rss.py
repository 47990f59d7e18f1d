# SPDX-License-Identifier: LGPL-2.1-or-later
"""How many pages processes have mapped, and how wrong the cheap counters of that are."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from memcg_inspect.collect.image_info import image_info
from memcg_inspect.image.image import Image
from memcg_inspect.image.progress import STOPPED
from memcg_inspect.linux.kernel.sched import Thread, has_mm, read_threads
from memcg_inspect.linux.kernel.stacktrace import read_running
from memcg_inspect.linux.mm.pagewalk import Mapped, PageTableReader
from memcg_inspect.linux.mm.rss_stat import (
    ITEMS,
    RssCounter,
    counts_by_task,
    per_node_bound,
    read_rss,
    rss_bounds,
)
from memcg_inspect.model import Coverage, ImageInfo
from memcg_inspect.tables import Answer, Column, NotRead, Table, Value
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.view import Argument, View

__all__ = ("VIEW", "rss")

COLUMNS = (
    Column("pid", "number", "process (thread group)"),
    Column("comm", "text", "its name"),
    Column("memcg", "memcg", "memcg that it is in"),
    Column("memcg_address", "address", "struct mem_cgroup *", shown=False),
    Column("mm", "address", "struct mm_struct *; processes may share one", shown=False),
    Column("threads", "number", "threads of the process", shown=False),
    Column("item", "text", "file, anon, swapents or shmem"),
    Column("approximate", "pages", "what is cheap to read: get_mm_counter()"),
    Column("exact", "pages", "with all that CPUs or threads have not handed in"),
    Column("error", "pages", "approximate less exact"),
    Column("bound", "pages", "how large the error can be on this machine"),
    Column("node_bound", "pages", "the same, if each node had one atomic counter, batch 32"),
    Column("exact_bytes", "bytes", "exact in bytes", shown=False),
    Column("error_bytes", "bytes", "error in bytes", shown=False),
)

#: What ``--check`` adds, and behind it a column for each node.
CHECK_COLUMNS = (
    Column("mapped", "pages", "pages that are in the page tables"),
    Column("difference", "pages", "exact less mapped"),
    Column("status", "text", "exact, differs, or moving: it was not at rest"),
)


class _Process(NamedTuple):
    """A thread group; threads of the kernel have none of this."""

    pid: int
    comm: str
    memcg: int | None
    mm: int
    threads: int
    user: int


def rss(image: Image, check: bool = False) -> Answer:
    """
    Return the counters of mapped pages of all processes.

    :param check: whether to hold them against the page tables
    :raises ImageError: if they are to be checked and the page tables of the machine are unknown
    """
    info = image_info(image)
    reader = _Reader(image, Payers(image), check)
    rows = _Rows(image, reader, info, check and _may_differ(image))
    processes = sorted(_processes(reader.threads))
    progress, found, ended = image.progress, [], 0
    for number, process in enumerate(processes):
        if check:
            progress.tell("page tables", number / len(processes))
        read = reader.read(process)
        if read is None:
            ended += 1
            continue
        found += list(rows.of(process, *read))
    columns: tuple[Column, ...] = COLUMNS
    if check:
        columns += CHECK_COLUMNS + tuple(
            Column(f"node_{nid}", "pages", f"of those in page tables, on node {nid}")
            for nid in info.nodes
        )
    plural = "es" if ended > 1 else ""
    notes = (f"{ended} process{plural} ended before all of it was read.",) if ended else ()
    table = Table("rss", "pages mapped by processes", columns, found, empty="no process has any")
    return Answer("rss", info, (table,), dict(reader.payers.coverage), notes)


_Counters = Mapping[str, RssCounter]


class _Reader:
    """
    Reads what is to be shown of processes: all at once, or, of those that come and go, of one
    after the other, so that counters and page tables are of about the same time.

    :ivar is_all: whether no task is missing
    """

    def __init__(self, image: Image, payers: Payers, check: bool) -> None:
        self.payers = payers
        self._image = image
        self._is_live = image.is_moving
        self._walker = PageTableReader(image) if check else None
        self.threads = read_threads(image, payers.coverage["tasks"])
        self.is_all = not payers.coverage["tasks"].unreadable
        self._users: dict[int, list[Thread]] = {}
        for thread in self.threads:
            self._users.setdefault(thread.mm, []).append(thread)
        self._mapped: dict[int, Mapped] = {}
        self._counters: dict[int, dict[str, RssCounter]] = {}
        if not self._is_live:
            coverage = payers.coverage["rss"]
            self._counters = read_rss(image, self.threads, coverage, self.is_all)

    def users(self, mm: int) -> int:
        """How many tasks use an mm."""
        return len(self._users[mm])

    def read(self, process: _Process) -> tuple[_Counters, Mapped | None] | None:
        """Return counters and, if they are looked at, page tables; ``None`` if it has ended."""
        counters, tables, mm = Coverage(), Coverage(), process.mm
        if self._is_live:
            self._counters |= read_rss(self._image, self._users[mm], counters, self.is_all)
        if self._walker is not None and (self._is_live or mm not in self._mapped):
            self._mapped[mm] = self._walker.walk(mm, tables)
        if self._is_live and not has_mm(self._image, process.user, mm):
            return None
        self.payers.coverage["rss"].add(counters)
        if self._walker is not None:
            self.payers.coverage["page_tables"].add(tables)
        return self._counters.get(mm, {}), self._mapped.get(mm)


def _processes(threads: Iterable[Thread]) -> Iterator[_Process]:
    groups: dict[int, list[Thread]] = {}
    for thread in threads:
        if not thread.of_kernel:
            groups.setdefault(thread.tgid, []).append(thread)
    for tgid, group in groups.items():
        # A leader that has ended keeps its name, but has left its memory to the others.
        leader = next((t for t in group if t.pid == tgid), group[0])
        user = next((t for t in (leader, *group) if t.mm), None)
        if user is not None:
            yield _Process(tgid, leader.comm, leader.memcg, user.mm, len(group), user.address)


class _Rows:
    """Makes the rows of processes."""

    def __init__(self, image: Image, reader: _Reader, info: ImageInfo, is_moving: bool) -> None:
        self._image = image
        self._reader = reader
        self._info = info
        self._is_moving = is_moving

    def of(
        self, process: _Process, counters: _Counters, mapped: Mapped | None
    ) -> Iterator[tuple[Value, ...]]:
        """The rows of a process, but those in which all is 0."""
        for item in ITEMS.values():
            counter = counters.get(item)
            row = self._counted(process, item, counter)
            if mapped is not None:
                row += self._checked(item, counter, mapped)
            if any(row[at] != 0 for at in _COUNTED) or (mapped and mapped.total(item)):
                yield row

    def _counted(
        self, process: _Process, item: str, counter: RssCounter | None
    ) -> tuple[Value, ...]:
        size, payers = self._info.page_size, self._reader.payers
        approximate: Value = NotRead("the counters of the process are not in the image")
        exact, error = approximate, approximate
        if counter is not None:
            approximate = counter.approximate
            exact = counter.exact
            if exact is None:
                lost = "what CPUs or tasks hold of a counter is not in the image"
                exact = error = NotRead(lost)
            else:
                error = approximate - exact
        memcg: Value = process.memcg
        if memcg is None:
            memcg = NotRead("the memcg of the task could not be read")
        return (
            process.pid, process.comm,
            payers.path(process.memcg) if process.memcg else memcg, memcg,
            process.mm, process.threads if self._reader.is_all else _NOT_ALL,
            item, approximate, exact, error, self._bound(process, item),
            per_node_bound(len(self._info.nodes)),
            _times(exact, size), _times(error, size),
        )  # fmt: skip

    def _bound(self, process: _Process, item: str) -> Value:
        if counts_by_task(self._image) and not self._reader.is_all:
            return _NOT_ALL
        bound = rss_bounds(self._image, self._reader.users(process.mm))[item]
        return NotRead("percpu_counter_batch is not known") if bound is None else bound

    def _checked(self, item: str, counter: RssCounter | None, pages: Mapped) -> tuple[Value, ...]:
        nodes = self._info.nodes
        on_nodes: tuple[Value, ...] = tuple(pages.pages[item, nid] for nid in nodes)
        if item == "swapents":
            on_nodes = (None,) * len(nodes)
        mapped, exact = pages.total(item), None if counter is None else counter.exact
        if pages.missing:
            lost = "part of the page tables, or of the pages in them, is not in the image"
            reason = NotRead(STOPPED if self._image.progress.stop else lost)
            return (reason, reason, None, *(None if n is None else reason for n in on_nodes))
        if exact is None:
            return (mapped, NotRead("the exact number of pages is not known"), None, *on_nodes)
        difference = exact - mapped
        status = "exact" if not difference else "moving" if self._is_moving else "differs"
        return (mapped, difference, status, *on_nodes)


_COUNTED = [i for i, c in enumerate(COLUMNS) if c.name in ("approximate", "exact")]
_NOT_ALL = NotRead("not all tasks could be read")


def _times(pages: Value, size: int) -> Value:
    return pages * size if isinstance(pages, int) else pages


def _may_differ(image: Image) -> bool:
    return image.is_moving or any(cpu.busy for cpu in read_running(image))


def _run(image: Image, args: Namespace) -> Answer:
    return rss(image, args.check)


VIEW = View(
    name="rss",
    help="pages mapped by processes: the cheap counter, the exact one, how far apart they may be",
    description="Lists the counters of mapped pages of every process, and their errors.",
    run=_run,
    arguments=(
        Argument(
            ("--check",),
            {"action": "store_true", "help": "hold them against the page tables (x86-64)"},
        ),
    ),
    choices=("memcg", "sort", "fields"),
)
