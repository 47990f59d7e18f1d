# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Call sites of allocations
-------------------------

Mirrors :linux:`lib/alloc_tag.c` (:linux:`mm/alloc_tag.c` since 7.3) and :linux:`lib/codetag.c`.

With ``CONFIG_MEM_ALLOC_PROFILING`` every place in the code that allocates memory has a ``struct
alloc_tag``. It begins with a ``struct codetag``, and counts on each CPU the bytes and the number
of the allocations made there that are not freed yet. Each allocation refers to its tag.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from drgn import FaultError, offsetof, sizeof

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import static_key_enabled
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.memory import Memory
from memcg_inspect.image.strings import Strings
from memcg_inspect.linux.lib.list import idr_entries
from memcg_inspect.linux.mm.percpu_defs import percpu_offsets
from memcg_inspect.model import CallSite, Coverage

__all__ = (
    "TagRange",
    "alloc_tag_size",
    "read_call_site",
    "read_call_sites",
    "read_left_behind",
    "proc_version",
    "tag_ranges",
    "why_no_call_sites",
    "why_not_profiled",
)

#: ``CODETAG_FLAG_INACCURATE``. Kernels that do not define it never set a flag.
_INACCURATE = 1
#: The kernel has less read-only data, in bytes.
_MOST_DATA = 1 << 30
#: Counters that are at most this far apart are read together, in bytes.
_MOST_APART = 4096


class TagRange(NamedTuple):
    """
    The range of tags of the kernel itself or of one module, ``struct codetag_range``.

    :ivar start: ``struct codetag *`` of the first tag
    :ivar stop: address after the last tag
    """

    start: int
    stop: int


@per_image
def why_no_call_sites(image: Image) -> str | None:
    """
    Return why the kernel has no call sites.

    :return: one sentence for the user; ``None`` if the kernel has call sites
    """
    # struct alloc_tag exists without CONFIG_MEM_ALLOC_PROFILING, too.
    try:
        registered = int(image.object("alloc_tag_cttype").value_())
    except UnknownKernelError:
        return "this kernel was built without CONFIG_MEM_ALLOC_PROFILING"
    # IS_ERR_OR_NULL(alloc_tag_cttype)
    max_errno, word_bits = 4095, 8 * image.memory.word_size
    if not registered or registered >= (1 << word_bits) - max_errno:
        return "this kernel was not booted with allocation profiling (sysctl.vm.mem_profiling)"
    return None


@per_image
def why_not_profiled(image: Image) -> str | None:
    """
    Return why allocations do not refer to their call sites, ``mem_alloc_profiling_enabled()``.

    :return: one sentence for the user; ``None`` if they do
    """
    reason = why_no_call_sites(image)
    if reason is None and not static_key_enabled(image, "mem_alloc_profiling_key"):
        reason = "allocation profiling was off (sysctl vm.mem_profiling)"
    return reason


@per_image
def alloc_tag_size(image: Image) -> int:
    """Return ``sizeof(struct alloc_tag)``."""
    return int(sizeof(image.type("struct alloc_tag")))


def tag_ranges(image: Image, coverage: Coverage) -> list[TagRange]:
    """
    Return the ranges of tags: that of the kernel, then those of modules.

    :param coverage: counts what is unreadable
    """

    def missed(error: FaultError) -> None:
        coverage.miss("list of modules with call sites", error.address, str(error))

    ranges = []
    registered = image.object("alloc_tag_cttype")
    # codetag_module_init() adds up the tags of all ranges.
    most = int(registered.count) * alloc_tag_size(image)
    for module in idr_entries(image, "struct codetag_module", registered.mod_idr, missed):
        try:
            found = module.range.read_()
            tags = TagRange(int(found.start.value_()), int(found.stop.value_()))
            if not 0 <= tags.stop - tags.start <= most:
                reason = f"call sites from {tags.start:#x} to {tags.stop:#x}"
                raise FaultError(reason, module.value_())
            ranges.append(tags)
        except FaultError as error:
            missed(error)
    return ranges


def read_call_sites(image: Image, coverage: Coverage) -> dict[int, CallSite]:
    """
    Read all call sites, with the sums of their counters.

    Mirrors ``allocinfo_show()``.

    :param coverage: counts the call sites that were read, and those that are unreadable
    :return: by ``struct codetag *``, in the order of ``/proc/allocinfo``
    """
    reader, sites = _Reader(image), {}
    for start, stop in tag_ranges(image, coverage):
        size = stop - start - (stop - start) % reader.size
        if size <= 0:
            continue
        for offset, data in reader.memory.pieces(start, size, reader.size):
            if data is None:
                coverage.miss("call sites", start + offset, "not in the image")
                continue
            for site in reader.sites(start + offset, data, coverage):
                sites[site.address] = site
    return sites


def read_call_site(image: Image, address: int, coverage: Coverage) -> CallSite | None:
    """
    Read one call site.

    :param address: ``struct codetag *``
    :param coverage: counts the call site as read or unreadable
    :return: ``None`` if it is unreadable
    """
    reader = _Reader(image)
    try:
        data = reader.memory.read(address, reader.size)
    except FaultError as error:
        coverage.miss("call site", address, str(error))
        return None
    return next(reader.sites(address, data, coverage))


def read_left_behind(
    image: Image, addresses: Iterable[int], coverage: Coverage
) -> dict[int, CallSite]:
    """
    Read call sites of modules that were unloaded before their allocations were freed.

    :func:`tag_ranges()` does not have them any more.

    :param addresses: candidates: ``struct codetag *`` that allocations refer to
    :param coverage: counts the candidates that are unreadable
    :return: the candidates that are call sites, by ``struct codetag *``
    """
    sites: dict[int, CallSite] = {}
    reader = _Reader(image)
    find: Callable[[int], CallSite | None]
    try:
        # Since v6.13 ("alloc_tag: load module tags into separate contiguous memory") the tags of
        # modules are in an area of their own and stay there. Their strings are freed.
        area = image.object("module_tags")
        start, size = int(area.start_addr), int(area.size)
        find = reader.nameless
    except UnknownKernelError:
        # Before, the data of the module stays, with its tags and their strings.
        start, size = 0, 1 << 8 * reader.memory.word_size
        find = reader.plausible
    for address in sorted(addresses):
        if not start <= address < start + size:
            continue
        try:
            site = find(address)
        except FaultError as error:
            coverage.miss("call site", address, str(error))
            continue
        if site is not None:
            sites[address] = site
    return sites


def proc_version(image: Image) -> str | None:
    """
    Return the version in the first line of ``/proc/allocinfo``.

    Mirrors ``print_allocinfo_header()``. Debug info does not have the version: it is searched in
    the kernel's read-only data.

    :return: version, e.g. ``1.0``; ``None`` if it is not found
    """
    memory, head = image.memory, b"allocinfo - version: "
    try:
        start = image.symbol("__start_rodata").address
        end = image.symbol("__end_rodata").address
    except UnknownKernelError:
        return None
    if not 0 < end - start <= _MOST_DATA:
        return None
    before = b""
    for _, data in memory.pieces(start, end - start, memory.word_size):
        # The text may begin in one piece and end in the next.
        text = before + (data or b"")
        found = re.search(re.escape(head) + rb"([0-9.]{1,16})\n", text)
        if found is not None:
            return found[1].decode()
        before = text[-64:] if data else b""
    return None


class _Raw(NamedTuple):
    """
    The members of one ``struct alloc_tag``; pointers are not followed.

    :ivar address: ``struct codetag *``
    :ivar module: ``const char *``
    :ivar function: ``const char *``
    :ivar file: ``const char *``
    :ivar counters: ``struct alloc_tag_counters __percpu *``
    """

    address: int
    flags: int
    line: int
    module: int
    function: int
    file: int
    counters: int


class _Reader:
    """Reader of ``struct alloc_tag``."""

    def __init__(self, image: Image) -> None:
        self.image = image
        self.memory: Memory = image.memory
        self.size = alloc_tag_size(image)
        self._strings = Strings(self.memory)
        tag, codetag = image.type("struct alloc_tag"), image.type("struct codetag")
        base = offsetof(tag, "ct")
        self._counters = offsetof(tag, "counters")
        self._at = {m: base + offsetof(codetag, m) for m in ("flags", "lineno")}
        self._names = {m: base + offsetof(codetag, m) for m in ("modname", "function", "filename")}
        self._sums = _Counters(image)

    def raws(self, address: int, data: bytes) -> list[_Raw]:
        """Return the tags in *data*, which was read at *address*."""
        return [self._raw(address + at, data, at) for at in range(0, len(data), self.size)]

    def counters(self, raws: Sequence[_Raw]) -> dict[int, tuple[int, int]]:
        """Return the sums of the counters of tags, see :meth:`_Counters.read()`."""
        return self._sums.read([raw.counters for raw in raws if raw.counters])

    def sites(self, address: int, data: bytes, coverage: Coverage) -> Iterator[CallSite]:
        """
        Return the call sites in *data*, which was read at *address*.

        :param coverage: counts the call sites that were read, and their parts that are unreadable
        """
        raws = self.raws(address, data)
        counters = self.counters(raws)
        for raw in raws:
            size, calls = counters.get(raw.counters, (None, None))
            try:
                module = self._strings.at(raw.module) if raw.module else None
                function, file = self._strings.at(raw.function), self._strings.at(raw.file)
            except FaultError as error:
                coverage.miss("name of a call site", raw.address, str(error))
                module, function, file = None, "?", f"{raw.address:#x}"
            if size is None and raw.counters:
                coverage.miss("counters of a call site", raw.counters, "not in the image")
            else:
                coverage.read += 1
            yield CallSite(
                address=raw.address,
                file=file,
                line=raw.line,
                module=module,
                function=function,
                accurate=not raw.flags & _INACCURATE,
                counters=raw.counters,
                bytes=size,
                calls=calls,
            )

    def nameless(self, address: int) -> CallSite:
        """
        Read a call site whose strings were freed.

        :raises drgn.FaultError: if the tag cannot be read
        """
        raw = self._raw(address, self.memory.read(address, self.size), 0)
        size, calls = self.counters([raw]).get(raw.counters, (None, None))
        accurate = not raw.flags & _INACCURATE
        return CallSite(address, "?", raw.line, "?", "?", accurate, raw.counters, size, calls)

    def plausible(self, address: int) -> CallSite | None:
        """
        Read a candidate for a call site.

        :return: ``None`` if it has a string that is not text, or that cannot be read
        :raises drgn.FaultError: if the tag cannot be read
        """
        missed = Coverage()
        data = self.memory.read(address, self.size)
        (site,) = self.sites(address, data, missed)
        names = (site.file, site.function, site.module or "")
        is_text = all(name.isascii() and name.isprintable() and name for name in names)
        return site if is_text and not missed.unreadable else None

    def _raw(self, address: int, data: bytes, at: int) -> _Raw:
        flags, line = (
            int.from_bytes(data[at + offset : at + offset + 4], self.memory.order)
            for offset in self._at.values()
        )
        module, function, file = (
            self.memory.word_at(data, at + offset) for offset in self._names.values()
        )
        counters = self.memory.word_at(data, at + self._counters)
        return _Raw(address, flags, line, module, function, file, counters)


class _Counters:
    """Reader of ``struct alloc_tag_counters``, summed over all possible CPUs."""

    def __init__(self, image: Image) -> None:
        type_ = image.type("struct alloc_tag_counters")
        self.memory = image.memory
        self._size = sizeof(type_)
        self._bytes, self._calls = offsetof(type_, "bytes"), offsetof(type_, "calls")
        self._cpus = percpu_offsets(image)

    def read(self, pointers: Sequence[int]) -> dict[int, tuple[int, int]]:
        """
        Return the sums of counters, ``alloc_tag_read()``.

        Memory may be freed on another CPU than it was allocated on: a sum is modulo 2^64, and
        ``bytes`` is shown signed.

        :param pointers: ``struct alloc_tag_counters __percpu *``
        :return: bytes and number of allocations, by pointer; without counters that are
            unreadable on any CPU
        """
        sums: dict[int, tuple[int, int]] = {}
        for group in _groups(sorted(set(pointers)), _MOST_APART):
            try:
                sums |= self._read(group)
            except FaultError:
                sums |= self._one_by_one(group)
        return {pointer: (_signed(size), calls % 2**64) for pointer, (size, calls) in sums.items()}

    def _one_by_one(self, group: Sequence[int]) -> dict[int, tuple[int, int]]:
        sums: dict[int, tuple[int, int]] = {}
        for pointer in group:
            try:
                sums |= self._read([pointer])
            except FaultError:
                continue
        return sums

    def _read(self, group: Sequence[int]) -> dict[int, tuple[int, int]]:
        first, length = group[0], group[-1] - group[0] + self._size
        sums = dict.fromkeys(group, (0, 0))
        for offset in self._cpus.values():
            data = self.memory.read(first + offset, length)
            for pointer, (size, calls) in sums.items():
                at = pointer - first
                sums[pointer] = (
                    size + self._u64(data, at + self._bytes),
                    calls + self._u64(data, at + self._calls),
                )
        return sums

    def _u64(self, data: bytes, at: int) -> int:
        return int.from_bytes(data[at : at + 8], self.memory.order)


def _groups(pointers: Sequence[int], most_apart: int) -> Iterator[list[int]]:
    """Split sorted addresses into groups of neighbours."""
    group: list[int] = []
    for pointer in pointers:
        if group and pointer - group[-1] > most_apart:
            yield group
            group = []
        group.append(pointer)
    if group:
        yield group


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
