# SPDX-License-Identifier: LGPL-2.1-or-later
"""Processes that share a walk, and what happens if one of them, or the walk, ends early."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from drgn import FaultError

from memcg_inspect.image.processes import available_cores, forked_map
from memcg_inspect.image.progress import Progress
from memcg_inspect.model import ImageError

#: Seconds until a process that should end is taken for one that does not.
PATIENCE = 20


def image() -> Any:
    return SimpleNamespace(progress=Progress(), memory=SimpleNamespace(reads=0, bytes_read=0))


def test_reads_of_all_processes_count() -> None:
    taken = image()

    def read(part: int) -> int:
        taken.memory.reads += 1
        taken.memory.bytes_read += part
        return part

    assert sum(forked_map(taken, 3)(read, range(10))) == 45
    assert (taken.memory.reads, taken.memory.bytes_read) == (10, 45)


def test_results_are_in_the_order_of_the_parts() -> None:
    def square(part: int) -> tuple[int, int]:
        time.sleep(0.02 * (part % 3 == 0))
        return part * part, os.getpid()

    found = list(forked_map(image(), 3)(square, range(20)))
    assert [number for number, _ in found] == [part * part for part in range(20)]
    assert os.getpid() not in {pid for _, pid in found}


def test_processes_inherit_what_cannot_be_pickled() -> None:
    lock = open(os.devnull)  # noqa: SIM115
    assert list(forked_map(image(), 2)(lambda part: lock.fileno() + part, [0, 1])) == [
        lock.fileno(),
        lock.fileno() + 1,
    ]


def test_only_the_first_process_reports_progress() -> None:
    told, taken = list[float](), image()
    taken.progress.report = lambda what, share: told.append(share)

    def report(part: int) -> None:
        taken.progress.report("pages", part)

    assert list(forked_map(taken, 2)(report, [1, 2])) == [None, None]
    assert told == []


def test_an_error_is_raised_where_the_walk_began() -> None:
    def fail(part: int) -> None:
        raise FaultError("not in the image", 0x1000)

    with pytest.raises(FaultError, match="not in the image") as caught:
        list(forked_map(image(), 2)(fail, [1]))
    assert caught.value.address == 0x1000


def test_a_process_that_is_killed() -> None:
    """As by the kernel, if there is not enough memory."""
    with pytest.raises(ImageError, match="try --jobs 1"):
        list(forked_map(image(), 2)(lambda part: os.kill(os.getpid(), signal.SIGKILL), [1, 2, 3]))


@pytest.mark.parametrize("most", [0, 2])
def test_processes_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    whole, made = os.fork, list[int]()

    def fork() -> int:
        if len(made) == most:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        made.append(1)
        return whole()

    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(ImageError, match="4 processes cannot be started: Resource .*: try --jobs"):
        list(forked_map(image(), 4)(abs, [1, 2, 3]))
    assert [child for child in multiprocessing.active_children() if child.is_alive()] == []


def test_a_walk_that_is_cancelled() -> None:
    """What no process has begun is left to the function, which sees that the walk is cancelled."""
    taken = image()

    def work(part: int) -> tuple[int, bool]:
        if not taken.progress.stop:
            time.sleep(0.2)
        return part, taken.progress.stop

    found = []
    for result in forked_map(taken, 1)(work, range(40)):
        found.append(result)
        taken.progress.stop = True
    assert [part for part, _ in found] == list(range(40))
    assert found[0] == (0, False)
    assert found[-1] == (39, True)


def test_processes_end_with_the_one_that_began() -> None:
    script = """
import os, sys, time
from types import SimpleNamespace
from memcg_inspect.image.processes import forked_map
from memcg_inspect.image.progress import Progress
def work(part):
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(600)
memory = SimpleNamespace(reads=0, bytes_read=0)
list(forked_map(SimpleNamespace(progress=Progress(), memory=memory), 2)(work, [1, 2]))
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        pids = [int(first.stdout.readline()) for _ in range(2)]
        first.kill()
    until = time.monotonic() + PATIENCE
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until, "they are still there"
        time.sleep(0.05)


def test_cores() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
