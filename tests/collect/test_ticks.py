# SPDX-License-Identifier: LGPL-2.1-or-later
"""Whether a machine ran between two samples."""

from __future__ import annotations

import json

import pytest
from drgn import Object, Program
from drgn.helpers.linux.cpumask import for_each_online_cpu
from drgn.helpers.linux.percpu import per_cpu
from support.guests import DEBIAN_KERNELS, Lab
from support.missing_pages import excluded, opened
from support.planting import Overlay, change

from memcg_inspect.collect.ticks import Ticks
from memcg_inspect.image.image import Image
from memcg_inspect.linux.kernel.time.jiffies import is_idle, read_jiffies

pytestmark = [
    pytest.mark.image,
    pytest.mark.each_kernel,
    pytest.mark.parametrize("kernel", DEBIAN_KERNELS),
]


def all_idle(prog: Program, *, but: int | None = None) -> Overlay:
    """Let all CPUs run their idle tasks, and one the first task of all."""
    overlay = Overlay(prog)
    for cpu in for_each_online_cpu(prog):
        rq = per_cpu(prog["runqueues"], cpu)
        task = prog["init_task"].address_ or 0
        overlay.write((change(rq.curr, task + 64 if cpu == but else rq.idle.value_()),))
    return overlay


def ticks_of(prog: Program) -> Object:
    """Return the number of ticks, a variable that BTF does not have."""
    return Object(prog, "unsigned long", address=prog.symbol("jiffies_64").address)


def test_ticks(lab: Lab, kernel: str) -> None:
    """They begin five minutes before they overflow 32 bits (INITIAL_JIFFIES), 250 a second."""
    image = lab.image(kernel, "4", "mixed")
    passed = (read_jiffies(Image(image.program())) - ((1 << 32) - 300 * 250)) / 250
    # The lab measured its steps, and takes moments between them.
    times = json.loads((image.guest / "meta.json").read_bytes())["times"]
    assert 1 < passed < sum(times.values()) + 120


@pytest.mark.parametrize("busy", [None, 0, 3])
def test_idle_cpus(lab: Lab, kernel: str, busy: int | None) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    overlay = all_idle(prog, but=busy)
    assert is_idle(Image(prog)) == (busy is None)
    overlay.clear()


def test_a_machine_that_stands_still(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    overlay = all_idle(prog, but=2)
    number, ticks = ticks_of(prog), Ticks(Image(prog))
    assert [ticks.come(), ticks.come()] == [False, False]
    assert not ticks.have_come
    overlay.write((change(number, int(number) + 1),))
    assert [ticks.come(), ticks.come()] == [True, False]
    assert ticks.have_come
    overlay.clear()


def test_a_machine_with_nothing_to_do_has_no_ticks(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    overlay = all_idle(prog)
    ticks = Ticks(Image(prog))
    assert ticks.come() and ticks.have_come
    overlay.clear()


@pytest.mark.parametrize(("lost", "may_run"), [("jiffies_64", True), ("runqueues", False)])
def test_ticks_that_cannot_be_read(lab: Lab, kernel: str, lost: str, may_run: bool) -> None:
    """Without ticks nothing is known. Without runqueues, a machine without ticks stands still."""
    prog = opened(lab.image(kernel, "4", "mixed").core)
    if lost == "runqueues":
        rq = per_cpu(prog[lost], 0)
        prog.add_memory_segment(rq.curr.address_ or 0, 8, excluded, False)
    else:
        prog.add_memory_segment(prog.symbol(lost).address, 8, excluded, False)
    ticks = Ticks(Image(prog))
    assert ticks.come() == ticks.have_come == may_run
