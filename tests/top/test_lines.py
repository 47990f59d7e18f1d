# SPDX-License-Identifier: LGPL-2.1-or-later
"""The lines of top: amounts, rates and their order."""

from __future__ import annotations

import dataclasses

import pytest
from support.made_samples import APP, GONE, MEMCGS, ROOT, made_sample
from support.made_snapshots import snapshot

from memcg_inspect.checks.counters import Counters
from memcg_inspect.collect.counter_sample import item_names
from memcg_inspect.model_snapshot import MemcgKey, SavedSite, SavedSlab
from memcg_inspect.top.lines import (
    Line,
    Walk,
    detail_lines,
    is_there,
    memcg_lines,
    sorted_lines,
)

#: The memcgs of made snapshots have the IDs 1, 2 and so on.
EVERYTHING, IN_APP = MemcgKey("/", 1), MemcgKey("/app", 2)


def test_memcgs_by_node_with_rates() -> None:
    before, now = made_sample(10.0, 1000), made_sample(14.0, 5000)
    root, app, gone = memcg_lines(now, before, "slab", faults=[MemcgKey("/app", 7)])
    assert app == Line(("/app", 7, APP), "/app", "!", 5000, 1000.0, (0, 5000))
    # What is pending of a descendant counts.
    assert (root.total, root.nodes) == (5000, (0, 5000))
    assert (gone.marks, gone.total, gone.rate) == ("D", 0, 0.0)
    assert [line.rate for line in memcg_lines(now, None, "slab")] == [None] * 3
    assert memcg_lines(now, None, "kernel_stack")[1].total == 2048


def test_no_rate_of_a_memcg_that_is_new_at_its_address() -> None:
    now = made_sample(14.0, 5000)
    others = {**MEMCGS, APP: dataclasses.replace(MEMCGS[APP], cgroup_id=8)}
    assert memcg_lines(now, made_sample(10.0, 1000, others), "slab")[1].rate is None


def test_the_page_counter() -> None:
    now = made_sample(0.0, 1000)
    root, app, _ = memcg_lines(now, None, "current")
    assert (app.total, app.nodes) == (8192, (None, None))
    assert root.total is None
    assert item_names(now) == ("slab", "current", "kernel_stack")
    assert now.amount(APP, "nothing like it") is None


def test_a_counter_that_was_not_read_is_not_0() -> None:
    now = made_sample(0.0, 1000)
    counters = Counters(MEMCGS, {ROOT: {}, APP: {}, GONE: {}}, {}, (0, 1))
    lost = dataclasses.replace(now, _counters=counters)
    assert [line.total for line in memcg_lines(lost, None, "slab")] == [None] * 3


def test_what_a_memcg_is_charged_for() -> None:
    charges = {
        ("/app", 0, "slab"): 640,
        ("/app/x", 1, "slab"): 64,
        ("/apple", 1, "slab"): 6400,
        ("/app", 1, "lru"): 4096,
    }
    now = Walk(20.0, 0.0, snapshot(charges))
    before = Walk(10.0, 0.0, snapshot({("/app", 0, "slab"): 320, ("/app", 0, "sock"): 50}))
    lines = {line.label: line for line in detail_lines(now, before, IN_APP, "kinds", (0, 1))}
    assert lines["slab"] == Line(("slab",), "slab", "", 704, 38.4, (640, 64))
    assert lines["lru"].rate == 409.6
    # What is gone is a line with 0.
    assert (lines["sock"].total, lines["sock"].rate) == (0, -5.0)
    (cache,) = detail_lines(now, None, IN_APP, "caches", (0, 1))
    assert (cache.label, cache.total, cache.rate) == ("kmalloc-64", 704, None)
    everything = {
        line.label: line.total for line in detail_lines(now, None, EVERYTHING, "kinds", ())
    }
    assert everything == {"slab": 7104, "lru": 4096}
    assert detail_lines(now, None, IN_APP, "call sites", ()) == []
    site = SavedSite(1, 0, "slab", "mm/x.c:1 f", 128, 2)
    profiled = Walk(1.0, 0.0, dataclasses.replace(now.snapshot, sites=(site,)))
    assert detail_lines(profiled, None, EVERYTHING, "call sites", (0,))[0].total == 128


def test_caches_of_no_memcg_are_nobodys() -> None:
    found = dataclasses.replace(
        snapshot({("/app", 0, "slab"): 64}), slabs=(SavedSlab(None, 0, "dentry", 192, 1),)
    )
    assert detail_lines(Walk(0.0, 0.0, found), None, EVERYTHING, "caches", (0,)) == []


def test_another_memcg_of_the_same_path() -> None:
    charges = {("/app", 0, "slab"): 640, ("/app/x", 0, "slab"): 64}
    found = snapshot(charges, dying=["/app"])
    now = Walk(20.0, 0.0, found)
    # The one that was removed has nothing of the one that is there now.
    assert is_there(now, MemcgKey("/app", None))
    removed = detail_lines(now, None, MemcgKey("/app", None), "kinds", (0,))
    assert [line.total for line in removed] == [64]
    # One that is gone, and another one is at its path.
    assert not is_there(now, MemcgKey("/app", 99))
    assert detail_lines(now, None, MemcgKey("/app", 99), "kinds", (0,)) == []
    # A rate is since the same memcg was seen.
    before = dataclasses.replace(found, memcgs=(*found.memcgs[:1], *found.memcgs[2:]))
    (line,) = detail_lines(now, Walk(10.0, 0.0, before), IN_APP, "kinds", (0,))
    assert (line.total, line.rate) == (704, None)


def test_what_may_be_missing_is_not_0() -> None:
    charges = {("/app", 0, "slab"): 640, ("/app", 0, "lru"): 4096}
    whole = Walk(10.0, 0.0, snapshot(charges))
    found = snapshot({("/app", 0, "lru"): 4096}, missing={"slab": "left out"})
    found = dataclasses.replace(found, memcgs=whole.snapshot.memcgs)
    lines = {x.label: x for x in detail_lines(Walk(20.0, 0.0, found), whole, IN_APP, "kinds", (0,))}
    assert (lines["slab"].total, lines["slab"].rate, lines["slab"].nodes) == (None, None, (None,))
    assert (lines["lru"].total, lines["lru"].rate, lines["lru"].nodes) == (4096, 0.0, (4096,))
    (cache,) = detail_lines(Walk(20.0, 0.0, found), whole, IN_APP, "caches", (0,))
    assert (cache.total, cache.rate) == (None, None)


def test_what_is_on_no_node() -> None:
    found = snapshot({("/app", 0, "lru"): 1})
    sock = found.charges[0]._replace(node=None, kind="sock", what="TCP", bytes=100)
    found = dataclasses.replace(found, charges=(sock, sock._replace(node=1, bytes=7)))
    (line,) = detail_lines(Walk(0.0, 0.0, found), None, EVERYTHING, "kinds", (0, 1))
    assert (line.label, line.total, line.nodes) == ("sock TCP", 107, (None, 7))


LINES = [
    Line(("b",), "b", "", 10, -5.0, (1, 9)),
    Line(("a",), "a", "", 10, None, (9, 1)),
    Line(("c",), "c", "", None, 0.0, (None, None)),
    Line(("d",), "d", "", 20, 7.0, (3, 0)),
]


@pytest.mark.parametrize(
    ("by", "labels"),
    [
        ("name", "abcd"),
        ("total", "dabc"),
        # Those whose rate is not known are the last.
        ("rate", "dcba"),
        ("node 1", "badc"),
        ("node 7", "dabc"),
    ],
)
def test_order(by: str, labels: str) -> None:
    assert "".join(line.label for line in sorted_lines(LINES, by, (0, 1))) == labels


@pytest.mark.parametrize(("by", "labels"), [("name", "dcba"), ("total", "abdc"), ("rate", "bcda")])
def test_the_other_way_round(by: str, labels: str) -> None:
    lines = sorted_lines(LINES, by, (0, 1), is_reversed=True)
    assert "".join(line.label for line in lines) == labels
