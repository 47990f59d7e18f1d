# SPDX-License-Identifier: LGPL-2.1-or-later
"""The commands that make and compare snapshots: ``snapshot``, ``diff`` and ``watch``."""

from __future__ import annotations

import re
import signal
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import gmtime, strftime

from drgn import Program

from memcg_inspect.answers import cancellable, check_arguments, chosen, exit_status, show
from memcg_inspect.collect.charge_snapshot import take_snapshot
from memcg_inspect.escape import printable
from memcg_inspect.image.image import Image
from memcg_inspect.image.missing import as_image_errors
from memcg_inspect.model import MemcgInspectError, counted
from memcg_inspect.model_snapshot import ChargeSnapshot
from memcg_inspect.output import check_output, output, say
from memcg_inspect.render.text import size
from memcg_inspect.render.typed import Typed
from memcg_inspect.running import opened_image, paced
from memcg_inspect.snapshots.diff import Named, compared, largest_growth
from memcg_inspect.snapshots.file import is_snapshot, read_snapshot, write_snapshot
from memcg_inspect.tables import UsageError

__all__ = ("diff", "snapshot", "watch")

_UNUSABLE = 2
_INCOMPLETE = 3
_INTERRUPTED = 130


def snapshot(args: Namespace) -> int:
    """Run ``snapshot``; return its exit status."""
    check_output()
    with opened_image(args) as image:
        with cancellable(image), as_image_errors():
            found = take_snapshot(image)
        if image.progress.stop:
            return _INTERRUPTED
    path = args.output or _file_name(found)
    written = write_snapshot(path, found)
    kept = f"{counted(len(found.memcgs), 'memcgs')}, {size(_charged(found))} charged"
    missing = ", ".join(f"{n:,} of {subject}" for subject, n in found.unread.items())
    missing = f"; not read: {missing}" if missing else ""
    output(lambda: print(f"{printable(path)}: {kept}{missing} ({size(written)})", flush=True))
    return 0 if found.is_whole else _INCOMPLETE


def _file_name(found: ChargeSnapshot) -> str:
    """Return the name of the file of a snapshot: by host and time."""
    host = re.sub(r"[^\w.-]+", "-", found.image.host).strip("-.") or "snapshot"
    seconds = time.time() if found.time is None else found.time.realtime / 10**9
    return f"{host}-{strftime('%Y%m%dT%H%M%SZ', gmtime(seconds))}.memcg"


def _charged(found: ChargeSnapshot) -> int:
    return sum(charge.bytes for charge in found.charges)


def diff(args: Namespace) -> int:
    """Run ``diff``; return its exit status."""
    check_arguments(args)
    if len(args.snapshots) < 2:
        raise UsageError("diff: name two snapshots or more")
    return _show(args, [Named(name, _read(name, args)) for name in args.snapshots])


def _read(name: str, args: Namespace) -> ChargeSnapshot:
    """
    Read a file of a snapshot, or an image.

    :raises MemcgInspectError: if it is neither
    """
    if is_snapshot(name):
        return read_snapshot(name)
    with opened_image(Namespace(**{**vars(args), "core": [name]})) as image:
        with cancellable(image), as_image_errors():
            found = take_snapshot(image)
        if image.progress.stop:
            raise KeyboardInterrupt
    return found


def _show(args: Namespace, snapshots: Sequence[Named]) -> int:
    found = chosen(compared(snapshots, args.by), args)
    output(lambda: show(found, args, Typed("memcg-inspect")))
    return exit_status(found)


def watch(args: Namespace) -> int:
    """Run ``watch``; return its exit status."""
    check_arguments(args)
    check_output()
    if args.core:
        raise UsageError("watch: a vmcore does not change: name none with -c")
    if args.pause:
        raise UsageError("watch: --pause would stop the guest all the time")
    failed = False
    with opened_image(args) as image, _folder(args.output) as folder, _ended_by_sigterm():
        files = _Files(folder, args.keep)
        try:
            _watch(image.prog, files, args)
        except KeyboardInterrupt:
            pass
        except MemcgInspectError as error:
            # What was seen until then is not lost.
            say(f"memcg-inspect: {printable(str(error))}")
            failed = True
        snapshots = [Named(path.name, read_snapshot(str(path))) for path in files.paths]
    if len(snapshots) < 2:
        say("memcg-inspect: watch: ended before there were two snapshots")
        return _UNUSABLE if failed else _INTERRUPTED
    return _show(args, snapshots) or (_INCOMPLETE if failed else 0)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """End as Ctrl-C does if the process is to end."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _folder(name: str | None) -> Iterator[Path]:
    """
    Yield the directory of the snapshots. A temporary one is removed afterwards.

    :raises MemcgInspectError: if it cannot be made
    """
    if name is None:
        with TemporaryDirectory(prefix="memcg-inspect-") as temporary:
            yield Path(temporary)
        return
    try:
        Path(name).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise MemcgInspectError(f"{name}: {error.strerror}") from None
    yield Path(name)


class _Files:
    """
    The files of the snapshots, of which a bounded number is kept.

    :ivar paths: in the order of their times
    """

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self._made = 0
        self.paths: list[Path] = []

    def add(self, found: ChargeSnapshot) -> None:
        """Keep a snapshot. If there are too many, remove every other one."""
        self._made += 1
        name = _file_name(found).removesuffix(".memcg")
        path = self._folder / f"{name}-{self._made:05}.memcg"
        write_snapshot(str(path), found)
        self.paths.append(path)
        if len(self.paths) > self._most:
            for old in self.paths[1:-1:2]:
                old.unlink(missing_ok=True)
                self.paths.remove(old)


def _watch(prog: Program, files: _Files, args: Namespace) -> None:
    """Take snapshots until there are enough of them."""
    before = None
    for _ in paced(args.every, args.count):
        # A new image: nodes, memory and CPUs may have come and gone.
        with as_image_errors():
            found = take_snapshot(Image(prog))
        files.add(found)
        _print_line(args, before, found)
        before = found


def _print_line(args: Namespace, before: ChargeSnapshot | None, found: ChargeSnapshot) -> None:
    """Print a line about a snapshot. It is not part of a document."""
    now = strftime("%H:%M:%S", gmtime(time.time()))
    line = f"{now}  {size(_charged(found))} charged"
    if before is not None:
        line += f", {_grown(_charged(found) - _charged(before))}"
        most = largest_growth(before, found)
        if most is not None and isinstance(most.growth, int):
            where = "" if most.node is None else f" on node {most.node}"
            grown = _grown(most.growth)
            line += f"; most: {printable(str(most.memcg))} {most.kind}{where} {grown}"
    if args.json or args.scripted:
        say(line)
    else:
        output(lambda: print(line, flush=True))


def _grown(value: int) -> str:
    return f"{'+' if value > 0 else ''}{size(value)}"
