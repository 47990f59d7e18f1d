# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Processes of dask
-----------------

Connects to a scheduler of :mod:`dask.distributed`, which is an extra: ``pip install
memcg-inspect[dask]``. If a worker ends, dask gives what it was doing to others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from memcg_inspect.image.place import place_of
from memcg_inspect.image.pool import Pool
from memcg_inspect.image.program import ImageSource
from memcg_inspect.model import ImageError

__all__ = ("WorkersEndedError", "dask_client", "dask_errors", "dask_pool")

#: Seconds to wait for a scheduler.
_TIMEOUT = 10


class WorkersEndedError(ImageError):
    """Every worker that was given some work ended while it did it."""


@contextmanager
def dask_pool(address: str, source: ImageSource) -> Iterator[Pool]:
    """
    Connect to a dask scheduler.

    :param address: such as ``tcp://HOST:8786``
    :raises ImageError: if there is none, or if it has no worker
    """
    try:
        place = place_of(source)
    except OSError as error:
        raise ImageError(f"{source.name}: {error.strerror}") from None
    with dask_client(address) as client:
        workers = sum(client.nthreads().values())
        if not workers:
            raise ImageError(f"the dask scheduler {address} has no worker")
        yield Pool(client.get_executor(), place.opened, workers, client.scatter)


@contextmanager
def dask_client(address: str) -> Iterator[Any]:
    """
    Connect to a dask scheduler.

    :return: ``distributed.Client``
    :raises ImageError: if there is none
    """
    try:
        distributed: Any = import_module("distributed")
    except ImportError:
        raise ImageError("dask is not installed: pip install 'memcg-inspect[dask]'") from None
    try:
        # Its messages would be lines beside those of this program.
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        client = distributed.Client(address, timeout=_TIMEOUT, set_as_default=False)
    except (OSError, ValueError, ImportError) as error:
        raise ImageError(f"no dask scheduler at {address}: {error}") from None
    try:
        yield client
    finally:
        client.close()


@contextmanager
def dask_errors() -> Iterator[None]:
    """
    Say in one line why processes of a pool could not do their work.

    :raises WorkersEndedError: if they ended again and again
    :raises ImageError: if the connection was lost, or if they lack a package
    """
    from concurrent.futures import CancelledError

    try:
        yield
    except ModuleNotFoundError as error:
        raise ImageError(f"a worker of dask lacks a Python package: {error}") from error
    except CancelledError as error:
        raise ImageError("the connection to the dask scheduler was lost") from error
    except Exception as error:
        # distributed is an extra, so its exceptions cannot be named here.
        if type(error).__module__.partition(".")[0] != "distributed":
            raise
        raise WorkersEndedError(f"dask: {' '.join(str(error).split())}") from error
