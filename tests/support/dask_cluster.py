# SPDX-License-Identifier: LGPL-2.1-or-later
"""A scheduler of dask and workers, as processes of this machine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distributed import Client

#: Seconds to wait for processes to start on a machine that is busy.
_PATIENCE = 120


@dataclass
class Cluster:
    """
    A scheduler and its workers.

    :ivar address: of the scheduler
    """

    address: str
    workers: list[subprocess.Popen[bytes]]

    def kill_one(self) -> None:
        """Kill a worker, whatever it is doing."""
        self.workers.pop().kill()


@contextmanager
def cluster(folder: Path, workers: int) -> Iterator[Cluster]:
    """
    Start a scheduler and workers, each with one thread.

    :param folder: for their files
    """
    file, started = folder / "scheduler.json", list[subprocess.Popen[bytes]]()

    def start(*words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "distributed.cli." + words[0], *words[1:]]
        with (folder / f"{len(started)}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        started.append(process)
        return process

    common = ("--host", "127.0.0.1", "--no-dashboard", "--scheduler-file", str(file))
    try:
        start("dask_scheduler", "--port", "0", *common)
        one_thread = ("--nthreads", "1", "--no-nanny", "--death-timeout", str(_PATIENCE))
        running = [start("dask_worker", *common, *one_thread) for _ in range(workers)]
        end = time.monotonic() + _PATIENCE
        while not file.exists():
            assert time.monotonic() < end, "the scheduler does not start"
            time.sleep(0.1)
        with Client(scheduler_file=str(file), set_as_default=False) as client:
            client.wait_for_workers(workers, timeout=_PATIENCE)
            address = client.scheduler.address
        yield Cluster(address, running)
    finally:
        for process in reversed(started):
            process.kill()
            process.wait()
