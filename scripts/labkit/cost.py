# SPDX-License-Identifier: LGPL-2.1-or-later
"""Measure the cost of percpu allocations, in instructions of a guest (QEMU -icount)."""

from collections.abc import Mapping
from typing import NamedTuple

from .errors import LabError
from .machine import Options, booted
from .paths import FIXTURES

MODULE = FIXTURES / "modules" / "percpu_bench"
#: Each instruction takes 1 ns of virtual time, and virtual time does not wait for real time.
COUNTING = ("-icount", "shift=0,sleep=off")
#: Only one CPU is online, since the instructions of all CPUs are counted; percpu memory is for
#: the possible CPUs. calibrate_APIC_clock() waits for a timer, which takes many instructions.
ONE_CPU = "nokaslr maxcpus=1 noapictimer"
KERNELS = ("7.3-lab", "7.3-pernode")
#: The same kernels, with up to 256 CPUs.
MANY_CPUS = ("7.3-lab-256", "7.3-pernode-256")
#: Two kernels to compare, by nodes and possible CPUs.
Places = dict[tuple[int, int], tuple[str, str]]
PLACES: Places = {
    (1, 4): KERNELS,
    (1, 64): KERNELS,
    (2, 4): KERNELS,
    (2, 64): KERNELS,
}
#: Those that need kernels that nothing else does.
MORE_PLACES: Places = {(2, 255): MANY_CPUS, (8, 255): MANY_CPUS}
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
        append=ONE_CPU,
        modules=((str(MODULE), f"pairs={_PAIRS}"),),
    )
    return parse(read_in_a_memcg(options, "percpu_bench").decode())


def read_in_a_memcg(options: Options, file: str) -> bytes:
    """Boot a guest that counts instructions; return a file of debugfs, read below the root."""
    script = (
        "set -e\ncd /sys/fs/cgroup\necho +memory >cgroup.subtree_control\nmkdir paying\n"
        f"(echo 0 >paying/cgroup.procs; cat /sys/kernel/debug/{file})\n"
    )
    with booted(options, extra_args=COUNTING) as running:
        running.load_modules()
        with running.timed("measure", "measuring allocations"):
            return running.guest.must(script, what="measuring", timeout=300)


def measure_all(places: Places = PLACES) -> dict[Guest, Costs]:
    """Measure both kernels of each place."""
    return {
        guest: measure(guest)
        for (nodes, cpus), kernels in places.items()
        for guest in (Guest(kernel, nodes, cpus) for kernel in kernels)
    }


def table(costs: Mapping[Guest, Costs], places: Places = PLACES) -> str:
    """Return a table of ratios: accounted to unaccounted, and one kernel to the other."""
    names = next(iter(places.values()))
    lines = [
        f"{'':21}{'unaccounted':>13}{'accounted / unaccounted':>28}{'accounting':>16}",
        f"{'nodes':>5}{'CPUs':>6}{'bytes':>8}  {names[0]:>13}"
        + "".join(f"{kernel:>14}" for kernel in names)
        + f"{'added':>14}",
    ]
    for (nodes, cpus), kernels in places.items():
        base, changed = (costs[Guest(kernel, nodes, cpus)] for kernel in kernels)
        for size in sorted({size for size, _ in base}):
            added = [costs_[size, True] - costs_[size, False] for costs_ in (base, changed)]
            lines.append(
                f"{nodes:5}{cpus:6}{size:8,}  {base[size, False]:13,.0f}"
                + "".join(f"{c[size, True] / c[size, False]:12.2f} x" for c in (base, changed))
                + f"{added[1] / added[0]:12.2f} x"
            )
    return "\n".join(lines)
