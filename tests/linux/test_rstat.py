# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which memcgs a CPU will flush, in lists made as kernel/cgroup/rstat.c links them."""

from __future__ import annotations

import pytest
from drgn import offsetof
from support.layouts import MadeImage

from memcg_inspect.linux.kernel import rstat
from memcg_inspect.linux.kernel.rstat import read_updated
from memcg_inspect.model import Coverage

AT, DATA, MISSING = 0xFFFFFFFF82000000, 0xFFFF888030000000, 0xFFFF888077700000
MEMCGS, CGROUPS = 0xFFFF888000111000, 0xFFFF888000222000
#: Where the parts of each CPU are, and the head of its lock-less list.
PARTS, LHEAD = 0x10000, 0x20000
#: The parents of memcgs 0 to 5; 0 is the root.
PARENTS = {1: 0, 2: 0, 3: 1, 4: 1, 5: 3}

OLD = """
    struct cgroup_rstat_cpu { long base[4]; void *updated_children; void *updated_next; };
    struct cgroup { long flags; struct cgroup_rstat_cpu *rstat_cpu; };
    struct cgroup_subsys_state { struct cgroup *cgroup; struct cgroup_subsys_state *parent; };
"""
#: 6.16, and since 6.17 with the list that is not locked.
CSS = """
    struct llist_node { struct llist_node *next; };
    struct css_rstat_cpu { void *updated_children; void *updated_next; %s };
    struct cgroup_subsys_state { void *cgroup; struct css_rstat_cpu *rstat_cpu;
        struct cgroup_subsys_state *parent; };
"""
LOCKLESS = "struct llist_node lnode; struct cgroup_subsys_state *owner;"
RELEASES = {"6.15": OLD, "6.16": CSS % "", "6.17": CSS % LOCKLESS}
MEMCG = "struct mem_cgroup { long id; struct cgroup_subsys_state css; };"


class Machine:
    """A machine of a release with two CPUs, whose lists are empty."""

    def __init__(self, release: str) -> None:
        self.image = MadeImage()
        self.image.declare(RELEASES[release] + MEMCG)
        self.of_css = release != "6.15"
        self.entry = "struct css_rstat_cpu" if self.of_css else "struct cgroup_rstat_cpu"
        image = self.image
        image.variable("__per_cpu_offset", "unsigned long[2]", AT)
        image.words(AT, DATA, DATA + 0x100000)
        image.variable("root_mem_cgroup", "struct mem_cgroup *", AT + 64)
        image.words(AT + 64, MEMCGS)
        if release == "6.17":
            image.declare("struct cgroup_subsys { int id; struct llist_node *lhead; };")
            image.variable("memory_cgrp_subsys", "struct cgroup_subsys", AT + 128)
            image.words(AT + 128, 0, LHEAD)
            for cpu in (0, 1):
                image.words(DATA + 0x100000 * cpu + LHEAD, 0)
        for number in range(6):
            self._memcg(number)

    def _memcg(self, number: int) -> None:
        fields = {"css.cgroup": CGROUPS + 64 * number}
        if number in PARENTS:
            fields["css.parent"] = self.css(PARENTS[number])
        if self.of_css:
            fields["css.rstat_cpu"] = PARTS + 256 * number
        self.image.make("struct mem_cgroup", self.memcg(number), fields)
        if not self.of_css:
            self.image.make(
                "struct cgroup", CGROUPS + 64 * number, {"rstat_cpu": PARTS + 256 * number}
            )
        for cpu in (0, 1):
            fields = {"owner": self.css(number)} if self.has_list else {}
            self.image.make(self.entry, self.part(cpu, number), fields)

    @property
    def has_list(self) -> bool:
        return bool(self.image.type(self.entry).has_member("owner"))

    def memcg(self, number: int) -> int:
        return MEMCGS + 256 * number

    def css(self, number: int) -> int:
        return self.memcg(number) + 8

    def node(self, number: int) -> int:
        return self.css(number) if self.of_css else CGROUPS + 64 * number

    def part(self, cpu: int, number: int) -> int:
        return DATA + 0x100000 * cpu + PARTS + 256 * number

    def put(self, cpu: int, number: int, member: str, value: int) -> None:
        """Set a pointer of a CPU's part."""
        at = offsetof(self.image.type(self.entry), member)
        self.image.words(self.part(cpu, number) + at, value)

    def tree(self, cpu: int, children: dict[int, list[int]]) -> None:
        """Make the tree of a CPU."""
        self.put(cpu, 0, "updated_next", self.node(0))
        for number in {0, *children, *(c for cs in children.values() for c in cs)}:
            self.put(cpu, number, "updated_children", self.node(number))
        for parent, below in children.items():
            self.put(cpu, parent, "updated_children", self.node(below[0]))
            for child, following in zip(below, [*below[1:], parent], strict=True):
                self.put(cpu, child, "updated_next", self.node(following))

    def read(self) -> tuple[dict[int, set[int]], Coverage]:
        """Return the numbers of the memcgs that each CPU has on its lists."""
        coverage = Coverage()
        memcgs = [self.memcg(number) for number in range(6)]
        found = read_updated(self.image, memcgs, coverage)
        return {c: {(m - MEMCGS) // 256 for m in ms} for c, ms in found.items()}, coverage


@pytest.mark.parametrize("release", RELEASES)
def test_the_tree_of_each_cpu(release: str) -> None:
    machine = Machine(release)
    assert machine.read() == ({0: set(), 1: set()}, Coverage(read=2))
    machine.tree(0, {0: [1, 2], 1: [3, 4], 3: [5]})
    machine.tree(1, {0: [2]})
    assert machine.read() == ({0: {0, 1, 2, 3, 4, 5}, 1: {0, 2}}, Coverage(read=2))


@pytest.mark.parametrize("release", RELEASES)
def test_a_tree_whose_root_is_on_no_list_is_not_flushed(release: str) -> None:
    machine = Machine(release)
    machine.tree(0, {0: [1, 2]})
    machine.put(0, 0, "updated_next", 0)
    assert machine.read()[0] == {0: set(), 1: set()}


@pytest.mark.parametrize("release", RELEASES)
def test_children_that_end_with_null(release: str) -> None:
    """A CPU that was taking a memcg off the tree has cleared its ``updated_next``."""
    machine = Machine(release)
    machine.tree(0, {0: [1, 2], 1: [3]})
    machine.put(0, 3, "updated_next", 0)
    assert machine.read() == ({0: {0, 1, 2, 3}, 1: set()}, Coverage(read=2))


@pytest.mark.parametrize("release", RELEASES)
def test_a_tree_that_is_broken(release: str) -> None:
    for wrong in (Machine(release).node(1), Machine(release).node(0), MISSING):
        machine = Machine(release)
        machine.tree(0, {0: [1, 2], 1: [3]})
        machine.tree(1, {0: [1]})
        machine.put(0, 3, "updated_next", wrong)
        found, coverage = machine.read()
        if wrong == machine.node(1):  # as it was
            assert found == {0: {0, 1, 2, 3}, 1: {0, 1}}
            continue
        assert found == {1: {0, 1}}
        assert (coverage.read, coverage.unreadable) == (1, 1)
        [missed] = coverage.examples
        assert missed.what == "list of updated memcgs"
        if wrong != MISSING:
            assert missed.address == wrong
            assert missed.reason.startswith("the tree of updated memcgs is broken")


def test_a_tree_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that has five memcgs below the root on its tree, and how many it may have."""
    assert rstat._MOST == 4 * 1024 * 1024
    for most, is_read in ((5, True), (4, False)):
        monkeypatch.setattr(rstat, "_MOST", most)
        machine = Machine("6.17")
        machine.tree(0, {0: [1, 2], 1: [3, 4], 3: [5]})
        assert (0 in machine.read()[0]) == is_read


def test_a_list_without_lock_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for most, is_read in ((2, True), (1, False)):
        monkeypatch.setattr(rstat, "_MOST", most)
        machine = Machine("6.17")
        lnode = offsetof(machine.image.type("struct css_rstat_cpu"), "lnode")
        links = [machine.part(1, number) + lnode for number in (5, 2, 1)]
        for link, following in zip((DATA + 0x100000 + LHEAD, *links), (*links, 0), strict=True):
            machine.image.words(link, following)
        assert (1 in machine.read()[0]) == is_read


def test_memcgs_that_wait_on_the_list_without_lock_bring_their_ancestors() -> None:
    machine = Machine("6.17")
    lnode = offsetof(machine.image.type("struct css_rstat_cpu"), "lnode")
    first, second = machine.part(1, 5) + lnode, machine.part(1, 2) + lnode
    machine.image.words(DATA + 0x100000 + LHEAD, first)
    machine.image.words(first, second)
    assert machine.read() == ({0: set(), 1: {0, 1, 2, 3, 5}}, Coverage(read=2))
    machine.tree(1, {0: [1], 1: [4]})
    assert machine.read()[0] == {0: set(), 1: {0, 1, 2, 3, 4, 5}}
    for wrong in (first, second, MISSING):
        machine.image.words(second, wrong)
        found, coverage = machine.read()
        assert found == {0: set()}
        assert coverage.unreadable == 1
        [missed] = coverage.examples
        assert missed.what == "list of updated memcgs"
        if wrong != MISSING:
            assert missed.address == wrong
            assert missed.reason.startswith("the list of updated memcgs is broken")


def test_a_cgroup_can_have_several_memcgs_up_to_6_15() -> None:
    """One that was disabled, and is not freed, and the one of today."""
    machine = Machine("6.15")
    machine.image.words(machine.css(4), machine.node(2))
    machine.tree(0, {0: [2]})
    assert machine.read()[0] == {0: {0, 2, 4}, 1: set()}


@pytest.mark.parametrize("release", RELEASES)
def test_memcgs_that_are_not_in_the_image(release: str) -> None:
    machine, coverage = Machine(release), Coverage()
    if machine.of_css:  # the address of a css tells which it is
        assert read_updated(machine.image, [MISSING], coverage) == {0: set(), 1: set()}
        return
    assert read_updated(machine.image, [MISSING], coverage) == {}
    assert coverage.unreadable == 1
    [missed] = coverage.examples
    assert missed.what == "lists of updated memcgs"
    assert MISSING <= missed.address < MISSING + 64
