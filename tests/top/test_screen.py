# SPDX-License-Identifier: LGPL-2.1-or-later
"""What top shows on terminals of any size, and what keys do."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from support.made_samples import APP, made_sample
from support.made_snapshots import snapshot
from support.reports import report

from memcg_inspect.top.lines import Line, Walk
from memcg_inspect.top.reader import Failed
from memcg_inspect.top.screen import HELP, Page, Shown, compact, natural_size, page_lines
from memcg_inspect.top.terminal import _names
from memcg_inspect.top.view import View

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
    return Page(("title", "b" * 30), "state", "memcg", tuple(range(nodes)), lines, "keys")


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


def test_help_fits_a_terminal() -> None:
    assert max(map(len, HELP)) <= 80
    assert len(HELP) <= 23


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


def view_of_two() -> View:
    view = View(5, "slab")
    view.add(made_sample(10.0, 1000))
    view.add(made_sample(14.0, 5000))
    return view


def press(view: View, *names: str) -> None:
    for name in names:
        view.key(name, 10)


def labels(view: View) -> list[str]:
    return [line.label for line in view.page().lines]


def test_a_filter_is_typed() -> None:
    view = view_of_two()
    press(view, "/", *"gonx", "backspace", "e")
    assert labels(view) == ["/app/gone"]
    assert "only lines with: gone" in view.page().keys
    press(view, "escape")
    assert len(labels(view)) == 3
    press(view, "/", *"app", "enter")
    assert labels(view) == ["/app", "/app/gone"]
    assert not view.is_ended  # an a or a q of a filter is no command
    press(view, "escape")
    assert len(labels(view)) == 3


def test_into_a_memcg_and_back() -> None:
    view = view_of_two()
    press(view, "down", "enter")
    assert (view.inside, view.wanted(), view.task()) == ("/app", ["walk"], "walk")
    assert "reading" in view.page().state
    view.add(Walk(1.0, snapshot({("/app", 0, "slab"): 640, ("/app", 1, "lru"): 4096})))
    assert labels(view) == ["lru", "slab"]
    press(view, "tab")
    assert labels(view) == ["kmalloc-64"]
    press(view, "back tab", "back tab")
    assert "does not profile" in view.page().state
    press(view, "escape")
    assert (view.inside, view.task()) == (None, "sample")
    assert len(labels(view)) == 3


def test_items_and_columns() -> None:
    view = view_of_two()
    press(view, "i", "i", "i")
    assert view.item == "slab"
    press(view, "I")
    assert view.item == "kernel_stack"
    press(view, "<", "<")
    assert view.sort == "name"
    press(view, *">>>>>>")
    assert view.sort == "node 1"


def test_the_line_that_is_chosen_stays_chosen() -> None:
    view = view_of_two()
    press(view, "end")
    chosen = labels(view)[-1]
    press(view, "<")
    shown = view.shown(10)
    assert shown.chosen is not None
    assert labels(view)[shown.chosen] == chosen
    # It is scrolled to.
    assert view.shown(1).first == shown.chosen
    press(view, "home", "up")
    assert view.shown(10).chosen == 0
    press(view, "/", *"nothing", "enter", "down", "enter")
    assert (view.shown(10).chosen, view.inside) == (None, None)


def test_what_fails_is_told_and_what_was_read_stays() -> None:
    view = view_of_two()
    view.add(Failed("sample", "the guest is gone"))
    assert "the guest is gone" in view.page().state
    assert view.page().is_alarm
    assert len(labels(view)) == 3
    view.add(made_sample(20.0, 1))
    assert not view.page().is_alarm


def test_an_audit_marks_memcgs() -> None:
    view, found = view_of_two(), report("/app")
    press(view, "a")
    assert view.wanted() == ["audit"]
    view.doing = "audit"
    assert "auditing" in view.page().state
    (finding,) = found.findings
    view.add(dataclasses.replace(found, findings=(dataclasses.replace(finding, memcg=APP),)))
    marks = {line.label: line.marks for line in view.page().lines}
    assert marks == {"/": "", "/app": "!", "/app/gone": "D"}
    assert "FINDINGS, 1 findings" in view.page().state
    assert view.page().is_alarm


def test_help_and_the_end() -> None:
    view = view_of_two()
    press(view, "h")
    assert view.wants_help
    press(view, "q")
    assert (view.wants_help, view.is_ended) == (False, False)
    press(view, "q")
    assert view.is_ended
