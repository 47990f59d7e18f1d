# SPDX-License-Identifier: LGPL-2.1-or-later
"""
JSON documents
--------------

The document of ``audit`` is made from the type hints of the records in
:mod:`memcg_inspect.report` and :mod:`memcg_inspect.model`, and the documents of views from the
types of their columns. Addresses are hexadecimal strings, amounts are integers. A value that
    could not be read is ``null`` with a reason. Within one number of the schema
    (:data:`~memcg_inspect.tables.SCHEMA`) fields may be added, and none changes its meaning.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from memcg_inspect.model import (
    NUMA_NO_NODE,
    Coverage,
    ImageInfo,
    Memcg,
    PercpuUsage,
    SlabUsage,
    Unreadable,
)
from memcg_inspect.model_fleet import DumpCause, DumpResult
from memcg_inspect.report import (
    Charged,
    Diagnosis,
    Effect,
    Evidence,
    Finding,
    Identity,
    Moved,
    NotCovered,
    Report,
    Row,
    Skew,
    Uncharged,
    UnchargedSite,
)
from memcg_inspect.tables import SCHEMA, Answer, Column, NotRead, Table, Value

__all__ = (
    "PATHS",
    "SPARSE",
    "answer_document",
    "is_record",
    "members",
    "record_document",
    "report_document",
    "to_json",
    "without_none",
)

#: A function that makes a value for JSON; it gets the paths of memcgs, by address.
_Maker = Callable[[Any, Mapping[int, str]], Any]
#: The attributes of each record that the document contains.
_FIELDS: dict[type, tuple[str, ...]] = {
    DumpResult: (
        *("dump", "bytes", "mtime_ns", "status", "verdict", "error", "host", "release", "memcgs"),
        *("rows", "findings", "unexplained", "unreadable", "causes", "seconds"),
    ),
    DumpCause: (
        *("cause", "what", "confidence", "memcg_paths", "node", "amount", "unit", "findings"),
    ),
    ImageInfo: (
        *("release", "source", "nodes", "cpus", "page_size", "accounting", "debug_info"),
        "host",
    ),
    Memcg: ("address", "path", "cgroup_id", "state", "parent"),
    Identity: ("name", "status", "rows", "differing", "reason"),
    Row: (
        "identity", "memcg", "objcg", "nid", "item", "unit", "status", "reason", "found",
        "claimed", "difference", "hierarchy", "moved",
    ),
    Moved: ("looks", "found", "claimed", "least", "most"),
    Skew: ("memcg", "kind", "charged_nid", "backing_nid", "reason", "bytes", "count"),
    SlabUsage: (
        "nid", "cache", "address", "reclaimable", "kfence", "accounts", "size", "slabs",
        "pages", "objects", "inuse", "charged", "charged_bytes",
    ),
    PercpuUsage: ("nid", "pages", "allocated", "charged"),
    Finding: (
        "identity", "kind", "memcg", "objcg", "nid", "item", "unit", "difference", "what",
        "evidence_is", "evidence", "evidence_total", "evidence_tied",
    ),
    Evidence: (
        "address", "kind", "nid", "bytes", "cache", "page", "objcg", "memcg", "note", "site",
        "rank", "reason",
    ),
    Diagnosis: (
        "cause", "what", "confidence", "memcgs", "nid", "amount", "unit", "evidence",
        "evidence_total", "findings", "others", "signature", "functions",
    ),
    Effect: (
        "identity", "memcg", "objcg", "nid", "item", "unit", "amount", "difference",
    ),
    Charged: ("kind", "bytes", "count"),
    NotCovered: ("item", "reason"),
    Uncharged: ("cache", "address", "objects", "bytes", "sites"),
    UnchargedSite: ("site", "objects"),
    Coverage: ("read", "unreadable", "examples"),
    Unreadable: ("what", "address", "reason"),
    Report: (
        "image", "verdict", "looks", "interrupted", "follows", "memcgs", "identities",
        "nonzero_rows", "skew", "slab_usage", "percpu_usage", "uncharged", "charges",
        "not_accounted", "findings", "diagnoses", "unexplained", "half_done", "not_covered",
        "notes", "coverage", "timings",
    ),
}  # fmt: skip

#: Names in the document that differ from the name of the attribute.
_NAMES = {
    "follows": "counters_follow",
    "nonzero_rows": "rows",
    "slab_usage": "slabs",
    "percpu_usage": "percpu",
}

#: Records whose fields are left out if they are ``None``.
SPARSE = frozenset({Evidence})


#: Records that name memcgs: the attribute with addresses, and the field for their paths.
PATHS: Mapping[type, tuple[str, str]] = {
    Finding: ("memcg", "memcg_path"),
    Evidence: ("memcg", "memcg_path"),
    Diagnosis: ("memcgs", "memcg_paths"),
}


def to_json(document: Mapping[str, Any]) -> str:
    """Return a document as text in ASCII."""
    # dumps() keeps each word of the text as an object of its own until the end.
    text = io.StringIO()
    for part in json.JSONEncoder(indent=1).iterencode(document):
        text.write(part)
    text.write("\n")
    return text.getvalue()


def report_document(report: Report, show_all: bool = False) -> dict[str, Any]:
    """
    Return the document of ``audit``.

    :param show_all: whether to include rows that are exact and all zero
    """
    paths = {memcg.address: memcg.path for memcg in report.memcgs}
    document = {"schema": SCHEMA, **_plain(report, Report, paths)}
    if show_all:
        document["rows"] = _plain(report.rows, tuple[Row, ...])
    return document


def record_document(command: str, record: Any) -> dict[str, Any]:
    """Return the document of one record that is a document of its own."""
    return {"schema": SCHEMA, "command": command, **_plain(record, type(record))}


def answer_document(answer: Answer) -> dict[str, Any]:
    """Return the document of a view, or of one table of ``audit``."""
    return {
        "schema": SCHEMA,
        "command": answer.command,
        "image": _plain(answer.image, ImageInfo),
        "interrupted": answer.interrupted,
        "whole": answer.is_whole,
        "chosen": {
            "memcgs": list(answer.chosen.memcgs),
            "nodes": list(answer.chosen.nodes),
            "subtree": answer.chosen.subtree,
        },
        "tables": [_table(table) for table in answer.tables],
        "notes": list(answer.notes),
        "coverage": {name: _plain(c, Coverage) for name, c in answer.coverage.items()},
    }


def is_record(hint: Any) -> bool:
    """Return whether a type is a record that is an object in a document."""
    return hint in _FIELDS


@cache
def members(record: type) -> tuple[tuple[str, str, Any], ...]:
    """Return name, attribute and type hint of each field of a record in the document."""
    hints = get_type_hints(record, include_extras=True)
    members = []
    for attribute in _FIELDS[record]:
        if attribute in hints:
            hint = hints[attribute]
        else:
            getter = vars(record)[attribute].fget
            hint = get_type_hints(getter, include_extras=True)["return"]
        members.append((_NAMES.get(attribute, attribute), attribute, hint))
    return tuple(members)


def without_none(hint: Any) -> tuple[Any, bool]:
    """Return a type hint without ``None``, and whether it had one."""
    if get_origin(hint) not in (Union, UnionType):
        return hint, False
    rest = [part for part in get_args(hint) if part is not NoneType]
    if len(rest) != 1:
        raise TypeError(f"{hint} is not the type of a field in JSON")
    return rest[0], True


def _plain(value: Any, hint: Any, paths: Mapping[int, str] | None = None) -> Any:
    """
    Return a value as lists, dicts, strings and numbers.

    :param paths: paths of memcgs, by address
    """
    return _maker(hint)(value, paths or {})


@cache
def _maker(hint: Any) -> _Maker:
    """
    Return the function that does what :func:`_plain` says for values of a type.

    A report has thousands of rows: their types are looked at once.
    """
    hint, _ = without_none(hint)
    if get_origin(hint) is Annotated:
        return _address if "address" in get_args(hint) else _node
    if is_record(hint):
        fields = [(name, attribute, _maker(inner)) for name, attribute, inner in members(hint)]
        return partial(_record, hint, fields)
    if get_origin(hint) in (tuple, list):
        return partial(_list, _maker(get_args(hint)[0]))
    if get_origin(hint) is Mapping:
        return partial(_mapping, _maker(get_args(hint)[1]))
    return _rounded if hint is float else _same


def _address(value: int | None, paths: Mapping[int, str]) -> str | None:
    return None if value is None else f"{value:#x}"


def _node(value: int | None, paths: Mapping[int, str]) -> int | None:
    return None if value == NUMA_NO_NODE else value


def _rounded(value: float, paths: Mapping[int, str]) -> float:
    return round(value, 6)


def _same(value: Any, paths: Mapping[int, str]) -> Any:
    return value


def _list(each: _Maker, value: Any, paths: Mapping[int, str]) -> list[Any] | None:
    return None if value is None else [each(item, paths) for item in value]


def _mapping(each: _Maker, value: Any, paths: Mapping[int, str]) -> dict[str, Any] | None:
    if value is None:
        return None
    return {name: each(item, paths) for name, item in value.items()}


def _record(
    record: type, fields: list[tuple[str, str, _Maker]], value: Any, paths: Mapping[int, str]
) -> dict[str, Any] | None:
    if value is None:
        return None
    named, path_field = PATHS.get(record, (None, ""))
    document = {}
    for name, attribute, make in fields:
        found = getattr(value, attribute)
        if found is None and record in SPARSE:
            continue
        document[name] = make(found, paths)
        if attribute == named:
            document[path_field] = _path(found, paths)
    return document


def _path(memcg: Any, paths: Mapping[int, str]) -> Any:
    """Return the path of a memcg, or of each of several; ``None`` if there is none there."""
    if isinstance(memcg, tuple):
        return [paths.get(address) for address in memcg]
    return paths.get(memcg)


def _table(table: Table) -> dict[str, Any]:
    return {
        "name": table.name,
        "contents": table.contents,
        "columns": [{"name": c.name, "kind": c.type, "help": c.help} for c in table.columns],
        "rows": [_row(table, row) for row in table.rows],
        "totals": _totals(table),
    }


def _totals(table: Table) -> dict[str, Any] | None:
    if table.totals is None:
        return None
    return {
        name: None if isinstance(value, NotRead) else value for name, value in table.totals.items()
    }


def _row(table: Table, row: object) -> dict[str, Any]:
    document: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for column in table.columns:
        value = column.value(row)
        document[column.name] = _value(column, value)
        if isinstance(value, NotRead):
            reasons[column.name] = value.reason
    if reasons:
        document["not_read"] = reasons
    return document


def _value(column: Column, value: Value) -> Any:
    if value is None or isinstance(value, NotRead):
        return None
    if column.type == "node" and value == NUMA_NO_NODE:
        return None
    if column.type == "address" and isinstance(value, int):
        return f"{value:#x}"
    return bool(value) if column.type == "flag" else value
