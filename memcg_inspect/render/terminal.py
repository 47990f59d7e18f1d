# SPDX-License-Identifier: LGPL-2.1-or-later
"""Reports for a terminal, and for the pipe behind it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memcg_inspect.model import Evidence, Finding, Memcg, Report, Row, Skew
from memcg_inspect.render.json_report import is_zero
from memcg_inspect.render.text import amount, printable, signed

__all__ = ("make_console", "print_report")

_VERDICTS = {
    "exact": ("bold green", "every identity that this kernel keeps was read in full and holds"),
    "findings": ("bold red", "the counters and the objects disagree"),
    "incomplete": ("bold yellow", "nothing wrong was found, but not everything could be read"),
    "moving": ("bold yellow", "nothing wrong was found, but some counters did not stand still"),
}
_ACCOUNTING = {
    "memcg": "one obj_cgroup per memcg",
    "objcg-per-node": "one obj_cgroup per memcg and node",
    "kmem-per-node": "kernel memory counted per memcg and node",
}
_STYLES = {"exact": "green", "differs": "bold red", "unverifiable": "yellow"}

#: Columns of a console that is no terminal: nothing is folded or cut there.
_PIPE_WIDTH = 200


def make_console() -> Console:
    """Return a console for standard output."""
    console = Console(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def print_report(report: Report, console: Console, show_zero: bool = False) -> None:
    """
    Print a report: the verdict, the rows, skew, findings, and how much was read.

    :param show_zero: print rows in which everything is 0, too
    """
    names = {memcg.address: memcg for memcg in report.memcgs}
    _print_verdict(report, console)
    for identity in report.identities:
        rows = [
            row
            for row in report.rows
            if row.identity == identity.name and (show_zero or not is_zero(row))
        ]
        _print_rows(identity.name, identity.status, rows, names, console)
    _print_skew(report, names, console)
    _print_findings(report.findings, names, console)
    _print_coverage(report, console)


def _print_verdict(report: Report, console: Console) -> None:
    style, meaning = _VERDICTS[report.verdict]
    image = report.image
    console.print(Text.assemble((report.verdict.upper(), style), f": {meaning}"))
    nodes, memcgs = len(image.nodes), report.memcgs
    dying = sum(memcg.state == "dying" for memcg in memcgs)
    console.print(
        Text(
            f"Linux {printable(image.release)} ({image.source}), {nodes} node{'s' * (nodes > 1)}, "
            f"{image.cpus} CPUs, {len(memcgs)} memcgs ({dying} removed); "
            f"accounting: {_ACCOUNTING[image.accounting]}"
        )
    )


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _name(names: dict[int, Memcg], address: int | None) -> str:
    if address is None:
        return "-"
    memcg = names.get(address)
    return printable(memcg.path) if memcg is not None else f"{address:#x}"


def _print_rows(
    name: str, status: str, rows: Sequence[Row], names: dict[int, Memcg], console: Console
) -> None:
    if not rows:
        console.print(Text(f"\n{name}: {status}, nothing charged"))
        return
    parts = _parts(rows)
    table = _table(
        f"{name}: {status}",
        ["memcg", "node", "item", "unit"],
        ["found", *parts, "difference"],
    )
    for row in rows:
        table.add_row(
            _name(names, row.memcg),
            "-" if row.nid is None else str(row.nid),
            row.item,
            row.unit,
            amount(sum(row.found.values())),
            *(amount(None if row.claimed is None else row.claimed.get(p, 0)) for p in parts),
            signed(row.difference)
            if row.status != "unverifiable"
            else f"? ({signed(row.difference)})",
            style=_STYLES[row.status] if row.status != "exact" else None,
        )
    console.print()
    console.print(table)
    for reason in sorted({row.reason for row in rows if row.reason}):
        console.print(Text(f"  ? {reason}", style="yellow"))


def _parts(rows: Iterable[Row]) -> list[str]:
    parts: dict[str, None] = {}
    for row in rows:
        parts.update(dict.fromkeys(row.claimed or ()))
    return list(parts)


def _print_skew(report: Report, names: dict[int, Memcg], console: Console) -> None:
    nodes = sorted({s.backing_nid for s in report.skew})
    if not report.skew or len(report.image.nodes) < 2:
        return
    if all(s.charged_nid is None for s in report.skew):
        title = "bytes by backing node (this kernel's obj_cgroups have no node)"
    else:
        title = "skew: bytes by charged node and backing node (off the diagonal is skewed)"
    table = _table(title, ["memcg", "kind", "charged"], [f"on {nid}" for nid in nodes])
    _add_skew(table, "whole machine", report.skew, nodes)
    for memcg in names.values():
        cells = [cell for cell in report.skew if cell.memcg == memcg.address]
        _add_skew(table, printable(memcg.path), cells, nodes)
    console.print(table)


def _add_skew(
    table: Table,
    name: str,
    skew: Sequence[Skew],
    nodes: Sequence[int],
) -> None:
    cells: dict[tuple[str, int | None], dict[int, int]] = {}
    for cell in skew:
        row = cells.setdefault((cell.kind, cell.charged_nid), dict.fromkeys(nodes, 0))
        row[cell.backing_nid] += cell.bytes
    for (kind, charged), row in sorted(cells.items(), key=lambda c: (c[0][0], c[0][1] or 0)):
        table.add_row(
            name,
            kind,
            "-" if charged is None else f"node {charged}",
            *(amount(row[nid]) if row[nid] else "." for nid in nodes),
        )


def _print_findings(findings: Sequence[Finding], names: dict[int, Memcg], console: Console) -> None:
    for number, finding in enumerate(findings, 1):
        console.print(
            Text.assemble(
                (f"\nFinding {number}: ", "bold red"),
                (f"{_name(names, finding.memcg)}: {finding.what}"),
            )
        )
        if finding.evidence:
            label = "proof" if finding.evidence_is == "proof" else "candidates"
            console.print(Text(f"  {label}:"))
        for evidence in finding.evidence:
            console.print(Text("    " + _evidence(evidence, names)))


def _evidence(evidence: Evidence, names: dict[int, Memcg]) -> str:
    parts = [f"{evidence.address:#x}"]
    if evidence.cache is not None:
        parts.append(f"{printable(evidence.cache)} object")
    if evidence.bytes is not None:
        parts.append(f"{evidence.bytes:,} bytes")
    if evidence.objcg is not None:
        parts.append(f"charged to {_name(names, evidence.memcg)} (objcg {evidence.objcg:#x})")
    if evidence.page is not None:
        parts.append(f"page {evidence.page:#x}")
    if evidence.nid is not None:
        parts.append(f"node {evidence.nid}")
    if evidence.note is not None:
        parts.append(evidence.note)
    return ", ".join(parts)


def _print_coverage(report: Report, console: Console) -> None:
    read = ", ".join(f"{c.read:,} {name}" for name, c in report.coverage.items() if c.read)
    seconds = sum(report.timings.values())
    console.print(Text(f"\nRead {read} in {seconds:.2f} s."))
    for name, coverage in report.coverage.items():
        if coverage.unreadable:
            console.print(
                Text(f"Not read: {coverage.unreadable:,} of {name}, e.g.", style="yellow")
            )
            for example in coverage.examples[:3]:
                console.print(
                    Text(f"  {example.what} at {example.address:#x}: {printable(example.reason)}")
                )
