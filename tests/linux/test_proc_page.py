# SPDX-License-Identifier: LGPL-2.1-or-later
"""What pages say of themselves. The pages are made by hand, with the types of real kernels."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import pytest
from drgn import Object, Program, Symbol, offsetof, sizeof
from drgn.helpers.linux.mm import page_to_virt
from support.free_pages import free_page
from support.guests import DEBIAN_KERNELS, Lab
from support.planting import Overlay, Write

from memcg_inspect.image.image import Image
from memcg_inspect.linux.fs.proc_page import MarkReader, Marks
from memcg_inspect.linux.mm.mm_types import RawPiece
from memcg_inspect.linux.mm.mm_types_columns import PageColumns, positions

pytestmark = [
    pytest.mark.image,
    pytest.mark.each_kernel,
    pytest.mark.parametrize("kernel", DEBIAN_KERNELS),
]

#: Page types before 6.12: bits that are 0.
OLD_TYPES = {"buddy": 0x80, "offline": 0x100, "table": 0x200, "guard": 0x400}
NO_TYPE = 0xFFFFFFFF
PAYER, MAPPING = 0xFFFF888000111000, 0xFFFF888000222000
#: ``MEMCG_DATA_KMEM``; ``FOLIO_MAPPING_ANON`` and ``PAGE_MAPPING_MOVABLE``.
KMEM, ANON, MOVABLE = 2, 1, 2
#: ``PP_SIGNATURE`` of include/linux/poison.h.
POOL = 0xDEAD000000000040


@dataclass
class Maker:
    """
    A piece of the memory map.

    :ivar prog: the kernel
    :ivar pages: ``struct page`` by index
    :ivar orders: orders of compound pages by index
    """

    prog: Program
    pages: list[bytes] = field(default_factory=list)
    orders: dict[int, int] = field(default_factory=dict)

    def page(
        self,
        *flags: str,
        kind: str | None = None,
        refs: int = 0,
        link: int = 0,
        private: int = 0,
        order: int = 0,
        **words: int,
    ) -> int:
        """
        Add a page.

        :param flags: names of page flags, without ``PG_``
        :param kind: its page type
        :param link: the first word of ``page->lru``
        :param words: other members
        :return: its index
        """
        type_, data = self.prog.type("struct page"), bytearray(64)
        assert sizeof(type_) == len(data)
        bits = sum(1 << self.prog.constant(f"PG_{flag}").value_() for flag in flags)
        values = {"flags": bits, "lru": link, "private": private, **words}
        for name, value in values.items():
            at = offsetof(type_, name)
            data[at : at + 8] = value.to_bytes(8, "little")
        for name, value in (("_refcount", refs), ("page_type", self._type(kind))):
            at = offsetof(type_, name)
            data[at : at + 4] = value.to_bytes(4, "little")
        if order:
            self.orders[len(self.pages)] = order
        self.pages.append(bytes(data))
        return len(self.pages) - 1

    def has(self, *names: str) -> bool:
        """Return whether the kernel has some constants."""
        try:
            return all(self.prog.constant(name) is not None for name in names)
        except LookupError:
            return False

    def _type(self, kind: str | None) -> int:
        if kind is None:
            return NO_TYPE
        if self.has("PGTY_buddy"):
            return int(self.prog.constant(f"PGTY_{kind}").value_()) << 24
        return NO_TYPE & ~OLD_TYPES[kind]

    def raw(self) -> RawPiece:
        return RawPiece(0, PageColumns(b"".join(self.pages), 64), 0, self.orders)

    def marks(self) -> Marks:
        return MarkReader(Image(self.prog)).read(self.raw())

    def kinds(self) -> list[str]:
        """Return the kind of each page."""
        reader = MarkReader(Image(self.prog))
        return [reader.kinds[code] for code in reader.read(self.raw()).codes]


@pytest.fixture
def prog(lab: Lab, kernel: str) -> Program:
    return lab.image(kernel, "4", "mixed").program()


@pytest.fixture
def made(prog: Program) -> Maker:
    return Maker(prog)


@pytest.fixture
def overlay(prog: Program) -> Iterator[Overlay]:
    overlay = Overlay(prog)
    yield overlay
    overlay.clear()


def of(made: Maker, column: int) -> Collection[int]:
    return set(positions(column, len(made.pages)))


def test_page_types(made: Maker) -> None:
    """Each has a name of its own; a slab has a flag instead up to 6.11."""
    names = {"offline": "offline", "table": "pagetables", "guard": "guard"}
    if made.has("PGTY_slab"):
        names |= {"slab": "slab", "hugetlb": "hugetlb", "zsmalloc": "zsmalloc"}
        names |= {"unaccepted": "unaccepted", "large_kmalloc": "large_kmalloc"}
    else:
        made.page("slab")
    for name in names:
        made.page(kind=name, refs=1)
    made.page()
    made.page(refs=1)
    expected = [] if made.has("PGTY_slab") else ["slab"]
    assert made.kinds() == [*expected, *names.values(), "", ""]
    # What a page has beside its type changes nothing.
    made.pages.clear()
    for name in names:
        made.page("reserved", kind=name, refs=1, mapping=MAPPING | ANON, link=POOL)
    assert made.kinds() == list(names.values())
    # A tail of a compound page says nothing: what it has there is of the compound page.
    made.pages.clear()
    for name in names:
        made.page(kind=name, refs=1, link=MAPPING | 1)
    assert made.kinds() == [""] * len(names)
    assert of(made, made.marks().tails) == set(range(len(names)))


def test_pages_that_nobody_may_use(made: Maker) -> None:
    """A poisoned page comes first, and a reserved one is before the users of pages."""
    made.page("reserved", refs=1)
    made.page("reserved", refs=1, mapping=MAPPING | ANON)
    made.page("reserved", "vmemmap_self_hosted", refs=1)
    made.page("vmemmap_self_hosted", refs=1)
    expected = ["reserved", "reserved", "memmap", ""]
    if made.has("PG_hwpoison"):
        made.page("hwpoison", refs=1, mapping=MAPPING | ANON)
        made.page("hwpoison", "reserved", "vmemmap_self_hosted", refs=1)
        expected += ["hwpoison", "hwpoison"]
    assert made.kinds() == expected


def test_pages_of_users(made: Maker) -> None:
    expected = {
        made.page(refs=1, mapping=MAPPING | ANON): "anon",
        made.page("lru", refs=1, mapping=MAPPING | ANON, memcg_data=PAYER): "anon",
        made.page("lru", "swapbacked", refs=1, mapping=MAPPING | ANON): "anon",
        made.page("lru", refs=1, mapping=MAPPING): "file",
        made.page(refs=1, mapping=MAPPING, memcg_data=PAYER): "file",
        made.page("lru", "swapbacked", refs=1, mapping=MAPPING): "shmem",
        # In the swap cache, or taken from its file.
        made.page("lru", refs=1): "user",
        made.page(refs=1, memcg_data=PAYER): "user",
        # A driver may use the word, and a balloon has pages that can be moved.
        made.page(refs=1, mapping=MAPPING): "",
        made.page(refs=1, mapping=MAPPING | MOVABLE): "",
        # Nobody has it.
        made.page("lru", mapping=MAPPING | ANON, memcg_data=PAYER): "",
        # It is one of the kernel.
        made.page(refs=1, mapping=MAPPING | ANON, memcg_data=PAYER | KMEM): "",
    }
    assert dict(enumerate(made.kinds())) == expected
    assert of(made, made.marks().kmem) == {len(expected) - 1}


def test_pages_of_page_pools(made: Maker) -> None:
    """A page that is charged to a memcg, or that nobody has, is none."""
    expected = {
        made.page(refs=1, link=POOL): "page_pool",
        made.page(refs=1, link=POOL | 0x1234 << 16): "page_pool",
        made.page("lru", refs=1, link=POOL, mapping=MAPPING | ANON): "page_pool",
        made.page(link=POOL): "",
        made.page(refs=1, link=POOL ^ 1 << 60): "",
        made.page(refs=1, link=POOL, memcg_data=PAYER | KMEM): "",
        made.page("reserved", refs=1, link=POOL): "reserved",
    }
    assert dict(enumerate(made.kinds())) == expected


def test_pages_that_are_bare(made: Maker) -> None:
    """A block of pages without a reference, a type or a payer may be of anybody."""
    bare = {made.page(), made.page("active"), made.page(mapping=MAPPING)}
    for more in (
        {"refs": 1},
        {"refs": 1 << 24},
        {"kind": "table"},
        {"memcg_data": PAYER | KMEM},
        {"link": MAPPING | 1},
    ):
        made.page(**more)  # type: ignore[arg-type]
    made.page("head")
    made.page("reserved")
    assert of(made, made.marks().bare) == bare


def test_free_blocks(made: Maker) -> None:
    """``page->private`` is the order. A larger one than the kernel has is damage."""
    orders = [3, 0, 10, 11, 1 << 40]
    for order in orders:
        made.page(kind="buddy", private=order)
    made.page(private=5)
    made.page(kind="buddy", private=5, link=MAPPING | 1)
    assert made.marks().free == {0: 3, 1: 0, 2: 10}


def test_pages_that_processes_have_locked(made: Maker) -> None:
    """They are on the list of unevictable pages."""
    locked = {made.page("lru", "unevictable", "mlocked", refs=1, memcg_data=PAYER)}
    made.page("unevictable", "mlocked", refs=1, memcg_data=PAYER)
    made.page("lru", "mlocked", refs=1, memcg_data=PAYER)
    made.page("lru", "unevictable", refs=1, memcg_data=PAYER)
    made.page("lru", "unevictable", "mlocked", refs=1, link=MAPPING | 1)
    assert made.marks().mlocked == bytes(i in locked for i in range(len(made.pages)))


def test_pages_of_hugetlb_that_are_free(made: Maker) -> None:
    """A huge page in the pool has no references."""
    if not made.has("PGTY_hugetlb"):
        return
    for refs in (0, 1, 1 << 24):
        made.page("head", kind="hugetlb", refs=refs, order=1)
        made.page(link=MAPPING | 1)
    # A compound page of something else.
    made.page("head", refs=1, order=1)
    made.page(link=MAPPING | 1)
    assert made.kinds()[::2] == ["hugetlb_free", "hugetlb", "hugetlb", ""]
    made.page("head", kind="hugetlb", order=1, memcg_data=PAYER | 8)
    made.page(link=MAPPING | 1)
    assert made.kinds()[-2] == "hugetlb_free"
    # A huge page has more than one page.
    made.orders[made.page("head", kind="hugetlb", refs=0)] = 0
    assert made.kinds()[-1] == "hugetlb"


def test_secret_memory(made: Maker, overlay: Overlay) -> None:
    """Its operations tell it from files. It is unevictable, or on no list."""
    prog = made.prog
    page = Object(prog, "struct page *", free_page(prog, other_than=-1))
    secret = page_to_virt(page).value_()
    file, at = secret + 1024, offsetof(prog.type("struct address_space"), "a_ops")
    operations = prog.symbol("secretmem_aops").address
    overlay.write((Write(secret + at, operations.to_bytes(8, "little")),))
    overlay.write((Write(file + at, (operations + 8).to_bytes(8, "little")),))
    charged = {"refs": 1, "memcg_data": PAYER}
    expected = {
        made.page("lru", "unevictable", mapping=secret, **charged): "secretmem",
        made.page(mapping=secret, **charged): "secretmem",
        made.page("unevictable", mapping=secret, **charged): "secretmem",
        made.page("lru", mapping=secret, **charged): "file",
        made.page(mapping=file, **charged): "file",
        made.page("swapbacked", mapping=secret, **charged): "shmem",
        # The mapping is missing in the image.
        made.page(mapping=0xDEAD000000000100, **charged): "file",
    }
    assert dict(enumerate(made.kinds())) == expected


def test_words_of_pages(made: Maker) -> None:
    for n in range(4):
        made.page(memcg_data=PAYER + n, link=MAPPING + n)
    reader = MarkReader(Image(made.prog))
    assert reader.payers(made.raw()) == [PAYER + n for n in range(4)]
    assert reader.links(made.raw()) == [MAPPING + n for n in range(4)]


def test_pages_of_zsmalloc(made: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they had a type, their mapping named the operations (up to 6.10)."""
    if made.has("PGTY_zsmalloc"):
        return
    operations, symbol = made.prog.symbol("secretmem_aops"), Image.symbol

    def with_zsmalloc(image: Image, place: str | int) -> Symbol:
        return operations if place == "zsmalloc_mops" else symbol(image, place)

    monkeypatch.setattr(Image, "symbol", with_zsmalloc)
    mapping = operations.address | MOVABLE
    expected = {
        made.page(refs=1, mapping=mapping + 8): "",
        made.page(refs=1, mapping=mapping): "zsmalloc",
        made.page(refs=1, mapping=operations.address): "",
        made.page(refs=1, kind="table", mapping=mapping): "pagetables",
        made.page(refs=1, mapping=mapping, link=MAPPING | 1): "",
        made.page(refs=1, mapping=mapping): "zsmalloc",
    }
    assert dict(enumerate(made.kinds())) == expected
