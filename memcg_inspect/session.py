# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Sessions
--------

What ``%memcg`` and :func:`audit` return in a drgn session, in a notebook and in scripts: the
results of :mod:`memcg_inspect.report` and :mod:`memcg_inspect.tables`, shown as the program shows
them. A session keeps what it has read of a vmcore for the next command.
"""

from __future__ import annotations

import html
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from os import PathLike
from typing import Any

from drgn import Path, Program
from drgn.helpers.common.prog import takes_program_or_default

from memcg_inspect import collect, report, tables
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.image.program import DebugInfo, ImageSource, open_program
from memcg_inspect.render.documents import answer_document, report_document, to_json
from memcg_inspect.render.first_screen import MOST_LINES, first_screen
from memcg_inspect.render.progress import progress_if_needed
from memcg_inspect.render.text import answer_lines, plain_output
from memcg_inspect.render.typed import Typed

__all__ = ("Answer", "Report", "audit", "in_session", "open", "session_image")

#: Rows of each table on the first screen.
_MOST_ROWS = 20
#: Columns of notebooks, which have no terminal.
_WIDTH = 120


class Report(report.Report):
    """A report that a session shows as its first screen."""

    def __repr__(self) -> str:
        return self._text(_width())

    def _repr_html_(self) -> str:
        return _as_html(self._text(_WIDTH))

    def to_json(self) -> str:
        """Return the document of ``audit --json``."""
        return to_json(report_document(self))

    def _text(self, width: int | None) -> str:
        output = plain_output(width)
        first_screen(self, output, Typed("%memcg"))
        return output.text.rstrip("\n")


class Answer(tables.Answer):
    """Tables that a session shows as their first screen."""

    def __repr__(self) -> str:
        return self._text(_width())

    def _repr_html_(self) -> str:
        return _as_html(self._text(_WIDTH))

    @property
    def rows(self) -> list[dict[str, tables.Value]]:
        """
        Rows of the first table, as dictionaries by name of the field.

        A value that could not be read is a :class:`~memcg_inspect.tables.NotRead`.
        """
        table = self.tables[0]
        return [table.values(row) for row in table.rows]

    def to_json(self) -> str:
        """Return the document that the command prints with ``--json``."""
        return to_json(answer_document(self))

    def _text(self, width: int | None) -> str:
        output = plain_output(width)
        answer_lines(tables.largest(self, _MOST_ROWS), output)
        lines = output.text.rstrip("\n").splitlines()
        more = len(lines) - MOST_LINES
        if more > 0:
            lines[MOST_LINES - 1 :] = [f"[{more + 1:,} lines more: .rows has all rows]"]
        return "\n".join(lines)


def in_session(result: report.Report | tables.Answer) -> Any:
    """
    Return a result as a session shows it.

    :return: a :class:`Report` or an :class:`Answer`
    """
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    return Report(**values) if isinstance(result, report.Report) else Answer(**values)


def session_image(prog: Program) -> Image:
    """Return the image of a program, which keeps what one command has read for the next."""
    image = image_of(prog)
    image.keeps_walks = True
    return image


@takes_program_or_default
def audit(prog: Program, wait: float = report.WAIT) -> Report:
    """
    Compare the memory charged to memcgs with their counters.

    Unlike the helpers, this continues after a fault. ``coverage`` of the report counts what could
    not be read.

    :param wait: how long a running kernel is given to come to rest, in seconds
    :return: Report that ``memcg-inspect audit --json`` prints.
    :raises ImageError: if the kernel does not account kernel memory to memcgs, or is not
        supported
    """
    shown: Report = in_session(collect.audit(session_image(prog), wait))
    return shown


def open(
    path: Path | Sequence[Path] | None = None,
    *,
    symbols: Iterable[Path] = (),
    debuginfo: DebugInfo = "auto",
    qemu: str | None = None,
) -> Program:
    """
    Open an image, with types from its debug info or from BTF.

    A dump that is flattened, split or compressed is copied first. The line of progress is shown on
    a terminal only.

    :param path: Path of a vmcore, or paths of the parts of a split one; without it and *qemu*, the
        running kernel is opened.
    :param symbols: Paths of files with debug info.
    :param debuginfo: ``dwarf``: use debug info only; ``btf``: use BTF only; ``auto``: use BTF if
        there is no debug info.
    :param qemu: Path of a QMP socket of a guest.
    :raises ImageError: if it cannot be opened
    """
    given = () if path is None else (path,) if isinstance(path, str | bytes | PathLike) else path
    paths = tuple(os.fsdecode(name) for name in given)
    with progress_if_needed() as report:
        return open_program(
            ImageSource(
                core=paths[0] if paths else None,
                parts=paths[1:],
                qemu=qemu,
                symbols=tuple(os.fsdecode(name) for name in symbols),
                debuginfo=debuginfo,
                report=report,
            )
        )


def _width() -> int | None:
    """Return the columns of the terminal; ``None`` if there is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _as_html(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"
