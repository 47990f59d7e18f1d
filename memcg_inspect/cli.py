# SPDX-License-Identifier: LGPL-2.1-or-later
"""The command line. Holds no logic: it opens, asks, renders, and knows exit statuses."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from types import FrameType
from typing import Any

from drgn import Architecture

from memcg_inspect.image.image import image_of
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.image.qmp import Monitor
from memcg_inspect.model import MemcgInspectError
from memcg_inspect.subcommands import add_subcommands, answer, exit_status, show
from memcg_inspect.tables import UsageError

__all__ = ("entry", "main")

EXIT_UNUSABLE = 2
EXIT_FAULT = 70
EXIT_INTERRUPTED = 130


class OutputError(MemcgInspectError):
    """Nobody can be told what was found."""


def entry() -> None:
    """Run as a program."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """
    Run one command.

    :return: exit status
    """
    try:
        args = _parser().parse_args(argv)
        return _run(args)
    except MemcgInspectError as error:
        print(f"memcg-inspect: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except KeyboardInterrupt:
        print("memcg-inspect: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception:
        traceback.print_exc()
        print(
            "memcg-inspect: this is a fault of the program itself: please report it with the "
            "lines above and the kernel's release to the project's issue tracker",
            file=sys.stderr,
        )
        return EXIT_FAULT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="memcg-inspect",
        description="Hold the memory that Linux memory cgroups are charged for against the "
        "kernel's counters, to the byte, in a vmcore or a running kernel.",
    )
    _add_image_options(parser)
    parser.set_defaults(**_DEFAULTS)
    add_subcommands(parser, _add_image_options)
    return parser


#: Of options that may stand before and behind the command: neither takes the other's back.
_DEFAULTS: dict[str, Any] = {
    "core": None,
    "qemu": None,
    "pause": False,
    "symbols": [],
    "debuginfo": "auto",
    "debug_directory": [],
    "no_default_symbols": False,
    "architecture": None,
    "vmcoreinfo": None,
    "log_level": "error",
}


def _add_image_options(parser: argparse.ArgumentParser) -> None:
    parser.argument_default = argparse.SUPPRESS  # groups take it over from here
    image = parser.add_argument_group("image").add_mutually_exclusive_group()
    image.add_argument("-c", "--core", metavar="IMAGE", help="a vmcore; default: running kernel")
    image.add_argument("--qemu", metavar="QMP_SOCKET", help="a guest of QEMU")
    parser.add_argument(
        "--pause",
        action="store_const",
        const=True,
        help="with --qemu: stop the guest while it is read, and let it go on afterwards",
    )
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
        help="where types come from: debug info (dwarf) or the kernel's own BTF; auto (the "
        "default) takes BTF where there is no debug info",
    )
    types.add_argument(
        "--debug-directory",
        metavar="PATH",
        action="append",
        help="look for debug info there, too; may be given more than once",
    )
    types.add_argument(
        "--no-default-symbols",
        action="store_const",
        const=True,
        help="use no debug info but that given with -s",
    )
    types.add_argument(
        "--architecture",
        metavar="ARCH",
        type=str.upper,
        choices=[a.name for a in Architecture],
        help="the image's architecture, in case it cannot be told from it",
    )
    types.add_argument("--vmcoreinfo", metavar="PATH", help="use this VMCOREINFO note")
    types.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error", "critical", "none"],
        help="drgn's messages of at least this level go to standard error (default: error)",
    )
    parser.argument_default = None


def _run(args: argparse.Namespace) -> int:
    if args.core is not None and args.qemu is not None:
        raise UsageError("-c and --qemu are two images, and one can be looked at")
    level = logging.CRITICAL + 1 if args.log_level == "none" else args.log_level.upper()
    logging.basicConfig(format="%(name)s: %(message)s")
    for name in ("drgn", "memcg_inspect"):
        logging.getLogger(name).setLevel(level)
    if args.pause and args.qemu is None:
        raise UsageError("--pause stops a guest of QEMU: say which with --qemu")
    # Before the work, which may be long.
    if sys.stdout is None:
        raise OutputError("output cannot be written: standard output is closed")
    with ExitStack() as guest:
        monitor = None
        if args.pause:
            monitor = guest.enter_context(closing(Monitor(args.qemu)))
        image = image_of(open_program(_source(args, monitor)))
        if monitor is not None:
            guest.enter_context(_ended_in_order())
            guest.enter_context(monitor.paused())
            image.stopped = True
        result = answer(image, args)
    # A guest does not wait for whoever reads.
    try:
        show(result, args)
    except BrokenPipeError:
        _give_up_output()  # they have enough of it
    except OSError as error:
        _give_up_output()
        raise OutputError(f"output cannot be written: {error.strerror}") from None
    return exit_status(result)


def _give_up_output() -> None:
    """Keep Python from writing the rest on exit, and from saying that it cannot."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _source(args: argparse.Namespace, monitor: Monitor | None) -> ImageSource:
    return ImageSource(
        core=args.core,
        qemu=args.qemu,
        qemu_descriptor=None if monitor is None else monitor.descriptor(),
        symbols=tuple(args.symbols),
        default_symbols=not args.no_default_symbols,
        debug_directories=tuple(args.debug_directory),
        architecture=args.architecture,
        vmcoreinfo=args.vmcoreinfo,
        debuginfo=args.debuginfo,
    )


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Have what asks a program to end go through every ``finally``, as Ctrl-C does."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, end) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
