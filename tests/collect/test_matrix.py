# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Every identity on every kernel, workload and topology.

Nothing differs, nothing is left out without a reason, and nothing is exact for want of
anything to compare. Which kernel keeps which identity is the table in ``docs/identities.md``;
``scripts/test -k table --write-docs`` writes it anew.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import lru_cache

import pytest
from labkit import topology
from support.exact import check_exact, not_kept
from support.guests import KERNELS, GuestImage, Lab
from support.identity_table import check_table, found_in

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect import collect
from memcg_inspect.image.image import image_of
from memcg_inspect.model import Report

TOPOLOGIES = ("4", "1", "2cpu+6mem")
WORKLOADS = ("mixed", "dying")
MATRIX = [(k, nodes, w) for k in KERNELS for nodes in TOPOLOGIES for w in WORKLOADS]
#: What runs without --all.
SHORT = {
    (kernel, nodes, "mixed")
    for kernel in KERNELS
    for nodes in (TOPOLOGIES if kernel in ("7.3", "7.3-lab") else ("4",))
}

pytestmark = pytest.mark.image


def marked(
    combination: tuple[str, str, str],
) -> tuple[str, str, str] | object:  # pytest.param() has no public type
    if combination in SHORT:
        return combination
    return pytest.param(*combination, marks=pytest.mark.long)


@pytest.mark.parametrize(("kernel", "nodes", "workload"), [marked(c) for c in MATRIX])
def test_every_identity_is_exact(lab: Lab, kernel: str, nodes: str, workload: str) -> None:
    report = lab.image(kernel, nodes, workload).report()
    check_exact(report, not_kept(kernel))
    machine = topology.parse(nodes)
    assert report.image.nodes == tuple(range(len(machine.nodes)))
    assert report.image.cpus == machine.cpus
    states = Counter(memcg.state for memcg in report.memcgs)
    assert states["dying"] >= 2
    assert states["online"] >= (40 if workload == "mixed" else 5)
    check_every_node(report)


def check_every_node(report: Report) -> None:
    """Every node backs slab objects, user pages and kernel pages, memory-only ones too."""
    root = report.memcgs[0].address
    nodes: defaultdict[str, set[int]] = defaultdict(set)
    for cell in report.skew:
        if cell.bytes and cell.memcg != root:
            nodes[cell.kind].add(cell.backing_nid)
    for kind in ("slab", "kmem", "lru"):
        assert nodes[kind] == set(report.image.nodes), kind


@lru_cache(maxsize=len(KERNELS))
def snapshot_of(image: GuestImage) -> Snapshot:
    return collect(image_of(image.program()))


#: Every kind of charge there is, as the ledger tells them apart; sockets and zswap aside,
#: which depend on the kernel.
KINDS = {
    ("slab", "reclaimable"),
    ("slab", "unreclaimable"),
    ("kmem", "large_kmalloc"),
    ("kmem", "stack"),
    ("kmem", "table"),
    ("kmem", "vmalloc"),
    ("kmem", "other"),
    ("percpu", "data"),
    ("percpu", "metadata"),
    ("lru", "lru"),
}


def kinds_of(image: GuestImage) -> set[tuple[str, str]]:
    """What the workload leaves on this guest, from the guest's own files and its kernel."""
    kinds = set(KINDS)
    stat = (image.guest / "2/cgroup/memory.stat").read_text()
    if (image.guest / "2/sys/kernel/debug/zswap").is_dir():
        kinds.add(("zswap", "compressed"))
    if "\nzswap_incomp " in stat:  # before, such pages were not taken
        kinds.add(("zswap", "incompressible"))
    for protocol in ("tcp_prot", "udp_prot"):
        # under its own name, whatever cache it shares
        kinds.add(("sock", image.program(dwarf=True)[protocol].name.string_().decode()))
    return kinds


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_trivially_empty(lab: Lab, kernel: str) -> None:
    """Each kind of charge is over zero in some memcg other than the root."""
    image = lab.image(kernel, "4", "mixed")
    snapshot = snapshot_of(image)
    root = next(iter(snapshot.memcgs))
    paid: Counter[tuple[str, str]] = Counter()
    for entry, amount in snapshot.ledger:
        if snapshot.payer(entry.payer) not in (None, root):
            paid[entry.kind, entry.detail] += amount.bytes
    kinds = kinds_of(image)
    zswap = 0 if "zswap" in not_kept(kernel) else 1 if kernel.startswith("6.") else 2
    assert len(kinds) == len(KINDS) + 2 + zswap
    assert {kind for kind, size in paid.items() if size > 0} == kinds


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_counter_is_over_zero_somewhere(lab: Lab, kernel: str) -> None:
    """And so is what stocks hold; what is pending is for guests that do not rest."""
    report = lab.image(kernel, "4", "mixed").report()
    claimed: Counter[str] = Counter()
    stock: Counter[str] = Counter()
    for row in report.rows:
        if row.identity == "reparenting":
            continue  # counts what must not be there
        claims = row.claimed or {}
        claimed[row.item] += any(claims.values())
        parts = (*claims.items(), *row.found.items())
        stock[row.identity] += any(part == "stock" and amount for part, amount in parts)
    assert {item for item, number in claimed.items() if not number} == set()
    with_stock = {identity for identity, number in stock.items() if number}
    assert with_stock >= {"objcg_bytes", "references", "usage"}


@pytest.mark.parametrize("kernel", KERNELS)
def test_table(lab: Lab, kernel: str, request: pytest.FixtureRequest) -> None:
    chosen = MATRIX if request.config.getoption("--all") else SHORT
    reports = [lab.image(*image).report() for image in sorted(chosen) if image[0] == kernel]
    assert reports
    check_table(kernel, found_in(reports), request.config.getoption("--write-docs"))
