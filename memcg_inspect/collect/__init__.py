# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Collection
----------

Calls the readers of :mod:`memcg_inspect.linux`. :func:`collect` reads an image into a
:class:`~memcg_inspect.checks.snapshot.Snapshot`. :func:`audit` checks the snapshot, and reads the
image again to find the evidence for findings.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, TypeVar

from memcg_inspect.checks.diagnosis import diagnose, half_done_charges
from memcg_inspect.checks.evidence_query import Candidates, EvidenceQuery
from memcg_inspect.checks.findings import attach, candidate_sizes
from memcg_inspect.checks.judge import Judgement, judge, verdict
from memcg_inspect.checks.samples import (
    SAMPLES,
    common_coverage,
    is_coming_to_rest,
    is_settled,
    settle,
    without_rows,
)
from memcg_inspect.checks.skew import charged
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.checks.uncharged import uncharged
from memcg_inspect.checks.uncovered import not_covered
from memcg_inspect.collect.clock import Clock
from memcg_inspect.collect.collector import collect
from memcg_inspect.collect.counter_words import find_words
from memcg_inspect.collect.css_stacks import with_css_stacks
from memcg_inspect.collect.evidence import find_evidence
from memcg_inspect.collect.neighbours import with_neighbours
from memcg_inspect.collect.own import own_memcgs
from memcg_inspect.collect.stopped import with_pending, with_running, with_unlisted, with_waiting
from memcg_inspect.collect.ticks import STANDS_STILL, Ticks
from memcg_inspect.collect.unlisted_maps import with_map_makers
from memcg_inspect.image.image import Image
from memcg_inspect.image.missing import as_image_errors, why_missing
from memcg_inspect.image.progress import interrupted_reason
from memcg_inspect.model import Coverage
from memcg_inspect.report import WAIT, Identity, Report, Row

__all__ = ("audit", "collect")

_Reasoned = TypeVar("_Reasoned", Row, Identity)

#: The most times that a sample of a running kernel is tried, since memory that changes may cause an
#: error. Also the number of samples that are taken if each of them has something unreadable.
_MOST_TRIES = 3


def audit(image: Image, wait: float = WAIT) -> Report:
    """
    Compare the memory charged to memcgs with their counters.

    A running kernel is read several times if there are differences; see
    :mod:`memcg_inspect.checks.samples`.

    :param wait: how long a running kernel is given to come to rest, in seconds
    :raises ImageError: if this kernel does not charge kernel memory to memcgs, or its layout is
        unknown
    """
    with as_image_errors(), _no_garbage():
        return _audit(image, wait)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Do not look for circles of objects, which takes an eighth of an audit. It makes none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _audit(image: Image, wait: float) -> Report:
    frozen = not image.is_moving
    clock = Clock(image)
    began, ticks = time.monotonic(), None if frozen else Ticks(image)
    # Only the newest snapshot is kept: each is as large as the machine has memcgs and objects.
    snapshot, sample = _take_sample(image, clock, frozen)
    samples = [sample]
    while ticks is not None and not image.progress.stop:
        if _is_enough(samples) and not _is_worth_waiting(image, samples, snapshot, began, wait):
            break
        # Wait for a random time, so that samples do not coincide with a periodic workload.
        time.sleep(random.uniform(0.02, 0.2))
        is_decisive = ticks.come() and len(samples) >= SAMPLES - 2
        snapshot, sample = _take_sample(image, clock, frozen, is_decisive)
        samples.append(sample)
    stands = ticks is not None and len(samples) > 1 and not ticks.have_come
    report = _report(image, clock, snapshot, samples)
    return replace(report, notes=(*report.notes, STANDS_STILL)) if stands else report


class _Sample(NamedTuple):
    coverage: Mapping[str, Coverage]
    judged: Judgement


def _take_sample(
    image: Image, clock: Clock, frozen: bool, is_decisive: bool = False
) -> tuple[Snapshot, _Sample]:
    """
    Read and judge an image.

    :param is_decisive: whether this sample of a running kernel may turn differences into findings.
        What tasks wait for in the middle of a charge can take longer than all samples.
    """
    for tries in range(_MOST_TRIES):
        try:
            snapshot = with_pending(image, with_unlisted(image, collect(image, clock)))
            break
        except Exception:
            # Memory that was freed and reused during the read can lead to any error.
            if frozen or tries == _MOST_TRIES - 1:
                raise
    with clock.measure("judge"):
        judged = judge(snapshot)
    if any(row.status == "differs" for row in judged.rows):
        # Unwinding the stacks takes as long as reading all slabs, so do it only if needed.
        with clock.measure("running"):
            if frozen and not snapshot.running:
                snapshot = with_running(image, snapshot)
            elif is_decisive:
                waiting = with_waiting(image, snapshot)
                is_decisive, snapshot = waiting is not None, waiting or snapshot
            # Tasks sleep with references for seconds, longer than all samples take.
            snapshot = with_css_stacks(image, snapshot, judged.rows)
            snapshot = with_map_makers(image, snapshot, judged.rows)
            judged = judge(snapshot)
    if not frozen:
        judged = judged._replace(is_decisive=is_decisive)
        with clock.measure("evidence"):
            judged = _with_proofs(image, snapshot, judged)
    return snapshot, _Sample(snapshot.coverage, judged)


def _with_proofs(image: Image, snapshot: Snapshot, judged: Judgement) -> Judgement:
    """
    Find the evidence for findings that belong to no row.

    This is done for each sample at once: later, other objects may be at the addresses.
    """
    alone = without_rows(judged)
    queries = {query for pending in alone for query in pending.queries}
    evidence = _find_evidence(image, snapshot, queries)
    proved = [
        pending._replace(finding=attach(pending, evidence), queries=())
        if pending in alone
        else pending
        for pending in judged.findings
    ]
    return judged._replace(findings=proved)


def _find_evidence(
    image: Image, snapshot: Snapshot, queries: set[EvidenceQuery]
) -> Mapping[EvidenceQuery, Candidates]:
    """
    Find the evidence that findings ask for.

    :return: by query; nothing if a running kernel kept changing the memory that is read for it. A
        finding is true without its evidence, too.
    """
    for _ in range(_MOST_TRIES if queries else 0):
        try:
            return find_evidence(image, snapshot, queries)
        except Exception:
            # As for a sample. An image does not change: there it is a bug, or missing memory.
            if not image.is_moving:
                raise
    return {}


def _is_enough(samples: Sequence[_Sample]) -> bool:
    if not is_settled([sample.judged for sample in samples]):
        return False
    missed = [sum(c.unreadable for c in sample.coverage.values()) for sample in samples]
    return not all(missed) or len(samples) >= _MOST_TRIES


def _is_worth_waiting(
    image: Image, samples: Sequence[_Sample], newest: Snapshot, began: float, wait: float
) -> bool:
    """
    Return whether the machine may come to rest before the time is over.

    :param began: when the first sample was begun, in seconds
    """
    passed = time.monotonic() - began
    if passed + passed / len(samples) > wait:
        return False
    return is_coming_to_rest([sample.judged for sample in samples], own_memcgs(image, newest))


def _report(image: Image, clock: Clock, snapshot: Snapshot, samples: Sequence[_Sample]) -> Report:
    coverage = {
        name: common_coverage([sample.coverage.get(name, Coverage()) for sample in samples])
        for name in snapshot.coverage
    }
    is_whole = not any(c.unreadable for c in coverage.values())
    every = [sample.judged for sample in samples]
    # Without the samples that an interrupt prevents, no difference is proved.
    is_moving = len(samples) > 1 or (image.is_moving and image.progress.stop)
    judged = settle(every, is_whole, own_memcgs(image, snapshot)) if is_moving else every[0]
    with clock.measure("evidence"):
        queries = {query for pending in judged.findings for query in pending.queries}
        evidence = _find_evidence(image, snapshot, queries)
        findings = tuple(attach(pending, evidence) for pending in judged.findings)
    with clock.measure("diagnosis"):
        words = find_words(image, findings)
        # Findings of several samples have no queries left: each sample had its own candidates.
        sizes = [candidate_sizes(pending, evidence) for pending in judged.findings]
        diagnoses = diagnose(snapshot, judged.rows, findings, words, sizes)
        diagnoses = with_neighbours(image, diagnoses)
        half_done = half_done_charges(snapshot, judged.rows)
    report = Report(
        image=snapshot.image,
        verdict=verdict(judged.identities, findings, coverage),
        memcgs=tuple(snapshot.memcgs.values()),
        identities=tuple(judged.identities),
        rows=tuple(judged.rows),
        skew=tuple(judged.skew),
        findings=findings,
        coverage=coverage,
        timings=clock.seconds,
        reads=clock.reads,
        slab_usage=snapshot.slab_usage,
        percpu_usage=snapshot.percpu_usage,
        follows=judged.follows,
        notes=why_missing(image, coverage.values()),
        looks=len(samples),
        interrupted=image.progress.stop,
        not_covered=not_covered(snapshot),
        uncharged=uncharged(snapshot),
        charges=charged(snapshot),
        not_accounted=snapshot.features.not_accounted,
        diagnoses=diagnoses,
        half_done=half_done,
    )
    return _interrupted(report) if report.interrupted else report


def _interrupted(report: Report) -> Report:
    """Return the report of an audit that was interrupted, with this as the reason."""

    def said(found: _Reasoned) -> _Reasoned:
        return replace(found, reason=interrupted_reason(found.reason)) if found.reason else found

    return replace(
        report,
        rows=tuple(map(said, report.rows)),
        identities=tuple(map(said, report.identities)),
    )
