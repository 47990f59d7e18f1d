# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Bugs that Linux really had, each put back into its kernel and provoked in a guest.

``fixtures/museum/NAME.patch`` puts a bug back. ``NAME.c``, a workload, or ``NAME.sh``, a script
that runs in the guest, provokes it. The mistake is in the kernel, not planted into an image.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from labkit import images
from labkit.paths import FIXTURES
from labkit.programs import MUSEUM

from support.guests import GuestImage

__all__ = ("EXHIBITS", "LEAK", "Exhibit", "Outcome", "document", "image", "run")

_MODULE = FIXTURES / "modules" / "exhibits"


#: What readers see is wrong wherever a counter is.
_ANY = frozenset(("hierarchy",))


class Exhibit(NamedTuple):
    """
    One bug.

    :ivar name: of the patch and its trigger
    :ivar fix: commit that fixed it, twelve digits; empty if no kernel has the fix
    :ivar release: first release with the fix
    :ivar broke: what it broke
    :ivar identities: those that must fail
    :ivar also: those that may fail with them
    :ivar nodes: NUMA nodes of the guest
    :ivar module: whether the trigger needs the module ``exhibits``
    :ivar append: kernel parameters
    :ivar base: kernel without the bug
    """

    name: str
    fix: str
    release: str
    broke: str
    identities: frozenset[str]
    also: frozenset[str] = frozenset()
    nodes: str = "2"
    module: bool = False
    append: str = ""
    base: str = "7.3-lab"


def _exhibit(
    name: str, fix: str, release: str, broke: str, *identities: str, **more: object
) -> Exhibit:
    also = frozenset(str(more.pop("also", "")).split()) | _ANY
    return Exhibit(name, fix, release, broke, frozenset(identities), also, **more)  # type: ignore[arg-type]


EXHIBITS = {
    exhibit.name: exhibit
    for exhibit in (
        _exhibit(
            "objstock-node", "7fa0dacbaf12", "5.14",
            "the object stock of a CPU is flushed to the node of the next change", "slab",
        ),
        _exhibit(
            "post-charge", "b7ffecbe198e", "6.13",
            "a large kmalloc that is charged later is in no slab counter of the memcg", "slab",
            module=True,
        ),
        _exhibit(
            "bulk-free", "d1b2cf6cb84a", "5.10", "objects that are freed in bulk stay charged",
            "slab", "kmem", "usage", also="references objcg_bytes kmem_usage",
            module=True,
        ),
        _exhibit(
            "split-page", "e1baddf8475b", "5.12",
            "of a block that is split, only the first page is uncharged", "kmem", "vmalloc",
            also="usage kmem_usage",
        ),
        _exhibit(
            "root-vmstats", "8faeb1ffd795", "5.10",
            "objects that the root inherited stay in its counters when they are freed", "slab",
            also="local",
        ),
        _exhibit(
            "percpu-metadata", "8c57c07741bf", "5.17",
            "the obj_cgroup pointers of percpu chunks are not charged", "percpu",
            also="kmem objcg_bytes usage",
        ),
        _exhibit(
            "stack-node", "27faca83a7e9", "5.13",
            "all pages of a kernel stack are counted on the node of the first one",
            "kernel_stack", also="node_stack",
        ),
        _exhibit(
            "shmem-thp-swapout", "dad2dc9c92e0", "6.13",
            "a huge page of shmem is still counted when it is swapped out", "user_pages",
        ),
        _exhibit(
            "shmem-thp-migrate", "0b52c420350e", "6.5",
            "the counter of huge pages of shmem does not follow them to another node",
            "user_pages", base="7.3-lab-moving",
        ),
        _exhibit(
            "collapse-file", "4188b2592ff6", "7.0",
            "a huge page of a file is counted for the memcg and node of what it replaced",
            "user_pages",
        ),
        _exhibit(
            "file-mapped", "5d543f13e2f5", "5.18",
            "pages of a huge page stay counted as mapped", "user_pages",
        ),
        _exhibit(
            "zswap-store-fails", "63895d20d63b", "6.14",
            "entries that could not be stored are uncharged, and never were charged", "zswap",
            "kmem", also="usage objcg_bytes",
        ),
        _exhibit(
            "sockmap-more-data", "84472b436e76", "5.18",
            "each part of a message uncharges all that is left of it", "sock",
            also="sock_bytes usage",
        ),
        _exhibit(
            "codetag-migrate", "51f43d5d82ed", "6.13",
            "a page that moved is taken off the call site of the page it moved to", "alloc_tags",
            append="sysctl.vm.mem_profiling=1", base="7.3-lab-moving",
        ),
        _exhibit(
            "swap-batch", "", "6.12",
            "swap entries of several memcgs are uncharged from the first one", "swap",
            also="swap_usage id_refs",
        ),
        _exhibit(
            "stock-trylock", "dccd5ee2625d", "7.0",
            "an object that an interrupt frees is added to the slab counter", "slab",
            module=True,
        ),
        _exhibit(
            "reparent-local", "154c16a783b7", "7.3.4",
            "local counters of a removed memcg are lost", "local",
        ),
    )
}  # fmt: skip


#: No patch: ___free_pages() of all kernels does it (docs/kernels.md).
LEAK = _exhibit("speculative", "", "", "pages of a block stay charged", "kmem", module=True)


class Outcome(NamedTuple):
    """
    What the audit says.

    :ivar name: of the exhibit
    :ivar verdict: of the kernel with the bug
    :ivar without: of the kernel without it, after the same
    :ivar failed: identities with findings
    :ivar first: first diagnosis
    """

    name: str
    verdict: str
    without: str
    failed: tuple[str, ...]
    first: str


def image(exhibit: Exhibit, kernel: str) -> GuestImage:
    """Return an image of a guest in which a bug was provoked."""
    script = MUSEUM / f"{exhibit.name}.sh"
    return GuestImage(
        images.image(
            kernel,
            exhibit.nodes,
            "idle" if script.exists() else exhibit.name,
            modules=((str(_MODULE), ""),) if exhibit.module else (),
            run=str(script) if script.exists() else None,
            append=exhibit.append,
        )
    )


def run(exhibit: Exhibit) -> Outcome:
    """Audit a kernel with a bug, and the one without it."""
    report = image(exhibit, f"7.3-museum-{exhibit.name}").report()
    without = image(exhibit, exhibit.base).report()
    return Outcome(
        exhibit.name,
        report.verdict,
        without.verdict,
        tuple(sorted({finding.identity for finding in report.findings})),
        next((f"{d.cause} ({d.confidence})" for d in report.diagnoses), "-"),
    )


def document(outcomes: Iterable[Outcome]) -> str:
    """Return the table of docs/museum.md."""
    lines = [f"{'exhibit':18} {'fixed by':13} {'in':6} {'first diagnosis':30} identities that fail"]
    for one in outcomes:
        exhibit = EXHIBITS[one.name]
        lines += [
            f"{one.name:18} {exhibit.fix or '-':13} {exhibit.release:6} {one.first:30} "
            f"{', '.join(one.failed) or one.verdict}",
            f"    {exhibit.broke}",
        ]
    return "\n".join(lines)
