# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Counters of processes in memory made by hand, for each way in which kernels keep them.

``tests/linux/test_rss.py`` compares those of images with plain sums.
"""

from __future__ import annotations

import pytest
from drgn import offsetof
from support.layouts import MadeImage

from memcg_inspect.linux.kernel.sched import Thread
from memcg_inspect.linux.lib import percpu_counter
from memcg_inspect.linux.mm.mmzone import online_nodes, possible_nodes
from memcg_inspect.linux.mm.percpu_defs import percpu_offsets
from memcg_inspect.linux.mm.rss_stat import RssCounter, counts_by_task, read_rss, rss_bounds
from memcg_inspect.model import Coverage, ImageError

MMS = tuple(0xFFFF888030000000 + 0x1000 * n for n in range(3))
PARTS, VARIABLES = 0xFFFF888031000000, 0xFFFFFFFF82000000
MISSING = 0xFFFF888077700000
#: MM_FILEPAGES and the like of include/linux/mm_types_task.h, in an order that no kernel has.
ITEMS = {"MM_SHMEMPAGES": 0, "MM_FILEPAGES": 1, "MM_ANONPAGES": 2, "MM_SWAPENTS": 3}
NAMES = ("shmem", "file", "anon", "swapents")
MM = """
    struct atomic {{ int counter; }};
    struct mm_struct {{ struct atomic mm_users; {} }};
    struct task_struct {{ {} }};
"""
#: ``mm_struct.rss_stat``: up to 6.1, since 6.2, and with a patch that is not merged.
SPLIT = "struct task_rss_stat { int events; int count[4]; }; struct mm_rss_stat { long count[4]; };"
PERCPU = "struct percpu_counter { unsigned int lock; long count; %s };"
BY_NODE = """
    struct nodecounter_node { int unused; int parts[4]; };
    struct nodecounter { long count; struct nodecounter_node *nodes; };
"""


Counters = dict[int, dict[str, RssCounter]]


def kernel(types: str, stat: str, of_task: str = "int pid;") -> MadeImage:
    image = MadeImage()
    image.declare(types + MM.format(stat, of_task))
    image.enum(None, **ITEMS)
    image.given[percpu_offsets] = {0: 0, 1: 0x10000}
    return image


def split() -> MadeImage:
    image = kernel(SPLIT, "struct mm_rss_stat rss_stat;", "struct task_rss_stat rss_stat;")
    assert counts_by_task(image)
    return image


def percpu(counters: str = "int *counters;") -> MadeImage:
    image = kernel(PERCPU % counters, "struct percpu_counter rss_stat[4];")
    assert not counts_by_task(image)
    return image


def thread(mm: int, *rss: int) -> Thread:
    return Thread(0, 1, 1, "made", mm, False, None, rss)


def put(image: MadeImage, mm: int, step: int, at: int, *values: int) -> None:
    """
    Write a word of each counter of an mm.

    :param step: bytes from one counter to the next
    :param at: offset of the word in a counter
    """
    for number, value in enumerate(values):
        image.words(mm + 8 + step * number + at, value % (1 << 64))


def read(image: MadeImage, *threads: Thread, is_all: bool = True) -> tuple[Counters, Coverage]:
    coverage = Coverage()
    return read_rss(image, threads, coverage, is_all), coverage


def counters(*pairs: tuple[int, int | None]) -> dict[str, RssCounter]:
    return {name: RssCounter(*pair) for name, pair in zip(NAMES, pairs, strict=True)}


def missed(coverage: Coverage) -> list[tuple[str, int, str]]:
    return [(one.what, one.address, one.reason) for one in coverage.examples]


def test_where_the_counters_are() -> None:
    """What this file writes is where the structures have it."""
    for image in (split(), percpu(), percpu(""), by_node()):
        assert offsetof(image.type("struct mm_struct"), "rss_stat") == 8


# Up to 6.1


def test_parts_of_threads() -> None:
    """A thread without an mm has no counters."""
    image = split()
    put(image, MMS[0], 8, 0, 5, -7, 3, 0)
    put(image, MMS[1], 8, 0, 1, 2, 3, 4)
    threads = (thread(MMS[0], 1, 2, 3, 4), thread(0, 9, 9, 9, 9), thread(MMS[0], 10, -20, 0, 0))
    found, coverage = read(image, *threads, thread(MMS[1]))
    assert found == {
        MMS[0]: counters((5, 11), (-7, -18), (3, 3), (0, 4)),
        MMS[1]: counters((1, 0), (2, 0), (3, 0), (4, 0)),
    }
    assert (coverage.read, coverage.unreadable) == (2, 0)
    file = found[MMS[0]]["file"]
    assert (file.approximate, file.exact) == (0, -25)
    assert (found[MMS[0]]["shmem"].approximate, found[MMS[0]]["shmem"].exact) == (5, 16)


def test_parts_of_threads_that_were_not_read() -> None:
    """``mm_users`` tells whether there are others."""
    image = split()
    threads = [thread(mm, 1, 1, 1, 1) for mm in (*MMS[:2], MMS[1], MISSING)]
    for number, mm in enumerate(MMS[:2]):
        put(image, mm, 8, 0, 4, 4, 4, 4)
        image.words(mm, 1 + number)
    whole = {MMS[0]: counters(*[(4, 1)] * 4), MMS[1]: counters(*[(4, 2)] * 4)}
    for is_all in (True, False):
        found, coverage = read(image, *threads, is_all=is_all)
        assert found == whole
        assert coverage.read == 2
        at = MISSING + 8
        assert missed(coverage) == [("counters of a process", at, f"not made: {at:#x}")]
    image.words(MMS[1], 3)
    assert read(image, *threads)[0] == whole
    found, _ = read(image, *threads, is_all=False)
    assert found == whole | {MMS[1]: counters(*[(4, None)] * 4)}
    assert found[MMS[1]]["anon"].exact is None


def test_parts_of_threads_if_nobody_knows_how_many_there_are() -> None:
    """``mm_users`` is in a page that is missing."""
    image = split()
    for number, mm in enumerate((MMS[0] - 8, MMS[2] - 8)):
        put(image, mm, 8, 0, 4, 4, 4, 4)
        found, _ = read(image, *[thread(mm, 1, 1, 1, 1)] * (1 + number), is_all=False)
        assert found == {mm: counters(*[(4, None)] * 4)}


@pytest.mark.parametrize(
    ("around", "pages"), [(0, 1), (4095, 1), (8191, 1), (8192, 2), (65536, 16)]
)
def test_bounds_of_threads(around: int, pages: int) -> None:
    """The changes of 66 faults, each of which maps a page, or some of a file."""
    image = split()
    image.variable("fault_around_bytes", "unsigned long", VARIABLES)
    image.words(VARIABLES, around)
    of_file = 66 * 5 * pages
    bounds = {"file": of_file, "shmem": of_file, "anon": 330, "swapents": 330}
    assert rss_bounds(image, 5) == bounds


def test_bounds_of_threads_that_are_not_known() -> None:
    image = split()
    assert rss_bounds(image, 1)["file"] == 66 * 16  # it is a constant without CONFIG_DEBUG_FS
    image.variable("fault_around_bytes", "unsigned long", MISSING)
    assert rss_bounds(image, 1) == {"file": None, "shmem": None, "anon": 66, "swapents": 66}


def test_kernels_whose_threads_hold_nothing() -> None:
    """Without SPLIT_RSS_COUNTING."""
    image = kernel(SPLIT, "struct mm_rss_stat rss_stat;")
    put(image, MMS[0], 8, 0, 5, 6, 7, 8)
    assert read(image, thread(MMS[0]))[0] == {MMS[0]: counters((5, 0), (6, 0), (7, 0), (8, 0))}
    assert rss_bounds(image, 7) == dict.fromkeys(NAMES, 0)


def test_kernels_without_a_kind_of_pages() -> None:
    image = MadeImage()
    image.declare(SPLIT + MM.format("struct mm_rss_stat rss_stat;", "int pid;"))
    image.enum(None, MM_FILEPAGES=0, MM_ANONPAGES=1, MM_SWAPENTS=2)
    with pytest.raises(ImageError, match="this kernel does not count shmem pages of processes"):
        read(image, thread(MMS[0]))


# Since 6.2


def test_parts_of_cpus() -> None:
    image = percpu()
    put(image, MMS[0], 24, 8, 5, -7, 3, 0)
    put(image, MMS[0], 24, 16, PARTS, PARTS + 4, PARTS + 8, MISSING)
    put(image, MMS[1], 24, 8, 1, 2, 3, 4)
    put(image, MMS[1], 24, 16, *(PARTS + 16 + 4 * n for n in range(4)))
    image.write(PARTS, b"".join(n.to_bytes(4, "little") for n in (1, 2, 0, 0, 4, 0, 0, 0)))
    image.write(PARTS + 0x10000, (-9).to_bytes(4, "little", signed=True) + bytes(28))
    found, coverage = read(image, thread(MMS[0]), thread(MMS[0]), thread(MMS[1]), thread(0))
    assert found == {
        MMS[0]: counters((5, -8), (-7, 2), (3, 0), (0, None)),
        MMS[1]: counters((1, 4), (2, 0), (3, 0), (4, 0)),
    }
    assert coverage.read == 2
    assert missed(coverage) == [("per-CPU counters of a process", MISSING, "not in the image")]


def test_one_cpu() -> None:
    """Without CONFIG_SMP, a counter has no parts."""
    image = percpu("")
    put(image, MMS[0], 16, 8, 5, -7, 3, 0)
    found, coverage = read(image, thread(MMS[0]), thread(MISSING))
    assert found == {MMS[0]: counters((5, 0), (-7, 0), (3, 0), (0, 0))}
    at = MISSING + 8
    assert missed(coverage) == [("counters of a process", at, f"not made: {at:#x}")]
    assert rss_bounds(image, 7) == dict.fromkeys(NAMES, None)


def test_bounds_of_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(percpu_counter, "online_cpus", lambda image: (0, 1, 2))
    image = percpu()
    assert rss_bounds(image, 7) == dict.fromkeys(NAMES, None)
    image.variable("percpu_counter_batch", "int", VARIABLES)
    image.words(VARIABLES, 32)
    assert rss_bounds(image, 7) == dict.fromkeys(NAMES, 31 * 3)


# With a patch that is not merged


def by_node() -> MadeImage:
    image = kernel(BY_NODE, "struct nodecounter rss_stat[4];")
    image.given[possible_nodes] = (0, 1)
    image.given[online_nodes] = (0, 1)
    return image


def test_parts_of_nodes() -> None:
    """The counters of an mm have their parts together."""
    image = by_node()
    put(image, MMS[0], 16, 0, 5, -7, 3, 0)
    put(image, MMS[0], 16, 8, PARTS, PARTS, PARTS, PARTS)
    put(image, MMS[1], 16, 0, 1, 2, 3, 4)
    put(image, MMS[1], 16, 8, MISSING, MISSING, MISSING, MISSING)
    parts = (99, 1, 2, -3, 4, 99, 10, 20, 30, 40)
    image.write(PARTS, b"".join(n.to_bytes(4, "little", signed=True) for n in parts))
    found, coverage = read(image, thread(MMS[0]), thread(MMS[1]))
    assert found == {
        MMS[0]: counters((5, 11), (-7, 22), (3, 27), (0, 44)),
        MMS[1]: counters((1, None), (2, None), (3, None), (4, None)),
    }
    assert coverage.read == 2
    assert missed(coverage) == [("per-node counters of a process", MISSING, "not in the image")]


def test_parts_of_nodes_for_fewer_counters() -> None:
    """A part for each counter is needed: those without are not known."""
    image = kernel(BY_NODE.replace("parts[4]", "parts[3]"), "struct nodecounter rss_stat[4];")
    image.given[possible_nodes] = (0,)
    put(image, MMS[0], 16, 0, 5, 6, 7, 8)
    put(image, MMS[0], 16, 8, PARTS)
    image.write(PARTS, b"".join(n.to_bytes(4, "little") for n in (99, 1, 2, 3)))
    found, coverage = read(image, thread(MMS[0]))
    assert found == {MMS[0]: counters((5, 1), (6, 2), (7, 3), (8, None))}
    assert coverage.unreadable == 0


def test_bounds_of_nodes() -> None:
    image = by_node()
    assert rss_bounds(image, 7) == dict.fromkeys(NAMES, None)
    image = by_node()
    image.enum(None, NODECOUNTER_BATCH=32)
    assert rss_bounds(image, 7) == dict.fromkeys(NAMES, 31 * 2)
