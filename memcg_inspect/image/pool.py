# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Processes that are not forked
-----------------------------

Processes of other machines can share a walk: they open the image themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from drgn import Program

__all__ = ("Pool",)


@dataclass(frozen=True)
class Pool:
    """
    Processes that open the image themselves.

    :ivar executor: runs functions in them
    :ivar open: opens the image in one of them; it can be pickled
    :ivar workers: number of calls that they run at a time
    :ivar share: sends a value that all calls need; returns what to give to each as an argument
    :ivar errors: returns a block that says in one line why the processes could not do their work
    :ivar wait: waits for a call; raises :exc:`~memcg_inspect.model.ImageError` if no process is
        left that could do it
    """

    executor: Executor
    open: Callable[[], Program]
    workers: int
    share: Callable[[Any], Any] = lambda value: value
    errors: Callable[[], AbstractContextManager[None]] = nullcontext
    wait: Callable[[Future[Any]], None] = lambda future: None
