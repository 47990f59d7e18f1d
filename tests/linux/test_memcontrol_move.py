# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a task takes along that moves to another memcg: the variable ``mc`` of mm/memcontrol.c."""

from __future__ import annotations

import pytest
from support.layouts import MadeImage

from memcg_inspect.linux.mm.memcontrol_move import read_moving
from memcg_inspect.model import Coverage
from memcg_inspect.model_kernel import Moving

PLACE, MISSING = 0xFFFFFFFF82000000, 0xFFFF888077700000
FROM, TO = 0xFFFF888030000000, 0xFFFF888030001000
#: ``sizeof(struct move_charge_struct)``
SIZE = 48


def kernel(size: int = SIZE, at: int = PLACE) -> MadeImage:
    """Return a kernel in which a task moves pages, on cgroup v1 up to 6.10."""
    image = MadeImage()
    image.declare(
        """
        struct mem_cgroup { long id; };
        struct move_charge_struct {
            long lock; struct mem_cgroup *from; struct mem_cgroup *to;
            unsigned int precharge; unsigned int moved_charge; unsigned int moved_swap; void *mm;
        };
        """
    )
    image.symbol_at("mc", at, size)
    put(image, FROM, TO)
    return image


def put(image: MadeImage, source: int, target: int) -> None:
    amounts = {"precharge": 3, "moved_charge": 5, "moved_swap": 7}
    image.make("struct move_charge_struct", PLACE, {"from": source, "to": target, **amounts})


@pytest.mark.parametrize("size", [0, SIZE])
def test_what_is_moved(size: int) -> None:
    """kallsyms has no sizes of symbols."""
    coverage = Coverage()
    assert read_moving(kernel(size), (FROM, TO), coverage) == Moving(FROM, TO, 3, 5, 7)
    assert (coverage.read, coverage.unreadable) == (1, 0)


@pytest.mark.parametrize(("source", "target"), [(0, TO), (FROM, 0), (0, 0), (FROM, MISSING)])
def test_nothing_is_moved(source: int, target: int) -> None:
    """mem_cgroup_clear_mc() sets both to NULL; what is no memcg is not moved to or from."""
    image, coverage = kernel(), Coverage()
    put(image, source, target)
    assert read_moving(image, (FROM, TO), coverage) is None
    assert (coverage.read, coverage.unreadable) == (1, 0)


@pytest.mark.parametrize("size", [1, SIZE - 1, SIZE + 1])
def test_a_variable_of_this_name_that_is_another_one(size: int) -> None:
    coverage = Coverage()
    assert read_moving(kernel(size), (FROM, TO), coverage) is None
    assert coverage == Coverage()


def test_kernels_that_do_not_move_pages() -> None:
    """Since 6.11 there is no such type; and kallsyms need not have variables."""
    coverage = Coverage()
    assert read_moving(MadeImage(), (FROM, TO), coverage) is None
    image = kernel()
    del image._symbols["mc"]
    assert read_moving(image, (FROM, TO), coverage) is None
    assert coverage == Coverage()


def test_a_variable_that_is_not_in_the_image() -> None:
    coverage = Coverage()
    assert read_moving(kernel(at=MISSING), (FROM, TO), coverage) is None
    assert coverage.read == 0
    [missed] = coverage.examples
    assert (missed.what, missed.address) == ("struct move_charge_struct", MISSING + 8)
    assert "not made" in missed.reason
