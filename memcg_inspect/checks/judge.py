# SPDX-License-Identifier: LGPL-2.1-or-later
"""One verdict out of all identities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from memcg_inspect.checks.alloc_tags import alloc_tag_rows
from memcg_inspect.checks.findings import Lead, orphan_findings, row_findings, skew_findings
from memcg_inspect.checks.hierarchy import hierarchy_rows, level_rows
from memcg_inspect.checks.inflight import mark_in_flight
from memcg_inspect.checks.kmem import kmem_rows, pagetable_rows, stack_rows, vmalloc_rows
from memcg_inspect.checks.lru import lru_rows
from memcg_inspect.checks.node_slab import node_slab_rows
from memcg_inspect.checks.objcg import objcg_rows, reference_rows
from memcg_inspect.checks.percpu import percpu_rows
from memcg_inspect.checks.pernode import judge_per_node
from memcg_inspect.checks.rows import summarize
from memcg_inspect.checks.rules import placement_rows, reparent_rows, task_rows
from memcg_inspect.checks.skew import skew_matrix
from memcg_inspect.checks.slab import slab_rows
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.checks.usage import sock_rows, usage_rows
from memcg_inspect.checks.zswap import zswap_rows
from memcg_inspect.model import Coverage, Finding, Follows, Identity, Row, Skew, Verdict

__all__ = ("Judgement", "judge", "verdict")


class Rule(NamedTuple):
    """
    One identity.

    :ivar items: counters, any of which the kernel must keep
    :ivar kept: returns why a kernel does not keep it, if it does not
    """

    name: str
    rows: Callable[[Snapshot], list[Row]]
    items: tuple[str, ...] = ()
    kept: Callable[[Snapshot], str | None] = lambda snapshot: None


def _on_v2(snapshot: Snapshot) -> str | None:
    if snapshot.features.default_hierarchy:
        return None
    return "cgroup v1 does not charge this to memcgs' memory"


def _has_zswap(snapshot: Snapshot) -> str | None:
    return _on_v2(snapshot) if snapshot.features.zswap else "this kernel was built without zswap"


def _has_node_stats(snapshot: Snapshot) -> str | None:
    return None if snapshot.node_stats else "the counters of nodes are not known here"


def _has_lru(snapshot: Snapshot) -> str | None:
    return "the sizes of LRU lists are not known here" if snapshot.lru is None else None


def _caches(snapshot: Snapshot) -> str | None:
    return None if snapshot.features.caches_objcg else "tasks of this kernel cache no obj_cgroup"


def _profiles(snapshot: Snapshot) -> str | None:
    if snapshot.profile is None:
        return "call sites were not looked at"
    return snapshot.profile.why_not


#: Every identity, in the order of the report.
RULES = (
    Rule("slab", slab_rows, ("NR_SLAB_RECLAIMABLE_B",)),
    Rule("percpu", percpu_rows, ("MEMCG_PERCPU_B",)),
    Rule("kernel_stack", stack_rows, ("NR_KERNEL_STACK_KB",)),
    Rule("pagetable", pagetable_rows, ("NR_PAGETABLE",)),
    Rule("vmalloc", vmalloc_rows, ("NR_VMALLOC", "MEMCG_VMALLOC")),
    Rule("kmem", kmem_rows, ("MEMCG_KMEM", "NR_KMEM")),
    Rule("objcg_bytes", objcg_rows),
    Rule("zswap", zswap_rows, ("MEMCG_ZSWAP_B",), _has_zswap),
    Rule("sock", sock_rows, ("MEMCG_SOCK",), _on_v2),
    Rule("usage", usage_rows),
    Rule("lru", lru_rows, (), _has_lru),
    Rule("levels", level_rows, ("NR_SLAB_RECLAIMABLE_B",)),
    Rule("references", reference_rows),
    Rule("node_slab", node_slab_rows, (), _has_node_stats),
    Rule("placement", placement_rows),
    Rule("reparenting", reparent_rows),
    Rule("task_objcg", task_rows, (), _caches),
    Rule("alloc_tags", alloc_tag_rows, (), _profiles),
)


class Judgement(NamedTuple):
    """What follows from a snapshot alone."""

    identities: list[Identity]
    rows: list[Row]
    skew: list[Skew]
    leads: list[Lead]
    follows: Mapping[str, Follows] | None


def judge(snapshot: Snapshot) -> Judgement:
    """Check every identity."""
    identities: list[Identity] = []
    rows: list[Row] = []
    for rule in RULES:
        reason = _why_not(rule, snapshot)
        if reason is not None:
            identities.append(Identity(rule.name, "not-kept", 0, 0, reason))
            continue
        some = mark_in_flight(snapshot, rule.rows(snapshot))
        identities.append(summarize(rule.name, some))
        rows += some
    some = mark_in_flight(snapshot, hierarchy_rows(snapshot, rows))
    identities.append(summarize("hierarchy", some))
    rows += some
    skew = skew_matrix(snapshot)
    per_node = judge_per_node(snapshot, rows)
    leads = orphan_findings(snapshot) + per_node.leads
    leads += row_findings(snapshot, per_node.others) + skew_findings(snapshot, skew)
    return Judgement(identities, rows, skew, leads, per_node.follows)


def _why_not(rule: Rule, snapshot: Snapshot) -> str | None:
    if rule.items and not snapshot.features.items.intersection(rule.items):
        return f"this kernel does not keep {' or '.join(rule.items)}"
    return rule.kept(snapshot)


def verdict(
    identities: Sequence[Identity],
    findings: Sequence[Finding],
    coverage: Mapping[str, Coverage],
) -> Verdict:
    """Say it in one word."""
    statuses = {identity.status for identity in identities}
    if findings:
        return "findings"
    if "unverifiable" in statuses or any(c.unreadable for c in coverage.values()):
        return "incomplete"
    return "moving" if "moving" in statuses else "exact"
