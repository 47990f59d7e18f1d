# SPDX-License-Identifier: LGPL-2.1-or-later
"""What top shows on terminals of any size, and the keys that terminals send."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from memcg_inspect.top.lines import Line
from memcg_inspect.top.screen import (
    HELP,
    Page,
    Shown,
    compact,
    help_lines,
    natural_size,
    page_lines,
)
from memcg_inspect.top.terminal import _names

HOSTILE = "/\x1b[31mred\n\u202eevil"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (1023, "1023"),
        (1024, "1.0K"),
        (1048560, "1.0M"),
        (-5 << 20, "-5.0M"),
        (3 << 40, "3.0T"),
        (1 << 60, "1.0e+06T"),
    ],
)
def test_compact(value: int | None, text: str) -> None:
    assert compact(value) == text


@given(st.integers(min_value=0, max_value=1 << 63))
def test_amounts_fit_their_columns(value: int) -> None:
    assert len(compact(value)) < 9
    assert len(compact(value, is_signed=True)) < 10


def page(number: int, nodes: int = 4) -> Page:
    lines = [
        Line((n,), f"/{'a' * n}/{HOSTILE}", "D!", n << 20, 1.0, (n,) * nodes) for n in range(number)
    ]
    return Page(
        title=("title", "b" * 30),
        state=("state", "c" * 30),
        path=f"/{HOSTILE}" * 20,
        label="memcg",
        nodes=tuple(range(nodes)),
        lines=lines,
        keys="keys",
    )


@pytest.mark.parametrize("width", [1, 5, 20, 40, 80, 200])
@pytest.mark.parametrize("height", [1, 2, 4, 5, 24])
def test_pages_fit(width: int, height: int) -> None:
    for number, nodes in itertools.product((0, 1, 30), (0, 4, 40)):
        lines = page_lines(page(number, nodes), Shown("total", 0), width, height)
        assert len(lines) <= height
        if width >= 40:
            assert max(cell_len(line.plain) for line in lines) <= width


def test_names_from_the_image_are_harmless() -> None:
    text = "\n".join(line.plain for line in page_lines(page(3), Shown("total"), 80, 24))
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_nodes_that_do_not_fit_are_a_key_away() -> None:
    first = page_lines(page(1, 9), Shown("total"), 80, 24)[2].plain
    later = page_lines(page(1, 9), Shown("total", first_node=5), 80, 24)[2].plain
    assert "node 0" in first
    assert "node 8" not in first
    assert "node 8" in later


def test_a_whole_page_is_not_cut() -> None:
    wanted = page(30, 9)
    lines = page_lines(wanted, Shown("total"), *natural_size(wanted))
    assert "node 8" in lines[2].plain
    assert not any("…" in line.plain for line in lines)
    assert len(lines) == 34


@pytest.mark.parametrize("height", [1, 2, 12, 24, 50])
def test_all_of_the_help_is_shown(height: int) -> None:
    assert max(map(len, HELP)) <= 80
    shown = list[str]()
    for part in itertools.count():
        lines = help_lines(part, height)
        assert len(lines) <= max(2, height)
        if not lines:
            break
        shown += [line.plain for line in lines[:-1]]
    assert shown == list(HELP)
    assert height < 24 or len(help_lines(0, height)) == len(HELP) + 1


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (80, "bad news; slab by total; more; /a/b/c"),
        (36, "bad news; slab by total; /a/b/c"),
        (24, "bad news; /a/b/c"),
        (12, "bad news; /a/b/c"[:12]),
    ],
)
def test_the_state_says_first_what_matters(width: int, shown: str) -> None:
    some = page(1)._replace(state=("bad news", "slab by total", "more"), path="/a/b/c")
    assert page_lines(some, Shown("total"), width, 24)[1].plain == shown
    long = some._replace(path="/kubepods.slice" * 20 + "/end")
    assert page_lines(long, Shown("total"), 80, 24)[1].plain.endswith("/end")


KEYS = {
    "up": b"\x1b[A",
    "down": b"\x1bOB",
    "page down": b"\x1b[6~",
    "back tab": b"\x1b[Z",
    "enter": b"\r",
    "escape": b"\x1b",
}


@pytest.mark.parametrize(("name", "data"), KEYS.items())
def test_keys(name: str, data: bytes) -> None:
    assert list(_names(data)) == [name]


def test_keys_that_nobody_knows() -> None:
    # F5, a mouse, a letter with an accent, half of one, a letter.
    assert list(_names(b"\x1b[15~\x1b[<0;1;1M\xc3\xa9\xc3q")) == ["é", "q"]
    assert list(_names(b"\x1b[A\x1b[Bq")) == ["up", "down", "q"]


@given(st.binary(max_size=20))
def test_any_bytes_are_keys(data: bytes) -> None:
    assert all(isinstance(name, str) for name in _names(data))
