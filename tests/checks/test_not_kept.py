# SPDX-License-Identifier: LGPL-2.1-or-later
"""Identities that a kernel does not keep, with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import made_hugetlb
from support.made import A, snapshot
from support.made_charges import image

from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.checks.sockets import SockUsage
from memcg_inspect.model import Nodes, NodeStat
from memcg_inspect.model_hugetlb import Hugetlb
from memcg_inspect.model_kernel import Features, LocalItems

#: A kernel with cgroup v1 that keeps no counter at all.
BARE = Features(
    items=frozenset(),
    lru_holds_objcg=False,
    lru_charged_to_own_node=False,
    default_hierarchy=False,
    caches_objcg=False,
    large_kmalloc_type=False,
    zswap=False,
)
NODES = "the counters of nodes of this kernel are not known"
ZONES = "the counters of zones of this kernel are not known"
SLABS = "this kernel does not keep NR_SLAB_RECLAIMABLE_B or NR_SLAB_UNRECLAIMABLE_B"

USERS = (
    "this kernel does not keep NR_ANON_MAPPED or NR_FILE_MAPPED or NR_ANON_THPS or NR_SHMEM or "
    "NR_FILE_DIRTY or NR_WRITEBACK or NR_SWAPCACHE or NR_FILE_PAGES or NR_SHMEM_THPS or "
    "NR_FILE_THPS or NR_HUGETLB"
)

#: What is missing in a snapshot with none of the optional parts.
UNKNOWN = {
    "swap": "this kernel does not keep MEMCG_SWAP",
    "swap_usage": "the page counters of swap of this kernel are not known",
    "kmem_usage": "only cgroup v1 has a page counter of kernel memory",
    "tcpmem": "only cgroup v1 has a page counter of sockets",
    "lru": "the sizes of the LRU lists of this kernel are not known",
    "user_pages": USERS,
    **dict.fromkeys(
        ("hugetlb_usage", "hugetlb_nodes"),
        "no sizes of huge pages of hugetlb were found on this machine",
    ),
    "page_levels": "this kernel keeps no other counter by memcg and node",
    "local": "this kernel loses the local counters of memcgs that are removed",
    "local_fold": ("this kernel adds up local counters when they are read: it has no state_local"),
    "objcg_sets": "this kernel has no struct obj_cgroup_set",
    "node_slab": NODES,
    "node_stack": NODES,
    "node_pagetable": NODES,
    "node_vmalloc": "the number of vmalloc pages of this kernel is not known",
    "node_levels": NODES,
    "node_totals": NODES,
    "zone_free_area": "the zones of this kernel are not known",
    **dict.fromkeys(("zone_free", "zone_zspages", "zone_mlock", "zone_lru", "zone_totals"), ZONES),
    "cached_stacks": "this kernel caches no kernel stacks",
    "alloc_tags": "call sites were not read",
}
#: What a kernel without any counter does not keep, in addition.
NOT_COUNTED = {
    "slab": SLABS,
    "percpu": "this kernel does not keep MEMCG_PERCPU_B",
    "kernel_stack": "this kernel does not keep NR_KERNEL_STACK_KB",
    "pagetable": "this kernel does not keep NR_PAGETABLE",
    "vmalloc": "this kernel does not keep NR_VMALLOC or MEMCG_VMALLOC",
    "kmem": "this kernel does not keep MEMCG_KMEM or NR_KMEM",
    "zswap": ("this kernel does not keep MEMCG_ZSWAP_B or MEMCG_ZSWAPPED or MEMCG_ZSWAP_INCOMP"),
    "sock": "this kernel does not keep MEMCG_SOCK",
    "sock_bytes": "cgroup v1 charges sockets only in memcgs with a limit for TCP",
    "levels": SLABS,
    "task_objcg": "tasks of this kernel cache no obj_cgroup",
}


def not_kept(taken: Snapshot) -> dict[str, str | None]:
    return {i.name: i.reason for i in judge(taken).identities if i.status == "not-kept"}


def test_what_is_not_known_of_an_image() -> None:
    assert not_kept(image()) == UNKNOWN


def test_a_kernel_without_counters() -> None:
    assert not_kept(snapshot(features=BARE)) == UNKNOWN | NOT_COUNTED


@pytest.mark.parametrize(
    ("identity", "taken"),
    [
        ("sock_bytes", snapshot(features=BARE, sockets={A: SockUsage(1)})),
        ("sock_bytes", snapshot(features=replace(BARE, default_hierarchy=True))),
        ("cached_stacks", snapshot(cached_stacks=())),
        ("task_objcg", snapshot(features=replace(BARE, caches_objcg=True))),
        ("node_stack", snapshot(node_stats={(0, "NR_KERNEL_STACK_KB"): NodeStat(0, 0)})),
        ("node_vmalloc", snapshot(all_nodes=Nodes(vmalloc_pages=0))),
        ("local", snapshot(features=replace(BARE, local=LocalItems(frozenset(), frozenset("x"))))),
        ("pagetable", snapshot(features=replace(BARE, items=frozenset({"NR_PAGETABLE"})))),
        ("kmem", snapshot(features=replace(BARE, items=frozenset({"NR_KMEM"})))),
    ],
)
def test_what_is_enough_to_keep_an_identity(identity: str, taken: Snapshot) -> None:
    assert identity in UNKNOWN | NOT_COUNTED
    assert identity not in not_kept(taken)


def test_why_a_kernel_does_not_charge_for_huge_pages() -> None:
    reason = "this kernel was built without cgroups of hugetlb"
    for taken in (snapshot(hugetlb=Hugetlb(not_kept=reason)), made_hugetlb.made(not_kept=reason)):
        assert not_kept(taken)["hugetlb_usage"] == reason
    assert "hugetlb_usage" not in not_kept(made_hugetlb.made())


def test_sockets_of_cgroup_v1() -> None:
    kept = {"items": frozenset({"MEMCG_SOCK"}), "default_hierarchy": False}
    taken = snapshot(features=replace(BARE, **kept))  # type: ignore[arg-type]
    assert not_kept(taken)["sock"] == "cgroup v1 charges sockets to a separate page counter"


@pytest.mark.parametrize(
    ("off", "reason"),
    [
        ("default_hierarchy", "zswap is charged on cgroup v2 only"),
        ("zswap", "this kernel was built without zswap"),
    ],
)
def test_kernels_that_do_not_charge_zswap(off: str, reason: str) -> None:
    kept = {"items": frozenset({"MEMCG_ZSWAP_B"}), "default_hierarchy": True, "zswap": True}
    taken = snapshot(features=replace(BARE, **{**kept, off: False}))  # type: ignore[arg-type]
    assert not_kept(taken)["zswap"] == reason
    assert "zswap" not in not_kept(snapshot(features=replace(BARE, **kept)))  # type: ignore[arg-type]
