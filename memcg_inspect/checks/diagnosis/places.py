# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The words of memory that a wrong counter can be in
--------------------------------------------------

A counter is in several words: what is folded, what children handed up, and what each CPU has
changed since. Rows tell what was folded from the rest. What is not folded yet is in as many words
as there are CPUs. That one is wrong whose changes are those that are wrong, within half of them:
those of others are small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from memcg_inspect.checks.diagnosis.cause import Hypothesis
from memcg_inspect.checks.diagnosis.search import Explanation
from memcg_inspect.checks.zone_pages import counters_of
from memcg_inspect.model_counters import CounterArray, CounterWord
from memcg_inspect.report import Evidence

__all__ = ("array_name", "places", "words_of")

#: Array, item, memcg and node; ``None`` for any node if the hypothesis has none of several
_Key = tuple[CounterArray, str, int | None, int | None]

_OF_A_NODE = " of a node"
_ARRAYS: Mapping[str, CounterArray] = {
    "folded": "state",
    "handed up": "state_pending",
    "cpu": "percpu",
}
_NAMES: Mapping[CounterArray, str] = {
    "state": "folded counters (state)",
    "state_pending": "what children handed up (state_pending)",
    "state_local": "local counters (state_local)",
    "percpu": "counters of CPU {cpu} (state)",
    "lists": "sizes of LRU lists",
    "vm_stat": "counters of the node (vm_stat)",
    "zone_stat": "counters of the zone (vm_stat)",
    "page_counter": "page counters",
}


def array_name(word: CounterWord) -> str:
    """Return the name of the array that a word is in."""
    return _NAMES[word.array].format(cpu=word.cpu)


def places(
    explanations: Mapping[int, Explanation], words: Iterable[CounterWord]
) -> Iterator[tuple[CounterWord, int]]:
    """Yield the words that each cause, or another one in its place, can be in."""
    by_key: defaultdict[_Key, list[tuple[int, Hypothesis]]] = defaultdict(list)
    for number, explanation in explanations.items():
        alone = [some[0] for some in explanation.others if len(some) == 1]
        for h in (explanation.cause, *alone):
            for key in _keys(h):
                by_key[key].append((number, h))
    for word in words if by_key else ():
        for nid in {word.nid, None}:
            for number, h in by_key.get((word.array, word.item, word.memcg, nid), ()):
                is_here = nid == word.nid or _is_of_a_node(h)
                if is_here and (word.pending is None or _is_due_to(h, word.pending)):
                    yield word, number


def _is_due_to(h: Hypothesis, pending: int) -> bool:
    """Return whether what is to be folded is what is wrong, and some more or less."""
    return 2 * abs(pending - h.amount) < abs(h.amount)


def _keys(h: Hypothesis) -> Iterator[_Key]:
    memcg = h.memcgs[0] if h.memcgs else None
    if h.cause == "counter":
        for place in h.place.removesuffix(_OF_A_NODE).split(", "):
            yield _ARRAYS[place.removesuffix(_OF_A_NODE)], h.item, memcg, h.nid
    elif h.cause == "local-counter":
        yield "state_local", h.item, memcg, h.nid
    elif h.cause == "lru-size":
        yield "lists", h.item, memcg, h.nid
    elif h.cause == "node-counter":
        yield "vm_stat", h.item, None, h.nid
    elif h.cause == "zone-counter":
        for item in counters_of(h.item):
            yield "zone_stat", item + h.item[h.item.find("[") :], None, h.nid
    elif h.cause == "page-counter":
        yield "page_counter", h.item, memcg, None


def _is_of_a_node(h: Hypothesis) -> bool:
    return h.place.endswith(_OF_A_NODE)


def words_of(
    explanations: Mapping[int, Explanation], words: Iterable[CounterWord]
) -> dict[int, tuple[Evidence, ...]]:
    """
    Return the words that the first cause of each explanation can be in.

    A CPU that changed exactly what is wrong comes first.

    :return: by number of the explanation; those that no word of memory is known for are left out
    """
    first = {n: explanation._replace(others=()) for n, explanation in explanations.items()}
    found: defaultdict[int, list[CounterWord]] = defaultdict(list)
    for word, number in places(first, words):
        found[number].append(word)
    return {
        number: tuple(
            Evidence(
                address=word.address,
                kind="counter",
                nid=word.nid,
                note=f"{word.item}, in the {array_name(word)}",
            )
            for word in sorted(some, key=lambda word: word.pending != first[number].cause.amount)
        )
        for number, some in found.items()
    }
