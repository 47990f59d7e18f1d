# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Counts that CPUs and nodes keep parts of, in memory made as lib/percpu-refcount.c and
lib/percpu_counter.c fill it.
"""

from __future__ import annotations

import pytest
from drgn import FaultError, Object
from support.layouts import MadeImage

from memcg_inspect.linux.lib.nodecounter import nodecounter_bound, nodecounter_parts
from memcg_inspect.linux.lib.percpu_counter import percpu_counter_bound, percpu_counter_parts
from memcg_inspect.linux.lib.percpu_refcount import (
    percpu_ref_count,
    percpu_ref_counts,
    percpu_ref_is_dying,
)
from memcg_inspect.linux.mm.mmzone import online_nodes, possible_nodes

VARIABLES, DATA, REFS = 0xFFFFFFFF82000000, 0xFFFF888030000000, 0xFFFF888000111000
#: Where CPUs have their parts, relative to the percpu memory of each.
PARTS = 0x10000
MISSING = 0xFFFF888077700000
#: ``PERCPU_COUNT_BIAS``, ``__PERCPU_REF_ATOMIC`` and ``__PERCPU_REF_DEAD``.
BIAS, ATOMIC, DEAD = 1 << 63, 1, 2


def machine() -> MadeImage:
    """Return a machine with two CPUs and their percpu memory."""
    image = MadeImage()
    image.declare(
        """
        struct counter { long counter; };
        struct percpu_ref_data { struct counter count; void *release; };
        struct percpu_ref { unsigned long percpu_count_ptr; struct percpu_ref_data *data; };
        """
    )
    image.variable("__per_cpu_offset", "unsigned long[2]", VARIABLES)
    image.words(VARIABLES, DATA, DATA + 0x100000)
    return image


def ref(image: MadeImage, pointer: int, count: int, number: int = 0) -> Object:
    """Make a reference count."""
    at = REFS + 64 * number
    image.make("struct percpu_ref", at, {"percpu_count_ptr": pointer, "data": at + 32})
    image.words(at + 32, count % (1 << 64), 0)
    return image.pointer("struct percpu_ref *", at)


def parts(image: MadeImage, *values: int, size: int = 8, at: int = PARTS) -> None:
    """Fill the part of each CPU."""
    for cpu, value in enumerate(values):
        data = (value % (1 << 8 * size)).to_bytes(size, "little")
        image.write(DATA + 0x100000 * cpu + at, data)


@pytest.mark.parametrize(
    ("pointer", "count", "of_cpus", "found"),
    [
        (PARTS, BIAS + 1, (0, 0), 1),
        (PARTS, BIAS + 1, (30, -20), 11),
        (PARTS, BIAS - 5, (4, 3), 2),  # an earlier switch to atomic mode and back
        (PARTS, BIAS + 1, (-2, -3), -4),
        (PARTS | ATOMIC, 7, (30, -20), 7),
        (PARTS | ATOMIC | DEAD, 2, (1, 1), 2),
        (PARTS | ATOMIC, -3, (1, 1), -3),
        (PARTS | ATOMIC, 0, (1, 1), 0),
        # While it is switched, the count is biased, and the switch holds one more.
        (PARTS | ATOMIC | DEAD, BIAS + 2, (30, -20), 11),
        (PARTS | ATOMIC, BIAS - 4, (30, -20), 5),
        (PARTS | DEAD, BIAS + 1, (2, 3), 6),
        # Whatever is nearer to the bias than to 0 is biased.
        (PARTS | ATOMIC, BIAS - (1 << 61), (0, 0), -(1 << 61) - 1),
        (PARTS | ATOMIC, 1 << 61, (0, 0), 1 << 61),
    ],
)
def test_references(pointer: int, count: int, of_cpus: tuple[int, int], found: int) -> None:
    image = machine()
    parts(image, *of_cpus)
    made = ref(image, pointer, count)
    assert percpu_ref_count(image, made) == found
    assert percpu_ref_is_dying(made) == bool(pointer & DEAD)


@pytest.mark.parametrize("count", [0, 1, 5, -2, 1 << 40, (1 << 61) - 1, -1 << 61])
def test_references_that_percpu_ref_exit_kept(count: int) -> None:
    """It frees the parts and the data, and keeps the count above the two flags."""
    image = machine()
    pointer = (count << 2) % (1 << 64) | ATOMIC | DEAD
    image.make("struct percpu_ref", REFS, {"percpu_count_ptr": pointer})
    assert percpu_ref_count(image, image.pointer("struct percpu_ref *", REFS)) == count


def test_many_references_and_those_that_cannot_be_read() -> None:
    image = machine()
    parts(image, 3, 4)
    parts(image, 10, 20, at=PARTS + 8)
    refs = [
        ref(image, PARTS, BIAS + 1, 0),
        ref(image, PARTS + 8, BIAS + 1, 1),
        ref(image, PARTS | ATOMIC, 9, 2),
        ref(image, PARTS + 0x9000, BIAS + 1, 3),
        image.pointer("struct percpu_ref *", MISSING),
        ref(image, PARTS, BIAS + 5, 5),
    ]
    found = percpu_ref_counts(image, refs)
    broken = {at: error for at, error in found.items() if isinstance(error, FaultError)}
    assert set(broken) == {refs[3].value_(), MISSING}
    assert {at: count for at, count in found.items() if at not in broken} == {
        refs[0].value_(): 8,
        refs[1].value_(): 31,
        refs[2].value_(): 9,
        refs[5].value_(): 12,
    }
    assert broken[MISSING].address == MISSING
    for at in broken:
        with pytest.raises(FaultError):
            percpu_ref_count(image, image.pointer("struct percpu_ref *", at))


def test_percpu_counters() -> None:
    image = machine()
    parts(image, 5, -3, size=4)
    parts(image, -40, -2, size=4, at=PARTS + 4)
    # What follows a part is not of the counter.
    parts(image, 999, 999, size=4, at=PARTS + 8)
    pointers = [PARTS, PARTS + 4, PARTS + 0x9000, PARTS + 12]
    assert percpu_counter_parts(image, pointers) == {PARTS: 2, PARTS + 4: -42, PARTS + 12: 0}


@pytest.mark.parametrize(("batch", "cpus", "most"), [(32, (0, 1), 62), (64, (1,), 63)])
def test_the_bound_of_a_percpu_counter(batch: int, cpus: tuple[int, ...], most: int) -> None:
    """__percpu_counter_add() moves a part of a batch, so each CPU has one less at most."""
    image = machine()
    image.declare("struct cpumask { unsigned long bits[1]; };")
    image.variable("__cpu_online_mask", "struct cpumask", VARIABLES + 128)
    image.words(VARIABLES + 128, sum(1 << cpu for cpu in cpus))
    image.variable("percpu_counter_batch", "int", VARIABLES + 64)
    image.write(VARIABLES + 64, batch.to_bytes(4, "little"))
    assert percpu_counter_bound(image) == most


@pytest.mark.parametrize(("nodes", "most"), [((0, 0), 255), ((0, 1), 510), ((1, 1), 255)])
def test_the_bound_of_a_nodecounter(nodes: tuple[int, int], most: int) -> None:
    """Only nodes with CPUs have parts."""
    image = machine()
    image.given[online_nodes] = (0, 1, 2)
    assert nodecounter_bound(image) is None
    image = machine()
    image.given[online_nodes] = (0, 1, 2)
    image.enum(None, NODECOUNTER_BATCH=256)
    image.variable("numa_node", "int", PARTS)
    parts(image, *nodes, size=4)
    parts(image, 7, 8, size=4, at=PARTS + 4)
    assert nodecounter_bound(image) == most


def test_the_bound_of_a_nodecounter_whose_nodes_are_not_known() -> None:
    for has_variable in (False, True):
        image = machine()
        image.given[online_nodes] = (0, 1, 2)
        image.enum(None, NODECOUNTER_BATCH=256)
        if has_variable:  # and is not in the image
            image.variable("numa_node", "int", PARTS + 0x9000)
        assert nodecounter_bound(image) == 3 * 255


def test_the_parts_of_nodecounters() -> None:
    image = machine()
    image.given[possible_nodes] = (0, 1, 2)
    image.declare("struct nodecounter_node { unsigned long lock; int parts[4]; };")
    sums = {0: 0, 1: 0, 2: 0, 3: 0}
    for node in range(3):
        for index in range(4):
            part = (-7) ** node * (index + 3)
            at = REFS + 24 * node + 8 + 4 * index
            image.write(at, (part % (1 << 32)).to_bytes(4, "little"))
            sums[index] += part
    groups = [(REFS, 3), (MISSING, 2)]
    assert nodecounter_parts(image, groups) == {REFS: [sums[0], sums[1], sums[2]]}
    # A damaged number of counters is no reason to read beyond the parts.
    assert nodecounter_parts(image, [(REFS, 99)]) == {REFS: list(sums.values())}
    assert nodecounter_parts(image, [(REFS, 0)]) == {REFS: []}
