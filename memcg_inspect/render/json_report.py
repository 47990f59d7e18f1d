# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Reports as JSON
---------------

One document with a ``schema`` number. Addresses are hex strings, amounts are integers in
the unit named beside them; what could not be read is ``null`` with a reason. Within a
schema number fields may be added, and none changes its meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from memcg_inspect.model import (
    NUMA_NO_NODE,
    Coverage,
    Evidence,
    Finding,
    Identity,
    ImageInfo,
    Memcg,
    PercpuUsage,
    Report,
    Row,
    Skew,
    SlabUsage,
)

__all__ = ("SCHEMA", "coverage_document", "image_document", "report_document", "to_json")

SCHEMA = 1


def to_json(report: Report) -> str:
    """Write a report as one JSON document."""
    return json.dumps(report_document(report), indent=1)


def report_document(report: Report) -> dict[str, Any]:
    """Return a report as plain lists, dicts, strings and numbers."""
    return {
        "schema": SCHEMA,
        "image": image_document(report.image),
        "verdict": report.verdict,
        "looks": report.looks,
        "interrupted": report.interrupted,
        "counters_follow": None if report.follows is None else dict(report.follows),
        "memcgs": [_memcg(memcg) for memcg in report.memcgs],
        "identities": [_identity(identity) for identity in report.identities],
        "rows": [_row(row) for row in report.rows if not is_zero(row)],
        "skew": [_skew(cell) for cell in report.skew],
        "slabs": [_slab_usage(usage) for usage in report.slab_usage],
        "percpu": [_percpu_usage(usage) for usage in report.percpu_usage],
        "findings": [_finding(finding) for finding in report.findings],
        "notes": list(report.notes),
        "coverage": {name: coverage_document(c) for name, c in report.coverage.items()},
        "timings": {name: round(seconds, 6) for name, seconds in report.timings.items()},
    }


def image_document(image: ImageInfo) -> dict[str, Any]:
    """Return what was looked at, for JSON."""
    return {
        "release": image.release,
        "source": image.source,
        "nodes": list(image.nodes),
        "cpus": image.cpus,
        "page_size": image.page_size,
        "accounting": image.accounting,
        "debug_info": image.debug_info,
    }


def is_zero(row: Row) -> bool:
    """Return whether a row says nothing but that there is nothing."""
    return (
        row.status == "exact"
        and not any(row.found.values())
        and not any((row.claimed or {}).values())
    )


def _hex(address: int | None) -> str | None:
    return None if address is None else f"{address:#x}"


def _nid(nid: int | None) -> int | None:
    return None if nid == NUMA_NO_NODE else nid


def _no_node(kind: str) -> str:
    if kind == "sock":
        return "what a socket has charged is a number of pages, of no node"
    return "the node is not known: the page could not be read"


def _memcg(memcg: Memcg) -> dict[str, Any]:
    return {
        "address": _hex(memcg.address),
        "path": memcg.path,
        "cgroup_id": memcg.cgroup_id,
        "state": memcg.state,
        "parent": _hex(memcg.parent),
    }


def _identity(identity: Identity) -> dict[str, Any]:
    return {
        "name": identity.name,
        "status": identity.status,
        "rows": identity.rows,
        "differing": identity.differing,
        "reason": identity.reason,
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "identity": row.identity,
        "memcg": _hex(row.memcg),
        "objcg": _hex(row.objcg),
        "nid": row.nid,
        "item": row.item,
        "unit": row.unit,
        "status": row.status,
        "reason": row.reason,
        "found": dict(row.found),
        "claimed": None if row.claimed is None else dict(row.claimed),
        "difference": row.difference,
        "hierarchy": row.hierarchy,
        "moved": None if row.moved is None else row.moved._asdict(),
    }


def _skew(cell: Skew) -> dict[str, Any]:
    return {
        "memcg": _hex(cell.memcg),
        "kind": cell.kind,
        "charged_nid": cell.charged_nid,
        "backing_nid": _nid(cell.backing_nid),
        "reason": _no_node(cell.kind) if cell.backing_nid == NUMA_NO_NODE else None,
        "bytes": cell.bytes,
        "count": cell.count,
    }


def _slab_usage(usage: SlabUsage) -> dict[str, Any]:
    return {
        "nid": usage.nid,
        "cache": usage.cache,
        "address": _hex(usage.address),
        "reclaimable": usage.reclaimable,
        "kfence": usage.kfence,
        "size": usage.size,
        "slabs": usage.slabs,
        "pages": usage.pages,
        "objects": usage.objects,
        "inuse": usage.inuse,
        "charged": usage.charged,
        "charged_bytes": None if usage.charged is None else usage.charged * usage.charge,
    }


def _percpu_usage(usage: PercpuUsage) -> dict[str, Any]:
    return {
        "nid": _nid(usage.nid),
        "pages": usage.pages,
        "allocated": usage.allocated,
        "charged": usage.charged,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "identity": finding.identity,
        "kind": finding.kind,
        "memcg": _hex(finding.memcg),
        "objcg": _hex(finding.objcg),
        "nid": _nid(finding.nid),
        "item": finding.item,
        "unit": finding.unit,
        "difference": finding.difference,
        "what": finding.what,
        "evidence_is": finding.evidence_is,
        "evidence": [_evidence(e) for e in finding.evidence],
    }


def _evidence(evidence: Evidence) -> dict[str, Any]:
    fields: Mapping[str, Any] = {
        "address": _hex(evidence.address),
        "kind": evidence.kind,
        "nid": evidence.nid,
        "bytes": evidence.bytes,
        "cache": evidence.cache,
        "page": _hex(evidence.page),
        "objcg": _hex(evidence.objcg),
        "memcg": _hex(evidence.memcg),
        "note": evidence.note,
    }
    document = {name: value for name, value in fields.items() if value is not None}
    if evidence.nid == NUMA_NO_NODE:
        document |= {"nid": None, "reason": _no_node(evidence.kind)}
    return document


def coverage_document(coverage: Coverage) -> dict[str, Any]:
    """Return how much could be read, for JSON."""
    return {
        "read": coverage.read,
        "unreadable": coverage.unreadable,
        "examples": [
            {"what": e.what, "address": _hex(e.address), "reason": e.reason}
            for e in coverage.examples
        ],
    }
