# SPDX-License-Identifier: LGPL-2.1-or-later
"""The memcg of each task, and the obj_cgroup that it would charge."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from memcg_inspect.checks.identities.task_objcg import may_be_cached
from memcg_inspect.collect.image_info import image_info
from memcg_inspect.image.image import Image
from memcg_inspect.linux.kernel.sched import caches_objcg, read_tasks
from memcg_inspect.linux.mm.memcontrol import has_node_objcgs
from memcg_inspect.model_tasks import TaskCharge
from memcg_inspect.tables import Answer, Field, MemcgAddress, NotRead, Table, Value, columns_of
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.view import View

__all__ = ("VIEW", "TaskRow", "tasks")


@dataclass(frozen=True)
class TaskRow:
    """One task and one ``obj_cgroup`` that it has cached (``task_struct.objcg``)."""

    pid: Annotated[int, Field("number", "pid of the task")]
    tgid: Annotated[int, Field("number", "pid of its thread group leader", priority=4)]
    comm: Annotated[str, Field("text", "name of the task", priority=8)]
    memcg: Annotated[Value, Field("memcg", "memcg of the task", priority=9)]
    memcg_address: MemcgAddress
    objcg: Annotated[
        int | None,
        Field(
            "address", "struct obj_cgroup * that it has cached, to charge kernel memory", priority=3
        ),
    ]
    objcg_memcg: Annotated[
        Value, Field("memcg", "memcg that pays for charges to that obj_cgroup", priority=6)
    ]
    node: Annotated[
        Value,
        Field("node", "node of the obj_cgroup, on kernels that have one per node", priority=4),
    ]
    cache: Annotated[
        Value,
        Field(
            "text",
            "fresh: the obj_cgroup of its memcg; stale: marked to be updated before the next "
            "use; WRONG: of another memcg, and not marked",
            priority=8,
        ),
    ]
    task: Annotated[int, Field("address", "struct task_struct *", shown=False)]


def tasks(image: Image) -> Answer:
    """Return all tasks, and the obj_cgroups they have cached."""
    payers = Payers(image)
    rows = [
        row
        for task in sorted(read_tasks(image, payers.coverage["tasks"]), key=lambda t: t.pid)
        for row in _rows(payers, task)
    ]
    notes = () if caches_objcg(image) else ("Tasks cache an obj_cgroup since Linux 6.7.",)
    title = "tasks and the obj_cgroups they have cached"
    table = Table("tasks", title, columns_of(TaskRow), rows)
    return Answer("tasks", image_info(image), (table,), dict(payers.coverage), notes)


def _rows(payers: Payers, task: TaskCharge) -> Iterator[TaskRow]:
    own = payers.payer(task.memcg)
    row = partial(
        TaskRow,
        pid=task.pid,
        tgid=task.tgid,
        comm=task.comm,
        memcg=payers.path(task.memcg),
        memcg_address=task.memcg,
        task=task.address,
    )
    if not caches_objcg(payers.image):
        yield row(objcg=None, objcg_memcg=None, node=None, cache=None)
        return
    # A new task, or one whose array was given up, has none.
    for address in task.objcgs or (0,):
        objcg = payers.objcg(address) if address else None
        cached = payers.payer(address) if address else None
        whose: Value = payers.path(cached)
        nid: Value = None if objcg is None else objcg.nid
        if address and objcg is None:
            whose = nid = NotRead("the obj_cgroup does not exist or is not in the image")
        elif objcg is not None and nid is None and has_node_objcgs(payers.image):
            nid = NotRead("the list of obj_cgroups of its node is not all in the image")
        state = _state(payers, task, own, address, cached)
        yield row(objcg=address or None, objcg_memcg=whose, node=nid, cache=state)


def _state(
    payers: Payers, task: TaskCharge, own: int | None, address: int, cached: int | None
) -> Value:
    if task.stale:
        return "stale"
    if address and cached is None:
        known = not any(payers.coverage[s].unreadable for s in ("memcgs", "objcgs"))
        return "WRONG" if known else NotRead("obj_cgroups are not all in the image")
    root, objcgs = next(iter(payers.memcgs)), payers.objcgs().values()
    return "fresh" if may_be_cached(task, own, cached, root, objcgs) else "WRONG"


def _run(image: Image, args: Namespace) -> Answer:
    return tasks(image)


VIEW = View(
    name="tasks",
    description="Lists every task with its memcg and the obj_cgroup that it has cached to charge "
    "kernel memory (one per node where kernel memory is counted by node), and says whether the "
    "cached one is right.",
    run=_run,
    records=(TaskRow,),
)
