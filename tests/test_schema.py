# SPDX-License-Identifier: LGPL-2.1-or-later
"""The JSON Schemas that ``memcg-inspect schema`` prints, and the documents of all commands."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from support.allocinfo import GUESTS, guest_image
from support.guests import KERNELS, Lab
from support.reports import clean, diagnosed, more, report
from support.schemas import checked, errors, validator

from memcg_inspect.answers import schema
from memcg_inspect.cli import main
from memcg_inspect.names import COMMANDS
from memcg_inspect.render.documents import report_document
from memcg_inspect.report_tables import TABLES
from memcg_inspect.tables import columns_of
from memcg_inspect.views import tables, views

#: Every command, and the ways in which it makes tables of different columns.
ASKED = (
    ("audit",),
    ("overview",),
    ("overview", "--node", "1"),
    ("pages",),
    ("pages", "--by", "memcg,node,kind,order,cache,caller,lru"),
    ("slabinfo",),
    ("slabinfo", "--by-node"),
    ("slabinfo", "--fields", "memcg,bytes"),
    ("percpu",),
    ("slabinfo", "--by", "cache"),
    ("percpu", "--each"),
    ("percpu", "--by", "memcg,node"),
    ("stat", "/files"),
    ("stock",),
    ("tasks",),
    ("dying",),
    ("rss",),
    ("rss", "--check"),
    ("drift", "--all"),
    ("usage", "/files/web"),
    ("who", "0x10", "{memcg}"),
)


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    """Run a command in this process; return the document that it prints."""
    assert main(args) in (0, 1, 3)
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    return made


@pytest.mark.parametrize("command", COMMANDS)
def test_schema_is_printed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = printed(capsys, "schema", command)
    assert made == schema(command)
    assert made["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert validator(command)  # which checks the schema itself


def test_schema_of_the_audit_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "schema") == schema("audit")
    assert main(["schema", "nothing"]) == 2


def test_reports_are_as_the_schema_says() -> None:
    for made in (report(), diagnosed(), more(), clean()):
        document = json.loads(json.dumps(report_document(made)))
        assert document["memcgs"]
        assert errors(document) == {}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("verdict",), "fine"),
        (("verdict",), None),
        (("memcgs", 0, "address"), 16),
        (("memcgs", 0, "address"), "10"),
        (("memcgs", 0, "new"), 1),
        (("rows", 0, "status"), "wrong"),
        (("rows", 0, "found", "slab"), 0.5),
        (("rows", 0, "nid"), "0"),
        (("findings", 0, "evidence", 0, "page"), None),
        (("coverage", "slab", "read"), None),
    ],
)
def test_other_documents_are_refused(path: tuple[str | int, ...], value: object) -> None:
    made = json.loads(json.dumps(report_document(report())))
    inner = made
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    # A field that is not known is refused where it is.
    assert list(errors(made)) == ["$" + where.removesuffix(".new")]


def test_readers_may_meet_new_fields() -> None:
    """Within a schema number fields may be added: the schema for readers allows that."""
    from jsonschema import Draft202012Validator

    made = json.loads(json.dumps(report_document(report())))
    made["new"] = made["memcgs"][0]["new"] = 1
    assert list(Draft202012Validator(schema("audit")).iter_errors(made)) == []
    assert errors(made).keys() == {"$", "$.memcgs[0]"}


def test_rows_are_records_with_a_column_for_each_field() -> None:
    records = [record for record, _ in TABLES.values()]
    records += [record for view in views() for record in view.records]
    assert len(records) > 15
    for record in records:
        names = {column.field or column.name for column in columns_of(record, keys=("N",))}
        assert names == {field.name for field in fields(record)}, record


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "audit"])
def test_columns_say_what_they_mean(command: str) -> None:
    for columns in tables(command):
        assert len({column.name for column in columns}) == len(columns)
        for column in columns:
            assert column.help[0].islower() or column.help.split()[0].isupper(), column
            assert not column.help.endswith("."), column


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_documents_of_every_command(
    lab: Lab, kernel: str, capsys: pytest.CaptureFixture[str]
) -> None:
    core = str(lab.image(kernel, "4", "mixed").core)
    options = ("--json", "-c", core, "--debuginfo", "btf")
    memcg = "0x0"
    for words in ASKED:
        words = tuple(word.format(memcg=memcg) for word in words)
        made = checked(printed(capsys, *words, *options))
        if words == ("audit",):
            memcg = made["memcgs"][1]["address"]
        else:
            assert any(table["rows"] for table in made["tables"]), words


@pytest.mark.image
@pytest.mark.parametrize(("kernel", "append"), GUESTS[:1])
def test_documents_of_allocation_profiling(
    lab: Lab, capsys: pytest.CaptureFixture[str], kernel: str, append: str
) -> None:
    image = guest_image(lab, kernel, append)
    options = ("--json", "-c", str(image.core), "--debuginfo", "btf")
    for words in ([], ["--by", "memcg,node,kind,site"], ["--by", "kind"], ["--overhead"]):
        made = checked(printed(capsys, "allocinfo", *words, *options))
        assert made["tables"][0]["rows"], words
