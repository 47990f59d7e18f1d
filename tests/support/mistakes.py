# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The campaign of diagnoses on kernels that make a mistake.

Each kernel of ``fixtures/patches/7.3-pernode-broken`` makes one mistake again and again. The
mistake is in the kernel, not planted into an image.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from labkit import kernels

from support import kept
from support.guests import Lab

__all__ = ("MISTAKES", "Outcome", "built", "document", "run")


class Mistake(NamedTuple):
    """
    What gives a mistake away.

    :ivar workload: workload that makes the kernel make it
    :ivar causes: causes that name it. If there is none, no record of a cause says this of a
        kernel, so nothing may be more than likely
    """

    workload: str
    causes: frozenset[str] = frozenset()


MISTAKES = {
    "kmem-high-order": Mistake("mixed", frozenset(("charged-to-node",))),
    "percpu-current-node": Mistake("interleave", frozenset(("charged-to-node",))),
    "percpu-forgotten-node": Mistake("interleave"),
    "percpu-metadata-one-node": Mistake("interleave", frozenset(("charged-to-node",))),
    "percpu-metadata-size": Mistake("interleave", frozenset(("charged-size",))),
    "percpu-page-offset": Mistake("interleave", frozenset(("rule",))),
    "percpu-not-noted": Mistake("interleave", frozenset(("charged-to-node",))),
    "percpu-note-stays": Mistake("repopulated"),
    "percpu-table-at-boot": Mistake("interleave", frozenset(("charged-size",))),
    "reparent-forgotten-node": Mistake("interleave", frozenset(("not-reparented",))),
    "task-not-updated": Mistake("interleave", frozenset(("task-objcg",))),
    "uncharged-page-counter": Mistake("interleave", frozenset(("page-counter",))),
    "zswap-first-page": Mistake("straddle", frozenset(("rule",))),
    "zswap-storing-node": Mistake("zswap", frozenset(("charged-to-node",))),
}


class Outcome(NamedTuple):
    """
    What was said of one mistake.

    :ivar mistake: name of the patch
    :ivar findings: number of findings
    :ivar unexplained: those that no diagnosis explains
    :ivar first: cause of the first diagnosis
    :ivar said: the diagnoses
    :ivar wrongly_sure: those that are more than likely, and do not name the mistake
    :ivar seconds: time of the diagnosis
    """

    mistake: str
    findings: int
    unexplained: int
    first: str
    said: tuple[str, ...]
    wrongly_sure: tuple[str, ...]
    seconds: float

    @property
    def right(self) -> bool | None:
        """Whether the first diagnosis names it; ``None`` if no cause does."""
        causes = MISTAKES[self.mistake].causes
        return self.first in causes if causes else None


def name_of(mistake: str) -> str:
    """Return the name of the kernel that makes a mistake."""
    return f"7.3-pernode-broken-{mistake}"


def built() -> list[str]:
    """Return the mistakes whose kernels are in the cache."""
    return [mistake for mistake in kernels.BROKEN if kernels.cached(name_of(mistake))]


def run(mistake: str) -> Outcome:
    """Return what is said of a mistake; audit an image of its kernel unless that is kept."""
    found = kept.load("diagnosis", f"mistake {mistake}")
    if found is not None:
        return Outcome(*found)
    wanted = MISTAKES[mistake]
    report = Lab().image(name_of(mistake), "2cpu+6mem", wanted.workload).report()
    said = [(d, f"{d.cause} ({d.confidence}): {d.what}") for d in report.diagnoses]
    outcome = Outcome(
        mistake=mistake,
        findings=len(report.findings),
        unexplained=len(report.unexplained),
        first=next((d.cause for d in report.diagnoses), "-"),
        said=tuple(text for _, text in said),
        wrongly_sure=tuple(
            text for d, text in said if d.confidence != "likely" and d.cause not in wanted.causes
        ),
        seconds=report.timings["diagnosis"],
    )
    kept.keep("diagnosis", f"mistake {mistake}", outcome)
    return outcome


def document(some: Iterable[Outcome]) -> str:
    """Return the table of docs/diagnosis.md."""
    lines = [
        f"{'kernel with a mistake':26} {'findings':>8} {'unexplained':>12} {'diagnoses':>10} "
        f"{'wrongly sure':>13} {'slowest':>8}  first diagnosis"
    ]
    words = {True: "right", False: "wrong", None: "no cause is known"}
    lines += [
        f"{one.mistake:26} {one.findings:8} {one.unexplained:12} {len(one.said):10} "
        f"{len(one.wrongly_sure):13} {one.seconds:6.2f} s  {one.first} ({words[one.right]})"
        for one in some
    ]
    return "\n".join(lines)
