# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Addresses and registers
-----------------------

Tells addresses of the kernel from those of user space, as ``TASK_SIZE`` of
:linux:`arch/arm64/include/asm/processor.h` and of :linux:`arch/riscv/include/asm/pgtable.h`, and
``TASK_SIZE_MAX`` of :linux:`arch/x86/include/asm/page_64_types.h` do, and return addresses that are
signed from the addresses themselves, as ``ptrauth_strip_kernel_insn_pac()`` of
:linux:`arch/arm64/include/asm/pointer_auth.h` does, and removes tags from pointers, as
``__tag_reset()`` of :linux:`arch/arm64/include/asm/memory.h` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Literal

from drgn import Architecture, Object, Program

from memcg_inspect.image.elf import has_high_half
from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import has_member
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.arch.pgtable import vmcoreinfo_number
from memcg_inspect.model import ImageError

__all__ = (
    "cache_line",
    "code_addresses",
    "is_kernel_address",
    "kasan_tags",
    "saved_stack_pointer",
    "tag_bits",
    "untagged",
)

#: ``SMP_CACHE_BYTES``, where it is not 64.
_CACHE_LINES = {Architecture.S390X: 256, Architecture.PPC64: 128}

#: The bit of an address on arm64 that tells the kernel from user space. No signature and no tag
#: uses it.
_KERNEL_BIT = 1 << 55
#: The bits of an address on arm64 that the processor ignores (Top Byte Ignore).
_TOP_BYTE = 0xFF << 56
#: Symbols of kernels with ``CONFIG_KASAN_HW_TAGS`` and ``CONFIG_KASAN_SW_TAGS``.
_OF_TAGS: Mapping[str, Literal["hw", "sw"]] = {
    "kasan_flag_enabled": "hw",
    "__hwasan_tag_memory": "sw",
}


@per_image
def kasan_tags(image: Image) -> Literal["hw", "sw"] | None:
    """Return whether ``CONFIG_KASAN_HW_TAGS`` or ``CONFIG_KASAN_SW_TAGS`` is set."""
    for name, mode in _OF_TAGS.items():
        with suppress(UnknownKernelError):
            image.symbol(name)
            return mode
    return None


@per_image
def tag_bits(image: Image) -> int:
    """
    Return the bits of a pointer to memory of the kernel that are a tag, and no part of the address.

    A kernel for arm64 with ``CONFIG_KASAN_SW_TAGS`` or ``CONFIG_KASAN_HW_TAGS`` has tags there.
    drgn ignores the tag when it reads memory. Its helpers that compare addresses do not.
    """
    return _TOP_BYTE if _is_arm64(image.prog) and kasan_tags(image) else 0


def untagged(image: Image, address: int) -> int:
    """
    Return the address in a pointer to memory of the kernel, without its tag.

    Addresses of objects in slabs are computed, and have none.
    """
    tags = tag_bits(image)
    return address | tags if tags and address & _KERNEL_BIT else address


def _is_arm64(prog: Program) -> bool:
    platform = prog.platform
    return platform is not None and platform.arch == Architecture.AARCH64


def is_kernel_address(prog: Program, address: int) -> bool:
    """
    Return whether an address is one of the kernel, and not of user space.

    Elsewhere than on architectures whose kernel has the upper half of all addresses, every address
    counts as one of the kernel.
    """
    if _is_arm64(prog):
        return bool(address & _KERNEL_BIT)  # a tag may have any of the bits above
    return not has_high_half(prog) or bool(address >> 63)


def cache_line(prog: Program) -> int:
    """Return ``SMP_CACHE_BYTES`` in bytes."""
    platform = prog.platform
    return 64 if platform is None else _CACHE_LINES.get(platform.arch, 64)


@per_image
def _signature_mask(image: Image) -> int:
    """Return the bits of a return address of the kernel that are its signature, on arm64."""
    try:
        return vmcoreinfo_number(image, "KERNELPACMASK", 0)
    except ImageError:
        return 0


def code_addresses(image: Image, words: Iterable[int]) -> Iterator[int]:
    """
    Return words that may be return addresses, without signatures.

    arm64 signs the return addresses that it saves (``CONFIG_ARM64_PTR_AUTH_KERNEL``, pointer
    authentication).
    """
    mask = _signature_mask(image)
    if not mask:
        yield from words
        return
    for word in words:
        yield word | mask if word & _KERNEL_BIT else word


def saved_stack_pointer(image: Image, task: Object) -> int | None:
    """
    Return the stack pointer of a task that does not run.

    :param task: ``struct task_struct *``
    :return: ``None`` if this is not known of the architecture
    :raises drgn.FaultError: if the task cannot be read
    """
    if has_member(image, "struct thread_struct", "sp"):  # x86
        return int(task.thread.sp)
    if has_member(image, "struct thread_struct", "ksp"):  # powerpc, s390
        return int(task.thread.ksp)
    if has_member(image, "struct thread_struct", "cpu_context"):  # arm64
        return int(task.thread.cpu_context.sp)
    return None
