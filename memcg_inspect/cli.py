# SPDX-License-Identifier: LGPL-2.1-or-later
"""The command line: parse arguments, open the image, run the command, return its exit status."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from types import FrameType
from typing import Any, NoReturn, TextIO

from drgn import Architecture
from drgn import __version__ as drgn_version

from memcg_inspect import __version__
from memcg_inspect.arguments import Parser, number_of_jobs
from memcg_inspect.completion import SHELLS, complete, completion_script
from memcg_inspect.fleet_commands import FLEET_COMMANDS, add_fleet
from memcg_inspect.image.copies import LIMIT
from memcg_inspect.image.image import image_of
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.image.qmp import GREETING_TIMEOUT, Monitor
from memcg_inspect.model import MemcgInspectError
from memcg_inspect.render.documents import to_json
from memcg_inspect.render.typed import Typed
from memcg_inspect.subcommands import (
    BUG,
    COMMANDS,
    add_subcommands,
    answer,
    check_arguments,
    command_list,
    exit_status,
    schema,
    show,
    traceback_lines,
)
from memcg_inspect.tables import UsageError

__all__ = ("main", "make_parser")

EXIT_UNUSABLE = 2
EXIT_FAULT = 70
EXIT_INTERRUPTED = 130

#: An hour: no one waits longer for a monitor.
_LONGEST_TIMEOUT = 3600


class OutputError(MemcgInspectError):
    """The result cannot be written to standard output."""


class _Parser(Parser):
    """A parser that says in one line which argument is wrong."""

    def error(self, message: str) -> NoReturn:
        command = self.prog.partition(" ")[2]
        where = f"{command}: " if command else ""
        raise UsageError(f"{where}{message} ({self.prog} --help shows the usage)")


class _LogFormatter(logging.Formatter):
    """Escapes names from the image, such as those of modules, in messages of the log."""

    def format(self, record: logging.LogRecord) -> str:
        from memcg_inspect.escape import printable

        return "\n".join(map(printable, super().format(record).splitlines()))


def main(argv: Sequence[str]) -> int:
    """
    Run one command.

    :return: exit status
    """
    try:
        parser = make_parser()
        complete(parser)
        if not argv:
            return _print_text(_list_commands)
        args = parser.parse_args(argv)
        if args.make_text:
            return _print_text(lambda: args.make_text(args))
        return _run(args) if args.run is None else _run_without_image(args)
    except MemcgInspectError as error:
        _complain(str(error))
        return EXIT_UNUSABLE
    except KeyboardInterrupt:
        _complain("interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        _complain(BUG, traceback_lines(error))
        return EXIT_FAULT


def _complain(message: str, lines: str = "") -> None:
    """
    Print a message to standard error.

    If nothing can be written there, the exit status alone must say what happened.

    :param lines: of :func:`~memcg_inspect.subcommands.traceback_lines`, printed before it
    """
    if sys.stderr is None:
        return
    from memcg_inspect.escape import printable

    try:
        # A message may have names from the image, e.g. those of the memcgs that there are.
        sys.stderr.write(f"{lines}memcg-inspect: {printable(message)}\n")
        sys.stderr.flush()
    except OSError:
        _give_up(sys.stderr)


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = _Parser(
        prog="memcg-inspect",
        description="Compare the memory charged to Linux memory cgroups with the kernel's "
        "counters, to the byte, in a vmcore or a running kernel.",
    )
    version = f"%(prog)s {__version__} (drgn {drgn_version})"
    parser.add_argument(
        "--version", action="version", version=version, help="print the version and exit"
    )
    _add_image_options(parser)
    parser.set_defaults(make_text=None, run=None, **_DEFAULTS)
    commands = add_subcommands(parser, _add_image_options)
    add_fleet(commands, _add_type_options)
    help, description = _MORE["schema"]
    printed = commands.add_parser("schema", help=help, description=description)
    printed.add_argument("of", nargs="?", choices=_WITH_SCHEMA, default="audit", metavar="COMMAND",
                         help="name of the command (default: audit)")  # fmt: skip
    printed.set_defaults(make_text=lambda args: to_json(schema(args.of)))
    help, description = _MORE["completion"]
    completion = commands.add_parser("completion", help=help, description=description)
    completion.add_argument("shell", choices=SHELLS, help="name of the shell")
    completion.set_defaults(make_text=lambda args: completion_script(args.shell))
    return parser


_WITH_SCHEMA = (*COMMANDS, *FLEET_COMMANDS)

#: Commands that need no image: their help and description.
_MORE = {
    "schema": (
        "print the JSON Schema of the document of a command",
        "Prints the JSON Schema (draft 2020-12) of the document that a command prints with --json.",
    ),
    "completion": (
        "print the completion script of a shell",
        "Prints a script that makes a shell complete commands and options. In bash: "
        'eval "$(memcg-inspect completion bash)". Needs the Python package argcomplete.',
    ),
}

#: Defaults of options that may be given before or after the command. The options themselves have no
#: defaults, since the parser of the command must not reset an option that was given before it.
_DEFAULTS: dict[str, Any] = {
    "core": [],
    "qemu": None,
    "pause": False,
    "timeout": None,
    "jobs": None,
    "nice": False,
    "dask": None,
    "symbols": [],
    "debuginfo": "auto",
    "debug_directory": [],
    "no_default_symbols": False,
    "architecture": None,
    "vmcoreinfo": None,
    "log_level": "error",
}


def _add_image_options(parser: argparse.ArgumentParser) -> None:
    parser.argument_default = argparse.SUPPRESS  # argument groups inherit it
    images = parser.add_argument_group("image")
    image = images.add_mutually_exclusive_group()
    image.add_argument(
        "-c",
        "--core",
        metavar="IMAGE",
        action="append",
        help="a vmcore (default: the running kernel). Of one that was split, each part may be "
        "given; parts beside it are found. A vmcore that is split, flattened or "
        "compressed is copied to ~/.cache/memcg-inspect/dumps first, and the copy is used again. "
        f"{LIMIT} is the most that all copies take, such as 20G (default: half of the room there; "
        "0: copies are temporary)",
    )
    image.add_argument("--qemu", metavar="QMP_SOCKET", help="a running QEMU guest")
    images.add_argument(
        "--pause",
        action="store_const",
        const=True,
        help="with --qemu: stop the guest while it is read",
    )
    images.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        help="with --qemu: wait this long for QEMU, which serves one client of a monitor at a time "
        f"(default: {GREETING_TIMEOUT:g})",
    )
    _add_work_options(images)
    _add_type_options(parser)
    parser.argument_default = None


def _add_type_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where types are."""
    parser.argument_default = argparse.SUPPRESS
    types = parser.add_argument_group("debug info (as in drgn)")
    types.add_argument(
        "-s",
        "--symbols",
        metavar="VMLINUX",
        action="append",
        help="file with debug info; may be given more than once",
    )
    types.add_argument(
        "--debuginfo",
        choices=["auto", "dwarf", "btf"],
        help="where types come from: debug info (dwarf) or the kernel's own BTF (btf); auto, the "
        "default, uses BTF if there is no debug info",
    )
    types.add_argument(
        "--debug-directory",
        metavar="PATH",
        action="append",
        help="search for debug info in this directory, too; may be given more than once",
    )
    types.add_argument(
        "--no-default-symbols",
        action="store_const",
        const=True,
        help="use only debug info given with -s",
    )
    types.add_argument(
        "--architecture",
        metavar="ARCH",
        type=str.upper,
        choices=[a.name for a in Architecture],
        help="architecture of the image, if the image does not record it",
    )
    types.add_argument("--vmcoreinfo", metavar="PATH", help="read VMCOREINFO from this file")
    types.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error", "critical", "none"],
        help="print log messages of at least this level to standard error (default: error)",
    )
    parser.argument_default = None


def _add_work_options(images: Any) -> None:
    """
    Add the options that say how much of the machine a command may use.

    :param images: group of arguments
    """
    images.add_argument(
        "--jobs",
        metavar="N",
        type=number_of_jobs,
        help="with -c: number of processes that share the reading of all pages (default: that of "
        "the cores if the image has more than 4 GiB of memory)",
    )
    images.add_argument(
        "--dask",
        metavar="ADDRESS",
        help="with audit -c: let the workers of this dask scheduler, such as tcp://HOST:8786, "
        "share the reading of all pages; each must be able to read the vmcore at the same path",
    )
    images.add_argument(
        "--nice",
        action="store_const",
        const=True,
        help="run only while the machine has nothing else to do, on one core",
    )


def _run_without_image(args: argparse.Namespace) -> int:
    """Run a command of :mod:`memcg_inspect.fleet_commands`."""
    if args.core or args.qemu is not None or args.pause or args.timeout is not None:
        raise UsageError(f"{args.command} takes files as arguments, not -c or --qemu")
    _be_nice(args)
    _check_output()
    with _failed_output():
        return args.run(args)  # type: ignore[no-any-return]


def _be_nice(args: argparse.Namespace) -> None:
    if args.nice:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _run(args: argparse.Namespace) -> int:
    if args.core and args.qemu is not None:
        raise UsageError("-c and --qemu cannot be used together")
    level = logging.CRITICAL + 1 if args.log_level == "none" else args.log_level.upper()
    handler = logging.StreamHandler()
    handler.setFormatter(_LogFormatter("%(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler])
    for name in ("drgn", "memcg_inspect"):
        logging.getLogger(name).setLevel(level)
    if args.pause and args.qemu is None:
        raise UsageError("--pause needs --qemu")
    if args.timeout is not None and args.qemu is None:
        raise UsageError("--timeout needs --qemu")
    if args.jobs not in (None, 1) and not args.core:
        raise UsageError("--jobs needs -c: what is running is read by one process")
    if args.timeout is not None and not 0 <= args.timeout <= _LONGEST_TIMEOUT:
        raise UsageError(f"--timeout takes 0 to {_LONGEST_TIMEOUT} seconds")
    if args.nice and args.jobs not in (None, 1):
        raise UsageError("--nice uses one core: it cannot be used with --jobs")
    if args.dask is not None:
        _check_dask(args)
    check_arguments(args)
    _be_nice(args)
    # Check before the command runs, which may take long.
    _check_output()
    with ExitStack() as guest:
        monitor = None
        if args.pause:
            monitor = guest.enter_context(closing(Monitor(args.qemu, _timeout(args))))
        with _interrupts_kept(), _progress() as report:
            image = image_of(open_program(_source(args, monitor, report)))
        if monitor is not None:
            guest.enter_context(_signals_unwind())
            guest.enter_context(monitor.paused())
            image.stopped = True
        # Processes would share one connection to QEMU.
        image.jobs = args.jobs if args.core and not args.nice else 1
        if args.dask is not None:
            from memcg_inspect.image.dask import dask_pool

            image.pool = guest.enter_context(dask_pool(args.dask, _source(args, None, report)))
        result = answer(image, args)
    # The guest is resumed before output is written: a slow reader must not keep it stopped.
    _output(lambda: show(result, args, Typed("memcg-inspect", tuple(_image_words(args)))))
    return exit_status(result)


def _check_dask(args: argparse.Namespace) -> None:
    if args.command != "audit" or not args.core:
        raise UsageError("--dask needs audit -c")
    if args.jobs is not None or args.nice:
        raise UsageError("--dask cannot be used with --jobs or --nice: the workers do the reading")


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """Show the progress of making a copy of a dump."""
    from memcg_inspect.render.progress import progress_if_needed

    with progress_if_needed() as report:
        yield report


def _image_words(args: argparse.Namespace) -> Iterator[str]:
    """Return the options that name the image and its debug info, as they were given."""
    for flag, values in (
        ("-c", args.core),
        ("--qemu", [args.qemu]),
        ("-s", args.symbols),
        ("--debug-directory", args.debug_directory),
        ("--architecture", [args.architecture]),
        ("--vmcoreinfo", [args.vmcoreinfo]),
        ("--debuginfo", [args.debuginfo if args.debuginfo != _DEFAULTS["debuginfo"] else None]),
    ):
        for value in values:
            if value is not None:
                yield from (flag, value)
    if args.no_default_symbols:
        yield "--no-default-symbols"
    if args.pause:
        yield "--pause"


def _list_commands() -> str:
    more = [*FLEET_COMMANDS.items(), *((name, help) for name, (help, _) in _MORE.items())]
    first = "Where to begin: memcg-inspect audit -c VMCORE (without -c: the running kernel)."
    return f"{command_list('memcg-inspect', more)}{first}\n"


def _print_text(make: Callable[[], str]) -> int:
    """Run a command that needs no image."""
    _check_output()
    text = make()
    _output(lambda: print(text, end="", flush=True))
    return 0


def _check_output() -> None:
    if sys.stdout is None:
        raise OutputError("output cannot be written: standard output is closed")


def _output(write: Callable[[], None]) -> None:
    with _failed_output():
        write()


@contextmanager
def _failed_output() -> Iterator[None]:
    """
    Say in one line that standard output cannot be written.

    :raises OutputError: unless the reader of a pipe has closed it
    """
    try:
        yield
    except BrokenPipeError:
        _give_up(sys.stdout)  # the reader of the pipe has closed it
    except OSError as error:
        _give_up(sys.stdout)
        raise OutputError(f"output cannot be written: {error.strerror}") from None


def _give_up(stream: TextIO) -> None:
    """Keep Python from flushing the rest at exit, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _source(
    args: argparse.Namespace, monitor: Monitor | None, report: Callable[[str, float], None]
) -> ImageSource:
    return ImageSource(
        core=args.core[0] if args.core else None,
        parts=tuple(args.core[1:]),
        qemu=args.qemu,
        qemu_descriptor=None if monitor is None else monitor.descriptor(),
        timeout=_timeout(args),
        symbols=tuple(args.symbols),
        default_symbols=not args.no_default_symbols,
        debug_directories=tuple(args.debug_directory),
        architecture=args.architecture,
        vmcoreinfo=args.vmcoreinfo,
        debuginfo=args.debuginfo,
        report=report,
    )


def _timeout(args: argparse.Namespace) -> float:
    """Return the seconds to wait for QEMU."""
    return GREETING_TIMEOUT if args.timeout is None else float(args.timeout)


@contextmanager
def _interrupts_kept() -> Iterator[None]:
    """
    Raise KeyboardInterrupt at the end, if there was one.

    drgn loads its plugins when a program is opened. It prints what they raise, and goes on: of an
    interrupt, it does not print the traceback here.
    """
    before, seen = signal.getsignal(signal.SIGINT), False
    show = sys.unraisablehook

    def show_others(ignored: Any) -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            show(ignored)

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen = True
        raise KeyboardInterrupt

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = show_others
    try:
        yield
    finally:
        sys.unraisablehook = show
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)
    if seen:
        raise KeyboardInterrupt


@contextmanager
def _signals_unwind() -> Iterator[None]:
    """Run ``finally`` blocks on SIGTERM and SIGHUP, so that the guest is resumed."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, end) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
