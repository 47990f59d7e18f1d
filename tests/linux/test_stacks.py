# SPDX-License-Identifier: LGPL-2.1-or-later
"""Stacks without debug info are those of the kernel, and of drgn with other tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from drgn.helpers.linux.pid import find_task
from support.guests import KERNELS, Lab
from support.live_guest import execute, kept

from memcg_inspect import session
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.kernel.stacktrace import read_running

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]


@pytest.mark.parametrize("kernel", KERNELS)
def test_functions_of_stacks_are_no_old_names(lab: Lab, kernel: str) -> None:
    """Functions that have returned leave addresses on the stack."""
    image = lab.image(kernel, "4", "churn", freeze="busy", seed=1)
    known = {(t.cpu, t.pid): t for t in read_running(image_of(image.program(dwarf=True)))}
    found = {(t.cpu, t.pid): t for t in read_running(image_of(image.program()))}
    assert known.keys() == found.keys()
    right = 0
    for key, task in found.items():
        # Several names can be of one address; drgn and kallsyms choose different ones.
        more = [
            name
            for name in set(task.functions) - set(known[key].functions)
            if not name.startswith(("entry_", "common_startup", "secondary_startup"))
        ]
        right += not more
    # A CPU that changes from one task to another cannot be unwound.
    assert right >= 0.8 * len(found), found
    assert sum(len(task.functions) > 3 for task in found.values()) > 2


def kernels_own(folder: Path) -> dict[int, list[str]]:
    """Return the functions on the stacks of a guest's tasks, innermost first, by pid."""
    # Tasks that ended meanwhile have no stack any more.
    script = (
        "for task in /proc/[0-9]*; do\n"
        'stack=$(cat "$task/stack" 2>/dev/null) || continue\n'
        'printf "%s\n%s\n\n" "${task#/proc/}" "$stack"\ndone\n'
    )
    stacks = {}
    for text in execute(folder, script).split("\n\n"):
        pid, *frames = text.split("\n")
        found = [re.match(r"\[<0>\] ([\w.]+)\+0x", frame) for frame in frames]
        if pid:
            stacks[int(pid)] = [name[1] for name in found if name]
    return stacks


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_session_unwinds_as_the_kernel_does(tmp_path: Path, kernel: str) -> None:
    """/proc/PID/stack leaves out the functions of the scheduler, which are innermost."""
    with kept(tmp_path, kernel, "--nodes", "2", "--freeze", "none") as qmp:
        before = kernels_own(tmp_path)
        prog = session.open(qemu=str(qmp), debuginfo="btf")
        found = {}
        for pid in before:
            task = find_task(prog, pid)
            found[pid] = [frame.name for frame in prog.stack_trace(task)] if task else None
        after = kernels_own(tmp_path)
    still = {pid: names for pid, names in before.items() if names and after.get(pid) == names}
    assert len(still) > 20
    for pid, names in still.items():
        have = found[pid]
        assert have and have[-len(names) :] == names, (pid, have)
        assert have[0] == "__schedule"
