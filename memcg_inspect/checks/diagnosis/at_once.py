# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Causes: several counters that are wrong at once
-----------------------------------------------

The search finds one cause for each counter. Where that are several of one memcg or node, one event
is likelier: something overwrote neighbouring words, or a flush went wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from memcg_inspect.checks.diagnosis.places import array_name, places
from memcg_inspect.checks.diagnosis.search import Explanation
from memcg_inspect.model import Unit, counted
from memcg_inspect.model_counters import CounterWord
from memcg_inspect.report import Evidence

__all__ = ("CAUSES", "AtOnce", "at_once")

#: Name and meaning, for the list in ``docs/output.md`` (Markdown).
CAUSES = {
    "overwritten": "a range of memory with several counters was overwritten",
    "flush": "several counters of a memcg are wrong as after a flush that dropped or doubled what "
    "a CPU had changed, or what a child handed up",
}
#: The fewest counters of a range. Two faults may be neighbours by coincidence.
_WORDS_OF_A_RANGE = 3
#: The most bytes from one counter of a range to the next: some words are compared with nothing.
_MOST_APART = 32
_FLUSH = ("mem_cgroup_css_rstat_flush", "mem_cgroup_stat_aggregate")


class AtOnce(NamedTuple):
    """
    One event that several causes follow from.

    :ivar cause: name of the cause
    :ivar numbers: indices of the explanations
    :ivar what: one sentence, without paths of memcgs
    :ivar memcgs: ``struct mem_cgroup *`` of the memcg; empty for a node
    :ivar nid: node; ``None`` for none
    :ivar amount: how much is wrong; ``None`` if that is several amounts
    :ivar unit: unit of the amount
    :ivar unfolded: how many counters it leaves with changes that no flush knows of
    :ivar evidence: the range
    :ivar functions: functions of the kernel that can make it
    """

    cause: str
    numbers: tuple[int, ...]
    what: str
    memcgs: tuple[int, ...]
    nid: int | None
    amount: int | None
    unit: Unit
    unfolded: int = 0
    evidence: tuple[Evidence, ...] = ()
    functions: tuple[str, ...] = ()


def at_once(explanations: Sequence[Explanation], words: Iterable[CounterWord]) -> list[AtOnce]:
    """
    Return the events that several of the causes follow from.

    :param words: where counters are, of memcgs and nodes with findings
    """
    left = dict(enumerate(explanations))
    found = list(_flushes(left, both_levels=True))
    left = _without(left, found)
    candidates = sorted(places(left, words), key=lambda pair: pair[0].address)
    while True:
        here = [(word, number) for word, number in candidates if number in left]
        run = max(_runs(here), key=lambda run: len({n for _, n in run}), default=[])
        numbers = {number for _, number in run}
        if len(numbers) < _WORDS_OF_A_RANGE:
            break
        found.append(_overwritten([word for word, _ in run], sorted(numbers)))
        left = _without(left, found)
    return [*found, *_flushes(left, both_levels=False)]


def _without(
    explanations: Mapping[int, Explanation], found: Iterable[AtOnce]
) -> dict[int, Explanation]:
    """Return the explanations that belong to no event."""
    taken = {number for event in found for number in event.numbers}
    return {number: e for number, e in explanations.items() if number not in taken}


def _runs(
    candidates: Sequence[tuple[CounterWord, int]],
) -> Iterator[list[tuple[CounterWord, int]]]:
    """Yield the words that are neighbours, in the same array of the same memcg, node and CPU."""
    run: list[tuple[CounterWord, int]] = []
    for word, number in candidates:
        if run and not _are_neighbours(run[-1][0], word):
            yield run
            run = []
        run.append((word, number))
    if run:
        yield run


def _are_neighbours(one: CounterWord, other: CounterWord) -> bool:
    same = (one.array, one.memcg, one.nid, one.cpu) == (
        *(other.array, other.memcg),
        *(other.nid, other.cpu),
    )
    return same and other.address - one.address <= _MOST_APART


def _overwritten(words: Sequence[CounterWord], numbers: Sequence[int]) -> AtOnce:
    first, last = words[0], words[-1]
    name = array_name(first)
    whose = "" if first.memcg is None else f" of memcg {first.memcg:#x}"
    if first.nid is not None:
        whose += f" on node {first.nid}"
    end = last.address + last.size
    items = list(dict.fromkeys(word.item for word in words))
    return AtOnce(
        cause="overwritten",
        numbers=tuple(numbers),
        what=f"{len(items)} neighbouring words{whose} are wrong at once, in the {name}: something "
        "overwrote this memory",
        memcgs=() if first.memcg is None else (first.memcg,),
        nid=first.nid,
        amount=end - first.address,
        unit="bytes",
        unfolded=len(items) if first.array in ("percpu", "state_pending") else 0,
        evidence=(
            Evidence(
                address=first.address,
                kind="counters",
                note=f"up to {end:#x}: {items[0]} to {items[-1]}",
            ),
        ),
    )


def _flushes(explanations: Mapping[int, Explanation], both_levels: bool) -> Iterator[AtOnce]:
    """
    Yield the memcgs with several counters that are wrong as a flush leaves them.

    :param both_levels: whether one of them must be wrong in the memcg and in its node alike, as no
        range of memory is
    """
    of_memcg: defaultdict[int, list[int]] = defaultdict(list)
    local: defaultdict[int, list[int]] = defaultdict(list)
    of_some: list[int] = []
    both: set[int] = set()
    for number, explanation in explanations.items():
        h = explanation.cause
        if h.cause == "counted-wrong" and not h.memcgs:
            of_some.append(number)
        elif h.cause in ("counter", "counted-wrong") and "cpu" in h.place:
            of_memcg[h.memcgs[0]].append(number)
            both.update(h.memcgs if h.cause == "counted-wrong" else ())
        elif h.cause == "local-counter":
            local[h.memcgs[0]].append(number)
    memcgs = [
        memcg
        for memcg, numbers in of_memcg.items()
        if len(numbers) >= _WORDS_OF_A_RANGE and (memcg in both or not both_levels)
    ]
    for memcg in memcgs:
        numbers = of_memcg[memcg]
        # A flush adds what a CPU changed to the local counters, too. Those of user pages, which
        # are compared with nothing else, are compared with the node. What a child handed up is in
        # no local counter: if no other flush went wrong, what some memcg lacks is this one's.
        numbers += local[memcg]
        items = {explanations[number].cause.item for number in numbers}
        alone = len(memcgs) == 1
        numbers += [n for n in of_some if alone or explanations[n].cause.item in items]
        names = sorted({explanations[number].cause.item for number in numbers})
        yield AtOnce(
            cause="flush",
            numbers=tuple(numbers),
            what=f"{counted(len(names), 'counters')} of memcg {memcg:#x} are wrong at once "
            f"({', '.join(names)}): a flush dropped or doubled what a CPU had changed, or what a "
            "child handed up",
            memcgs=(memcg,),
            nid=None,
            amount=None,
            unit="bytes",
            functions=_FLUSH,
        )
