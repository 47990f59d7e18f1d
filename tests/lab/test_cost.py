# SPDX-License-Identifier: LGPL-2.1-or-later
"""The table of the cost of per-node accounting, and that its values were measured."""

import pytest
from labkit import cost
from labkit.cost import Guest
from labkit.errors import LabError


def test_what_the_module_says() -> None:
    text = "64 0 16000\n64 1 32000\n8192 0 160000\n8192 1 176000\n"
    assert cost.parse(text) == {
        (64, False): 1000, (64, True): 2000, (8192, False): 10000, (8192, True): 11000,
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "64 0 0\n64 1 32000\n"])
def test_nothing_measured_is_an_error(text: str) -> None:
    with pytest.raises(LabError, match="measured nothing"):
        cost.parse(text)


def test_ratios() -> None:
    costs = {
        Guest("old", 1, 4): {(64, False): 1000.0, (64, True): 1500.0},
        Guest("new", 1, 4): {(64, False): 1000.0, (64, True): 3000.0},
        Guest("old", 2, 4): {(64, False): 2000.0, (64, True): 2100.0},
        Guest("new", 2, 4): {(64, False): 2000.0, (64, True): 2050.0},
    }
    places = {(1, 4): ("old", "new"), (2, 4): ("old", "new")}
    _, head, one, two = cost.table(costs, places).splitlines()
    assert head.split() == ["nodes", "CPUs", "bytes", "old", "old", "new", "added"]
    # three times as many instructions as without accounting, of which 2,000 instead of 500
    assert one.split() == ["1", "4", "64", "1,000", "1.50", "x", "3.00", "x", "4.00", "x"]
    assert two.split() == ["2", "4", "64", "2,000", "1.05", "x", "1.02", "x", "0.50", "x"]


@pytest.mark.long
def test_accounting_costs_instructions_and_the_same_each_time() -> None:
    lab, pernode = (cost.measure(Guest(kernel, 2, 4)) for kernel in cost.KERNELS)
    for size in (64, 256, 1024, 4096, 8192):
        assert lab[size, False] < lab[size, True]
        # pages of two nodes are walked
        assert lab[size, True] < pernode[size, True]
    again = cost.measure(Guest("7.3-lab", 2, 4))
    assert again == {key: pytest.approx(value, rel=0.01) for key, value in lab.items()}
