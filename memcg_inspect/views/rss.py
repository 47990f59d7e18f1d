# SPDX-License-Identifier: LGPL-2.1-or-later
"""How many pages processes have mapped, and how wrong the cheap counters of that are."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from drgn import Program

from memcg_inspect.linux.attention import STOPPED, attention_of
from memcg_inspect.linux.image import image_info
from memcg_inspect.linux.pagewalk import Mapped, PageTableReader
from memcg_inspect.linux.rss import (
    ITEMS,
    RssCounter,
    counts_by_task,
    per_node_bound,
    read_rss,
    rss_bounds,
)
from memcg_inspect.linux.running import read_running
from memcg_inspect.linux.sched import Thread, read_threads
from memcg_inspect.model import ImageInfo
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


def rss(prog: Program, check: bool = False) -> Answer:
    """
    Return the counters of mapped pages of all processes.

    :param check: whether to hold them against the page tables
    :raises ImageError: if they are to be checked and the page tables of the machine are unknown
    """
    payers, image, attention = Payers(prog), image_info(prog), attention_of(prog)
    walker = PageTableReader(prog, payers.coverage["page_tables"]) if check else None
    threads = read_threads(prog, payers.coverage["tasks"])
    is_all = not payers.coverage["tasks"].unreadable
    counters = read_rss(prog, threads, payers.coverage["rss"], is_all)
    rows = _Rows(prog, payers, image, _users(threads), is_all)
    found: list[tuple[Value, ...]] = []
    is_moving = check and _is_moving(prog, image)
    mapped: dict[int, Mapped] = {}
    processes = sorted(_processes(threads))
    for number, process in enumerate(processes):
        if walker is not None and process.mm not in mapped:
            attention.tell("page tables", number / len(processes))
            mapped[process.mm] = walker.walk(process.mm)
        for item in ITEMS.values():
            counter = counters.get(process.mm, {}).get(item)
            row = rows.row(process, item, counter)
            pages = mapped.get(process.mm)
            if pages is not None:
                row += _checked(image, item, counter, pages, is_moving, attention.stop)
            if _is_anything(row, pages, item):
                found.append(row)
    columns: tuple[Column, ...] = COLUMNS
    if check:
        columns += CHECK_COLUMNS + tuple(
            Column(f"node_{nid}", "pages", f"of those in page tables, on node {nid}")
            for nid in image.nodes
        )
    table = Table("rss", "pages mapped by processes", columns, found, empty="no process has any")
    return Answer("rss", image, (table,), dict(payers.coverage))


def _users(threads: Iterable[Thread]) -> dict[int, int]:
    """How many tasks use each mm."""
    users: dict[int, int] = {}
    for thread in threads:
        users[thread.mm] = users.get(thread.mm, 0) + 1
    return users


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
            yield _Process(tgid, leader.comm, leader.memcg, user.mm, len(group))


class _Rows:
    """What all rows have in common."""

    def __init__(
        self,
        prog: Program,
        payers: Payers,
        image: ImageInfo,
        users: Mapping[int, int],
        is_all: bool,
    ) -> None:
        self._prog = prog
        self._payers = payers
        self._image = image
        self._users = users
        self._is_all = is_all

    def row(self, process: _Process, item: str, counter: RssCounter | None) -> tuple[Value, ...]:
        size = self._image.page_size
        not_all = NotRead("not all tasks could be read")
        bound: Value = rss_bounds(self._prog, self._users[process.mm])[item]
        if bound is None:
            bound = NotRead("percpu_counter_batch is not known")
        elif not self._is_all and counts_by_task(self._prog):
            bound = not_all
        approximate: Value = NotRead("the counters of the process are not in the image")
        exact, error = approximate, approximate
        if counter is not None:
            approximate = counter.approximate
            exact = counter.exact
            if exact is None:
                exact = error = NotRead("what CPUs or tasks hold of a counter is not in the image")
            else:
                error = approximate - exact
        memcg: Value = process.memcg
        if memcg is None:
            memcg = NotRead("the memcg of the task could not be read")
        return (
            process.pid, process.comm,
            self._payers.path(process.memcg) if process.memcg else memcg, memcg,
            process.mm, process.threads if self._is_all else not_all,
            item, approximate, exact, error, bound,
            per_node_bound(len(self._image.nodes)),
            _times(exact, size), _times(error, size),
        )  # fmt: skip


def _times(pages: Value, size: int) -> Value:
    return pages * size if isinstance(pages, int) else pages


def _is_moving(prog: Program, image: ImageInfo) -> bool:
    return image.source != "vmcore" or any(cpu.busy for cpu in read_running(prog))


def _checked(
    image: ImageInfo,
    item: str,
    counter: RssCounter | None,
    pages: Mapped,
    is_moving: bool,
    is_stopped: bool,
) -> tuple[Value, ...]:
    on_nodes: tuple[Value, ...] = tuple(pages.pages[item, nid] for nid in image.nodes)
    if item == "swapents":
        on_nodes = (None,) * len(image.nodes)
    mapped, exact = pages.total(item), None if counter is None else counter.exact
    if pages.missing:
        lost = "part of the page tables, or of the pages in them, is not in the image"
        reason = NotRead(STOPPED if is_stopped else lost)
        return (reason, reason, None, *(None if n is None else reason for n in on_nodes))
    if exact is None:
        return (mapped, NotRead("the exact number of pages is not known"), None, *on_nodes)
    difference = exact - mapped
    status = "exact" if not difference else "moving" if is_moving else "differs"
    return (mapped, difference, status, *on_nodes)


def _is_anything(row: tuple[Value, ...], pages: Mapped | None, item: str) -> bool:
    at = [i for i, column in enumerate(COLUMNS) if column.name in ("approximate", "exact")]
    return any(row[i] != 0 for i in at) or (pages is not None and bool(pages.total(item)))


def _run(prog: Program, args: Namespace) -> Answer:
    return rss(prog, args.check)


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
