# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The matrix of planted faults: every planter on every kind of image.

:func:`run` plants into one kind of image; scripts/reliability runs all of them and writes
docs/reliability.md. Results are kept by kind (:mod:`support.kept`), so that a run that was
interrupted goes on where it was.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

from memcg_inspect.checks.registry import CHECKS
from memcg_inspect.model import counted
from support import kept
from support.guests import GuestImage, Lab
from support.planters import planters_of
from support.planting import BY_STACKS, NoVictim, Planter, Subject, cancels, ended

KERNELS = ("6.1", "6.12", "7.2", "7.3", "7.3-lab", "7.3-pernode")
FREEZES = ("settled", "busy", "panic")
FORMATS = ("elf", "kdump")
TYPES = ("btf", "dwarf")

#: Memcgs under load, and all others.
LOAD = "/churn/"


class Kind(NamedTuple):
    """A kind of image, and the types to read it with."""

    kernel: str
    freeze: str
    format: str
    types: str

    def __str__(self) -> str:
        return "-".join(self)

    def image(self, lab: Lab) -> GuestImage:
        """Return the image; the lab makes it."""
        more: dict[str, Any] = {"freeze": self.freeze, "format": self.format}
        if self.freeze == "panic":
            # Without a level, a crash kernel saves a gigabyte. Level 1, pages of zeroes, is not for
            # ELF: nothing tells them from other pages that are left out.
            more["level"] = 23 if self.format == "kdump" else 22
        if self.freeze != "settled":
            more["seed"] = 1
        if self.kernel == "7.3-lab":
            more["append"] = "sysctl.vm.mem_profiling=1"
        workload = "mixed" if self.freeze == "settled" else "loaded"
        return lab.image(self.kernel, "4", workload, **more)


KINDS = tuple(Kind(*kind) for kind in product(KERNELS, FREEZES, FORMATS, TYPES))


class Result(NamedTuple):
    """
    How one planted fault ended.

    :ivar size: what was planted; 0 if it is the size of an object
    :ivar load: whether the memcg was under load, on an image that was not at rest
    :ivar outcome: of :data:`support.planting.Outcome`, or ``none`` if there was no victim
    """

    identity: str
    what: str
    size: int
    load: bool
    outcome: Literal["found", "unverifiable", "in-flight", "missed", "accused", "none"]
    why: str = ""


class Results(NamedTuple):
    """
    All results on one kind of image.

    :ivar twin: findings on the image without a fault: (identity, item, difference)
    :ivar rows: number of rows of the image
    :ivar each: each so-many-th fault was planted
    """

    kind: Kind
    twin: list[list[Any]]
    rows: int
    results: list[Result]
    seconds: float
    each: int = 1


class Case(NamedTuple):
    """A fault to plant."""

    identity: str
    planter: Planter
    size: int
    load: bool


def cases(subject: Subject, kind: Kind) -> list[Case]:
    """
    Return the faults of an image: of each planter, in memcgs at rest and under load.

    ELF images that are read with BTF get every size. On other kinds each planter has a turn: one
    size, at rest or under load. The turns differ, so that each size is planted on several kinds.
    """
    turn, whole = KINDS.index(kind), (kind.format, kind.types) == ("elf", "btf")
    found = []
    for check in CHECKS:
        if check.why_not_kept(subject.snapshot) is not None:
            continue
        for number, planter in enumerate(planters_of(check.name)):
            one = planter.sizes[turn % len(planter.sizes)]
            load = kind.freeze != "settled"
            if whole:
                found += [Case(check.name, planter, size, False) for size in planter.sizes]
                found += [Case(check.name, planter, one, True)] if load else []
            else:
                found.append(Case(check.name, planter, one, load and (turn + number) % 2 == 0))
    return found


def plant(subject: Subject, chosen: Iterable[Case]) -> Iterator[Result]:
    """Plant faults, one at a time."""
    for case in chosen:
        subject.below = LOAD if case.load else ""
        subject.avoid = "" if case.load else LOAD
        told = (case.identity, case.planter.what, case.size, case.load)
        try:
            fault = case.planter.plant(subject, case.size)
            if case.load and not any(path.startswith(LOAD) for path in fault.paths):
                raise NoVictim("it is about no memcg")
            if cancels(subject.report, case.identity, fault):
                raise NoVictim("together with a charge that is half done it leaves the row exact")
        except NoVictim as error:
            yield Result(*told, "none", str(error))
            continue
        outcome, why = ended(subject.report, case.identity, fault, subject.audit(fault))
        yield Result(*told, outcome, why)


def is_by_stack(result: Result) -> bool:
    """Return whether a word on a stack may explain a fault, or cast doubt on its memcg."""
    return result.outcome in ("unverifiable", "in-flight") and result.identity in BY_STACKS


def plant_one(subject: Subject, case: Case) -> Result:
    """Plant a fault. If a stack explains it, or casts doubt on a memcg, another one has it."""
    [result] = plant(subject, [case])
    victims = subject.victims() if is_by_stack(result) else []
    for number in (4, 12):
        if is_by_stack(result):
            subject.doubtful = frozenset(victims[:number])
            [result] = plant(subject, [case])
    subject.doubtful = frozenset()
    return result


def subject_of(kind: Kind, lab: Lab) -> Subject:
    """Open an image."""
    return Subject(kind.image(lab).program(dwarf=kind.types == "dwarf"))


def measure(kind: Kind, lab: Lab, every: int = 1) -> Results:
    """Plant all faults of one kind of image, or each so-many-th of them."""
    began = time.monotonic()
    subject = subject_of(kind, lab)
    report = subject.report
    twin = [[f.identity, f.item, f.difference] for f in report.findings]
    chosen = cases(subject, kind)[KINDS.index(kind) % every :: every]
    results = list(plant(subject, chosen))
    return Results(kind, twin, len(report.rows), results, time.monotonic() - began, every)


def run(kind: Kind, lab: Lab, every: int = 1, again: bool = False) -> Results:
    """
    Return the results of a kind of image; measure them unless they are kept.

    Results of all faults are taken in place of those of some.
    """
    for each in () if again else (1, every):
        found = kept.load("reliability", f"{kind}-{each}")
        if found is not None:
            return _read(found, each)
    results = measure(kind, lab, every)
    kept.keep("reliability", f"{kind}-{every}", results[:-1])
    return results


def _read(found: Any, each: int) -> Results:
    kind, twin, rows, results, seconds = found
    return Results(Kind(*kind), twin, rows, [Result(*result) for result in results], seconds, each)


# What docs/reliability.md says


def bound(missed: int, planted: int) -> float:
    """
    Return the upper bound of a rate with 95 % confidence, after Clopper and Pearson.

    For nothing missed of n, that is 1 - 0.05^(1/n), about 3/n.
    """
    if missed >= planted:
        return 1.0
    low, high = missed / planted, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (low, rate) if _at_most(missed, planted, rate) < 0.05 else (rate, high)
    return high


def _at_most(missed: int, planted: int, rate: float) -> float:
    """Return how likely it is to miss so few of these at a rate."""
    term = (1 - rate) ** planted
    total = term
    for k in range(missed):
        term *= (planted - k) / (k + 1) * rate / (1 - rate)
        total += term
    return total


#: Sizes of faults in the document: the least of each class, in the unit of the row.
SIZES = ((1, "1"), (2, "2 to 99"), (100, "100 to 9,999"), (10_000, "10,000 and more"))


def size_class(size: int) -> str:
    """Return the class of the size of a fault."""
    if not size:
        return "of an object"
    return next(name for least, name in reversed(SIZES) if abs(size) >= least)


def table(title: str, cells: Sequence[tuple[str, Result]]) -> list[str]:
    """Return the lines of a table: for each key, how its faults ended."""
    keys = list(dict.fromkeys(key for key, _ in cells))
    width = max(len(title), *map(len, keys), len("all"))
    lines = [
        f"{title:{width}}  planted   found  unverifiable  in flight  missed  not found at most"
    ]
    for key in [*keys, "all"]:
        ends = [r.outcome for k, r in cells if key in (k, "all")]
        missed, in_flight = ends.count("missed") + ends.count("accused"), ends.count("in-flight")
        most = f"{100 * bound(missed + in_flight, len(ends)):.2f} %" if ends else "-"
        lines.append(
            f"{key:{width}}  {len(ends):7,} {ends.count('found'):7,}  "
            f"{ends.count('unverifiable'):12,}  {in_flight:9,}  {missed:6,}  {most:>17}"
        )
    return lines


def _whole(results: Sequence[Results]) -> str:
    """Say which faults were planted."""
    several = [r.each for r in results if r.each > 1]
    if not several:
        return ""
    on = "each" if len(several) == len(results) else f"{len(several)} of them"
    return f", and one of {max(several)} faults on {on}"


def document(results: Sequence[Results], commit: str, date: str) -> str:
    """Return the tables of docs/reliability.md."""
    every = [(r.kind, one) for r in results for one in r.results if one.outcome != "none"]
    accused = sum(len(r.twin) for r in results)
    seconds = sum(r.seconds for r in results)
    images = len({r.kind[:3] for r in results})
    lines = [
        f"commit {commit}, {date}: {counted(images, 'images')}, {counted(len(every), 'faults')}, "
        f"{seconds / 60:.0f} minutes",
        f"{len(results)} of {len(KINDS)} kinds of image and types{_whole(results)}",
        f"without a fault: {counted(len(results), 'audits')}, {sum(r.rows for r in results):,} "
        f"rows, {counted(accused, 'findings')}; at most "
        f"{100 * bound(sum(bool(r.twin) for r in results), len(results)):.1f} % of audits have one",
        "",
    ]
    order = [check.name for check in CHECKS]
    named = sorted(((r.identity, r) for _, r in every), key=lambda pair: order.index(pair[0]))
    lines += table("identity", named)
    for name in ("kernel", "freeze", "format", "types"):
        lines += ["", *table(name, [(getattr(kind, name), r) for kind, r in every])]
    load = [(("under load" if r.load else "at rest"), r) for k, r in every if k.freeze != "settled"]
    lines += ["", *table("memcg, of busy and panic", load)]
    order = ["of an object", *(name for _, name in SIZES)]
    sizes = sorted(((size_class(r.size), r) for _, r in every), key=lambda x: order.index(x[0]))
    lines += ["", *table("size", sizes)]
    return "\n".join(re.sub(r" +$", "", line) for line in lines)
