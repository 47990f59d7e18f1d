# SPDX-License-Identifier: LGPL-2.1-or-later
"""RCU callbacks, in lists made as kernel/rcu/rcu_segcblist.c links them."""

from __future__ import annotations

import pytest
from drgn import FaultError
from support.layouts import MadeImage

from memcg_inspect.linux.kernel.rcu import queued_callbacks

VARIABLES, DATA, HEADS = 0xFFFFFFFF82000000, 0xFFFF888030000000, 0xFFFF888000111000
MISSING = 0xFFFF888077700000


def machine(has_bypass: bool = True) -> MadeImage:
    """Return a machine whose first CPU has three callbacks, and its second one two."""
    image = MadeImage()
    image.declare(
        """
        struct callback_head { struct callback_head *next; void *func; };
        struct rcu_segcblist { struct callback_head *head; void *tails[4]; };
        struct rcu_cblist { struct callback_head *head; void *tail; };
        """
        "struct rcu_data { long gp_seq; struct rcu_segcblist cblist;"
        f"{'struct rcu_cblist nocb_bypass;' if has_bypass else ''} }};"
    )
    image.variable("__per_cpu_offset", "unsigned long[2]", VARIABLES)
    image.words(VARIABLES, DATA, DATA + 0x100000)
    image.variable("rcu_data", "struct rcu_data", 0x10000)
    for cpu in (0, 1):
        image.make("struct rcu_data", DATA + 0x100000 * cpu + 0x10000, {})
    lists(image, 0, HEADS, HEADS + 16, HEADS + 32)
    lists(image, 1, HEADS + 48, HEADS + 64)
    return image


def lists(image: MadeImage, cpu: int, *heads: int, member: int = 8) -> None:
    at = DATA + 0x100000 * cpu + 0x10000 + member
    for place, head in zip((at, *heads), (*heads, 0), strict=True):
        image.words(place, head)


@pytest.mark.parametrize("has_bypass", [True, False])
def test_callbacks_of_all_cpus(has_bypass: bool) -> None:
    assert queued_callbacks(machine(has_bypass)) == {
        **dict.fromkeys((HEADS, HEADS + 16, HEADS + 32), 0),
        **dict.fromkeys((HEADS + 48, HEADS + 64), 1),
    }


def test_callbacks_of_a_cpu_whose_callbacks_a_thread_runs() -> None:
    image = machine()
    lists(image, 1, HEADS + 80, HEADS + 96, member=8 + 40)
    found = queued_callbacks(image)
    assert len(found) == 7
    assert found[HEADS + 80] == found[HEADS + 96] == 1


def test_a_cpu_without_callbacks() -> None:
    image = machine()
    lists(image, 0)
    assert queued_callbacks(image) == {HEADS + 48: 1, HEADS + 64: 1}


@pytest.mark.parametrize("to", [HEADS, HEADS + 16, HEADS + 32])
def test_a_callback_that_is_in_two_places(to: int) -> None:
    image = machine()
    image.words(HEADS + 64, to)
    with pytest.raises(FaultError, match="^a callback is in two lists, or twice in one") as error:
        queued_callbacks(image)
    assert error.value.address == to


def test_a_callback_that_is_not_in_the_image() -> None:
    image = machine()
    image.words(HEADS + 64, MISSING)
    with pytest.raises(FaultError) as error:
        queued_callbacks(image)
    assert error.value.address == MISSING


def test_a_list_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memcg_inspect.linux.kernel.rcu.MOST_CALLBACKS", 3)
    with pytest.raises(FaultError, match="^the list of callbacks does not end"):
        queued_callbacks(machine())
    monkeypatch.setattr("memcg_inspect.linux.kernel.rcu.MOST_CALLBACKS", 4)
    assert len(queued_callbacks(machine())) == 5
