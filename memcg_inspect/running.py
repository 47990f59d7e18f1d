# SPDX-License-Identifier: LGPL-2.1-or-later
"""Runs one command: opens the image, asks the question, prints the answer."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import count
from types import FrameType
from typing import Any

from memcg_inspect.answers import answer, check_arguments, exit_status, show
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.image.qmp import GREETING_TIMEOUT, Monitor
from memcg_inspect.output import check_output, output
from memcg_inspect.render.typed import Typed
from memcg_inspect.tables import UsageError

__all__ = ("REST", "opened_image", "paced", "run", "run_without_image", "signals_unwind")

#: How long the pause after a read of a running machine is, by the CPU time that it took.
REST = 9
#: An hour: no one waits longer for a monitor.
_LONGEST_TIMEOUT = 3600


class _LogFormatter(logging.Formatter):
    """Escapes names from the image, such as those of modules, in messages of the log."""

    def format(self, record: logging.LogRecord) -> str:
        from memcg_inspect.escape import printable

        return "\n".join(map(printable, super().format(record).splitlines()))


def run_without_image(args: argparse.Namespace) -> int:
    """Run a command that takes files as arguments."""
    if args.core or args.qemu is not None or args.pause or args.timeout is not None:
        raise UsageError(f"{args.command} takes files as arguments, not -c or --qemu")
    _be_nice(args)
    check_output()
    return args.run(args)  # type: ignore[no-any-return]


def _be_nice(args: argparse.Namespace) -> None:
    if args.nice:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def run(args: argparse.Namespace) -> int:
    """
    Run a command on an image.

    :param args: what the parser of :mod:`memcg_inspect.cli` returned
    :return: exit status
    :raises MemcgInspectError: if it cannot be run
    """
    check_arguments(args)
    # Check before the command runs, which may take long.
    check_output()
    with opened_image(args) as image:
        result = answer(image, args)
    # The guest is resumed before output is written: a slow reader must not keep it stopped.
    output(lambda: show(result, args, Typed("memcg-inspect", tuple(_image_words(args)))))
    return exit_status(result)


@contextmanager
def opened_image(args: argparse.Namespace) -> Iterator[Image]:
    """
    Open the image that the options name. With ``--pause``, the guest is stopped until the end.

    :raises MemcgInspectError: if it cannot be opened, or if options contradict each other
    """
    _check_options(args)
    _log(args)
    _be_nice(args)
    with ExitStack() as guest:
        monitor = None
        if args.pause:
            monitor = guest.enter_context(closing(Monitor(args.qemu, _timeout(args))))
        with _interrupts_kept(), _progress() as report:
            image = image_of(open_program(_source(args, monitor, report)))
        if monitor is not None:
            guest.enter_context(signals_unwind())
            guest.enter_context(monitor.paused())
            image.stopped = True
        # Processes would share one connection to QEMU.
        image.jobs = args.jobs if args.core and not args.nice else 1
        if args.dask is not None:
            from memcg_inspect.image.dask import dask_pool

            image.pool = guest.enter_context(dask_pool(args.dask, _source(args, None, report)))
        yield image


def paced(every: float, number: int | None = None, spent: float = 0.0) -> Iterator[None]:
    """
    Yield once for each read of a running machine, which is done before the next one.

    The pause after a read is at least nine times as long as the CPU time that it took, so a reader
    takes at most a tenth of one core. A slow reader of the output does not count.

    :param every: seconds from one to the next
    :param number: how many; ``None``: without end
    :param spent: seconds of CPU time that were spent on the first one before
    """
    due = time.monotonic()
    for left in count() if number is None else range(number - 1, -1, -1):
        began = time.thread_time()
        yield
        if number is None or left:
            took, now = time.thread_time() - began + spent, time.monotonic()
            due, spent = max(due + every, now + REST * took), 0.0
            time.sleep(max(0.0, due - now))


def _check_options(args: argparse.Namespace) -> None:
    """
    Check the options that say what is read, and how.

    :raises UsageError: if they cannot be used together
    """
    if args.core and args.qemu is not None:
        raise UsageError("-c and --qemu cannot be used together")
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


def _log(args: argparse.Namespace) -> None:
    level = logging.CRITICAL + 1 if args.log_level == "none" else args.log_level.upper()
    handler = logging.StreamHandler()
    handler.setFormatter(_LogFormatter("%(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler])
    for name in ("drgn", "memcg_inspect"):
        logging.getLogger(name).setLevel(level)


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
        ("--debuginfo", [args.debuginfo if args.debuginfo != "auto" else None]),
    ):
        for value in values:
            if value is not None:
                yield from (flag, value)
    if args.no_default_symbols:
        yield "--no-default-symbols"
    if args.pause:
        yield "--pause"


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
def signals_unwind() -> Iterator[None]:
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
