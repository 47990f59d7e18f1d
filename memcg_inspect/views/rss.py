# SPDX-License-Identifier: LGPL-2.1-or-later
"""The counters of mapped pages of processes, and their errors."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple

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
from memcg_inspect.tables import Answer, Field, NotRead, Table, Value, columns_of
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.view import Argument, View

__all__ = ("VIEW", "RssRow", "rss")


@dataclass(frozen=True)
class RssRow:
    """One counter of mapped pages (``mm->rss_stat``) of one process."""

    pid: Annotated[int, Field("number", "process (thread group)")]
    comm: Annotated[str, Field("text", "name of the process", priority=7)]
    memcg: Annotated[Value, Field("memcg", "memcg of the process", priority=6)]
    memcg_address: Annotated[Value, Field("address", "struct mem_cgroup *", shown=False)]
    mm: Annotated[int, Field("address", "struct mm_struct *; processes may share one", shown=False)]
    threads: Annotated[Value, Field("number", "threads of the process", shown=False)]
    item: Annotated[str, Field("text", "file, anon, swapents or shmem", priority=9)]
    approximate: Annotated[Value, Field("pages", "value of get_mm_counter()", priority=7)]
    exact: Annotated[
        Value,
        Field(
            "pages", "value including changes that CPUs or threads have not added yet", priority=8
        ),
    ]
    error: Annotated[Value, Field("pages", "approximate less exact", priority=9)]
    bound: Annotated[Value, Field("pages", "upper bound of the error on this machine")]
    node_bound: Annotated[
        Value,
        Field(
            "pages",
            "upper bound if each node had one atomic counter with a batch of 32",
            priority=2,
        ),
    ]
    exact_bytes: Annotated[Value, Field("bytes", "exact in bytes", shown=False)]
    error_bytes: Annotated[Value, Field("bytes", "error in bytes", shown=False)]
    mapped: Annotated[Value, Field("pages", "pages in the page tables (with --check)")] = None
    difference: Annotated[Value, Field("pages", "exact less mapped (with --check)", priority=8)] = (
        None
    )
    status: Annotated[
        Value,
        Field(
            "text", "exact, differs, or moving: the process was running (with --check)", priority=8
        ),
    ] = None
    nodes: Annotated[
        Mapping[int, Value],
        Field(
            "pages",
            "pages in the page tables that are on node {} (with --check)",
            each="node_{}",
            priority=4,
        ),
    ] = field(default_factory=dict)


#: Fields that only ``--check`` fills in.
_CHECKED = ("mapped", "difference", "status", "nodes")


class _Process(NamedTuple):
    """A thread group with an address space; kernel threads have none."""

    pid: int
    comm: str
    memcg: int | None
    mm: int
    threads: int
    user: int


def rss(image: Image, check: bool = False) -> Answer:
    """
    Return the counters of mapped pages of all processes.

    :param check: whether to compare them with the page tables
    :raises ImageError: if ``check`` is set and the format of the page tables is not supported
    """
    info = image_info(image)
    reader = _Reader(image, Payers(image), check)
    rows = _Rows(image, reader, info, check and _may_differ(image))
    processes = sorted(_processes(reader.threads))
    progress, found, ended = image.progress, [], 0
    for number, process in enumerate(processes):
        if check:
            progress.report("page tables", number / len(processes))
        read = reader.read(process)
        if read is None:
            ended += 1
            continue
        found += list(rows.of(process, *read))
    columns = columns_of(RssRow, keys=info.nodes, omit=() if check else _CHECKED)
    plural = "es" if ended > 1 else ""
    notes = (f"{ended} process{plural} ended before all of it was read.",) if ended else ()
    table = Table("rss", "pages mapped by processes", columns, found, empty="no process has any")
    return Answer("rss", info, (table,), dict(reader.payers.coverage), notes)


_Counters = Mapping[str, RssCounter]


class _Reader:
    """
    Read the counters and page tables of processes.

    On an image at rest all counters are read at once. On a running kernel they are read process by
    process, so that the counters and the page tables of a process are read at about the same time.

    :ivar is_all: whether all tasks could be read
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
        """Return how many tasks use an mm."""
        return len(self._users[mm])

    def read(self, process: _Process) -> tuple[_Counters, Mapped | None] | None:
        """Return counters and, with ``check``, page tables; ``None`` if the process has ended."""
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
        # A leader that has exited has a name but no mm: exit_mm().
        leader = next((t for t in group if t.pid == tgid), group[0])
        user = next((t for t in (leader, *group) if t.mm), None)
        if user is not None:
            yield _Process(tgid, leader.comm, leader.memcg, user.mm, len(group), user.address)


class _Rows:
    """Make the rows of processes."""

    def __init__(self, image: Image, reader: _Reader, info: ImageInfo, is_moving: bool) -> None:
        self._image = image
        self._reader = reader
        self._info = info
        self._is_moving = is_moving

    def of(self, process: _Process, counters: _Counters, mapped: Mapped | None) -> Iterator[RssRow]:
        """Return the rows of a process, without those that are all zero."""
        for item in ITEMS.values():
            counter = counters.get(item)
            row = self._counted(process, item, counter)
            if mapped is not None:
                row = self._checked(row, counter, mapped)
            is_zero = row.approximate == row.exact == 0
            if not is_zero or (mapped and mapped.total(item)):
                yield row

    def _counted(self, process: _Process, item: str, counter: RssCounter | None) -> RssRow:
        size, payers = self._info.page_size, self._reader.payers
        approximate: Value = NotRead("the counters of the process are not in the image")
        exact, error = approximate, approximate
        if counter is not None:
            approximate = counter.approximate
            exact = counter.exact
            if exact is None:
                exact = error = NotRead("the part that CPUs or tasks hold is not in the image")
            else:
                error = approximate - exact
        memcg: Value = process.memcg
        if memcg is None:
            memcg = NotRead("the memcg of the task could not be read")
        return RssRow(
            pid=process.pid,
            comm=process.comm,
            memcg=payers.path(process.memcg) if process.memcg else memcg,
            memcg_address=memcg,
            mm=process.mm,
            threads=process.threads if self._reader.is_all else _NOT_ALL,
            item=item,
            approximate=approximate,
            exact=exact,
            error=error,
            bound=self._bound(process, item),
            node_bound=per_node_bound(len(self._info.nodes)),
            exact_bytes=_times(exact, size),
            error_bytes=_times(error, size),
        )

    def _bound(self, process: _Process, item: str) -> Value:
        if counts_by_task(self._image) and not self._reader.is_all:
            return _NOT_ALL
        bound = rss_bounds(self._image, self._reader.users(process.mm))[item]
        return NotRead("the batch of the counters is not known") if bound is None else bound

    def _checked(self, row: RssRow, counter: RssCounter | None, pages: Mapped) -> RssRow:
        """Fill in the fields of ``--check``."""
        nodes: dict[int, Value] = {
            nid: None if row.item == "swapents" else pages.pages[row.item, nid]
            for nid in self._info.nodes
        }
        mapped, exact = pages.total(row.item), None if counter is None else counter.exact
        if pages.missing:
            missing = "part of the page tables, or of the pages in them, is not in the image"
            reason = NotRead(STOPPED if self._image.progress.stop else missing)
            nodes = {nid: None if found is None else reason for nid, found in nodes.items()}
            return replace(row, mapped=reason, difference=reason, nodes=nodes)
        if exact is None:
            unknown = NotRead("the exact number of pages is not known")
            return replace(row, mapped=mapped, difference=unknown, nodes=nodes)
        difference = exact - mapped
        status = "exact" if not difference else "moving" if self._is_moving else "differs"
        return replace(row, mapped=mapped, difference=difference, status=status, nodes=nodes)


_NOT_ALL = NotRead("not all tasks could be read")


def _times(pages: Value, size: int) -> Value:
    return pages * size if isinstance(pages, int) else pages


def _may_differ(image: Image) -> bool:
    return image.is_moving or any(cpu.busy for cpu in read_running(image))


def _run(image: Image, args: Namespace) -> Answer:
    return rss(image, args.check)


VIEW = View(
    name="rss",
    description="Lists the counters of mapped pages of every process, their errors, and the bounds "
    "of these errors.",
    run=_run,
    records=(RssRow,),
    arguments=(
        Argument(
            ("--check",),
            {"action": "store_true", "help": "compare the counters with the page tables"},
        ),
    ),
    choices=("memcg", "sort", "fields"),
)
