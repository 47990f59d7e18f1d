# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Collecting and auditing
-----------------------

The only place that knows both the readers of :mod:`memcg_inspect.linux` and the nouns that
are judged: it reads an image in one pass, has it judged, and looks again where a finding asks
for evidence.
"""

from __future__ import annotations

from drgn import Program

from memcg_inspect.audit.findings import attach
from memcg_inspect.audit.judge import judge, verdict
from memcg_inspect.collect.collector import Clock, collect
from memcg_inspect.collect.evidence import find_evidence
from memcg_inspect.linux.filtered import why_missing
from memcg_inspect.model import Report

__all__ = ("Clock", "audit", "collect")


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
        evidence = find_evidence(prog, snapshot, suspects) if suspects else {}
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
        slab_usage=snapshot.slab_usage,
        percpu_usage=snapshot.percpu_usage,
        follows=judged.follows,
        notes=why_missing(prog, snapshot.coverage.values()),
    )
