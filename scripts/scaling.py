# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Measure how the time of an audit grows with the machine: `scripts/bench --scale`.

The images differ from a base in one thing each: memory, memcgs, possible CPUs, slab objects or
percpu chunks. Memory that a guest never touched costs nothing, and CPUs that are possible and never
come online cost little, so a small machine can make images of large ones.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from labkit import images
from labkit.errors import LabError

from memcg_inspect.collect import audit
from memcg_inspect.image.image import image_of
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.linux.mm.mmzone import page_ranges, possible_cpus
from memcg_inspect.report import Report

KERNEL, NODES = "7.3", 2
#: Cores of the large host, and the stages that they share.
CORES, SHARED = 16, ("pages", "counters")
#: Audits of each image.
TIMES = 5


@dataclass(frozen=True)
class Size:
    """
    How large a machine is made.

    :ivar memory: GiB
    :ivar objects: slab objects that memcgs are charged for
    :ivar maps: BPF maps with a thousand percpu allocations of 2 KiB each
    """

    memory: int = 8
    memcgs: int = 1000
    cpus: int = 4
    objects: int = 200_000
    maps: int = 1

    @property
    def label(self) -> str:
        """What is not as in :data:`BASE`."""
        names = {
            "memory": "GiB",
            "memcgs": "memcgs",
            "cpus": "possible CPUs",
            "objects": "slab objects",
            "maps": "BPF maps",
        }
        usual = asdict(BASE)
        differs = {name: number for name, number in asdict(self).items() if number != usual[name]}
        return ", ".join(f"{number:,} {names[name]}" for name, number in differs.items()) or "base"

    def image(self, format: str = "elf") -> Path:
        """Return an image of such a machine; make it unless it is in the cache."""
        words = (
            # Chunks of percpu memory are smaller so, and more fit into the memory.
            *("maxcpus=4", "percpu_alloc=page", f"lab.memcgs={self.memcgs}"),
            *(f"lab.objects={self.objects}", f"lab.maps={self.maps}"),
        )
        return images.image(
            KERNEL,
            str(NODES),
            "scale",
            memory=f"{self.memory}G",
            cpus=self.cpus,
            append=" ".join(words),
            format=format,
        )


BASE = Size()
_MANY_CPUS = replace(BASE, cpus=255)
#: Images that differ in what they have of a thing, and by what it is counted. What a line needs of
#: those before it is subtracted: memcgs have parts for each CPU, and these are CPUs themselves.
IMAGES: Mapping[str, tuple[Size, ...]] = {
    "pages of memory": (BASE, replace(BASE, memory=1), replace(BASE, memory=16)),
    "memcgs on nodes": (BASE, replace(BASE, memcgs=3_000), replace(BASE, memcgs=10_000)),
    "per-CPU parts": (_MANY_CPUS, replace(_MANY_CPUS, memcgs=3_000)),
    "possible CPUs": (BASE, replace(BASE, cpus=64), _MANY_CPUS),
    "slabs": (BASE, replace(BASE, objects=2_000_000), replace(BASE, objects=8_000_000)),
    "percpu allocations": (BASE, replace(BASE, maps=30), replace(BASE, maps=120)),
}
SUBTRACTED = {
    "per-CPU parts": ("memcgs on nodes",),
    "possible CPUs": ("per-CPU parts",),
}
#: A host with 1 TiB, 10,000 memcgs, 8 nodes and 256 CPUs.
HOST = {
    "pages of memory": 1 << 28,
    "memcgs on nodes": 10_000 * 9,
    "per-CPU parts": 10_000 * 9 * 256,
    "possible CPUs": 256,
    "slabs": 5_000_000,
    # Counters and a reference count of each memcg on nodes.
    "percpu allocations": 10_000 * 9 * 2,
}


class Measured(NamedTuple):
    """
    Audits of one image.

    :ivar amounts: what the image has, by the names of :data:`IMAGES`
    :ivar seconds: median by stage
    :ivar spread: the longest audit less the shortest, in seconds
    """

    amounts: Mapping[str, int]
    seconds: Mapping[str, float]
    spread: float

    @property
    def total(self) -> float:
        """The time of a whole audit, in seconds."""
        return sum(self.seconds.values())

    @property
    def shared(self) -> float:
        """The time of the stages that processes share, in seconds."""
        return sum(self.seconds[stage] for stage in SHARED)


class Growth(NamedTuple):
    """
    How the time of an audit grows with one thing.

    :ivar name: of the thing
    :ivar slope: seconds for each
    :ivar shared: seconds for each in the stages that processes share
    :ivar residual: the largest distance of a time from the line, in seconds
    """

    name: str
    slope: float
    shared: float
    residual: float


def measure(core: Path, times: int = TIMES) -> Measured:
    """Audit an image several times, with one process."""
    runs = []
    for _ in range(times):
        image = image_of(open_program(ImageSource(core=str(core), debuginfo="btf")))
        image.jobs = 1
        report = audit(image)
        if report.verdict != "exact":
            raise LabError(f"{core}: the verdict is {report.verdict}")
        runs.append(report.timings)
        pages = sum(end - start for start, end in page_ranges(image))
        amounts = _amounts(report, len(possible_cpus(image)), pages)
        del image, report
    totals = [sum(run.values()) for run in runs]
    seconds = {stage: statistics.median(run[stage] for run in runs) for stage in runs[0]}
    return Measured(amounts, seconds, max(totals) - min(totals))


def _amounts(report: Report, cpus: int, pages: int) -> dict[str, int]:
    cells = len(report.memcgs) * (NODES + 1)
    return {
        "pages of memory": pages,
        "memcgs on nodes": cells,
        "per-CPU parts": cells * cpus,
        "possible CPUs": cpus,
        "slabs": sum(usage.slabs for usage in report.slab_usage),
        "percpu allocations": sum(c.count for c in report.charges if c.kind == "percpu"),
    }


def growth(name: str, some: Sequence[Measured], known: Sequence[Growth] = ()) -> Growth:
    """
    Fit a line to the times of images that differ in one thing.

    :param known: lines for other things in which they differ, too
    """
    amounts = [float(one.amounts[name]) for one in some]
    times = [one.total - sum(k.slope * one.amounts[k.name] for k in known) for one in some]
    shared = [one.shared - sum(k.shared * one.amounts[k.name] for k in known) for one in some]
    slope, start = statistics.linear_regression(amounts, times)
    lines = (start + slope * amount for amount in amounts)
    residual = max(abs(line - time) for line, time in zip(lines, times, strict=True))
    return Growth(name, slope, statistics.linear_regression(amounts, shared).slope, residual)


def predicted(base: Measured, lines: Sequence[Growth], cores: int) -> float:
    """
    Return the time of an audit of the :data:`HOST` by these lines, in seconds.

    :param cores: processes that share some stages
    """
    more = {line: HOST[line.name] - base.amounts[line.name] for line in lines}
    whole = base.total + sum(number * line.slope for line, number in more.items())
    shared = base.shared + sum(number * line.shared for line, number in more.items())
    return whole - shared + shared / cores


def report_lines() -> Iterator[str]:
    """Measure all images; yield the lines of a table as they are known."""
    stages = ("memcgs", "counters", "pages", "percpu", "judge")
    yield f"{KERNEL}, {NODES} nodes: seconds of an audit, with one process, median of {TIMES}"
    yield ""
    heads = "".join(f"{stage:>10}" for stage in (*stages, "all", "spread"))
    yield f"{'image':34}{heads}"

    def line(name: str, one: Measured) -> str:
        times = [*(one.seconds[stage] for stage in stages), one.total, one.spread]
        return f"{name:34}" + "".join(f"{seconds:10.2f}" for seconds in times)

    measured: dict[Size, Measured] = {}
    found: dict[str, Growth] = {}
    for name, sizes in IMAGES.items():
        for size in sizes:
            if size not in measured:
                one = measured[size] = measure(size.image())
                yield line(size.label, one)
        known = [found[other] for other in SUBTRACTED.get(name, ())]
        found[name] = growth(name, [measured[size] for size in sizes], known)
    base = measured[BASE]
    yield ""
    heads = f"{'in base':>12}{'microseconds':>14}{'residual':>12}{'of the host':>14}"
    yield f"{'for each of':20}{heads}"
    for each in found.values():
        yield (
            f"{each.name:20}{base.amounts[each.name]:12,}{each.slope * 1e6:14.3f}"
            f"{each.residual:10.2f} s{HOST[each.name]:14,}"
        )
    yield ""
    lines = list(found.values())
    alone, several = (predicted(base, lines, cores) for cores in (1, CORES))
    yield f"An audit of the host would take {alone:,.0f} s on one core,"
    yield f"and {several:,.0f} s if {CORES} share the stages {' and '.join(SHARED)}."
