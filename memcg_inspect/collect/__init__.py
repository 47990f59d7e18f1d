# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Collecting and auditing
-----------------------

The only place that knows both the readers of :mod:`memcg_inspect.linux` and the nouns that
are judged: it reads an image in one pass, has it judged, and looks again where a finding asks
for evidence.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from memcg_inspect.checks.findings import attach
from memcg_inspect.checks.judge import Judgement, judge, verdict
from memcg_inspect.checks.samples import common_coverage, is_settled, settle, without_rows
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect.clock import Clock
from memcg_inspect.collect.collector import collect
from memcg_inspect.collect.evidence import find_evidence
from memcg_inspect.image.image import Image
from memcg_inspect.image.missing import why_missing
from memcg_inspect.linux.kernel.stacktrace import read_running
from memcg_inspect.model import Coverage, Report

__all__ = ("audit", "collect")

#: Times that a look at a running kernel is begun again, and looks for what could not be read.
_MOST_TRIES = 3


def audit(image: Image) -> Report:
    """
    Hold what memcgs are charged for against their counters.

    What runs is looked at several times where there are differences; see
    :mod:`memcg_inspect.checks.samples`.

    :raises ImageError: if this kernel does not charge kernel memory to memcgs, or keeps its
        charges in a way that is not known here
    """
    frozen = not image.is_moving
    clock = Clock(image.progress)
    looks = [_look(image, clock, frozen)]
    while not frozen and not _is_enough(looks) and not image.progress.stop:
        # Not in step with whatever goes round and round there.
        time.sleep(random.uniform(0.02, 0.2))
        looks.append(_look(image, clock, frozen))
    return _report(image, clock, looks)


class _Look(NamedTuple):
    snapshot: Snapshot
    judged: Judgement


def _look(image: Image, clock: Clock, frozen: bool) -> _Look:
    for tries in range(_MOST_TRIES):
        try:
            snapshot = collect(image, clock)
            break
        except Exception:
            # What was being read may have gone meanwhile, and be anything now.
            if frozen or tries == _MOST_TRIES - 1:
                raise
    with clock.measure("judge"):
        judged = judge(snapshot)
    if frozen and any(row.status == "differs" for row in judged.rows):
        # What CPUs were doing may explain it; stacks take as long to unwind as all slabs to read.
        with clock.measure("running"):
            snapshot = replace(snapshot, running=read_running(image))
            judged = judge(snapshot)
    if not frozen:
        with clock.measure("evidence"):
            judged = _with_proofs(image, snapshot, judged)
    return _Look(snapshot, judged)


def _with_proofs(image: Image, snapshot: Snapshot, judged: Judgement) -> Judgement:
    """Find at once what proves a finding that no row says: later it may be something else."""
    leads = without_rows(judged)
    suspects = {lead.suspect for lead in leads if lead.suspect is not None}
    if not suspects:
        return judged
    evidence = find_evidence(image, snapshot, suspects)
    proved = [
        lead._replace(finding=attach(lead, evidence), suspect=None) if lead in leads else lead
        for lead in judged.leads
    ]
    return judged._replace(leads=proved)


def _is_enough(looks: Sequence[_Look]) -> bool:
    if not is_settled([look.judged for look in looks]):
        return False
    missed = [sum(c.unreadable for c in look.snapshot.coverage.values()) for look in looks]
    return not all(missed) or len(looks) >= _MOST_TRIES


def _around(snapshot: Snapshot) -> list[int]:
    """Return the memcg that this program itself runs in, and its ancestors."""
    if snapshot.image.source != "live":
        return []
    own = next((task.memcg for task in snapshot.tasks if task.pid == os.getpid()), None)
    around: list[int] = []
    while own is not None and own in snapshot.memcgs:
        around.append(own)
        own = snapshot.memcgs[own].parent
    return around


def _report(image: Image, clock: Clock, looks: Sequence[_Look]) -> Report:
    snapshot = looks[-1].snapshot
    coverage = {
        name: common_coverage([look.snapshot.coverage.get(name, Coverage()) for look in looks])
        for name in snapshot.coverage
    }
    is_whole = not any(c.unreadable for c in coverage.values())
    every = [look.judged for look in looks]
    judged = settle(every, is_whole, _around(snapshot)) if len(looks) > 1 else every[0]
    with clock.measure("evidence"):
        suspects = {lead.suspect for lead in judged.leads if lead.suspect is not None}
        evidence = find_evidence(image, snapshot, suspects) if suspects else {}
        findings = tuple(attach(lead, evidence) for lead in judged.leads)
    return Report(
        image=snapshot.image,
        verdict=verdict(judged.identities, findings, coverage),
        memcgs=tuple(snapshot.memcgs.values()),
        identities=tuple(judged.identities),
        rows=tuple(judged.rows),
        skew=tuple(judged.skew),
        findings=findings,
        coverage=coverage,
        timings=clock.seconds,
        slab_usage=snapshot.slab_usage,
        percpu_usage=snapshot.percpu_usage,
        follows=judged.follows,
        notes=why_missing(image, coverage.values()),
        looks=len(looks),
        interrupted=image.progress.stop,
    )
