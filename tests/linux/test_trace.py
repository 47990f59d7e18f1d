# SPDX-License-Identifier: LGPL-2.1-or-later
"""Memory of ftrace and perf, in memory made as kernel/trace/ and kernel/events/ fill it."""

from __future__ import annotations

import re

import pytest
from support.guests import ARCH, DEBIAN_KERNELS, Lab
from support.layouts import MadeImage

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.kernel.events.ring_buffer import perf_pages
from memcg_inspect.linux.kernel.trace import ftrace
from memcg_inspect.linux.kernel.trace.ftrace import ftrace_blocks
from memcg_inspect.linux.kernel.trace.ring_buffer import ring_buffer_pages
from memcg_inspect.linux.kernel.trace.trace_sched_switch import saved_cmdlines
from memcg_inspect.model import Coverage

AT, DATA = 0xFFFFFFFF82000000, 0xFFFF888030000000
ARRAYS, BUFFERS, RINGS = 0xFFFF888000111000, 0xFFFF888000222000, 0xFFFF888000333000
LINKS, PAGES = 0xFFFF888000444000, 0xFFFF888000800000
MISSING = 0xFFFF888077700000

#: Members that came with v6.8 (an order), v6.10 (buffers that are mapped) and v6.19 (a name).
RELEASES = {
    "6.1": ("void *free_page;", "", "max_buffer"),
    "6.12": ("void *free_page;", "void *meta_page;", "max_buffer"),
    "7.3": ("struct read_page free_page;", "void *meta_page;", "snapshot_buffer"),
}


def tracer(release: str = "7.3", has_second: bool = True) -> MadeImage:
    """Return a machine with two CPUs, and one trace array that has no buffers."""
    free, meta, second = RELEASES[release]
    image = MadeImage()
    image.declare(
        """
        struct list_head { struct list_head *next; struct list_head *prev; };
        struct buffer_page { struct list_head list; long write; void *page; };
        struct read_page { int order; void *data; };
        """
        f"struct ring_buffer_per_cpu {{ int cpu; {free}"
        f" long nr_pages; long nr_pages_to_update; struct list_head *pages;"
        f" struct buffer_page *reader_page; {meta} }};"
        """
        struct trace_buffer { unsigned int flags; struct ring_buffer_per_cpu **buffers; };
        struct array_buffer { struct trace_array *tr; struct trace_buffer *buffer; };
        """
        "struct trace_array { struct list_head list; char *name; struct array_buffer array_buffer;"
        f" {f'struct array_buffer {second};' if has_second else ''} }};"
    )
    image.variable("ftrace_trace_arrays", "struct list_head", AT)
    image.variable("temp_buffer", "struct trace_buffer *", AT + 32)
    image.words(AT, AT, AT, 0, 0, 0)
    return image


def linked(image: MadeImage, head: int, *links: int) -> None:
    """Make a list."""
    ring = [head, *links]
    for number, link in enumerate(ring):
        image.words(link, ring[(number + 1) % len(ring)], ring[number - 1])


def ring(image: MadeImage, number: int, count: int, **more: int) -> int:
    """
    Make a ring of pages, with flags in some links as the writer sets them.

    The pages of ring N are PAGES + N * 0x100000 + 0x1000 * (0, 1, ...).
    """
    at, pages = RINGS + 256 * number, PAGES + 0x100000 * number
    links = [LINKS + 0x400 * number + 32 * n for n in range(count)]
    for n, link in enumerate(links):
        image.words(link, links[(n + 1) % count] | n % 3, links[n - 1], 0, pages + 0x1000 * n)
    image.make(
        "struct ring_buffer_per_cpu",
        at,
        {"nr_pages": count, "pages": links[0]} | {k.replace("__", "."): v for k, v in more.items()},
    )
    return at


def buffer(image: MadeImage, number: int, *rings: int) -> int:
    """Make a buffer with a ring for each CPU."""
    at = BUFFERS + 64 * number
    image.words(at, 0, at + 32, 0, 0, *rings)
    return at


def pages_of(number: int, count: int) -> list[int]:
    return [PAGES + 0x100000 * number + 0x1000 * n for n in range(count)]


@pytest.mark.parametrize("release", RELEASES)
def test_rings_of_all_buffers(release: str) -> None:
    image, coverage = tracer(release), Coverage()
    second = RELEASES[release][2]
    arrays = (ARRAYS, ARRAYS + 256)
    linked(image, AT, *arrays)
    numbers = iter(range(8))
    buffers = [buffer(image, b, *(ring(image, next(numbers), 3) for _ in "01")) for b in range(4)]
    image.words(AT + 32, buffers[0])
    for array, members in zip(arrays, ((1, 2), (3, 1)), strict=True):
        linked(image, array)
        found = image.pointer("struct trace_array *", array)
        for name, number in zip(("array_buffer", second), members, strict=True):
            image.words(found.member_(name).buffer.address_, buffers[number])
    linked(image, AT, *arrays)
    expected = [page for number in range(8) for page in pages_of(number, 3)]
    assert sorted(ring_buffer_pages(image, coverage)) == expected
    assert coverage == Coverage(read=8)


@pytest.mark.parametrize("release", RELEASES)
def test_pages_that_are_in_no_ring(release: str) -> None:
    """The page that is read, one for the next reader, and what tells user space of the ring."""
    image, coverage = tracer(release), Coverage()
    reader, free, meta = PAGES + 0x700000, PAGES + 0x701000, PAGES + 0x702000
    image.words(LINKS + 0x800, 0, 0, 0, reader)
    more = {"reader_page": LINKS + 0x800}
    more["free_page__data" if release == "7.3" else "free_page"] = free
    if release != "6.1":
        more["meta_page"] = meta
    image.words(AT + 32, buffer(image, 0, ring(image, 0, 2, **more), 0))
    wanted = {reader, free, *pages_of(0, 2)} | ({meta} if release != "6.1" else set())
    found = list(ring_buffer_pages(image, coverage))
    assert set(found) == wanted
    assert len(found) == len(wanted)
    assert coverage == Coverage(read=1)


@pytest.mark.parametrize(
    ("says", "adds", "read"),
    [(3, 0, True), (2, 1, True), (2, 0, False), (2, -1, False), (3, -9, True)],
)
def test_a_ring_with_more_pages_than_it_says(says: int, adds: int, read: bool) -> None:
    """Pages are added before they are counted; pages that are to be removed are still there."""
    image, coverage = tracer(), Coverage()
    at = ring(image, 0, 3, nr_pages=says, nr_pages_to_update=adds % (1 << 64))
    image.words(AT + 32, buffer(image, 0, at, ring(image, 1, 1)))
    found = list(ring_buffer_pages(image, coverage))
    assert found[-1] == PAGES + 0x100000
    assert coverage.read == 1 + read
    assert coverage.unreadable == 1 - read
    assert found[:-1] == pages_of(0, 3 if read else 2)
    if not read:
        assert coverage.examples[0].reason.startswith("a ring buffer has more pages than it says")


def test_a_part_of_a_ring_whose_page_is_not_allocated() -> None:
    """__rb_allocate_pages() links it before it has a page."""
    image, coverage = tracer(), Coverage()
    image.words(AT + 32, buffer(image, 0, ring(image, 0, 3), 0))
    image.words(LINKS + 32 + 24, 0)
    first, _, last = pages_of(0, 3)
    assert list(ring_buffer_pages(image, coverage)) == [first, last]
    assert coverage == Coverage(read=1)


def test_rings_that_are_not_in_the_image() -> None:
    image, coverage = tracer(), Coverage()
    image.words(AT + 32, buffer(image, 0, MISSING, ring(image, 1, 2)))
    assert list(ring_buffer_pages(image, coverage)) == pages_of(1, 2)
    assert (coverage.read, coverage.unreadable) == (1, 1)
    assert coverage.examples[0].what == "ring buffer of ftrace"
    for place in (AT + 32, AT):  # a buffer, and the list of arrays
        image, coverage = tracer(), Coverage()
        image.words(place, MISSING)
        assert list(ring_buffer_pages(image, coverage)) == []
        assert {one.what for one in coverage.examples} == {"ring buffer of ftrace"}


def test_buffers_of_an_array_that_is_not_in_the_image() -> None:
    image, coverage = tracer(), Coverage()
    image.make("struct trace_array", ARRAYS, {"array_buffer.buffer": BUFFERS})
    image.words(ARRAYS, AT, MISSING)
    image.words(AT, MISSING, ARRAYS)
    buffer(image, 0, ring(image, 0, 2), 0)
    assert list(ring_buffer_pages(image, coverage)) == pages_of(0, 2)
    # Each of its two buffers, and the list.
    assert (coverage.read, coverage.unreadable) == (1, 3)


def test_pages_of_events_that_are_filtered() -> None:
    image, coverage = tracer(), Coverage()
    image.variable("__per_cpu_offset", "unsigned long[2]", AT + 64)
    image.words(AT + 64, DATA, DATA + 0x100000)
    image.variable("trace_buffered_event", "void *", 0x10000)
    image.words(DATA + 0x10000, PAGES)
    image.words(DATA + 0x110000, 0)
    assert list(ring_buffer_pages(image, coverage)) == [PAGES]
    image.words(AT + 72, DATA + 0x900000)
    assert coverage.unreadable == 0
    assert list(ring_buffer_pages(image, coverage)) == [PAGES]
    assert coverage.unreadable == 1


def test_a_kernel_without_ring_buffers() -> None:
    assert list(ring_buffer_pages(MadeImage(), Coverage())) == []
    image = MadeImage()
    image.declare(
        "struct buffer_page { void *list; void *page; };struct ring_buffer_per_cpu { int cpu; };"
    )
    assert list(ring_buffer_pages(image, Coverage())) == []


FTRACE = """
    struct free_area { long nr_free; };
    struct zone { long name; struct free_area free_area[11]; };
    struct ftrace_page { struct ftrace_page *next; void *records; int index; int order; };
"""


def records(image: MadeImage, *blocks: tuple[int, int]) -> None:
    """Make blocks of records: their address and order."""
    for number, (at, order) in enumerate(blocks):
        following = RINGS + 32 * (number + 1) if number + 1 < len(blocks) else 0
        fields = {"next": following, "records": at, "order": order % (1 << 32)}
        image.make("struct ftrace_page", RINGS + 32 * number, fields)


def machine(declared: str = FTRACE) -> MadeImage:
    image = MadeImage()
    image.declare(declared)
    image.variable("ftrace_pages_start", "struct ftrace_page *", AT)
    image.words(AT, RINGS)
    return image


def test_blocks_of_records() -> None:
    image, coverage = machine(), Coverage()
    blocks = [(PAGES, 10), (PAGES + 0x400000, 0), (PAGES + 0x500000, 3)]
    records(image, blocks[0], (0, 0), *blocks[1:])
    assert list(ftrace_blocks(image, coverage)) == blocks
    assert coverage == Coverage(read=3)


@pytest.mark.parametrize("order", [11, -1, 1 << 20])
def test_a_block_of_an_impossible_order(order: int) -> None:
    image, coverage = machine(), Coverage()
    records(image, (PAGES, 1), (PAGES + 0x400000, order), (PAGES + 0x500000, 0))
    assert list(ftrace_blocks(image, coverage)) == [(PAGES, 1)]
    assert (coverage.read, coverage.unreadable) == (1, 1)
    assert coverage.examples[0].reason.startswith(f"an ftrace page of order {order}")
    assert coverage.examples[0].what == "ftrace pages"


@pytest.mark.parametrize("to", [RINGS, RINGS + 32, MISSING])
def test_blocks_that_do_not_end(to: int) -> None:
    image, coverage = machine(), Coverage()
    records(image, (PAGES, 1), (PAGES + 0x400000, 2))
    image.words(RINGS + 32, to)
    assert list(ftrace_blocks(image, coverage)) == [(PAGES, 1), (PAGES + 0x400000, 2)]
    assert (coverage.read, coverage.unreadable) == (2, 1)
    [missed] = coverage.examples
    assert missed.what == "ftrace pages"
    if to != MISSING:
        assert missed.address == to
        assert missed.reason.startswith("the list of ftrace pages does not end")


def test_more_blocks_than_all_modules_need(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ftrace._MOST_BLOCKS == 1024 * 1024
    blocks = [(PAGES, 0), (PAGES + 0x400000, 0), (PAGES + 0x500000, 0)]
    for most, count in ((3, 3), (2, 2)):
        monkeypatch.setattr(ftrace, "_MOST_BLOCKS", most)
        image, coverage = machine(), Coverage()
        records(image, *blocks)
        assert list(ftrace_blocks(image, coverage)) == blocks[:count]
        assert coverage.unreadable == 3 - count


def test_a_kernel_whose_blocks_are_not_known() -> None:
    coverage = Coverage()
    assert list(ftrace_blocks(machine(FTRACE.replace(" int order;", "")), coverage)) == []
    image = MadeImage()
    image.declare(FTRACE)
    assert list(ftrace_blocks(image, coverage)) == []
    assert coverage == Coverage()


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS if ARCH == "amd64" else ())
def test_blocks_are_those_of_the_guest(lab: Lab, kernel: str) -> None:
    """The kernel says how many pages its own records have. It may free some; modules add some."""
    image, coverage = lab.image(kernel), Coverage()
    prog, blocks = image.program(), []
    page = prog["ftrace_pages_start"]
    while page:
        blocks.append((page.records.value_(), page.order.value_()))
        page = page.next
    assert list(ftrace_blocks(image_of(prog), coverage)) == blocks
    assert coverage == Coverage(read=len(blocks))
    log = (image.guest / "2/dmesg").read_text()
    [said] = re.findall(r"ftrace: allocated (\d+) pages with \d+ groups", log)
    modules = len((image.guest / "2/proc/modules").read_text().splitlines())
    found = sum(1 << order for _, order in blocks)
    assert int(said) * 3 / 4 <= found <= int(said) + 4 * modules


PERF = """
    struct perf_buffer { int refs; int nr_pages; unsigned long aux_nr_pages; void **aux_pages;
        void *user_page; void *data_pages[0]; };
    struct perf_event { int state; struct perf_buffer *rb; };
"""
EVENTS, OF_EVENTS = 0xFFFF888000555000, 0xFFFF888000666000


def events(*of: int) -> MadeImage:
    """Return a machine with events that have these buffers, by number; 0 for none."""
    image = MadeImage()
    image.declare(PERF.replace("data_pages[0]", "data_pages[1]"))
    for number, one in enumerate(of):
        at = OF_EVENTS + 256 * one if one else 0
        image.make("struct perf_event", EVENTS + 64 * number, {"rb": at})
    return image


def perf_buffer(image: MadeImage, number: int, pages: int, aux: int = 0) -> list[int]:
    """Make a buffer, and return its pages."""
    at, first = OF_EVENTS + 256 * number, PAGES + 0x100000 * number
    fields = {"nr_pages": pages % (1 << 32), "user_page": first, "aux_nr_pages": aux % (1 << 64)}
    if aux:
        fields["aux_pages"] = at + 128
    image.make("struct perf_buffer", at, fields)
    data = [first + 0x1000 * n for n in range(1, max(min(pages, 4), 0) + 1)]
    more = [first + 0x80000 + 0x1000 * n for n in range(max(min(aux, 4), 0))]
    image.words(image.pointer("struct perf_buffer *", at).data_pages.address_, *data)
    image.words(at + 128, *more)
    return [first, *data, *more]


def test_pages_of_events() -> None:
    image, coverage = events(1, 0, 2, 1), Coverage()
    pages = perf_buffer(image, 1, 4) + perf_buffer(image, 2, 2, 3)
    found = perf_pages(image, [EVENTS + 64 * n for n in range(4)], coverage)
    assert list(found) == pages
    assert coverage == Coverage(read=2)


def test_a_buffer_that_has_no_pages_yet() -> None:
    image, coverage = events(1), Coverage()
    assert list(perf_pages(image, [EVENTS], coverage)) == []
    assert (coverage.read, coverage.unreadable) == (0, 1)  # it is not in the image
    pages = perf_buffer(image, 1, 0)
    assert list(perf_pages(image, [EVENTS], coverage)) == pages
    assert coverage.read == 1


@pytest.mark.parametrize(
    ("pages", "aux"), [(-1, 0), ((1 << 20) + 1, 0), (2, (1 << 64) - 1), (2, (1 << 20) + 1)]
)
def test_a_buffer_with_an_impossible_number_of_pages(pages: int, aux: int) -> None:
    image, coverage = events(1, 2), Coverage()
    perf_buffer(image, 1, pages, aux)
    others = perf_buffer(image, 2, 3)
    found = list(perf_pages(image, [EVENTS, EVENTS + 64], coverage))
    assert found[-4:] == others
    assert (coverage.read, coverage.unreadable) == (1, 1)
    [example] = coverage.examples
    assert example.what == "ring buffer of perf"
    assert example.address == OF_EVENTS + 256
    assert example.reason.startswith(f"a buffer of {aux if aux else pages} pages")


def test_a_kernel_without_perf() -> None:
    assert list(perf_pages(MadeImage(), [EVENTS], Coverage())) == []


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS if ARCH == "amd64" else ())
def test_names_of_tasks(lab: Lab, kernel: str) -> None:
    """The kernel allocates them when it boots, or when events are switched on."""
    prog, coverage = lab.image(kernel).program(), Coverage()
    try:
        address = prog["savedcmd"].value_()
    except LookupError:
        address = 0
    assert list(saved_cmdlines(image_of(prog), coverage)) == ([address] if address else [])
    assert coverage == Coverage(read=int(bool(address)))
