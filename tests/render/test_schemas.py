# SPDX-License-Identifier: LGPL-2.1-or-later
"""Schemas of documents, and documents that they must refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from jsonschema import Draft202012Validator
from support.reports import report

from memcg_inspect.model import Coverage
from memcg_inspect.model_fleet import DumpCause, DumpResult
from memcg_inspect.render.documents import answer_document, record_document, report_document
from memcg_inspect.render.schema import answer_schema, fleet_schema, report_schema
from memcg_inspect.tables import Answer, Choice, Field, NotRead, Table, Value, columns_of


@dataclass(frozen=True)
class Made:
    """
    A row with a column of each type.

    More about it.
    """

    text: Annotated[str, Field("text", "a text")]
    memcg: Annotated[str, Field("memcg", "a path")]
    node: Annotated[int, Field("node", "a node")]
    address: Annotated[int, Field("address", "an address")]
    number: Annotated[int, Field("number", "a number")]
    bytes: Annotated[Value, Field("bytes", "an amount", total=True)]
    pages: Annotated[int, Field("pages", "an amount")]
    kib: Annotated[int, Field("KiB", "an amount")]
    count: Annotated[int, Field("count", "a count")]
    difference: Annotated[int, Field("difference", "a difference")]
    share: Annotated[float, Field("share", "a part")]
    flag: Annotated[bool, Field("flag", "whether")]
    nodes: Annotated[Mapping[int, int], Field("pages", "pages on node {}", each="node{}")]


def answer() -> dict[str, Any]:
    """Return the document of a view with one row."""
    row = Made("x", "/a", 1, 0xABC, 5, 4096, 1, 4, 2, -3, 0.5, True, {0: 7, 12: 8})
    unread = Made("x", "/a", -1, 0, 5, NotRead("gone"), 1, 4, 2, -3, 0.5, False, {0: 7, 12: 8})
    columns = columns_of(Made, keys=(0, 12))
    table = Table("made", "Made", columns, [row, unread], totals={"bytes": 4096}, contents="all")
    made = Answer(
        "test",
        report().image,
        (table,),
        notes=("a note",),
        coverage={"slab": Coverage(3)},
        chosen=Choice(memcgs=("/a",), nodes=(1,), subtree=True),
    )
    document: dict[str, Any] = json.loads(json.dumps(answer_document(made)))
    return document


SCHEMA = answer_schema("test", (Made,))


def refused(document: Any, schema: Any = SCHEMA) -> bool:
    return any(Draft202012Validator(schema).iter_errors(document))


def test_a_document_with_columns_of_all_types_is_accepted() -> None:
    assert not refused(answer())
    null = answer()
    for name in null["tables"][0]["rows"][0]:
        null["tables"][0]["rows"][0][name] = None
    null["tables"][0]["totals"] = null["tables"][0]["contents"] = None
    assert not refused(null)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("text", [1, True, []]),
        ("memcg", [1, {}]),
        ("node", ["1", 0.5]),
        ("address", [16, "abc", "0xABC", "x0x1", "0x1 "]),
        *((name, ["1", 0.5, True]) for name in ("number", "bytes", "pages", "kib", "count")),
        ("difference", ["1", 0.5]),
        ("share", ["1", True]),
        ("flag", [1, "yes"]),
        ("node0", ["1", 0.5]),
        ("node12", ["1", 0.5]),
    ],
)
def test_a_value_of_another_type_is_refused(column: str, values: list[Any]) -> None:
    assert column in answer()["tables"][0]["rows"][0]
    for value in values:
        made = answer()
        made["tables"][0]["rows"][0][column] = value
        assert refused(made), value


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("schema", [2, "1", None]),
        ("command", ["audit", None]),
        ("interrupted", ["no", None]),
        ("whole", [1]),
        ("image.release", [7, None]),
        ("image.nodes", [0, ["0"], {}]),
        ("image.cpus", ["2"]),
        ("image.accounting", ["by-page"]),
        ("chosen", [None, []]),
        ("chosen.memcgs", ["/a", [1]]),
        ("chosen.nodes", [1, ["1"]]),
        ("chosen.subtree", ["yes", None]),
        ("notes", ["a note", [1]]),
        ("coverage", [[]]),
        ("coverage.slab", [3, None]),
        ("coverage.slab.read", ["3", None]),
        ("tables", [{}, [1], [None]]),
        ("tables.0.name", [1, None]),
        ("tables.0.contents", [1]),
        ("tables.0.totals", [[]]),
        ("tables.0.totals.bytes", ["1"]),
        ("tables.0.totals.bytes_growth", ["1"]),
        ("tables.0.columns", [{}, [1]]),
        ("tables.0.columns.0.name", ["other", "node", 5, "xnode1", "node1x"]),
        ("tables.0.columns.0.kind", ["word", None]),
        ("tables.0.columns.0.help", [1]),
        ("tables.0.rows", [{}, [1]]),
        ("tables.0.rows.1.not_read", [[], "gone"]),
        ("tables.0.rows.1.not_read.bytes", [1, None]),
        ("tables.0.rows.1.not_read.node12", [1, None]),
    ],
)
def test_other_values_are_refused(path: str, values: list[Any]) -> None:
    for value in values:
        made = answer()
        *steps, last = (int(step) if step.isdigit() else step for step in path.split("."))
        inner: Any = made
        for step in steps:
            inner = inner[step]
        if value == "node" and "name" in path:
            continue  # the name of a column
        inner[last] = value
        assert refused(made), value


def test_growth_is_a_difference() -> None:
    made = answer()
    row = made["tables"][0]["rows"][0]
    row["bytes_growth"] = -8
    made["tables"][0]["columns"].append({"name": "bytes_growth", "kind": "difference", "help": ""})
    assert not refused(made)
    row["bytes_growth"] = "8"
    assert refused(made)
    row.pop("bytes_growth")
    made["tables"][0]["columns"][-1]["name"] = "count_growth"
    assert refused(made)


def objects(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the objects of a document with their paths."""
    if isinstance(value, dict):
        yield path, value
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for step, inner in parts:
        if isinstance(inner, dict | list):
            yield from objects(inner, (*path, step))


#: Objects whose fields are not always the same.
OPEN = {"rows", "totals", "not_read", "evidence", "found", "claimed", "timings", "coverage"}


def test_no_field_may_be_missing() -> None:
    """A reader may rely on each field of each object, apart from those that depend on the data."""
    removed = 0
    for whole, schema in ((answer(), SCHEMA), (report_document(report()), report_schema())):
        whole = json.loads(json.dumps(whole))
        for path, inner in objects(whole):
            names = [step for step in path if isinstance(step, str)]
            in_open = names and names[-1] in OPEN and not (names == ["rows"] and schema != SCHEMA)
            for name in () if in_open else inner:
                made = deepcopy(whole)
                target: Any = made
                for step in path:
                    target = target[step]
                del target[name]
                if name not in ("memcg_path", "memcg_paths", "debug_info"):
                    assert refused(made, schema), (path, name)
                removed += 1
    assert removed > 100


#: Keywords of JSON Schema draft 2020-12 that the schemas have.
KEYWORDS = {
    *("$schema", "title", "description", "type", "const", "enum", "anyOf", "pattern"),
    *("properties", "patternProperties", "additionalProperties", "required", "items"),
}


def schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas inside."""
    yield schema
    for keyword in ("properties", "patternProperties"):
        for inner in schema.get(keyword, {}).values():
            yield from schemas(inner)
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            yield from schemas(schema[keyword])
    for inner in schema.get("anyOf", ()):
        yield from schemas(inner)


def test_schemas_say_something_about_every_value() -> None:
    """A keyword that nobody knows is ignored by all validators, and so allows everything."""
    for top in (SCHEMA, report_schema()):
        some = list(schemas(top))
        assert len(some) > 60
        for schema in some:
            assert set(schema) <= KEYWORDS
            assert {"type", "const", "enum", "anyOf"} & set(schema)
            assert ("items" in schema) == (schema.get("type") == "array")


def test_titles_and_descriptions() -> None:
    assert (SCHEMA["title"], report_schema()["title"]) == (
        "memcg-inspect test --json",
        "memcg-inspect audit --json",
    )
    [table] = SCHEMA["properties"]["tables"]["items"]["anyOf"]
    assert table["title"] == "A row with a column of each type."
    row = table["properties"]["rows"]["items"]
    assert row["properties"]["flag"]["description"] == "whether"
    assert list(row["patternProperties"]) == ["^node[0-9]+$"]
    assert row["patternProperties"]["^node[0-9]+$"]["description"] == "pages on node N"
    names = table["properties"]["columns"]["items"]["properties"]["name"]["anyOf"][0]["enum"]
    assert (names[:3], names[-1]) == (["text", "memcg", "node"], "bytes_growth")


def test_what_may_be_null_in_a_report() -> None:
    fields = report_schema()["properties"]
    skew, memcg = (fields[name]["items"]["properties"] for name in ("skew", "memcgs"))
    address = {"type": "string", "pattern": "^0x[0-9a-f]+$"}
    # The root has no parent, and memory may have no node.
    assert memcg["parent"] == {"anyOf": [address, {"type": "null"}]}
    assert memcg["address"] == skew["memcg"] == address
    for name in ("charged_nid", "backing_nid"):
        assert skew[name] == {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    assert skew["bytes"] == {"type": "integer"}
    evidence = fields["findings"]["items"]["properties"]["evidence"]["items"]
    # What is not known of an object is left out.
    assert evidence["properties"]["cache"] == {"type": "string"}
    assert "cache" not in evidence["required"]
    assert "address" in evidence["required"]
    finding, diagnosis = (fields[name]["items"]["properties"] for name in ("findings", "diagnoses"))
    path = {"type": ["string", "null"]}
    assert finding["memcg_path"] == evidence["properties"]["memcg_path"] == path
    assert diagnosis["memcg_paths"] == {"type": "array", "items": path}


def test_columns_by_node_have_no_other_names() -> None:
    """A column for each node is ``N0``, ``N1`` and so on: no table has one for ``NN``."""
    for top in (SCHEMA, report_schema()):
        for inner in schemas(top):
            column = inner.get("properties", {}).get("columns", {}).get("items", {})
            names = column.get("properties", {}).get("name", {}).get("anyOf", [])
            if len(names) > 1:
                patterns = [name["pattern"] for name in names[1:]]
                wrong = [p.strip("^$").replace("[0-9]+", "N") for p in patterns]
                assert not set(wrong) & set(names[0]["enum"])


def test_only_columns_that_are_summed_up_have_totals() -> None:
    """What growth adds to a sum is a sum, too."""
    [table] = SCHEMA["properties"]["tables"]["items"]["anyOf"]
    assert list(table["properties"]["totals"]["properties"]) == ["bytes", "bytes_growth"]
    assert "patternProperties" not in table["properties"]["totals"]


def test_schemas_say_what_they_are_about() -> None:
    assert fleet_schema()["title"] == "a line of memcg-inspect fleet"
    assert report_schema()["title"] == "memcg-inspect audit --json"
    assert SCHEMA["title"] == "memcg-inspect test --json"
    [table] = SCHEMA["properties"]["tables"]["items"]["anyOf"]
    assert table["title"] == "A row with a column of each type."
    assert answer_schema("test", (Made,), of_image=False)["properties"]["image"] == {"type": "null"}


def test_lines_of_fleet() -> None:
    """Each field is in each line, and a line of another command is none of fleet."""
    cause = DumpCause("counter", "it is too high", "likely", ("/web",), 1, 64, "bytes", 2)
    result = DumpResult("/var/crash/1", 5, None, 1, "findings", None, causes=(cause,), seconds=0.5)
    line = json.loads(json.dumps(record_document("fleet", result)))
    assert not refused(line, fleet_schema())
    assert not refused({**line, "new": 1}, fleet_schema())
    for name in line:
        assert refused({n: value for n, value in line.items() if n != name}, fleet_schema()), name
    for name, value in (("schema", 2), ("command", "audit"), ("status", "1"), ("causes", [1])):
        assert refused({**line, name: value}, fleet_schema()), name
