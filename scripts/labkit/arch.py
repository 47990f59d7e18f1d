# SPDX-License-Identifier: LGPL-2.1-or-later
"""The architectures that the lab can boot, and what differs between them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import LabError


@dataclass(frozen=True)
class Arch:
    """An architecture. `name` is Debian's name of it."""

    name: str
    # prefix of the cross compiler's programs; empty on this machine's own architecture
    cross: str
    qemu: str
    # QEMU's options for the machine and its CPU
    machine: tuple[str, ...]
    # the kernel's parameters that this machine needs
    parameters: str
    # finds the program counter of each CPU in what QEMU's `info registers` prints
    counter: str
    # finds the state of each CPU there, a number of which a bit tells whether the CPU is halted
    state: tuple[str, int] | None = None
    # functions in which an idle CPU waits, if QEMU does not tell that
    idle: tuple[str, ...] = ()
    is_little_endian: bool = True
    # whether the machine has NUMA nodes
    has_nodes: bool = True
    # bytes that the memory of a node is a multiple of
    node_unit: int = 2 << 20
    # what a crash kernel needs, in MiB
    crash_memory: int = 192
    # bus of virtio devices
    bus: str = "pci"
    # whether the guest can tell QEMU its VMCOREINFO
    has_vmcoreinfo: bool = True

    @property
    def compiler(self) -> str:
        """The C compiler, as a program of this machine."""
        return f"{self.cross}gcc"

    @property
    def headers(self) -> str:
        """A header of the C library: programs need it."""
        folder = f"/usr/{self.cross.removesuffix('-')}" if self.cross else "/usr"
        return f"{folder}/include/stdio.h"

    @property
    def tools(self) -> tuple[str, ...]:
        """The programs and files that a guest of this architecture needs."""
        own = () if self.cross else ("busybox",)
        return (self.qemu, *own, self.compiler, self.headers)

    def halted(self, registers: str, idle: list[range]) -> bool:
        """Return whether every CPU of a stopped machine is idle.

        :param registers: what QEMU's `info registers -a` prints
        :param idle: addresses of the functions in `idle`
        """
        if self.state is not None:
            pattern, bit = self.state
            states = [int(word, 16) >> bit & 1 for word in re.findall(pattern, registers)]
            return bool(states) and all(states)
        counters = self.counters(registers)
        return bool(counters) and all(any(pc in part for part in idle) for pc in counters)

    def counters(self, registers: str) -> list[int]:
        """Return the program counter of each CPU, from what `info registers -a` prints."""
        return [int(word, 16) for word in re.findall(self.counter, registers)]


ARCHES = {
    arch.name: arch
    for arch in (
        Arch(
            name="amd64",
            cross="",
            qemu="qemu-system-x86_64",
            machine=("-cpu", "max"),
            # no_timer_check: on a busy machine an emulated timer ticks too late for the check, and
            # the kernel panics ("IO-APIC + timer doesn't work!").
            parameters="console=ttyS0 no_timer_check",
            counter=r"\bRIP=(\w+)",
            state=(r"\bHLT=(\d)", 0),
        ),
        Arch(
            name="arm64",
            cross="aarch64-linux-gnu-",
            qemu="qemu-system-aarch64",
            # The architecture's own algorithm for pointer authentication is slow in emulation.
            # dump-guest-memory takes the length of the first CPU's SVE vectors for that of all,
            # and writes a damaged file if they differ.
            machine=(
                "-machine",
                "virt,gic-version=3",
                "-cpu",
                "max,pauth-impdef=on,sve=off,sme=off",
            ),
            parameters="console=ttyAMA0",
            counter=r"\bPC=(\w+)",
            idle=("cpu_do_idle",),
            crash_memory=320,
        ),
        Arch(
            name="s390x",
            cross="s390x-linux-gnu-",
            qemu="qemu-system-s390x",
            machine=("-machine", "s390-ccw-virtio", "-cpu", "max"),
            parameters="console=ttysclp0",
            counter=r"\bPSW=mask \w+ addr (\w+)",
            # PSW_MASK_WAIT
            state=(r"\bPSW=mask (\w+)", 49),
            is_little_endian=False,
            has_nodes=False,
            bus="ccw",
            has_vmcoreinfo=False,
        ),
        Arch(
            name="ppc64el",
            cross="powerpc64le-linux-gnu-",
            qemu="qemu-system-ppc64",
            machine=("-machine", "pseries", "-cpu", "power9"),
            parameters="console=hvc0",
            counter=r"\bNIP (\w+)",
            # H_CEDE
            idle=("plpar_hcall_norets_notrace", "plpar_hcall_norets"),
            node_unit=256 << 20,
            has_vmcoreinfo=False,
        ),
    )
}


def arch(name: str) -> Arch:
    """Return an architecture by its name in Debian."""
    if name not in ARCHES:
        raise LabError(f"no architecture {name!r}; there are: {', '.join(ARCHES)}")
    return ARCHES[name]
