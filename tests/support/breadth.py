# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Healthy guests of many kinds: kernels, configurations, topologies and workloads.

:func:`run` audits one of them; scripts/breadth runs all, and docs/reliability.md has the result.
Results are kept (:mod:`support.kept`), so that a run that was interrupted goes on where it was.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from labkit import dump, hotplug, images, kmodules
from labkit.kernels import kernel, names_of_part
from labkit.machine import Options

from memcg_inspect.image.image import image_of
from memcg_inspect.model import counted
from support import kept, kernel_faults
from support.guests import ROOT, GuestImage

KERNELS = ("6.1", "6.12", "7.2", "7.3")
#: Kernels that no other test boots.
OTHERS = tuple(names_of_part("breadth"))
#: Debian's archive has no modules of these: they have no disk to swap to, and no overlayfs.
_WITHOUT_MODULES = ("6.19", "7.0", "7.1")
#: A word on the kernel's command line: the workload goes on when the guest is stopped.
REPEAT = "lab.repeat"


class Configuration(NamedTuple):
    """
    A configuration of a guest.

    :ivar append: kernel parameters
    :ivar more: options of :class:`labkit.machine.Options`
    :ivar freeze: how the guest is stopped
    :ivar hotplug: size of a DIMM that is added when the workload is ready
    :ivar kernels: names of the kernels that can have it
    """

    name: str
    append: str = ""
    nodes: str = "2"
    workload: str = "facilities"
    more: Mapping[str, Any] = {}
    freeze: str = "settled"
    hotplug: str | None = None
    kernels: Sequence[str] = KERNELS


_GIGANTIC: Mapping[str, Any] = {"nodes": "1", "workload": "gigantic", "more": {"memory": "3G"}}
_OFFLINE = ROOT / "fixtures" / "scenes" / "offline.sh"
#: Without a watermark, it always looks for pages that nobody used for a second.
_DAMON = (
    "damon_reclaim.enabled=Y damon_reclaim.min_age=1000000 damon_reclaim.wmarks_high=1000 "
    "damon_reclaim.wmarks_mid=999 damon_reclaim.wmarks_low=0"
)
#: Of those here, only 6.1 has cgroup v1: later ones need CONFIG_MEMCG_V1.
_V1: Mapping[str, Any] = {"more": {"cgroup": "v1"}, "kernels": ("6.1",)}
CONFIGURATIONS = (
    Configuration("as Debian configures it"),
    Configuration("under load, 4 CPUs", REPEAT, more={"cpus": 4}, freeze="busy"),
    Configuration("limits, OOM kills, reclaim", workload="pressure"),
    Configuration("cgroup v1", workload="mixed", **_V1),
    Configuration("cgroup v1, limits", workload="pressure", **_V1),
    Configuration("cgroup.memory=nokmem", "cgroup.memory=nokmem", workload="mixed"),
    Configuration("cgroup.memory=nosocket", "cgroup.memory=nosocket", workload="mixed"),
    Configuration("SLUB debugging of all caches", "slub_debug=FZPU"),
    Configuration("SLUB debugging, limits", "slub_debug=FZPU", workload="pressure"),
    Configuration("no merged slab caches", "slab_nomerge", workload="mixed"),
    Configuration("page_owner", "page_owner=on", workload="mixed"),
    Configuration("memory is cleared", "init_on_alloc=1 init_on_free=1", workload="mixed"),
    # 6.12.118 has a fault: it frees such a page with what is left in the first tail pages
    # ("corrupted mapping in tail page"), and the lab takes that for a crash.
    Configuration(
        "hugetlb without vmemmap",
        "hugepages=16 hugetlb_free_vmemmap=on",
        kernels=("6.1", "7.2", "7.3"),
    ),
    Configuration(
        "gigantic pages", "hugepagesz=1G hugepages=1", kernels=("6.1", "7.3"), **_GIGANTIC
    ),
    Configuration(
        "gigantic pages without vmemmap",
        "hugepagesz=1G hugepages=1 hugetlb_free_vmemmap=on",
        kernels=("6.12", "7.2"),
        **_GIGANTIC,
    ),
    Configuration("THP always", "transparent_hugepage=always", workload="pressure"),
    Configuration("4-level paging", "no5lvl", workload="mixed"),
    Configuration("percpu memory by pages", "percpu_alloc=page", workload="mixed"),
    Configuration("KFENCE", "kfence.sample_interval=1"),
    Configuration("ZONE_MOVABLE", "movablecore=40%", nodes="4", workload="pressure"),
    Configuration("one node", nodes="1", workload="mixed"),
    Configuration("nodes without CPUs", nodes="2cpu+2mem", workload="mixed"),
    Configuration("memory is added", "memory_hotplug.memmap_on_memory=1", hotplug="256M"),
    Configuration(
        "memory and CPUs are taken away",
        "memhp_default_state=online_movable",
        more={"cpus": 4, "run": str(_OFFLINE)},
        hotplug="256M",
    ),
    Configuration("DAMON reclaims", _DAMON, workload="mixed", kernels=("7.2", "7.3")),
)
_SWAPPING = tuple(name for name in OTHERS if name not in _WITHOUT_MODULES)
#: Of the other kernels.
WORKLOADS = (
    Configuration("facilities", kernels=OTHERS),
    Configuration(
        "facilities, under load", REPEAT, more={"cpus": 4}, freeze="busy", kernels=OTHERS
    ),
    Configuration("mixed", workload="mixed", kernels=_SWAPPING),
    Configuration("pressure", workload="pressure", kernels=_SWAPPING),
    *(
        Configuration(name, workload=name, kernels=_WITHOUT_MODULES)
        for name in ("kmem", "pages", "sockets")
    ),
)


class Result(NamedTuple):
    """
    The outcome of one audit.

    :ivar verdict: of the report
    :ivar rows: number of rows; *exact* of them are exact, *unverifiable* could not be verified
    :ivar findings: identity, item and difference of each
    :ivar known: how many of them a fault of the kernel explains (:mod:`support.kernel_faults`)
    :ivar unknown: kernel parameters that the kernel does not know
    """

    kernel: str
    configuration: str
    workload: str
    verdict: str
    rows: int
    exact: int
    unverifiable: int
    findings: list[list[Any]]
    known: int
    unknown: str
    seconds: float

    @property
    def accused(self) -> bool:
        """Whether there are findings other than those of a fault of the kernel."""
        return self.known < len(self.findings)


def pairs() -> list[tuple[str, Configuration]]:
    """Return all kernels with the configurations that they can have."""
    return [(name, one) for one in (*CONFIGURATIONS, *WORKLOADS) for name in one.kernels]


def options_of(name: str, configuration: Configuration) -> Options:
    """Return the options of the guest."""
    modules: tuple[tuple[str, str], ...] = ()
    if configuration.workload == "facilities" and kmodules.in_order(kernel(name), ["overlay"]):
        modules = kmodules.with_dependencies(kernel(name), "overlay")
    return Options(
        name,
        configuration.nodes,
        append=configuration.append,
        workload=configuration.workload,
        modules=modules,
        **configuration.more,
    )


def measure(name: str, configuration: Configuration) -> Result:
    """Boot a guest and audit its image, which no cache keeps."""
    began = time.monotonic()
    with images.scratch() as folder:
        core = folder / "vmcore"
        options = options_of(name, configuration)
        if configuration.hotplug is None:
            dump.dump(options, dump.Image(configuration.freeze, "elf", 0), core)
        else:
            hotplug.hotplugged(options, configuration.hotplug, core)
        image = GuestImage(core)
        report = image.report()
        known = kernel_faults.explained(
            name, report, kernel_faults.charges_of(image_of(image.program()))
        )
        # A guest that is stopped under load says nothing.
        log = "".join(path.read_text() for path in image.guest.glob("*/dmesg"))
        image.remove()
    statuses = [row.status for row in report.rows]
    # The kernel passes them on to init, and says so.
    unknown = re.search(r'Unknown kernel command line parameters "([^"]*)"', log)
    return Result(
        name,
        configuration.name,
        configuration.workload,
        report.verdict,
        len(statuses),
        statuses.count("exact"),
        statuses.count("unverifiable"),
        [[f.identity, f.item, f.difference] for f in report.findings],
        len(known),
        unknown[1] if unknown else "",
        time.monotonic() - began,
    )


def run(name: str, configuration: Configuration, again: bool = False) -> Result:
    """Return the result of a guest; measure it unless it is kept."""
    guest = f"{name} {configuration.name}"
    found = None if again else kept.load("breadth", guest)
    if found is not None:
        return Result(*found)
    result = images.unless_stale(lambda: measure(name, configuration))
    kept.keep("breadth", guest, result)
    return result


def ignored(result: Result, configuration: Configuration) -> list[str]:
    """Return the parameters of a configuration that the kernel does not know."""
    asked = set(configuration.append.split()) - {REPEAT}
    return sorted(asked & set(result.unknown.split()))


def document(results: Sequence[Result], commit: str, date: str) -> str:
    """Return the tables of docs/reliability.md: rows that hold by configuration and kernel."""
    faults = sum(bool(r.findings) and not r.accused for r in results)
    lines = [
        f"commit {commit}, {date}: {counted(len(results), 'guests')}, "
        f"{sum(r.rows for r in results):,} rows, "
        f"{sum(r.seconds for r in results) / 60:.0f} minutes",
        f"with a finding: {sum(r.accused for r in results)}; with rows that could not be "
        f"verified: {sum(bool(r.unverifiable) for r in results)}; with a fault of the kernel "
        f"itself: {faults}",
    ]
    tested = [r for r in results if r.kernel not in OTHERS]
    found = {(f"{r.configuration:30} {r.workload}", r.kernel): r for r in tested}
    lines += ["", *_table(f"{'configuration':30} workload", found)] if tested else []
    found = {(r.kernel, r.configuration): r for r in results if r.kernel in OTHERS}
    lines += ["", *_table("kernel", found)] if found else []
    return "\n".join(line.rstrip() for line in lines)


def _table(title: str, found: Mapping[tuple[str, str], Result]) -> list[str]:
    """Return a table of results by line and column."""
    names = list(dict.fromkeys(line for line, _ in found))
    columns = list(dict.fromkeys(column for _, column in found))
    width = max(map(len, [title, *names]))
    widths = [max(12, len(column)) for column in columns]
    lines = [(title, columns)]
    lines += [(name, [_cell(found.get((name, column))) for column in columns]) for name in names]
    return [
        f"{name:{width}}" + "".join(f"  {c:>{w}}" for c, w in zip(cells, widths, strict=True))
        for name, cells in lines
    ]


def _cell(result: Result | None) -> str:
    if result is None:
        return "-"
    if result.accused:
        return counted(len(result.findings), "findings")
    left = f", {result.unverifiable} not" if result.unverifiable else ""
    # Faults of the kernel itself.
    left += f", {len(result.findings)} found" if result.findings else ""
    return f"{result.rows - result.unverifiable - len(result.findings):,}{left}"
