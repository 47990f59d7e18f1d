# SPDX-License-Identifier: LGPL-2.1-or-later
"""
JSON Schema
-----------

The schemas (draft 2020-12) of the documents of :mod:`memcg_inspect.render.documents`, made from
the same records and columns. They allow unknown fields, since a later version may add fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args, get_origin

from memcg_inspect.growth import growth_column
from memcg_inspect.model import Coverage, ImageInfo
from memcg_inspect.model_fleet import DumpResult
from memcg_inspect.render.documents import PATHS, SPARSE, is_record, members, without_none
from memcg_inspect.report import Report
from memcg_inspect.tables import SCHEMA, Column, ColumnType, columns_of

__all__ = ("answer_schema", "fleet_schema", "report_schema")

_FLEET = "a line of memcg-inspect fleet"
_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema of the document of ``audit``."""
    schema = _record_schema(Report)
    return _top("audit", schema["properties"])


def fleet_schema() -> dict[str, Any]:
    """Return the JSON Schema of each line of ``fleet``."""
    properties = {"command": {"const": "fleet"}, **_record_schema(DumpResult)["properties"]}
    return {**_top("fleet", properties), "title": _FLEET}


def answer_schema(command: str, records: Sequence[type], of_image: bool = True) -> dict[str, Any]:
    """
    Return the JSON Schema of the document of a view.

    :param records: classes of the rows of its tables
    :param of_image: whether it answers for one image
    """
    return _top(
        command,
        {
            "command": {"const": command},
            "image": _schema(ImageInfo) if of_image else {"type": "null"},
            "interrupted": {"type": "boolean"},
            "whole": {"type": "boolean"},
            "chosen": _CHOSEN,
            "tables": {
                "type": "array",
                "items": {"anyOf": [_table_schema(record) for record in records]},
            },
            "notes": _schema(tuple[str, ...]),
            "coverage": _schema(Mapping[str, Coverage]),
        },
    )


#: The options --memcg, --node and --subtree.
_CHOSEN = {
    "type": "object",
    "properties": {
        "memcgs": {"type": "array", "items": {"type": "string"}},
        "nodes": {"type": "array", "items": {"type": "integer"}},
        "subtree": {"type": "boolean"},
    },
    "required": ["memcgs", "nodes", "subtree"],
}


def _top(command: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    properties = {"schema": {"const": SCHEMA}, **properties}
    return {
        "$schema": _DRAFT,
        "title": f"memcg-inspect {command} --json",
        "type": "object",
        "properties": properties,
        "required": list(properties),
    }


_PLAIN_TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_ADDRESS = {"type": "string", "pattern": "^0x[0-9a-f]+$"}


def _schema(hint: Any) -> dict[str, Any]:
    """Return the JSON Schema of values of a type."""
    hint, is_optional = without_none(hint)
    schema = _schema_of(hint)
    if is_optional or (get_origin(hint) is Annotated and "nid" in get_args(hint)):
        return {"anyOf": [schema, {"type": "null"}]}
    return schema


def _schema_of(hint: Any) -> dict[str, Any]:
    if get_origin(hint) is Annotated:
        return _ADDRESS if "address" in get_args(hint) else {"type": "integer"}
    if is_record(hint):
        return _record_schema(hint)
    if get_origin(hint) in (tuple, list):
        return {"type": "array", "items": _schema(get_args(hint)[0])}
    if get_origin(hint) is Mapping:
        return {"type": "object", "additionalProperties": _schema(get_args(hint)[1])}
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    return {"type": _PLAIN_TYPES[hint]}


def _record_schema(record: type) -> dict[str, Any]:
    properties, required = {}, []
    for name, attribute, hint in members(record):
        rest, is_optional = without_none(hint)
        is_left_out = is_optional and record in SPARSE
        properties[name] = _schema(rest if is_left_out else hint)
        if not is_left_out:
            required.append(name)
        if record in PATHS and attribute == PATHS[record][0]:
            path = {"type": ["string", "null"]}
            is_one = PATHS[record][1] == "memcg_path"
            properties[PATHS[record][1]] = path if is_one else {"type": "array", "items": path}
    return {"type": "object", "properties": properties, "required": required}


_COLUMN_SCHEMAS: dict[ColumnType, dict[str, Any]] = {
    "text": {"type": ["string", "null"]},
    "memcg": {"type": ["string", "null"]},
    "node": {"type": ["integer", "null"]},
    "address": {"type": ["string", "null"], "pattern": "^0x[0-9a-f]+$"},
    "number": {"type": ["integer", "null"]},
    "bytes": {"type": ["integer", "null"]},
    "pages": {"type": ["integer", "null"]},
    "KiB": {"type": ["integer", "null"]},
    "count": {"type": ["integer", "null"]},
    "difference": {"type": ["integer", "null"]},
    "share": {"type": ["number", "null"]},
    "flag": {"type": ["boolean", "null"]},
}


def _column_schema(column: Column) -> dict[str, Any]:
    return {**_COLUMN_SCHEMAS[column.type], "description": column.help}


def _by_name(columns: Sequence[Column], schema: Callable[[Column], Any]) -> dict[str, Any]:
    """Return the properties of an object with a value for each column."""
    named = {c.name: schema(c) for c in columns if c.key is None}
    # There is a column for each node of the machine.
    each = {f"^{c.name.replace('N', '[0-9]+')}$": schema(c) for c in columns if c.key is not None}
    return {"properties": named, **({"patternProperties": each} if each else {})}


def _table_schema(record: type) -> dict[str, Any]:
    columns = [*columns_of(record, keys=("N",))]
    # With --since.
    columns += [replace(growth_column(c), key=c.key) for c in columns if c.total]
    text = {"type": "string"}
    named = [c for c in columns if c.key is None]
    names = {"enum": [c.name for c in named]}
    each = [
        {"type": "string", "pattern": f"^{c.name.replace('N', '[0-9]+')}$"}
        for c in columns
        if c.key is not None
    ]
    column = {
        "type": "object",
        "properties": {
            "name": {"anyOf": [names, *each]},
            "kind": {"enum": sorted({c.type for c in columns})},
            "help": text,
        },
        "required": ["name", "kind", "help"],
    }
    reasons = {"type": "object", **_by_name(columns, lambda column: text)}
    row = {"type": "object", **_by_name(columns, _column_schema)}
    row["properties"]["not_read"] = reasons
    summed = [column for column in columns if column.total]
    totals = {"type": ["object", "null"], **_by_name(summed, _column_schema)}
    properties = {
        "name": text,
        "contents": {"type": ["string", "null"]},
        "columns": {"type": "array", "items": column},
        "rows": {"type": "array", "items": row},
        "totals": totals,
    }
    return {
        "title": (record.__doc__ or "").strip().splitlines()[0],
        "type": "object",
        "properties": properties,
        "required": list(properties),
    }
