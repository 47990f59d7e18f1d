# SPDX-License-Identifier: LGPL-2.1-or-later
"""What the kernels of the series that this project grew from cost: instructions of a guest."""

import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from . import images
from .cost import COUNTING, ONE_CPU, Guest, read_in_a_memcg
from .errors import LabError
from .machine import Options, booted
from .paths import FIXTURES

K = TypeVar("K")

MODULE = FIXTURES / "modules" / "alloc_bench"
#: More CPUs than that take QEMU minutes to boot, all of them at once.
_FEW_CPUS = "maxcpus=4"
#: Pairs of allocating and freeing in a round.
_PAIRS = 512
#: A script that lets a task allocate and free objects without end.
_WITHOUT_END = FIXTURES / "scenes" / "objects.sh"
#: Kernels with different stocks of obj_cgroups.
STOCKS = ("6.1-lab", "6.12-lab", "7.3-lab", "7.3-pernode")
#: How memory allocation profiling is started, by its name.
PROFILING = {
    "never": "never",
    "disabled": "0",
    "enabled": "1",
    "compressed": "1,compressed",
}
#: Kernels that count the pages of processes by CPU and by node.
RSS = ("7.3-lab", "7.3-nodecounter")
#: Kernels whose use of slabs is compared.
SLABS = ("6.1", "6.12", "7.3")
#: Nodes and possible CPUs.
RSS_PLACES = ((1, 4), (2, 64))

#: Instructions for a pair of allocating and freeing, by what it is and whether accounted.
Allocations = Mapping[tuple[str, bool], float]
#: A row of a table in JSON.
Row = Mapping[str, Any]
#: Nanoseconds, or instructions, by what a process does.
Processes = Mapping[str, float]


def allocations(kernel: str, append: str = "") -> Allocations:
    """Boot a guest, and measure allocations in a memcg below the root."""
    options = Options(
        kernel,
        "2",
        append=f"{ONE_CPU} {append}",
        modules=((str(MODULE), f"pairs={_PAIRS}"),),
    )
    said = read_in_a_memcg(options, "alloc_bench")
    found = {}
    for line in said.decode().splitlines():
        kind, accounted, cycles = line.split()
        found[kind, accounted == "1"] = int(cycles) / _PAIRS
    return _measured(found, said)


def allocating(kernel: str) -> Path:
    """Return an image of a guest in which a task of the memcg /objects allocates without end."""
    return images.image(
        kernel,
        "2",
        freeze="busy",
        seed=1,
        modules=((str(MODULE), "endless=1"),),
        run=str(_WITHOUT_END),
    )


def processes(guest: Guest, *, counting: bool) -> Processes:
    """
    Boot a guest, and measure what the kernel does for a process.

    :param counting: whether instructions are counted, on one CPU, instead of the time
    """
    options = Options(
        guest.kernel,
        str(guest.nodes),
        cpus=guest.cpus,
        append=ONE_CPU if counting else _FEW_CPUS,
        workload="forks",
    )
    with booted(options, extra_args=COUNTING if counting else ()) as running:
        running.start_workload()
        said = running.guest.must("cat /tmp/forks", what="measuring", timeout=60)
    found = {name: float(took) for name, took in map(str.split, said.decode().splitlines())}
    return _measured(found, said)


def _measured(found: dict[K, float], said: bytes) -> dict[K, float]:
    if not found or 0 in found.values():
        raise LabError(f"the guest measured nothing: {said!r}")
    return found


def stock_table(costs: Mapping[str, Allocations]) -> str:
    """Return a table of an object of a slab cache, by kernel."""
    lines = [f"{'kernel':12}{'unaccounted':>14}{'accounted':>12}{'added':>10}{'ratio':>10}"]
    for kernel, found in costs.items():
        plain, accounted = (found["object", which] for which in (False, True))
        lines.append(
            f"{kernel:12}{plain:14,.0f}{accounted:12,.0f}{accounted - plain:10,.0f}"
            f"{accounted / plain:8.2f} x"
        )
    return "\n".join(lines)


def profiling_table(costs: Mapping[str, Allocations]) -> str:
    """Return a table of kmalloc() and pages, by the mode of memory allocation profiling."""
    kinds = [(kind, which) for kind in ("kmalloc", "page") for which in (False, True)]
    heads = [f"{kind}{', accounted' if which else ''}" for kind, which in kinds]
    lines = [f"{'profiling':12}" + "".join(f"{head:>21}" for head in heads)]
    base = next(iter(costs.values()))
    for mode, found in costs.items():
        cells = [
            f"{found[key]:10,.0f} {100 * (found[key] / base[key] - 1):+7.1f} %" for key in kinds
        ]
        lines.append(f"{mode:12}" + "".join(f"{cell:>21}" for cell in cells))
    return "\n".join(lines)


def rss_table(counted: Mapping[Guest, Processes], timed: Mapping[Guest, list[Processes]]) -> str:
    """
    Return a table of what a process costs on both kernels.

    :param counted: instructions
    :param timed: times of several guests
    """
    lines = [
        f"{'nodes':>5}{'CPUs':>6}  {'':10}"
        + "".join(f"{kernel:>17}" for kernel in RSS)
        + f"{'instructions':>16}{'time':>9}"
    ]
    for nodes, cpus in sorted({(guest.nodes, guest.cpus) for guest in counted}):
        old, new = (Guest(kernel, nodes, cpus) for kernel in RSS)
        for name, base in counted[old].items():
            changed = counted[new][name]
            before, after = (
                statistics.median(one[name] for one in timed[guest]) for guest in (old, new)
            )
            lines.append(
                f"{nodes:5}{cpus:6}  {name:10}{base:17,.0f}{changed:17,.0f}"
                f"{changed / base:14.2f} x{after / before:7.2f} x"
            )
    return "\n".join(lines)


class SlabUse(NamedTuple):
    """
    Slabs of the caches from which memcgs have objects.

    :ivar objects: bytes of the objects in use
    :ivar shared: bytes of the slabs
    :ivar own: bytes of the fewest slabs that would do if those of a memcg were its own
    """

    objects: int
    shared: int
    own: int


def slab_use(by_memcg: Iterable[Row], by_cache: Iterable[Row]) -> SlabUse:
    """
    Return how well slabs are used, and how well they would be without sharing.

    :param by_memcg: rows of ``slabinfo --by memcg,cache``
    :param by_cache: rows of ``slabinfo --by cache``
    """
    rows = list(by_memcg)
    charged = {row["cache_address"] for row in rows if row["memcg_address"]}
    objects = shared = own = 0
    for cache in by_cache:
        address, size = cache["cache_address"], cache["size"]
        if address not in charged or not size or not cache["slabs"]:
            continue
        slab = cache["slab_bytes"] / cache["slabs"]
        objects += cache["bytes"]
        shared += cache["slab_bytes"]
        own += round(
            sum(
                math.ceil(row["objects"] / (slab // size)) * slab
                for row in rows
                if row["cache_address"] == address
            )
        )
    return SlabUse(objects, shared, own)


def slab_table(uses: Mapping[str, SlabUse]) -> str:
    """Return a table of how well slabs are used, by kernel."""
    lines = [f"{'kernel':12}{'objects':>14}{'shared slabs':>22}{'slabs of each memcg':>24}"]
    for kernel, use in uses.items():
        cells = [
            f"{size / 1024:10,.0f} KiB {100 * use.objects / size:5.1f} %"
            for size in (use.shared, use.own)
        ]
        lines.append(f"{kernel:12}{use.objects / 1024:10,.0f} KiB{cells[0]:>22}{cells[1]:>24}")
    return "\n".join(lines)
