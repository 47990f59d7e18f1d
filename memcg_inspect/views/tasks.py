# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which memcg each task is in, and whom it would charge."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from memcg_inspect.checks.identities.task_objcg import may_be_cached
from memcg_inspect.collect.image_info import image_info
from memcg_inspect.image.image import Image
from memcg_inspect.linux.kernel.sched import caches_objcg, read_tasks
from memcg_inspect.linux.mm.memcontrol import has_node_objcgs
from memcg_inspect.model import TaskCharge
from memcg_inspect.tables import Answer, Column, NotRead, Table, Value
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.view import View

__all__ = ("VIEW", "tasks")

COLUMNS = (
    Column("pid", "number", "of the task"),
    Column("tgid", "number", "of the process that it is a thread of"),
    Column("comm", "text", "its name"),
    Column("memcg", "memcg", "memcg that it is in"),
    Column("memcg_address", "address", "struct mem_cgroup *", shown=False),
    Column("objcg", "address", "struct obj_cgroup * that it has cached, to charge kernel memory"),
    Column("objcg_memcg", "memcg", "memcg that pays for what is charged to that"),
    Column("node", "node", "node that the obj_cgroup is for, where there is one for each"),
    Column(
        "cache",
        "text",
        "fresh: that of its memcg; stale: marked to be looked up before it is used; WRONG: of "
        "another memcg, and not marked",
    ),
    Column("task", "address", "struct task_struct *", shown=False),
)


def tasks(image: Image) -> Answer:
    """Return all tasks, and the obj_cgroups they have cached."""
    payers = Payers(image)
    rows = [
        row
        for task in sorted(read_tasks(image, payers.coverage["tasks"]), key=lambda t: t.pid)
        for row in _rows(payers, task)
    ]
    notes = () if caches_objcg(image) else ("Tasks of this kernel cache no obj_cgroup (6.8 does).",)
    table = Table("tasks", "tasks and the obj_cgroups they have cached", COLUMNS, rows)
    return Answer("tasks", image_info(image), (table,), dict(payers.coverage), notes)


def _rows(payers: Payers, task: TaskCharge) -> Iterator[tuple[Value, ...]]:
    own = payers.payer(task.memcg)
    where = (task.pid, task.tgid, task.comm, payers.path(task.memcg), task.memcg)
    if not caches_objcg(payers.image):
        yield (*where, None, None, None, None, task.address)
        return
    # A task that is new, or whose array was given up, has none at all.
    for address in task.objcgs or (0,):
        objcg = payers.objcg(address) if address else None
        cached = payers.payer(address) if address else None
        whose: Value = payers.path(cached)
        nid: Value = None if objcg is None else objcg.nid
        if address and objcg is None:
            whose = nid = NotRead("there is no obj_cgroup there, or it is not in the image")
        elif objcg is not None and nid is None and has_node_objcgs(payers.image):
            nid = NotRead("the list that tells its node is not all in the image")
        yield (
            *where, address or None, whose, nid, _state(payers, task, own, address, cached),
            task.address,
        )  # fmt: skip


def _state(
    payers: Payers, task: TaskCharge, own: int | None, address: int, cached: int | None
) -> Value:
    if task.stale:
        return "stale"
    if address and cached is None:
        known = not any(payers.coverage[s].unreadable for s in ("memcgs", "objcgs"))
        return "WRONG" if known else NotRead("obj_cgroups are not all in the image")
    return "fresh" if may_be_cached(task, own, cached, next(iter(payers.memcgs))) else "WRONG"


def _run(image: Image, args: Namespace) -> Answer:
    return tasks(image)


VIEW = View(
    name="tasks",
    help="which memcg each task is in, and the obj_cgroup that it has cached",
    description="Lists every task with its memcg and with the obj_cgroup (on kernels with one "
    "for each node that account by node: obj_cgroups) it has cached, and whether that is right.",
    run=_run,
)
