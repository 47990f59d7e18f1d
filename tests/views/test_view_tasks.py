# SPDX-License-Identifier: LGPL-2.1-or-later
"""``tasks`` is compared with the guest's files, drgn's helpers, and a planted fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from drgn import Object, Program, cast
from drgn.helpers.linux.cgroup import cgroup_path
from drgn.helpers.linux.pid import for_each_task
from support.guest_files import path_of
from support.guests import (
    KERNELS,
    PERNODE_KERNELS,
    GuestImage,
    Lab,
    Plant,
    series,
)

from memcg_inspect.image.image import image_of
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.tasks import tasks

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]

ALL = (*KERNELS, *PERNODE_KERNELS)


def rows(prog: Program) -> list[dict[str, object]]:
    table = tasks(image_of(prog)).tables[0]
    return [table.values(row) for row in table.rows]


def procs(folder: Path) -> dict[int, str]:
    """Return the memcg of each process, from cgroup.procs."""
    return {
        int(pid): path_of(file, folder)
        for file in folder.rglob("cgroup.procs")
        for pid in file.read_text().split()
    }


def names(folder: Path) -> dict[int, str]:
    """Return the name of each process, from /proc/PID/status."""
    text = (folder / "proc/tasks").read_text()
    found = re.findall(r"^Name:\t(.*)\n(?:.*\n)*?Tgid:\t(\d+)$", text, re.MULTILINE)
    return {int(tgid): name for name, tgid in found}


def of_processes(image: GuestImage) -> dict[int, tuple[object, object]]:
    return {
        row["pid"]: (row["memcg"], row["comm"])  # type: ignore[misc]
        for row in rows(image.program())
        if row["pid"] == row["tgid"]
    }


@pytest.mark.parametrize("kernel", ALL)
def test_processes_are_where_the_guest_says(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "4", "mixed")
    found, said = of_processes(image), procs(image.guest / "2/cgroup")
    called = names(image.guest / "2")
    # What wrote these files is gone, and a kernel thread may come and go.
    compared = {pid: path for pid, path in said.items() if called.get(pid, "") != "record"}
    there = {pid for pid in compared if pid in found}
    assert len(compared) - len(there) <= 3
    for pid in there:
        comm = str(found[pid][1])
        # /proc says of a worker what it works on, too
        assert (pid, found[pid][0]) == (pid, compared[pid])
        assert called[pid] == comm or called[pid].startswith(comm), pid
    assert len({path for pid, path in compared.items() if pid in there}) >= 20


@pytest.mark.parametrize("kernel", ALL)
def test_tasks_are_those_of_drgn(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    known: dict[int, dict[str, object]] = {row["task"]: row for row in rows(prog)}  # type: ignore[misc]
    subsys = prog["memory_cgrp_id"].value_()
    caches, states = 0, set()
    for task in for_each_task(prog):
        row = known.pop(task.value_())
        css = task.cgroups.subsys[subsys]
        path = cgroup_path(css.cgroup).decode()
        assert (row["pid"], row["tgid"], row["comm"], row["memcg"], row["memcg_address"]) == (
            task.pid.value_(), task.tgid.value_(), task.comm.string_().decode(), path,
            cast("unsigned long", css).value_(),
        )  # fmt: skip
        states.add(row["cache"])
        if hasattr(task, "objcg"):
            word = task.objcg.value_()
            assert (row["objcg"] or 0, row["cache"] == "stale") == (word & ~1, bool(word & 1))
            if word & ~1:
                caches += 1
                objcg = Object(prog, "struct obj_cgroup *", word & ~1)
                memcg = objcg.memcg.css.cgroup
                assert row["objcg_memcg"] == cgroup_path(memcg).decode()
        elif not hasattr(task, "objcgs"):
            assert row["objcg"] is row["cache"] is row["node"] is None
    assert known == {}
    if series(kernel) == "6.1":
        assert states == {None}
        assert "6.8" in tasks(image_of(prog)).notes[0]
    else:
        assert states == {"fresh", "stale"}
        assert tasks(image_of(prog)).notes == ()
        assert caches > 30 or kernel in PERNODE_KERNELS


@pytest.mark.parametrize("kernel", PERNODE_KERNELS)
def test_one_obj_cgroup_for_each_node(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    found: dict[object, list[dict[str, object]]] = {}
    for row in rows(prog):
        found.setdefault(row["task"], []).append(row)
    full = 0
    for task in for_each_task(prog):
        word = task.objcgs.value_()
        if word and not word & 1:
            array = Object(prog, "struct obj_cgroup **", word)
            here = found[task.value_()]
            assert [row["objcg"] or 0 for row in here] == [array[nid].value_() for nid in range(4)]
            if here[0]["objcg"]:
                assert [row["node"] for row in here] == [0, 1, 2, 3]
                full += 1
    assert full > 20


def test_a_node_for_each_obj_cgroup_since_they_are_by_node(lab: Lab) -> None:
    for kernel in ("6.12", "7.3"):
        found = [row for row in rows(lab.image(kernel, "4", "mixed").program()) if row["objcg"]]
        nodes = {row["node"] for row in found}
        assert nodes == ({0, 1, 2, 3} if series(kernel) == "7.3" else {None})


def test_what_is_of_another_memcg_is_wrong(lab: Lab, plant: Plant) -> None:
    image = lab.image("7.3", "4", "mixed")
    prog = image.program()
    payers = Payers(image_of(prog))
    at = {m.path: m.address for m in payers.memcgs.values() if m.state == "online"}
    thief = Object(prog, "struct mem_cgroup *", at["/files/db"]).nodeinfo[0].objcg.value_()
    victim = next(r for r in rows(prog) if r["memcg"] == "/sockets/udp" and r["cache"] == "fresh")
    other = next(r for r in rows(prog) if r["memcg"] == "/sockets/unix" and r["cache"] == "fresh")
    plant(
        image,
        (f"Object(prog, 'struct task_struct *', {victim['task']:#x}).objcg", thief),
        (f"Object(prog, 'struct task_struct *', {other['task']:#x}).objcg", thief | 1),
    )
    after = rows(open_program(ImageSource(core=str(plant.made[-1]), debuginfo="btf")))
    wrong = [row for row in after if row["cache"] == "WRONG"]
    assert [(row["pid"], row["objcg_memcg"]) for row in wrong] == [(victim["pid"], "/files/db")]
    (marked,) = [row for row in after if row["pid"] == other["pid"]]
    assert (marked["cache"], marked["objcg_memcg"]) == ("stale", "/files/db")
