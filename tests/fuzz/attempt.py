# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Run a command in a process of its own, with limits.

A run is bad if

- the command ends in a traceback (exit status 70), or is killed by a signal;
- it needs more memory than :data:`MEMORY`, or more than :data:`SECONDS` seconds of a CPU;
- ``audit`` says ``exact`` although a page that it tried to read was missing.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import drgn
from fuzz.damage import damaged, line_of_package

from memcg_inspect.answers import answer, check_arguments, show
from memcg_inspect.arguments import Parser
from memcg_inspect.collect import audit
from memcg_inspect.image.image import Image
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.model import MemcgInspectError
from memcg_inspect.render.typed import Typed
from memcg_inspect.report import Report
from memcg_inspect.subcommands import add_subcommands

#: Bytes of memory that a command may need more than the undamaged one.
MEMORY = 1 << 30
#: Seconds of CPU time of a run. On a whole image of the lab, no command takes a tenth of them.
SECONDS = 30

AUDIT = ("audit", "--json")
#: Those that an image cannot answer are left out. ``who`` gets the addresses that are in the image.
VIEWS: tuple[tuple[str, ...], ...] = (
    ("allocinfo", "--json"),
    ("allocinfo", "--by", "memcg,node,kind,site", "--json"),
    ("allocinfo", "--overhead", "--json"),
    ("drift", "--json"),
    ("usage", "/files/web", "--json"),
    ("overview", "--json"),
    ("overview", "--by-node", "--json"),
    ("dying", "--json"),
    ("pages", "--json"),
    ("pages", "--by", "memcg,kind,order,cache,caller,lru", "--json"),
    ("percpu", "--each", "--json"),
    ("rss", "--json"),
    ("rss", "--check", "--json"),
    ("slabinfo", "--by-node", "--json"),
    ("stat", "/", "--all", "--json"),
    ("stock", "--json"),
    ("tasks", "--json"),
    ("who", "--json"),
)


def opened(core: Path) -> drgn.Program:
    return open_program(ImageSource(core=str(core), debuginfo="btf"))


def run(image: Image, arguments: Sequence[str]) -> str:
    """Run a command as the program does; return the verdict, or how it ended."""
    parser = Parser()
    add_subcommands(parser)
    args = parser.parse_args(list(arguments))
    check_arguments(args)
    with contextlib.redirect_stdout(io.StringIO()):
        result = answer(image, args)
        show(result, args, Typed("memcg-inspect"))
        args.json = False
        show(result, args, Typed("memcg-inspect"))
    if isinstance(result, Report):
        return result.verdict
    return "whole" if result.is_whole else "incomplete"


class ExactError(Exception):
    """The verdict is ``exact``, and what was to be read was not there."""


class HangError(BaseException):
    """More time than any walk with bounds takes. Nothing in the package catches it."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """
    Limit the CPU time of what is done.

    :raises HangError: with the line of the package that was running
    """

    def over(signum: int, frame: FrameType | None) -> None:
        raise HangError(line_of_package())

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@lru_cache
def patience(core: Path) -> float:
    """Return ten times the seconds of CPU time that an audit of an undamaged image takes."""
    whole = damaged(core)
    began = time.process_time()
    audit(whole)
    return 10 * (time.process_time() - began)


def in_child(attempt: Callable[[], str], seconds: float = SECONDS) -> dict[str, Any]:
    """
    Try something in a process of its own, with limits.

    :param attempt: returns how it ended
    :param seconds: of CPU time
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        result = _limited(attempt, seconds)
        os.write(theirs, json.dumps(result).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return {"outcome": f"killed by {name}", "bad": True}
    found: dict[str, Any] = json.loads(said)
    return found


def _limited(attempt: Callable[[], str], seconds: float) -> dict[str, Any]:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    # For what runs too long in C, where no signal handler is called
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 5,) * 2)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    bad, lines = False, ""
    try:
        with at_most(seconds):
            outcome = attempt()
    except MemcgInspectError as error:
        outcome, lines = f"refused: {error}", traceback.format_exc(limit=-6)
    except HangError as error:
        outcome, bad = f"hangs in {error}", True
        lines = traceback.format_exc(limit=-12)
    except Exception as error:
        outcome, bad = f"{type(error).__name__}: {error}", True
        lines = traceback.format_exc(limit=-8)
    return {"outcome": outcome[:300], "bad": bad, "lines": lines[-3000:]}
