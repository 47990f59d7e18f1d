# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The whole report of an audit as text: verdict, tables, findings with their evidence, coverage.

:mod:`memcg_inspect.render.first_screen` writes what is shown without options.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from memcg_inspect.model import NUMA_NO_NODE, Coverage, counted, first_of
from memcg_inspect.render.text import Output, coverage_lines, size
from memcg_inspect.report import (
    OWN_MACHINE,
    OWN_MEMCG,
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

__all__ = ("evidence_text", "findings_lines", "head_lines", "report_lines")

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


def report_lines(report: Report, output: Output) -> None:
    """Write everything: all rows of all identities, and all names."""
    _head(report, output)
    output.table(identities_table(report), choosable=False)
    for identity in report.identities:
        _rows(report, identity, output, whole=True)
    if report.skew and len(report.image.nodes) > 1:
        output.table(skew_matrix(report), choosable=False)
    _findings(report, output)
    _uncharged(report.uncharged, output)
    _coverage(report, output)
    _not_covered(report.not_covered, output)


def findings_lines(report: Report, output: Output) -> None:
    """Write the rows that are not exact, and the findings with their evidence."""
    _head(report, output)
    for identity in report.identities:
        _rows(report, identity, output, whole=False)
    _findings(report, output)


def _head(report: Report, output: Output) -> None:
    for style, text, rest in head_lines(report):
        output.paragraph(text, style, rest=rest)
    output.line()


def head_lines(
    report: Report, names: Mapping[int, str] | None = None
) -> Iterator[tuple[str, str, str]]:
    """
    Return the first lines: style, text in this style, and the rest.

    :param names: what to call memcgs; by default, by their paths
    """
    if names is None:
        names = {memcg.address: memcg.path for memcg in report.memcgs}
    yield _STYLES[report.verdict], report.verdict.upper(), f": {_meaning(report, names)}"
    yield "", f"Accounting: {_accounting(report)}", ""
    yield "", _image(report), ""
    if report.interrupted:
        yield "bold yellow", "Interrupted: the results are incomplete", ""
    if report.looks > 1:
        yield "", f"Samples: {report.looks}, since the kernel was running", ""
    if report.image.debug_info:
        yield "", f"Types and symbols: {report.image.debug_info}", ""


def _meaning(report: Report, names: Mapping[int, str]) -> str:
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
    unverifiable = _number_of(report, "unverifiable")
    moving = [row for row in report.rows if row.status == "moving"]
    if unverifiable:
        meaning += f"; {unverifiable:,} of {rows} could not be verified"
    elif report.verdict == "incomplete":
        meaning += "; not everything could be read"
    if moving:
        meaning += f"; {len(moving):,} of {rows} were changing{_who(moving, names)}"
    return meaning


def _who(moving: Sequence[Row], names: Mapping[int, str]) -> str:
    """
    Return which memcgs or nodes were changing.

    What this program itself changes is told apart from what else could hide a fault.
    """
    own = [row for row in moving if row.reason in (OWN_MEMCG, OWN_MACHINE)]
    others = [row for row in moving if row.reason not in (OWN_MEMCG, OWN_MACHINE)]
    text = f", {len(own):,} of them because this program runs there" if own else ""
    if own and not others:
        text = ", all because this program runs there"
    rows = Counter(row.memcg for row in others if row.memcg is not None)
    nodes = sorted({row.nid for row in others if row.nid is not None and row.nid >= 0})
    order = sorted(rows, key=lambda m: (-rows[m], m not in names, names.get(m, ""), m))
    who = [names.get(memcg, f"{memcg:#x}") for memcg in order] or [f"node {nid}" for nid in nodes]
    return f"{text}: {first_of(who)}" if who else text


def _number_of(report: Report, status: RowStatus) -> int:
    return sum(row.status == status for row in report.rows)


def _accounting(report: Report) -> str:
    rules = [f"{kind} {_FOLLOWS[rule]}" for kind, rule in (report.follows or {}).items()]
    return ", ".join([_ACCOUNTING[report.image.accounting], *rules])


def _image(report: Report) -> str:
    image, pages = report.image, report.coverage.get("pages", Coverage())
    dying = sum(memcg.state == "dying" for memcg in report.memcgs)
    memory = (pages.read + pages.unreadable) * image.page_size
    parts = [
        f"Linux {image.release} ({image.source})",
        counted(len(image.nodes), "nodes"),
        counted(image.cpus, "CPUs"),
        *([f"{size(memory)} of memory"] if memory else []),
        f"{counted(len(report.memcgs), 'memcgs')} ({dying:,} removed)",
    ]
    return ", ".join(parts)


def _rows(report: Report, identity: Identity, output: Output, whole: bool) -> None:
    """
    Write the rows of an identity.

    :param whole: whether to write those that are exact, too
    """
    rows = [row for row in report.rows if row.identity == identity.name]
    shown = rows if whole else [row for row in rows if row.status != "exact"]
    if shown:
        title = f"{identity.name}: {identity.status}"
        if len(shown) < len(rows):
            title += f" ({len(shown):,} of {counted(len(rows), 'rows')})"
        output.table(_table(report, title, shown), choosable=False)
        _reasons(shown, output)


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
        output.paragraph(reason, "yellow", "  ")
    if reasons:
        output.line()


def _findings(report: Report, output: Output) -> None:
    names = {memcg.address: memcg.path for memcg in report.memcgs}
    for number, finding in enumerate(report.findings, 1):
        about = f"{_name(names, finding.memcg)}: {finding.what}"
        head = f"Finding {number}:"
        first, *more = output.wrapped(f"{head} {about}", "  ", whole=True)
        output.line(head, "bold red", first[len(head) :])
        for line in more:
            output.line(line)
        if finding.evidence:
            output.line(f"  {finding.evidence_is}{_order(finding.evidence)}:")
        for evidence in finding.evidence:
            output.item(evidence_text(evidence, names), "    ")
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
        output.item(f"and {more:,} more{as_likely}", "    ")


def _name(names: Mapping[int, str], address: int | None) -> str:
    return "-" if address is None else names.get(address, f"{address:#x}")


def evidence_text(evidence: Evidence, names: Mapping[int, str]) -> str:
    """
    Return what is known of an object.

    :param names: of memcgs, by address
    """
    parts = [f"{evidence.address:#x}"]
    if evidence.cache is not None:
        parts.append(f"{evidence.cache} object")
    if evidence.bytes is not None:
        parts.append(counted(evidence.bytes, "bytes"))
    if evidence.objcg is not None and evidence.memcg is None:
        parts.append(f"objcg {evidence.objcg:#x}")
    elif evidence.objcg is not None:
        parts.append(f"charged to {_name(names, evidence.memcg)} (objcg {evidence.objcg:#x})")
    if evidence.page is not None:
        parts.append(f"page {evidence.page:#x}")
    if evidence.nid is not None:
        parts.append("no node" if evidence.nid == NUMA_NO_NODE else f"node {evidence.nid}")
    if evidence.note is not None:
        parts.append(evidence.note)
    if evidence.site is not None:
        parts.append(f"allocated at {evidence.site}")
    return ", ".join(parts)


def _uncharged(caches: Sequence[Uncharged], output: Output) -> None:
    """Write the caches with objects that no memcg pays for."""
    known = [cache for cache in caches if cache.objects is not None]
    if not known:
        return
    objects, size = sum(c.objects or 0 for c in known), sum(c.bytes or 0 for c in known)
    names = [f"{cache.cache} {cache.objects:,}" for cache in known]
    output.paragraph(
        f"Not charged, of caches that always account: at most {counted(objects, 'objects')} "
        f"({counted(size, 'bytes')}): {', '.join(names)}"
    )
    output.line()


def _coverage(report: Report, output: Output) -> None:
    read = ", ".join(f"{c.read:,} {name}" for name, c in report.coverage.items() if c.read)
    seconds = sum(report.timings.values())
    output.paragraph(f"Read {read} in {seconds:.2f} s.")
    coverage_lines(report.coverage, output)
    for note in report.notes:
        output.line()
        output.paragraph(note, "bold yellow")


def _not_covered(items: Sequence[NotCovered], output: Output) -> None:
    """Write which counters no identity compares with what was found, by reason."""
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for item, reason in items:
        reasons[reason].append(item)
    if reasons:
        output.line()
        output.line(f"Not covered: {counted(len(items), 'counters')}")
    for reason, names in reasons.items():
        output.paragraph(f"{', '.join(names)}: {reason}", indent="  ")
