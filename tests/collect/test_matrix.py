# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Every identity on every kernel, workload and topology.

No row differs, nothing is left out without a reason, and every identity has something to
compare. The table in ``docs/identities.md`` says which kernel keeps which identity;
``scripts/test -k table --write-docs`` writes it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import lru_cache

import pytest
from drgn import Program, TypeKind
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.percpu import per_cpu
from labkit import topology
from labkit.arch import arch
from support.exact import check_exact, not_kept
from support.guests import ARCH, KERNELS, GuestImage, Lab, series
from support.identity_table import check_table, found_in

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect import collect
from memcg_inspect.image.image import image_of
from memcg_inspect.report import Report

TOPOLOGIES = ("4", "1", "2cpu+6mem") if arch(ARCH).has_nodes else ("1",)
WORKLOADS = ("mixed", "dying")
MATRIX = [(k, nodes, w) for k in KERNELS for nodes in TOPOLOGIES for w in WORKLOADS]
#: What runs without --all.
SHORT = {
    (kernel, nodes, "mixed")
    for kernel in KERNELS
    for nodes in (TOPOLOGIES if series(kernel) == "7.3" else TOPOLOGIES[:1])
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
    check_every_node(report, has_kernel_pages=not kernel.endswith("64k"))


def check_every_node(report: Report, has_kernel_pages: bool) -> None:
    """
    Every node backs slab objects, user pages and kernel pages, memory-only ones too.

    Page tables are on the node of the CPU. With pages of 64 KiB, what the workloads allocate on
    every node are slab objects, and no other kernel pages need be elsewhere.
    """
    root = report.memcgs[0].address
    nodes: defaultdict[str, set[int]] = defaultdict(set)
    for cell in report.skew:
        if cell.bytes and cell.memcg != root:
            nodes[cell.kind].add(cell.backing_nid)
    for kind in ("slab", "lru", *(["kmem"] if has_kernel_pages else [])):
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


def kinds_of(image: GuestImage, kernel: str) -> set[tuple[str, str]]:
    """Return what the workload leaves on this guest, from the guest's own files and its kernel."""
    kinds = set(KINDS)
    if kernel == "6.1/s390x":  # crst_table_alloc() and page_table_alloc() charge no memcg
        kinds.discard(("kmem", "table"))
    if "kernel_stack" in not_kept(kernel):
        kinds.discard(("kmem", "stack"))
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
    image = lab.image(kernel, TOPOLOGIES[0], "mixed")
    snapshot = snapshot_of(image)
    root = next(iter(snapshot.memcgs))
    paid: Counter[tuple[str, str]] = Counter()
    for entry, amount in snapshot.ledger:
        if snapshot.payer(entry.payer) not in (None, root):
            paid[entry.kind, entry.detail] += amount.bytes
    kinds = kinds_of(image, kernel)
    zswap = 0 if "zswap" in not_kept(kernel) else 1 if kernel.startswith("6.") else 2
    without = len({("kmem", "table"), ("kmem", "stack")} - kinds)
    assert len(kinds) == len(KINDS) - without + 2 + zswap
    assert {kind for kind, size in paid.items() if size > 0} == kinds


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_counter_is_over_zero_somewhere(lab: Lab, kernel: str) -> None:
    """Stocks may be empty here; test_stocks_are_in_rows is about them."""
    report = lab.image(kernel, TOPOLOGIES[0], "mixed").report()
    claimed: Counter[str] = Counter()
    for row in report.rows:
        if row.identity in ("reparenting", "released", "cached_stacks", "updated"):
            continue  # counts what must not, or need not, be there
        if row.identity in ("zone_mlock", "zone_zspages"):
            continue  # not every zone has such pages: tests/identities/test_zones.py
        claims = row.claimed or {}
        claimed[row.item] += any(claims.values())
    assert {item for item, number in claimed.items() if not number} == set()


def plain_stocks(prog: Program) -> tuple[Counter[int], Counter[int]]:
    """Return the stocks of all CPUs: pages by memcg, and bytes by obj_cgroup."""
    pages: Counter[int] = Counter()
    left: Counter[int] = Counter()
    for cpu in for_each_possible_cpu(prog):
        stock = per_cpu(prog["memcg_stock"], cpu)
        if stock.cached.type_.kind == TypeKind.ARRAY:
            for i in range(len(stock.cached)):
                pages[stock.cached[i].value_()] += int(stock.nr_pages[i])
            stock = per_cpu(prog["obj_stock"], cpu)
            if stock.nr_bytes.type_.kind == TypeKind.ARRAY:
                for i in range(len(stock.cached)):
                    left[stock.cached[i].value_()] += int(stock.nr_bytes[i])
                continue
        else:
            pages[stock.cached.value_()] += int(stock.nr_pages)
        left[stock.cached_objcg.value_()] += int(stock.nr_bytes)
    return pages, left


@pytest.mark.parametrize("kernel", KERNELS)
def test_stocks_are_in_rows(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, TOPOLOGIES[0], "mixed")
    report = image.report()
    pages, left = plain_stocks(image.program(dwarf=True))
    payer = {memcg.address: memcg.payer for memcg in report.memcgs}
    by_payer: Counter[int] = Counter()
    for memcg, number in pages.items():
        if memcg:
            by_payer[payer[memcg]] += number
    for row in report.rows:
        if row.identity == "usage":
            assert row.memcg is not None
            assert row.found["stock"] == by_payer[row.memcg]
        if row.identity == "objcg_bytes":
            assert row.objcg is not None
            assert row.found["stock"] == left[row.objcg]


@pytest.mark.parametrize("kernel", KERNELS)
def test_table(lab: Lab, kernel: str, request: pytest.FixtureRequest) -> None:
    chosen = MATRIX if request.config.getoption("--all") else SHORT
    reports = [lab.image(*image).report() for image in sorted(chosen) if image[0] == kernel]
    assert reports
    check_table(kernel, found_in(reports), request.config.getoption("--write-docs"))
