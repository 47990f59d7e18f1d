# SPDX-License-Identifier: LGPL-2.1-or-later
"""The kernel's own tests: with and without the patches they end the same."""

from __future__ import annotations

import pytest
from labkit import kselftests

RUNS = 3
#: Tests that do not end the same in all guests of the same kernel: one allows less than the pages
#: that four CPUs have charged in advance, the others count pages that were written meanwhile.
FLAKY = {
    "test_kmem.test_kmem_memcg_deletion",
    "test_zswap.test_no_kmem_bypass",
    "test_zswap.test_zswap_writeback_disabled",
}


def test_results() -> None:
    text = "TAP version 13\n1..3\nok 1 test_one\nnot ok 2 test_two\nok 3 # SKIP test_three\n"
    assert kselftests.parse(text) == {"test_one": "pass", "test_two": "fail", "test_three": "skip"}


def test_log() -> None:
    begins, ends = "[ 1.0] percpu test start\n", "[ 1.1] percpu test done\n"
    assert kselftests.parse_log(begins + ends) == "pass"
    assert kselftests.parse_log(begins + "[ 1.0] WARNING: lib/percpu_test.c:35\n" + ends) == "fail"
    assert kselftests.parse_log(begins) == "fail"


def test_table() -> None:
    old = [{"a.b": "pass"}, {"a.b": "pass"}]
    new = [{"a.b": "pass"}, {"a.b": "fail"}]
    _, row = kselftests.table({"old": old, "new": new}).splitlines()
    assert row.split() == ["a.b", "pass", "1", "of", "2", "pass"]


@pytest.mark.image
@pytest.mark.long
def test_the_patches_change_no_result() -> None:
    """Tests that do not end the same in three runs without the patches say nothing either."""
    plain, patched = (kselftests.results(kernel, RUNS) for kernel in kselftests.KERNELS)
    steady = {name for name in plain[0] if len({run[name] for run in plain}) == 1}
    steady -= FLAKY
    assert len(steady) >= 25
    assert plain[0]["percpu_test"] == "pass"
    assert {name: [run[name] for run in patched] for name in steady} == {
        name: [plain[0][name]] * RUNS for name in steady
    }
