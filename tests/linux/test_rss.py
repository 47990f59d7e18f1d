# SPDX-License-Identifier: LGPL-2.1-or-later
"""Counters of processes are those that a plain sum over CPUs, or over threads, finds."""

from __future__ import annotations

import pytest
from drgn import Object, Program, sizeof
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.percpu import per_cpu_ptr
from drgn.helpers.linux.pid import for_each_task
from support.guests import DEBIAN_KERNELS, GuestImage, Lab
from support.missing_pages import excluded
from support.planting import Overlay, Write

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.kernel.sched import read_threads
from memcg_inspect.linux.mm.rss_stat import (
    RssCounter,
    counts_by_task,
    per_node_bound,
    read_rss,
    rss_bounds,
)
from memcg_inspect.model import Coverage

pytestmark = [
    pytest.mark.image,
    pytest.mark.each_kernel,
    pytest.mark.parametrize("kernel", DEBIAN_KERNELS),
]

Counters = dict[int, dict[str, RssCounter]]
ITEMS = {
    "file": "MM_FILEPAGES",
    "anon": "MM_ANONPAGES",
    "swapents": "MM_SWAPENTS",
    "shmem": "MM_SHMEMPAGES",
}
CPUS = 4


@pytest.fixture
def image(lab: Lab, kernel: str) -> GuestImage:
    return lab.image(kernel, "4", "mixed")


def is_split(prog: Program) -> bool:
    """Return whether threads hold parts of the counters (up to 6.1)."""
    return bool(prog.type("struct task_struct").has_member("rss_stat"))


def users(prog: Program) -> dict[int, list[Object]]:
    """Return the threads that use each mm."""
    found: dict[int, list[Object]] = {}
    for task in for_each_task(prog):
        found.setdefault(task.mm.value_(), []).append(task)
    return found


def parts(prog: Program, threads: list[Object], slot: int) -> int:
    """Return what CPUs or threads have not added to a counter yet."""
    if is_split(prog):
        return sum(int(task.rss_stat.count[slot]) for task in threads)
    counters = threads[0].mm.rss_stat[slot].counters
    return sum(int(per_cpu_ptr(counters, cpu)[0]) for cpu in for_each_possible_cpu(prog))


def folded(prog: Program, mm: Object, slot: int) -> Object:
    return mm.rss_stat.count[slot].counter if is_split(prog) else mm.rss_stat[slot].count


def plain(prog: Program) -> Counters:
    return {
        mm: {
            item: RssCounter(int(folded(prog, tasks[0].mm, slot)), parts(prog, tasks, slot))
            for item, slot in ((item, prog[name].value_()) for item, name in ITEMS.items())
        }
        for mm, tasks in users(prog).items()
        if mm
    }


def read(prog: Program, is_all: bool = True) -> tuple[Counters, Coverage]:
    coverage, threads = Coverage(), read_threads(image_of(prog), Coverage())
    return read_rss(image_of(prog), threads, coverage, is_all), coverage


def a_task(prog: Program) -> Object:
    """Return a task that uses its mm alone."""
    return next(t for t in for_each_task(prog) if t.mm and t.mm.mm_users.counter == 1)


def test_counters_are_those_of_the_kernel(image: GuestImage) -> None:
    prog = image.own_program()
    assert counts_by_task(image_of(prog)) == is_split(prog)
    task, slot = a_task(prog), prog["MM_ANONPAGES"].value_()
    place = folded(prog, task.mm, slot)
    Overlay(prog).write((Write(place.address_ or 0, (-5).to_bytes(8, "little", signed=True)),))
    found, coverage = read(prog)
    assert found == plain(prog)
    assert (coverage.read, coverage.unreadable) == (len(found), 0)
    low = found[task.mm.value_()]["anon"]
    assert (low.folded, low.approximate) == (-5, 0)
    assert low.exact == -5 + parts(prog, [task], slot)


def test_parts_below_0(image: GuestImage) -> None:
    prog = image.own_program()
    task, slot = a_task(prog), prog["MM_SHMEMPAGES"].value_()
    if is_split(prog):
        place = task.rss_stat.count[slot]
    else:
        place = per_cpu_ptr(task.mm.rss_stat[slot].counters, 1)[0]
    # Below 0 whatever the other CPUs hold.
    data = (-1000).to_bytes(sizeof(place), "little", signed=True)
    Overlay(prog).write((Write(place.address_ or 0, data),))
    found = read(prog)[0]
    assert found == plain(prog)
    assert found[task.mm.value_()]["shmem"].parts == parts(prog, [task], slot) < 0


def test_a_process_whose_counters_are_missing(image: GuestImage) -> None:
    prog = image.own_program()
    mm, whole = a_task(prog).mm.read_(), plain(prog)
    prog.add_memory_segment(mm.rss_stat.address_of_().value_(), 8, excluded, False)
    found, coverage = read(prog)
    del whole[mm.value_()]
    assert found == whole
    assert (coverage.read, coverage.unreadable) == (len(whole), 1)


def test_parts_that_are_missing(image: GuestImage) -> None:
    """Those of a CPU. Where threads hold them, a thread that was not read may hold any."""
    prog = image.own_program()
    mm, whole = a_task(prog).mm.read_(), plain(prog)
    if is_split(prog):
        place = mm.mm_users.counter.address_ or 0
        assert read(prog, is_all=False)[0] == whole  # each has as many threads as it counts
        Overlay(prog).write((Write(place, bytes([2, 0, 0, 0])),))
        assert read(prog)[0] == whole
        expected = {i: c._replace(parts=None) for i, c in whole[mm.value_()].items()}
        assert read(prog, is_all=False)[0] == {**whole, mm.value_(): expected}
        prog.add_memory_segment(place, 4, excluded, False)
        assert read(prog, is_all=False)[0] == {**whole, mm.value_(): expected}
        return
    assert read(prog, is_all=False)[0] == whole
    counters = mm.rss_stat[prog["MM_FILEPAGES"].value_()].counters
    prog.add_memory_segment(per_cpu_ptr(counters, 1).value_(), 4, excluded, False)
    found, coverage = read(prog)
    counter = whole[mm.value_()]["file"]._replace(parts=None)
    assert found == {**whole, mm.value_(): {**whole[mm.value_()], "file": counter}}
    assert counter.exact is None
    assert (coverage.read, coverage.unreadable) == (len(whole), 1)


def test_how_far_the_central_values_can_be_off(image: GuestImage) -> None:
    prog = image.program()
    assert per_node_bound(4) == 128
    bounds = rss_bounds(image_of(prog), threads=3)
    if is_split(prog):
        # The changes of 66 faults for each thread, each of which maps up to 16 pages of a file
        most = 3 * 66 * 16
        assert int(prog["fault_around_bytes"]) == 16 * 4096
        assert bounds == {"file": most, "anon": 3 * 66, "swapents": 3 * 66, "shmem": most}
    else:
        most = (int(prog["percpu_counter_batch"]) - 1) * CPUS
        assert bounds == dict.fromkeys(ITEMS, most)
