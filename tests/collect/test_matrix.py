# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Every identity on every kernel, workload and topology.

Nothing differs, nothing is left out without a reason, and nothing is exact for want of
anything to compare. Which kernel keeps which identity is the table in ``docs/identities.md``;
``scripts/test -k table --write-docs`` writes it anew.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import lru_cache

import pytest
from labkit import kernels, topology
from support.guests import BUILT_KERNELS, DEBIAN_KERNELS, ROOT, Image, Lab

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect import collect
from memcg_inspect.image.image import image_of
from memcg_inspect.model import Report

#: The kernels that the project answers for.
SUPPORTED = ("6.1", "6.12", "7.2", "7.3", "6.12-lab", "7.3-lab")
KERNELS = tuple(kernel for kernel in (*DEBIAN_KERNELS, *BUILT_KERNELS) if kernel in SUPPORTED)
TOPOLOGIES = ("4", "1", "2cpu+6mem")
WORKLOADS = ("mixed", "dying")
MATRIX = [(k, nodes, w) for k in KERNELS for nodes in TOPOLOGIES for w in WORKLOADS]
#: What runs without --all.
SHORT = {
    (kernel, nodes, "mixed")
    for kernel in KERNELS
    for nodes in (TOPOLOGIES if kernel in ("7.3", "7.3-lab") else ("4",))
}
#: What must be there at the least.
IDENTITIES = {
    "slab", "percpu", "kernel_stack", "pagetable", "vmalloc", "kmem", "objcg_bytes", "zswap",
    "sock", "usage", "lru", "levels", "references", "placement", "reparenting", "task_objcg",
    "alloc_tags", "hierarchy",
}  # fmt: skip

pytestmark = pytest.mark.image


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
def snapshot_of(image: Image) -> Snapshot:
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


def kinds_of(image: Image) -> set[tuple[str, str]]:
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


DOCS = ROOT / "docs" / "identities.md"
BEGIN, END = "<!-- identities -->", "<!-- /identities -->"

#: kernel -> identity -> how it ended, and why it is not kept
Table = dict[str, dict[str, tuple[str, str]]]


def found_in(reports: Iterable[Report]) -> dict[str, tuple[str, str]]:
    """How each identity ended on all images of one kernel."""
    ended: dict[str, tuple[str, str]] = {}
    for report in reports:
        for identity in report.identities:
            now = (identity.status.replace("-", " "), identity.reason or "")
            assert ended.setdefault(identity.name, now) == now, identity
    return ended


def read_table(text: str) -> Table:
    """The table as it stands in the document."""
    table: Table = defaultdict(dict)
    head: list[str] = []
    for line in text.split(BEGIN)[1].split(END)[0].strip().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and not head:
            head = cells[1:]
        elif line.startswith("| `"):
            for kernel, cell in zip(head, cells[1:], strict=True):
                if cell != "?":
                    table[kernel][cells[0].strip("`")] = cell, ""
        elif line.startswith("- "):
            names, reason = line[2:].split(": ", 1)
            identity, _, kernel = names.partition(" on ")
            identity = identity.strip("`")
            table[kernel][identity] = table[kernel][identity][0], reason
    return dict(table)


def write_table(text: str, table: Table) -> str:
    """The document with another table."""
    columns = [kernel for kernel in kernels.names() if kernel in table]
    columns += [name for name in table if name not in columns]
    lines = [
        "| identity | " + " | ".join(columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    identities = dict.fromkeys(identity for column in table.values() for identity in column)
    for identity in identities:
        cells = [table[kernel].get(identity, ("?", ""))[0] for kernel in columns]
        lines.append(f"| `{identity}` | " + " | ".join(cells) + " |")
    reasons = [
        f"- `{identity}` on {kernel}: {table[kernel][identity][1]}"
        for identity in identities
        for kernel in columns
        if table[kernel].get(identity, ("", ""))[1]
    ]
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    parts = [BEGIN, "", *lines, "", *reasons, "", END]
    return before + "\n".join(parts) + after


def check_table(name: str, found: dict[str, tuple[str, str]], write: bool) -> None:
    """Hold a column of the table against what was found, or write it."""
    if write:
        text = DOCS.read_text()
        DOCS.write_text(write_table(text, {**read_table(text), name: found}))
    assert read_table(DOCS.read_text()).get(name) == found


@pytest.mark.parametrize("kernel", KERNELS)
def test_table(lab: Lab, kernel: str, request: pytest.FixtureRequest) -> None:
    chosen = MATRIX if request.config.getoption("--all") else SHORT
    reports = [lab.image(*image).report() for image in sorted(chosen) if image[0] == kernel]
    assert reports
    check_table(kernel, found_in(reports), request.config.getoption("--write-docs"))
