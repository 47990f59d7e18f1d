# SPDX-License-Identifier: LGPL-2.1-or-later
"""The metrics of an audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

from memcg_inspect.metrics.containers import place_of
from memcg_inspect.metrics.exposition import Family
from memcg_inspect.model import NUMA_NO_NODE
from memcg_inspect.report import Report, Verdict

__all__ = ("OTHER", "Unpaid", "metrics_of")

#: In place of a path: all memcgs that have no samples of their own. A path begins with a slash.
OTHER = "other"
#: Identities whose counters are in per-CPU changes and stocks before they are in memory.stat.
_PENDING = ("slab", "kmem", "percpu", "kernel_stack", "pagetable", "vmalloc", "sock", "zswap")
#: The parts of a counter that memory.stat does not show.
_PARTS = {"pending_cpu": "cpu", "stock": "stock"}


@dataclass(frozen=True)
class Unpaid:
    """
    Kernel memory of a node.

    :ivar node: node
    :ivar paid: bytes that memcgs pay for
    :ivar unpaid: other bytes
    """

    node: int
    paid: int
    unpaid: int


def metrics_of(
    report: Report,
    time: float,
    version: str,
    depth: int | None = None,
    top: int | None = None,
    unpaid: list[Unpaid] | None = None,
) -> list[Family]:
    """
    Return the metrics of a report.

    :param time: when the audit ended, in seconds since 1970
    :param version: of this program
    :param depth: memcgs deeper than this count for the one above them at this depth
    :param top: this many memcgs have samples of their own: those that are charged for most
    :param unpaid: kernel memory of nodes, if it was read
    """
    label = _labels(report, depth, top)
    return [
        _build(report, version),
        _charged(report, label),
        _skewed(report, label),
        _pending(report, label),
        _memcgs(report),
        *_of_nodes(unpaid),
        *_of_audit(report, time),
    ]


def _labels(
    report: Report, depth: int | None, top: int | None
) -> Callable[[int | None], Mapping[str, str]]:
    """Return a function from a memcg, ``struct mem_cgroup *``, to the labels of its samples."""
    paths = {memcg.address: _cut(memcg.path, depth) for memcg in report.memcgs}
    sizes: Counter[str] = Counter(dict.fromkeys(paths.values(), 0))
    for skew in report.skew:
        sizes[paths.get(skew.memcg, OTHER)] += skew.bytes
    # Of the same size, the same ones each time.
    ranked = sorted(sizes, key=lambda path: (-sizes[path], path))
    shown = set(ranked if top is None else ranked[:top])
    known: dict[str, Mapping[str, str]] = {OTHER: {"memcg": OTHER}}
    for path in shown:
        place = place_of(path)
        known[path] = {"memcg": path, **place._asdict()}

    def label(memcg: int | None) -> Mapping[str, str]:
        path = OTHER if memcg is None else paths.get(memcg, OTHER)
        return known.get(path, known[OTHER])

    return label


def _cut(path: str, depth: int | None) -> str:
    """Return the path of the memcg at a depth; the root is at depth 0."""
    if depth is None:
        return path
    return "/" + "/".join([part for part in path.split("/") if part][:depth])


def _build(report: Report, version: str) -> Family:
    info = Family("memcg_inspect_info", "The program, and the kernel that it has read; always 1.")
    image = report.image
    info.add(
        1,
        version=version,
        release=image.release,
        accounting=image.accounting,
        source=image.source,
    )
    return info


def _charged(report: Report, label: Callable[[int | None], Mapping[str, str]]) -> Family:
    family = Family(
        "memcg_inspect_charged_bytes",
        "Memory that a memcg is charged for, by kind, and by the node that it is on.",
        "bytes",
    )
    for skew in report.skew:
        node = "" if skew.backing_nid == NUMA_NO_NODE else str(skew.backing_nid)
        family.add(skew.bytes, **label(skew.memcg), node=node, kind=skew.kind)
    return family


def _skewed(report: Report, label: Callable[[int | None], Mapping[str, str]]) -> Family:
    family = Family(
        "memcg_inspect_skewed_bytes",
        "Memory on another node than that of the obj_cgroup that is charged for it.",
        "bytes",
    )
    for skew in report.skew:
        nodes = (skew.charged_nid, skew.backing_nid)
        if None not in nodes and NUMA_NO_NODE not in nodes and nodes[0] != nodes[1]:
            charged, backing = map(str, nodes)
            family.add(
                skew.bytes, **label(skew.memcg), kind=skew.kind, charged_node=charged, node=backing
            )
    return family


def _pending(report: Report, label: Callable[[int | None], Mapping[str, str]]) -> Family:
    family = Family(
        "memcg_inspect_pending_bytes",
        "Changes of counters of memory.stat that are not folded yet (cpu), and charges that object "
        "stocks of CPUs hold back (stock). They may be negative.",
        "bytes",
    )
    scale = {"bytes": 1, "KiB": 1024, "pages": report.image.page_size}
    for row in report.rows:
        if row.identity in _PENDING and row.unit in scale and row.claimed is not None:
            for part, where in _PARTS.items():
                value = row.claimed.get(part, 0) * scale[row.unit]
                if value:
                    family.add(value, **label(row.memcg), item=row.item, where=where)
    return family


def _memcgs(report: Report) -> Family:
    family = Family("memcg_inspect_memcgs", "Number of memcgs, by state.")
    for state in ("online", "dying"):
        family.add(sum(memcg.state == state for memcg in report.memcgs), state=state)
    return family


def _of_nodes(nodes: list[Unpaid] | None) -> list[Family]:
    if nodes is None:
        return []
    paid = Family(
        "memcg_inspect_kernel_paid_bytes", "Kernel memory of a node that memcgs pay for.", "bytes"
    )
    unpaid = Family("memcg_inspect_kernel_unpaid_bytes", "Other kernel memory of a node.", "bytes")
    for node in nodes:
        paid.add(node.paid, node=str(node.node))
        unpaid.add(node.unpaid, node=str(node.node))
    return [paid, unpaid]


def _of_audit(report: Report, time: float) -> list[Family]:
    verdict = Family(
        "memcg_inspect_verdict", "Verdict of the audit: 1 for the one that it is, else 0."
    )
    for name in get_args(Verdict):
        verdict.add(int(report.verdict == name), verdict=name)
    findings = Family("memcg_inspect_findings", "Number of findings of the audit, by identity.")
    counts = Counter(finding.identity for finding in report.findings)
    for name in sorted({*counts, *(identity.name for identity in report.identities)}):
        findings.add(counts[name], identity=name)
    unread = Family("memcg_inspect_unread", "Things that could not be read, by subject.")
    for subject, coverage in report.coverage.items():
        if coverage.unreadable:
            unread.add(coverage.unreadable, subject=subject)
    took = Family("memcg_inspect_audit_seconds", "Time that the audit took.", "seconds")
    took.add(round(sum(report.timings.values()), 6))
    ended = Family(
        "memcg_inspect_audit_timestamp_seconds",
        "Time at which the audit ended, in seconds since 1970.",
        "seconds",
    )
    ended.add(round(time, 3))
    return [verdict, findings, unread, took, ended]
