# SPDX-License-Identifier: LGPL-2.1-or-later
"""Measure the cost of percpu allocations, in instructions of a guest (QEMU -icount)."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from .errors import LabError
from .machine import Options, booted
from .paths import FIXTURES

MODULE = FIXTURES / "modules" / "percpu_bench"
#: Each instruction takes 1 ns of virtual time, and virtual time does not wait for real time.
COUNTING = ("-icount", "shift=0,sleep=off")
#: Only one CPU is online, since the instructions of all CPUs are counted; percpu memory is for
#: the possible CPUs. calibrate_APIC_clock() waits for a timer, which takes many instructions.
_APPEND = "nokaslr maxcpus=1 noapictimer"
KERNELS = ("7.3-lab", "7.3-pernode")
NODES = (1, 2)
CPUS = (4, 64)
_PAIRS = 16

#: Instructions for a pair of allocating and freeing, by bytes and whether accounted.
Costs = Mapping[tuple[int, bool], float]


class Guest(NamedTuple):
    """Where the cost is measured; `cpus` are possible CPUs."""

    kernel: str
    nodes: int
    cpus: int


def parse(text: str) -> dict[tuple[int, bool], float]:
    """Parse the output of the module: instructions for one pair."""
    found = {}
    for line in text.splitlines():
        size, accounted, cycles = line.split()
        found[int(size), accounted == "1"] = int(cycles) / _PAIRS
    if not found or 0 in found.values():
        raise LabError(f"the module in the guest measured nothing: {text!r}")
    return found


def measure(guest: Guest) -> Costs:
    """Boot a guest and measure in a memcg below the root."""
    options = Options(
        guest.kernel,
        str(guest.nodes),
        cpus=guest.cpus,
        append=_APPEND,
        modules=((str(MODULE), f"pairs={_PAIRS}"),),
    )
    script = (
        "set -e\ncd /sys/fs/cgroup\necho +memory >cgroup.subtree_control\nmkdir paying\n"
        "(echo 0 >paying/cgroup.procs; cat /sys/kernel/debug/percpu_bench)\n"
    )
    with booted(options, extra_args=COUNTING) as running:
        running.load_modules()
        with running.timed("measure", "measuring percpu allocations"):
            said = running.guest.must(script, what="measuring", timeout=300)
    return parse(said.decode())


def measure_all() -> dict[Guest, Costs]:
    """Measure on each kernel and topology."""
    return {
        guest: measure(guest) for guest in (Guest(*one) for one in product(KERNELS, NODES, CPUS))
    }


def table(costs: Mapping[Guest, Costs], kernels: Sequence[str] = KERNELS) -> str:
    """Return a table of ratios: accounted to unaccounted, and one kernel to the other."""
    lines = [
        f"{'':21}{'unaccounted':>13}{'accounted / unaccounted':>28}{'accounting':>16}",
        f"{'nodes':>5}{'CPUs':>6}{'bytes':>8}  {kernels[0]:>13}"
        + "".join(f"{kernel:>14}" for kernel in kernels)
        + f"{'added':>14}",
    ]
    for nodes, cpus in sorted({(guest.nodes, guest.cpus) for guest in costs}):
        base, changed = (costs[Guest(kernel, nodes, cpus)] for kernel in kernels)
        for size in sorted({size for size, _ in base}):
            added = [costs_[size, True] - costs_[size, False] for costs_ in (base, changed)]
            lines.append(
                f"{nodes:5}{cpus:6}{size:8,}  {base[size, False]:13,.0f}"
                + "".join(f"{c[size, True] / c[size, False]:12.2f} x" for c in (base, changed))
                + f"{added[1] / added[0]:12.2f} x"
            )
    return "\n".join(lines)
