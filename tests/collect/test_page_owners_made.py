# SPDX-License-Identifier: LGPL-2.1-or-later
"""What each owner of page frames claims. A machine whose owners are all made here."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from drgn import FaultError
from support.layouts import FRAMES

from memcg_inspect.collect import page_owners as module
from memcg_inspect.collect.page_owners import Claim, Owners, Share
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.kernel.resource import MemoryResource
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.linux.mm.vmalloc import VmArea
from memcg_inspect.linux.mm.zswap import ZswapEntry
from memcg_inspect.model import Coverage

PAGE = 4096
#: The page frame after the last one.
END = 0x1000
#: Addresses of code of modules.
TEXT = 0xFFFFFFFFC0000000
#: Where percpu memory is.
PERCPU = 0xFFFFE8FF00000000


def page(pfn: int) -> int:
    return FRAMES.page(pfn)


def virt(pfn: int) -> int:
    return FRAMES.direct_map + pfn * PAGE


class Tables:
    """The kernel's page tables: percpu memory begins at page frame 0x800, 16 pages for a CPU."""

    can_read = True
    pfns: Iterable[int] = ()
    memory_map: Any = ()
    asked: list[tuple[int, int]] = []

    def __init__(self, image: Any, coverage: Coverage) -> None:
        self.coverage = coverage

    def frames(self, start: int, size: int) -> Iterator[Any]:
        if start < FRAMES.base:
            first = (start - PERCPU) // PAGE + 0x800
            yield range(first, first + -(-size // PAGE))
        else:
            self.asked.append((start, size))
            yield from self.memory_map


class Machine:
    """
    The owners of a machine, none at first.

    :ivar given: what each reader returns
    :ivar subjects: the subject of the coverage that each reader counts in
    """

    SUBJECTS = {
        "vm_areas": "vmalloc",
        "block_users": "stacks",
        "user_tables": "pgd_list",
        "page_ext_tables": "page_ext",
        "huge_zero_pages": "huge_zero",
        "atomic_pools": "dma_pools",
        "integrity_pages": "mempools",
        "request_blocks": "blk_mq",
        "kvfree_rcu_pages": "kvfree_rcu",
        "ftrace_blocks": "ftrace",
        "saved_cmdlines": "ftrace",
        "swiotlb_pools": "swiotlb",
    }

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: dict[str, Any] = {}
        self.subjects: dict[str, str] = {}
        self.coverage: defaultdict[str, Coverage] = defaultdict(Coverage)
        self.percpu: Any = SimpleNamespace(
            unit_offsets=lambda: [0, 16 * PAGE],
            static_pages=lambda: (),
            chunks=lambda place: (),
            coverage=Coverage(3),
        )
        self.zswap: Any = SimpleNamespace(entries=lambda: (), coverage=Coverage(4))
        self.image: Any = SimpleNamespace(symbol=self._symbol, object=self._object)
        for name in self.SUBJECTS:
            monkeypatch.setattr(module, name, self._reader(name))
        for name, value in {
            "mem_map": lambda _: FRAMES,
            "memory_map_end": lambda _: END,
            "page_ranges": lambda _: self.given.get("page_ranges", [PageRange(0, END)]),
            "KernelTables": Tables,
            "is_text_address": lambda image, address: address >= TEXT,
            "thread_size": lambda _: 4 * PAGE,
            "kfence_pages": lambda _: self.given.get("kfence_pages", ()),
            "memory_resources": lambda _: self.given.get("memory_resources", ()),
            "PercpuReader": lambda _: self.percpu,
            "ZswapReader": lambda _: self.zswap,
        }.items():
            monkeypatch.setattr(module, name, value)
        for name, value in {
            "can_read": True, "pfns": (), "memory_map": (), "asked": [],
        }.items():  # fmt: skip
            monkeypatch.setattr(Tables, name, value)

    def _reader(self, name: str) -> Callable[..., Any]:
        def read(image: Any, coverage: Coverage, *more: Coverage) -> Any:
            self.subjects[name] = next(s for s, c in self.coverage.items() if c is coverage)
            assert all(coverage is self.coverage["stacks"] for coverage in more)
            found = self.given.get(name, ())
            return found() if callable(found) else found

        return read

    def _symbol(self, address: int) -> Any:
        if address == 0x999:
            raise UnknownKernelError("no symbol")
        return SimpleNamespace(name=f"function_{address}")

    def _object(self, name: str) -> Any:
        assert name == "pcpu_first_chunk"
        return SimpleNamespace(value_=lambda: 0x10)

    def owners(self, **given: Any) -> Owners:
        self.given = given
        return Owners(self.image, self.coverage)

    def claims(self, **given: Any) -> list[Claim]:
        owners = self.owners(**given)
        assert owners.conflicts == []
        return owners.claims


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def area(address: int, *pfns: int, caller: int = 0, is_stack: bool = False) -> VmArea:
    return VmArea(address, [page(pfn) for pfn in pfns], is_stack, caller=caller)


def test_nobody_owns_anything(machine: Machine) -> None:
    owners = machine.owners()
    assert (owners.claims, owners.conflicts, owners.regions, owners.shares) == ([], [], [], {})
    assert machine.subjects == machine.SUBJECTS
    assert {s: c.read for s, c in machine.coverage.items() if c.read} == {"percpu": 3, "zswap": 4}
    assert not any(part.unreadable for part in machine.coverage.values())


def test_vmalloc_areas(machine: Machine) -> None:
    """Those of one caller are together. It may be in no function that is known."""
    areas = [
        area(0x5000, 3, 1, 2, caller=7),
        area(0x6000, 4, caller=7),
        area(0x7000, 5, caller=8),
        area(0x8000, 8, caller=0x999),
        area(TEXT, 10, caller=7),
        area(0x9000, 12, 13, caller=7, is_stack=True),
        area(TEXT, 14, is_stack=True),
    ]
    assert machine.claims(vm_areas=areas) == [
        Claim(1, 5, "vmalloc", "function_7"),
        Claim(5, 6, "vmalloc", "function_8"),
        Claim(8, 9, "vmalloc", "0x999"),
        Claim(10, 11, "text", "function_7"),
        Claim(12, 15, "stack"),
    ]


def test_stacks_that_are_blocks(machine: Machine) -> None:
    assert machine.claims(block_users={page(8): "task", page(16): "cached"}) == [
        Claim(8, 12, "stack", block=8),
        Claim(16, 20, "stack", block=16),
    ]


def test_page_tables(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tables, "pfns", (30, 31, 40))
    assert machine.claims(user_tables=iter([5, 3, 4, 5])) == [
        Claim(3, 6, "pagetables"),
        Claim(30, 32, "kernel_pagetables"),
        Claim(40, 41, "kernel_pagetables"),
    ]


def test_tables_of_page_ext(machine: Machine) -> None:
    """They end anywhere in a page."""
    tables = [(virt(4), 2 * PAGE), (virt(6), PAGE + 1), (virt(20), 1)]
    assert machine.claims(page_ext_tables=tables) == [
        Claim(4, 8, "page_ext"),
        Claim(20, 21, "page_ext"),
    ]


def test_pages_of_kfence_and_zeroes(machine: Machine) -> None:
    pages = [page(pfn) for pfn in (4, 5, 6)]
    assert machine.claims(kfence_pages=pages, huge_zero_pages=range(512, 1024)) == [
        Claim(4, 7, "kfence"),
        Claim(512, 1024, "huge_zero"),
    ]


def test_pools(machine: Machine) -> None:
    assert machine.claims(
        atomic_pools=[(2 * PAGE, 4 * PAGE)],
        integrity_pages=[(page(8), 0), (page(10), 1)],
        request_blocks=[(page(16), 2)],
        kvfree_rcu_pages=[virt(24)],
    ) == [
        Claim(2, 4, "dma_pool"),
        Claim(8, 9, "mempool"),
        Claim(10, 12, "mempool"),
        Claim(16, 20, "blk_mq"),
        Claim(24, 25, "kvfree_rcu"),
    ]


def test_pages_of_ftrace(machine: Machine) -> None:
    found = machine.claims(ftrace_blocks=[(virt(4), 2)], saved_cmdlines=[virt(9)])
    assert found == [Claim(4, 8, "trace"), Claim(9, 10, "trace")]


def test_the_memory_map(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins with the page that has the first ``struct page``."""
    monkeypatch.setattr(Tables, "memory_map", [range(6, 9), [12, 20], range(9, 10), range(6, 9)])
    assert machine.claims(page_ranges=[PageRange(0x200, 0x300), PageRange(0x7F, 0x100)]) == [
        Claim(6, 10, "memmap"),
        Claim(12, 13, "memmap"),
        Claim(20, 21, "memmap"),
    ]
    # There are 64 of them in a page.
    start = FRAMES.base + PAGE
    assert Tables.asked == [(start, FRAMES.page(END) - start)]
    monkeypatch.setattr(Tables, "can_read", False)
    assert machine.claims() == []


def test_runs_of_page_frames_that_overlap(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two huge pages of page tables may map the same pages. One owner has them once."""
    runs = [range(10, 15), [12], range(13, 17), range(10, 11), range(20, 22)]
    monkeypatch.setattr(Tables, "memory_map", runs)
    assert machine.claims() == [Claim(10, 17, "memmap"), Claim(20, 22, "memmap")]
    assert machine.owners().conflicts == []


def chunk(address: int, base: int, pages: int) -> Any:
    return SimpleNamespace(address=address, base=base, nr_pages=pages)


def alloc(offset: int, size: int, objcg: int) -> Any:
    return SimpleNamespace(offset=offset, size=size, objcg=objcg)


def test_percpu_memory(machine: Machine) -> None:
    """Each CPU has a unit. An allocation may be in several pages of it."""
    first, other = chunk(0x10, PERCPU + 2 * PAGE, 1), chunk(0x20, PERCPU + 4 * PAGE, 4)
    allocs = {0x10: [], 0x20: [alloc(PAGE - 8, 2 * PAGE + 16, 1), alloc(8, 4, 1), alloc(12, 4, 2)]}
    used = {0x10: [PAGE], 0x20: [100, PAGE, PAGE, 8]}
    machine.percpu = SimpleNamespace(
        unit_offsets=lambda: [0, 16 * PAGE],
        static_pages=lambda: [PERCPU],
        chunks=lambda place: [] if place else [first, other],
        populated=lambda c: 0b1 if c is first else 0b1011,
        charged=lambda c: allocs[c.address],
        used=lambda c, number: used[c.address][number],
        coverage=Coverage(),
    )
    whole, start = Share(PAGE, ((1, PAGE),)), Share(100, ((1, 12), (2, 4)))
    shares = {0x804: start, 0x805: whole, 0x807: Share(8, ((1, 8),))}
    claims = machine.claims()
    wanted = [Claim(0x800, 0x801, "percpu_first"), Claim(0x802, 0x803, "percpu_first")]
    wanted[1] = wanted[1]._replace(share=Share(PAGE, ()))
    wanted += [Claim(pfn, pfn + 1, "percpu", share=share) for pfn, share in shares.items()]
    wanted += [c._replace(start=c.start + 16, end=c.end + 16) for c in wanted]
    assert claims == wanted


def test_pages_of_zsmalloc(machine: Machine) -> None:
    """It marks its pages. What is in them is paid for, if an entry says by whom."""
    entries = [
        ZswapEntry(0x10, 100, 1, 7),
        ZswapEntry(0x20, 50, 2, 8),
        ZswapEntry(0x30, 0, 3, 7),
        ZswapEntry(0x40, 10, 4, 0),
        ZswapEntry(0x50, 10, 5, 7, listed=False),
        ZswapEntry(0x60, 10, 6, 7),
    ]
    parts: dict[int, Any] = {
        0x10: [(4, 60), (5, 40)],
        0x20: [(4, 50)],
        0x30: [(4, 1)],
        0x40: [(4, 10)],
        0x50: [(4, 10)],
        0x60: None,
    }

    def of(entry: ZswapEntry) -> Any:
        some = parts[entry.address]
        return some and [SimpleNamespace(page=page(pfn), length=n) for pfn, n in some]

    machine.zswap = SimpleNamespace(entries=lambda: entries, parts=of, coverage=Coverage(9))
    owners = machine.owners()
    assert owners.claims == []
    assert owners.shares == {
        4: Share(PAGE, ((7, 60), (8, 50))),
        5: Share(PAGE, ((7, 40),)),
    }
    assert machine.coverage["zswap"].read == 9


def test_regions(machine: Machine) -> None:
    """A region of the kernel must be in memory; that of a crash kernel has a name."""
    resources = [
        MemoryResource("Kernel code", 0x3000, 0x4001, False, True),
        MemoryResource("Other code", 0x1000, 0x2000, False, True),
        MemoryResource("Kernel data", 0x8000, 0x9000, False, False),
        MemoryResource("Crash kernel (low)", 0xA000, 0xB001, False, False),
    ]
    found = machine.owners(memory_resources=resources, swiotlb_pools=[(0xC001, 0xD001)])
    assert found.regions == [
        (0xA, 0xC, "crash_kernel"),
        (0x3, 0x5, "image"),
        (0xC, 0xE, "swiotlb"),
    ]


def test_an_owner_that_is_not_in_the_image(machine: Machine) -> None:
    """What it has claimed before counts, and so do others."""

    def tables() -> Iterator[tuple[int, int]]:
        yield page(8), 1
        raise FaultError("not in the image", 0x1230)

    found = machine.claims(integrity_pages=tables, ftrace_blocks=[(virt(4), 0)])
    assert found == [Claim(4, 5, "trace"), Claim(8, 10, "mempool")]
    (missed,) = machine.coverage["owners"].examples
    assert (missed.what, missed.address) == ("owner of pages", 0x1230)
    assert "not in the image" in missed.reason


@pytest.mark.parametrize(
    ("pools", "claims", "conflicts"),
    [
        ([(2, 6), (4, 8)], [(2, 6), (6, 8)], [4, 5]),
        ([(2, 8), (4, 6)], [(2, 8)], [4, 5]),
        ([(2, 8), (4, 8)], [(2, 8)], [4, 5, 6, 7]),
        ([(2, 4), (4, 6)], [(2, 4), (4, 6)], []),
        ([(2, 2)], [], []),
        ([(2, 8), (3, 4), (7, 9)], [(2, 8), (8, 9)], [3, 7]),
    ],
)
def test_claims_that_overlap(
    machine: Machine, pools: list[Any], claims: list[Any], conflicts: list[int]
) -> None:
    """The owner that begins first has a page."""
    owners = machine.owners(atomic_pools=[(a * PAGE, b * PAGE) for a, b in pools])
    assert [(claim.start, claim.end) for claim in owners.claims] == claims
    assert owners.conflicts == [(pfn, "dma_pool", "dma_pool") for pfn in conflicts]


def test_two_owners_of_the_same_pages(machine: Machine) -> None:
    """The one that is read first has them."""
    owners = machine.owners(atomic_pools=[(2 * PAGE, 3 * PAGE)], request_blocks=[(page(2), 0)])
    assert owners.claims == [Claim(2, 3, "dma_pool")]
    assert owners.conflicts == [(2, "dma_pool", "blk_mq")]


def test_how_many_conflicts_of_two_claims_are_kept(machine: Machine) -> None:
    owners = machine.owners(atomic_pools=[(0, 1002 * PAGE), (0, 1003 * PAGE)])
    assert len(owners.conflicts) == 1000


def test_conflicts_of_two_claims_that_are_kept(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_CONFLICTS", 2)
    owners = machine.owners(atomic_pools=[(0, 8 * PAGE)], kvfree_rcu_pages=[virt(7)])
    assert owners.conflicts == [(7, "dma_pool", "kvfree_rcu")]
    owners = machine.owners(atomic_pools=[(0, 8 * PAGE), (0, 9 * PAGE)])
    assert owners.conflicts == [(pfn, "dma_pool", "dma_pool") for pfn in (0, 1)]


@pytest.mark.parametrize(
    ("start", "end", "kept"),
    [
        (END - 2, END, (END - 2, END)),
        (END - 2, END + 1, (END - 2, END)),
        (END, END + 2, None),
        (-3, 2, (0, 2)),
        (-3, -1, None),
    ],
)
def test_claims_beyond_the_memory_map(
    machine: Machine, start: int, end: int, kept: tuple[int, int] | None
) -> None:
    found = machine.claims(atomic_pools=[(start * PAGE, end * PAGE)])
    assert found == ([] if kept is None else [Claim(*kept, "dma_pool")])
    missed = machine.coverage["owners"].examples
    assert bool(missed) == (kept != (start, end))
    for one in missed:
        assert (one.what, one.address) == ("owner of pages", page(min(max(start, 0), END)))
        assert one.reason == f"dma_pool of page frames {start:#x} to {end:#x}"


def test_claims_of_a_range(machine: Machine) -> None:
    pools = [(2 * PAGE, 4 * PAGE), (4 * PAGE, 6 * PAGE), (8 * PAGE, 9 * PAGE)]
    owners = machine.owners(atomic_pools=pools)
    for start, end, wanted in (
        (0, 2, []),
        (0, 3, [(2, 3)]),
        (4, 9, [(4, 6), (8, 9)]),
        (3, 5, [(3, 4), (4, 5)]),
        (6, 8, []),
        (9, 20, []),
    ):
        assert [(c.start, c.end) for c in owners.within(start, end)] == wanted
    assert Counter(claim.kind for claim in owners.claims) == {"dma_pool": 3}
