# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Causes: faults that an address proves
-------------------------------------

Some identities do not compare amounts: a pointer or a list is wrong, and its address is the proof.
Such a finding is its own cause, unless what is wrong also moves charges.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ("PROVED", "Proved")


class Proved(NamedTuple):
    """
    The cause of a finding that an address proves.

    :ivar cause: name of the cause
    :ivar functions: functions of the kernel that can make it
    :ivar meaning: for the list in ``docs/output.md`` (Markdown)
    """

    cause: str
    functions: tuple[str, ...]
    meaning: str


#: By the kind of the finding.
PROVED = {
    "unknown-objcg": Proved(
        "unknown-owner",
        ("__memcg_slab_post_alloc_hook", "obj_cgroup_release"),
        "a charge refers to what is no `obj_cgroup`: its owner was overwritten, or freed",
    ),
    "objcg-set": Proved(
        "objcg-set", ("obj_cgroup_alloc",), "a set of `obj_cgroup`s does not agree with its entries"
    ),
    "dangling-vector": Proved(
        "vector-freed",
        ("alloc_slab_obj_exts", "free_slab_obj_exts"),
        "a slab refers to a vector in memory that is not allocated",
    ),
    "socket-charge-not-whole-pages": Proved(
        "socket-bytes",
        ("__sk_mem_schedule", "__sk_mem_reclaim"),
        "the bytes that a socket has charged are wrong",
    ),
    "not-reparented": Proved(
        "not-reparented",
        ("memcg_reparent_objcgs", "mem_cgroup_css_offline"),
        "a memcg was removed, and not all its `obj_cgroup`s were handed to its parent",
    ),
    "leaked-memcg": Proved(
        "memcg-leaked",
        ("css_release", "css_release_work_fn"),
        "a memcg without references will not be freed",
    ),
    "misplaced-objcg": Proved(
        "objcg-owner",
        ("memcg_reparent_objcgs", "obj_cgroup_alloc"),
        "an `obj_cgroup` belongs to another memcg or node than the list that it is on",
    ),
    "never-folded": Proved(
        "never-folded",
        ("css_rstat_updated", "cgroup_rstat_updated"),
        "a memcg with changes to fold is on no list to fold them from",
    ),
    "stale-task-objcg": Proved(
        "task-objcg",
        ("current_obj_cgroup", "__mem_cgroup_attach"),
        "a task has cached the `obj_cgroup` of a memcg that it is not in",
    ),
    "stale-active-memcg": Proved(
        "active-memcg",
        ("set_active_memcg",),
        "a task, or a CPU in interrupts, charges a memcg that no function on its stack set",
    ),
    "freed-active-memcg": Proved(
        "active-memcg",
        ("set_active_memcg",),
        "a task, or a CPU in interrupts, charges a memcg that no function on its stack set",
    ),
    "charged-cached-stack": Proved(
        "cached-stack",
        ("free_thread_stack", "try_release_thread_stack_to_cache"),
        "a kernel stack that a CPU keeps for a new task is still charged",
    ),
    "skew": Proved(
        "charged-to-node",
        ("obj_cgroup_from_current_nid",),
        "memory is charged to the `obj_cgroup` of another node",
    ),
    "rule": Proved(
        "rule",
        ("pcpu_memcg_post_alloc_hook", "zswap_store_page"),
        "all charges of one kind are booked to nodes by another rule",
    ),
}
