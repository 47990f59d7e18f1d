# SPDX-License-Identifier: LGPL-2.1-or-later
"""Reports for a terminal, and for the pipe behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memcg_inspect.model import (
    NUMA_NO_NODE,
    Coverage,
    Evidence,
    Finding,
    Identity,
    ImageInfo,
    Memcg,
    Report,
    Row,
    Skew,
    counted,
)
from memcg_inspect.render.json_report import is_zero
from memcg_inspect.render.text import amount, printable, signed

__all__ = ("box_style", "make_console", "print_coverage", "print_report", "say")

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
_FOLLOWS = {
    "physical": "by the physical rule",
    "posted": "by the posted rule",
    "both": "by either rule",
    "neither": "by no known rule",
}
_STYLES = {"exact": "green", "differs": "bold red", "findings": "bold red"}

#: The identity whose rows are always shown: it is the one with nodes.
_ALWAYS = "slab"

#: Columns of a console that is no terminal: nothing is folded or cut there.
_PIPE_WIDTH = 200


class _Console(Console):
    """One that leaves the exit status to the program: rich's own says 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console() -> Console:
    """Return a console for standard output."""
    # Names are no markup.
    console = _Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def print_report(report: Report, console: Console, show_all: bool = False) -> None:
    """
    Print a report: the verdict, the identities and rows, skew, findings, what was read.

    :param show_all: print every row of every identity, also those in which everything is 0
    """
    names = {memcg.address: memcg for memcg in report.memcgs}
    _print_verdict(report, console)
    _print_identities(report.identities, console)
    for identity in report.identities:
        rows = [row for row in report.rows if row.identity == identity.name]
        _print_rows(identity, rows, names, console, show_all)
    _print_skew(report, names, console)
    _print_findings(report.findings, names, console)
    _print_read(report, console)


def say(console: Console, text: str, style: str = "") -> None:
    """Print one line, whatever is in it."""
    console.print(_cell(text, style))


def _cell(text: str, style: str = "") -> Text:
    """Names from the image are in many texts, and are neither markup nor control sequences."""
    return Text(printable(text), style)


def _print_verdict(report: Report, console: Console) -> None:
    style, meaning = _VERDICTS[report.verdict]
    in_flight = sum(row.status == "in-flight" for row in report.rows)
    if in_flight:
        meaning += f", but for {counted(in_flight, 'rows')} in flight when it stopped"
    said = f": {meaning}; accounting: {_accounting(report)}"
    console.print(Text.assemble((report.verdict.upper(), style), said))
    say(console, _looked_at(report.image, report.memcgs))
    if report.interrupted:
        say(console, "Interrupted: this is what was found so far", "bold yellow")
    if report.looks > 1:
        say(console, f"Looked at {report.looks} times, since it moves while it is read")
    if report.image.debug_info:
        say(console, f"Types and symbols: {report.image.debug_info}")


def _accounting(report: Report) -> str:
    rules = [f"{kind} {_FOLLOWS[rule]}" for kind, rule in (report.follows or {}).items()]
    return ", ".join([_ACCOUNTING[report.image.accounting], *rules])


def _looked_at(image: ImageInfo, memcgs: Sequence[Memcg]) -> str:
    dying = sum(memcg.state == "dying" for memcg in memcgs)
    return (
        f"Linux {image.release} ({image.source}), {counted(len(image.nodes), 'nodes')}, "
        f"{counted(image.cpus, 'CPUs')}, {counted(len(memcgs), 'memcgs')} ({dying} removed)"
    )


def box_style() -> box.Box:
    """Return how tables are drawn."""
    return box.SIMPLE_HEAD


def _table(
    title: str, left: Sequence[str], right: Sequence[str], last: Sequence[str] = ()
) -> Table:
    table = Table(title=_cell(title), title_justify="left", box=box_style(), pad_edge=False)
    for name in left:
        table.add_column(_cell(name), overflow="fold")
    for name in right:
        table.add_column(_cell(name), justify="right", no_wrap=True)
    for name in last:
        table.add_column(_cell(name), overflow="fold")
    return table


def _name(names: dict[int, Memcg], address: int | None) -> str:
    if address is None:
        return "-"
    memcg = names.get(address)
    return memcg.path if memcg is not None else f"{address:#x}"


def _print_identities(identities: Sequence[Identity], console: Console) -> None:
    table = _table("identities", ["name", "status"], ["rows", "differing"], ["reason"])
    for identity in identities:
        style = "" if identity.status == "not-kept" else _STYLES.get(identity.status, "yellow")
        table.add_row(
            _cell(identity.name),
            _cell(identity.status, style),
            _cell(amount(identity.rows)),
            _cell(amount(identity.differing)),
            _cell(identity.reason or ""),
        )
    console.print()
    console.print(table)


def _print_rows(
    identity: Identity,
    rows: Sequence[Row],
    names: dict[int, Memcg],
    console: Console,
    show_all: bool,
) -> None:
    """Unless all are wanted, those that are not as they should be."""
    if show_all:
        shown = list(rows)
    elif identity.name == _ALWAYS:
        shown = [row for row in rows if not is_zero(row)]
    else:
        shown = [row for row in rows if row.status != "exact"]
    if shown:
        title = f"{identity.name}: {identity.status}"
        if identity.name != _ALWAYS and len(shown) < len(rows):
            title += f" ({len(shown):,} of {counted(len(rows), 'rows')})"
        _print_table(title, shown, names, console)
    elif rows and identity.name == _ALWAYS:
        say(console, f"{identity.name}: {identity.status}, nothing charged")


def _print_table(
    title: str, rows: Sequence[Row], names: dict[int, Memcg], console: Console
) -> None:
    parts = _parts(rows)
    moved = ["found moved", "claimed moved"] if any(row.moved for row in rows) else []
    columns = ["found", *parts, "difference", *moved]
    table = _table(title, ["memcg", "node", "item", "unit"], columns)
    for row in rows:
        claimed = row.claimed
        cells = (
            _name(names, row.memcg),
            "-" if row.nid is None else str(row.nid),
            row.item,
            row.unit,
            amount(sum(row.found.values())),
            *(amount(None if claimed is None else claimed.get(part, 0)) for part in parts),
            _difference(row),
            *(_moved(row) if moved else ()),
        )
        style = None if row.status == "exact" else _STYLES.get(row.status, "yellow")
        table.add_row(*map(_cell, cells), style=style)
    console.print(table)
    reasons = sorted({row.reason for row in rows if row.reason})
    for reason in reasons:
        say(console, f"  ? {reason}", "yellow")
    if reasons:
        console.print()


def _moved(row: Row) -> tuple[str, str]:
    return ("", "") if row.moved is None else (amount(row.moved.found), amount(row.moved.claimed))


def _difference(row: Row) -> str:
    shown = signed(row.difference)
    if row.status == "unverifiable":
        return f"? ({shown})"
    return shown if row.status in ("exact", "differs") else f"{row.status} ({shown})"


def _parts(rows: Iterable[Row]) -> list[str]:
    parts: dict[str, None] = {}
    for row in rows:
        parts.update(dict.fromkeys(row.claimed or ()))
    return list(parts)


def _print_skew(report: Report, names: dict[int, Memcg], console: Console) -> None:
    if not report.skew or len(report.image.nodes) < 2:
        return
    # What has no node comes last.
    nodes = sorted({s.backing_nid for s in report.skew}, key=lambda n: (n == NUMA_NO_NODE, n))
    if all(s.charged_nid is None for s in report.skew):
        title = "bytes by backing node (this kernel's obj_cgroups have no node)"
    else:
        title = "skew: bytes by charged node and backing node (off the diagonal is skewed)"
    columns = ["no node" if nid == NUMA_NO_NODE else f"on {nid}" for nid in nodes]
    table = _table(title, ["memcg", "kind", "charged"], columns)
    _add_skew(table, "whole machine", report.skew, nodes)
    for memcg in names.values():
        cells = [cell for cell in report.skew if cell.memcg == memcg.address]
        _add_skew(table, memcg.path, cells, nodes)
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
            _cell(name),
            _cell(kind),
            _cell("-" if charged is None else f"node {charged}"),
            *(_cell(amount(row[nid]) if row[nid] else ".") for nid in nodes),
        )


def _print_findings(findings: Sequence[Finding], names: dict[int, Memcg], console: Console) -> None:
    for number, finding in enumerate(findings, 1):
        about = _cell(f"{_name(names, finding.memcg)}: {finding.what}")
        console.print()
        console.print(Text.assemble((f"Finding {number}: ", "bold red"), about))
        if finding.evidence:
            label = "proof" if finding.evidence_is == "proof" else "candidates"
            say(console, f"  {label}:")
        for evidence in finding.evidence:
            say(console, "    " + _evidence(evidence, names))


def _evidence(evidence: Evidence, names: dict[int, Memcg]) -> str:
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


def _print_read(report: Report, console: Console) -> None:
    read = ", ".join(f"{c.read:,} {name}" for name, c in report.coverage.items() if c.read)
    seconds = sum(report.timings.values())
    console.print()
    say(console, f"Read {read} in {seconds:.2f} s.")
    print_coverage(report.coverage, console)
    for note in report.notes:
        console.print()
        say(console, note, "bold yellow")


def print_coverage(coverage: Mapping[str, Coverage], console: Console) -> None:
    """Say what could not be read, if anything."""
    for name, part in coverage.items():
        if part.unreadable:
            say(console, f"Not read: {part.unreadable:,} of {name}, e.g.", "yellow")
            for example in part.examples[:3]:
                say(console, f"  {example.what} at {example.address:#x}: {example.reason}")
