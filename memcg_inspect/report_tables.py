# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Tables of a report
------------------

The parts of the report of an audit as tables with typed columns, like those of
views. Renderers and the options of ``audit`` that print one of them use them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from memcg_inspect.model import NUMA_NO_NODE
from memcg_inspect.report import Reads, Report, Row
from memcg_inspect.tables import (
    Answer,
    Field,
    MemcgAddress,
    NotRead,
    Table,
    UsageError,
    Value,
    columns_of,
)

__all__ = (
    "DiagnosisRow",
    "EffectRow",
    "FindingRow",
    "TABLES",
    "IdentityRow",
    "MatrixRow",
    "RowRow",
    "SkewRow",
    "TimingRow",
    "diagnoses_table",
    "effects_answer",
    "findings_table",
    "identities_table",
    "report_answer",
    "rows_table",
    "skew_matrix",
    "skew_table",
    "timings_table",
)


@dataclass(frozen=True)
class IdentityRow:
    """The outcome of one identity."""

    name: Annotated[str, Field("text", "name of the identity")]
    status: Annotated[
        str,
        Field(
            "text", "exact, findings, unverifiable, moving, or not-kept by this kernel", priority=9
        ),
    ]
    rows: Annotated[
        int, Field("count", "number of rows, including those in which everything is 0", priority=7)
    ]
    differing: Annotated[int, Field("count", "number of rows that differ", priority=8)]
    reason: Annotated[
        str | None, Field("text", "why the identity is unverifiable or not kept", priority=6)
    ]


@dataclass(frozen=True)
class TimingRow:
    """One step of the audit."""

    step: Annotated[str, Field("text", "what was read or done")]
    milliseconds: Annotated[int, Field("count", "time that it took", total=True)]
    reads: Annotated[
        int,
        Field("count", "reads in bulk; members of single structures are not counted", total=True),
    ]
    read: Annotated[int, Field("bytes", "bytes of these reads", total=True)]


@dataclass(frozen=True)
class RowRow:
    """One equation of one identity."""

    identity: Annotated[str, Field("text", "name of the identity")]
    memcg: Annotated[
        Value, Field("memcg", "memcg; none if the row is not about a memcg", priority=9)
    ]
    memcg_address: MemcgAddress
    objcg: Annotated[
        int | None, Field("address", "struct obj_cgroup *, if it is about one", priority=4)
    ]
    node: Annotated[int | None, Field("node", "node; none for counters of all nodes", priority=8)]
    item: Annotated[str, Field("text", "name of the counter in the kernel", priority=8)]
    unit: Annotated[str, Field("text", "unit of all amounts of the row", priority=9)]
    found: Annotated[int, Field("count", "sum of the objects found", priority=6)]
    claimed: Annotated[
        Value, Field("count", "value of the counter, the sum of its parts", priority=6)
    ]
    parts: Annotated[Mapping[str, Value], Field("count", "part of the counter in {}", each="{}")]
    difference: Annotated[Value, Field("difference", "claimed less found", priority=9)]
    status: Annotated[
        str, Field("text", "exact, differs, in-flight, moving or unverifiable", priority=8)
    ]
    found_moved: Annotated[
        int | None, Field("count", "how far found changed between samples", shown=False)
    ]
    claimed_moved: Annotated[
        int | None, Field("count", "how far claimed changed between samples", shown=False)
    ]
    found_in: Annotated[
        str, Field("text", "the amounts that were found, as SOURCE:amount", shown=False)
    ]
    claimed_in: Annotated[
        Value, Field("text", "the parts of the counter, as PLACE:amount", shown=False)
    ]
    reason: Annotated[
        str | None, Field("text", "why the row is in-flight, moving or unverifiable", shown=False)
    ]


@dataclass(frozen=True)
class SkewRow:
    """Charges of one memcg and kind, by charged node and backing node."""

    memcg: Annotated[str, Field("memcg", "memcg that pays")]
    memcg_address: MemcgAddress
    kind: Annotated[str, Field("text", "slab, percpu, kmem, zswap, lru or sock", priority=8)]
    charged_node: Annotated[
        int | None,
        Field("node", "node of the obj_cgroup that pays; none if it has no node", priority=8),
    ]
    node: Annotated[Value, Field("node", "node of the page that holds the charges", priority=8)]
    bytes: Annotated[int, Field("bytes", "size of the charges", total=True, priority=9)]
    count: Annotated[
        int, Field("count", "number of charges; each is counted on one node", total=True)
    ]


@dataclass(frozen=True)
class FindingRow:
    """One place where an identity does not hold, or where a rule is broken."""

    finding: Annotated[int, Field("number", "number of the finding")]
    identity: Annotated[
        str, Field("text", "name of the identity, or kind of the charge", priority=8)
    ]
    kind: Annotated[str, Field("text", "kind of the finding", priority=8)]
    memcg: Annotated[
        str | None, Field("memcg", "memcg; none if it is not about a memcg", priority=9)
    ]
    memcg_address: MemcgAddress
    objcg: Annotated[
        int | None,
        Field("address", "struct obj_cgroup *, if it is about one", shown=False, priority=3),
    ]
    node: Annotated[int | None, Field("node", "node; none if it is not about one node", priority=8)]
    item: Annotated[str, Field("text", "name of the counter, or kind of the charge", priority=7)]
    unit: Annotated[str, Field("text", "unit of the difference", priority=8)]
    difference: Annotated[int | None, Field("difference", "claimed less found", priority=9)]
    what: Annotated[str, Field("text", "one sentence", shown=False)]
    evidence_is: Annotated[str, Field("text", "proof or candidates")]
    evidence: Annotated[int | None, Field("count", "number of objects; none if it is not known")]
    addresses: Annotated[str, Field("text", "addresses of the first ten", shown=False)]


@dataclass(frozen=True)
class DiagnosisRow:
    """One cause of findings."""

    diagnosis: Annotated[int, Field("number", "number of the diagnosis")]
    cause: Annotated[str, Field("text", "name of the cause", priority=9)]
    confidence: Annotated[str, Field("text", "proved, only-explanation or likely", priority=8)]
    node: Annotated[int | None, Field("node", "node; none if it is not about one node", priority=7)]
    amount: Annotated[int | None, Field("count", "how much is wrong", priority=8)]
    unit: Annotated[str, Field("text", "unit of the amount", priority=8)]
    memcgs: Annotated[str, Field("text", "memcgs that it is about", priority=7)]
    address: Annotated[
        int | None, Field("address", "the likeliest object, if there is one", priority=6)
    ]
    findings: Annotated[int, Field("count", "number of the findings that it explains")]
    what: Annotated[str, Field("text", "one sentence", priority=4)]


@dataclass(frozen=True)
class EffectRow:
    """What a cause does to one row, beside the difference of the row."""

    identity: Annotated[str, Field("text", "name of the identity")]
    memcg: Annotated[
        str | None, Field("memcg", "memcg; none if the row is not about a memcg", priority=9)
    ]
    memcg_address: MemcgAddress
    objcg: Annotated[
        int | None, Field("address", "struct obj_cgroup *, if it is about one", shown=False)
    ]
    node: Annotated[int | None, Field("node", "node; none for counters of all nodes", priority=8)]
    item: Annotated[str, Field("text", "name of the counter in the kernel", priority=8)]
    unit: Annotated[str, Field("text", "unit of the amounts", priority=7)]
    cause: Annotated[int, Field("difference", "what the cause adds to the difference", priority=8)]
    difference: Annotated[int, Field("difference", "difference of the row", priority=8)]
    rest: Annotated[int, Field("difference", "what this cause does not explain", priority=9)]


@dataclass(frozen=True)
class MatrixRow:
    """A line of the matrix of charged node and backing node."""

    memcg: Annotated[str, Field("memcg", "memcg that pays")]
    kind: Annotated[str, Field("text", "kind of charge")]
    charged: Annotated[str | None, Field("text", "node of the obj_cgroup that pays")]
    nodes: Annotated[Mapping[str, int | None], Field("bytes", "bytes {}", each="{}")] = field(
        default_factory=dict
    )


def report_answer(report: Report, name: str, show_all: bool = False) -> Answer:
    """
    Return one table of a report as the answer of ``audit``.

    :param name: one of :data:`TABLES`
    :param show_all: whether to include rows that are all zero
    """
    _, make = TABLES[name]
    return Answer(
        "audit",
        report.image,
        (make(report, show_all),),
        report.coverage,
        report.notes,
        interrupted=report.interrupted,
    )


def effects_answer(report: Report, number: int) -> Answer:
    """
    Return what a diagnosis does to each row as the answer of ``audit --explain``.

    :param number: number of the diagnosis, from 1
    :raises UsageError: if there is no such diagnosis
    """
    if not 1 <= number <= len(report.causes):
        there = f"1 to {len(report.causes)}" if report.causes else "none"
        raise UsageError(f"--explain {number}: there is no such diagnosis; there are: {there}")
    paths = {memcg.address: memcg.path for memcg in report.memcgs}
    rows = [
        EffectRow(
            identity=effect.identity,
            memcg=None if effect.memcg is None else paths.get(effect.memcg, f"{effect.memcg:#x}"),
            memcg_address=effect.memcg,
            objcg=effect.objcg,
            node=effect.nid,
            item=effect.item,
            unit=effect.unit,
            cause=effect.amount,
            difference=effect.difference,
            rest=effect.difference - effect.amount,
        )
        for effect in report.causes[number - 1].signature
    ]
    title = "what the cause does to each row, and the difference of the row"
    table = Table("explain", title, columns_of(EffectRow), rows, empty="no row shows it")
    return Answer(
        "audit", report.image, (table,), report.coverage, report.notes,
        interrupted=report.interrupted,
    )  # fmt: skip


def identities_table(report: Report, show_all: bool = False) -> Table:
    """Return a table with a row for each identity."""
    rows = [
        IdentityRow(found.name, found.status, found.rows, found.differing, found.reason)
        for found in report.identities
    ]
    return Table("identities", "identities", columns_of(IdentityRow), rows)


def rows_table(report: Report, show_all: bool = False) -> Table:
    """Return a table with the rows of all identities."""
    rows = report.rows if show_all else report.nonzero_rows
    made = list(row_records(report, rows))
    return Table("rows", "rows of all identities", columns_of(RowRow), made, empty="all are zero")


def row_records(report: Report, rows: Iterable[Row], parts: Sequence[str] = ()) -> list[RowRow]:
    """
    Return rows as records of a table.

    :param parts: parts of the counters to show in columns of their own
    """
    paths = {memcg.address: memcg.path for memcg in report.memcgs}
    return [_row(row, paths, parts) for row in rows]


def _row(row: Row, paths: Mapping[int, str], parts: Sequence[str]) -> RowRow:
    unread = NotRead(row.reason or "the counter could not be read")
    claimed = row.claimed
    path: Value = None if row.memcg is None else paths.get(row.memcg, f"{row.memcg:#x}")
    return RowRow(
        identity=row.identity,
        memcg=path,
        memcg_address=row.memcg,
        objcg=row.objcg,
        node=row.nid,
        item=row.item,
        unit=row.unit,
        found=sum(row.found.values()),
        claimed=unread if claimed is None else sum(claimed.values()),
        parts={part: unread if claimed is None else claimed.get(part, 0) for part in parts},
        difference=unread if row.difference is None else row.difference,
        status=row.status,
        found_moved=None if row.moved is None else row.moved.found,
        claimed_moved=None if row.moved is None else row.moved.claimed,
        found_in=_amounts(row.found),
        claimed_in=unread if claimed is None else _amounts(claimed),
        reason=row.reason,
    )


def _amounts(amounts: Mapping[str, int]) -> str:
    return ",".join(f"{name}:{amount}" for name, amount in amounts.items())


def skew_table(report: Report, show_all: bool = False) -> Table:
    """Return a table with a row for each memcg, kind, charged node and backing node."""
    paths = {memcg.address: memcg.path for memcg in report.memcgs}
    rows = [
        SkewRow(
            memcg=paths.get(cell.memcg, f"{cell.memcg:#x}"),
            memcg_address=cell.memcg,
            kind=cell.kind,
            charged_node=cell.charged_nid,
            node=cell.backing_nid if cell.reason is None else NotRead(cell.reason),
            bytes=cell.bytes,
            count=cell.count,
        )
        for cell in report.skew
    ]
    title = "charges by charged node and backing node"
    return Table("skew", title, columns_of(SkewRow), rows, empty="no charges")


def findings_table(report: Report, show_all: bool = False) -> Table:
    """Return a table with a row for each finding."""
    paths = {memcg.address: memcg.path for memcg in report.memcgs}
    rows = [
        FindingRow(
            finding=number,
            identity=found.identity,
            kind=found.kind,
            memcg=None if found.memcg is None else paths.get(found.memcg, f"{found.memcg:#x}"),
            memcg_address=found.memcg,
            objcg=found.objcg,
            node=found.nid,
            item=found.item,
            unit=found.unit,
            difference=found.difference,
            what=found.what,
            evidence_is=found.evidence_is,
            evidence=found.evidence_total,
            addresses=" ".join(f"{evidence.address:#x}" for evidence in found.evidence),
        )
        for number, found in enumerate(report.findings, 1)
    ]
    return Table("findings", "findings", columns_of(FindingRow), rows, empty="none")


def diagnoses_table(report: Report, show_all: bool = False) -> Table:
    """Return a table with a row for each cause."""
    paths = {memcg.address: memcg.path for memcg in report.memcgs}
    rows = [
        DiagnosisRow(
            diagnosis=number,
            cause=found.cause,
            confidence=found.confidence,
            node=found.nid,
            amount=found.amount,
            unit=found.unit,
            memcgs=", ".join(paths.get(memcg, f"{memcg:#x}") for memcg in found.memcgs),
            address=next((evidence.address for evidence in found.evidence), None),
            findings=len(found.findings),
            what=found.what,
        )
        for number, found in enumerate(report.diagnoses, 1)
    ]
    return Table("diagnoses", "diagnoses", columns_of(DiagnosisRow), rows, empty="none")


def timings_table(report: Report, show_all: bool = False) -> Table:
    """Return a table with a row for each step of the audit."""
    rows = [
        TimingRow(step, round(1000 * seconds), reads.reads, reads.bytes)
        for step, seconds in report.timings.items()
        for reads in (report.reads.get(step, Reads()),)
    ]
    return Table("timings", "steps of the audit", columns_of(TimingRow), rows)


def skew_matrix(report: Report) -> Table:
    """Return the bytes of the skew with a column for each backing node, memcg by memcg."""
    # Charges without a node come last.
    nids = sorted({s.backing_nid for s in report.skew}, key=lambda n: (n == NUMA_NO_NODE, n))
    names = {nid: "no node" if nid == NUMA_NO_NODE else f"on {nid}" for nid in nids}
    paths = {memcg.address: memcg.path for memcg in report.memcgs}
    lines: defaultdict[tuple[str, str, int | None], dict[str, int | None]]
    rows: list[MatrixRow] = []
    for memcg, path in ((None, "whole machine"), *paths.items()):
        lines = defaultdict(lambda: dict.fromkeys(names.values()))
        for cell in report.skew:
            if memcg is None or cell.memcg == memcg:
                line = lines[path, cell.kind, cell.charged_nid]
                line[names[cell.backing_nid]] = (line[names[cell.backing_nid]] or 0) + cell.bytes
        for (_, kind, nid), line in sorted(lines.items(), key=lambda it: (it[0][1], it[0][2] or 0)):
            rows.append(MatrixRow(path, kind, None if nid is None else f"node {nid}", line))
    title = "skew: bytes by charged node and backing node (off the diagonal is skewed)"
    if all(s.charged_nid is None for s in report.skew):
        title = "bytes by backing node (obj_cgroups of this kernel have no node)"
    return Table("skew", title, columns_of(MatrixRow, keys=names.values()), rows)


#: The tables of ``audit`` by name: class of the rows, and function that makes the table.
TABLES: dict[str, tuple[type, Callable[[Report, bool], Table]]] = {
    "diagnoses": (DiagnosisRow, diagnoses_table),
    "findings": (FindingRow, findings_table),
    "identities": (IdentityRow, identities_table),
    "rows": (RowRow, rows_table),
    "skew": (SkewRow, skew_table),
    "timings": (TimingRow, timings_table),
}
