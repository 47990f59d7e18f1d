# SPDX-License-Identifier: LGPL-2.1-or-later
"""What an exact report of a kernel must contain."""

from __future__ import annotations

from collections.abc import Iterable

from labkit import kernels

from memcg_inspect.report import Report
from support.identity_table import identities

#: Identities that have rows only if there are huge pages of hugetlb:
#: tests/identities/test_hugetlb_cgroups.py.
_MAY_BE_EMPTY = {"hugetlb_usage", "hugetlb_nodes"}


def not_kept(kernel: str) -> set[str]:
    """Return the identities that a kernel cannot keep, from its configuration."""
    ready = kernels.kernel(kernel)
    config = ready.config
    name, kernel = kernel, kernel.partition("/")[0]
    # Allocation profiling is on only where a guest was booted with it.
    missing = {"alloc_tags"}
    if "-pernode" not in kernel:
        missing.add("objcg_sets")
    if name.endswith("ppc64el-64k"):
        missing |= {"kernel_stack", "node_stack"}  # stacks are slab objects
    # These page counters are those of cgroup v1.
    missing |= {"kmem_usage", "tcpmem"}
    if config.get("CONFIG_ZSWAP") != "y":
        missing.add("zswap")
    if config.get("CONFIG_CGROUP_HUGETLB") != "y":
        missing |= {"hugetlb_usage", "hugetlb_nodes"}
    if name.endswith("s390x"):
        # QEMU's TCG has no EDAT, and so no huge pages.
        missing |= {"hugetlb_usage", "hugetlb_nodes"}
    if kernel in ("6.1", "7.2") or ready.release.startswith("6.12.107+"):
        # They have no hugetlb_cgroup_move_usage(). Mirrors have the latter for rarer architectures.
        missing.add("hugetlb_nodes")
    if config.get("CONFIG_VMAP_STACK") != "y":
        missing.add("cached_stacks")
    if kernel == "6.1" or config.get("CONFIG_ZSMALLOC") not in ("y", "m"):
        # Commit 43d746dc49bb ("mm/zsmalloc: use a proper page type") (in v6.11).
        missing.add("zone_zspages")
    if kernel == "6.1":
        # Commit 1aacbd354313 ("mm: kmem: add direct objcg pointer to task_struct") (in v6.8).
        missing.add("task_objcg")
        # Commit f82e6bf9bb9b ("mm: memcg: use rstat for non-hierarchical stats") (in v6.6).
        missing.add("local_fold")
    if kernel.startswith(("6.", "7.2")):
        missing.add("local")
    return missing


def check_exact(report: Report, missing: Iterable[str] = ()) -> None:
    """
    Check that a report is exact and whole.

    :param missing: the identities that must be ``not-kept``, with a reason; all others must have
        rows
    """
    found = {identity.name: identity for identity in report.identities}
    missing = set(missing)
    assert set(found) == identities()
    differing = [row for row in report.rows if row.status != "exact"]
    assert differing == []
    assert report.findings == ()
    assert {n for n, i in found.items() if i.status == "not-kept" and i.reason} == missing
    exact = {n for n, i in found.items() if i.status == "exact"}
    assert exact == set(found) - missing
    assert {n for n in exact if not found[n].rows} <= _MAY_BE_EMPTY
    unreadable = {s: c.examples for s, c in report.coverage.items() if c.unreadable}
    assert unreadable == {}
    assert report.verdict == "exact"
