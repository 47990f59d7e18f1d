# SPDX-License-Identifier: LGPL-2.1-or-later
"""Allocated memory by call site, memcg and node."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

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
from memcg_inspect.tables import (
    Answer,
    Column,
    Field,
    MemcgAddress,
    NotRead,
    Table,
    UsageError,
    Value,
    columns_of,
)
from memcg_inspect.views.view import Argument, View, by_argument, narrowed_by

__all__ = (
    "VIEW",
    "CallSiteRow",
    "OverheadRow",
    "allocinfo",
    "allocinfo_by",
    "allocinfo_overhead",
    "allocinfo_proc",
)


@dataclass(frozen=True)
class CallSiteRow:
    """Memory allocated at one call site; with ``--by``, summed up by the fields chosen."""

    bytes: Annotated[Value, Field("bytes", "bytes allocated and not freed yet", total=True)]
    calls: Annotated[Value, Field("count", "number of these allocations", total=True, priority=8)]
    memcg: Annotated[
        Value, Field("memcg", "memcg that pays; none if no memcg pays", priority=8)
    ] = None
    memcg_address: MemcgAddress = None
    node: Annotated[int | None, Field("node", "node of the memory", priority=7)] = None
    kind: Annotated[
        str | None,
        Field(
            "text",
            "slab: objects; percpu: percpu memory; kmem, lru: pages that a memcg pays for; "
            "slab_page: pages of slabs; page: all other pages",
            priority=7,
        ),
    ] = None
    site: Annotated[Value, Field("text", "file and line", priority=9)] = None
    module: Annotated[
        str | None, Field("text", "module; none for the kernel itself", priority=3)
    ] = None
    function: Annotated[str | None, Field("text", "function that allocates", priority=6)] = None
    accurate: Annotated[
        bool | None, Field("flag", "no if some of its allocations are not counted", priority=2)
    ] = None
    codetag: Annotated[int | None, Field("address", "struct codetag *", shown=False)] = None


@dataclass(frozen=True)
class OverheadRow:
    """Memory that one part of allocation profiling takes."""

    part: Annotated[
        str,
        Field(
            "text",
            "tags: call sites; counters: their counters on all CPUs; the others: references of "
            "pages, slab objects and percpu memory to call sites",
        ),
    ]
    number: Annotated[int, Field("count", "number of call sites, counters or references")]
    overhead: Annotated[int, Field("bytes", "bytes that these take", total=True)]
    share: Annotated[
        float, Field("share", "share of the memory that the kernel manages", total=True)
    ]


#: The dimensions of ``--by``, and the fields of each.
DIMENSIONS: dict[str, tuple[str, ...]] = {
    "memcg": ("memcg", "memcg_address"),
    "node": ("node",),
    "kind": ("kind",),
    "site": ("site", "module", "function", "accurate", "codetag"),
}

#: Subjects of the audit's coverage that sums by ``--by`` depend on.
_SUBJECTS = (
    "memcgs", "names", "objcgs", "call_sites", "pages", "page_tags", "slab_pages", "slab",
    "slab_tags", "percpu", "percpu_nodes",
)  # fmt: skip

_TWICE = (
    "Slab objects and percpu memory are counted twice: for the call site that asked for them, and, "
    "in whole pages, for the call site of the allocator that got the pages."
)


def allocinfo(image: Image, everything: bool = False) -> Answer:
    """
    Return the contents of ``/proc/allocinfo``, largest first.

    :param everything: whether to include call sites whose counters are 0
    :raises ImageError: if the kernel has no call sites
    """
    coverage = Coverage()
    sites = _sites(image, coverage)
    rows = [
        CallSiteRow(
            bytes=_counter(site, site.bytes),
            calls=_counter(site, site.calls),
            **_site_values(site),
        )
        for site in sites.values()
        if everything or site.bytes != 0 or site.calls != 0
    ]
    off = why_not_profiled(image)
    notes = (_TWICE,) if off is None else (f"{off}: these numbers are from before.", _TWICE)
    columns = _columns("site")
    table = _ranked("call sites", columns, rows, "nothing counted", "counters")
    return Answer("allocinfo", image_info(image), (table,), {"call_sites": coverage}, notes)


def allocinfo_proc(image: Image) -> Answer:
    """
    Return the text of ``/proc/allocinfo`` as the kernel would write it.

    :raises ImageError: if the kernel has no call sites, or if any could not be read
    """
    coverage = Coverage()
    sites = _sites(image, coverage)
    version = proc_version(image)
    if version is None:
        raise ImageError("the header of /proc/allocinfo of this kernel is not known")
    if coverage.unreadable:
        raise ImageError("call sites, or their counters, are not all in the image")
    lines = [f"allocinfo - version: {version}", "#     <size>  <calls> <tag info>"]
    for site in sites.values():
        # allocinfo_show() marks inaccurate sites since version 2.0; none are inaccurate before.
        mark = "" if site.accurate else " accurate:no"
        # Names in a damaged image may hold line feeds.
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
    Return allocated memory summed up by any of :data:`DIMENSIONS`, largest first.

    :raises ImageError: if memory does not refer to call sites
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
        CallSiteRow(
            bytes=size,
            calls=calls,
            **{
                field: value
                for part, shown in zip(key, show, strict=True)
                for field, value in shown(part).items()
            },
        )
        for key, (size, calls) in found.items()
    ]
    columns = _columns(*wanted)
    title = f"allocations by {', '.join(wanted)}" if wanted else "allocations"
    table = _ranked(title, columns, rows, "nothing found", "references")
    coverage = {name: c for name, c in snapshot.coverage.items() if name in _SUBJECTS}
    notes = () if "kind" in wanted else (_TWICE,)
    return Answer("allocinfo", snapshot.image, (table,), coverage, notes)


def allocinfo_overhead(image: Image) -> Answer:
    """
    Return the memory that allocation profiling itself takes.

    :raises ImageError: if memory does not refer to call sites
    """
    reason = why_not_profiled(image)
    if reason is not None:
        raise ImageError(reason)
    coverage: dict[str, Coverage] = {}
    total = total_memory(image)
    rows = [
        OverheadRow(cost.what, cost.number, cost.bytes, cost.bytes / total)
        for cost in read_costs(image, coverage)
    ]
    table = Table("overhead", "memory that profiling takes", columns_of(OverheadRow), rows)
    return Answer("allocinfo", image_info(image), (table,), coverage)


def _sites(image: Image, coverage: Coverage) -> dict[int, CallSite]:
    reason = why_no_call_sites(image)
    if reason is not None:
        raise ImageError(reason)
    return read_call_sites(image, coverage)


def _columns(*dimensions: str) -> tuple[Column, ...]:
    names = [name for dimension in dimensions for name in DIMENSIONS[dimension]]
    return columns_of(CallSiteRow, only=("bytes", "calls", *names))


def _ranked(
    title: str, columns: tuple[Column, ...], rows: Sequence[CallSiteRow], empty: str, contents: str
) -> Table:
    """Return a table of call sites, the largest first."""

    def order(row: CallSiteRow) -> tuple[int, int]:
        size, calls = (v if isinstance(v, int) else 0 for v in (row.bytes, row.calls))
        return -size, -calls

    rows = sorted(rows, key=order)
    return Table("allocinfo", title, columns, rows, empty=empty, is_ranked=True, contents=contents)


def _counter(site: CallSite, value: int | None) -> Value:
    if value is not None or not site.counters:
        return value  # the counters of a module that was removed may have been freed
    return NotRead("the counters of a call site are not in the image")


def _site_values(site: CallSite) -> dict[str, Any]:
    return {
        "site": site.site,
        "module": site.module,
        "function": site.function,
        "accurate": site.accurate,
        "codetag": site.address,
    }


Key = Callable[[Use], object]
#: Makes the fields of a dimension from a key.
Shown = Callable[[Any], dict[str, Any]]


class _Orphan(NamedTuple):
    """A payer that is not an obj_cgroup."""

    address: int


def _keys(snapshot: Snapshot) -> Mapping[str, Key]:
    """Return, for each dimension, a function that returns the key of a use."""

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
    """Return, for each dimension, a function that makes its fields from a key."""

    def memcg(key: int | _Orphan | None) -> dict[str, Any]:
        if isinstance(key, _Orphan):
            return {"memcg": NotRead(f"charged to {key.address:#x}, which is no obj_cgroup")}
        return {} if key is None else {"memcg": snapshot.memcgs[key].path, "memcg_address": key}

    def site(key: int) -> dict[str, Any]:
        if key in profile.sites:
            return _site_values(profile.sites[key])
        return {"site": NotRead(f"there is no call site at {key:#x}"), "codetag": key}

    return {
        "memcg": memcg,
        "node": lambda nid: {"node": nid},
        "kind": lambda kind: {"kind": kind},
        "site": site,
    }


def _run(image: Image, args: Namespace) -> Answer:
    of = narrowed_by(args)
    as_proc = args.format == "proc"
    if as_proc or args.overhead:
        rows = args.by or of or args.all or args.top is not None or args.since is not None
        if rows or (args.overhead and as_proc):
            raise UsageError(
                "--format proc and --overhead cannot be combined with each other, with --since or "
                "with a choice of rows"
            )
        if as_proc and (args.fields or args.sort or args.json or args.scripted):
            raise UsageError(
                "--format proc cannot be combined with --fields, --sort, --json, --scripted or "
                "--csv"
            )
        return allocinfo_overhead(image) if args.overhead else allocinfo_proc(image)
    if args.by or of:
        if args.all:
            raise UsageError("--all cannot be combined with --by, --memcg or --node")
        return allocinfo_by(image, [*(args.by or ["site"]), *of])
    return allocinfo(image, args.all)


VIEW = View(
    name="allocinfo",
    description="Lists the call sites of memory allocations as /proc/allocinfo does, or sums up "
    "the memory that refers to them. Needs a kernel with CONFIG_MEM_ALLOC_PROFILING.",
    run=_run,
    records=(CallSiteRow, OverheadRow),
    arguments=(
        by_argument(DIMENSIONS),
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
            {"action": "store_true", "help": "list call sites whose counters are 0, too"},
        ),
        Argument(
            ("--overhead",),
            {"action": "store_true", "help": "show the memory that profiling itself takes"},
        ),
    ),
    choices=("memcg", "node", "sort", "fields", "top"),
)
