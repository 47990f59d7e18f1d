# SPDX-License-Identifier: LGPL-2.1-or-later
"""What percpu allocations cost, in instructions of a guest that QEMU counts."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from .errors import LabError
from .machine import Options, booted
from .paths import FIXTURES

MODULE = FIXTURES / "modules" / "percpu_bench"
#: One instruction is one nanosecond of virtual time, and one cycle; nothing waits for real time.
COUNTING = ("-icount", "shift=0,sleep=off")
#: One CPU runs: that of the others would be waited for, and percpu memory is for the possible
#: ones. Its timer is not the one in the APIC, whose calibration waits for instructions to pass.
_APPEND = "nokaslr maxcpus=1 noapictimer"
KERNELS = ("7.3-lab", "7.3-pernode")
NODES = (1, 2)
CPUS = (4, 64)
_PAIRS = 16

#: Instructions for a pair of allocating and freeing, by bytes and whether accounted.
Costs = Mapping[tuple[int, bool], float]


class Guest(NamedTuple):
    """Where it was measured; the CPUs are the possible ones."""

    kernel: str
    nodes: int
    cpus: int


def parse(text: str) -> dict[tuple[int, bool], float]:
    """What the module says, for one pair."""
    found = {}
    for line in text.splitlines():
        size, accounted, cycles = line.split()
        found[int(size), accounted == "1"] = int(cycles) / _PAIRS
    if not found or 0 in found.values():
        raise LabError(f"the guest's module measured nothing: {text!r}")
    return found


def measure(guest: Guest) -> Costs:
    """Boot a guest and measure, in a memcg below the root."""
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
    """Measure everywhere."""
    return {
        guest: measure(guest) for guest in (Guest(*one) for one in product(KERNELS, NODES, CPUS))
    }


def table(costs: Mapping[Guest, Costs], kernels: Sequence[str] = KERNELS) -> str:
    """Ratios by topology and size: accounted to unaccounted, and the kernels to each other."""
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
