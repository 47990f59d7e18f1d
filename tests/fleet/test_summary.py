# SPDX-License-Identifier: LGPL-2.1-or-later
"""Sums over the results of many dumps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.schemas import errors

from memcg_inspect.cli import main
from memcg_inspect.fleet.results import line_of
from memcg_inspect.fleet.summary import summary
from memcg_inspect.model_fleet import DumpCause, DumpResult
from memcg_inspect.tables import Answer


def cause(name: str, memcg: str, findings: int, node: int | None = None) -> DumpCause:
    return DumpCause(name, "what", "proved", (memcg,), node, 4096, "bytes", findings)


def result(dump: str, host: str, release: str = "7.3", **values: object) -> DumpResult:
    causes = values.pop("causes", ())
    verdict = values.pop("verdict", "findings" if causes else "exact")
    status = {"exact": 0, "findings": 1, "incomplete": 3, None: 2}[verdict]  # type: ignore[index]
    return DumpResult(
        dump, 1, 2, status, verdict, None, host, release, causes=causes, **values  # type: ignore[arg-type]
    )  # fmt: skip


RESULTS = [
    result("/1", "a", causes=(cause("object-owner", "/x", 3, 0), cause("stuck", "/y", 1))),
    result("/2", "b", causes=(cause("object-owner", "/x", 2, 1),), unexplained=1),
    result("/3", "b"),
    result("/4", "a", "6.1", verdict="incomplete"),
    DumpResult("/5", None, None, 2, None, "/5: No such file"),
    result("/3", "c", causes=(cause("stuck", "/z", 1),)),  # on another machine
]


def rows(answer: Answer, name: str) -> list[dict[str, object]]:
    [table] = [table for table in answer.tables if table.name == name]
    return [table.values(row) for row in table.rows]


def test_kernels() -> None:
    found = {row.pop("release"): row for row in rows(summary(RESULTS), "kernels")}
    names = ("hosts", "dumps", "exact", "findings", "incomplete", "unread")
    assert {release: tuple(row[name] for name in names) for release, row in found.items()} == {
        "7.3": (3, 4, 1, 3, 0, 0),
        "6.1": (1, 1, 0, 0, 1, 0),
        "(not known)": (0, 1, 0, 0, 0, 1),
    }


def test_causes() -> None:
    found = rows(summary(RESULTS), "causes")
    assert [tuple(row.values()) for row in found] == [
        ("7.3", "a", "object-owner", 1, 1, 3, "/1"),
        ("7.3", "b", "object-owner", 1, 1, 2, "/2"),
        ("7.3", "a", "stuck", 1, 1, 1, "/1"),
        ("7.3", "b", "(unexplained)", 1, 1, 1, "/2"),
        ("7.3", "c", "stuck", 1, 1, 1, "/3"),
    ]
    found = rows(summary(RESULTS, ["cause"]), "causes")
    assert [tuple(row.values()) for row in found] == [
        ("object-owner", 2, 2, 5, "/1"),
        ("stuck", 2, 2, 2, "/1"),
        ("(unexplained)", 1, 1, 1, "/2"),
    ]
    found = rows(summary(RESULTS, ["memcg", "node"]), "causes")
    assert [tuple(row.values())[:2] for row in found] == [
        ("/x", 0),
        ("/x", 1),
        ("/y", None),
        (None, None),
        ("/z", None),
    ]


def test_the_last_line_of_a_dump_in_a_file_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same path in two files is on two machines. A file that is named twice counts once."""
    again = result("/1", "a")
    names = [str(tmp_path / name) for name in "ab"]
    Path(names[0]).write_text(line_of(RESULTS[0]) + line_of(again))
    Path(names[1]).write_text(line_of(RESULTS[0]))
    assert main(["summary", *names, names[0], "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["tables"][0]["rows"]
    assert [(row["dumps"], row["exact"], row["findings"]) for row in kernels] == [(2, 1, 1)]


def test_a_text_that_has_no_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "text"
    file.write_text("precious")
    assert main(["summary", str(file)]) == 2
    assert "line 1 is none of memcg-inspect fleet" in capsys.readouterr().err


def test_dumps_that_could_not_be_read() -> None:
    answer = summary(RESULTS)
    assert rows(answer, "not_read") == [{"dump": "/5", "error": "/5: No such file"}]
    assert not answer.is_whole
    assert summary(RESULTS[:3]).is_whole


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(tmp_path / name) for name in "ab"]
    for name, some in zip(names, (RESULTS[:3], RESULTS[3:]), strict=True):
        Path(name).write_text("".join(map(line_of, some)) + '{"schema": 1, "comm')
    assert main(["summary", *names, "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert errors(document) == {}
    assert document["image"] is None
    assert main(["summary", *names, "--csv", "--fields", "cause,first", "--by", "cause"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["cause,first", "object-owner,/1", "stuck,/1", "(unexplained),/2"]
    assert main(["summary", names[0]]) == 0
    text = capsys.readouterr().out
    assert "3 dumps by kernel" in text and "object-owner" in text


@pytest.mark.parametrize(
    "change",
    [
        {"rows": "7"},
        {"causes": [7]},
        {"schema": 2},
        {"error": 3},
        {"causes": None},
        {"seconds": 10**400},
        {"causes": [{**vars(RESULTS[0].causes[0]), "memcg_paths": [[1]]}]},
    ],
)
def test_other_lines(
    change: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lines"
    changed = {**json.loads(line_of(RESULTS[0])), **change}
    file.write_text(line_of(RESULTS[0]) + json.dumps(changed) + "\n")
    assert main(["summary", str(file)]) == 2
    assert "line 2 is none of memcg-inspect fleet" in capsys.readouterr().err
