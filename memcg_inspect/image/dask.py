# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Processes of dask
-----------------

Connects to a scheduler of :mod:`dask.distributed`, which is an extra: ``pip install
memcg-inspect[dask]``. If a worker ends, dask gives what it was doing to others. If none is left, it
waits for one, without end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from memcg_inspect.image.place import code_of_program, place_of
from memcg_inspect.image.pool import Pool
from memcg_inspect.image.program import ImageSource
from memcg_inspect.model import ImageError

__all__ = ("WorkersEndedError", "check_workers", "dask_client", "dask_errors", "dask_pool")

#: Seconds to wait for a scheduler.
_TIMEOUT = 10
#: Seconds between two looks at the workers, and looks without any after which none will come.
_LOOK, _MOST_LOOKS = 5.0, 4


class WorkersEndedError(ImageError):
    """Every worker that was given some work ended while it did it."""


@contextmanager
def dask_pool(address: str, source: ImageSource) -> Iterator[Pool]:
    """
    Connect to a dask scheduler.

    :param address: such as ``tcp://HOST:8786``
    :raises ImageError: if there is none, or if a worker cannot do the work
    """
    try:
        place = place_of(source)
    except OSError as error:
        raise ImageError(f"{source.name}: {error.strerror}") from None
    with dask_client(address) as client:
        workers = sum(client.nthreads().values())
        # A worker that has it alone would take it along when it ends.
        share = partial(client.scatter, broadcast=True)
        wait = partial(_wait, client)
        yield Pool(client.get_executor(), place.opened, workers, share, dask_errors, wait)


def _wait(client: Any, future: Future[Any]) -> None:
    """
    Wait for a call.

    :raises ImageError: if no worker is left
    """
    while not future.done():
        if not wait_for([future], _LOOK).done:
            check_workers(client)


def check_workers(client: Any) -> None:
    """
    Check that there is a worker, or that one comes soon.

    :param client: ``distributed.Client``
    :raises ImageError: if there is none
    """
    for _ in range(_MOST_LOOKS):
        if client.nthreads():
            return
        wait_for([Future[None]()], _LOOK)
    raise ImageError("the dask scheduler has no worker any more: start one, and repeat the command")


@contextmanager
def dask_client(address: str) -> Iterator[Any]:
    """
    Connect to a dask scheduler.

    :return: ``distributed.Client``
    :raises ImageError: if there is none, if it has no worker, or if one cannot do the work
    """
    try:
        distributed: Any = import_module("distributed")
    except ImportError:
        raise ImageError("dask is not installed: pip install 'memcg-inspect[dask]'") from None
    # Their messages would be lines beside those of this program.
    for name in [*logging.root.manager.loggerDict]:
        if name.partition(".")[0] == "distributed":
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        client = distributed.Client(address, timeout=_TIMEOUT, set_as_default=False)
    except (OSError, ValueError, ImportError) as error:
        raise ImageError(f"no dask scheduler at {address}: {error}") from None
    try:
        _check_code(client, address)
        yield client
    finally:
        client.close()


def _check_code(client: Any, address: str) -> None:
    """
    Check that all workers have this program. One that cannot unpickle what it gets ends itself.

    :raises ImageError: if one has not, or if there is none
    """
    try:
        found = client.run(code_of_program)
    except Exception as error:  # whatever the worker has raised
        why = " ".join(str(error).split())
        raise ImageError(f"a worker of dask cannot run memcg-inspect: {why}") from None
    if not found:
        raise ImageError(f"the dask scheduler {address} has no worker")
    for worker, code in found.items():
        if code != code_of_program():
            raise ImageError(f"the worker {worker} has another version of memcg-inspect")


@contextmanager
def dask_errors() -> Iterator[None]:
    """
    Say in one line why processes of a pool could not do their work.

    :raises WorkersEndedError: if they ended again and again
    :raises ImageError: if the work was cancelled, or if they lack a package
    """
    from concurrent.futures import CancelledError

    try:
        yield
    except ModuleNotFoundError as error:
        raise ImageError(f"a worker of dask lacks a Python package: {error}") from error
    except CancelledError as error:
        raise ImageError(
            "the dask scheduler, or what it knew of this work, was lost: repeat the command"
        ) from error
    except Exception as error:
        # distributed is an extra, so its exceptions cannot be named here.
        if type(error).__module__.partition(".")[0] != "distributed":
            raise
        raise WorkersEndedError(f"dask: {' '.join(str(error).split())}") from error
