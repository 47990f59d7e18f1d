# SPDX-License-Identifier: LGPL-2.1-or-later
"""What keys do, and what the page says of what was read."""

from __future__ import annotations

import dataclasses

from support.made_samples import APP, MEMCGS, made_sample
from support.made_snapshots import snapshot
from support.reports import report

from memcg_inspect.model import Memcg
from memcg_inspect.model_snapshot import ChargeSnapshot, MemcgKey
from memcg_inspect.top.lines import Walk
from memcg_inspect.top.reader import Failed
from memcg_inspect.top.terminal import GONE
from memcg_inspect.top.view import Options, View


def view_of_two() -> View:
    view = View(Options("slab"), 5)
    view.room, view.node_room = 10, 4
    view.add("sample", made_sample(10.0, 1000))
    view.add("sample", made_sample(14.0, 5000))
    return view


def press(view: View, *names: str) -> None:
    for name in names:
        view.shown()
        view.key(name)


def labels(view: View) -> list[str]:
    return [line.label for line in view.page().lines]


def state(view: View) -> str:
    return "; ".join(view.page().state)


def walk(seconds: float = 1.0, found: ChargeSnapshot | None = None) -> Walk:
    """Return a walk whose memcg ``/app`` is that of the samples."""
    found = found or snapshot({("/app", 0, "slab"): 640, ("/app", 1, "lru"): 4096})
    memcgs = tuple(some._replace(cgroup_id=7) if some.path == "/app" else some
                   for some in found.memcgs)  # fmt: skip
    return Walk(seconds, 1_700_000_000.0, dataclasses.replace(found, memcgs=memcgs))


def chosen(view: View) -> str:
    number = view.shown().chosen
    assert number is not None
    return labels(view)[number]


def test_a_filter_is_typed() -> None:
    view = view_of_two()
    press(view, "/", *"gonx", "backspace", "e")
    assert labels(view) == ["/app/gone"]
    assert "only lines with: gone" in view.page().keys
    press(view, "escape")
    assert len(labels(view)) == 3
    press(view, "/", *"nothing", "erase", *"app", "enter")
    assert labels(view) == ["/app", "/app/gone"]
    assert not view.is_ended  # an a or a q of a filter is no command
    assert "with 'app'" in state(view)
    # What was typed before can be changed.
    press(view, "/", *"/gone", "enter")
    assert labels(view) == ["/app/gone"]
    press(view, "escape")
    assert len(labels(view)) == 3


def test_removed_memcgs_are_hidden() -> None:
    view = view_of_two()
    press(view, "r")
    assert labels(view) == ["/", "/app"]
    assert "without removed ones" in state(view)
    press(view, "r")
    assert len(labels(view)) == 3


def test_into_a_memcg_and_back() -> None:
    view = view_of_two()
    press(view, "/", "a", "enter", "home", "enter")
    assert view.options.inside == MemcgKey("/app", 7)
    assert (view.wanted(), view.task()) == (["walk"], "walk")
    view.doing = "walk"
    assert "reading ... (Esc cancels)" in state(view)
    view.add("walk", walk())
    view.doing = None
    assert labels(view) == ["lru", "slab"]
    assert view.page().path == "/app"
    press(view, "tab")
    assert labels(view) == ["kmalloc-64"]
    press(view, "back tab", "back tab")
    assert "does not profile" in state(view)
    press(view, "escape")
    assert (view.options.inside, view.task()) == (None, "sample")
    assert (view.wanted(), view.cancelled()) == (["sample"], ["walk"])
    # Filter and place are those of before.
    assert (labels(view), chosen(view)) == (["/app", "/app/gone"], "/app")


def test_what_is_entered_again_is_read_again() -> None:
    view = view_of_two()
    press(view, "down", "enter")
    view.add("walk", walk())
    press(view, "escape", "enter")
    assert view.options.inside == MemcgKey("/app", 7)
    assert labels(view) == []


def test_a_memcg_that_is_removed_meanwhile() -> None:
    view = view_of_two()
    press(view, "down", "enter")
    view.add("walk", walk(10.0))
    view.add("walk", walk(20.0, snapshot({("/", 0, "slab"): 640})))
    assert labels(view) == []
    assert "removed: its parent is charged for what is left" in state(view)


def test_what_may_be_missing_is_told() -> None:
    view = view_of_two()
    press(view, "down", "enter")
    view.add("walk", walk(1.0, snapshot({("/app", 0, "lru"): 1}, missing={"slab": "left out"})))
    assert "slab not known: left out" in state(view)
    press(view, "tab")
    assert "slab not known: left out" in state(view)


def test_items_and_columns() -> None:
    view = view_of_two()
    press(view, "i", "i", "i")
    assert view.options.item == "slab"
    press(view, "I")
    assert view.options.item == "kernel_stack"
    press(view, "<", "<")
    assert view.options.sort == "name"
    press(view, *">>>>>>")
    assert view.options.sort == "node 1"
    press(view, "R")
    assert labels(view)[-1] != "/app/gone"
    assert "the smallest first" in state(view)


def test_nodes_that_fit_are_all_shown() -> None:
    view = view_of_two()
    press(view, "right", "right")
    assert view.shown().first_node == 0
    view.node_room = 1
    press(view, "right", "right")
    assert view.shown().first_node == 1
    press(view, "left", "left")
    assert view.shown().first_node == 0


def test_the_line_that_is_chosen_stays_chosen() -> None:
    view = view_of_two()
    press(view, "end")
    last = chosen(view)
    press(view, "<")
    assert chosen(view) == last
    # It is scrolled to.
    view.room = 1
    shown = view.shown()
    assert shown.first == shown.chosen
    view.room = 10
    press(view, "home", "up")
    assert view.shown().chosen == 0
    press(view, "/", *"nothing", "enter", "down", "enter")
    assert (view.shown().chosen, view.options.inside) == (None, None)


def test_a_line_that_vanishes_leaves_its_place() -> None:
    view = view_of_two()
    press(view, "end", "r")
    assert chosen(view) == labels(view)[-1]


def test_enter_is_for_the_line_that_was_shown() -> None:
    view = view_of_two()
    assert view.shown().chosen == 0
    others = {**MEMCGS, 0x500: Memcg(0x500, "/", 5, "online", None, 0x500)}
    view.add("sample", made_sample(20.0, 1, others))
    view.key("enter")
    assert view.options.inside == MemcgKey("/", 1)


def test_what_fails_is_told_and_what_was_read_stays() -> None:
    view = view_of_two()
    assert view.is_whole()
    view.add("sample", Failed("the guest is gone"))
    assert state(view).startswith("sample failed: the guest is gone")
    assert view.page().is_alarm
    assert not view.is_whole()
    assert len(labels(view)) == 3
    view.add("sample", made_sample(20.0, 1))
    assert view.is_whole()
    # One that was cancelled has not failed. One that has is told until it succeeds.
    view.add("audit", Failed(""))
    assert view.is_whole()
    view.add("audit", Failed("no memory"))
    view.add("sample", made_sample(30.0, 1))
    assert "audit failed: no memory" in state(view)


def test_what_was_not_read_is_counted() -> None:
    view = view_of_two()
    view.add("sample", dataclasses.replace(made_sample(20.0, 1), unread=3))
    assert state(view).startswith("3 not read")
    assert not view.is_whole()


def test_the_clock_is_that_of_the_data() -> None:
    view = view_of_two()
    before = view.page().title[0]
    press(view, "down", "i")
    assert view.page().title[0] == before
    view.add("sample", made_sample(15.0, 1))
    assert view.page().title[0] != before


def test_rates_over_a_long_time_are_told() -> None:
    view = view_of_two()
    assert "rates over" not in state(view)
    view.add("sample", made_sample(114.0, 1))
    assert "rates over 100 s" in state(view)


def test_an_audit_marks_memcgs() -> None:
    view, found = view_of_two(), report("/app")
    press(view, "a")
    assert view.wanted() == ["audit"]
    view.doing = "audit"
    assert "auditing ... (Esc cancels)" in state(view)
    press(view, "escape")
    assert view.cancelled() == ["audit"]
    view.doing = None
    (finding,) = found.findings
    memcgs = tuple(
        dataclasses.replace(some, cgroup_id=7) if some.path == "/app" else some
        for some in found.memcgs
    )
    view.add("audit", dataclasses.replace(found, memcgs=memcgs, findings=(finding,)))
    marks = {line.label: line.marks for line in view.page().lines}
    assert marks == {"/": "", "/app": "!", "/app/gone": "D"}
    assert "FINDINGS, 1 findings" in state(view)
    assert view.page().is_alarm
    # Another memcg at its address, or at its path, is not marked.
    others = {**MEMCGS, APP: dataclasses.replace(MEMCGS[APP], cgroup_id=8)}
    view.add("sample", made_sample(20.0, 1, others))
    assert {line.marks for line in view.page().lines} == {"", "D"}


def test_help_and_the_end() -> None:
    view = view_of_two()
    press(view, "h")
    assert view.help_part() == 0
    press(view, "q")
    assert (view.help_part(), view.is_ended) == (1, False)
    view.close_help()
    press(view, "q")
    assert view.is_ended


def test_nobody_is_there_any_more() -> None:
    for before in ("h", "/", "x"):
        view = view_of_two()
        press(view, before, GONE)
        assert view.is_ended
