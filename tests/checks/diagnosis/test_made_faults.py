# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Faults in a small kernel made by hand, alone and together.

:mod:`support.made_kernel` and the faults here change what a kernel has in memory. They know nothing
of rows and signatures.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from support.made_kernel import GONE, LEAVES, NODES, SHOP, Kernel, Thing, busy
from support.sampling import Sampled

from memcg_inspect.checks.diagnosis import diagnose
from memcg_inspect.checks.judge import judge
from memcg_inspect.report import Diagnosis


class Expected(NamedTuple):
    """What a diagnosis must say."""

    cause: str
    memcgs: tuple[int, ...]
    nid: int | None
    amount: int


Fault = Callable[[Kernel, random.Random], Expected]


def owned(kernel: Kernel, chance: random.Random, kind: str, *details: str) -> Thing:
    """Return something that a memcg without children pays for."""
    some = [t for t in kernel.things if t.kind == kind and kernel.memcg_of(t.payer) in LEAVES]
    return chance.choice([t for t in some if not details or t.detail in details])


def other(kernel: Kernel, chance: random.Random, thing: Thing) -> int:
    memcg = chance.choice([m for m in LEAVES if m != kernel.memcg_of(thing.payer)])
    return memcg if thing.kind == "sock" else kernel.objcg(memcg, chance.choice(NODES))


def owner_of(kind: str, *details: str) -> Fault:
    def plant(kernel: Kernel, chance: random.Random) -> Expected:
        thing = owned(kernel, chance, kind, *details)
        was, thing.payer = kernel.memcg_of(thing.payer), other(kernel, chance, thing)
        nid = thing.nid if thing.kind == "slab" else None
        return Expected("object-owner", (was, kernel.memcg_of(thing.payer)), nid, thing.bytes)

    return plant


def freed(kind: str) -> Fault:
    def plant(kernel: Kernel, chance: random.Random) -> Expected:
        thing = owned(kernel, chance, kind)
        kernel.things.remove(thing)
        nid = thing.nid if thing.kind == "slab" else None
        return Expected("still-charged", (kernel.memcg_of(thing.payer),), nid, thing.bytes)

    return plant


def not_counted(kernel: Kernel, chance: random.Random) -> Expected:
    memcg, nid = chance.choice(LEAVES), chance.choice(NODES)
    size = chance.choice((336, 616, 1112))
    kernel.things.append(Thing("slab", "reclaimable", nid, size, kernel.objcg(memcg, nid)))
    return Expected("not-counted", (memcg,), nid, size)


def twice(kernel: Kernel, chance: random.Random) -> Expected:
    memcg, nid, size = chance.choice(LEAVES), chance.choice(NODES), chance.choice((200, 736))
    kernel.slab(kernel.objcg(memcg, nid), nid, size, "unreclaimable")
    thing = kernel.things.pop()
    kernel.refs[thing.payer] -= 1
    return Expected("charged-twice", (memcg,), nid, size)


def on_a_cpu(item: str, nid: int | None, *sizes: int) -> Fault:
    def plant(kernel: Kernel, chance: random.Random) -> Expected:
        memcg, size = chance.choice((*LEAVES, SHOP)), chance.choice(sizes)
        kernel.cpu[memcg, item, nid] += size
        return Expected("counter", (memcg,), nid, size)

    return plant


def folded(item: str, nid: int | None, *sizes: int) -> Fault:
    def plant(kernel: Kernel, chance: random.Random) -> Expected:
        memcg, size = chance.choice(LEAVES), chance.choice(sizes)
        kernel.state[memcg, item, nid] += size
        return Expected("counter", (memcg,), nid, size)

    return plant


def flush_lost(kernel: Kernel, chance: random.Random) -> Expected:
    """A memcg handed up what it folded, and the parent lost it."""
    size = chance.choice((24, 77, 1234))
    kernel.fold()
    for memcg in (SHOP, 0x1000):
        kernel.state[memcg, "MEMCG_PERCPU_B", None] -= size
    return Expected("counter", (SHOP,), None, -size)


def wrong_node(kernel: Kernel, chance: random.Random) -> Expected:
    thing = owned(kernel, chance, "slab")
    thing.nid = 1 - thing.nid
    return Expected("wrong-node", (kernel.memcg_of(thing.payer),), thing.nid, thing.bytes)


def wrong_item(kernel: Kernel, chance: random.Random) -> Expected:
    thing = owned(kernel, chance, "slab")
    thing.detail = "unreclaimable" if thing.detail == "reclaimable" else "reclaimable"
    return Expected("wrong-item", (kernel.memcg_of(thing.payer),), thing.nid, thing.bytes)


def left_over(kernel: Kernel, chance: random.Random) -> Expected:
    memcg, nid, size = chance.choice(LEAVES), chance.choice(NODES), chance.choice((24, 300, 1999))
    kernel.left[kernel.objcg(memcg, nid)] += size
    return Expected("stock-bytes", (memcg,), nid, size)


def references(kernel: Kernel, chance: random.Random) -> Expected:
    memcg, nid = chance.choice(LEAVES), chance.choice(NODES)
    number = chance.choice((-2, -1, 1, 3, 5000))
    kernel.refs[kernel.objcg(memcg, nid)] += number
    cause = "reference-leaked" if number > 0 else "reference-lost"
    return Expected(cause, (memcg,), nid, number)


def css(kernel: Kernel, chance: random.Random) -> Expected:
    memcg, number = chance.choice(LEAVES), chance.choice((-1, 1, 7))
    kernel.css[memcg] += number
    cause = "reference-leaked" if number > 0 else "reference-lost"
    return Expected(cause, (memcg,), None, number)


def page_counter(kernel: Kernel, chance: random.Random) -> Expected:
    memcg, pages = chance.choice(LEAVES), chance.choice((-64, 3, 60_000))
    kernel.usage[memcg] += pages
    return Expected("page-counter", (memcg,), None, pages)


def list_size(kernel: Kernel, chance: random.Random) -> Expected:
    (memcg, nid), pages = chance.choice(sorted(kernel.lists)), chance.choice((-1, 3, 4000))
    kernel.lists[memcg, nid] += pages
    return Expected("lru-size", (memcg,), nid, pages)


def node_value(kernel: Kernel, chance: random.Random) -> Expected:
    nid, pages = chance.choice(NODES), chance.choice((-2, 1, 900))
    kernel.vm_stat[nid, "NR_ANON_MAPPED"] += pages
    return Expected("node-counter", (), nid, pages)


def local_value(kernel: Kernel, chance: random.Random) -> Expected:
    memcg, nid, pages = chance.choice(LEAVES), chance.choice(NODES), chance.choice((-1, 400))
    kernel.local[memcg, "NR_INACTIVE_FILE", nid] += pages
    return Expected("local-counter", (memcg,), nid, pages)


FAULTS: dict[str, Fault] = {
    "owner of a slab object": owner_of("slab"),
    "owner of a percpu allocation": owner_of("percpu"),
    "owner of a zswap entry": owner_of("zswap"),
    "owner of a stack's page": owner_of("kmem", "stack"),
    "owner of kernel pages": owner_of("kmem"),
    "owner of a user page": owner_of("lru"),
    "owner of a socket": owner_of("sock"),
    "freed slab object": freed("slab"),
    "freed percpu allocation": freed("percpu"),
    "freed zswap entry": freed("zswap"),
    "freed page": freed("kmem"),
    "object not counted": not_counted,
    "object charged twice": twice,
    "slab bytes of a CPU": on_a_cpu("NR_SLAB_RECLAIMABLE_B", 1, -64, 72, 1_000_003),
    "slab bytes of a memcg": on_a_cpu("NR_SLAB_UNRECLAIMABLE_B", None, -8, 504),
    "percpu bytes of a CPU": on_a_cpu("MEMCG_PERCPU_B", None, -1, 96, 1_000_003),
    "pages of a CPU": on_a_cpu("MEMCG_KMEM", None, -2, 1, 30_000),
    "stacks of a CPU": on_a_cpu("NR_KERNEL_STACK_KB", 0, -16, 4, 60_000),
    "folded slab bytes": folded("NR_SLAB_UNRECLAIMABLE_B", 0, 96, -8, 1_000_003),
    "folded pages": folded("MEMCG_KMEM", None, 7, -300),
    "lost flush": flush_lost,
    "node of an object": wrong_node,
    "item of an object": wrong_item,
    "bytes left over": left_over,
    "references to an obj_cgroup": references,
    "references to a memcg": css,
    "page counter": page_counter,
    "size of a list": list_size,
    "counter of a node": node_value,
    "local counter": local_value,
}


def diagnoses(kernel: Kernel) -> tuple[Diagnosis, ...]:
    made = kernel.snapshot()
    judged = judge(made)
    return diagnose(made, judged.rows, [pending.finding for pending in judged.findings])


def said(diagnosis: Diagnosis) -> Expected:
    return Expected(diagnosis.cause, diagnosis.memcgs, diagnosis.nid, diagnosis.amount or 0)


def fits(wanted: Expected, diagnosis: Diagnosis) -> bool:
    """Return whether a diagnosis names a fault. Pages of no known use have no node."""
    return wanted == said(diagnosis)._replace(
        nid=diagnosis.nid if wanted.nid is not None or diagnosis.nid is None else wanted.nid
    )


def planted(names: Sequence[str], seed: int) -> tuple[list[Expected], tuple[Diagnosis, ...]]:
    kernel, chance = busy(seed), random.Random(f"{names} {seed}")
    wanted = [FAULTS[name](kernel, chance) for name in names]
    return wanted, diagnoses(kernel)


def test_a_kernel_without_faults_has_no_diagnosis() -> None:
    for seed in range(20):
        kernel = busy(seed)
        assert judge(kernel.snapshot()).findings == []
        assert diagnoses(kernel) == ()


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_is_one_diagnosis(name: str) -> None:
    for seed in range(6):
        [wanted], found = planted([name], seed)
        assert len(found) == 1, (seed, wanted, found)
        assert fits(wanted, found[0]), (seed, wanted, found)
        assert found[0].findings


def forgotten(kernel: Kernel) -> Expected:
    """A memcg with all that a removed one can be charged with, which nothing frees."""
    kernel.sock(GONE, 5)
    kernel.swap_out(GONE, 32)
    kernel.charge_pages(GONE, 7)
    kernel.stock[GONE] = 7
    kernel.fold()
    kernel.forget(GONE)
    return Expected("memcg-leaked", (GONE,), None, 1)


def test_what_is_charged_to_a_forgotten_memcg_is_part_of_its_diagnosis() -> None:
    for seed in range(6):
        kernel = busy(seed)
        wanted = forgotten(kernel)
        [found] = diagnoses(kernel)
        assert said(found) == wanted
        assert f"1 released memcg below memcg {SHOP:#x} was not freed" in found.what
        identities = {e.identity for e in found.signature}
        assert identities >= {"released", "sock", "swap", "usage", "references", "hierarchy"}


def test_another_fault_of_the_parent_is_none_of_a_forgotten_memcg() -> None:
    for seed in range(6):
        kernel = busy(seed)
        wanted = forgotten(kernel)
        kernel.usage[SHOP] += 1234
        first, second = diagnoses(kernel)
        assert said(first) == wanted
        assert said(second) == Expected("page-counter", (SHOP,), None, 1234)


def test_a_charge_and_a_reference_of_one_obj_cgroup_may_be_another_fault() -> None:
    for seed in range(6):
        kernel = busy(seed)
        objcg = kernel.objcg(LEAVES[0], NODES[0])
        kernel.slab(objcg, NODES[0], 736, "unreclaimable")
        kernel.things.pop()  # the reference is left
        [found] = diagnoses(kernel)
        assert (found.cause, found.confidence) == ("still-charged", "likely")
        assert any("charged twice" in s and "that nothing holds" in s for s in found.others)


def test_the_effects_of_a_single_fault_are_the_differences() -> None:
    for seed, size in enumerate((2056, 3000, 4096, 8200)):
        kernel = busy(seed)
        kernel.slab(kernel.objcg(LEAVES[0], NODES[0]), NODES[0], size, "unreclaimable")
        kernel.things.pop()
        [found] = diagnoses(kernel)
        assert {e.identity for e in found.signature} >= {"slab", "usage", "references"}
        assert [(e, size) for e in found.signature if e.amount != e.difference] == []


def pairs() -> list[tuple[str, str]]:
    names = list(FAULTS)
    return [(a, b) for n, a in enumerate(names) for b in names[n + 1 :]]


def wrongly_sure(wanted: list[Expected], found: Sequence[Diagnosis]) -> list[Expected]:
    """
    Return what is said to be sure and is wrong.

    Two faults of the same amount, or in the same counter, can look like another one: no row tells
    them from it.
    """
    amounts = [abs(w.amount) for w in wanted]
    places = [w[:3] for w in wanted]
    if len(set(amounts)) < len(amounts) or len(set(places)) < len(places):
        return []
    return [
        said(d) for d in found if d.confidence != "likely" and not any(fits(w, d) for w in wanted)
    ]


def test_two_faults_are_two_diagnoses(sampled: Sampled) -> None:
    every, wrong = list(enumerate(pairs(), 1)), []
    assert len(every) > 400
    tried = sampled(every, 4)
    for tries, names in tried:
        wanted, found = planted(names, tries)
        assert wrongly_sure(wanted, found) == [], (names, tries)
        if len(found) != 2 or not all(any(fits(w, d) for d in found) for w in wanted):
            wrong.append(names)
    assert len(wrong) < len(tried) // 20, wrong


def test_three_faults(sampled: Sampled) -> None:
    chance, wrong = random.Random(3), []
    seeds = sampled(range(150), 3)
    for seed in seeds:
        names = chance.sample(list(FAULTS), 3)
        wanted, found = planted(names, seed)
        assert wrongly_sure(wanted, found) == [], (names, seed)
        if not all(any(fits(w, d) for d in found) for w in wanted):
            wrong.append((names, seed))
    assert len(wrong) < len(seeds) * 20 // 150, wrong


def test_ten_faults_in_bounded_work() -> None:
    names = [*FAULTS][::3]
    wanted, found = planted(names, 1)
    assert len(wanted) == 10
    assert wrongly_sure(wanted, found) == []
    assert sum(any(fits(w, d) for d in found) for w in wanted) >= 7
