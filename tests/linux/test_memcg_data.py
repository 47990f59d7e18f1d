# SPDX-License-Identifier: LGPL-2.1-or-later
"""Who pays for pages of the kernel and for folios of user memory."""

from __future__ import annotations

from collections import Counter

import pytest
from drgn import FaultError, Object, TypeParameter
from support.guests import DEBIAN_KERNELS, Lab
from support.layouts import FRAMES, NODE_1, MadeImage
from support.made_pages import NO_TYPE, TYPES, kernel_with_pages, put, put_compound

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.memcg_data import (
    Folio,
    charges_node_of_folio,
    count_payers,
    folios_of,
    kernel_payers,
    swap_cache_bits,
)
from memcg_inspect.linux.mm.mm_types import RawPiece, scan_range
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.model import Coverage

#: Series in which __get_obj_cgroup_from_memcg() has a parameter for the node: since 7.2.
BY_NODE = {"7.2", "7.3"}

PAYER, OTHER = 0xFFFF888000111000, 0xFFFF888000222000
#: MEMCG_DATA_OBJEXTS and MEMCG_DATA_KMEM of include/linux/memcontrol.h, and the flag above them.
OBJEXTS, KMEM, THIRD = 1, 2, 4
#: Of include/linux/page-flags.h in some configuration.
SWAPCACHE, SWAPBACKED = 10, 19


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_the_node_of_the_folio_counts_since_7_2(lab: Lab, kernel: str) -> None:
    assert charges_node_of_folio(image_of(lab.image(kernel).program())) == (kernel in BY_NODE)


def test_the_compiler_left_no_such_function() -> None:
    assert charges_node_of_folio(MadeImage()) is False


@pytest.mark.parametrize(
    ("names", "by_node"), [((), False), (("memcg",), False), (("memcg", "nid"), True)]
)
def test_parameters_of_the_function(names: tuple[str, ...], by_node: bool) -> None:
    """It takes the node since 7.2."""
    image = MadeImage()
    of = image.prog.type("unsigned long")
    type_ = image.prog.function_type(of, [TypeParameter(of, name) for name in names])
    name = "__get_obj_cgroup_from_memcg"
    image._objects[name] = Object(image.prog, type_, address=0xFFFFFFFF81000000)
    assert charges_node_of_folio(image) is by_node


def test_a_variable_with_the_name_of_the_function() -> None:
    """As kallsyms alone shows it."""
    image = MadeImage()
    image.variable("__get_obj_cgroup_from_memcg", "unsigned long", 0xFFFFFFFF81000000)
    assert charges_node_of_folio(image) is False


# Pages of the kernel


def kernel_pages() -> MadeImage:
    """Make the ``struct page`` of page frames 0 to 63; no others are in the image."""
    image = kernel_with_pages(TYPES["7.1"])
    for pfn, flags, data in (
        (3, 0, PAYER | KMEM),
        (4, NODE_1, PAYER | KMEM),
        (5, NODE_1, OTHER | KMEM),
        (9, 0, PAYER),  # a user page
        (10, 0, PAYER | OBJEXTS),  # a slab
        (11, 0, PAYER | OBJEXTS | KMEM),
        (12, 0, PAYER | KMEM | THIRD),
        (13, NODE_1, 0),
        (63, 0, OTHER | KMEM),
    ):
        put(image, pfn, flags, NO_TYPE, data)
    return image


def test_payers_of_pages_are_counted() -> None:
    image, coverage = kernel_pages(), Coverage()
    pages = [FRAMES.page(pfn) for pfn in (63, 9, 4, 3, 5, 10, 11, 12, 13)]
    assert count_payers(image, pages, coverage) == Counter(
        {(PAYER, 0): 1, (PAYER, 1): 1, (OTHER, 1): 1, (OTHER, 0): 1, (0, 0): 4, (0, 1): 1}
    )
    assert (coverage.read, coverage.unreadable) == (9, 0)
    assert count_payers(image, [], coverage) == Counter()


def test_pages_are_missed_that_are_not_in_the_image() -> None:
    """Those of the same run that are in another page of memory are read."""
    image, coverage = kernel_pages(), Coverage()
    pages = [FRAMES.page(pfn) for pfn in (*range(66), 200)]
    found = count_payers(image, pages, coverage)
    assert found.total() == coverage.read == 64
    assert found[OTHER, 0] == found[OTHER, 1] == found[PAYER, 0] == found[PAYER, 1] == 1
    assert [(e.what, e.address) for e in coverage.examples] == [
        ("struct pages", FRAMES.page(64)),
        ("struct pages", FRAMES.page(200)),
    ]


def test_payer_of_each_page() -> None:
    image = kernel_pages()
    payers = {3: (PAYER, 0), 5: (OTHER, 1), 9: (0, 0), 10: (0, 0), 12: (0, 0), 13: (0, 1)}
    found = kernel_payers(image, [FRAMES.page(pfn) for pfn in payers])
    assert found == {FRAMES.page(pfn): payer for pfn, payer in payers.items()}
    with pytest.raises(FaultError):
        kernel_payers(image, [FRAMES.page(3), FRAMES.page(64)])


# Folios


def user_pages() -> tuple[MadeImage, RawPiece]:
    types = TYPES["7.1"]
    image = kernel_with_pages(types)
    image.enum(None, PG_swapcache=SWAPCACHE)
    both = 1 << SWAPCACHE | 1 << SWAPBACKED
    put(image, 0, 1 << SWAPCACHE, NO_TYPE, PAYER)
    put(image, 1, NODE_1 | both, NO_TYPE, OTHER)
    put_compound(image, types, 2, 1, both, NO_TYPE, PAYER)
    image.words(FRAMES.page(3) + 56, PAYER)  # memcg_data of a tail has no meaning
    put_compound(image, types, 4, 2, NODE_1 | 1 << SWAPBACKED, NO_TYPE, PAYER)
    put(image, 8, 0, NO_TYPE, PAYER | KMEM)
    put(image, 9, 0, NO_TYPE, 0)
    for pfn in (0, 1, 2, 4):
        image.words(FRAMES.page(pfn) + 24, 0x1000 * pfn + 1)  # mapping
    [piece] = scan_range(image, PageRange(0, 10))
    assert piece.raw is not None
    return image, piece.raw


def test_folios_of_payers() -> None:
    image, raw = user_pages()
    first = Folio(FRAMES.page(0), 0, 0, PAYER, 1, False)
    second = Folio(FRAMES.page(1), 1, 0, OTHER, 0x1001, True)
    third = Folio(FRAMES.page(2), 0, 1, PAYER, 0x2001, True)
    last = Folio(FRAMES.page(4), 1, 2, PAYER, 0x4001, False)
    assert list(folios_of(image, raw, {PAYER})) == [first, third, last]
    assert list(folios_of(image, raw, {PAYER, OTHER})) == [first, second, third, last]
    assert list(folios_of(image, raw, {OTHER, 8})) == [second]
    assert list(folios_of(image, raw, {PAYER + 64})) == []


def test_flags_of_folios_in_the_swap_cache() -> None:
    assert swap_cache_bits(user_pages()[0]) == 1 << SWAPCACHE | 1 << SWAPBACKED
    without_swap = kernel_with_pages(TYPES["7.1"])  # PG_locked is bit 0: there are none
    assert swap_cache_bits(without_swap) == 1 | 1 << SWAPBACKED
