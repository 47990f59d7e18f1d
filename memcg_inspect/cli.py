# SPDX-License-Identifier: LGPL-2.1-or-later
"""The command line: parse arguments, open the image, run the command, return its exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from memcg_inspect import __version__
from memcg_inspect.arguments import CommonOptions, Parser, number_of_jobs
from memcg_inspect.completion import SHELLS, complete, completion_script
from memcg_inspect.names import COMMANDS, MORE_HELP
from memcg_inspect.output import check_output, give_up, output
from memcg_inspect.subcommands import add_subcommands, command_list

# What runs a command is imported when one runs: --help needs none of it.

__all__ = ("main", "make_parser")

EXIT_UNUSABLE = 2
EXIT_FAULT = 70
EXIT_INTERRUPTED = 130


class _Parser(Parser):
    """A parser that says in one line which argument is wrong."""

    def error(self, message: str) -> NoReturn:
        command = self.prog.partition(" ")[2]
        where = f"{command}: " if command else ""
        from memcg_inspect.tables import UsageError

        raise UsageError(f"{where}{message} ({self.prog} --help shows the usage)")

    def print_help(self, file: Any = None) -> None:
        """Print the help to standard output. argparse would not say that it cannot be written."""
        _print_text(self.format_help)


class _Version(argparse.Action):
    """Print the versions and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> NoReturn:
        from drgn import __version__ as drgn_version

        text = f"{parser.prog} {__version__} (drgn {drgn_version})\n"
        parser.exit(_print_text(lambda: text))


def _architectures(**kwargs: Any) -> list[str]:
    """Return the names of architectures. argcomplete calls it, too."""
    from drgn import Architecture

    return [architecture.name for architecture in Architecture]


def _architecture(text: str) -> str:
    """Parse the argument of ``--architecture``."""
    if text.upper() not in (names := _architectures()):
        choices = ", ".join(map(repr, names))
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {choices})")
    return text.upper()


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
        from memcg_inspect.running import run, run_without_image

        if args.run is None:
            return run(args)
        return args.run(args) if args.opens else run_without_image(args)
    except KeyboardInterrupt:
        _complain("interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> int:
    from memcg_inspect.bug import BUG, traceback_lines
    from memcg_inspect.model import MemcgInspectError

    if isinstance(error, MemcgInspectError):
        _complain(str(error))
        return EXIT_UNUSABLE
    _complain(BUG, traceback_lines(error))
    return EXIT_FAULT


def _complain(message: str, lines: str = "") -> None:
    """
    Print a message to standard error.

    If nothing can be written there, the exit status alone must say what happened.

    :param lines: of :func:`~memcg_inspect.bug.traceback_lines`, printed before it
    """
    if sys.stderr is None:
        return
    from memcg_inspect.escape import printable

    try:
        # A message may have names from the image, e.g. those of the memcgs that there are.
        sys.stderr.write(f"{lines}memcg-inspect: {printable(message)}\n")
        sys.stderr.flush()
    except OSError:
        give_up(sys.stderr)


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = _Parser(
        prog="memcg-inspect",
        description="Compare the memory charged to Linux memory cgroups with the kernel's "
        "counters, to the byte, in a vmcore or a running kernel.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    _add_image_options(parser)
    parser.set_defaults(make_text=None, run=None, opens=False, **_DEFAULTS)
    commands = add_subcommands(parser, _add_image_options)
    for name in _ARGUMENTS:
        commands.add_parser(name, help=MORE_HELP[name], fill=partial(_fill, name))
    printed = commands.add_parser("schema", help=MORE_HELP["schema"], description=_SCHEMA)
    printed.add_argument("of", nargs="?", choices=_WITH_SCHEMA, default="audit", metavar="COMMAND",
                         help="name of the command (default: audit)")  # fmt: skip
    printed.set_defaults(make_text=_schema)
    help = MORE_HELP["completion"]
    completion = commands.add_parser("completion", help=help, description=_COMPLETION)
    completion.add_argument("shell", choices=SHELLS, help="name of the shell")
    completion.set_defaults(make_text=lambda args: completion_script(args.shell))
    return parser


#: Where the arguments of commands are that need more than an image.
_ARGUMENTS = {
    **dict.fromkeys(("snapshot", "diff", "watch"), "snapshot_arguments"),
    "top": "top_arguments",
    "metrics": "metrics_arguments",
    "crash": "crash_arguments",
    **dict.fromkeys(("fleet", "summary"), "fleet_arguments"),
}


def _fill(name: str, parser: Parser) -> None:
    module = import_module(f"memcg_inspect.{_ARGUMENTS[name]}")
    module.fill(name, parser, CommonOptions(_add_image_options, _add_type_options))


_WITH_SCHEMA = (*COMMANDS, "diff", "watch", "fleet", "summary")
_SCHEMA = (
    "Prints the JSON Schema (draft 2020-12) of the document that a command prints with --json."
)
_COMPLETION = (
    "Prints a script that makes a shell complete commands and options. In bash: "
    'eval "$(memcg-inspect completion bash)". Needs the Python package argcomplete.'
)


def _schema(args: argparse.Namespace) -> str:
    from memcg_inspect.answers import schema
    from memcg_inspect.render.documents import to_json

    return to_json(schema(args.of))


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
        "MEMCG_INSPECT_COPIES is the most that all copies take, such as 20G (default: half of the "
        "room there; 0: copies are temporary)",
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
        "(default: 10)",
    )
    _add_work_options(images)
    types = _add_type_options(parser)
    parser.argument_default = argparse.SUPPRESS
    types.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error", "critical", "none"],
        help="print log messages of at least this level to standard error (default: error)",
    )
    parser.argument_default = None


def _add_type_options(parser: argparse.ArgumentParser) -> Any:
    """Add the options that say where types are; return their group."""
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
    architecture = types.add_argument(
        "--architecture",
        metavar="ARCH",
        type=_architecture,
        help="architecture of the image, if the image does not record it",
    )
    architecture.completer = _architectures  # type: ignore[attr-defined]
    types.add_argument("--vmcoreinfo", metavar="PATH", help="read VMCOREINFO from this file")
    parser.argument_default = None
    return types


def _add_work_options(images: Any) -> None:
    """
    Add the options that say how much of the machine a command may use.

    :param images: group of arguments
    """
    images.add_argument(
        "--jobs",
        metavar="N",
        type=number_of_jobs,
        help="with -c: number of processes that share the reading of all pages, and of the "
        "counters of many memcgs (default: that of the cores if the image has more than 4 GiB of "
        "memory)",
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


def _list_commands() -> str:
    first = "Where to begin: memcg-inspect audit -c VMCORE (without -c: the running kernel)."
    return f"{command_list('memcg-inspect', MORE_HELP)}{first}\n"


def _print_text(make: Callable[[], str]) -> int:
    """Run a command that needs no image."""
    check_output()
    text = make()
    output(lambda: print(text, end="", flush=True))
    return 0
