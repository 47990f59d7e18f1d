# SPDX-License-Identifier: LGPL-2.1-or-later
"""What changed between snapshots that are made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.made_snapshots import BOOT, image, snapshot

from memcg_inspect.model_snapshot import ChargeSnapshot
from memcg_inspect.snapshots.diff import Named, compared, largest_growth
from memcg_inspect.tables import Answer, NotRead, UsageError

HOUR = 3600


def ask(*snapshots: ChargeSnapshot, by: tuple[str, ...] | None = None) -> Answer:
    return compared([Named(f"s{n}", some) for n, some in enumerate(snapshots)], by)


def rows(answer: Answer, table: int = 0) -> list[dict[str, Any]]:
    return [answer.tables[table].values(row) for row in answer.tables[table].rows]


def test_growth_by_memcg_node_and_kind() -> None:
    before = snapshot({("/a", 0, "slab"): 640, ("/a", 1, "lru"): 4096, ("/b", 0, "lru"): 5})
    after = snapshot({("/a", 0, "slab"): 1280, ("/b", 0, "lru"): 5}, uptime=100 + 2 * HOUR)
    answer = ask(before, after)
    assert [table.name for table in answer.tables] == [
        "growth_memcg_node_kind",
        "growth_memcg_cache",
        "memcgs",
        "conservation",
        "snapshots",
    ]
    assert rows(answer) == [
        {
            "memcg": "/a",
            "node": 0,
            "kind": "slab",
            "before": 640,
            "after": 1280,
            "growth": 640,
            "number_growth": 10,
            "per_hour": 320,
        },
        {
            "memcg": "/a",
            "node": 1,
            "kind": "lru",
            "before": 4096,
            "after": 0,
            "growth": -4096,
            "number_growth": -64,
            "per_hour": -2048,
        },
    ]
    assert answer.is_whole
    assert "From the first snapshot to the last: 7,200 seconds." in answer.notes


def test_dimensions_are_added_up() -> None:
    before = snapshot({("/a", 0, "slab"): 640, ("/a", 1, "slab"): 64, (None, 0, "slab"): 64})
    after = snapshot({("/a", 0, "slab"): 1280, ("/b", 1, "slab"): 64, (None, 0, "slab"): 128}, 200)
    (row,) = rows(ask(before, after, by=("cache",)))
    assert (row["cache"], row["before"], row["after"]) == ("kmalloc-64", 768, 1472)
    found = {row["memcg"]: row["growth"] for row in rows(ask(before, after, by=("memcg",)))}
    assert found == {"/a": 576, "/b": 64}
    found = {row["memcg"]: row["growth"] for row in rows(ask(before, after, by=("memcg", "cache")))}
    assert found == {"/a": 576, "/b": 64, None: 64}


def test_memcgs_that_are_new_or_gone() -> None:
    before = snapshot({("/a", 0, "slab"): 640, ("/a", 1, "lru"): 4, ("/c", 0, "lru"): 1})
    after = snapshot({("/b", 0, "slab"): 64, ("/c", 0, "lru"): 1}, 200, dying=["/a"])
    assert rows(ask(before, after), 2) == [
        {"memcg": "/a", "change": "gone", "bytes": 644},
        {"memcg": "/b", "change": "new", "bytes": 64},
    ]
    (_, last) = rows(ask(before, after), 4)
    assert (last["memcgs"], last["dying"], last["bytes"]) == (4, 1, 65)


def test_call_sites_are_compared_if_both_have_them() -> None:
    before = snapshot({}, sites={"a.c:1 f": 10, "b.c:2 g": 5})
    after = snapshot({}, 200, sites={"a.c:1 f": 30, "b.c:2 g": 5})
    answer = ask(before, after)
    assert answer.tables[2].name == "growth_site"
    assert [(row["site"], row["growth"]) for row in rows(answer, 2)] == [("a.c:1 f", 20)]
    with pytest.raises(UsageError, match="not all of these kernels profile"):
        ask(before, snapshot({}), by=("site",))


@pytest.mark.parametrize(
    ("by", "why"),
    [
        (("cache", "kind"), "--by cache can be combined with memcg and node only"),
        (("site", "what"), "--by site can be combined with memcg, node and kind only"),
        (("cache", "site"), "--by cache can be combined with memcg and node only"),
    ],
)
def test_dimensions_that_no_part_has(by: tuple[str, ...], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        ask(snapshot({}), snapshot({}), by=by)


@pytest.mark.parametrize(
    ("after", "note"),
    [
        (snapshot({("/a", 0, "lru"): 9}, None), "The time of a snapshot is not known"),
        (snapshot({("/a", 0, "lru"): 9}, 50), "The second snapshot is older than the first"),
        (snapshot({("/a", 0, "lru"): 9}, 100), "Two snapshots are of the same time"),
    ],
)
def test_without_times_there_are_no_rates(after: ChargeSnapshot, note: str) -> None:
    answer = ask(snapshot({("/a", 0, "lru"): 3}), after)
    assert [row["per_hour"] for row in rows(answer)] == [None]
    assert any(note in some for some in answer.notes)


def test_another_boot_is_told_and_its_time_counts() -> None:
    before = snapshot({("/a", 0, "lru"): 3}, 7000)
    after = snapshot({("/a", 0, "lru"): 9}, 100, boot=BOOT + 7000 + 3500, release="7.4")
    answer = ask(before, after)
    assert [row["per_hour"] for row in rows(answer)] == [6]
    assert "From the first snapshot to the last: 3,600 seconds." in answer.notes
    assert "The machine was booted in between." in answer.notes
    assert any("several kernels" in note for note in answer.notes)


def test_a_clock_that_was_set_is_no_boot() -> None:
    """Of one boot, the monotonic clock counts."""
    before = snapshot({("/a", 0, "lru"): 3}, 100)
    answer = ask(before, snapshot({("/a", 0, "lru"): 9}, 100 + HOUR, boot=BOOT + 30))
    assert [row["per_hour"] for row in rows(answer)] == [6]
    assert not any("booted" in note for note in answer.notes)


LRU = {"lru": "lru memory is not all in the image"}


def test_what_was_not_read_is_not_zero() -> None:
    """What was found of it is shown, and no growth follows from that."""
    before = snapshot(
        {("/a", 0, "lru"): 3, ("/a", 0, "slab"): 64}, unread={"pages": 2}, missing=LRU
    )
    after = snapshot({("/a", 0, "lru"): 9, ("/b", 0, "lru"): 4096, ("/a", 0, "slab"): 128}, 200)
    for pair in ((before, after), (after, before)):
        answer = ask(*pair)
        assert not answer.is_whole
        found = {(row["memcg"], row["kind"]): row for row in rows(answer)}
        name = "s0" if pair[0] is before else "s1"
        unknown = NotRead(f"lru memory is not all in the image ({name})")
        for path in ("/a", "/b"):
            for column in ("growth", "number_growth", "per_hour"):
                assert found[path, "lru"][column] == unknown
        known = "before" if pair[0] is before else "after"
        assert found["/b", "lru"][known] == unknown
        assert found["/a", "lru"][known] == 3
        assert abs(found["/a", "slab"]["growth"]) == 64
        assert any("is not whole; not read: 2 of pages." in note for note in answer.notes)
        # Sums over all kinds are not known, either.
        assert {type(row["growth"]) for row in rows(ask(*pair, by=("memcg",)))} == {NotRead}
        assert [type(row["growth"]) for row in rows(ask(*pair, by=("cache",)))] == [int]


def test_a_memcg_that_could_not_be_read_is_not_gone() -> None:
    before = snapshot({("/a", 0, "lru"): 3}, unread={"memcgs": 1})
    after = snapshot({("/b", 0, "lru"): 3}, 200)
    assert [row["change"] for row in rows(ask(before, after), 2)] == ["gone"]
    assert [row["change"] for row in rows(ask(after, before), 2)] == ["new"]
    assert rows(ask(before, replace(after, unread={"names": 1})), 2) == []


def test_of_one_boot_or_of_several() -> None:
    """The ID of the boot decides. Without it, the time of the boot does, and the host."""
    here = snapshot({}, 100, boot_id="a")
    for other, note in (
        (snapshot({}, 200, boot_id="a", boot=BOOT + 9999), None),
        (snapshot({}, 200, boot_id="b"), "The machine was booted in between."),
        (snapshot({}, 200), None),
        (snapshot({}, 200, boot=BOOT + 9999), "The machine was booted in between."),
        (replace(snapshot({}, 200), image=image(host="db")), "They are of several machines."),
    ):
        notes = ask(here, other).notes
        told = [some for some in notes if "booted" in some or "machines" in some]
        assert told == ([] if note is None else [note])


def test_snapshots_that_are_not_in_order() -> None:
    with pytest.raises(UsageError, match="s2 is older than s1: name the older ones first"):
        ask(snapshot({}, 100), snapshot({}, 200), snapshot({}, 150))


def test_trends_tell_a_leak_from_noise() -> None:
    noise = [0, 900, 200, 800, 100, 950, 300, 700]
    some = [
        snapshot({("/leak", 1, "kmem"): 4096 * n, ("/noise", 0, "lru"): noise[n],
                  ("/still", 0, "lru"): 77, ("/late", 0, "lru"): 10_000 * (n == 7)}, 100 + 60 * n)
        for n in range(8)
    ]  # fmt: skip
    answer = ask(*some)
    assert answer.tables[0].name == "trend_memcg_node_kind"
    leak, *others = rows(answer)
    assert leak == {
        "memcg": "/leak",
        "node": 1,
        "kind": "kmem",
        "first": 0,
        "last": 7 * 4096,
        "per_hour": 4096 * 60,
        "low": 4096 * 60,
        "high": 4096 * 60,
        "grew": 7,
        "windows": 7,
        "grows": True,
    }
    assert [(row["memcg"], row["grows"]) for row in others] == [("/noise", False), ("/late", False)]


def test_a_trend_leaves_out_what_was_not_read() -> None:
    some = [
        snapshot({("/a", 0, "lru"): 100}, 0),
        snapshot({}, 60, missing=LRU),
        snapshot({("/a", 0, "lru"): 200}, 120),
    ]
    (row,) = rows(ask(*some))
    assert (row["first"], row["last"], row["windows"], row["per_hour"]) == (100, 200, 1, 3000)
    some[2] = snapshot({}, 120, missing=LRU)
    assert rows(ask(*some)) == []


def test_a_trend_without_times_has_no_rates() -> None:
    answer = ask(*(snapshot({("/a", 0, "lru"): 10 * n}, None) for n in range(4)))
    (row,) = rows(answer)
    assert (row["grew"], row["windows"], row["per_hour"], row["low"]) == (3, 3, None, None)


def test_the_largest_growth() -> None:
    before = snapshot({("/a", 0, "slab"): 640, ("/b", 0, "lru"): 5})
    after = snapshot({("/a", 0, "slab"): 700, ("/b", 0, "lru"): 500})
    most = largest_growth(before, after)
    assert most is not None
    assert (most.memcg, most.growth) == ("/b", 495)
    assert largest_growth(after, before) is None
    assert largest_growth(after, after) is None
