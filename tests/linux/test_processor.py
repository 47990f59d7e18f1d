# SPDX-License-Identifier: LGPL-2.1-or-later
"""Addresses, their tags, lines of the cache, and what a task that does not run has saved."""

from __future__ import annotations

import pytest
from drgn import Architecture, Platform, PlatformFlags, Program, Type
from drgn.helpers.linux.pid import for_each_task
from support.guests import DEBIAN_KERNELS, Lab
from support.made_memory import BASE, MadeMemory

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.arch.processor import (
    cache_line,
    is_kernel_address,
    kasan_tags,
    saved_stack_pointer,
    tag_bits,
    untagged,
)
from memcg_inspect.linux.kernel.stacktrace_words import stack_of


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_stack_pointers_of_tasks_that_sleep(lab: Lab, kernel: str) -> None:
    """__switch_to_asm() saves it below the frame of its caller, which drgn unwinds to."""
    prog = lab.image(kernel).program()
    image, sleeping = image_of(prog), 0
    for task in for_each_task(prog):
        if task.on_cpu:
            continue
        sp = saved_stack_pointer(image, task)
        start, size = stack_of(image, task)
        assert sp is not None
        assert start <= sp <= prog.stack_trace(task)[0].sp < start + size
        sleeping += 1
    assert sleeping > 20


#: Symbols of kernels whose pointers have tags.
TAGGED = {"kasan_flag_enabled": "hw", "__hwasan_tag_memory": "sw"}
ARM64 = Platform(Architecture.AARCH64)
#: The same address, with a tag and without.
WITH_TAG, WITHOUT = 0xA5FF000012345678, 0xFFFF000012345678


def test_kernels_without_tags() -> None:
    made = MadeMemory(ARM64)
    assert kasan_tags(made.image) is None
    assert tag_bits(made.image) == 0
    assert untagged(made.image, WITH_TAG) == WITH_TAG


@pytest.mark.parametrize("symbol", TAGGED)
def test_tags_are_removed_from_pointers_on_arm64_only(symbol: str) -> None:
    made = MadeMemory(ARM64)
    made.symbol(symbol, BASE, 8)
    assert kasan_tags(made.image) == TAGGED[symbol]
    assert tag_bits(made.image) == 0xFF << 56
    assert untagged(made.image, WITH_TAG) == untagged(made.image, WITHOUT) == WITHOUT
    # What is no address of the kernel stays as it is: bit 55 tells.
    for word in (0, 5, 0x0000FFFF12345678, 0xA57F000012345678):
        assert untagged(made.image, word) == word
    other = MadeMemory()
    other.symbol(symbol, BASE, 8)
    assert tag_bits(other.image) == 0
    assert untagged(other.image, WITH_TAG) == WITH_TAG


def test_addresses_of_the_kernel() -> None:
    arm64, x86 = Program(ARM64), Program(Platform(Architecture.X86_64))
    for address in (WITHOUT, WITH_TAG, 1 << 55, (1 << 64) - 1):
        assert is_kernel_address(arm64, address)
    for address in (0, 0x0000FFFFFFFFFFFF, 0xA57F000012345678, (1 << 55) - 1):
        assert not is_kernel_address(arm64, address)
    for address in (1 << 63, 0xFFFF888000000000):
        assert is_kernel_address(x86, address)
    for address in (0, 1 << 55, (1 << 63) - 1):
        assert not is_kernel_address(x86, address)
    # With 32 bits, the kernel may be at any address.
    assert is_kernel_address(Program(Platform(Architecture.ARM)), 5)


def test_lines_of_the_cache() -> None:
    """L1_CACHE_SHIFT of arch/*/include/asm/cache.h."""
    lines = {
        Architecture.X86_64: 64,
        Architecture.AARCH64: 64,
        Architecture.S390X: 256,
        Architecture.PPC64: 128,
        Architecture.RISCV64: 64,
    }
    for architecture, size in lines.items():
        platform = Platform(architecture, PlatformFlags.IS_64_BIT)
        assert cache_line(Program(platform)) == size
    assert cache_line(Program()) == 64


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (("sp",), 0xFFFF888000001230),  # x86
        (("ksp",), 0xFFFF888000001230),  # powerpc, s390
        (("cpu_context", "sp"), 0xFFFF888000001230),  # arm64
        (("x30",), None),
    ],
)
def test_where_each_architecture_saves_the_stack_pointer(
    path: tuple[str, ...], found: int | None
) -> None:
    made = MadeMemory()
    inner: Type = made.word
    if len(path) > 1:
        inner = made.struct("cpu_context", [("x19", made.word), (path[1], made.word)])
    thread = made.struct("thread_struct", [("flags", made.word), (path[0], inner)])
    task = made.struct("task_struct", [("state", made.word), ("thread", thread)])
    made.write(BASE + 8 * (len(path) + 1), 0xFFFF888000001230)
    assert saved_stack_pointer(made.image, made.at(task, BASE)) == found
