# SPDX-License-Identifier: LGPL-2.1-or-later
"""The progress bar, which is shown on a terminal only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

__all__ = ("progress_bar", "progress_if_needed")

#: On the line of progress after the first Ctrl-C.
_STOPPING = "interrupted: Ctrl-C again to stop at once"

#: Share of a copy that is shown. It is reported more often.
_LEAST_STEP = 0.002


class _Hint(ProgressColumn):
    """Says how to end the program, whenever the line is drawn."""

    def __init__(self, is_stopping: Callable[[], bool]) -> None:
        super().__init__()
        self._is_stopping = is_stopping

    def render(self, task: Task) -> Text:
        return Text(_STOPPING if self._is_stopping() else "")


@contextmanager
def progress_bar(is_stopping: Callable[[], bool]) -> Iterator[Callable[[str, float], None]]:
    """
    Show a progress bar on standard error while a block runs.

    :param is_stopping: returns whether the user has interrupted the walk. The command goes on until
        it has put together what it knows.
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
        _Hint(is_stopping),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)


@contextmanager
def progress_if_needed() -> Iterator[Callable[[str, float], None]]:
    """
    Show a progress bar from the first report on, if there is any, until a block ends.

    :return: function to call, as that of :func:`progress_bar`
    """
    bar: Callable[[str, float], None] | None = None
    shown = ("", 0.0)
    with ExitStack() as stack:

        def report(what: str, share: float) -> None:
            nonlocal bar, shown
            if bar is None:
                bar = stack.enter_context(progress_bar(lambda: False))
            elif what == shown[0] and share - shown[1] < _LEAST_STEP:
                return
            shown = what, share
            bar(what, share)

        yield report
