# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Faults planted into every kind of image: stopped at rest, under load, and crashed; as ELF and as
kdump; read with BTF and with DWARF.

A fault is found, exactly. On a machine that was not at rest the row may be unverifiable instead, if
its memcg was under load. It is never EXACT. By default every other planter plants on an image of
one sort; ``scripts/test --all --part reliability`` plants everything, as scripts/reliability
does, and keeps the results for it.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from support import reliability
from support.guests import KERNELS, PERNODE_KERNELS, Lab
from support.reliability import KINDS, Kind, Result, Results, bound, document, size_class

from memcg_inspect.checks.registry import CHECKS

#: One of each sort. Each of them gets a share of the planters, and together they plant every other.
SAMPLE = (
    Kind("7.3", "busy", "elf", "btf"),
    Kind("6.1", "panic", "kdump", "btf"),
    Kind("7.3-lab", "panic", "elf", "btf"),
    Kind("6.1", "settled", "kdump", "dwarf"),
)


def kinds(chosen: Iterable[Kind]) -> list[Kind]:
    """Leave out kernels that are not in the cache."""
    return [kind for kind in chosen if kind.kernel in (*KERNELS, *PERNODE_KERNELS)]


def check(kind: Kind, results: Iterable[Result]) -> None:
    """Nothing is missed, and only rows that a CPU may have been at are unverifiable."""
    wrong = [r for r in results if r.outcome in ("missed", "accused")]
    # A fault cannot be told from a charge of that amount that a CPU was making for this memcg.
    wrong += [r for r in results if r.outcome == "in-flight" and not r.load]
    assert wrong == []
    doubtful = [r for r in results if r.outcome == "unverifiable" and not r.load]
    assert kind.freeze != "settled" or doubtful == []


def again(kind: Kind, lab: Lab, results: list[Result]) -> list[Result]:
    """Return the results. What a stack may explain is planted once more, in other memcgs."""
    if not any(map(reliability.is_by_stack, results)):
        return results
    subject = reliability.subject_of(kind, lab)
    cases = {(c.identity, c.planter.what, *c[2:]): c for c in reliability.cases(subject, kind)}
    return [
        reliability.plant_one(subject, cases[r[:4]]) if reliability.is_by_stack(r) else r
        for r in results
    ]


@pytest.mark.image
@pytest.mark.parametrize("number", range(len(kinds(SAMPLE))), ids=map(str, kinds(SAMPLE)))
def test_faults_are_found_on_an_image_of_each_sort(lab: Lab, number: int) -> None:
    """Each image gets the planters that are its turn."""
    kind = kinds(SAMPLE)[number]
    subject = reliability.subject_of(kind, lab)
    assert subject.report.findings == ()
    once = {(c.identity, c.planter.what): c for c in reliability.cases(subject, kind)}
    mine = list(once.values())[number :: 2 * len(kinds(SAMPLE))]
    results = [reliability.plant_one(subject, case) for case in mine]
    check(kind, results)
    assert sum(r.outcome != "none" for r in results) >= 3


@pytest.mark.image
@pytest.mark.long
@pytest.mark.parametrize("kind", kinds(KINDS), ids=str)
def test_faults_are_found_on_every_image(lab: Lab, kind: Kind) -> None:
    results = reliability.run(kind, lab)
    assert results.twin == []
    check(kind, again(kind, lab, results.results))
    planted = {r.identity for r in results.results if r.outcome != "none"}
    assert len(planted) >= len(CHECKS) - 3


@pytest.mark.parametrize(
    ("missed", "planted", "most"),
    [(0, 1, 0.95), (0, 100, 0.0295), (0, 3000, 0.000998), (1, 10, 0.394)],
)
def test_upper_bounds(missed: int, planted: int, most: float) -> None:
    """From tables of the binomial distribution; 0 of n is 1 - 0.05^(1/n)."""
    assert bound(missed, planted) == pytest.approx(most, rel=0.01)
    assert bound(planted, planted) == 1.0


def test_document() -> None:
    outcomes = [
        Result("slab", "an owner", 0, False, "found"),
        Result("slab", "a counter", -1, True, "unverifiable", "why"),
        Result("kmem", "a counter", 60_000, False, "missed", "why"),
        Result("kmem", "a counter", 5, False, "none", "no victim"),
    ]
    made = [
        Results(Kind("7.3", "busy", "elf", "btf"), [], 1_000, outcomes, 30.0),
        Results(Kind("7.3", "busy", "elf", "dwarf"), [["slab", "ITEM", 8]], 500, outcomes, 30.0),
    ]
    text = document(made, "abc", "2026-01-02").splitlines()
    assert text[0] == "commit abc, 2026-01-02: 1 image, 6 faults, 1 minutes"
    assert text[1] == "2 of 72 kinds of image and types"
    assert text[2].startswith("without a fault: 2 audits, 1,500 rows, 1 finding; ")
    rows = {line.split("  ")[0]: line.split()[-7:] for line in text[4:] if line}
    assert rows["slab"][:5] == ["4", "2", "2", "0", "0"]
    assert rows["kmem"][:5] == ["2", "0", "0", "0", "2"]
    assert rows["dwarf"][:5] == ["3", "1", "1", "0", "1"]


def test_classes_of_sizes() -> None:
    sizes = (0, -1, 2, 99, -100, 9_999, 10_000, 1_000_003)
    assert [size_class(size) for size in sizes] == [
        *("of an object", "1", "2 to 99", "2 to 99", "100 to 9,999", "100 to 9,999"),
        *("10,000 and more", "10,000 and more"),
    ]
