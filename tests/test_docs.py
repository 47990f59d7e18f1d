# SPDX-License-Identifier: LGPL-2.1-or-later
"""The documents: measured blocks are in place, links lead somewhere, commands exist."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from docblocks import (  # noqa: E402
    begin,
    end,
    fenced,
    fields,
    replace,
    shortened,
    with_few_candidates,
)

from memcg_inspect.views import NAMES, tables  # noqa: E402

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks() -> dict[str, str]:
    """The blocks that scripts/update-docs writes, and the documents they are in."""
    for node in ast.parse((ROOT / "scripts/update-docs").read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "BLOCKS":
            assert isinstance(node.value, ast.Dict)
            return {
                ast.literal_eval(name): ast.literal_eval(value.elts[0])
                for name, value in zip(node.value.keys, node.value.values, strict=True)
                if name is not None and isinstance(value, ast.Tuple)
            }
    raise AssertionError("scripts/update-docs has no BLOCKS")


def test_readme_shows_output_of_the_demo() -> None:
    assert blocks()["demo"] == "README.md"


@pytest.mark.parametrize(("name", "document"), blocks().items())
def test_every_block_is_in_place_and_was_written(name: str, document: str) -> None:
    text = (ROOT / document).read_text()
    assert text.count(begin(name)) == text.count(end(name)) == 1
    body = text.split(begin(name))[1].split(end(name))[0].strip()
    assert body.startswith("```text\n")
    assert len(body.splitlines()) > 3
    # Written again with the same output, the document is the same.
    assert replace(text, name, body) == text
    assert fenced(body.removeprefix("```text\n").removesuffix("\n```")) == body


def test_every_mark_is_of_a_known_block() -> None:
    for document in DOCUMENTS:
        for kind, name in re.findall(r"<!-- (begin|end) (\w+)", document.read_text()):
            assert blocks().get(name) == str(document.relative_to(ROOT)), (kind, name)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_a_page_that_shows_it_and_names_its_fields(name: str) -> None:
    page = f"docs/commands/{name}.md"
    text = (ROOT / page).read_text()
    assert {block for block, where in blocks().items() if where == page} >= {name, f"{name}_fields"}
    assert f"$ memcg-inspect {name} " in text
    assert fields(tables(name)) in text  # written by scripts/update-docs, and not changed since
    assert "## Exit status" in text


DOCUMENT = f"before\n{begin('one')}\nold\n{end('one')}\nbetween\n{begin('two')}\n{end('two')}\n"


def test_replace_changes_one_block() -> None:
    once = replace(DOCUMENT, "one", "\nnew\nlines\n\n")
    assert once == DOCUMENT.replace("old", "new\nlines")
    assert replace(once, "one", "new\nlines") == once
    assert replace(DOCUMENT, "two", "more") == DOCUMENT.replace(end("two"), "more\n" + end("two"))


@pytest.mark.parametrize(
    "text",
    [
        "no block",
        begin("one") + "\n",
        end("one"),
        f"{end('one')}\n{begin('one')}\n",
        DOCUMENT + DOCUMENT,
    ],
)
def test_replace_refuses_a_broken_document(text: str) -> None:
    with pytest.raises(ValueError, match="one block 'one'"):
        replace(text, "one", "body")


RULE = " " + "─" * 30 + " "


def table(name: str, rows: int) -> str:
    """A table as the audit prints it, padded with spaces."""
    lines = [f"{name}: exact   ", "           ", " memcg   ", RULE]
    return "\n".join([*lines, *(f" row {n}   " for n in range(rows)), "      "])


def test_long_tables_are_shortened_and_say_so() -> None:
    output = f"EXACT: yes\n\n{table('slab', 9)}\n{table('kmem', 3)}\nafter\n"
    assert shortened(output, ("slab", "kmem"), most_rows=2).splitlines() == [
        *("EXACT: yes", "", "slab: exact", "", " memcg", RULE.rstrip(), " row 0", " row 1"),
        *(" [7 rows more]", "", "kmem: exact", "", " memcg", RULE.rstrip(), " row 0", " row 1"),
        *(" [1 row more]", "", "after"),
    ]


def test_other_tables_are_left_out_and_say_so() -> None:
    output = f"EXACT: yes\n\n{table('slab', 2)}\n{table('kmem', 1)}\nafter\n"
    assert shortened(output, ()).splitlines() == [
        *("EXACT: yes", "", "slab: exact [2 rows]", "", "kmem: exact [1 row]", "", "after"),
    ]


def test_what_is_no_table_is_left_alone() -> None:
    output = "EXACT: yes\nLinux\n\nsock: exact, nothing charged\n\nRead 7 memcgs.\n"
    assert shortened(output, ()) == output
    assert shortened(shortened(output, ()), ()) == output


def test_later_candidates_are_left_out_and_it_says_so() -> None:
    finding = ["Finding 1: bad", "  candidates:", *(f"    0xff{n}, object" for n in range(4)), ""]
    few = [*finding[:4], "    [2 more]", ""]
    assert with_few_candidates("\n".join([*finding, *finding])).split("\n") == [*few, *few]
    assert with_few_candidates("\n".join(finding[:4])).split("\n") == finding[:4]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(document: Path) -> None:
    headings = {}
    for other in DOCUMENTS:
        titles = re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE)
        headings[other] = {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if target.startswith("https://"):
            continue
        path, _, heading = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), target
        assert not heading or heading in headings[file], target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_files_and_scripts_named_exist(document: Path) -> None:
    places = r"\b((?:memcg_inspect|scripts|tests|fixtures|docs)/[\w./-]*[\w/])"
    for name in re.findall(places, document.read_text()):
        if name not in ("memcg_inspect/views/", "memcg_inspect/commands.py"):
            assert (ROOT / name).exists(), name


def commands(document: Path) -> list[list[str]]:
    """The commands that a document shows in indented blocks."""
    lines = re.findall(r"^    (?:\S*=\$\()?((?:scripts/|memcg-inspect ).*?)\)?$",
                       re.sub(r"\\\n *", "", document.read_text()), re.MULTILINE)  # fmt: skip
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_commands_shown_can_be_run(document: Path) -> None:
    for program, *arguments in commands(document):
        if program.startswith("scripts/"):
            assert os.access(ROOT / program, os.X_OK), program
        options = [word for word in arguments if re.fullmatch(r"--?\w[\w-]*", word)]
        command = {
            "scripts/lab": [ROOT / "scripts/lab", *arguments[:1]],
            "memcg-inspect": ["-m", "memcg_inspect", *arguments[:1]],
        }.get(program)
        if command is None or not options:
            continue
        done = subprocess.run(
            [sys.executable, *command, "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert all(re.search(rf"{option}\b", done.stdout) for option in options), arguments


def test_first_commands_of_the_readme() -> None:
    first, second = commands(ROOT / "README.md")[:2]
    assert (first, second) == (["scripts/demo"], ["scripts/test"])
