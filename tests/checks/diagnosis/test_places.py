# SPDX-License-Identifier: LGPL-2.1-or-later
"""The words of memory that a wrong counter can be in, and events that change several of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from memcg_inspect.checks.diagnosis.at_once import AtOnce, at_once
from memcg_inspect.checks.diagnosis.cause import Hypothesis
from memcg_inspect.checks.diagnosis.differences import Signature
from memcg_inspect.checks.diagnosis.places import array_name, places, words_of
from memcg_inspect.checks.diagnosis.search import Explanation
from memcg_inspect.model_counters import CounterArray, CounterWord

A, B = 0xA000, 0xB000


def wrong(cause: str = "counter", place: str = "folded", **known: Any) -> Hypothesis:
    first = {"memcgs": (A,), "objcgs": (), "nid": 1, "item": "NR_X", "amount": 100, "unit": "bytes"}
    return Hypothesis(cause, **{**first, "signature": Signature({}), **known}, place=place)


def explained(*causes: Hypothesis) -> list[Explanation]:
    return [Explanation(cause, (), True) for cause in causes]


def word(
    array: CounterArray, item: str = "NR_X", address: int = 0x8000, **known: Any
) -> CounterWord:
    return CounterWord(array, item, address, 8, **{"memcg": A, "nid": 1, **known})


def numbers(h: Hypothesis, *words: CounterWord) -> list[CounterWord]:
    return [found for found, _ in places(dict(enumerate(explained(h))), words)]


STATE, PENDING, CPU = word("state"), word("state_pending", pending=100), word("percpu", pending=100)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("folded", [STATE]),
        ("handed up", [PENDING]),
        ("cpu", [CPU]),
        ("folded, cpu", [STATE, CPU]),
        ("cpu, folded, handed up", [STATE, PENDING, CPU]),
    ],
)
def test_a_counter_is_in_the_array_of_its_place(place: str, words: list[CounterWord]) -> None:
    assert numbers(wrong(place=place), STATE, PENDING, CPU, word("state_local")) == words


def test_the_counter_of_a_zone() -> None:
    """A row may compare the sum of several."""
    items = [f"NR_ZONE_{which}_ANON[ZONE_NORMAL]" for which in ("INACTIVE", "ACTIVE")]
    words = [word("zone_stat", item, memcg=None) for item in items]
    other = word("zone_stat", items[0].replace("NORMAL", "DMA"), memcg=None)
    both = " + ".join((items[0].partition("[")[0], items[1]))
    cause = wrong("zone-counter", "the value of the zone", memcgs=(), item=both)
    assert numbers(cause, *words, other) == words


@pytest.mark.parametrize(
    ("cause", "found"),
    [
        ("local-counter", word("state_local")),
        ("lru-size", word("lists")),
        ("node-counter", word("vm_stat", memcg=None)),
        ("page-counter", word("page_counter", nid=None)),
    ],
)
def test_other_counters_are_in_arrays_of_their_own(cause: str, found: CounterWord) -> None:
    arrays: tuple[CounterArray, ...] = ("state", "state_local", "lists", "vm_stat", "page_counter")
    words = [word(array, memcg=m, nid=n) for array in arrays for m in (A, None) for n in (1, None)]
    assert numbers(wrong(cause), *words) == [found]


def test_a_word_is_of_the_same_counter_memcg_and_node() -> None:
    others = (word("state", "NR_Y"), word("state", memcg=B), word("state", nid=0))
    assert numbers(wrong(), *others, word("state", nid=None)) == []
    assert numbers(wrong(nid=None), STATE, word("state", nid=None)) == [word("state", nid=None)]


def test_any_node_may_have_the_word_if_no_row_shows_the_node() -> None:
    of_a_node = wrong(nid=None, place="folded of a node, handed up of a node")
    assert numbers(of_a_node, STATE, PENDING, word("state", nid=0)) == [
        STATE,
        PENDING,
        word("state", nid=0),
    ]


@pytest.mark.parametrize(
    ("amount", "pending", "is_here"),
    [(100, 100, True), (100, 51, True), (100, 50, False), (100, 149, True), (100, 150, False),
     (-100, -60, True), (-100, 100, False), (100, 0, False)],
)  # fmt: skip
def test_the_changes_of_a_cpu_are_about_those_that_are_wrong(
    amount: int, pending: int, is_here: bool
) -> None:
    changed = word("percpu", pending=pending)
    assert numbers(wrong(place="cpu", amount=amount), changed) == ([changed] if is_here else [])


def test_another_cause_in_its_place_has_words_too() -> None:
    others = ((wrong(item="NR_Y"),), (wrong(item="NR_Z"), wrong(item="NR_Z")))
    explanations = {4: Explanation(wrong(), others, False)}
    words = [word("state", item) for item in ("NR_X", "NR_Y", "NR_Z")]
    assert list(places(explanations, words)) == [(words[0], 4), (words[1], 4)]
    # Only those of the first are evidence.
    assert [e.note for e in words_of(explanations, words)[4]] == [
        "NR_X, in the folded counters (state)"
    ]
    assert list(places({}, words)) == []


def test_words_are_evidence() -> None:
    words = [
        word("percpu", address=0x8000, cpu=0, pending=90),
        word("percpu", address=0x9000, cpu=3, pending=100),
    ]
    explanations = dict(enumerate(explained(wrong(place="cpu"), wrong(item="NR_NOWHERE"))))
    found = words_of(explanations, words)
    assert list(found) == [0]
    assert [(e.address, e.kind, e.nid, e.note) for e in found[0]] == [
        (0x9000, "counter", 1, "NR_X, in the counters of CPU 3 (state)"),
        (0x8000, "counter", 1, "NR_X, in the counters of CPU 0 (state)"),
    ]


@pytest.mark.parametrize(
    ("array", "name"),
    [
        ("state", "folded counters (state)"),
        ("state_pending", "what children handed up (state_pending)"),
        ("state_local", "local counters (state_local)"),
        ("percpu", "counters of CPU 2 (state)"),
        ("lists", "sizes of LRU lists"),
        ("vm_stat", "counters of the node (vm_stat)"),
        ("page_counter", "page counters"),
    ],
)
def test_arrays_have_names(array: CounterArray, name: str) -> None:
    assert array_name(word(array, cpu=2)) == name


# Ranges

ITEMS = ("NR_A", "NR_B", "NR_C", "NR_D")


def in_a_row(array: CounterArray, apart: Sequence[int], **known: Any) -> list[CounterWord]:
    """Return words that begin so many bytes after each other."""
    found, at = [], 0x8000
    for item, distance in zip(ITEMS, (0, *apart), strict=False):
        at += distance
        found.append(word(array, item, at, **known))
    return found


def events(causes: Sequence[Hypothesis], words: Sequence[CounterWord] = ()) -> list[AtOnce]:
    return at_once(explained(*causes), words)


def test_a_range_is_named_with_its_memcg_and_node() -> None:
    causes = [wrong(item=item) for item in ITEMS[:3]]
    [found] = events(causes, in_a_row("state", (8, 8)))
    assert found.what == (
        "3 neighbouring words of memcg 0xa000 on node 1 are wrong at once, in the folded counters "
        "(state): something overwrote this memory"
    )
    assert (found.cause, found.numbers, found.memcgs, found.nid) == (
        "overwritten",
        (0, 1, 2),
        (A,),
        1,
    )
    assert (found.amount, found.unit, found.unfolded, found.functions) == (24, "bytes", 0, ())
    assert [(e.address, e.kind, e.note) for e in found.evidence] == [
        (0x8000, "counters", "up to 0x8018: NR_A to NR_C")
    ]


def test_a_range_of_a_node_or_of_a_whole_memcg() -> None:
    causes = [wrong("node-counter", "", memcgs=(), item=item) for item in ITEMS[:3]]
    [found] = events(causes, in_a_row("vm_stat", (8, 8), memcg=None))
    assert found.what.startswith(
        "3 neighbouring words on node 1 are wrong at once, in the counters"
    )
    assert (found.memcgs, found.nid) == ((), 1)
    causes = [wrong(nid=None, item=item) for item in ITEMS[:3]]
    [found] = events(causes, in_a_row("state", (8, 8), nid=None))
    assert found.what.startswith("3 neighbouring words of memcg 0xa000 are wrong at once")


@pytest.mark.parametrize(
    ("apart", "number"),
    [((8, 8, 8), 4), ((32, 32, 32), 4), ((32, 33, 8), 0), ((8, 8, 40), 3), ((40, 8, 8), 3)],
)
def test_words_of_a_range_are_at_most_32_bytes_apart(apart: tuple[int, ...], number: int) -> None:
    causes = [wrong(item=item) for item in ITEMS]
    found = events(causes, in_a_row("state", apart))
    assert [len(event.numbers) for event in found] == ([number] if number else [])


@pytest.mark.parametrize("other", [{"memcg": B}, {"nid": 0}, {"cpu": 1}, {"array": "state_local"}])
def test_words_of_a_range_are_in_one_array(other: dict[str, Any]) -> None:
    causes = [wrong(item=item) for item in ITEMS[:3]]
    words = in_a_row("state", (8, 8))
    words[1] = words[1]._replace(**other)
    if "memcg" in other:
        causes[1] = causes[1]._replace(memcgs=(B,))
    elif "nid" in other:
        causes[1] = causes[1]._replace(nid=0)
    elif "array" in other:
        causes[1] = causes[1]._replace(cause="local-counter")
    assert events(causes, words) == []


def test_two_ranges_are_two_events_the_longer_one_first() -> None:
    causes = [wrong(item=item) for item in ITEMS[:3]]
    causes += [wrong(item=item, memcgs=(B,)) for item in ITEMS]
    words = in_a_row("state", (8, 8))
    words += [w._replace(address=w.address + 0x1000, memcg=B) for w in in_a_row("state", (8,) * 3)]
    assert [(e.memcgs, e.numbers) for e in events(causes, words[::-1])] == [
        ((B,), (3, 4, 5, 6)),
        ((A,), (0, 1, 2)),
    ]


@pytest.mark.parametrize(
    ("array", "place", "unfolded"), [("percpu", "cpu", 3), ("state_pending", "handed up", 3)]
)
def test_changes_that_no_flush_knows_of(array: CounterArray, place: str, unfolded: int) -> None:
    causes = [wrong(place=place, item=item) for item in ITEMS[:3]]
    words = in_a_row(array, (8, 8), pending=100, cpu=0)
    [found] = [e for e in events(causes, words) if e.cause == "overwritten"]
    assert found.unfolded == unfolded


# Flushes


def of_a_cpu(number: int, **known: Any) -> list[Hypothesis]:
    return [wrong(place="cpu", item=item, **known) for item in ITEMS[:number]]


def test_a_flush_of_three_counters() -> None:
    [found] = events([*of_a_cpu(3), wrong(item="NR_FOLDED")])
    assert (found.cause, found.numbers, found.memcgs, found.nid) == ("flush", (0, 1, 2), (A,), None)
    assert found.what == (
        "3 counters of memcg 0xa000 are wrong at once (NR_A, NR_B, NR_C): a flush dropped or "
        "doubled what a CPU had changed, or what a child handed up"
    )
    assert (found.amount, found.unit, found.unfolded, found.evidence) == (None, "bytes", 0, ())
    assert found.functions == ("mem_cgroup_css_rstat_flush", "mem_cgroup_stat_aggregate")
    assert events(of_a_cpu(2)) == []
    assert events([*of_a_cpu(2), *of_a_cpu(2, memcgs=(B,))]) == []


def test_local_counters_belong_to_the_flush_of_their_memcg() -> None:
    local = [wrong("local-counter", "", item=item) for item in ("NR_A", "NR_OTHER")]
    elsewhere = wrong("local-counter", "", memcgs=(B,))
    [found] = events([*of_a_cpu(3), *local, elsewhere])
    assert found.numbers == (0, 1, 2, 3, 4)
    assert "4 counters of memcg" in found.what
    assert events([*of_a_cpu(2), *local]) == []


def test_what_some_memcg_lacks_is_that_of_the_only_flush() -> None:
    some = [wrong("counted-wrong", "", memcgs=(), item=item) for item in ("NR_A", "NR_OTHER")]
    [found] = events([*of_a_cpu(3), *some])
    assert found.numbers == (0, 1, 2, 3, 4)
    # Of several flushes, it is that with the same counter.
    other = [h._replace(memcgs=(B,), item=h.item + "_B") for h in of_a_cpu(3)]
    first, second = events([*of_a_cpu(3), *other, *some])
    assert (first.numbers, second.numbers) == ((0, 1, 2, 6), (3, 4, 5))


def test_a_charge_counted_wrong_on_both_levels_is_no_range() -> None:
    """Words of the memcg and of its node are no neighbours, so this is a flush before a range."""
    words = in_a_row("percpu", (8, 8), pending=100, cpu=0)
    both = of_a_cpu(3) + [wrong("counted-wrong", "cpu", item="NR_BOTH")]
    assert [e.cause for e in events(both, words)] == ["flush"]
    assert [e.cause for e in events(of_a_cpu(3), words)] == ["overwritten"]
    elsewhere = wrong("counted-wrong", "cpu", item="NR_BOTH", memcgs=(B,))
    assert [e.cause for e in events([*of_a_cpu(3), elsewhere], words)] == ["overwritten"]
