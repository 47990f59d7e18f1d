# SPDX-License-Identifier: LGPL-2.1-or-later
"""What is read of the cgroups of hugetlb."""

from __future__ import annotations

from typing import Any

import pytest
from drgn import FaultError

from memcg_inspect.collect import hugetlb
from memcg_inspect.collect.hugetlb import read_hugetlb
from memcg_inspect.collect.partial import Partial
from memcg_inspect.model import Coverage
from memcg_inspect.model_hugetlb import Hugetlb, HugetlbCgroup, HugetlbSize

IMAGE: Any = None
SIZES = (HugetlbSize("2MB", 9), HugetlbSize("1GB", 18))
ROOT = HugetlbCgroup(0x10, "/", None, True, (512, 0), {(0, 1): 512})


@pytest.fixture(autouse=True)
def readers(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {
        "why_no_hugetlb_cgroups": None,
        "hugetlb_sizes": SIZES,
        "online_nodes": [0, 2],
        "moves_usage": True,
        "is_hugetlb_lock_held": False,
    }
    for name, value in found.items():
        monkeypatch.setattr(hugetlb, name, lambda _, value=value: value)
    monkeypatch.setattr(
        hugetlb,
        "read_hugetlb_cgroups",
        lambda _, sizes, coverage: {0x10: ROOT} if sizes == 2 else {},
    )


def test_cgroups_and_what_they_are_charged_for() -> None:
    total, coverage = Partial(), Coverage()
    total.hugetlb[0x10, 9, 1] = 512
    assert read_hugetlb(IMAGE, total, coverage) == Hugetlb(
        sizes=SIZES,
        cgroups={0x10: ROOT},
        charged={(0x10, 9, 1): 512},
        nids=(0, 2),
        moves_usage=True,
        is_locked=False,
    )
    assert coverage.unreadable == 0


def test_a_kernel_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugetlb, "why_no_hugetlb_cgroups", lambda _: "the controller is off")
    found = read_hugetlb(IMAGE, Partial(), Coverage())
    assert found == Hugetlb(not_kept="the controller is off")


def test_sizes_that_are_not_in_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> Any:
        raise FaultError("not in the image", 0x1230)

    coverage = Coverage()
    monkeypatch.setattr(hugetlb, "hugetlb_sizes", missing)
    assert read_hugetlb(IMAGE, Partial(), coverage) == Hugetlb()
    (missed,) = coverage.examples
    assert (missed.what, missed.address) == ("sizes of huge pages", 0x1230)
