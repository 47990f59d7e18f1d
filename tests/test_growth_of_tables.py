# SPDX-License-Identifier: LGPL-2.1-or-later
"""``--since`` on tables made by hand, and on documents that nobody should trust."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.documents import strictly
from support.printed import answer_text

from memcg_inspect.growth import Earlier, check_earlier, grown, read_earlier
from memcg_inspect.model import NUMA_NO_NODE, ImageInfo
from memcg_inspect.render.documents import answer_document, to_json
from memcg_inspect.render.text import as_csv, scripted
from memcg_inspect.tables import (
    Answer,
    Choice,
    Field,
    MemcgAddress,
    NotRead,
    Table,
    UsageError,
    Value,
    choose,
    columns_of,
    largest,
)


@dataclass(frozen=True)
class Held:
    """A row of the test's table."""

    memcg: Annotated[Value, Field("memcg", "who pays")]
    memcg_address: MemcgAddress = None
    node: Annotated[Value, Field("node", "where")] = NUMA_NO_NODE
    cache: Annotated[Value, Field("text", "what")] = "dentry"
    stale: Annotated[Value, Field("flag", "whether it is")] = False
    objects: Annotated[Value, Field("count", "how many", total=True)] = None
    bytes: Annotated[Value, Field("bytes", "how much", total=True, shares=True)] = 0
    on: Annotated[Mapping[int, Value], Field("bytes", "on node {}", total=True, each="node_{}")] = (
        field(default_factory=dict)
    )


IMAGE = ImageInfo("7.3.0", "vmcore", (0, 1), 2, 4096, "objcg-per-node")
ALL = Choice(fields=("all",))


def answer(
    *rows: Held,
    image: ImageInfo = IMAGE,
    nodes: Iterable[int] = (),
    whole: bool = True,
    **more: Any,
) -> Answer:
    columns = columns_of(Held, keys=nodes, omit=("node",) if nodes else ())
    table = Table("held", "held", columns, rows, is_ranked=True, **more)
    return Answer("slabinfo", image, (table,), unanswered=not whole)


def document(made: Answer) -> dict[str, Any]:
    return strictly(to_json(answer_document(made)))


class Files:
    """Writes and reads documents."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "before.json"

    def read(self, content: Any) -> Earlier:
        self._file.write_text(content if isinstance(content, str) else json.dumps(content))
        return read_earlier(str(self._file))

    def grown(self, before: Answer, now: Answer, **chosen: Any) -> dict[str, Any]:
        """Return the document of what grew."""
        choice = Choice(**{"fields": ("all",), **chosen})
        earlier = self.read(document(choose(before, ALL)))
        check_earlier(earlier, "slabinfo", choice)
        return document(choose(grown(now, earlier, choice), choice))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def growths(made: Mapping[str, Any], name: str = "bytes") -> dict[Any, Any]:
    """Return amounts and growth, by memcg, and by None for the totals."""
    [table] = made["tables"]
    rows = [*table["rows"], {"memcg": "total", **table["totals"]}]
    found = {row["memcg"]: (row[name], row[f"{name}_growth"]) for row in rows}
    assert len(found) == len(rows)
    return found


def test_what_grew_and_what_shrank(files: Files) -> None:
    before = answer(Held("/a", 16, bytes=10), Held("/b", 32, bytes=7), Held("/c", 48, bytes=5))
    now = answer(Held("/a", 160, bytes=4), Held("/c", 48, bytes=5), Held("/d", 64, bytes=8))
    made = files.grown(before, now)
    assert growths(made) == {"/d": (8, 8), "/a": (4, -6), "/b": (0, -7), "total": (12, -5)}
    assert [row["memcg"] for row in made["tables"][0]["rows"]] == ["/d", "/a", "/b"]
    assert made["notes"] == ["1 row that neither grew nor shrank is left out."]
    assert made["whole"]


def test_a_flag_may_change(files: Files) -> None:
    """It says something about a row, and the row stays the same."""
    before = answer(Held("/a", bytes=10, stale=False), Held("/b", bytes=1, stale=True))
    made = files.grown(before, answer(Held("/a", bytes=12, stale=True)))
    assert growths(made) == {"/a": (12, 2), "/b": (0, -1), "total": (12, 1)}
    assert {row["memcg"]: row["stale"] for row in made["tables"][0]["rows"]} == {
        "/a": True,
        "/b": True,
    }


def test_what_does_not_apply_is_no_zero(files: Files) -> None:
    """The number of some objects is not known, and may be in one of the two."""
    before = answer(Held("/a", objects=7, bytes=70), Held("/b", objects=None, bytes=20))
    now = answer(Held("/a", objects=None, bytes=90), Held("/b", objects=3, bytes=20))
    made = files.grown(before, now)
    assert growths(made, "objects") == {"/a": (None, None), "/b": (3, None), "total": (3, None)}
    assert growths(made) == {"/a": (90, 20), "/b": (20, 0), "total": (110, 20)}
    # Neither does it for a row that the other one does not have.
    made = files.grown(before, answer())
    assert growths(made, "objects") == {"/a": (0, -7), "/b": (None, None), "total": (0, -7)}


def test_rows_that_were_not_read_are_not_zero(files: Files) -> None:
    """A row that only one of them has may have been missed by the other one."""
    before = answer(Held("/a", bytes=10), Held("/b", bytes=7))
    now = answer(Held("/a", bytes=11), Held("/c", bytes=8))
    whole = {"/a": (11, 1), "/b": (0, -7), "/c": (8, 8)}
    for then_whole, now_whole, unknown in (
        (True, True, {"total": (19, 2)}),
        (False, True, {"/c": (8, None), "total": (19, None)}),
        (True, False, {"/b": (None, None), "total": (None, None)}),
        (False, False, {"/b": (None, None), "/c": (8, None), "total": (None, None)}),
    ):
        made = files.grown(
            replace(before, unanswered=not then_whole), replace(now, unanswered=not now_whole)
        )
        assert growths(made) == {**whole, **unknown}
        assert made["whole"] is (then_whole and now_whole)
        for row in made["tables"][0]["rows"]:
            lost = {name for name in ("bytes", "bytes_growth") if row[name] is None}
            assert row.get("not_read", {}).keys() == lost
        said = " ".join(made["notes"])
        assert ("could be read for" in said, "could be read now" in said) == (
            not then_whole,
            not now_whole,
        )


def test_rows_of_what_is_not_known(files: Files) -> None:
    """They may be of ``/b``, which was read in the other one."""
    lost = NotRead("no such memcg")
    before, now = answer(Held(lost, bytes=10), Held("/b", bytes=7)), answer(Held(lost, bytes=13))
    # Everything was read: charges to what is no memcg are a group of their own.
    made = files.grown(before, now)
    assert growths(made) == {None: (13, 3), "/b": (0, -7), "total": (13, -4)}
    for then_whole, now_whole in ((False, True), (True, False), (False, False)):
        then_now = (
            replace(before, unanswered=not then_whole),
            replace(now, unanswered=not now_whole),
        )
        [row] = [r for r in files.grown(*then_now)["tables"][0]["rows"] if r["memcg"] is None]
        assert (row["bytes"], row["bytes_growth"]) == (13, None)
        assert row["not_read"]["bytes_growth"] == "no such memcg"


def test_a_memcg_without_a_name(files: Files) -> None:
    """Its rows may be those of another path in the other run, whichever of them was not whole."""
    one, other = Held("/a/<memcg 0x10>", 16, bytes=10), Held("/a/b", 16, bytes=10)
    for before, now in ((one, other), (other, one)):
        whole = before is other
        made = files.grown(answer(before, whole=whole), answer(now, whole=not whole))
        found = growths(made)
        assert found["/a/<memcg 0x10>"][1] is None
        assert found["/a/b"][1] is None
        assert found["total"][1] is None
        [row] = [row for row in made["tables"][0]["rows"] if "<" in row["memcg"]]
        assert row["not_read"]["bytes_growth"] == "the name of a memcg could not be read"


def test_a_value_that_was_not_read_then(files: Files) -> None:
    lost = Held("/a", bytes=NotRead("lost"))
    for before, now, expected in (
        (lost, Held("/a", bytes=9), (9, None)),
        (Held("/a", bytes=9), lost, (None, None)),
        (lost, lost, (None, None)),
    ):
        made = files.grown(answer(before), answer(now))
        assert growths(made)["/a"] == expected
        assert made["tables"][0]["rows"][0]["not_read"]["bytes_growth"] == "lost"


# A memcg and the one above it, by address. Each row includes those of the memcgs below it.
ROOT, TOP, LOW, OTHER = 16, 32, 48, 64
NESTED = {ROOT: None, TOP: ROOT, LOW: TOP, OTHER: TOP}


def nested(*rows: Held, **more: Any) -> Answer:
    found = {row.memcg_address for row in rows}
    return answer(*rows, parents={m: up for m, up in NESTED.items() if m in found}, **more)


def test_totals_count_what_moved_below_a_memcg_once(files: Files) -> None:
    """``/top/low`` was removed, and its charges moved to ``/top``, which has them as before."""
    root, top = Held("/", ROOT, bytes=100), Held("/top", TOP, bytes=60)
    made = files.grown(nested(root, top, Held("/top/low", LOW, bytes=50)), nested(root, top))
    assert growths(made) == {
        "/": (100, 0),
        "/top": (60, 0),
        "/top/low": (0, -50),
        "total": (100, 0),
    }
    made = files.grown(
        nested(root, top, Held("/top/low", LOW, bytes=50)), nested(root, top), memcgs=["/top/*"]
    )
    assert growths(made) == {"/top/low": (0, -50), "total": (0, -50)}
    assert made["notes"] == []


def test_totals_count_memcgs_that_are_gone_once(files: Files) -> None:
    """A memcg and its child were removed."""
    before = nested(
        Held("/", ROOT, bytes=100),
        Held("/top", TOP, bytes=60),
        Held("/top/low", LOW, bytes=50),
        Held("/top/other", OTHER, bytes=4),
    )
    made = files.grown(before, nested(Held("/", ROOT, bytes=40)), memcgs=["/top"], subtree=True)
    assert growths(made) == {
        "/top": (0, -60),
        "/top/low": (0, -50),
        "/top/other": (0, -4),
        "total": (0, -60),
    }


def test_totals_count_memcgs_that_left_a_node_once(files: Files) -> None:
    """Both are there, on another node. They have no rows on this one."""
    there = nested(
        *(
            Held(path, address, node, bytes=size)
            for path, address, size in (("/", ROOT, 9), ("/top", TOP, 8), ("/top/low", LOW, 7))
            for node in (0, 1)
        )
    )
    left = [row for row in there.tables[0].rows if row.node == 0 or row.memcg == "/"]
    made = files.grown(there, nested(*left), memcgs=["/top*"], nodes=[1])
    assert growths(made) == {"/top": (0, -8), "/top/low": (0, -7), "total": (0, -8)}
    assert {row["memcg"]: row["memcg_address"] for row in made["tables"][0]["rows"]} == {
        "/top": hex(TOP),
        "/top/low": hex(LOW),
    }


def test_what_left_a_node_is_a_row_of_it(files: Files) -> None:
    before = answer(
        Held("/a", bytes=8, on={0: 8, 1: 0}), Held("/b", bytes=4, on={0: 0, 1: 4}), nodes=(0, 1)
    )
    now = answer(
        Held("/a", bytes=8, on={0: 0, 1: 8}), Held("/b", bytes=5, on={0: 0, 1: 5}), nodes=(0, 1)
    )
    made = files.grown(before, now, nodes=[0])
    assert growths(made, "node_0") == {"/a": (0, -8), "total": (0, -8)}
    assert growths(made, "node_1")["/a"] == (8, 8)


def test_a_node_that_came_online(files: Files) -> None:
    """Nothing was on it before, and a note says that the machine is not the same."""
    before = answer(Held("/a", bytes=8, on={0: 8}), image=replace(IMAGE, nodes=(0,)), nodes=(0,))
    now = answer(Held("/a", bytes=11, on={0: 8, 1: 3}), nodes=(0, 1))
    made = files.grown(before, now)
    assert growths(made, "node_1") == {"/a": (3, 3), "total": (3, 3)}
    [note] = made["notes"]
    assert note.endswith("other CPUs or nodes: 2 possible CPUs, and nodes 0.")
    # A column that is missing for another reason is not 0.
    with pytest.raises(UsageError, match="other rows or columns"):
        files.grown(replace(before, image=IMAGE), now)


def test_notes_count_the_rows_that_were_asked_for(files: Files) -> None:
    same = answer(*(Held(path, bytes=1) for path in ("/a", "/a/b", "/c")), Held("/d", node=1))
    for chosen, number in (
        ({}, "4 rows"),
        ({"memcgs": ["/a"]}, "1 row"),
        ({"memcgs": ["/a"], "subtree": True}, "2 rows"),
        ({"nodes": [1]}, "1 row"),
    ):
        made = files.grown(same, same, **chosen)
        assert made["notes"][0].startswith(f"{number} that neither")


def test_rows_of_other_things_are_refused(files: Files) -> None:
    """Documents may have the same columns, and be of other objects, or of growth."""
    of = [answer(Held("/a", bytes=1), contents=contents) for contents in (None, "all", "some")]
    for before in of:
        for now in of:
            if before.tables[0].contents == now.tables[0].contents:
                assert growths(files.grown(before, now)) == {"total": (0, 0)}
                continue
            with pytest.raises(UsageError, match="other rows or columns"):
                files.grown(before, now)
    made = files.grown(of[0], answer(Held("/a", bytes=3)))
    assert made["tables"][0]["contents"] == "growth"
    with pytest.raises(UsageError, match="without --fields and --since"):
        grown(of[0], files.read(made), ALL)


def test_columns_are_checked_without_rows(files: Files) -> None:
    before = document(choose(answer(), Choice(fields=("memcg", "bytes"))))
    with pytest.raises(UsageError, match="other rows or columns"):
        grown(answer(), files.read(before), ALL)


def test_memcgs_of_now_are_paths(files: Files) -> None:
    before = files.read(document(choose(answer(Held("/a/b/c", 16)), ALL)))
    with pytest.raises(UsageError, match="by their paths, so --memcg 0xF must be a path"):
        check_earlier(before, "slabinfo", Choice(memcgs=("/a", "0xF")))
    with pytest.raises(UsageError, match="is of slabinfo, and not of percpu"):
        check_earlier(before, "percpu", Choice())
    # Those above a memcg that is gone are known, too.
    assert before.memcgs == {"/", "/a", "/a/b", "/a/b/c"}


#: Changes of a document, and what they are refused with.
NO_DOCUMENT, NO_TABLES, OTHER_COLUMNS = "is no document of", "is no document with", "other rows or"
DAMAGED: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("schema",), 2, "of another schema than 1"),
    (("schema",), None, "of another schema than 1"),
    (("command",), 7, NO_TABLES),
    (("whole",), "yes", NO_TABLES),
    (("whole",), 1, NO_TABLES),
    (("image",), None, NO_TABLES),
    (("image", "release"), ["7.3"], NO_TABLES),
    (("image", "nodes"), "01", NO_TABLES),
    (("image", "cpus"), True, NO_TABLES),
    (("chosen", "nodes"), [1e999], NO_DOCUMENT),
    (("chosen", "nodes"), [0.5], NO_TABLES),
    (("chosen", "nodes"), "12", NO_TABLES),
    (("chosen", "memcgs"), "", NO_TABLES),
    (("chosen", "memcgs"), [None], NO_TABLES),
    (("chosen", "subtree"), 0, NO_TABLES),
    (("tables",), {}, NO_TABLES),
    (("tables",), [], OTHER_COLUMNS),
    (("tables", 0), "held", NO_TABLES),
    (("tables", 0, "name"), ["held"], NO_TABLES),
    (("tables", 0, "contents"), 1, NO_TABLES),
    (("tables", 0, "columns"), {}, NO_TABLES),
    (("tables", 0, "columns", 5, "kind"), "text", NO_TABLES),
    (("tables", 0, "columns", 5, "kind"), "pages", OTHER_COLUMNS),
    (("tables", 0, "columns", 5, "kind"), "something new", OTHER_COLUMNS),
    (("tables", 0, "columns", 5, "kind"), ["count"], NO_TABLES),
    (("tables", 0, "rows"), "none", NO_TABLES),
    (("tables", 0, "rows", 0), [], NO_TABLES),
    (("tables", 0, "rows", 0, "memcg"), 7, NO_TABLES),
    (("tables", 0, "rows", 0, "memcg"), {"/": 1}, NO_TABLES),
    (("tables", 0, "rows", 0, "node"), "0", NO_TABLES),
    (("tables", 0, "rows", 0, "stale"), 1, NO_TABLES),
    (("tables", 0, "rows", 0, "bytes"), "10", NO_TABLES),
    (("tables", 0, "rows", 0, "bytes"), True, NO_TABLES),
    (("tables", 0, "rows", 0, "bytes"), 1.5, NO_TABLES),
    (("tables", 0, "rows", 0, "bytes"), float("nan"), NO_DOCUMENT),
    (("tables", 0, "rows", 0, "bytes"), float("-inf"), NO_DOCUMENT),
    (("tables", 0, "rows", 0, "bytes"), 1 << 63, NO_TABLES),
    (("tables", 0, "rows", 0, "bytes"), -(10**400), NO_TABLES),
    (("tables", 0, "rows", 0, "not_read"), "bytes", NO_TABLES),
    (("tables", 0, "rows", 0, "not_read"), {"bytes": 1}, NO_TABLES),
    (("tables", 0, "rows", 0, "not_read"), None, NO_TABLES),
]


def changed(made: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """Return a document with another value at a place."""
    made = json.loads(json.dumps(made))
    inner = made
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return made


BEFORE = answer(Held("/a", 16, 0, bytes=10, objects=1), Held(None, node=1, bytes=NotRead("lost")))
NOW = answer(Held("/a", 16, 0, bytes=12, objects=2), Held(None, node=1, bytes=3))


@pytest.mark.parametrize(("path", "value", "said"), DAMAGED)
def test_damaged_documents_are_refused(
    files: Files, path: tuple[str | int, ...], value: Any, said: str
) -> None:
    made = document(choose(BEFORE, ALL))
    assert made["tables"][0]["columns"][5]["name"] == "objects"
    with pytest.raises(UsageError, match=said):
        grown(NOW, files.read(changed(made, path, value)), ALL)


def test_what_a_document_must_have(files: Files) -> None:
    """Without any of what is read of it, it is refused."""
    made = document(choose(BEFORE, ALL))
    needed = {
        (): {"schema", "command", "image", "whole", "chosen", "tables"},
        ("image",): {"release", "nodes", "cpus"},
        ("chosen",): {"memcgs", "nodes", "subtree"},
        ("tables", 0): {"name", "contents", "columns", "rows"},
        ("tables", 0, "columns", 0): {"name", "kind"},
        ("tables", 0, "rows", 0): {*made["tables"][0]["rows"][0]},
    }
    for path, names in needed.items():
        for name in names:
            cut = json.loads(json.dumps(made))
            inner = cut
            for step in path:
                inner = inner[step]
            del inner[name]
            with pytest.raises(UsageError, match="is no document"):
                files.read(cut)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b"[1",
        b"{}{}",
        b"[" * 100_000,
        b"\x00",
        b"1" * 5000,
    ],
)
def test_files_that_are_no_documents(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "some"
    file.write_bytes(content)
    with pytest.raises(UsageError, match="is no document of a command"):
        read_earlier(str(file))


def test_every_truncated_document_is_refused(files: Files) -> None:
    text = to_json(answer_document(choose(BEFORE, ALL))).rstrip()
    for end in range(len(text)):
        with pytest.raises(UsageError, match="is no document of a command"):
            files.read(text[:end])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name, said in (("", "'': No such file"), ("none", "No such file"), (".", "Is a directory")):
        with pytest.raises(UsageError, match=said):
            read_earlier(str(tmp_path / name) if name not in ("", ".") else name)


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return every place in a document."""
    found = [path] if path else []
    steps: Iterable[Any] = ()
    if isinstance(value, dict):
        steps = value
    elif isinstance(value, list):
        steps = range(len(value))
    for step in steps:
        found += places(value[step], (*path, step))
    return found


MADE = document(choose(BEFORE, ALL))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["/a", "/", "0x10", "bytes", "text", "\ud800", "\x1b[2J", 1 << 62, -(1 << 62)]
    ),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=8), inner, max_size=2)
    ),
    max_leaves=4,
)
FORMATS: tuple[Callable[[Answer], str], ...] = (
    answer_text,
    lambda made: answer_text(made, 80),
    lambda made: answer_text(made, 80, exact=True),
    scripted,
    as_csv,
)


@settings(max_examples=400)
@given(changes=st.lists(st.tuples(st.sampled_from(places(MADE)), VALUES), min_size=1, max_size=3))
def test_whatever_a_document_has_is_compared_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[tuple[str | int, ...], Any]]
) -> None:
    made = MADE
    for path, value in changes:
        try:
            made = changed(made, path, value)
        except (IndexError, KeyError, TypeError):
            continue  # an earlier change took the place away
    files = Files(tmp_path_factory.getbasetemp())
    for choice in (ALL, Choice(), Choice(memcgs=("/*",), subtree=True, nodes=(0, 1))):
        try:
            earlier = files.read(made)
            check_earlier(earlier, "slabinfo", choice)
            found = choose(grown(NOW, earlier, choice), choice)
        except UsageError:
            continue
        document(found)
        for write in FORMATS:
            assert "\x1b" not in write(largest(found, 1))
