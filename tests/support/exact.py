# SPDX-License-Identifier: LGPL-2.1-or-later
"""What an exact report of a kernel must contain."""

from __future__ import annotations

from collections.abc import Iterable

from labkit import kernels

from memcg_inspect.model import Report

#: What must be there at the least.
IDENTITIES = {
    "slab", "percpu", "kernel_stack", "pagetable", "vmalloc", "kmem", "objcg_bytes", "zswap",
    "sock", "usage", "lru", "levels", "references", "placement", "reparenting", "task_objcg",
    "alloc_tags", "hierarchy",
}  # fmt: skip


def not_kept(kernel: str) -> set[str]:
    """What a kernel cannot have, from how it was configured."""
    config = kernels.kernel(kernel).config
    # Allocation profiling is on only where a guest was booted with it.
    missing = {"alloc_tags"}
    if config.get("CONFIG_ZSWAP") != "y":
        missing.add("zswap")
    if kernel == "6.1":
        # Commit 1aacbd354313 ("mm: kmem: add direct objcg pointer to task_struct") (in v6.8).
        missing.add("task_objcg")
    return missing


def check_exact(report: Report, missing: Iterable[str] = ()) -> None:
    """Nothing but exact, and no identity missing but these, each with a reason."""
    found = {identity.name: identity for identity in report.identities}
    missing = set(missing)
    assert set(found) >= IDENTITIES
    differing = [row for row in report.rows if row.status != "exact"]
    assert differing == []
    assert report.findings == ()
    assert {n for n, i in found.items() if i.status == "not-kept" and i.reason} == missing
    assert {n for n, i in found.items() if i.status == "exact" and i.rows} == set(found) - missing
    unreadable = {s: c.examples for s, c in report.coverage.items() if c.unreadable}
    assert unreadable == {}
    assert report.verdict == "exact"
