# SPDX-License-Identifier: LGPL-2.1-or-later
"""The report of an audit as text: verdict, tables, findings with their evidence, coverage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from memcg_inspect.model import NUMA_NO_NODE, ImageInfo, Memcg, counted
from memcg_inspect.render.text import Output, coverage_lines
from memcg_inspect.report import Evidence, Finding, Identity, Report, Row
from memcg_inspect.report_tables import RowRow, identities_table, row_records, skew_matrix
from memcg_inspect.tables import Table, columns_of

__all__ = ("report_lines",)

_VERDICTS = {
    "exact": ("bold green", "every identity that this kernel keeps was read in full and holds"),
    "findings": ("bold red", "the counters and the objects disagree"),
    "incomplete": ("bold yellow", "nothing wrong was found, but not everything could be read"),
    "moving": ("bold yellow", "nothing wrong was found, but some counters were changing"),
}
_ACCOUNTING = {
    "memcg": "one obj_cgroup per memcg",
    "objcg-per-node": "one obj_cgroup per memcg and node",
    "kmem-per-node": "kernel memory counted per memcg and node",
}
_FOLLOWS = {
    "physical": "by the physical rule",
    "posted": "by the posted rule",
    "both": "by either rule",
    "neither": "by no known rule",
}

#: The identity whose rows are always shown. Every kernel keeps its counters by node.
_ALWAYS = "slab"


def report_lines(report: Report, output: Output, show_all: bool = False) -> None:
    """
    Write a report for people.

    :param show_all: whether to write all rows of all identities
    """
    _verdict(report, output)
    output.line()
    output.table(identities_table(report))
    for identity in report.identities:
        _rows(report, identity, output, show_all)
    if report.skew and len(report.image.nodes) > 1:
        output.table(skew_matrix(report))
    names = {memcg.address: memcg.path for memcg in report.memcgs}
    _findings(report.findings, names, output)
    _coverage(report, output)


def _verdict(report: Report, output: Output) -> None:
    style, meaning = _VERDICTS[report.verdict]
    in_flight = sum(row.status == "in-flight" for row in report.rows)
    if in_flight:
        meaning += f", except {counted(in_flight, 'rows')} in flight when it stopped"
    output.line(
        report.verdict.upper(), style, rest=f": {meaning}; accounting: {_accounting(report)}"
    )
    output.line(_image(report.image, report.memcgs))
    if report.interrupted:
        output.line("Interrupted: the results are incomplete", "bold yellow")
    if report.looks > 1:
        output.line(f"Samples: {report.looks}, since the kernel was running")
    if report.image.debug_info:
        output.line(f"Types and symbols: {report.image.debug_info}")


def _accounting(report: Report) -> str:
    rules = [f"{kind} {_FOLLOWS[rule]}" for kind, rule in (report.follows or {}).items()]
    return ", ".join([_ACCOUNTING[report.image.accounting], *rules])


def _image(image: ImageInfo, memcgs: Sequence[Memcg]) -> str:
    dying = sum(memcg.state == "dying" for memcg in memcgs)
    return (
        f"Linux {image.release} ({image.source}), {counted(len(image.nodes), 'nodes')}, "
        f"{counted(image.cpus, 'CPUs')}, {counted(len(memcgs), 'memcgs')} ({dying} removed)"
    )


def _rows(report: Report, identity: Identity, output: Output, show_all: bool) -> None:
    """Write the rows of an identity that are not exact. For slab, write exact rows, too."""
    rows = [row for row in report.rows if row.identity == identity.name]
    shown = rows
    if not show_all and identity.name == _ALWAYS:
        shown = [row for row in rows if not row.is_zero]
    elif not show_all:
        shown = [row for row in rows if row.status != "exact"]
    if shown:
        title = f"{identity.name}: {identity.status}"
        if identity.name != _ALWAYS and len(shown) < len(rows):
            title += f" ({len(shown):,} of {counted(len(rows), 'rows')})"
        output.table(_table(report, title, shown))
        _reasons(shown, output)
    elif rows and identity.name == _ALWAYS:
        output.line(f"{identity.name}: {identity.status}, nothing charged")
        output.line()


def _table(report: Report, title: str, rows: Sequence[Row]) -> Table:
    parts = list(dict.fromkeys(part for row in rows for part in row.claimed or ()))
    only = ["memcg", "node", "item", "unit", "found", "parts", "difference"]
    if any(row.status != "exact" for row in rows):
        only.append("status")
    if any(row.moved for row in rows):
        only += ["found_moved", "claimed_moved"]
    columns = columns_of(RowRow, keys=parts, only=only)
    return Table("rows", title, columns, row_records(report, rows, parts))


def _reasons(rows: Iterable[Row], output: Output) -> None:
    """Write why rows are in flight or moving. The table says why others are unverifiable."""
    reasons = {row.reason for row in rows if row.reason and row.claimed is not None}
    for reason in sorted(reasons):
        output.line(f"  {reason}", "yellow")
    if reasons:
        output.line()


def _findings(findings: Sequence[Finding], names: Mapping[int, str], output: Output) -> None:
    for number, finding in enumerate(findings, 1):
        about = f"{_name(names, finding.memcg)}: {finding.what}"
        output.line(f"Finding {number}: ", "bold red", rest=about)
        if finding.evidence:
            output.line(f"  {finding.evidence_is}:")
        for evidence in finding.evidence:
            output.line("    " + _evidence(evidence, names))
        output.line()


def _name(names: Mapping[int, str], address: int | None) -> str:
    return "-" if address is None else names.get(address, f"{address:#x}")


def _evidence(evidence: Evidence, names: Mapping[int, str]) -> str:
    parts = [f"{evidence.address:#x}"]
    if evidence.cache is not None:
        parts.append(f"{evidence.cache} object")
    if evidence.bytes is not None:
        parts.append(counted(evidence.bytes, "bytes"))
    if evidence.objcg is not None:
        parts.append(f"charged to {_name(names, evidence.memcg)} (objcg {evidence.objcg:#x})")
    if evidence.page is not None:
        parts.append(f"page {evidence.page:#x}")
    if evidence.nid is not None:
        parts.append("no node" if evidence.nid == NUMA_NO_NODE else f"node {evidence.nid}")
    if evidence.note is not None:
        parts.append(evidence.note)
    return ", ".join(parts)


def _coverage(report: Report, output: Output) -> None:
    read = ", ".join(f"{c.read:,} {name}" for name, c in report.coverage.items() if c.read)
    seconds = sum(report.timings.values())
    output.line(f"Read {read} in {seconds:.2f} s.")
    coverage_lines(report.coverage, output)
    for note in report.notes:
        output.line()
        output.line(note, "bold yellow")
