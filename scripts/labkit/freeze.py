# SPDX-License-Identifier: LGPL-2.1-or-later
"""Stop a guest: when it is idle, at a random moment, or in a function of its kernel."""

import io
import random
import shlex
import tarfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from .errors import GuestError, LabError
from .gdb import Gdb
from .machine import Machine

# Seconds between the two records, which differ by what is still moving.
_APART = 3.0
_QUIET_TRIES = 200
# Instructions of a function that are run before the guest is stopped in it.
_MOST_STEPS = 60
# milliseconds
_KHUGEPAGED_SLEEPS = "/sys/kernel/mm/transparent_hugepage/khugepaged/scan_sleep_millisecs"


def record(machine: Machine, folder: Path) -> None:
    """Save the guest's own files (/proc, /sys, cgroups) in `folder`, as they are now."""
    data = machine.guest.must("exec record", what="record the guest's own files")
    folder.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            # fixtures/guest/record.c wrote the archive, but a guest is not trusted.
            path = Path(member.name)
            if not member.isfile() or path.is_absolute() or ".." in path.parts:
                raise LabError(f"the guest's record holds an unsafe name: {member.name!r}")
            content = archive.extractfile(member)
            assert content is not None
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.read())


def settled(machine: Machine, told: Path) -> None:
    """
    Record the guest's own files twice, then stop it while every CPU is idle.

    :param told: folder of the records, ``1`` and ``2``
    """
    with machine.timed("settle", "wait until the guest is idle"):
        # khugepaged looks for pages to collapse every ten seconds, so it may change what the second
        # record says. A write to this file makes it look once more, and then sleep for an hour.
        machine.guest.must(
            f"[ ! -e {_KHUGEPAGED_SLEEPS} ] || echo 3600000 > {_KHUGEPAGED_SLEEPS}",
            what="let khugepaged sleep",
        )
        record(machine, told / "1")
        time.sleep(_APART)
        record(machine, told / "2")
        machine.guest.must("sync", what="sync")
        time.sleep(0.3)
        monitor, arch = machine.qemu.monitor, machine.kernel.arch
        idle = [addresses(machine, function) for function in arch.idle]
        for _ in range(_QUIET_TRIES):
            monitor.call("stop")
            if arch.halted(monitor.registers(), idle):
                return
            monitor.call("cont")
            time.sleep(0.02)
    raise machine.guest.fail("the guest did not become idle")


def record_again(machine: Machine, told: Path) -> None:
    """
    Let a guest that :func:`settled` stopped run on, and record its files once more.

    What is the same in all records did not change while the guest was stopped.

    :param told: folder of the records, ``3``
    """
    with machine.timed("record", "record the guest's own files once more"):
        machine.qemu.monitor.call("cont")
        record(machine, told / "3")


def let_run(seed: int | None) -> None:
    """Wait for a random time of 0.5 to 2 seconds, chosen by `seed`."""
    time.sleep(random.Random(seed).uniform(0.5, 2.0))


def busy(machine: Machine, seed: int | None) -> None:
    """Stop the guest at a random moment, whatever it is doing."""
    with machine.timed("busy", "let the guest run"):
        let_run(seed)
        try:
            machine.qemu.monitor.call("stop")
        except GuestError:
            raise machine.guest.fail("the guest ended while it ran") from None


def inside(machine: Machine, functions: str, seed: int | None) -> None:
    """Stop the guest in a function: when it is called the third time, after some instructions.

    Without a seed, that is before its first instruction. ``CALLER/FUNCTION`` is the first call of
    the function after the third one of the caller.

    :raises LabError: if the kernel has no such function, or does not call it in a minute
    """
    first, *others = [address(machine, function) for function in functions.split("/")]
    with machine.timed("inside", f"let the guest run into {functions}()"):
        let_run(seed)
        gdb = Gdb(machine.qemu)
        gdb.run_to(first, times=3)
        for other in others:
            gdb.run_to(other)
        gdb.step(random.Random(seed).randrange(_MOST_STEPS) if seed else 0)


def stepped(machine: Machine, function: int, strides: Iterable[int]) -> Iterator[int]:
    """Stop the guest in a function, and again after each number of instructions.

    Other CPUs do not run meanwhile.

    :param function: its address
    :return: the number of instructions that were run, at each stop
    :raises LabError: if the kernel does not call it in a minute
    """
    done = 0
    gdb = Gdb(machine.qemu)
    gdb.run_to(function, times=3)
    yield done
    for stride in strides:
        gdb.step(stride)
        done += stride
        yield done


def addresses(machine: Machine, function: str) -> range:
    """Return the addresses of the instructions of a function, and of what pads it.

    :raises LabError: if the kernel has no such function
    """
    first = address(machine, function)
    program = "$1 > first { print $1; exit }"
    text = machine.guest.must(
        f"awk -v first={first:016x} '{program}' /proc/kallsyms",
        what=f"find the end of {function}()",
    )
    return range(first, int(text, 16))


def address(machine: Machine, function: str) -> int:
    """Return the address of a function.

    :raises LabError: if the kernel has no such function
    """
    # The whole name: the compiler splits off FUNCTION.cold, which is another symbol.
    program = "$3 == name { print; found = 1; exit } END { exit !found }"
    found = machine.guest.must(
        f"exec awk -v name={shlex.quote(function)} {shlex.quote(program)} /proc/kallsyms",
        what=f"find {function}()",
    )
    return int(found.split()[0], 16)
