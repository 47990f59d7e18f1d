# SPDX-License-Identifier: LGPL-2.1-or-later
"""
One page is missing, which a line of the package reads: each line in turn.

The lines are those that a command runs on an image of this minute. Nothing here knows a structure.
Without --all, one line in six has its turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from drgn import FaultError
from drgn.helpers.linux.mm import follow_phys
from fuzz.attempt import AUDIT, VIEWS, opened, run
from fuzz.damage import PAGE, Change, Memory, Read, Trace
from fuzz.run import addresses
from support.guests import DEBIAN_KERNELS, GuestImage, Lab
from support.sampling import Sampled

from memcg_inspect.collect import audit
from memcg_inspect.image.image import Image
from memcg_inspect.model import ImageError, MemcgInspectError

pytestmark = pytest.mark.image

#: What runs on a CPU, and where, matters to `rss` only if a counter differs.
_IF_ROWS_DIFFER = ("linux/kernel/sched.py", "linux/kernel/stacktrace")


class Lines:
    """The lines that commands run on an image, and the image without one page at a time."""

    def __init__(self, image: GuestImage) -> None:
        core = image.core
        self.under, self.traced, self.prog = (opened(core) for _ in range(3))
        self.trace = Trace(self.traced, self.under)
        self.seen: set[str] = set()
        self._init_mm = self.under["init_mm"].address_of_()

    def of(self, arguments: Sequence[str]) -> dict[str, list[Read]]:
        """Return what the lines read that no command ran before."""
        self.trace.begin()
        run(Image(self.traced), arguments)
        # drgn keeps the types that it finds, and those that it does not.
        run(Image(self.prog), arguments)
        lines = {line: reads for line, reads in self.trace.lines.items() if line not in self.seen}
        self.seen |= lines.keys()
        return {line: lines[line] for line in sorted(lines) if not line.startswith("btf/")}

    def changes(self, lines: dict[str, list[Read]]) -> Iterator[Change]:
        """Yield a page that each line reads, and that no line before it does."""
        pages: set[int] = set()
        for reads in lines.values():
            # The first is often that of the root memcg, without which nothing can be read.
            for read in reads[len(reads) // 2 :]:
                try:
                    address = follow_phys(self._init_mm, read.address).value_()
                except (FaultError, ValueError):
                    continue
                if address // PAGE not in pages:
                    pages.add(address // PAGE)
                    yield Change("missing", read, address, None)
                    break


@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_an_audit_is_not_exact_and_accuses_nobody(lab: Lab, kernel: str, sampled: Sampled) -> None:
    lines = Lines(lab.image(kernel, "2", "mixed"))
    changes = sampled(list(lines.changes(lines.of(AUDIT))), 6)
    memory, incomplete = Memory(lines.prog, lines.under), 0
    wrong: list[tuple[str, str]] = []
    for change in changes:
        memory.only(change)
        try:
            report = audit(Image(lines.prog))
        except ImageError:
            continue  # nothing can be read without that page
        wanted = "incomplete" if memory.faults else "exact"
        if report.findings or report.verdict != wanted:
            wrong.append((report.verdict, str(change)))
        incomplete += memory.faults > 0
    assert wrong == []
    assert incomplete > len(changes) // 2


@pytest.mark.long
@pytest.mark.parametrize("seed", [4, 6, 10])
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_an_audit_in_full_flight_accuses_nobody(lab: Lab, kernel: str, seed: int) -> None:
    """What explains a difference may be what is missing: a stack, a queue, a memcg being freed."""
    lines = Lines(lab.image(kernel, "4", "churn", freeze="busy", seed=seed))
    memory, done = Memory(lines.prog, lines.under), 0
    for change in list(lines.changes(lines.of(AUDIT))):
        memory.only(change)
        try:
            report = audit(Image(lines.prog))
        except ImageError:
            continue
        done += 1
        assert report.findings == (), str(change)
    assert done > 50


@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_a_view_is_not_whole(lab: Lab, kernel: str, sampled: Sampled) -> None:
    lines, done = Lines(lab.image(kernel, "2", "mixed")), 0
    wrong: list[tuple[str, str]] = []
    lines.of(AUDIT)
    things = [f"{address:#x}" for address in addresses(Image(lines.under))]
    memory = Memory(lines.prog, lines.under)
    for view in VIEWS:
        arguments = (*view, *things) if view[0] == "who" else view
        memory.only(None)
        try:
            reads = lines.of(arguments)
        except MemcgInspectError:
            continue  # this kernel does not profile allocations
        for change in sampled(list(lines.changes(reads)), 6):
            memory.only(change)
            try:
                outcome = run(Image(lines.prog), arguments)
            except ImageError:
                continue
            needed = view[0] != "rss" or not change.read.line.startswith(_IF_ROWS_DIFFER)
            if memory.faults and needed:
                done += 1
                if outcome != "incomplete":
                    wrong.append((view[0], str(change)))
    assert wrong == []
    assert done > (30 if sampled.all else 10)
