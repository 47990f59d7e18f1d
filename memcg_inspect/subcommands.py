# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Subcommands
-----------

The audit and the views as subcommands of an argument parser. The command line and ``%memcg`` in
drgn both use this module, so that their commands and options are the same. The options of a command
are added when it is parsed: what it needs takes long to import.
"""

from __future__ import annotations

import shutil
import textwrap
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from memcg_inspect.arguments import Parser
from memcg_inspect.names import COMMAND_HELP

__all__ = ("CHOICES", "MOST_ROWS", "add_subcommands", "add_view", "command_list")


def _path(text: str) -> str:
    """Parse the argument of ``--memcg``."""
    from memcg_inspect.tables import as_path

    return as_path(text)


#: The options that choose rows and columns.
CHOICES: dict[str, tuple[str, dict[str, Any]]] = {
    "memcg": (
        "--memcg",
        {
            "metavar": "PATH",
            "type": _path,
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
MOST_ROWS = 20
#: The option of views whose tables are ranked.
_TOP: dict[str, Any] = {
    "metavar": "N",
    "type": _rows,
    "help": f"list the first N rows, and sum up the others in one line (default: {MOST_ROWS}; "
    "0: list all rows, as --json and --scripted do)",
}

#: The option of these views that compares.
_SINCE: dict[str, Any] = {
    "metavar": "FILE",
    "help": "show what grew since this file was printed by the same command with --json",
}

_TABLE_HELP = {
    "diagnoses": "print all causes of findings",
    "findings": "print the rows that are not exact, and the findings with their evidence",
    "identities": "print the table of identities",
    "rows": "print one table with the rows of all identities",
    "skew": "print the table of charges by charged node and backing node",
    "timings": "print the time that each step took, and what it read of the image",
}


def add_subcommands(
    parser: Parser, add_options: Callable[[ArgumentParser], None] = lambda parser: None
) -> Any:
    """
    Add the audit and all views to a parser.

    :param add_options: adds options of the front end to the parser of a subcommand
    :return: what ``ArgumentParser.add_subparsers()`` returns
    """
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def fill(name: str, added: Parser) -> None:
        add_options(added)
        if name == "audit":
            _add_audit(added)
            return
        from memcg_inspect.views import view_of

        add_view(added, view_of(name))

    for name, help in COMMAND_HELP.items():
        commands.add_parser(name, help=help, fill=partial(fill, name))
    return commands


def command_list(prog: str, more: Mapping[str, str] = MappingProxyType({})) -> str:
    """
    Return the list of commands, which is printed if no command is given.

    :param prog: how the program is called
    :param more: names and one line of help of the commands that the front end adds
    """
    known = {**COMMAND_HELP, **more}
    wide = max(map(len, known))
    room = max(40, shutil.get_terminal_size().columns - 1)
    lines = [f"{prog} COMMAND [OPTION]... answers one question about memory cgroups:", ""]
    for name, help in known.items():
        head = f"  {name:{wide}}  "
        lines += textwrap.wrap(help, room, initial_indent=head, subsequent_indent=" " * len(head))
    lines += ["", f"{prog} COMMAND --help shows the options of a command, and examples."]
    return "".join(f"{line}\n" for line in lines)


def _add_audit(parser: Parser) -> None:
    from memcg_inspect.report import WAIT
    from memcg_inspect.report_tables import TABLES

    parser.description = (
        "Compares the memory charged to memcgs with the kernel's counters, and "
        "prints the verdict, what was checked and the causes of what was found, on one screen. "
        "Options print parts of the report, or with --all everything. "
        "Exit status: 0 all exact, 1 at least one finding, 2 the command could not be run, 3 no "
        "finding but something could not be read or was still changing, 130 interrupted, 70 a bug "
        "in this program."
    )
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
    for flag, options in CHOICES.values():
        tables.add_argument(flag, **options)
    _add_formats(parser)
    parser.set_defaults(view=None)
    parser.example_of = "audit"


def add_view(parser: Parser, view: Any) -> None:
    """
    Add the arguments of a view to the parser of its command.

    :param view: :class:`~memcg_inspect.views.view.View`, whose import takes long
    """
    parser.description = (
        f"{view.description} Exit status: 0 done, 2 the command could not be run, "
        f"3 {view.incomplete}, 130 interrupted, 70 a bug in this program."
    )
    for argument in view.arguments:
        parser.add_argument(*argument.flags, **argument.options)
    for name in view.choices:
        flag, options = ("--top", _TOP) if name == "top" else CHOICES[name]
        parser.add_argument(flag, **options)
        if name == "memcg":
            flag, options = CHOICES["subtree"]
            parser.add_argument(flag, **options)
        if name == "top" and view.compares:
            parser.add_argument("--since", **_SINCE)
    _add_formats(parser)
    parser.set_defaults(view=view, table=None, explain=None)
    parser.example_of = view.name


def _add_formats(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--exact", action="store_true", help="print sizes in bytes, where text has 1.2 GiB"
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="write one HTML page with pictures and tables, too; it needs no other file",
    )
    parser.add_argument(
        "--svg", metavar="FILE", help="write the first picture of that page as SVG, too"
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
