# SPDX-License-Identifier: LGPL-2.1-or-later
"""Identities of few lines, by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from support.made import OBJCG_A, OBJCG_B, OBJCG_DEAD, A, B, family, features, ledger, snapshot

from memcg_inspect.checks.identities import released, reparenting
from memcg_inspect.checks.identities.node_levels import AT_LEAST, EXACT
from memcg_inspect.checks.identities.sock import sock_pages
from memcg_inspect.checks.registry import CHECKS
from memcg_inspect.model import Nodes, Objcg, ObjcgPlace, ObjcgSet, Running
from memcg_inspect.model_freeing import Transient
from memcg_inspect.model_tasks import TaskCharge

PAGE = 4096

#: ``memcg_node_stat_items[]`` of mm/memcontrol.c (7.0), without kernel memory, whose objects other
#: identities count.
LRUVEC_ITEMS = re.findall(
    r"\w+",
    """
    NR_INACTIVE_ANON NR_ACTIVE_ANON NR_INACTIVE_FILE NR_ACTIVE_FILE NR_UNEVICTABLE
    WORKINGSET_REFAULT_ANON WORKINGSET_REFAULT_FILE WORKINGSET_ACTIVATE_ANON
    WORKINGSET_ACTIVATE_FILE WORKINGSET_RESTORE_ANON WORKINGSET_RESTORE_FILE
    WORKINGSET_NODERECLAIM NR_ANON_MAPPED NR_FILE_MAPPED NR_FILE_PAGES NR_FILE_DIRTY
    NR_WRITEBACK NR_SHMEM NR_SHMEM_THPS NR_FILE_THPS NR_ANON_THPS NR_SECONDARY_PAGETABLE
    NR_SWAPCACHE PGPROMOTE_SUCCESS PGDEMOTE_KSWAPD PGDEMOTE_DIRECT PGDEMOTE_KHUGEPAGED
    PGDEMOTE_PROACTIVE PGSTEAL_KSWAPD PGSTEAL_DIRECT PGSTEAL_KHUGEPAGED PGSTEAL_PROACTIVE
    PGSTEAL_ANON PGSTEAL_FILE PGSCAN_KSWAPD PGSCAN_DIRECT PGSCAN_KHUGEPAGED PGSCAN_PROACTIVE
    PGSCAN_ANON PGSCAN_FILE PGREFILL NR_HUGETLB
    """,
)
#: Changed through a lruvec, too: by reclaim, and, on kernels that account by node, by charges.
OTHERS = ["WORKINGSET_NODES", "NR_VMSCAN_WRITE", "PGROTATE_ANON", "PGROTATE_FILE", "NR_KMEM"]


def test_every_counter_of_memcgs_and_nodes_is_compared() -> None:
    assert sorted((*EXACT, *AT_LEAST, "NR_HUGETLB")) == sorted((*LRUVEC_ITEMS, *OTHERS))
    assert sorted(AT_LEAST) == [
        *("NR_FILE_MAPPED", "NR_SECONDARY_PAGETABLE"),
        *("WORKINGSET_NODERECLAIM", "WORKINGSET_NODES"),
    ]


def cpu(busy: bool) -> Running:
    return Running(0, 1, "sh", ("f",), busy, ())


FREED = Transient("memcg", 0x9000, freed_by="RCU")
LEAKED = Transient("memcg", 0x9100)
UNSURE = Transient("memcg", 0x9200, unsure=True)


@pytest.mark.parametrize(
    ("some", "busy", "status", "pending"),
    [
        ([], False, "exact", 0),
        ([FREED], True, "exact", 1),
        ([FREED, LEAKED], True, "differs", 1),
        ([LEAKED, UNSURE], True, "differs", 0),
        ([UNSURE], False, "differs", 0),
        ([UNSURE], True, "unverifiable", 0),
    ],
)
def test_released_memcgs(some: list[Transient], busy: bool, status: str, pending: int) -> None:
    made = snapshot(transients={0: some}, running=(cpu(False), cpu(busy)))
    [row] = released.released_rows(made)
    assert (row.status, row.found, row.claimed) == (
        *(status, {"pending": pending}),
        {"memcgs": len(some)},
    )
    unsure = "what frees a released memcg may be on a CPU that was stopped"
    assert row.reason == (unsure if status == "unverifiable" else None)


def test_proof_of_released_memcgs() -> None:
    for some, words in (
        ([LEAKED], "1 released memcg was"),
        ([LEAKED, UNSURE], "2 released memcgs were"),
    ):
        made = snapshot(transients={0: [FREED, *some]})
        [row] = released.released_rows(made)
        assert released.CHECK.prove is not None
        proof = released.CHECK.prove(made, row)
        assert proof is not None
        assert proof.kind == "leaked-memcg"
        assert proof.what.startswith(f"{words} not freed, and nothing will free them")
        assert [e.address for e in proof.evidence] == [memcg.address for memcg in some]
        assert {(e.kind, e.note) for e in proof.evidence} == {("mem_cgroup", "memcg")}


def test_obj_cgroups_of_a_removed_memcg_are_counted_by_node() -> None:
    dead = 0x4000
    objcgs = {n: Objcg(n, dead, nid, False, 0) for n, nid in ((0xD0, 0), (0xD1, 1), (0xD2, 1))}
    memcgs = {m: replace(memcg, offline=m == dead) for m, memcg in family().items()}
    made = snapshot(memcgs=memcgs, objcgs=objcgs)
    rows = reparenting.reparent_rows(made)
    assert [(r.memcg, r.nid, r.difference) for r in rows] == [(dead, 0, -1), (dead, 1, -2)]
    prove = reparenting.CHECK.prove
    assert prove is not None
    said = []
    for row in rows:
        proof = prove(made, row)
        assert proof is not None
        said.append((proof.what, [e.address for e in proof.evidence]))
    assert said == [
        (
            "the memcg is offline, but 1 obj_cgroup of node 0 still belongs to it and not to its "
            "parent",
            [0xD0],
        ),
        (
            "the memcg is offline, but 2 obj_cgroups of node 1 still belong to it and not to its "
            "parent",
            [0xD1, 0xD2],
        ),
    ]
    [healthy] = reparenting.reparent_rows(snapshot(memcgs=memcgs))
    assert (healthy.status, healthy.nid) == ("exact", None)


@pytest.mark.parametrize(
    ("size", "pages"), [(0, 0), (2047, 0), (2048, 1), (PAGE, 1), (PAGE + 2047, 1), (6144, 2)]
)
def test_sockets_that_charge_pages_together_are_rounded(size: int, pages: int) -> None:
    made = snapshot(charges=ledger({(B, "sock", "TCP", -1): (size, 1)}))
    assert (sock_pages(made)[B], sock_pages(made)[A]) == (pages, 0)
    assert {OBJCG_A, OBJCG_B, OBJCG_DEAD} == set(made.objcgs)


OF_TASKS = [TaskCharge(0x7000, 7, "sh", A, (OBJCG_A,), False, True)]
ON_LIST = Objcg(OBJCG_A, A, 0, False, 0, set=0x9000, places=(ObjcgPlace(A, 0, "list"),))
#: What there is a row of, by identity.
WITH_ROWS: dict[str, dict[str, Any]] = {
    "objcg_lists": {"objcgs": {OBJCG_A: ON_LIST}},
    "objcg_sets": {
        "objcgs": {OBJCG_A: ON_LIST},
        "objcg_sets": {0x9000: ObjcgSet(0x9000, 1, {0: OBJCG_A})},
    },
    "reparenting": {"memcgs": {**family(), B: replace(family()[B], offline=True)}},
    "task_objcg": {"tasks": OF_TASKS},
    "cached_stacks": {"cached_stacks": []},
    "node_vmalloc": {"all_nodes": Nodes(vmalloc_pages=0)},
    "swap": {},
    "swap_usage": {"page_counters": {(A, "swap"): 0}},
    "kmem_usage": {"page_counters": {(A, "kmem"): 0}},
    "tcpmem": {"page_counters": {(A, "tcpmem"): 0}},
}


@pytest.mark.parametrize("name", WITH_ROWS)
def test_rows_have_the_name_the_unit_and_the_parts_of_their_identity(name: str) -> None:
    [check] = [check for check in CHECKS if check.name == name]
    rows = check.rows(snapshot(**WITH_ROWS[name]))
    assert {(row.identity, row.unit) for row in rows} == {(name, check.unit)}
    for row in rows:
        assert row.found.keys() <= set(check.sources)
        assert (row.claimed or {}).keys() <= set(check.places)


def test_what_only_cgroup_v1_counts() -> None:
    """On cgroup v2, one page counter counts it together with everything else."""
    v1 = replace(features(), page_counters=frozenset({"kmem", "tcpmem"}))
    for name, of in (("kmem_usage", "kernel memory"), ("tcpmem", "sockets")):
        [check] = [check for check in CHECKS if check.name == name]
        assert check.why_not_kept(snapshot()) == f"only cgroup v1 has a page counter of {of}"
        assert check.why_not_kept(snapshot(features=v1)) is None
