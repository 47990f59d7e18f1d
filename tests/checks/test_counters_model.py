# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Counters are compared with a model of the kernel, for random trees of memcgs and random histories.

The own value of a memcg must equal what is charged to it, in any order of folding, removal,
reparenting and freeing.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.made import snapshot
from support.rstat import ITEMS, Group, Kernel

from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

STEPS = ("mkdir", "rmdir", "reparent", "release", "allocate", "free", "flush", "drain")

numbers = st.integers(0, 1000)
step = st.tuples(
    # more of these, so that there are objects
    st.sampled_from((*STEPS, "allocate", "allocate", "allocate", "flush")),
    numbers,
    numbers,
    numbers,
)


@st.composite
def histories(draw: st.DrawFn) -> Kernel:
    """Make a kernel with a random history."""
    kernel = Kernel(
        cpus=draw(st.integers(1, 3)), nodes=draw(st.integers(1, 3)), redirects=draw(st.booleans())
    )
    for name, *chosen in draw(st.lists(step, max_size=60)):
        _step(kernel, name, *chosen)
    return kernel


def _step(kernel: Kernel, name: str, first: int, second: int, third: int) -> None:
    group, cpu = kernel.groups[first % len(kernel.groups)], second % kernel.cpus
    if name == "mkdir":
        if not group.dying:
            kernel.mkdir(group)
    elif name == "allocate":
        objcgs = [objcg for g in kernel.groups for objcg in g.objcgs]
        detail = "reclaimable" if third % 2 else "unreclaimable"
        size = 8 * (1 + third)
        kernel.allocate(objcgs[first % len(objcgs)], cpu, third % kernel.nodes, detail, size)
    elif name == "free":
        if kernel.objects:
            kernel.free(first % len(kernel.objects), cpu)
    elif name == "flush":
        kernel.flush(group, cpu)
    elif name == "drain":
        kernel.drain(cpu)
    else:
        {"rmdir": kernel.rmdir, "reparent": kernel.reparent, "release": kernel.release}[name](group)


def image(kernel: Kernel) -> Snapshot:
    """Return the snapshot that the audit would read."""
    memcgs = kernel.memcgs()
    return snapshot(
        memcgs=memcgs,
        objcgs=kernel.objcgs(),
        charges=kernel.ledger(),
        memcg_stats=kernel.stats(None),
        lruvec_stats={
            (address, nid): stats
            for nid in range(kernel.nodes)
            for address, stats in kernel.stats(nid).items()
        },
        stocks=kernel.obj_stocks(),
        nodes=tuple(range(kernel.nodes)),
        accounting="memcg",
    )


def rows_of(taken: Snapshot, *identities: str) -> list[Row]:
    return [row for row in judge(taken).rows if row.identity in identities]


def slab_rows(taken: Snapshot) -> list[Row]:
    return rows_of(taken, "slab")


def subtree(group: Group) -> list[Group]:
    return [group, *(below for child in group.children for below in subtree(child))]


@settings(deadline=None)
@given(histories())
def test_own_and_stock_is_what_the_objects_take(kernel: Kernel) -> None:
    counters, truth, stock = kernel.counters(), kernel.paid(), kernel.in_stock()
    for group in kernel.groups:
        if group.dying:
            continue
        for item in ITEMS.values():
            for nid in range(kernel.nodes):
                claim = counters.own(group.address, item, nid)
                assert claim is not None
                cell = (group.address, item, nid)
                assert sum(claim) + stock.get(cell, 0) == truth[cell]


@settings(deadline=None)
@given(histories())
def test_the_memcgs_own_counter_is_the_sum_of_its_nodes(kernel: Kernel) -> None:
    counters = kernel.counters()
    for group in kernel.groups:
        for item in ITEMS.values():
            whole = counters.own(group.address, item)
            parts = [counters.own(group.address, item, nid) for nid in range(kernel.nodes)]
            assert whole is not None
            assert sum(whole) == sum(sum(part) for part in parts if part is not None)


@settings(deadline=None)
@given(histories())
def test_hierarchical_is_the_sum_of_own_below(kernel: Kernel) -> None:
    counters = kernel.counters()
    for group in kernel.groups:
        if group.dying:
            continue
        whole = counters.hierarchical(group.address, ITEMS["reclaimable"])
        parts = [
            counters.own(below.address, ITEMS["reclaimable"])
            for below in subtree(group)
            if not below.dying
        ]
        assert whole is not None
        assert sum(whole) == sum(sum(part) for part in parts if part is not None)


@settings(deadline=None)
@given(histories())
def test_folding_everything_changes_nothing(kernel: Kernel) -> None:
    address = [group.address for group in kernel.groups if not group.dying]
    before = [kernel.counters().own(a, ITEMS["reclaimable"], 0) for a in address]
    for group in reversed(subtree(kernel.groups[0])):
        for cpu in range(kernel.cpus):
            kernel.flush(group, cpu)
    after = [kernel.counters().own(a, ITEMS["reclaimable"], 0) for a in address]
    assert [sum(claim) for claim in before if claim] == [claim.folded for claim in after if claim]
    assert all(claim is not None and claim.pending == 0 for claim in after)


@settings(deadline=None)
@given(histories(), st.sets(numbers, max_size=3))
def test_counters_not_read_never_make_a_wrong_value(kernel: Kernel, unreadable: set[int]) -> None:
    unread = frozenset(kernel.groups[n % len(kernel.groups)].address for n in unreadable)
    whole, part = kernel.counters(), kernel.counters(unread)
    for group in kernel.groups:
        if group.dying:
            continue
        claim = part.own(group.address, ITEMS["reclaimable"], 0)
        if group.address in unread:
            assert claim is None
        if unread.isdisjoint(below.address for below in subtree(group)):
            assert claim is not None
        if claim is not None:
            assert claim == whole.own(group.address, ITEMS["reclaimable"], 0)


@settings(deadline=None)
@given(histories())
def test_the_slab_identity_is_exact(kernel: Kernel) -> None:
    rows = slab_rows(image(kernel))
    assert {row.status for row in rows} == {"exact"}
    assert len(rows) == 2 * kernel.nodes * sum(not group.dying for group in kernel.groups)


@settings(deadline=None)
@given(histories())
def test_every_level_and_every_ancestor_is_exact(kernel: Kernel) -> None:
    rows = rows_of(image(kernel), "levels", "hierarchy")
    assert {row.status for row in rows} == {"exact"}
    parents = {kernel.payer(g.parent) for g in kernel.groups if g.parent and not g.dying}
    compared = {row.memcg for row in rows if row.identity == "hierarchy"}
    assert compared == {group.address for group in parents}


@settings(deadline=None)
@given(histories(), numbers, st.integers(1, 10**6))
def test_hierarchy_tells_whose_folded_counter_is_wrong(
    kernel: Kernel, which: int, amount: int
) -> None:
    live = [group for group in kernel.groups if not group.dying]
    group = live[which % len(live)]
    group.state[ITEMS["reclaimable"], 0] += amount
    rows = [row for row in rows_of(image(kernel), "hierarchy") if row.nid is not None]
    compared = {row.memcg for row in rows}
    wrong = {
        (row.memcg, row.nid, row.item, row.difference) for row in rows if row.status == "differs"
    }
    # The counters of its ancestors match their subtrees: they are not wrong.
    expected = {(group.address, 0, ITEMS["reclaimable"], amount)}
    assert wrong == (expected if group.address in compared else set())


@settings(deadline=None)
@given(histories(), numbers, st.integers(1, 10**6))
def test_a_wrong_folded_counter_is_named_with_its_payer_above(
    kernel: Kernel, which: int, amount: int
) -> None:
    live = [group for group in kernel.groups if not group.dying]
    group = live[which % len(live)]
    group.state[ITEMS["reclaimable"], 0] += amount
    wrong = {
        (row.memcg, row.nid, row.item, row.difference)
        for row in slab_rows(image(kernel))
        if row.status == "differs"
    }
    expected = {(group.address, 0, ITEMS["reclaimable"], amount)}
    if group.parent is not None:
        above = kernel.payer(group.parent).address
        expected.add((above, 0, ITEMS["reclaimable"], -amount))
    assert wrong == expected


@settings(deadline=None)
@given(histories(), numbers, numbers)
def test_an_object_with_another_owner_is_named_on_both(
    kernel: Kernel, which: int, thief: int
) -> None:
    objcgs = [objcg for group in kernel.groups for objcg in group.objcgs]
    kernel.allocate(objcgs[which % len(objcgs)], 0, 0, "unreclaimable", 504)
    victim = kernel.objects[-1][0]
    kernel.objects[-1] = (objcgs[thief % len(objcgs)], "unreclaimable", 0, 504)
    owner = kernel.payer(victim.group).address
    other = kernel.payer(kernel.objects[-1][0].group).address
    wrong = {
        (row.memcg, row.nid, row.item, row.difference)
        for row in slab_rows(image(kernel))
        if row.status == "differs"
    }
    item = ITEMS["unreclaimable"]
    expected = {(owner, 0, item, 504), (other, 0, item, -504)} if owner != other else set()
    assert wrong == expected
