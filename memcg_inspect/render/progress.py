# SPDX-License-Identifier: LGPL-2.1-or-later
"""The progress bar, which is shown on a terminal only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

__all__ = ("progress_bar",)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """
    Show a progress bar on standard error while a block runs.

    :return: function to call with the name of a walk, and the share of it that is done
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what, share: None
        return
    columns = (
        TextColumn("reading {task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
