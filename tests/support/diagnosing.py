# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The campaign of diagnoses: every planter, alone and in pairs, and what the audit says of the cause.

Planters change memory and know nothing of rows (:mod:`support.planting`). Here is what a diagnosis
must say of each. scripts/diagnosis runs all parts and writes docs/diagnosis.md. Results are kept
(:mod:`support.kept`).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from memcg_inspect.checks.registry import CHECKS
from memcg_inspect.report import Diagnosis, Report
from support import cause_planters, kept
from support.guests import Lab
from support.planters import planters_of
from support.planting import Fault, NoVictim, Planter, Subject

#: Cause of the faults that the planters of an identity make.
CAUSES = {
    **dict.fromkeys(("references", "css_refs", "id_refs"), "reference"),
    **dict.fromkeys(("usage", "kmem_usage", "swap_usage", "tcpmem"), "page-counter"),
    **dict.fromkeys(("local", "local_fold"), "local-counter"),
    **dict.fromkeys(
        (
            *("node_slab", "node_stack", "node_pagetable", "node_vmalloc", "node_levels"),
            "node_totals",
        ),
        "node-counter",
    ),
    **dict.fromkeys(
        ("zone_free", "zone_free_area", "zone_zspages", "zone_mlock", "zone_lru", "zone_totals"),
        "zone-counter",
    ),
    **dict.fromkeys(("hugetlb_usage", "hugetlb_nodes"), "hugetlb-charge"),
    "objcg_bytes": "stock-bytes",
    "sock_bytes": "socket-bytes",
    "lru": "lru-size",
    "updated": "never-folded",
    "released": "memcg-leaked",
    "objcg_sets": "objcg-set",
    "placement": "vector-freed",
    "reparenting": "not-reparented",
    "objcg_lists": "objcg-owner",
    "task_objcg": "task-objcg",
    "active_memcg": "active-memcg",
    "cached_stacks": "cached-stack",
    "alloc_tags": "call-site",
}
#: Pairs or triples that are kept together.
_AT_ONCE = 10
#: Those of some planters, which differ from the others of their identity.
BY_PLANTER = {
    "owner of an object": "object-owner",
    "owner of an allocation": "object-owner",
    "length of an entry": "zswap-length",
    "memory of a socket": "not-counted",
    "both levels of a memcg": "counted-wrong",
}


class Case(NamedTuple):
    """
    A fault to plant.

    :ivar planter: what makes it
    :ivar size: its size
    :ivar cause: the cause that must be named
    :ivar identity: the identity whose planter it is; empty for those of
        :mod:`support.cause_planters`
    """

    planter: Planter
    size: int
    cause: str
    identity: str = ""

    def __str__(self) -> str:
        where = f"{self.identity}: " if self.identity else ""
        return f"{where}{self.planter.what}, {self.size}"


def cause_of(identity: str, planter: Planter, size: int) -> str:
    """Return the cause of what the planter of an identity makes."""
    cause = BY_PLANTER.get(planter.what, CAUSES.get(identity, "counter"))
    if cause == "reference":
        return "reference-leaked" if size > 0 else "reference-lost"
    return cause


class Result(NamedTuple):
    """
    What was said of one fault, or of several at once.

    :ivar what: what was planted
    :ivar named: whether each fault is named, with its memcgs, node and amount; of a single fault,
        by the first diagnosis
    :ivar cause: of a single fault, whether the cause of the first diagnosis is right
    :ivar alone: whether nothing else is named
    :ivar wrongly_sure: causes that were not planted, and that are called more than likely
    :ivar seconds: time of the diagnosis
    :ivar said: the diagnoses
    """

    what: str
    named: bool
    cause: bool
    alone: bool
    wrongly_sure: tuple[str, ...]
    seconds: float
    said: tuple[str, ...]


def cases(subject: Subject, sizes: int) -> list[Case]:
    """Return the faults of all planters, with at most so many sizes each."""
    of_identities = [
        Case(planter, size, cause_of(check.name, planter, size), check.name)
        for check in CHECKS
        if check.why_not_kept(subject.snapshot) is None
        for planter in planters_of(check.name)
        for size in planter.sizes[:sizes]
    ]
    return of_identities + [
        Case(planter, size, cause)
        for cause, planters in cause_planters.CAUSES.items()
        for planter in planters
        for size in planter.sizes[:sizes]
    ]


def is_of(subject: Subject, case: Case, fault: Fault, diagnosis: Diagnosis) -> bool:
    """Return whether a diagnosis names a fault, with its memcgs, node and amount."""
    if diagnosis.cause != case.cause:
        return False
    paths = {subject.snapshot.memcgs[memcg].path for memcg in diagnosis.memcgs}
    nids = {nid for _, nid, _, _ in fault.named} | {None}
    page = subject.snapshot.image.page_size
    amounts = {abs(amount or 0) * unit for *_, amount in fault.named for unit in (1, page)}
    return (
        paths <= set(fault.paths)
        and diagnosis.nid in nids
        and abs(diagnosis.amount or 0) in amounts
    )


def judged(subject: Subject, planted: Sequence[tuple[Case, Fault]], report: Report) -> Result:
    """Return what the report says of faults that were planted at once."""
    of = [
        [d for d in report.diagnoses if is_of(subject, case, fault, d)] for case, fault in planted
    ]
    causes = {case.cause for case, _ in planted}
    sure = [d for d in report.diagnoses if d.confidence != "likely"]
    wrong = [d for d in sure if not any(d in some for some in of)]
    first = report.diagnoses[:1]
    return Result(
        what=" + ".join(str(case) for case, _ in planted),
        named=all(of) if len(planted) > 1 else bool(first) and first[0] in of[0],
        cause=any(d.cause in causes for d in first),
        alone=len(report.diagnoses) == len(planted) and not report.unexplained,
        wrongly_sure=tuple(f"{d.cause} ({d.confidence}): {d.what}" for d in wrong),
        seconds=report.timings["diagnosis"],
        said=tuple(f"{d.cause} ({d.confidence}): {d.what}" for d in report.diagnoses),
    )


def plant(subject: Subject, *some: Case) -> Result | None:
    """Plant faults at once, each in other memcgs; return ``None`` if one has no victim."""
    planted: list[tuple[Case, Fault]] = []
    before = subject.doubtful
    try:
        for case in some:
            fault = case.planter.plant(subject, case.size)
            planted.append((case, fault))
            subject.doubtful |= frozenset(fault.paths)
    except (NoVictim, StopIteration, ValueError):
        return None
    finally:
        subject.doubtful = before
    writes = tuple(write for _, fault in planted for write in fault.writes)
    return judged(subject, planted, subject.audit(Fault(writes, (), set())))


def at_once(subject: Subject, number: int, seed: int) -> list[tuple[Case, Fault]]:
    """
    Return so many faults to plant at once, of different causes, each in other memcgs.

    :param seed: of the choice; the same ones are chosen each time
    """
    chosen, planted = cases(subject, 1), list[tuple[Case, Fault]]()
    random.Random(seed).shuffle(chosen)
    before = subject.doubtful
    for case in chosen:
        if case.cause in {other.cause for other, _ in planted}:
            continue
        with suppress(NoVictim, StopIteration, ValueError):
            fault = case.planter.plant(subject, case.size)
            planted.append((case, fault))
            subject.doubtful |= frozenset(fault.paths)
        if len(planted) == number:
            break
    subject.doubtful = before
    return planted


def singles(subject: Subject, chosen: Iterable[Case], victims: int) -> Iterator[Result]:
    """Plant each fault alone, in several victims."""
    for case in chosen:
        for _ in range(victims):
            result = plant(subject, case)
            if result is None:
                break
            yield result
            subject.doubtful |= frozenset(_paths(subject, case))
        subject.doubtful = frozenset()


def _paths(subject: Subject, case: Case) -> tuple[str, ...]:
    return case.planter.plant(subject, case.size).paths


def together(
    subject: Subject, chosen: Sequence[Case], size: int, number: int, seed: int = 1
) -> Iterator[Result]:
    """
    Plant several faults of different causes at once, always the same ones.

    :param size: how many faults at once
    :param number: how often
    """
    chance = random.Random(seed)
    for _ in range(number):
        some = [chance.choice(chosen)]
        while len(some) < size:
            causes = {case.cause for case in some}
            some.append(chance.choice([case for case in chosen if case.cause not in causes]))
        result = plant(subject, *some)
        if result is not None:
            yield result


class Unit(NamedTuple):
    """
    A part of the campaign whose results are kept by themselves.

    :ivar kernel: name of the kernel
    :ivar faults: how many are planted at once
    :ivar case: the fault to plant, in words; empty if several are planted at once
    :ivar number: how many victims, or how often several are planted
    :ivar seed: of the choice of several
    :ivar sizes: sizes of each planter
    """

    kernel: str
    faults: int
    case: str
    number: int
    seed: int
    sizes: int


class Rates(NamedTuple):
    """
    The outcome on one image.

    :ivar results: by the number of faults that were planted at once
    :ivar left: parts that were not measured
    """

    kernel: str
    results: tuple[list[Result], list[Result], list[Result]]
    left: int = 0

    @property
    def every(self) -> list[Result]:
        """All results."""
        return [result for some in self.results for result in some]


@functools.cache
def _subject(kernel: str) -> Subject:
    return Subject(Lab().image(kernel, "4", "mixed").program())


def units(kernel: str, sizes: int, victims: int, several: int) -> list[Unit]:
    """
    Return the parts of the campaign on one image.

    :param several: number of pairs, and twice the number of triples
    """
    chosen = cases(_subject(kernel), sizes)
    return [Unit(kernel, 1, str(case), victims, 0, sizes) for case in chosen] + [
        Unit(kernel, faults, "", min(_AT_ONCE, number - start), start // _AT_ONCE + 1, sizes)
        for faults, number in ((2, several), (3, several // 2))
        for start in range(0, number, _AT_ONCE)
    ]


def run(unit: Unit) -> list[Result]:
    """Return the results of a part of the campaign; measure them unless they are kept."""
    name = " ".join(map(str, unit))
    found = kept.load("diagnosis", name)
    if found is not None:
        return [Result(*result) for result in found]
    subject = _subject(unit.kernel)
    chosen = cases(subject, unit.sizes)
    if unit.case:
        some = [case for case in chosen if str(case) == unit.case]
        results = list(singles(subject, some, unit.number))
    else:
        results = list(together(subject, chosen, unit.faults, unit.number, unit.seed))
    kept.keep("diagnosis", name, results)
    return results


def document(some: Iterable[Rates], commit: str, date: str) -> str:
    """Return the table of docs/diagnosis.md."""
    lines = [
        f"commit {commit}, {date}",
        "",
        f"{'kernel':11} {'faults':>6} {'cause first':>12} {'all right':>10} {'alone':>6} "
        f"{'pairs':>6} {'both':>5} {'alone':>6} {'triples':>8} {'all':>4} {'alone':>6} "
        f"{'wrongly sure':>13} {'slowest':>8}",
    ]
    for rates in some:
        one, two, three = rates.results
        wrong = sum(len(r.wrongly_sure) for r in rates.every)
        lines.append(
            f"{rates.kernel:11} {len(one):6} {sum(r.cause for r in one):12} "
            f"{sum(r.named for r in one):10} {_alone(one):6} "
            f"{len(two):6} {sum(r.named for r in two):5} {_alone(two):6} "
            f"{len(three):8} {sum(r.named for r in three):4} {_alone(three):6} {wrong:13} "
            f"{max((r.seconds for r in rates.every), default=0):6.2f} s"
            + (f"  {rates.left} parts not measured yet" if rates.left else "")
        )
    return "\n".join(lines)


def _alone(results: Sequence[Result]) -> int:
    return sum(result.named and result.alone for result in results)
