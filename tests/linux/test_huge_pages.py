# SPDX-License-Identifier: LGPL-2.1-or-later
"""The huge page of zeroes, huge pages of files that khugepaged made, and memory of devices."""

from __future__ import annotations

import pytest
from drgn import FaultError, Program
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.mm import page_to_virt
from drgn.helpers.linux.percpu import per_cpu
from support.free_pages import free_page
from support.guests import Lab
from support.layouts import MadeImage
from support.planting import Overlay, Write

from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.mm import huge_memory
from memcg_inspect.linux.mm.huge_memory import huge_zero_pages
from memcg_inspect.linux.mm.khugepaged import may_have_collapsed_files
from memcg_inspect.linux.mm.memremap import has_user_pages_on_devices
from memcg_inspect.linux.mm.mm_init import hash_tables
from memcg_inspect.linux.mm.mmzone import memory_map_end
from memcg_inspect.model import Coverage


def word(address: int | None, value: int, size: int = 8) -> Write:
    assert address is not None
    return Write(address, (value % (1 << 8 * size)).to_bytes(size, "little"))


def page_frames(prog: Program) -> int:
    """Return the number of page frames up to the end of the last section."""
    last, bits = int(prog["__highest_present_section_nr"]), int(prog["SECTION_SIZE_BITS"])
    return (last + 1) * (1 << bits) // 4096


@pytest.mark.image
def test_the_huge_page_of_zeroes(lab: Lab) -> None:
    """``huge_zero_pfn`` is all ones while there is none; what is no page frame is none, too."""
    prog = lab.image("7.3").own_program()
    end, overlay = page_frames(prog), Overlay(prog)
    assert memory_map_end(image_of(prog)) == end
    empty = range(0)
    for pfn, found in (
        (-1, empty),
        (0, empty),
        (1, range(1, 513)),
        (1024, range(1024, 1536)),
        (end - 1, range(end - 1, end + 511)),
        (end, empty),
    ):
        overlay.write((word(prog["huge_zero_pfn"].address_, pfn),))
        coverage = Coverage()
        assert huge_zero_pages(Image(prog), coverage) == found
        assert (coverage.read, coverage.unreadable) == (1, 0)


def test_kernels_without_huge_pages() -> None:
    coverage = Coverage()
    assert huge_zero_pages(MadeImage(), coverage) == range(0)
    assert coverage == Coverage()


# Files


@pytest.mark.image
def test_huge_pages_that_may_be_of_files(lab: Lab) -> None:
    """Up to 6.19, if any CPU has counted one that khugepaged allocated."""
    prog = lab.image("6.1", "4", "files").own_program()
    overlay, event = Overlay(prog), prog["THP_COLLAPSE_ALLOC"].value_()
    counters = {
        cpu: per_cpu(prog["vm_event_states"], cpu).event[event].address_
        for cpu in for_each_possible_cpu(prog)
    }
    assert len(counters) > 1
    overlay.write(tuple(word(at, 0) for at in counters.values()))
    assert may_have_collapsed_files(Image(prog)) is False
    for at in counters.values():
        overlay.write((word(at, 1),))
        assert may_have_collapsed_files(Image(prog)) is True
        overlay.write((word(at, 0),))
    offset = prog["__per_cpu_offset"][1]
    overlay.write((word(offset.address_, 8),))
    assert may_have_collapsed_files(Image(prog)) is True  # what that CPU counts is not known
    overlay.clear()


@pytest.mark.image
def test_counters_of_files_are_right_since_7_0(lab: Lab) -> None:
    prog = lab.image("7.3").own_program()
    overlay, event = Overlay(prog), prog["THP_COLLAPSE_ALLOC"].value_()
    at = per_cpu(prog["vm_event_states"], 0).event[event].address_
    overlay.write((word(at, 1),))
    assert may_have_collapsed_files(Image(prog)) is False


def test_kernels_that_do_not_count_huge_pages() -> None:
    image = MadeImage()
    assert may_have_collapsed_files(image) is False  # CONFIG_TRANSPARENT_HUGEPAGE=n
    image = MadeImage()
    image.enum(None, THP_COLLAPSE_ALLOC=70)
    assert may_have_collapsed_files(image) is True  # CONFIG_VM_EVENT_COUNTERS=n


# Devices


@pytest.mark.image
@pytest.mark.parametrize("kernel", ["6.1", "7.3"])
def test_kinds_of_device_memory(lab: Lab, kernel: str) -> None:
    """Only HMM moves pages of processes there (include/linux/memremap.h)."""
    prog = lab.image(kernel).own_program()
    overlay = Overlay(prog)
    free = page_to_virt(prog["vmemmap"] + int(free_pfn(prog))).value_()
    type_ = prog.type("struct dev_pagemap").member("type")
    head = prog["pgmap_array"].xa_head.address_
    assert not has_user_pages_on_devices(image_of(prog))
    for name, has_pages in (
        ("MEMORY_DEVICE_PRIVATE", True),
        ("MEMORY_DEVICE_COHERENT", True),
        ("MEMORY_DEVICE_FS_DAX", False),
        ("MEMORY_DEVICE_GENERIC", False),
    ):
        at = free + type_.bit_offset // 8
        overlay.write((word(head, free), word(at, prog[name].value_(), 4)))
        assert has_user_pages_on_devices(Image(prog)) is has_pages, name
    overlay.write((word(head, 1 << 40),))
    with pytest.raises(FaultError):
        has_user_pages_on_devices(Image(prog))


def free_pfn(prog: Program) -> int:
    page = free_page(prog, other_than=0)
    return (page - prog["vmemmap"].value_()) // prog.type("struct page").size


def test_kernels_without_device_memory() -> None:
    assert has_user_pages_on_devices(MadeImage()) is False


def test_memory_of_some_devices() -> None:
    """Any of the devices may have pages of processes."""
    image, at = MadeImage(), 0xFFFF888000200000
    image.declare("""
        struct xarray { void *xa_head; };
        struct xa_node { unsigned long count; void *slots[4]; };
        struct dev_pagemap { unsigned long altmap; unsigned int type; };
    """)
    image.enum(None, MEMORY_DEVICE_PRIVATE=1, MEMORY_DEVICE_COHERENT=2)
    image.variable("pgmap_array", "struct xarray", at)
    image.words(at, at + 64 | 2)
    image.words(at + 64, 0, 0, at + 256, at + 320, 0)
    for first, second, has_pages in ((3, 4, False), (3, 1, True), (2, 4, True), (0, 0, False)):
        image.words(at + 256, 1, first)
        image.words(at + 320, 1, second)
        assert has_user_pages_on_devices(image) is has_pages


# Made by hand


def test_the_huge_page_of_zeroes_of_a_made_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_memory, "memory_map_end", lambda _: 1000)
    image, at, gone = MadeImage(), 0xFFFF888000200000, 0xFFFF888077700000
    image.enum(None, PAGE_SHIFT=12)
    image.variable("huge_zero_pfn", "unsigned long", at)
    for pfn, expected in ((512, range(512, 1024)), (999, range(999, 1511)), (1000, range(0))):
        image.words(at, pfn)
        assert huge_zero_pages(image, Coverage()) == expected
    image.variable("huge_zero_pfn", "unsigned long", gone)
    coverage = Coverage()
    assert huge_zero_pages(image, coverage) == range(0)
    assert [(e.what, e.address) for e in coverage.examples] == [("huge_zero_pfn", gone)]
    assert "not made" in coverage.examples[0].reason
    assert coverage.read == 0


def test_collapsed_files_of_a_made_kernel() -> None:
    """Any CPU may have counted one; what is missing may have."""
    image, at = MadeImage(), 0xFFFF888000200000
    image.declare("struct vm_event_state { unsigned long event[8]; };")
    image.enum(None, THP_COLLAPSE_ALLOC=5)
    image.variable("__per_cpu_offset", "unsigned long[2]", at)
    image.words(at, at, at + 4096)
    image.variable("vm_event_states", "struct vm_event_state", 256)
    for cpu in (0, 1):
        image.make("struct vm_event_state", at + 4096 * cpu + 256, {})
        image.words(at + 4096 * cpu + 256 + 32, 7, 0, 7)  # other events
    assert may_have_collapsed_files(image) is False
    for cpu in (0, 1):
        image.words(at + 4096 * cpu + 256 + 40, 1)
        assert may_have_collapsed_files(image) is True
        image.words(at + 4096 * cpu + 256 + 40, 0)
    image.forget(at + 4096)
    assert may_have_collapsed_files(image) is True
    newer = MadeImage()
    newer.enum(None, THP_COLLAPSE_ALLOC=5)
    newer.declare("struct mem_cgroup_per_node { void *objcg; };")  # since 7.1
    assert may_have_collapsed_files(newer) is False


# Hash tables


VARIABLES, TABLE = 0xFFFFFFFF82000000, 0xFFFF888000100000


def with_tables() -> MadeImage:
    image = MadeImage()
    image.declare("""
        struct hlist_head { void *first; };
        struct token_bucket { unsigned long lock; void *chain; unsigned long more; };
        struct zone { unsigned long free_area[11]; };
        struct inet_ehash_bucket { void *chain; };
        struct inet_bind_hashbucket { unsigned long lock; void *chain; };
        struct inet_listen_hashbucket { unsigned long lock; void *nulls; };
        struct inet_hashinfo {
            struct inet_ehash_bucket *ehash; unsigned int ehash_mask;
            struct inet_bind_hashbucket *bhash; struct inet_bind_hashbucket *bhash2;
            unsigned int bhash_size;
            unsigned int lhash2_mask; struct inet_listen_hashbucket *lhash2;
        };
        struct udp_hslot { void *head; unsigned long count; };
        struct udp_table { struct udp_hslot *hash; struct udp_hslot *hash2; unsigned int mask; };
        struct futex_hash_bucket { unsigned long words[8]; };
    """)
    return image


def pages_of(start: int, size: int) -> list[int]:
    return list(range(start, start + size, 4096))


def test_hash_tables_of_variables() -> None:
    """fs/namespace.c, net/ipv4/route.c and net/mptcp/token.c: a mask is the last index."""
    image, coverage = with_tables(), Coverage()
    expected, at = [], TABLE
    for n, (name, mask, entry) in enumerate(
        [
            ("mount_hashtable", "m_hash_mask", 8),
            ("mountpoint_hashtable", "mp_hash_mask", 8),
            ("ip_idents", "ip_idents_mask", 4),
            ("ip_tstamps", "ip_idents_mask", 4),
            ("token_hash", "token_mask", 24),
        ]
    ):
        entries = 2048 if "ip_" in name else 1024 << n % 3
        image.symbol_at(name, VARIABLES + 16 * n)
        image.words(VARIABLES + 16 * n, at)
        image.symbol_at(mask, VARIABLES + 1024 + 16 * (2 if "ip_" in name else n), 4)
        image.write(
            VARIABLES + 1024 + 16 * (2 if "ip_" in name else n), (entries - 1).to_bytes(4, "little")
        )
        expected += pages_of(at, entries * entry)
        at += 1 << 20
    assert list(hash_tables(image, coverage)) == expected
    assert (coverage.read, coverage.unreadable) == (5, 0)


@pytest.mark.parametrize("futexes", ["one table", "one for each node"])
def test_hash_tables_of_sockets_and_futexes(futexes: str) -> None:
    """include/net/inet_hashtables.h, include/net/udp.h, and kernel/futex/core.c up to 6.15."""
    image, coverage = with_tables(), Coverage()
    image.variable("tcp_hashinfo", "struct inet_hashinfo", VARIABLES)
    image.variable("udp_table", "struct udp_table", VARIABLES + 256)
    tables = [TABLE + n * (1 << 20) for n in range(7)]
    image.make(
        "struct inet_hashinfo",
        VARIABLES,
        {
            "ehash": tables[0],
            "ehash_mask": 1023,
            "bhash": tables[4],
            "bhash2": tables[5],
            "bhash_size": 512,
            "lhash2_mask": 255,
            "lhash2": tables[1],
        },
    )
    image.make(
        "struct udp_table", VARIABLES + 256, {"hash": tables[2], "hash2": tables[3], "mask": 511}
    )
    image.symbol_at("__futex_data", VARIABLES + 512, 16)
    image.words(VARIABLES + 512, tables[6], 256)
    sizes = (1024 * 8, 256 * 16, 512 * 16, 512 * 16, 512 * 16, 512 * 16, 256 * 64)
    expected = [pages_of(*both) for both in zip(tables, sizes, strict=True)]
    if futexes == "one for each node":  # since 6.16
        image.declare("struct futex_private_hash { int users; };")
        expected.pop()
    assert list(hash_tables(image, coverage)) == [page for some in expected for page in some]
    assert (coverage.read, coverage.unreadable) == (len(expected), 0)


@pytest.mark.parametrize(("entries", "is_known"), [(1 << 20, True), ((1 << 20) + 1, False)])
def test_the_largest_table_that_is_no_vmalloc_area(entries: int, is_known: bool) -> None:
    """``MAX_PAGE_ORDER`` is 10: blocks of 4 MiB."""
    image, coverage = with_tables(), Coverage()
    image.symbol_at("ip_idents", VARIABLES)
    image.symbol_at("ip_idents_mask", VARIABLES + 8, 4)
    image.words(VARIABLES, TABLE)
    image.write(VARIABLES + 8, (entries - 1).to_bytes(4, "little"))
    found = list(hash_tables(image, coverage))
    assert found == (pages_of(TABLE, 4 << 20) if is_known else [])
    assert coverage.read == 1


def test_hash_tables_that_are_not_in_the_image() -> None:
    image, coverage = with_tables(), Coverage()
    gone = 0xFFFFFFFF90000000
    image.symbol_at("mount_hashtable", VARIABLES)
    image.words(VARIABLES, TABLE)
    image.symbol_at("m_hash_mask", gone)
    image.variable("udp_table", "struct udp_table", gone + 4096)
    image.symbol_at("__futex_data", gone + 8192)
    assert list(hash_tables(image, coverage)) == []
    assert [(e.what, e.address & ~4095) for e in coverage.examples] == [
        ("hash table", gone),
        ("hash table", gone + 4096),
        ("hash table", gone + 8192),
    ]
    assert coverage.read == 0
