# SPDX-License-Identifier: LGPL-2.1-or-later
"""The report of an audit as text: verdict, tables, findings with their evidence, coverage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from memcg_inspect.model import NUMA_NO_NODE, ImageInfo, Memcg, counted
from memcg_inspect.render.text import Output, coverage_lines
from memcg_inspect.report import (
    Evidence,
    Finding,
    Identity,
    NotCovered,
    Report,
    Row,
    RowStatus,
    Uncharged,
)
from memcg_inspect.report_tables import RowRow, identities_table, row_records, skew_matrix
from memcg_inspect.tables import Table, columns_of

__all__ = ("report_lines",)

_STYLES = {
    "exact": "bold green",
    "findings": "bold red",
    "incomplete": "bold yellow",
    "moving": "bold yellow",
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
#: Names of counters that are not covered, for each reason, and of caches, without ``--all``.
_MOST_NAMES = 3


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
    _uncharged(report.uncharged, output, show_all)
    _coverage(report, output)
    _not_covered(report.not_covered, output, show_all)


def _verdict(report: Report, output: Output) -> None:
    output.line(report.verdict.upper(), _STYLES[report.verdict], rest=f": {_meaning(report)}")
    output.line(f"Accounting: {_accounting(report)}")
    output.line(_image(report.image, report.memcgs))
    if report.interrupted:
        output.line("Interrupted: the results are incomplete", "bold yellow")
    if report.looks > 1:
        output.line(f"Samples: {report.looks}, since the kernel was running")
    if report.image.debug_info:
        output.line(f"Types and symbols: {report.image.debug_info}")


def _meaning(report: Report) -> str:
    """Return what the verdict covers, or how much is behind it."""
    rows = counted(sum(identity.rows for identity in report.identities), "rows")
    if report.verdict == "exact":
        kept = sum(identity.status != "not-kept" for identity in report.identities)
        identities = "1 identity holds" if kept == 1 else f"{kept} identities hold"
        meaning = f"{identities} in {rows}"
        in_flight = _number_of(report, "in-flight")
        if in_flight:
            meaning += f" ({in_flight:,} in flight)"
        if "kernel memory" in report.not_accounted:
            meaning += "; kernel memory is not accounted on this machine"
        if report.not_covered:
            meaning += f"; {counted(len(report.not_covered), 'counters')} not covered"
        return meaning
    if report.verdict == "findings":
        differing = _number_of(report, "differs")
        return f"{counted(len(report.findings), 'findings')}; {differing:,} of {rows} differ"
    meaning = "nothing wrong was found"
    unverifiable, moving = _number_of(report, "unverifiable"), _number_of(report, "moving")
    if unverifiable:
        meaning += f"; {unverifiable:,} of {rows} could not be verified"
    elif report.verdict == "incomplete":
        meaning += "; not everything could be read"
    if moving:
        meaning += f"; {moving:,} of {rows} were changing"
    return meaning


def _number_of(report: Report, status: RowStatus) -> int:
    return sum(row.status == status for row in report.rows)


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
            output.line(f"  {finding.evidence_is}{_order(finding.evidence)}:")
        for evidence in finding.evidence:
            output.line("    " + _evidence(evidence, names))
        _not_listed(finding, output)
        output.line()


def _order(evidence: Sequence[Evidence]) -> str:
    """Return how likely the candidates are, compared with each other."""
    if len(evidence) == 1 or any(one.rank is None for one in evidence):
        return ""
    first = sum(one.rank == 1 for one in evidence)
    if first == len(evidence):
        return ", equally likely"
    return ", likeliest first" + (f", the first {first} equally likely" if first > 1 else "")


def _not_listed(finding: Finding, output: Output) -> None:
    """Write how much evidence there is beyond what is listed."""
    more = (finding.evidence_total or 0) - len(finding.evidence)
    if more > 0:
        tied = finding.evidence_tied or 0
        some = "all" if tied == more else f"{tied:,}"
        as_likely = f", {some} of them as likely as the last one listed" if tied else ""
        output.line(f"    and {more:,} more{as_likely}")


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


def _uncharged(caches: Sequence[Uncharged], output: Output, show_all: bool) -> None:
    """Write the caches with most of the objects that no memcg pays for."""
    known = [cache for cache in caches if cache.objects is not None]
    if not known:
        return
    objects, size = sum(c.objects or 0 for c in known), sum(c.bytes or 0 for c in known)
    shown = known if show_all else known[:_MOST_NAMES]
    names = [f"{cache.cache} {cache.objects:,}" for cache in shown]
    if len(shown) < len(known):
        names.append("...")
    output.line(
        f"Not charged, of caches that always account: at most {counted(objects, 'objects')} "
        f"({counted(size, 'bytes')}): {', '.join(names)}"
    )
    output.line()


def _coverage(report: Report, output: Output) -> None:
    read = ", ".join(f"{c.read:,} {name}" for name, c in report.coverage.items() if c.read)
    seconds = sum(report.timings.values())
    output.line(f"Read {read} in {seconds:.2f} s.")
    coverage_lines(report.coverage, output)
    for note in report.notes:
        output.line()
        output.line(note, "bold yellow")


def _not_covered(items: Sequence[NotCovered], output: Output, show_all: bool) -> None:
    """Write which counters no identity compares with what was found, by reason."""
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for item, reason in items:
        reasons[reason].append(item)
    if reasons:
        output.line()
        output.line(f"Not covered: {counted(len(items), 'counters')}")
    for reason, names in reasons.items():
        shown = names if show_all else names[:_MOST_NAMES]
        more = f" and {len(names) - len(shown):,} more" if len(shown) < len(names) else ""
        output.line(f"  {', '.join(shown)}{more}: {reason}")
