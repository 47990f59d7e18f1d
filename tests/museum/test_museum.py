# SPDX-License-Identifier: LGPL-2.1-or-later
"""Each bug that Linux had is found, and the same guest without it is exact."""

from __future__ import annotations

import pytest
from labkit import kernels
from labkit.programs import MUSEUM
from support import museum
from support.museum import EXHIBITS, LEAK

pytestmark = pytest.mark.image

#: Those of the default run, if their kernels are in the cache.
CHEAP = [n for n in ("objstock-node", "percpu-metadata") if kernels.cached(f"7.3-museum-{n}")]
NAMES = [pytest.param(name, marks=() if name in CHEAP else pytest.mark.long) for name in EXHIBITS]


@pytest.mark.parametrize("name", NAMES)
def test_a_real_bug_is_found(name: str) -> None:
    exhibit, outcome = EXHIBITS[name], museum.run(EXHIBITS[name])
    assert outcome.without == "exact"
    assert outcome.verdict == "findings"
    failed = frozenset(outcome.failed)
    assert exhibit.identities <= failed <= exhibit.identities | exhibit.also


@pytest.mark.long
def test_a_leak_that_no_kernel_has_fixed() -> None:
    """A charged block is freed while somebody else has a reference to its first page."""
    report = museum.image(LEAK, "7.3-lab").report()
    off = {(f.identity, f.item): f.difference for f in report.findings}
    # 50 blocks of four pages, of which one each is uncharged
    assert off == {
        ("kmem", "MEMCG_KMEM"): 150,
        ("hierarchy", "MEMCG_KMEM"): 150,
        ("usage", "memory.usage"): 150,
    }


def test_each_patch_is_an_exhibit() -> None:
    assert {path.stem for path in MUSEUM.glob("*.patch")} == set(EXHIBITS)
    names = {name for name in kernels.names_of_part("museum") if "-museum-" in name}
    assert names == {f"7.3-museum-{name}" for name in EXHIBITS}
    assert len(EXHIBITS) >= 12
