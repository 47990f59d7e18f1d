# SPDX-License-Identifier: LGPL-2.1-or-later
"""docs/json.md names every field that the document has, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from support.reports import more, report

from memcg_inspect.render.json_report import report_document
from memcg_inspect.render.tables import answer_to_json
from memcg_inspect.tables import Answer, Column, Kind, Table

TEXT = (Path(__file__).resolve().parents[2] / "docs/json.md").read_text()
DOCUMENT = report_document(report())
ANSWER = json.loads(
    answer_to_json(
        Answer("test", report().image, (Table("a", "a", (Column("x", "text", "x"),), ((1,),)),))
    )
)
NO_NODE = report_document(more())["findings"][0]["evidence"][0]


def described(title: str) -> set[str]:
    """The fields in the first table below a heading."""
    section = TEXT.split(f"\n### {title}\n")[1].split("| --- | --- | --- |\n")[1].split("\n\n")[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


@pytest.mark.parametrize(
    ("title", "example"),
    [
        ("Top", DOCUMENT),
        ("`image`", DOCUMENT["image"]),
        ("`memcgs[]`", DOCUMENT["memcgs"][0]),
        ("`identities[]`", DOCUMENT["identities"][0]),
        ("`rows[]`", DOCUMENT["rows"][0]),
        ("`skew[]`", DOCUMENT["skew"][0]),
        ("`slabs[]`", DOCUMENT["slabs"][0]),
        ("`percpu[]`", DOCUMENT["percpu"][0]),
        ("`findings[]`", DOCUMENT["findings"][0]),
        ("`findings[].evidence[]`", DOCUMENT["findings"][0]["evidence"][0] | NO_NODE),
        ("`coverage`", DOCUMENT["coverage"]["slab"]),
        ("Answer", ANSWER),
        ("`tables[]`", ANSWER["tables"][0]),
        ("`tables[].columns[]`", ANSWER["tables"][0]["columns"][0]),
    ],
)
def test_fields_are_described(title: str, example: dict[str, Any]) -> None:
    assert described(title) == set(example)


def test_kinds_of_columns_are_described() -> None:
    row = TEXT.split("### `tables[].columns[]`")[1].split("| `kind` | string |")[1].split("\n")[0]
    assert set(re.findall(r"`(\w+)`", row)) == set(get_args(Kind))


def test_schema_number_is_named() -> None:
    assert f"| `schema` | integer | {DOCUMENT['schema']} |" in TEXT
