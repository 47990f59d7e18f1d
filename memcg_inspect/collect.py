# SPDX-License-Identifier: LGPL-2.1-or-later
"""
One pass over an image
----------------------

Drives the readers of :mod:`memcg_inspect.linux` and fills the ledger and the counters of
:mod:`memcg_inspect.audit`; then has them judged.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from drgn import FaultError, Object, Program, ProgramFlags

from memcg_inspect.audit.counters import Counters
from memcg_inspect.audit.findings import MOST_EVIDENCE, Suspect, attach
from memcg_inspect.audit.judge import judge, verdict
from memcg_inspect.audit.ledger import Entry, Ledger
from memcg_inspect.audit.slab import ITEMS
from memcg_inspect.audit.snapshot import Snapshot
from memcg_inspect.linux.memcontrol import accounting, nodeinfo, read_memcgs, read_objcgs
from memcg_inspect.linux.mmzone import mem_map, online_nodes, possible_cpus
from memcg_inspect.linux.pages import PagePiece, scan_pages
from memcg_inspect.linux.slab import Slab, SlabReader
from memcg_inspect.linux.stock import read_obj_stocks
from memcg_inspect.linux.vmstats import StatReader
from memcg_inspect.model import (
    Coverage,
    Evidence,
    ImageError,
    ImageInfo,
    Memcg,
    Report,
    Stat,
)

__all__ = ("audit", "collect")


class Clock:
    """Seconds spent, by what they were spent on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Add the time of a block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start


def audit(prog: Program) -> Report:
    """
    Hold what memcgs are charged for against their counters.

    :raises ImageError: if this kernel does not charge kernel memory to memcgs, or keeps its
        charges in a way that is not known here
    """
    clock = Clock()
    snapshot = collect(prog, clock)
    with clock.measure("judge"):
        judged = judge(snapshot)
    with clock.measure("evidence"):
        suspects = {lead.suspect for lead in judged.leads if lead.suspect is not None}
        evidence = _evidence(prog, snapshot, suspects) if suspects else {}
        findings = tuple(attach(lead, evidence) for lead in judged.leads)
    return Report(
        image=snapshot.image,
        verdict=verdict(judged.identities, findings, snapshot.coverage),
        memcgs=tuple(snapshot.memcgs.values()),
        identities=tuple(judged.identities),
        rows=tuple(judged.rows),
        skew=tuple(judged.skew),
        findings=findings,
        coverage=snapshot.coverage,
        timings=clock.seconds,
    )


def collect(prog: Program, clock: Clock | None = None) -> Snapshot:
    """
    Read everything that is to be judged.

    :raises ImageError: as :func:`audit` does
    """
    try:
        return _collect(prog, clock or Clock())
    except FaultError as error:
        raise ImageError(
            "the image lacks memory that nothing can be read without "
            f"({error}): it is truncated, or filtered too far"
        ) from error
    except (LookupError, AttributeError) as error:
        if isinstance(error, AttributeError) and "no member" not in str(error):
            raise
        raise ImageError(
            f"this kernel is not known here, or its debug info is not whole: {error}"
        ) from error


def _collect(prog: Program, clock: Clock) -> Snapshot:
    coverage: defaultdict[str, Coverage] = defaultdict(Coverage)
    with clock.measure("memcgs"):
        image = _image(prog)
        memcgs = read_memcgs(prog, coverage["memcgs"])
        objcgs = read_objcgs(prog, memcgs, coverage["objcgs"])
    with clock.measure("counters"):
        counters = _counters(prog, memcgs, coverage["counters"])
        stocks = read_obj_stocks(prog, coverage["stock"])
    ledger, slabs = Ledger(), SlabReader(prog)
    with clock.measure("pages"):
        for piece in scan_pages(prog):
            _add_piece(piece, ledger, slabs, coverage["pages"])
    coverage["slab"] = slabs.coverage
    return Snapshot(image, memcgs, objcgs, ledger, counters, stocks, dict(coverage))


def _image(prog: Program) -> ImageInfo:
    source: Literal["vmcore", "live", "qemu"] = "vmcore"
    if prog.flags & ProgramFlags.IS_LIVE:
        source = "live" if prog.flags & ProgramFlags.IS_LOCAL else "qemu"
    return ImageInfo(
        release=prog["UTS_RELEASE"].string_().decode(errors="backslashreplace"),
        source=source,
        nodes=online_nodes(prog),
        cpus=len(possible_cpus(prog)),
        page_size=mem_map(prog).page_size,
        accounting=accounting(prog),
    )


def _counters(prog: Program, memcgs: dict[int, Memcg], coverage: Coverage) -> Counters:
    reader = StatReader(prog, ITEMS.values())
    memcg_stats: dict[int, dict[str, Stat]] = {}
    lruvec_stats: dict[tuple[int, int], dict[str, Stat]] = {}
    for address in memcgs:
        memcg = Object(prog, "struct mem_cgroup *", address)
        try:
            memcg_stats[address] = reader.memcg(memcg)
            coverage.read += 1
        except FaultError as error:
            coverage.miss("counters of a memcg", error.address, str(error))
        try:
            for nid, pn in nodeinfo(memcg):
                lruvec_stats[address, nid] = reader.lruvec(pn)
                coverage.read += 1
        except FaultError as error:
            coverage.miss("counters of a memcg on a node", error.address, str(error))
    return Counters(memcgs, memcg_stats, lruvec_stats)


def _add_piece(piece: PagePiece, ledger: Ledger, slabs: SlabReader, coverage: Coverage) -> None:
    coverage.read += piece.pages
    if piece.unreadable is not None:
        coverage.miss("struct pages", piece.unreadable, "not in the image")
        ledger.gap("slab")
        ledger.gap("kmem")
        ledger.gap("lru")
    for page in piece.slabs:
        slab = slabs.slab(page)
        if slab is None:
            ledger.gap("slab", None, page.nid)
        else:
            _add_slab(slab, ledger)
    page_size = mem_map(slabs.prog).page_size
    for kmem in piece.kmem:
        detail = kmem.type or "other"
        entry = Entry(kmem.objcg, "kmem", detail, kmem.nid)
        ledger.add(entry, page_size << kmem.order, 1)


def _add_slab(slab: Slab, ledger: Ledger) -> None:
    detail = "reclaimable" if slab.cache.reclaimable else "unreclaimable"
    if slab.charged is None:
        ledger.gap("slab", detail, slab.nid)
        return
    for objcg, count in slab.charged.items():
        ledger.add(Entry(objcg, "slab", detail, slab.nid), count * slab.cache.charge, count)


def _evidence(
    prog: Program, snapshot: Snapshot, suspects: Iterable[Suspect]
) -> dict[Suspect, Sequence[Evidence]]:
    """Look at the pages again for the charges that findings ask for."""
    suspects = list(suspects)
    ranked: dict[Suspect, list[tuple[int, Evidence]]] = {s: [] for s in suspects}
    slabs = SlabReader(prog)
    for piece in scan_pages(prog):
        for page in piece.slabs:
            slab = slabs.slab(page)
            for suspect in suspects:
                if slab is not None and _may_hold(slab, suspect):
                    ranked[suspect] += _ranked(slabs, slab, suspect, snapshot)
        for suspect in suspects:
            ranked[suspect] = sorted(ranked[suspect], key=lambda r: -r[0])[:MOST_EVIDENCE]
    return {s: [evidence for _, evidence in found] for s, found in ranked.items()}


def _may_hold(slab: Slab, suspect: Suspect) -> bool:
    detail = "reclaimable" if slab.cache.reclaimable else "unreclaimable"
    return (
        suspect.kind == "slab"
        and bool(slab.charged)
        and suspect.detail in (None, detail)
        and suspect.nid in (None, slab.nid)
        and suspect.divides % slab.cache.charge == 0
        and not suspect.payers.isdisjoint(slab.charged or ())
    )


def _ranked(
    slabs: SlabReader, slab: Slab, suspect: Suspect, snapshot: Snapshot
) -> Iterator[tuple[int, Evidence]]:
    charged = slab.charged or {}
    neighbours = sum(n for objcg, n in charged.items() if objcg in suspect.neighbours)
    # The fewer objects it would take, and the more neighbours, the likelier.
    alike = suspect.divides == slab.cache.charge
    for thing in slabs.charged_objects(slab):
        if thing.objcg in suspect.payers:
            yield (
                2 * neighbours + alike,
                Evidence(
                    address=thing.address,
                    kind="slab",
                    nid=slab.nid,
                    bytes=slab.cache.charge,
                    cache=slab.cache.name,
                    page=slab.page,
                    objcg=thing.objcg,
                    memcg=snapshot.payer(thing.objcg),
                    note=f"objcg at {thing.element:#x}",
                ),
            )
