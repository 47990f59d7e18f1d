# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Audits of many dumps
--------------------

:func:`run_fleet` gives each dump to a process of this machine, or to a worker of dask, and yields
the results as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

from memcg_inspect.fleet.one import audit_dump, end_audits, failed, identity_of
from memcg_inspect.image.dask import (
    WorkersEndedError,
    check_workers,
    dask_client,
    dask_errors,
)
from memcg_inspect.image.place import code_of_program
from memcg_inspect.model_fleet import DumpResult

__all__ = ("fleet_status", "left_to_do", "run_fleet")

#: Exit status of a dump that no worker could finish.
_UNUSABLE = 2
#: Seconds after which to look whether anybody is still at work.
_LOOK = 10.0


def left_to_do(
    paths: Iterable[str], done: Mapping[str, DumpResult], retry: bool = False
) -> Sequence[str]:
    """
    Return the dumps that are to be audited.

    :param paths: absolute paths
    :param done: the last result of each dump, by its path. A dump that was changed since is audited
        again.
    :param retry: whether to try again what could not be read
    """
    known = {
        (result.dump, result.bytes, result.mtime_ns)
        for result in done.values()
        if not (retry and result.error is not None)
    }
    return [path for path in paths if (path, *identity_of(path)) not in known]


def run_fleet(
    paths: Sequence[str], options: Mapping[str, Any], jobs: int, dask: str | None = None
) -> Generator[DumpResult, None, None]:
    """
    Audit dumps, and yield the result of each when it is done.

    :param paths: absolute paths
    :param options: see :func:`~memcg_inspect.fleet.one.audit_dump`
    :param jobs: number of processes of this machine
    :param dask: address of a dask scheduler, whose workers are used instead
    :raises ImageError: if the scheduler cannot be used
    """
    with _here(jobs) if dask is None else _there(dask) as (executor, check):
        code = code_of_program()
        running = {executor.submit(audit_dump, options, path, code): path for path in paths}
        while running:
            done = wait(running, _LOOK, FIRST_COMPLETED).done
            if not done:
                check()
            for future in done:
                yield _result(future, running.pop(future))


def _result(future: Future[DumpResult], path: str) -> DumpResult:
    try:
        with dask_errors():
            return future.result()
    except WorkersEndedError as error:
        return failed(path, _UNUSABLE, str(error))


@contextmanager
def _here(jobs: int) -> Iterator[tuple[Executor, Callable[[], None]]]:
    """Yield threads, each of which waits for one process. Audits that run at the end are ended."""
    executor = ThreadPoolExecutor(jobs)
    try:
        yield executor, lambda: None
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        end_audits()
        executor.shutdown()


@contextmanager
def _there(address: str) -> Iterator[tuple[Executor, Callable[[], None]]]:
    """Yield the workers of dask, and a function that raises an error if there is none."""
    with dask_client(address) as client:
        yield client.get_executor(), partial(check_workers, client)


def fleet_status(results: Iterable[DumpResult]) -> int:
    """
    Return the exit status of all audits together.

    :return: 1 if one has findings, else 3 if one could not be read, or not all of it; else 0
    """
    found = {result.status for result in results}
    if 1 in found:
        return 1
    return 3 if found - {0} else 0
