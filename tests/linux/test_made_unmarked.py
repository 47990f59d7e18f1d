# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Pages for kvfree_rcu() and large kmallocs in memory made by hand, in kernels of other settings.

``tests/linux/test_unmarked_memory.py`` has those of images.
"""

from __future__ import annotations

import pytest
from drgn import Object
from support.layouts import MadeImage

from memcg_inspect.linux.mm import slab_common, slub_large
from memcg_inspect.linux.mm.slab_common import kvfree_rcu_pages
from memcg_inspect.linux.mm.slub_large import large_kmallocs
from memcg_inspect.model import Coverage

VARIABLES, MISSING = 0xFFFFFFFF82000000, 0xFFFF888077700000
#: ``struct kfree_rcu_cpu`` of the two CPUs, and pages.
CPUS = (0xFFFF888030000000, 0xFFFF888030001000)
PAGES = tuple(0xFFFF888031000000 + 4096 * n for n in range(8))
LISTS = """
    struct list_head { struct list_head *next; struct list_head *prev; };
    struct llist_node { struct llist_node *next; };
    struct llist_head { struct llist_node *first; };
"""
#: kernel/rcu/tree.c of 6.2 and of 6.3
BULK = {
    "6.2": """
        struct kvfree_rcu_bulk_data { unsigned long nr_records;
                                      struct kvfree_rcu_bulk_data *next; };
        struct kfree_rcu_cpu_work { long work; struct kvfree_rcu_bulk_data *bkvhead_free[2]; };
        struct kfree_rcu_cpu { struct kvfree_rcu_bulk_data *bkvhead[2];
                               struct kfree_rcu_cpu_work krw_arr[2];
                               struct llist_head bkvcache; };
    """,
    "6.3": """
        struct kvfree_rcu_bulk_data { struct list_head list; unsigned long nr_records; };
        struct kfree_rcu_cpu_work { long work; struct list_head bulk_head_free[2]; };
        struct kfree_rcu_cpu { struct list_head bulk_head[2];
                               struct kfree_rcu_cpu_work krw_arr[2];
                               struct llist_head bkvcache; };
    """,
}


def kernel(release: str, monkeypatch: pytest.MonkeyPatch) -> MadeImage:
    """Return a kernel whose CPUs have no pages."""
    image = MadeImage()
    image.declare(LISTS + BULK[release])
    image.variable("krc", "struct kfree_rcu_cpu", CPUS[0])
    type_ = image.type("struct kfree_rcu_cpu")
    monkeypatch.setattr(
        slab_common, "per_cpu", lambda krc, cpu: Object(image.prog, type_, address=CPUS[cpu])
    )
    for cpu in CPUS:
        image.make("struct kfree_rcu_cpu", cpu, {})
        if release == "6.3":
            for head in heads(release, cpu):
                image.words(head, head, head)
    return image


def heads(release: str, cpu: int) -> list[int]:
    """Return the heads of lists of a CPU: what it fills, and what waits for readers."""
    step = 8 if release == "6.2" else 16
    first = cpu + 2 * step
    works = [first, first + 8 + 2 * step]
    return [cpu, cpu + step, *(work + 8 + step * n for work in works for n in range(2))]


def cache(release: str, cpu: int) -> int:
    """Return the address of the head of the pages that a CPU keeps."""
    step = 8 if release == "6.2" else 16
    return cpu + 6 * step + 16


def put(image: MadeImage, release: str, head: int, *pages: int) -> None:
    """Put pages on a list of a CPU."""
    if release == "6.2":
        for at, after in zip([head, *(page + 8 for page in pages)], [*pages, 0], strict=True):
            image.words(at, after)
        return
    ring = [head, *pages]
    for before, at, after in zip(ring[-1:] + ring, ring, ring[1:] + ring[:1], strict=False):
        image.words(at, after, before)


def read(image: MadeImage) -> tuple[list[int], Coverage]:
    coverage = Coverage()
    return list(kvfree_rcu_pages(image, coverage)), coverage


def missed(coverage: Coverage) -> list[tuple[str, int, str]]:
    return [(one.what, one.address, one.reason) for one in coverage.examples]


@pytest.mark.parametrize("release", BULK)
def test_pages_for_kvfree_rcu(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = kernel(release, monkeypatch)
    found, coverage = read(image)
    assert (found, coverage.read, coverage.unreadable) == ([], 2, 0)
    image.words(cache(release, CPUS[1]), PAGES[6])
    image.words(PAGES[6], PAGES[7])
    image.words(PAGES[7], 0)
    for n, head in enumerate(heads(release, CPUS[1])):
        put(image, release, head, *([PAGES[0], PAGES[5]] if n == 5 else [PAGES[n]]))
    # The last list has two: that of n == 5 begins with a page that the first list had.
    put(image, release, heads(release, CPUS[1])[0])
    found, coverage = read(image)
    assert found == [PAGES[6], PAGES[7], *PAGES[1:5], PAGES[0], PAGES[5]]
    assert (coverage.read, coverage.unreadable) == (2, 0)


@pytest.mark.parametrize("release", BULK)
def test_lists_that_are_broken(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of other CPUs are found."""
    image = kernel(release, monkeypatch)
    image.words(cache(release, CPUS[0]), PAGES[0])
    image.words(PAGES[0], PAGES[0])
    image.words(cache(release, CPUS[1]), PAGES[1])
    image.words(PAGES[1], 0)
    found, coverage = read(image)
    assert found == [PAGES[0], PAGES[1]]
    why = f"the list does not end: {PAGES[0]:#x}"
    assert missed(coverage) == [("pages for kvfree_rcu()", PAGES[0], why)]
    assert coverage.read == 1
    image.words(cache(release, CPUS[0]), 0)
    put(image, release, heads(release, CPUS[0])[2], PAGES[2], MISSING)
    image.forget(MISSING)
    found, coverage = read(image)
    assert set(found) >= {PAGES[1], PAGES[2]}
    assert (coverage.read, coverage.unreadable) == (1, 1)


def test_as_many_pages_as_a_list_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_common, "_MOST_PAGES", 3)
    image = kernel("6.3", monkeypatch)
    image.words(cache("6.3", CPUS[0]), PAGES[0])
    for page, after in zip(PAGES, (*PAGES[1:3], 0), strict=False):
        image.words(page, after)
    found, coverage = read(image)
    assert (found, coverage.unreadable) == (list(PAGES[:3]), 0)
    image.words(PAGES[2], PAGES[3])
    found, coverage = read(image)
    assert found == list(PAGES[:3])
    why = f"the list does not end: {PAGES[3]:#x}"
    assert missed(coverage) == [("pages for kvfree_rcu()", PAGES[3], why)]


def test_more_pages_than_any_list_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """65,536. Nothing tells where a list of damaged pages ends."""
    image, first, most = kernel("6.3", monkeypatch), PAGES[0], 1 << 16
    image.words(cache("6.3", CPUS[0]), first)
    image.words(first, *(first + 8 * (n + 1) for n in range(most - 1)), 0)
    found, coverage = read(image)
    assert (len(found), coverage.unreadable) == (most, 0)
    image.words(first + 8 * (most - 1), first + 8 * most)
    found, coverage = read(image)
    assert (len(found), coverage.unreadable) == (most, 1)


def test_kernels_without_pages_for_kvfree_rcu() -> None:
    image = MadeImage()
    assert read(image) == ([], Coverage())
    image.declare(LISTS + BULK["6.3"])
    assert read(image) == ([], Coverage())


# Large kmallocs


def large(image: MadeImage) -> tuple[list[int], Coverage]:
    coverage = Coverage()
    return list(large_kmallocs(image, coverage)), coverage


def test_kernels_without_large_kmallocs() -> None:
    """CONFIG_BPF_SYSCALL, CONFIG_BPF_JIT and CONFIG_SERIAL_8250 are not set."""
    assert large(MadeImage()) == ([], Coverage())
    image = MadeImage()
    image.declare(LISTS + "struct bpf_prog_pack { struct list_head list; };")
    image.declare("struct idr { long root; };")
    image.variable("btf_idr", "struct idr", VARIABLES)
    assert large(image) == ([], Coverage())


def test_large_kmallocs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is missing, an entry that is, and others of the same kinds."""
    image = MadeImage()
    image.declare(
        LISTS
        + """
        struct bpf_prog_pack { long pages; struct list_head list; };
        struct btf { void *data; void **types; void *resolved_ids; void *resolved_sizes; };
        struct idr { long root; };
        struct uart { void *state; };
        """
    )
    image.symbol_at("kernfs_locks", VARIABLES)
    image.symbol_at("vmap_nodes", MISSING)
    image.symbol_at("tcp_metrics_hash", VARIABLES + 8)
    image.words(VARIABLES, 0x1000, 0x2000)
    image.variable("btf_idr", "struct idr", VARIABLES + 64)
    image.variable("pack_list", "struct list_head", VARIABLES + 128)
    image.variable("serial8250_reg", "struct uart", VARIABLES + 192)
    image.words(VARIABLES + 192, 0x9000)
    btfs = [MISSING + 4096, PAGES[0]]
    image.words(PAGES[0], 0x3000, 0x3001, 0x3002, 0x3003)
    pointers = [image.pointer("struct btf *", btf) for btf in btfs]
    monkeypatch.setattr(slub_large, "idr_entries", lambda image, name, idr, fault: pointers)
    ring = [VARIABLES + 128, PAGES[1] + 8, PAGES[2] + 8]
    for before, at, after in zip(ring[-1:] + ring, ring, ring[1:] + ring[:1], strict=False):
        image.words(at, after, before)
    found, coverage = large(image)
    assert found == [*(0x2000, 0x1000, 0x3001, 0x3002, 0x3003, 0x3000, PAGES[1], PAGES[2], 0x9000)]
    expected = [("large kmallocs", at, f"not made: {at:#x}") for at in (MISSING, MISSING + 4096)]
    assert missed(coverage) == expected
    # A variable behind those that can be read
    image.variable("serial8250_reg", "struct uart", MISSING)
    image.variable("pack_list", "struct list_head", MISSING + 8192)
    found, coverage = large(image)
    assert found == [0x2000, 0x1000, 0x3001, 0x3002, 0x3003, 0x3000]
    assert [one.address - MISSING for one in coverage.examples] == [0, 0, 4096, 8192]
    assert {one.what for one in coverage.examples} == {"large kmallocs"}
