# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Subcommands
-----------

The audit and the views as subcommands of an argument parser. The command line and ``%memcg`` in
drgn both use this module, so that their commands and options are the same.
"""

from __future__ import annotations

import shutil
import signal
import sys
import textwrap
import threading
import traceback
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

from memcg_inspect import __version__
from memcg_inspect.arguments import Parser
from memcg_inspect.growth import check_earlier, grown, growth_column, read_earlier
from memcg_inspect.image.image import Image
from memcg_inspect.image.missing import as_image_errors, why_missing
from memcg_inspect.render.typed import Typed
from memcg_inspect.report import WAIT, Report
from memcg_inspect.report_tables import TABLES, EffectRow, effects_answer, report_answer
from memcg_inspect.tables import (
    Answer,
    Choice,
    UsageError,
    as_path,
    check_fields,
    choose,
    columns_of,
    largest,
    with_subtrees,
)
from memcg_inspect.views import NAMES, views
from memcg_inspect.views.payers import checked_choice
from memcg_inspect.views.view import View, interrupted

__all__ = (
    "BUG",
    "COMMANDS",
    "add_view",
    "add_subcommands",
    "answer",
    "check_arguments",
    "chosen",
    "command_list",
    "exit_status",
    "schema",
    "show",
    "traceback_lines",
)

#: What to say of an exception that is no :class:`~memcg_inspect.model.MemcgInspectError`.
BUG = (
    f"this is a bug in memcg-inspect {__version__}: please report it to its maintainers, with the "
    "lines above and the release of the kernel"
)
#: Frames of a traceback to print, the innermost ones.
_FRAMES = 8

_STATUS = {"exact": 0, "findings": 1, "incomplete": 3, "moving": 3}
_INCOMPLETE = 3
_INTERRUPTED = 130

#: Names of all commands that answer a question about an image.
COMMANDS = ("audit", *NAMES)

#: The options that choose rows and columns.
_CHOICES: dict[str, tuple[str, dict[str, Any]]] = {
    "memcg": (
        "--memcg",
        {
            "metavar": "PATH",
            "type": as_path,
            "action": "append",
            "help": "only rows of this memcg itself: a path, a shell pattern for paths, or an "
            "address; may be given more than once",
        },
    ),
    "subtree": (
        "--subtree",
        {
            "action": "store_true",
            "help": "with --memcg: rows of the memcgs below it, too",
        },
    ),
    "node": (
        "--node",
        {
            "metavar": "NID",
            "type": int,
            "action": "append",
            "help": "only rows of this NUMA node; may be given more than once",
        },
    ),
    "sort": (
        "--sort",
        {
            "metavar": "FIELD",
            "help": "sort rows by this field; FIELD:asc or FIELD:desc sets the order",
        },
    ),
    "fields": (
        "--fields",
        {"metavar": "FIELD,...", "help": "show these fields; all: show all fields"},
    ),
}


def _rows(text: str) -> int:
    """Parse the argument of ``--top``."""
    if not (text.isascii() and text.isdigit()):
        raise ArgumentTypeError(f"{text!r} is not a number of rows")
    return int(text)


def _seconds(text: str) -> float:
    """Parse the argument of ``--wait``."""
    if not (text.isascii() and text.isdigit() and int(text) <= _LONGEST_WAIT):
        raise ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to {_LONGEST_WAIT:,}")
    return float(text)


#: The largest argument of ``--wait``, a day.
_LONGEST_WAIT = 24 * 60 * 60
#: Rows of text without ``--top``.
_MOST_ROWS = 20
#: The option of views whose tables are ranked.
_TOP: dict[str, Any] = {
    "metavar": "N",
    "type": _rows,
    "help": f"list the first N rows, and sum up the others in one line (default: {_MOST_ROWS}; "
    "0: list all rows, as --json and --scripted do)",
}

#: The option of these views that compares.
_SINCE: dict[str, Any] = {
    "metavar": "FILE",
    "help": "show what grew since this file was printed by the same command with --json",
}

_AUDIT_HELP = "compare all memory charged to memcgs with the counters"
_TABLE_HELP = {
    "diagnoses": "print all causes of findings",
    "findings": "print the rows that are not exact, and the findings with their evidence",
    "identities": "print the table of identities",
    "rows": "print one table with the rows of all identities",
    "skew": "print the table of charges by charged node and backing node",
    "timings": "print the time that each step took, and what it read of the image",
}
#: Parts of the report that are text for people unless rows and columns of their table are chosen.
_PROSE = ("diagnoses", "findings")


def add_subcommands(
    parser: Parser, add_options: Callable[[ArgumentParser], None] = lambda parser: None
) -> Any:
    """
    Add the audit and all views to a parser.

    :param add_options: adds options of the front end to the parser of a subcommand
    :return: what ``ArgumentParser.add_subparsers()`` returns
    """
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    audit = commands.add_parser(
        "audit",
        help=_AUDIT_HELP,
        description="Compares the memory charged to memcgs with the kernel's counters, and "
        "prints the verdict, what was checked and the causes of what was found, on one screen. "
        "Options print parts of the report, or with --all everything. "
        "Exit status: 0 all exact, 1 at least one finding, 2 the command could not be run, 3 no "
        "finding but something could not be read or was still changing, 130 interrupted, 70 a bug "
        "in this program.",
    )
    add_options(audit)
    _add_audit(audit)
    for view in views():
        add_view(commands, view, add_options)
    return commands


def add_view(
    commands: Any, view: View, add_options: Callable[[ArgumentParser], None] = lambda parser: None
) -> None:
    """
    Add a view to a parser.

    :param commands: what ``ArgumentParser.add_subparsers()`` returned
    :param add_options: as in :func:`add_subcommands`
    """
    added = commands.add_parser(
        view.name,
        help=view.help,
        description=f"{view.description} Exit status: 0 done, 2 the command could not be run, "
        f"3 {view.incomplete}, 130 interrupted, 70 a bug in this program.",
    )
    add_options(added)
    _add_view(added, view)


def command_list(prog: str, more: Iterable[tuple[str, str]] = ()) -> str:
    """
    Return the list of commands, which is printed if no command is given.

    :param prog: how the program is called
    :param more: names and one line of help of the commands that the front end adds
    """
    known = [("audit", _AUDIT_HELP), *((view.name, view.help) for view in views()), *more]
    wide = max(len(name) for name, _ in known)
    room = max(40, shutil.get_terminal_size().columns - 1)
    lines = [f"{prog} COMMAND [OPTION]... answers one question about memory cgroups:", ""]
    for name, help in known:
        head = f"  {name:{wide}}  "
        lines += textwrap.wrap(help, room, initial_indent=head, subsequent_indent=" " * len(head))
    lines += ["", f"{prog} COMMAND --help shows the options of a command, and examples."]
    return "".join(f"{line}\n" for line in lines)


def _add_audit(parser: Parser) -> None:
    parser.add_argument(
        "--all", action="store_true", help="print everything: all rows of all identities"
    )
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=_seconds,
        default=WAIT,
        help="how long to read a running kernel again while few rows change, until they stand "
        f"still (default: {WAIT:.0f})",
    )
    tables = parser.add_argument_group("one part of the report")
    which = tables.add_mutually_exclusive_group()
    for name in TABLES:
        which.add_argument(
            f"--{name}", dest="table", action="store_const", const=name, help=_TABLE_HELP[name]
        )
    which.add_argument(
        "--explain",
        metavar="N",
        type=int,
        help="print what diagnosis N does to each row, beside the differences of the rows, and the "
        "functions of the kernel that could do it",
    )
    for flag, options in _CHOICES.values():
        tables.add_argument(flag, **options)
    _add_formats(parser)
    parser.set_defaults(view=None)
    parser.example_of = "audit"


def _add_view(parser: Parser, view: View) -> None:
    for argument in view.arguments:
        parser.add_argument(*argument.flags, **argument.options)
    for name in view.choices:
        flag, options = ("--top", _TOP) if name == "top" else _CHOICES[name]
        parser.add_argument(flag, **options)
        if name == "memcg":
            flag, options = _CHOICES["subtree"]
            parser.add_argument(flag, **options)
        if name == "top":
            parser.add_argument("--since", **_SINCE)
    _add_formats(parser)
    parser.set_defaults(view=view, table=None, explain=None)
    parser.example_of = view.name


def _add_formats(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--exact", action="store_true", help="print sizes in bytes, where text has 1.2 GiB"
    )
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument(
        "--json",
        action="store_true",
        help="print one JSON document (memcg-inspect schema prints its JSON Schema)",
    )
    formats.add_argument(
        "--scripted",
        action="store_const",
        const="tabs",
        help="print exact values separated by tabs, without headings; an empty line separates "
        "tables",
    )
    formats.add_argument(
        "--csv",
        dest="scripted",
        action="store_const",
        const="csv",
        help="print exact values as CSV (RFC 4180), below a line with the names of the fields; "
        "an empty line separates tables",
    )
    parser.add_argument(
        "--header",
        action="store_true",
        help="with --scripted: print a line with the names of the fields above each table",
    )


def schema(command: str) -> dict[str, Any]:
    """
    Return the JSON Schema of the document of a command.

    :param command: one of :data:`COMMANDS`
    """
    from memcg_inspect.fleet.summary import SUMMARY
    from memcg_inspect.render.schema import answer_schema, fleet_schema, report_schema

    for view in views():
        if view.name == command:
            return answer_schema(view.name, view.records)
    if command == SUMMARY.name:
        return answer_schema(SUMMARY.name, SUMMARY.records, of_image=False)
    if command == "fleet":
        return fleet_schema()
    return report_schema()


def check_arguments(args: Namespace) -> None:
    """
    Check arguments that the parser cannot check, before an image is opened.

    The file of ``--since`` takes the place of its name.

    :raises UsageError: if they are wrong, or cannot be used together
    """
    choice = _choice(args)
    if choice.subtree and not choice.memcgs:
        raise UsageError("--subtree needs --memcg")
    if args.header and not args.scripted:
        raise UsageError("--header needs --scripted")
    if args.view is not None:
        of_view = tuple(c for record in args.view.records for c in columns_of(record))
        if getattr(args, "since", None) is not None:
            args.since = read_earlier(args.since)
            check_earlier(args.since, args.view.name, choice)
            of_view += tuple(growth_column(column) for column in of_view if column.total)
        check_fields(of_view, choice)
        if getattr(args, "top", None) and (args.json or args.scripted):
            raise UsageError(
                "--top cannot be combined with --json, --scripted or --csv: they list all"
            )
    elif args.explain is not None:
        check_fields(columns_of(EffectRow), choice)
    elif args.table is None:
        if args.scripted or choice != Choice():
            options = ", ".join(f"--{name}" for name in (*_CHOICES, "scripted", "csv"))
            tables = ", ".join(f"--{name}" for name in TABLES)
            raise UsageError(f"{options} need one of {tables}")
    else:
        check_fields(columns_of(TABLES[args.table][0]), choice)


def chosen(found: Answer, args: Namespace) -> Answer:
    """Choose rows and columns of an answer, as the arguments say."""
    return choose(found, _choice(args))


def answer(image: Image, args: Namespace) -> Report | Answer:
    """
    Run a command.

    :param args: arguments that :func:`check_arguments` has checked
    :raises MemcgInspectError: if it cannot be run
    """
    if args.view is not None:
        return _view(image, args)
    from memcg_inspect.collect import audit

    with as_image_errors():
        checked_choice(image, _choice(args))
    with _cancellable(image):
        return audit(image, args.wait)


def show(result: Report | Answer, args: Namespace, typed: Typed) -> None:
    """
    Print a result to standard output.

    :param typed: how the user types commands
    :raises BrokenPipeError: if the reader of the pipe has closed it
    """
    if isinstance(result, Report) and not _is_prose(args):
        choice = with_subtrees(_choice(args), result.memcgs)
        if args.explain is not None:
            result = choose(effects_answer(result, args.explain), choice)
        elif args.table is not None:
            result = choose(report_answer(result, args.table, args.all), choice)
    text = _document(result, args) if args.json else _text(result, args, typed)
    # Names may contain characters that the encoding of the terminal does not have.
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def _is_prose(args: Namespace) -> bool:
    """Return whether a part of the report is text for people, and not a table."""
    return (
        (args.table in _PROSE or args.explain is not None)
        and not (args.json or args.scripted)
        and _choice(args) == Choice()
    )


def _document(result: Report | Answer, args: Namespace) -> str:
    from memcg_inspect.render.documents import answer_document, report_document, to_json

    if isinstance(result, Report):
        return to_json(report_document(result, args.all))
    return to_json(answer_document(result))


def _text(result: Report | Answer, args: Namespace, typed: Typed) -> str:
    from memcg_inspect.render.first_screen import (
        diagnosis_lines,
        explained_lines,
        first_screen,
    )
    from memcg_inspect.render.report import findings_lines, report_lines
    from memcg_inspect.render.text import answer_lines, as_csv, make_output, scripted

    output = make_output(args.exact)
    if isinstance(result, Report):
        if args.explain is not None:
            explained_lines(result, args.explain, output, typed, args.exact)
        elif args.table == "diagnoses":
            diagnosis_lines(result, output, typed, args.exact)
        elif args.table == "findings":
            findings_lines(result, output)
        elif args.all:
            report_lines(result, output)
        else:
            first_screen(result, output, typed, args.exact)
    elif args.scripted or result.text is not None:
        return as_csv(result) if args.scripted == "csv" else scripted(result, args.header)
    else:
        top = getattr(args, "top", None)
        answer_lines(largest(result, _MOST_ROWS if top is None else top), output)
    return output.text


def traceback_lines(error: Exception) -> str:
    """Return the last lines of the traceback of an error. Names from the image are escaped."""
    from memcg_inspect.escape import printable

    lines = "".join(traceback.format_exception(error, limit=-_FRAMES)).splitlines()
    return "".join(f"{printable(line)}\n" for line in lines)


@contextmanager
def _cancellable(image: Image) -> Iterator[None]:
    """
    Show progress, and let Ctrl-C cancel the command.

    After the first Ctrl-C, the command returns what it has found so far. A second one ends it at
    once.
    """
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
    before_report = progress.report
    try:
        with progress_bar(lambda: progress.stop) as progress.report:
            yield
    finally:
        progress.report = before_report
        if is_main:
            signal.signal(signal.SIGINT, before)


def _choice(args: Namespace) -> Choice:
    fields = _fields(getattr(args, "fields", None))
    # The JSON document of a table has all fields by default; text has those shown by default.
    has_table = args.view is not None or args.table is not None or args.explain is not None
    if fields is None and args.json and has_table:
        fields = ["all"]
    return Choice(
        memcgs=tuple(getattr(args, "memcg", None) or ()),
        nodes=tuple(getattr(args, "node", None) or ()),
        sort=getattr(args, "sort", None),
        fields=fields,
        # Of a view without --memcg, it says which counters to read.
        subtree=hasattr(args, "memcg") and args.subtree,
    )


def _view(image: Image, args: Namespace) -> Answer:
    choice, since = _choice(args), getattr(args, "since", None)
    gone = () if since is None else since.memcgs
    with _cancellable(image), as_image_errors():
        # Check before the command runs, which may take long.
        choice = checked_choice(image, choice, gone)
        found = _answer_of(image, args)
    if image.progress.stop:
        found = interrupted(found)
    missing = why_missing(image, found.coverage.values())
    found = replace(
        found,
        interrupted=found.interrupted or image.progress.stop,
        notes=found.notes + tuple(note for note in missing if note not in found.notes),
    )
    return choose(found if since is None else grown(found, since, choice), choice)


#: Arguments of a view that its answer does not depend on.
_OF_OUTPUT = frozenset(
    ("csv", "exact", "fields", "header", "json", "scripted", "since", "sort", "top")
)
#: Answers that a session keeps.
_MOST_ANSWERS = 4


class _Answers:
    """The last answers of a session, by what was asked."""

    def __init__(self, image: Image) -> None:
        self.kept: dict[str, Answer] = {}


def _answer_of(image: Image, args: Namespace) -> Answer:
    """Run a view. In a session, the same question is answered once."""
    if not image.keeps_walks or image.is_moving:
        return args.view.run(image, args)  # type: ignore[no-any-return]
    asked = {name: value for name, value in vars(args).items() if name not in _OF_OUTPUT}
    key, kept = repr(sorted(asked.items(), key=lambda item: item[0])), image.once(_Answers).kept
    found = kept.pop(key, None) or args.view.run(image, args)
    if not image.progress.stop:
        kept[key] = found  # the newest is the last
        for old in [*kept][:-_MOST_ANSWERS]:
            del kept[old]
    return found


def _fields(wanted: str | None) -> list[str] | None:
    if wanted is None:
        return None
    names = [name.strip() for name in wanted.split(",")]
    if not any(names):
        raise UsageError("--fields takes names of fields, or all")
    return [name for name in names if name]


def exit_status(result: Report | Answer) -> int:
    """Return the exit status of a command."""
    if result.interrupted:
        return _INTERRUPTED
    if isinstance(result, Report):
        return _STATUS[result.verdict]
    return 0 if result.is_whole else _INCOMPLETE
