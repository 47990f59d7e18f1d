# SPDX-License-Identifier: LGPL-2.1-or-later
"""Where in the code memory was allocated, who pays for it and which node it is on."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from memcg_inspect.checks.identities.alloc_tags import site_name
from memcg_inspect.checks.profile import Profile, Use
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect import collect
from memcg_inspect.collect.alloc_tag_cost import read_costs, total_memory
from memcg_inspect.collect.image_info import image_info
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.alloc_tag import (
    proc_version,
    read_call_sites,
    why_no_call_sites,
    why_not_profiled,
)
from memcg_inspect.model import CallSite, Coverage, ImageError
from memcg_inspect.tables import Answer, Column, NotRead, Table, UsageError, Value
from memcg_inspect.views.view import Argument, View

__all__ = ("VIEW", "allocinfo", "allocinfo_by", "allocinfo_overhead", "allocinfo_proc")

COLUMNS = (
    Column("bytes", "bytes", "what was allocated and is not free yet", total=True),
    Column("calls", "count", "how many allocations that is", total=True),
    Column("memcg", "memcg", "who pays; none for what is charged to nobody"),
    Column("memcg_address", "address", "struct mem_cgroup *", shown=False),
    Column("node", "node", "node that the memory is on"),
    Column("kind", "text", "slab: objects; percpu; kmem, lru: pages that a memcg pays for; "
           "slab_page: pages that slabs lie in; page: all other pages"),
    Column("site", "text", "file and line"),
    Column("module", "text", "none for the kernel itself"),
    Column("function", "text", "the function that allocates"),
    Column("accurate", "flag", "no if some of it refers to no site, and is not counted"),
    Column("codetag", "address", "struct codetag *", shown=False),
)  # fmt: skip

OVERHEAD_COLUMNS = (
    Column("part", "text", "what it is for: the sites themselves, their counters on all CPUs, "
           "and the references of pages, slab objects and percpu memory"),
    Column("number", "count", "how many of them there are"),
    Column("overhead", "bytes", "what they take", total=True),
    Column("share", "share", "of the memory that the kernel manages", total=True),
)  # fmt: skip

#: What memory can be added up by, and the columns that tell it.
DIMENSIONS: dict[str, tuple[str, ...]] = {
    "memcg": ("memcg", "memcg_address"),
    "node": ("node",),
    "kind": ("kind",),
    "site": ("site", "module", "function", "accurate", "codetag"),
}

#: What of the audit's coverage the join rests on.
_SUBJECTS = (
    "memcgs", "names", "objcgs", "call_sites", "pages", "page_tags", "free_pages", "slab_pages",
    "slab", "slab_tags", "percpu", "percpu_nodes",
)  # fmt: skip

_TWICE = (
    "Slab objects and percpu memory are counted twice: with the site that asked for them, and, by "
    "whole pages, with that of the allocator that they lie in."
)


def allocinfo(image: Image, everything: bool = False) -> Answer:
    """
    Return what ``/proc/allocinfo`` says, largest first.

    :param everything: whether to list sites of which nothing is left, too
    :raises ImageError: if the kernel has no call sites
    """
    coverage = Coverage()
    sites = _sites(image, coverage)
    columns = _columns("bytes", "calls", *DIMENSIONS["site"])
    rows = [
        (_counter(site, site.bytes), _counter(site, site.calls), *_site_values(site))
        for site in sites.values()
        if everything or site.bytes != 0 or site.calls != 0
    ]
    off = why_not_profiled(image)
    notes = (_TWICE,) if off is None else (f"{off}: this was counted before.", _TWICE)
    table = Table("allocinfo", "call sites", columns, _largest_first(rows), empty="nothing counted")
    return Answer("allocinfo", image_info(image), (table,), {"call_sites": coverage}, notes)


def allocinfo_proc(image: Image) -> Answer:
    """
    Return the text of ``/proc/allocinfo`` as the kernel would write it.

    :raises ImageError: if the kernel has no call sites, or something of them cannot be read
    """
    coverage = Coverage()
    sites = _sites(image, coverage)
    version = proc_version(image)
    if version is None:
        raise ImageError("what this kernel writes at the head of /proc/allocinfo is not known")
    if coverage.unreadable:
        raise ImageError("call sites, or their counters, are not all in the image")
    lines = [f"allocinfo - version: {version}", "#     <size>  <calls> <tag info>"]
    for site in sites.values():
        # Marked since version 2.0; before, nothing was marked as inaccurate either.
        mark = "" if site.accurate else " accurate:no"
        # A line stays one, whatever the image has for names.
        name = "\\n".join(site_name(site).splitlines())
        lines.append(f"{site.bytes or 0:12d} {site.calls or 0:8d} {name}{mark} ")
    return Answer(
        "allocinfo",
        image_info(image),
        allocinfo(image, everything=True).tables,
        {"call_sites": coverage},
        text="".join(f"{line}\n" for line in lines),
    )


def allocinfo_by(image: Image, by: Iterable[str]) -> Answer:
    """
    Return what was allocated, added up by any of :data:`DIMENSIONS`, largest first.

    :raises ImageError: if nothing refers to call sites
    :raises UsageError: if there is no such dimension
    """
    wanted = [name for name in DIMENSIONS if name in set(by)]
    reason = why_not_profiled(image)
    if reason is not None:
        raise ImageError(reason)
    snapshot = collect(image)
    assert snapshot.profile is not None
    keys = [_keys(snapshot)[name] for name in wanted]
    found: dict[tuple[object, ...], tuple[int, int]] = {}
    for use, amount in snapshot.profile:
        key = tuple(of(use) for of in keys)
        size, calls = found.get(key, (0, 0))
        found[key] = size + amount.bytes, calls + amount.charges
    show = [_shown(snapshot, snapshot.profile)[name] for name in wanted]
    rows = [
        (*amount, *(value for part, shown in zip(key, show, strict=True) for value in shown(part)))
        for key, amount in found.items()
    ]
    columns = _columns("bytes", "calls", *(c for name in wanted for c in DIMENSIONS[name]))
    title = f"allocations by {', '.join(wanted)}" if wanted else "allocations"
    table = Table("allocinfo", title, columns, _largest_first(rows), empty="nothing found")
    coverage = {name: c for name, c in snapshot.coverage.items() if name in _SUBJECTS}
    notes = () if "kind" in wanted else (_TWICE,)
    return Answer("allocinfo", snapshot.image, (table,), coverage, notes)


def allocinfo_overhead(image: Image) -> Answer:
    """
    Return what profiling itself takes of the memory.

    :raises ImageError: if nothing refers to call sites
    """
    reason = why_not_profiled(image)
    if reason is not None:
        raise ImageError(reason)
    coverage: dict[str, Coverage] = {}
    total = total_memory(image)
    rows = [
        (cost.what, cost.number, cost.bytes, cost.bytes / total)
        for cost in read_costs(image, coverage)
    ]
    table = Table("overhead", "memory that profiling takes", OVERHEAD_COLUMNS, rows)
    return Answer("allocinfo", image_info(image), (table,), coverage)


def _sites(image: Image, coverage: Coverage) -> dict[int, CallSite]:
    reason = why_no_call_sites(image)
    if reason is not None:
        raise ImageError(reason)
    return read_call_sites(image, coverage)


def _columns(*names: str) -> tuple[Column, ...]:
    return tuple(column for column in COLUMNS if column.name in names)


def _largest_first(rows: Sequence[tuple[Value, ...]]) -> list[tuple[Value, ...]]:
    def order(row: tuple[Value, ...]) -> tuple[int, int]:
        size, calls = (v if isinstance(v, int) else 0 for v in row[:2])
        return -size, -calls

    return sorted(rows, key=order)


def _counter(site: CallSite, value: int | None) -> Value:
    if value is not None or not site.counters:
        return value  # those of a module that is gone may have been freed
    return NotRead("the counters of a call site are not in the image")


def _site_values(site: CallSite) -> tuple[Value, ...]:
    return site.site, site.module, site.function, site.accurate, site.address


Key = Callable[[Use], object]
Shown = Callable[[object], tuple[Value, ...]]


class _Orphan(NamedTuple):
    """A payer that is no obj_cgroup."""

    address: int


def _keys(snapshot: Snapshot) -> Mapping[str, Key]:
    """What tells the uses of each dimension apart."""

    def memcg(use: Use) -> object:
        if not use.payer:
            return None
        payer = snapshot.payer(use.payer)
        return _Orphan(use.payer) if payer is None else payer

    return {
        "memcg": memcg,
        "node": lambda use: use.nid,
        "kind": lambda use: use.kind,
        "site": lambda use: use.codetag,
    }


def _shown(snapshot: Snapshot, profile: Profile) -> Mapping[str, Shown]:
    """The values of the columns of each dimension, from what tells its uses apart."""

    def memcg(key: object) -> tuple[Value, ...]:
        if isinstance(key, _Orphan):
            return NotRead(f"charged to {key.address:#x}, which is no obj_cgroup"), None
        if not isinstance(key, int):
            return None, None
        return snapshot.memcgs[key].path, key

    def site(key: object) -> tuple[Value, ...]:
        assert isinstance(key, int)
        if key in profile.sites:
            return _site_values(profile.sites[key])
        return NotRead(f"there is no call site at {key:#x}"), None, None, None, key

    def plain(key: object) -> tuple[Value, ...]:
        assert isinstance(key, (int, str))
        return (key,)

    return {"memcg": memcg, "node": plain, "kind": plain, "site": site}


def _dimensions(text: str) -> list[str]:
    """The argument of ``--by``."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in DIMENSIONS:
            raise ArgumentTypeError(f"{name!r} is none of {', '.join(DIMENSIONS)}")
    return names


def _run(image: Image, args: Namespace) -> Answer:
    of = [name for name in ("memcg", "node") if getattr(args, name, None) is not None]
    as_proc = args.format == "proc"
    if as_proc or args.overhead:
        if args.by or of or args.all or (args.overhead and as_proc):
            raise UsageError("--format proc and --overhead go with no other choice of rows")
        if as_proc and (args.fields or args.sort or args.json or args.scripted):
            raise UsageError(
                "--format proc is what the kernel prints: no --fields, no --sort, no --json, no "
                "--scripted"
            )
        return allocinfo_overhead(image) if args.overhead else allocinfo_proc(image)
    if args.by or of:
        if args.all:
            raise UsageError("--all lists sites: it does not go with --by, --memcg or --node")
        return allocinfo_by(image, [*(args.by or ["site"]), *of])
    return allocinfo(image, args.all)


VIEW = View(
    name="allocinfo",
    help="where in the code memory was allocated, who pays and on which node it is",
    description="Lists the call sites of allocations, of kernels that profile them "
    "(CONFIG_MEM_ALLOC_PROFILING), as /proc/allocinfo does, or adds up what refers to them.",
    run=_run,
    arguments=(
        Argument(
            ("--by",),
            {
                "type": _dimensions,
                "metavar": "WHAT,...",
                "help": f"add up by any of {', '.join(DIMENSIONS)}",
            },
        ),
        Argument(
            ("--format",),
            {
                "choices": ("table", "proc"),
                "default": "table",
                "help": "proc: as /proc/allocinfo, byte for byte",
            },
        ),
        Argument(
            ("--all",),
            {"action": "store_true", "help": "list sites of which nothing is left, too"},
        ),
        Argument(
            ("--overhead",),
            {"action": "store_true", "help": "what profiling itself takes of the memory"},
        ),
    ),
)
