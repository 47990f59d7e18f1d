# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Call sites of allocations, made by hand as in lib/alloc_tag.c and lib/codetag.c.

Two CPUs, tags of 40 bytes, and counters that are near each other or far apart.
"""

from __future__ import annotations

import pytest
from support.layouts import MadeImage

from memcg_inspect.linux.mm.alloc_tag import (
    TagRange,
    alloc_tag_size,
    proc_version,
    read_call_site,
    read_call_sites,
    read_left_behind,
    tag_ranges,
    why_no_call_sites,
    why_not_profiled,
)
from memcg_inspect.linux.mm.percpu_defs import percpu_offsets
from memcg_inspect.model import CallSite, Coverage

TYPES = """
    struct codetag { unsigned int flags; unsigned int lineno;
                     char *modname; char *function; char *filename; };
    struct alloc_tag { struct codetag ct; void *counters; };
    struct alloc_tag_counters { unsigned long bytes; unsigned long calls; };
    struct xa_node { unsigned long parent; void *slots[4]; };
    struct xarray { int xa_lock; void *xa_head; };
    struct idr { struct xarray idr_rt; };
    struct codetag_range { struct codetag *start; struct codetag *stop; };
    struct codetag_module { struct module *mod; struct codetag_range range; };
    struct codetag_type { unsigned long count; struct idr mod_idr; };
"""
AREA = "struct alloc_tag_module_section { unsigned long start_addr; unsigned long size; };"
STEP = 40
VARIABLES, TAGS, MODULE_TAGS = 0xFFFFFFFF82000000, 0xFFFFFFFF83000000, 0xFFFFFFFFC0000000
STRINGS, REGISTERED, NODE = 0xFFFFFFFF84000FF0, 0xFFFF888000100000, 0xFFFF888000200000
RANGES = 0xFFFF888000300000
#: Percpu memory of two CPUs, and ``__percpu`` pointers into it.
CPUS = {0: 0xFFFF888010000000, 1: 0xFFFF888020000000}
NEAR, FAR = 0x20, 0x9000
MOST = (1 << 64) - 1
NOT_BOOTED = "this kernel was not booted with allocation profiling (sysctl.vm.mem_profiling)"


def kernel() -> MadeImage:
    image = MadeImage()
    image.given[percpu_offsets] = CPUS
    image.declare(TYPES)
    image.variable("alloc_tag_cttype", "struct codetag_type *", VARIABLES)
    image.words(VARIABLES, REGISTERED)
    for name, at in (("a.c", 0), ("kmalloc", 8), ("é\n", 24), ("ext4", 32), ("", 40)):
        image.write(STRINGS + at, name.encode() + b"\0")
    return image


def put_tag(
    image: MadeImage,
    address: int,
    line: int,
    counters: int,
    *,
    flags: int = 0,
    module: int = 0,
    function: int = STRINGS + 8,
    file: int = STRINGS,
) -> None:
    members = {"ct.flags": flags, "ct.lineno": line, "ct.modname": module}
    names = {"ct.function": function, "ct.filename": file}
    image.make("struct alloc_tag", address, {**members, **names, "counters": counters})


def put_counters(image: MadeImage, pointer: int, *of_cpus: tuple[int, int]) -> None:
    for base, (size, calls) in zip(CPUS.values(), of_cpus, strict=True):
        image.words(base + pointer, size % (1 << 64), calls % (1 << 64))


def put_ranges(image: MadeImage, count: int, *ranges: tuple[int, int]) -> None:
    """Register ranges of tags: one is in the idr itself, more are in a node."""
    image.make("struct codetag_type", REGISTERED, {"count": count})
    places = [RANGES + 64 * n for n in range(len(ranges))]
    for place, (start, stop) in zip(places, ranges, strict=True):
        members = {"range.start": start, "range.stop": stop}
        image.make("struct codetag_module", place, members)
    image.words(NODE, 0, *places, *[0] * (4 - len(places)))
    head = REGISTERED + 16
    image.words(head, places[0] if len(places) == 1 else NODE | 2)


# Whether there are any


@pytest.mark.parametrize(
    ("registered", "why"),
    [
        (REGISTERED, None),
        (0, NOT_BOOTED),
        (MOST, NOT_BOOTED),
        ((1 << 64) - 4095, NOT_BOOTED),
        ((1 << 64) - 4096, None),
    ],
)
def test_kernels_that_have_call_sites(registered: int, why: str | None) -> None:
    """``IS_ERR_OR_NULL()``: the highest 4095 addresses are errors."""
    image = kernel()
    image.words(VARIABLES, registered)
    assert why_no_call_sites(image) == why


def test_kernels_without_call_sites() -> None:
    assert why_no_call_sites(MadeImage()) == (
        "this kernel was built without CONFIG_MEM_ALLOC_PROFILING"
    )
    assert why_not_profiled(MadeImage()) == why_no_call_sites(MadeImage())


@pytest.mark.parametrize("enabled", [0, 1, 2])
def test_whether_allocations_refer_to_their_sites(enabled: int) -> None:
    image = kernel()
    image.declare("""
        struct atomic { int counter; };
        struct static_key { struct atomic enabled; };
        struct static_key_true { struct static_key key; };
    """)
    image.variable("mem_alloc_profiling_key", "struct static_key_true", VARIABLES + 64)
    image.write(VARIABLES + 64, bytes([enabled]))
    off = "allocation profiling was off (sysctl vm.mem_profiling)"
    assert why_not_profiled(image) == (None if enabled else off)


# Ranges


def test_ranges_of_tags() -> None:
    image, coverage = kernel(), Coverage()
    of_kernel, of_module = (TAGS, TAGS + 3 * STEP), (MODULE_TAGS, MODULE_TAGS + STEP)
    put_ranges(image, 3, of_kernel)
    assert tag_ranges(image, coverage) == [TagRange(*of_kernel)]
    put_ranges(image, 3, of_kernel, of_module, (TAGS, TAGS))
    expected = [TagRange(*of_kernel), TagRange(*of_module), TagRange(TAGS, TAGS)]
    assert tag_ranges(image, coverage) == expected
    assert not coverage.unreadable
    assert alloc_tag_size(image) == STEP


def test_ranges_that_cannot_be() -> None:
    """More tags than are registered, an end before the start, and a module that is not there."""
    image, coverage = kernel(), Coverage()
    whole = (TAGS, TAGS + 3 * STEP)
    put_ranges(image, 3, (TAGS, TAGS + 3 * STEP + 1), whole, (TAGS, TAGS - 8))
    assert tag_ranges(image, coverage) == [TagRange(*whole)]
    assert [(e.what, e.address) for e in coverage.examples] == [
        ("list of modules with call sites", RANGES),
        ("list of modules with call sites", RANGES + 128),
    ]
    assert f"call sites from {TAGS:#x}" in coverage.examples[0].reason
    image.words(NODE + 8, 0xFFFF88807FFF0000)
    coverage = Coverage()
    assert tag_ranges(image, coverage) == [TagRange(*whole)]
    assert coverage.unreadable == 2


# Sites


def site(address: int, **other: object) -> CallSite:
    given = {
        "address": address,
        "file": "a.c",
        "line": 7,
        "module": None,
        "function": "kmalloc",
        "accurate": True,
        "counters": NEAR,
        "bytes": 0,
        "calls": 0,
    }
    return CallSite(**{**given, **other})  # type: ignore[arg-type]


def test_sites_with_sums_of_all_cpus() -> None:
    """Bytes are signed, and counts modulo 2^64: memory may be freed on another CPU."""
    image, coverage = kernel(), Coverage()
    put_counters(image, NEAR, (4096, 1), (-96, 2))
    put_counters(image, NEAR + 16, (-200, -1), (100, 0))
    put_counters(image, FAR, (1 << 62, 5), (1 << 62, MOST))
    put_tag(image, TAGS, 7, NEAR)
    put_tag(image, TAGS + STEP, 70000, NEAR + 16, flags=1, module=STRINGS + 32)
    put_tag(image, TAGS + 2 * STEP, 1, FAR, flags=2, file=STRINGS + 24)
    put_tag(image, MODULE_TAGS, 9, 0, flags=3)
    # What is behind the last whole tag of a range is none.
    put_ranges(image, 4, (TAGS, TAGS + 3 * STEP + 8), (MODULE_TAGS, MODULE_TAGS + STEP), (8, 8))
    found = read_call_sites(image, coverage)
    assert list(found.values()) == [
        site(TAGS, bytes=4000, calls=3),
        site(
            *(TAGS + STEP,),
            line=70000,
            module="ext4",
            accurate=False,
            counters=NEAR + 16,
            bytes=-100,
            calls=MOST,
        ),
        site(TAGS + 2 * STEP, file="é\n", line=1, counters=FAR, bytes=-(1 << 63), calls=4),
        site(MODULE_TAGS, line=9, accurate=False, counters=0, bytes=None, calls=None),
    ]
    assert list(found) == [s.address for s in found.values()]
    assert (coverage.read, coverage.unreadable) == (4, 0)


def test_the_largest_sum_of_bytes_is_not_negative() -> None:
    image = kernel()
    put_counters(image, NEAR, ((1 << 63) - 1, 0), (0, 0))
    put_tag(image, TAGS, 7, NEAR)
    assert read_call_site(image, TAGS, Coverage()) == site(TAGS, bytes=(1 << 63) - 1)


def test_one_site() -> None:
    image, coverage = kernel(), Coverage()
    put_counters(image, NEAR, (64, 1), (0, 0))
    put_tag(image, TAGS + STEP, 8, NEAR)
    found = read_call_site(image, TAGS + STEP, coverage)
    assert found == site(TAGS + STEP, line=8, bytes=64, calls=1)
    assert (coverage.read, coverage.unreadable) == (1, 0)
    missing = 0xFFFF88807FFF0000
    assert read_call_site(image, missing, coverage) is None
    assert (coverage.read, coverage.unreadable) == (1, 1)
    assert (coverage.examples[0].what, coverage.examples[0].address) == ("call site", missing)


def test_counters_that_are_not_in_the_image() -> None:
    """Those beside them are read all the same, also if they are read together."""
    image, coverage = kernel(), Coverage()
    gone = 0x1000  # of both CPUs, a page behind NEAR
    put_counters(image, NEAR, (64, 1), (8, 1))
    put_counters(image, FAR, (16, 1), (0, 0))
    image.words(CPUS[0] + gone, 1, 1)  # the other CPU has no such page
    for n, pointer in enumerate((gone, NEAR, FAR)):
        put_tag(image, TAGS + n * STEP, 7, pointer)
    put_ranges(image, 3, (TAGS, TAGS + 3 * STEP))
    found = read_call_sites(image, coverage)
    assert [(s.counters, s.bytes, s.calls) for s in found.values()] == [
        (gone, None, None),
        (NEAR, 72, 2),
        (FAR, 16, 1),
    ]
    assert (coverage.read, coverage.unreadable) == (2, 1)
    example = coverage.examples[0]
    assert (example.what, example.address) == ("counters of a call site", gone)


@pytest.mark.parametrize("name", ["function", "file", "module"])
def test_names_that_are_not_in_the_image(name: str) -> None:
    image, coverage = kernel(), Coverage()
    put_counters(image, NEAR, (64, 1), (0, 0))
    put_tag(image, TAGS, 7, NEAR, **{name: 0xFFFF88807FFF0000})  # type: ignore[arg-type]
    nameless = site(TAGS, file=f"{TAGS:#x}", function="?", bytes=64, calls=1)
    assert read_call_site(image, TAGS, coverage) == nameless
    assert (coverage.read, coverage.unreadable) == (1, 1)
    assert (coverage.examples[0].what, coverage.examples[0].address) == (
        "name of a call site",
        TAGS,
    )


def test_tags_that_are_not_in_the_image() -> None:
    """Tags in a page that is missing, and those that are not whole without it."""
    image, coverage = kernel(), Coverage()
    start = TAGS + 4096 - 2 * STEP  # two tags fill the page, and the next one has no memory
    for n in range(2):
        put_tag(image, start + n * STEP, n, 0)
    put_ranges(image, 200, (start, start + 2 * STEP + 100 * STEP))
    found = read_call_sites(image, coverage)
    # They are read in pieces of a page, so all of these are in one that is not whole.
    assert found == {}
    assert {e.what for e in coverage.examples} == {"call sites"}
    assert coverage.examples[0].address == start


# Sites of modules that are gone


def test_tags_of_modules_that_are_gone() -> None:
    """Since 6.13, in an area of their own; the strings are freed."""
    image, coverage = kernel(), Coverage()
    image.declare(AREA)
    image.variable("module_tags", "struct alloc_tag_module_section", VARIABLES + 128)
    image.words(VARIABLES + 128, MODULE_TAGS, 4096)
    put_counters(image, NEAR, (64, 3), (0, 0))
    last, beyond, below = MODULE_TAGS + 4095 - STEP, MODULE_TAGS + 4096, MODULE_TAGS - STEP
    for address, flags in ((MODULE_TAGS, 0), (last, 1), (below, 0), (beyond, 0)):
        put_tag(image, address, 5, NEAR, flags=flags, file=8, function=8)
    wanted = [beyond, last, below, MODULE_TAGS, TAGS]
    found = read_left_behind(image, wanted, coverage)
    nameless = {"file": "?", "module": "?", "function": "?", "line": 5, "bytes": 64, "calls": 3}
    assert list(found.values()) == [
        site(MODULE_TAGS, **nameless),
        site(last, **nameless, accurate=False),
    ]
    assert list(found) == [MODULE_TAGS, last]
    assert coverage.unreadable == 0


def test_a_tag_in_the_area_of_modules_that_is_not_in_the_image() -> None:
    image, coverage = kernel(), Coverage()
    image.declare(AREA)
    image.variable("module_tags", "struct alloc_tag_module_section", VARIABLES + 128)
    image.words(VARIABLES + 128, MODULE_TAGS, 1 << 20)
    put_tag(image, MODULE_TAGS, 5, 0)
    found = read_left_behind(image, [MODULE_TAGS + 8192, MODULE_TAGS], coverage)
    assert list(found) == [MODULE_TAGS]
    assert found[MODULE_TAGS].bytes is found[MODULE_TAGS].calls is None
    assert [(e.what, e.address) for e in coverage.examples] == [("call site", MODULE_TAGS + 8192)]


def test_candidates_in_the_data_of_modules() -> None:
    """Up to 6.12 they are anywhere: what has names that are text is taken for a tag."""
    image, coverage = kernel(), Coverage()
    put_counters(image, NEAR, (64, 1), (0, 0))
    put_tag(image, TAGS, 7, NEAR, module=STRINGS + 32)
    put_tag(image, TAGS + STEP, 7, NEAR, module=STRINGS + 32, file=STRINGS + 24)  # no ASCII
    put_tag(image, TAGS + 2 * STEP, 7, NEAR)  # of no module
    put_tag(image, TAGS + 3 * STEP, 7, NEAR, module=STRINGS + 32, function=STRINGS + 40)
    put_tag(image, TAGS + 4 * STEP, 7, NEAR, module=STRINGS + 32, function=8)
    put_tag(image, TAGS + 5 * STEP, 7, 0x5000, module=STRINGS + 32)  # counters that are not there
    image.write(STRINGS + 48, b"a\tb\0")
    put_tag(image, TAGS + 6 * STEP, 7, NEAR, module=STRINGS + 32, file=STRINGS + 48)
    gone = 0xFFFF88807FFF0000
    wanted = [gone, *(TAGS + n * STEP for n in range(7))]
    found = read_left_behind(image, wanted, coverage)
    assert found == {TAGS: site(TAGS, module="ext4", bytes=64, calls=1)}
    # Of what is no tag, nothing is missed.
    assert [(e.what, e.address) for e in coverage.examples] == [("call site", gone)]


# The version of /proc/allocinfo


@pytest.mark.parametrize("at", [0, 1, 4096 - 24, 8192 - 30, 8192 - 24, 8192 - 1, 8192 + 5])
def test_the_version_is_in_the_read_only_data(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the text is in two pieces that are read one after the other."""
    monkeypatch.setattr("memcg_inspect.image.memory.PIECE", 8192)
    image, start, size = MadeImage(), 0xFFFFFFFF82000000, 8192 + 4096
    image.symbol_at("__start_rodata", start)
    image.symbol_at("__end_rodata", start + size)
    image.write(start, bytes(size))
    assert proc_version(image) is None
    image.write(start + at, b"allocinfo - version: 1.10\n")
    assert proc_version(image) == "1.10"


def rodata(text: bytes, size: int = 4096) -> MadeImage:
    image, start = MadeImage(), 0xFFFFFFFF82000000
    image.symbol_at("__start_rodata", start)
    image.symbol_at("__end_rodata", start + size)
    image.write(start, text.ljust(4096, b"\0"))
    return image


def test_what_is_no_version() -> None:
    head = b"allocinfo - version: "
    assert proc_version(rodata(head + b"1234567890123456\n")) == "1234567890123456"
    for text in (b"\n", b"1.0", b"v1\n", b"12345678901234567\n", b" 1.0\n"):
        assert proc_version(rodata(head + text)) is None
    assert proc_version(rodata(b"allocinfo + version: 1.0\n")) is None
    assert proc_version(MadeImage()) is None


def test_the_size_of_the_read_only_data() -> None:
    """None, and more than a kernel has: 1 GiB may be, of which all but a page is missing here."""
    text = b"allocinfo - version: 2.0\n"
    assert proc_version(rodata(text, 0)) is None
    assert proc_version(rodata(text, -4096)) is None
    assert proc_version(rodata(text, (1 << 30) + 1)) is None
    assert proc_version(rodata(text, 1 << 30)) == "2.0"


def test_a_version_is_not_made_up_of_parts_that_are_not_next_to_each_other() -> None:
    """The page between them is missing."""
    image, start = MadeImage(), 0xFFFFFFFF82000000
    image.symbol_at("__start_rodata", start)
    image.symbol_at("__end_rodata", start + 3 * 4096)
    image.write(start, bytes(4096 - 22) + b"xallocinfo - version: ")
    image.write(start + 2 * 4096, b"1.0\n")
    assert proc_version(image) is None
