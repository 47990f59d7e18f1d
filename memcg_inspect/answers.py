# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Answers
-------

Runs the commands that :mod:`memcg_inspect.subcommands` parses, and prints their results.
"""

from __future__ import annotations

import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

from drgn import FaultError

from memcg_inspect.files import write_file
from memcg_inspect.growth import check_earlier, grown, growth_column, read_earlier
from memcg_inspect.image.image import Image
from memcg_inspect.image.missing import as_image_errors, why_missing
from memcg_inspect.model import MemcgInspectError, Unreadable
from memcg_inspect.render.typed import Typed
from memcg_inspect.report import EXIT_STATUS, Report
from memcg_inspect.report_tables import TABLES, EffectRow, effects_answer, report_answer
from memcg_inspect.subcommands import CHOICES, MOST_ROWS
from memcg_inspect.tables import (
    Answer,
    Choice,
    UsageError,
    check_fields,
    choose,
    columns_of,
    largest,
    with_subtrees,
)
from memcg_inspect.views import NAMES, view_of
from memcg_inspect.views.payers import checked_choice
from memcg_inspect.views.view import interrupted

__all__ = (
    "answer",
    "cancellable",
    "check_arguments",
    "chosen",
    "exit_status",
    "schema",
    "show",
)

_INCOMPLETE = 3
_INTERRUPTED = 130

#: Parts of the report that are text for people unless rows and columns of their table are chosen.
_PROSE = ("diagnoses", "findings")


def schema(command: str) -> dict[str, Any]:
    """
    Return the JSON Schema of the document of a command.

    :param command: one of :data:`~memcg_inspect.names.COMMANDS`, ``diff``, ``watch``, ``fleet`` or
        ``summary``
    """
    from memcg_inspect.fleet.summary import SUMMARY
    from memcg_inspect.render.schema import answer_schema, fleet_schema, report_schema
    from memcg_inspect.snapshots.diff import DIFF, WATCH

    if command in NAMES:
        return answer_schema(command, view_of(command).records)
    for view in (SUMMARY, DIFF, WATCH):
        if command == view.name:
            return answer_schema(view.name, view.records, of_image=False)
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
            options = ", ".join(f"--{name}" for name in (*CHOICES, "scripted", "csv"))
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
    with cancellable(image):
        return audit(image, args.wait)


def show(result: Report | Answer, args: Namespace, typed: Typed) -> None:
    """
    Print a result to standard output.

    :param typed: how the user types commands
    :raises BrokenPipeError: if the reader of the pipe has closed it
    """
    # The page of an audit has all its parts.
    report = result if isinstance(result, Report) else None
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
    # If these cannot be written, the text is there.
    whole = result if report is None else report
    if args.html is not None:
        write_file(args.html, _page(whole, args, typed))
    if args.svg is not None:
        write_file(args.svg, _picture(whole))


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


def _page(result: Report | Answer, args: Namespace, typed: Typed) -> str:
    from memcg_inspect.render.first_screen import first_screen
    from memcg_inspect.render.page import answer_page, report_page
    from memcg_inspect.render.text import plain_output

    if not isinstance(result, Report):
        return answer_page(result)
    screen = plain_output(None)
    first_screen(result, screen, typed, args.exact)
    return report_page(result, screen.text)


def _picture(result: Report | Answer) -> str:
    from memcg_inspect.render.page import first_picture

    found = first_picture(result)
    if found is None:
        raise UsageError("--svg: there is nothing to draw")
    return found


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
        answer_lines(largest(result, MOST_ROWS if top is None else top), output)
    return output.text


@contextmanager
def cancellable(image: Image) -> Iterator[None]:
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
    with cancellable(image), as_image_errors():
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
    ("csv", "exact", "fields", "header", "html", "json", "scripted", "since", "sort", "svg", "top")
)
#: Answers that a session keeps.
_MOST_ANSWERS = 4
#: How often a running kernel is read if something could not be read.
_MOST_RUNS = 4


class _Answers:
    """The last answers of a session, by what was asked."""

    def __init__(self, image: Image) -> None:
        self.kept: dict[str, Answer] = {}


def _answer_of(image: Image, args: Namespace) -> Answer:
    """Run a view. In a session, the same question is answered once."""
    if image.is_moving:
        return _of_running(image, lambda: args.view.run(image, args))
    if not image.keeps_walks:
        return args.view.run(image, args)  # type: ignore[no-any-return]
    asked = {name: value for name, value in vars(args).items() if name not in _OF_OUTPUT}
    key, kept = repr(sorted(asked.items(), key=lambda item: item[0])), image.once(_Answers).kept
    found = kept.pop(key, None) or args.view.run(image, args)
    if not image.progress.stop:
        kept[key] = found  # the newest is the last
        for old in [*kept][:-_MOST_ANSWERS]:
            del kept[old]
    return found


def _of_running(image: Image, run: Callable[[], Answer]) -> Answer:
    """
    Run a view of a kernel that runs.

    Memory that is freed while it is read cannot be read, but the next sample does not need it.
    Damaged memory cannot be read in the next sample either.

    :return: the answer with the fewest unreadable objects; of the last two, if an object could not
        be read in either
    """
    best = last = run()
    for _ in range(_MOST_RUNS - 1):
        missed = _missed(last)
        if not missed or image.progress.stop:
            break
        try:
            found = run()
        except (FaultError, MemcgInspectError):
            break  # what was asked for no longer exists
        if image.progress.stop:
            break  # the user interrupted it
        if missed & _missed(found):
            return min(last, found, key=_lacking)
        best, last = min(best, found, key=_lacking), found
    return best


def _lacking(found: Answer) -> int:
    """Return the number of objects that could not be read."""
    return sum(coverage.unreadable for coverage in found.coverage.values())


def _missed(found: Answer) -> set[Unreadable]:
    """Return examples of what could not be read."""
    return {example for c in found.coverage.values() for example in c.examples}


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
        return EXIT_STATUS[result.verdict]
    return 0 if result.is_whole else _INCOMPLETE
