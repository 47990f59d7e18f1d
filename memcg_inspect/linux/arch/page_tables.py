# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Page tables of the image's architecture
---------------------------------------

Chooses what mirrors :linux:`arch` of the image.
"""

from __future__ import annotations

from collections.abc import Callable

from drgn import Architecture, FaultError

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.linux.arch import arm64, x86
from memcg_inspect.linux.arch.pgtable import Geometry
from memcg_inspect.model import ImageError

__all__ = ("has_user_half", "huge_page_order", "is_text_address", "page_table_geometry")

#: ``PTRS_PER_PTE`` of s390 in bits, and the largest of all architectures.
_S390_PTE_BITS, _MOST_PTE_BITS = 8, 13
#: Bits of the size of an entry in bytes.
_ENTRY_SHIFT = 3

_GEOMETRIES: dict[Architecture, Callable[[Image], Geometry]] = {
    Architecture.X86_64: x86.x86_geometry,
    Architecture.AARCH64: arm64.arm64_geometry,
}


def _architecture(image: Image) -> Architecture | None:
    platform = image.prog.platform
    return None if platform is None else platform.arch


@per_image
def page_table_geometry(image: Image) -> Geometry:
    """
    Return the format of the page tables of the image.

    :raises ImageError: if the format is not known
    """
    architecture = _architecture(image)
    read = None if architecture is None else _GEOMETRIES.get(architecture)
    if read is None:
        name = "unknown" if architecture is None else architecture.name
        known = ", ".join(known.name for known in _GEOMETRIES)
        raise ImageError(f"page tables are read on {known} only, and this machine is {name}")
    return read(image)


@per_image
def huge_page_order(image: Image) -> int:
    """
    Return ``HPAGE_PMD_ORDER``: the order of the page that stands for a table of PTEs.

    :raises ImageError: if it cannot be read
    """
    architecture = _architecture(image)
    if architecture == Architecture.S390X:
        return _S390_PTE_BITS
    if architecture == Architecture.PPC64:
        # It depends on whether the MMU is in radix or in hash mode.
        try:
            order = image.memory.word(image.symbol("__pte_index_size").address)
        except FaultError as error:
            raise ImageError(f"__pte_index_size cannot be read: {error}") from None
        if not 0 < order <= _MOST_PTE_BITS:
            raise ImageError(f"__pte_index_size cannot be {order}")
        return order
    return int(image.object("PAGE_SHIFT").value_()) - _ENTRY_SHIFT


def has_user_half(image: Image) -> bool:
    """
    Return whether a second table at the top follows that of the kernel: what user space sees.

    :raises drgn.FaultError: if it cannot be read
    """
    return _architecture(image) == Architecture.X86_64 and x86.has_pti(image)


def is_text_address(image: Image, address: int) -> bool:
    """
    Return whether code is loaded at an address, as far as the address tells it.

    :return: always ``False`` on architectures whose layout is not known
    """
    architecture = _architecture(image)
    if architecture == Architecture.X86_64:
        return x86.is_text_address(address)
    return architecture == Architecture.AARCH64 and arm64.is_module_address(image, address)
