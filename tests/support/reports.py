# SPDX-License-Identifier: LGPL-2.1-or-later
"""Reports made by hand, for tests of renderers."""

from __future__ import annotations

from dataclasses import replace

from memcg_inspect.model import NUMA_NO_NODE, Coverage, ImageInfo, Memcg, PercpuUsage, SlabUsage
from memcg_inspect.report import (
    Diagnosis,
    Effect,
    Evidence,
    Finding,
    Identity,
    Report,
    Row,
    Skew,
)

ROOT, WEB, GONE = 0xFFFF888000001000, 0xFFFF888000002000, 0xFFFF888000003000
OBJCG = 0xFFFF88800000A000
ITEM = "NR_SLAB_RECLAIMABLE_B"


def row(memcg: int, found: int, folded: int | None, status: str = "exact", nid: int = 0) -> Row:
    """Return a row of the slab identity."""
    return Row(
        identity="slab",
        memcg=memcg,
        objcg=None,
        nid=nid,
        item=ITEM,
        unit="bytes",
        status=status,  # type: ignore[arg-type]
        found={"slab": found},
        claimed=None if folded is None else {"folded": folded, "pending_cpu": 0, "stock": 0},
        reason="the counter could not be read" if folded is None else None,
        hierarchy=folded,
    )


def report(path: str = "/web", name: str = "dentry", note: str = "a note") -> Report:
    """Return a report with all parts; the parameters are names from an image."""
    return Report(
        image=ImageInfo("7.3.0", "vmcore", (0, 1), 2, 4096, "objcg-per-node"),
        verdict="findings",
        memcgs=(
            Memcg(ROOT, "/", 1, "online", None, ROOT),
            Memcg(WEB, path, 31, "online", ROOT, WEB),
            Memcg(GONE, path, 30, "dying", ROOT, ROOT),
        ),
        identities=(Identity("slab", "findings", 4, 1),),
        rows=(
            row(ROOT, 0, 0),
            row(ROOT, 0, 0, nid=1),
            row(WEB, 4000, 5064, "differs"),
            row(WEB, 700, None, "unverifiable", nid=1),
        ),
        skew=(Skew(WEB, "slab", 0, 0, 4000, 20), Skew(WEB, "slab", 0, 1, 700, 3)),
        findings=(
            Finding(
                identity="slab",
                kind="counter-above-objects",
                memcg=WEB,
                objcg=OBJCG,
                nid=0,
                item=ITEM,
                unit="bytes",
                difference=1064,
                what=f"{ITEM} on node 0 claims 1,064 bytes more than the objects found",
                evidence_is="candidates",
                evidence=(
                    Evidence(
                        address=0xFFFF888000F00000,
                        kind="slab",
                        nid=0,
                        bytes=200,
                        cache=name,
                        page=0xFFFFEA0000001000,
                        objcg=OBJCG,
                        memcg=WEB,
                        note=note,
                    ),
                    Evidence(address=0xFFFFFFFFFFFFFFF8, kind="slab"),
                ),
            ),
        ),
        coverage={"slab": _coverage(path), "pages": Coverage(262144)},
        timings={"pages": 0.0312345678},
        slab_usage=(
            SlabUsage(0, name, 0xFFFF888000700000, True, False, 192, 200, 2, 4, 42, 40, 20),
            SlabUsage(1, name, 0xFFFF888000700000, True, True, 192, 200, 1, 1, 1, 1, None),
        ),
        percpu_usage=(PercpuUsage(0, 3, 9000, 8000), PercpuUsage(NUMA_NO_NODE, 1, 100, 0)),
    )


def diagnosed() -> Report:
    """Return a report with two findings, and a diagnosis that explains the first one."""
    whole = report()
    [finding] = whole.findings
    other = replace(finding, memcg=None, objcg=0xBAD, kind="unknown-objcg", difference=None)
    effect = Effect("slab", WEB, None, 0, ITEM, "bytes", 1064, 1064)
    diagnosis = Diagnosis(
        cause="counter",
        what=f"{ITEM} on node 0 is 1,064 bytes too high",
        confidence="likely",
        memcgs=(WEB, ROOT),
        nid=0,
        amount=1064,
        unit="bytes",
        evidence=finding.evidence,
        evidence_total=20,
        findings=(0,),
        others=("1,064 bytes of freed slab objects are still charged",),
        signature=(effect,),
        functions=("mod_objcg_mlstate",),
    )
    return replace(whole, findings=(finding, other), diagnoses=(diagnosis,))


def more() -> Report:
    """Return a report that also has other identities, and charges without a node."""
    whole = report()
    pages = replace(row(ROOT, 3, 3), identity="kmem", item="MEMCG_KMEM", unit="pages", nid=None)
    nowhere = Evidence(0xFFFF888000F00008, "sock", nid=NUMA_NO_NODE)
    return replace(
        whole,
        image=replace(whole.image, debug_info="BTF of the image"),
        identities=(
            *whole.identities,
            Identity("kmem", "findings", 3, 1),
            Identity("zswap", "not-kept", 0, 0, "this kernel has no zswap"),
        ),
        rows=(
            *whole.rows,
            pages,
            replace(pages, memcg=WEB, claimed={"folded": 2}, status="differs"),
            replace(pages, memcg=WEB, claimed={"folded": 4}, status="in-flight"),
        ),
        skew=(*whole.skew, Skew(WEB, "sock", None, NUMA_NO_NODE, 4096, 1)),
        findings=(replace(whole.findings[0], nid=NUMA_NO_NODE, evidence=(nowhere,)),),
    )


def clean() -> Report:
    """Return a report without findings, of a machine with one node and no charges."""
    whole = report()
    return replace(
        whole,
        verdict="exact",
        image=replace(whole.image, nodes=(0,)),
        identities=(Identity("slab", "exact", 1, 0),),
        rows=(row(ROOT, 0, 0),),
        skew=(),
        findings=(),
        coverage={"pages": Coverage(1024)},
    )


def _coverage(reason: str) -> Coverage:
    coverage = Coverage(read=2511)
    coverage.miss("objcg vector", 0xFFFF888000E00000, f"not in the image: {reason}")
    return coverage
