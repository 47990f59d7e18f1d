# SPDX-License-Identifier: LGPL-2.1-or-later
"""docs/json.md names the fields that documents have, and no others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from memcg_inspect.render.schema import answer_schema, report_schema
from memcg_inspect.report_tables import RowRow
from memcg_inspect.tables import ColumnType

TEXT = (Path(__file__).resolve().parents[2] / "docs/json.md").read_text()
AUDIT = report_schema()["properties"]
ANSWER = answer_schema("test", (RowRow,))["properties"]
TABLE = ANSWER["tables"]["items"]["anyOf"][0]["properties"]


def described(title: str) -> set[str]:
    """Return the fields in the first table below a heading."""
    section = TEXT.split(f"\n### {title}\n")[1].split("| --- | --- | --- |\n")[1].split("\n\n")[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


def item(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the objects of an array."""
    fields: dict[str, Any] = schema["items"]["properties"]
    return fields


@pytest.mark.parametrize(
    ("title", "fields"),
    [
        ("Top", AUDIT),
        ("`image`", AUDIT["image"]["properties"]),
        *(
            (f"`{name}[]`", item(AUDIT[name]))
            for name in (
                "memcgs",
                "identities",
                "rows",
                "skew",
                "slabs",
                "percpu",
                "findings",
                "diagnoses",
                "not_covered",
            )
        ),
        ("`findings[].evidence[]`", item(item(AUDIT["findings"])["evidence"])),
        ("`diagnoses[].signature[]`", item(item(AUDIT["diagnoses"])["signature"])),
        ("`coverage`", AUDIT["coverage"]["additionalProperties"]["properties"]),
        ("Answer", ANSWER),
        ("`tables[]`", TABLE),
        ("`tables[].columns[]`", item(TABLE["columns"])),
    ],
)
def test_fields_are_described(title: str, fields: dict[str, Any]) -> None:
    assert described(title) == set(fields)


def test_kinds_of_columns_are_described() -> None:
    row = TEXT.split("### `tables[].columns[]`")[1].split("| `kind` | string |")[1].split("\n")[0]
    assert set(re.findall(r"`(\w+)`", row)) == set(get_args(ColumnType))


def test_schema_number_is_named() -> None:
    assert f"| `schema` | integer | {AUDIT['schema']['const']} |" in TEXT
