# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Subcommands
-----------

The audit and the views, as subcommands of whatever parses arguments: the command line, and
``%memcg`` in drgn. Both parse and run them here, so that they are the same.
"""

from __future__ import annotations

import signal
import sys
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from memcg_inspect.image.image import Image
from memcg_inspect.image.missing import needing_all, why_missing
from memcg_inspect.model import Report
from memcg_inspect.tables import Answer, Choice, UsageError, as_path, check_fields, choose
from memcg_inspect.views import columns, views
from memcg_inspect.views.payers import check_choice
from memcg_inspect.views.view import View

__all__ = ("add_subcommands", "answer", "exit_status", "show")

_STATUS = {"exact": 0, "findings": 1, "incomplete": 3, "moving": 3}
_INCOMPLETE = 3
_INTERRUPTED = 130

#: What each choice of a view adds to its parser.
_CHOICES: dict[str, tuple[str, dict[str, object]]] = {
    "memcg": (
        "--memcg",
        {
            "metavar": "PATH",
            "type": as_path,
            "help": "only this memcg: a path, a pattern for paths, an address",
        },
    ),
    "node": ("--node", {"metavar": "NID", "type": int, "help": "only this NUMA node"}),
    "sort": (
        "--sort",
        {"metavar": "FIELD", "help": "sort by it; FIELD:asc or FIELD:desc says which way"},
    ),
    "fields": (
        "--fields",
        {"metavar": "FIELD,...", "help": "show these fields; all for every field"},
    ),
}


def add_subcommands(
    parser: ArgumentParser, add_options: Callable[[ArgumentParser], None] = lambda parser: None
) -> None:
    """
    Add the audit and all views to a parser.

    :param add_options: adds what every subcommand has of this face's own
    """
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    audit = commands.add_parser(
        "audit",
        help="check every identity between charges and counters",
        description="Exit status: 0 all exact, 1 at least one finding, 2 the command could not "
        "be run, 3 nothing found but something could not be read or was still moving, "
        "130 interrupted, 70 a fault of the program itself.",
    )
    add_options(audit)
    audit.add_argument("--json", action="store_true", help="print one JSON document")
    audit.add_argument("--all", action="store_true", help="print rows that are all zero, too")
    audit.set_defaults(view=None)
    for view in views():
        added = commands.add_parser(
            view.name,
            help=view.help,
            description=f"{view.description} Exit status: 0 done, 2 the command could not be run, "
            "3 something could not be read, 130 interrupted.",
        )
        add_options(added)
        _add_view(added, view)


def _add_view(parser: ArgumentParser, view: View) -> None:
    for argument in view.arguments:
        parser.add_argument(*argument.flags, **argument.options)
    for name in view.choices:
        flag, options = _CHOICES[name]
        parser.add_argument(flag, **options)  # type: ignore[arg-type]
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print one JSON document")
    how.add_argument(
        "--scripted",
        action="store_true",
        help="print exact values separated by tabs, no headings; an empty line between tables",
    )
    parser.set_defaults(view=view)


def answer(image: Image, args: Namespace) -> Report | Answer:
    """
    Find out what is asked for.

    :raises MemcgInspectError: if it cannot be answered
    """
    if args.view is not None:
        return _view(image, args)
    from memcg_inspect.collect import audit

    with _attended(image):
        return audit(image)


def show(result: Report | Answer, args: Namespace) -> None:
    """
    Print an answer to standard output.

    :raises BrokenPipeError: if nobody reads it
    """
    if isinstance(result, Report):
        _show_report(result, args)
    else:
        _show_answer(result, args)
    sys.stdout.flush()


@contextmanager
def _attended(image: Image) -> Iterator[None]:
    """Show how far the work is; the first Ctrl-C ends it with what there is, a second at once."""
    from memcg_inspect.render.progress import progress_bar

    progress = image.progress
    progress.stop = False
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: FrameType | None) -> None:
        progress.stop = True
        signal.signal(signal.SIGINT, before)

    if is_main:
        signal.signal(signal.SIGINT, stop)
    nobody = progress.tell
    try:
        with progress_bar() as progress.tell:
            yield
    finally:
        progress.tell = nobody
        if is_main:
            signal.signal(signal.SIGINT, before)


def _show_report(report: Report, args: Namespace) -> None:
    from memcg_inspect.render.json_report import to_json
    from memcg_inspect.render.terminal import make_console, print_report

    if args.json:
        print(to_json(report))
    else:
        print_report(report, make_console(), show_all=args.all)


def _view(image: Image, args: Namespace) -> Answer:
    # Programs get all fields, people those that fit on a screen.
    fields = _fields(getattr(args, "fields", None))
    choice = Choice(
        memcg=getattr(args, "memcg", None),
        node=getattr(args, "node", None),
        sort=getattr(args, "sort", None),
        fields=["all"] if fields is None and args.json else fields,
    )
    # Before the work, which may be long.
    check_fields(columns(args.view.name), choice)
    with _attended(image), needing_all():
        check_choice(image, choice)
        found = args.view.run(image, args)
    missing = why_missing(image, found.coverage.values())
    found = replace(
        found,
        interrupted=found.interrupted or image.progress.stop,
        notes=found.notes + tuple(note for note in missing if note not in found.notes),
    )
    return choose(found, choice)


def _fields(wanted: str | None) -> list[str] | None:
    if wanted is None:
        return None
    names = [name.strip() for name in wanted.split(",")]
    if not any(names):
        raise UsageError("--fields takes names of fields, or all")
    return [name for name in names if name]


def _show_answer(answer: Answer, args: Namespace) -> None:
    from memcg_inspect.render.tables import (
        answer_to_json,
        print_answer,
        print_scripted,
        print_text,
    )
    from memcg_inspect.render.terminal import make_console

    if args.json:
        print(answer_to_json(answer))
    elif args.scripted:
        print_scripted(answer, make_console())
    elif answer.text is not None:
        print_text(answer, make_console())
    else:
        print_answer(answer, make_console())


def exit_status(result: Report | Answer) -> int:
    """Return the exit status that says how it went."""
    if result.interrupted:
        return _INTERRUPTED
    if isinstance(result, Report):
        return _STATUS[result.verdict]
    return 0 if result.is_whole else _INCOMPLETE
