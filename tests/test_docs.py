# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The documents are compared with what the program does.

Blocks are compared with a run, commands are run or parsed, and each list of values is compared
with the values that the code can produce, in both directions.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from docblocks import begin, differences, end, extract, fields
from docruns import BLOCKS
from labkit import cli as lab_cli
from support.guests import NOT_BUILT, ROOT, Lab

from memcg_inspect import answers, cli, model, report
from memcg_inspect.checks.diagnosis.at_once import CAUSES as AT_ONCE
from memcg_inspect.checks.diagnosis.half_done import MEANINGS as HALF_DONE
from memcg_inspect.checks.diagnosis.mistakes import CAUSES as MISTAKES
from memcg_inspect.checks.diagnosis.proofs import PROVED
from memcg_inspect.checks.diagnosis.registry import CAUSES
from memcg_inspect.checks.diagnosis.uncounted import CAUSES as UNCOUNTED
from memcg_inspect.checks.ledger import ChargeKind
from memcg_inspect.checks.registry import CHECKS
from memcg_inspect.views import NAMES, tables

DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "memcg_inspect/examples.md"]
)
TEXTS = {document: document.read_text() for document in DOCUMENTS}
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)


def section(name: str, heading: str) -> str:
    """Return the text below a heading of a document, up to the next heading of its level."""
    text = (ROOT / name).read_text()
    level = heading.split()[0]
    rest = text.split(f"\n{heading}\n")
    assert len(rest) == 2, heading
    return re.split(rf"^#{{1,{len(level)}}} ", rest[1], flags=re.MULTILINE)[0]


def first_cells(text: str) -> list[str]:
    """Return the first cells of the rows of the first table."""
    table = re.search(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    assert table is not None
    return [row.strip("|").split("|")[0].strip(" `") for row in table[0].splitlines()[2:]]


# Blocks


def test_every_block_is_in_its_document() -> None:
    found = [
        (name, str(document.relative_to(ROOT)))
        for document, text in TEXTS.items()
        for name in re.findall(r"^<!-- begin (\w+): .* -->$", text, re.MULTILINE)
    ]
    assert sorted(found) == sorted((name, block.document) for name, block in BLOCKS.items())
    for name, block in BLOCKS.items():
        text = (ROOT / block.document).read_text()
        assert text.index(begin(name)) < text.index(end(name))


def check_same(name: str, lines: list[str]) -> None:
    assert not lines, "\n".join([f"stale; scripts/update-docs {name} writes it anew:", *lines])


@pytest.mark.parametrize("name", [n for n, block in BLOCKS.items() if block.sort == "source"])
def test_block_follows_from_the_source(name: str) -> None:
    block = BLOCKS[name]
    there = extract((ROOT / block.document).read_text(), name)
    check_same(name, differences(there, block.write(), exactly=True))


@pytest.mark.image
@pytest.mark.parametrize(
    "name",
    [n for n, b in BLOCKS.items() if b.sort == "image" and not {b.kernel} & set(NOT_BUILT)],
)
def test_block_is_what_a_run_says(name: str) -> None:
    block = BLOCKS[name]
    there = extract((ROOT / block.document).read_text(), name)
    check_same(name, differences(there, block.write()))


@pytest.mark.parametrize("name", [n for n, block in BLOCKS.items() if block.sort == "measured"])
def test_measured_block_was_written(name: str) -> None:
    there = extract((ROOT / BLOCKS[name].document).read_text(), name).splitlines()
    assert (there[0], there[-1]) == ("```text", "```")
    assert len(there) > 4


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_a_page(name: str) -> None:
    page = f"docs/commands/{name}.md"
    here = {block for block, where in BLOCKS.items() if where.document == page}
    assert here >= {name, f"{name}_fields"}
    assert f"$ memcg-inspect {name} " in (ROOT / page).read_text()
    assert extract((ROOT / page).read_text(), f"{name}_fields") == fields(tables(name))


# Lists of values


def strings(node: ast.AST) -> Iterator[str]:
    """Return the string constants of an expression that is one, or chooses between some."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from strings(node.body)
        yield from strings(node.orelse)


def given(function: str, keyword: str, position: int | None = None) -> set[str]:
    """Return the strings that the package gives as an argument, in all calls of a function."""
    found: set[str] = set()
    for path in (ROOT / "memcg_inspect").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != function:
                continue
            values = [k.value for k in node.keywords if k.arg == keyword]
            if position is not None and len(node.args) > position:
                values.append(node.args[position])
            for value in values:
                found |= set(strings(value))
    return found


def test_kinds_of_findings() -> None:
    kinds = given("Finding", "kind") | given("Proof", "kind", 0)
    kinds |= {kind for check in CHECKS if not check.prove for kind in (check.above, check.below)}
    assert len(kinds) >= 9
    assert sorted(first_cells(section("docs/output.md", "## Findings"))) == sorted(kinds)


def test_causes() -> None:
    causes = {cause.name for cause in CAUSES} | {proved.cause for proved in PROVED.values()}
    causes |= AT_ONCE.keys() | UNCOUNTED.keys() | MISTAKES.keys() | HALF_DONE.keys()
    section_ = section("docs/output.md", "## Diagnoses")
    assert set(first_cells(section_)) == literals(report.Diagnosis, "confidence")
    listed = first_cells(section_[section_.index("| cause |") :])
    assert sorted(listed) == sorted(causes)
    assert set(PROVED) <= set(first_cells(section("docs/output.md", "## Findings")))


def values_of(name: str, heading: str, field: str) -> set[str]:
    """Return the quoted words that a document gives for a field."""
    row = re.search(rf"^\| `{field}` \|[^|]*\|(.*)\|$", section(name, heading), re.MULTILINE)
    assert row is not None
    return set(re.findall(r"`([^` ]+)`", row[1]))


def test_kinds_of_evidence() -> None:
    kinds = given("Evidence", "kind")
    assert len(kinds) >= 7
    assert values_of("docs/json.md", "### `findings[].evidence[]`", "kind") == kinds


def literals(record: type, field: str) -> set[str]:
    return set(get_args(get_type_hints(record)[field]))


@pytest.mark.parametrize(
    ("heading", "field", "values"),
    [
        ("### Top", "verdict", literals(report.Report, "verdict")),
        ("### `image`", "source", literals(model.ImageInfo, "source")),
        ("### `image`", "accounting", literals(model.ImageInfo, "accounting")),
        ("### `memcgs[]`", "state", literals(model.Memcg, "state")),
        ("### `identities[]`", "status", literals(report.Identity, "status")),
        ("### `rows[]`", "status", literals(report.Row, "status")),
        ("### `rows[]`", "unit", literals(report.Row, "unit")),
        ("### `skew[]`", "kind", set(get_args(ChargeKind))),
        ("### `findings[]`", "evidence_is", literals(report.Finding, "evidence_is")),
        ("### `diagnoses[]`", "confidence", literals(report.Diagnosis, "confidence")),
        (
            "### Top",
            "counters_follow",
            {*get_args(model.Follows), *get_args(model.SplitKind), "null"},
        ),
    ],
)
def test_values_in_json(heading: str, field: str, values: set[str]) -> None:
    assert len(values) > 1
    assert values_of("docs/json.md", heading, field) == values


def test_statuses_of_rows() -> None:
    assert set(first_cells(section("docs/output.md", "### Status"))) == literals(
        report.Row, "status"
    )


def exit_statuses() -> set[int]:
    """Return the names in the constants of the front ends."""
    found = {*report.EXIT_STATUS.values(), answers._INCOMPLETE, answers._INTERRUPTED}
    found |= {value for name, value in vars(cli).items() if name.startswith("EXIT_")}
    return found


def test_exit_statuses() -> None:
    statuses = sorted(map(str, exit_statuses()))
    readme = re.split(r"^## ", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    (table,) = (part for part in readme if "| exit status | meaning |" in part)
    listed = re.findall(r"^\| (\d+) \|", table, re.MULTILINE)
    assert sorted(listed) == statuses
    assert sorted(first_cells(section("docs/json.md", "## Exit status"))) == statuses


@pytest.mark.parametrize("name", NAMES)
def test_exit_statuses_of_commands(name: str) -> None:
    listed = re.findall(
        r"^\* (\d+): ", section(f"docs/commands/{name}.md", "## Exit status"), re.MULTILINE
    )
    # 1 is a finding, and only the audit has some.
    assert sorted(listed) == sorted(map(str, exit_statuses() - {1}))


# Links, names and commands


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    headings = {}
    for other, text in TEXTS.items():
        titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        headings[other] = {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}
    for target in re.findall(r"\]\(([^)]+)\)", TEXTS[document]):
        if target.startswith("https://"):
            continue
        path, _, heading = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), target
        assert not heading or heading in headings[file], target


#: Folders that names in documents may be relative to.
PLACES = (
    ROOT,
    ROOT / "memcg_inspect",
    ROOT / "tests",
    ROOT / "scripts",
    ROOT / "memcg_inspect/checks",
)


@each_document
def test_files_named_exist(document: Path) -> None:
    """Names of the project's files are checked; names of kernel sources end in .c or .h."""
    text = TEXTS[document]
    whole = r"\b((?:memcg_inspect|scripts|tests|fixtures|docs)/[\w./-]*[\w/])"
    for name in [*re.findall(whole, text), *re.findall(r"[\w./-]*\w\.py\b", text)]:
        # NAME stands for any name.
        pattern = name.replace("NAME", "*").strip("/")
        assert any(any(place.glob(pattern)) for place in PLACES), name


@each_document
def test_modules_named_exist(document: Path) -> None:
    for name in set(re.findall(r"\bmemcg_inspect(?:\.\w+)+", TEXTS[document])):
        module, _, attribute = name.rpartition(".")
        parent = find_spec(module)
        assert parent is not None, name
        is_module = parent.submodule_search_locations and find_spec(name)
        assert is_module or hasattr(__import__(module, fromlist=["_"]), attribute), name


def commands(document: Path) -> list[list[str]]:
    """Return the commands that a document shows in indented blocks."""
    text = re.sub(r"\\\n *", "", TEXTS[document])
    lines = re.findall(
        r"^    (?:\w+=\$\()?((?:scripts/|memcg-inspect ).*?)(?:\).*| > .*)?$", text, re.MULTILINE
    )
    return [shlex.split(line, comments=True) for line in lines]


#: What takes the place of a word in a synopsis.
WORDS = {
    "ADDRESS...": "0xffff888000000000",
    "FIELD": "memcg",
    "MEMCG": "/files/web",
    "N": "3",
    "NID": "0",
    "PATH": "/files/web",
    "QMP_SOCKET": "qmp",
    "WHAT,...": "memcg,node",
}


@each_document
def test_commands_can_be_parsed(document: Path) -> None:
    for program, *arguments in commands(document):
        words = [WORDS.get(word.strip("[]"), word.strip("[]")) for word in arguments]
        if program == "memcg-inspect":
            assert cli.make_parser().parse_args(words).command == words[0]
        elif program == "scripts/lab":
            assert lab_cli._parser().parse_args(words)
        else:
            assert (ROOT / program).stat().st_mode & 0o100, program


def test_outputs_are_of_runs() -> None:
    """Every prompt is in a block that a run wrote."""
    for document, text in TEXTS.items():
        outside = re.sub(r"<!-- begin (\w+):.*?<!-- end \1 -->", "", text, flags=re.DOTALL)
        assert not re.search(r"^\$ ", outside, re.MULTILINE), document


RUNNABLE = [
    words
    for document in DOCUMENTS
    for words in commands(document)
    if words[0] == "memcg-inspect" and "VMCORE" in words
]


@pytest.mark.image
@pytest.mark.parametrize("words", RUNNABLE, ids=" ".join)
def test_commands_on_a_vmcore_run(
    lab: Lab,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    core = lab.image("7.3", "4", "mixed").core
    monkeypatch.chdir(tmp_path)  # some write files
    places = {"VMCORE": str(core)}
    status = cli.main([*(places.get(word, word) for word in words[1:]), "--debuginfo", "btf"])
    assert status == 0
    assert capsys.readouterr().out


def test_the_walk_goes_from_address_to_address() -> None:
    """Each address that a reader is told to look at was on the screen before."""
    page = (ROOT / "docs/postmortem.md").read_text()
    commands = list(re.finditer(r"^\$ memcg-inspect who (\w+)", page, re.M))
    assert len(commands) >= 2
    for command in commands:
        assert command[1] in page[: command.start()], command[0]


def test_first_commands_of_the_readme() -> None:
    first, second = commands(ROOT / "README.md")[:2]
    assert (first, second) == (["scripts/demo"], ["scripts/test"])


def test_numbers_of_things() -> None:
    """``counted()`` writes "1 page"; so does every document."""
    units = "page|byte|reference|row|node|CPU|memcg|task|object"
    wrong: dict[str, Any] = {
        str(document): found
        for document, text in TEXTS.items()
        if (found := re.findall(rf"(?<![\w.,])1 (?:{units})s\b", text))
    }
    assert wrong == {}
