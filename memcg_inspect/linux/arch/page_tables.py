# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Page tables of the image's architecture
---------------------------------------

Chooses what mirrors :linux:`arch` of the image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from drgn import Architecture

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.linux.arch import arm64, powerpc, s390, x86
from memcg_inspect.linux.arch.pgtable import ENTRY_SHIFT, Geometry, UserGeometry
from memcg_inspect.model import ImageError

__all__ = (
    "has_user_half",
    "huge_page_order",
    "is_text_address",
    "page_table_geometry",
    "user_geometry",
)

#: Architectures on which the page tables of the kernel are read as well.
_GEOMETRIES: dict[Architecture, Callable[[Image], Geometry]] = {
    Architecture.X86_64: x86.x86_geometry,
    Architecture.AARCH64: arm64.arm64_geometry,
}
_USER_GEOMETRIES: dict[Architecture, Callable[[Image], UserGeometry]] = {
    **_GEOMETRIES,
    Architecture.PPC64: powerpc.powerpc_geometry,
    Architecture.S390X: s390.s390_geometry,
}

F = TypeVar("F", bound=UserGeometry)


def _architecture(image: Image) -> Architecture | None:
    platform = image.prog.platform
    return None if platform is None else platform.arch


def _read(image: Image, known: Mapping[Architecture, Callable[[Image], F]], what: str) -> F:
    architecture = _architecture(image)
    read = None if architecture is None else known.get(architecture)
    if read is None:
        name = "unknown" if architecture is None else architecture.name
        names = ", ".join(each.name for each in known)
        raise ImageError(f"page tables of {what} are read on {names} only, not on {name}")
    return read(image)


@per_image
def page_table_geometry(image: Image) -> Geometry:
    """
    Return the format of the page tables of the kernel and of processes.

    :raises ImageError: if the format is not known
    """
    return _read(image, _GEOMETRIES, "the kernel")


@per_image
def user_geometry(image: Image) -> UserGeometry:
    """
    Return the format of the page tables of processes.

    :raises ImageError: if the format is not known
    """
    return _read(image, _USER_GEOMETRIES, "processes")


@per_image
def huge_page_order(image: Image) -> int:
    """
    Return ``HPAGE_PMD_ORDER``: the order of the page that stands for a table of PTEs.

    :raises ImageError: if it cannot be read
    """
    architecture = _architecture(image)
    if architecture == Architecture.S390X:
        return s390.PTE_BITS
    if architecture == Architecture.PPC64:
        # It depends on whether the MMU is in radix or in hash mode.
        return powerpc.table_bits(image, "__pte_index_size")
    return int(image.object("PAGE_SHIFT").value_()) - ENTRY_SHIFT


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
