# SPDX-License-Identifier: LGPL-2.1-or-later
"""How much a CPU that stopped in the middle of a charge may explain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.made import A
from support.made_charges import image

from memcg_inspect.checks.identities.usage import usage_rows
from memcg_inspect.checks.inflight import mark_in_flight
from memcg_inspect.model import Running
from memcg_inspect.report import Row

FREEING = ("lru_gen_add_folio", "folio_batch_move_lru", "exit_mmap")


def off_by(pages: int, *cpus: Running) -> Row:
    """The row of ``/a``, of which the page counter is off by so many pages."""
    sound = image()
    made = replace(sound, usage={**sound.usage, A: sound.usage[A] + pages}, running=cpus)
    [row] = [row for row in mark_in_flight(made, usage_rows(made)) if row.memcg == A]
    return row


def cpu(number: int, functions: tuple[str, ...], pages: int | None, busy: bool = True) -> Running:
    return Running(number, 7, "sh", functions, busy, pages)


# a batch of charges, a batch of folios, and the folios that its stack points to
@pytest.mark.parametrize("pages", [64 + 31, 64 + 31 + 8, 64 + 31 + 512])
def test_no_more_than_a_batch_and_what_is_on_the_stack(pages: int) -> None:
    one = cpu(0, FREEING, pages - 95)
    assert off_by(pages, one).status == "in-flight"
    assert off_by(pages + 1, one).status == "differs"
    assert off_by(-pages - 1, one).status == "differs"
    # two of them may have left as much each
    assert off_by(pages + 1, one, cpu(1, FREEING, 0)).status == "in-flight"


def test_cpus_that_make_no_such_charges_explain_nothing() -> None:
    assert off_by(
        1, cpu(0, ("osq_lock", "do_unlinkat", "rwsem_down_write_slowpath"), 9)
    ).status == ("differs")
    assert off_by(1, cpu(0, FREEING, 9, busy=False)).status == "differs"
    assert off_by(1).status == "differs"


def test_a_stack_that_is_not_in_the_image_may_have_held_anything() -> None:
    """It explains at most a batch of huge pages."""
    assert off_by(10_000, cpu(0, (), None)).status == "in-flight"
    assert off_by(20_000, cpu(0, (), None)).status == "differs"


def test_the_reason_names_each_cpu_and_its_bound() -> None:
    reason = off_by(1, cpu(0, FREEING, 8), cpu(3, FREEING, 0)).reason
    assert reason == (
        "at most 103 pages of CPU 0 (sh, 7), in lru_gen_add_folio; "
        "at most 95 pages of CPU 3 (sh, 7), in lru_gen_add_folio"
    )
