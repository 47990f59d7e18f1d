# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which format of page tables an image has, and what else depends on the architecture alone."""

from __future__ import annotations

import pytest
from drgn import Architecture, Platform, PlatformFlags
from support.made_memory import BASE, MadeMemory

from memcg_inspect.linux.arch.arm64 import Arm64Geometry
from memcg_inspect.linux.arch.page_tables import (
    has_user_half,
    huge_page_order,
    is_text_address,
    page_table_geometry,
    user_geometry,
)
from memcg_inspect.linux.arch.powerpc import PowerpcGeometry
from memcg_inspect.linux.arch.s390 import S390Geometry
from memcg_inspect.linux.arch.x86 import X86Geometry
from memcg_inspect.model import ImageError

LITTLE = PlatformFlags.IS_64_BIT | PlatformFlags.IS_LITTLE_ENDIAN
X86 = Platform(Architecture.X86_64)
ARM64 = Platform(Architecture.AARCH64)
S390 = Platform(Architecture.S390X)
POWER = Platform(Architecture.PPC64, LITTLE)
RISCV = Platform(Architecture.RISCV64)

#: Numbers of VMCOREINFO that the kernel for arm64 writes.
NUMBERS = (
    b"NUMBER(VA_BITS)=48\nNUMBER(TCR_EL1_T1SZ)=0x10\nNUMBER(MAX_PHYSMEM_BITS)=48\n"
    b"NUMBER(MODULES_VADDR)=0xffff800000000000\nNUMBER(MODULES_END)=0xffff800080000000\n"
)


def machine(platform: Platform, page_shift: int = 12) -> MadeMemory:
    """Return a machine with all that any architecture is asked for."""
    made = MadeMemory(platform)
    made.write(BASE, NUMBERS)
    made.variable("VMCOREINFO", made.array(made.char, len(NUMBERS) + 1), BASE)
    made.constant("PAGE_SHIFT", page_shift)
    for at, (level, bits) in enumerate({"pte": 5, "pmd": 9, "pud": 9, "pgd": 13}.items()):
        made.write(BASE + 4096 + 8 * at, bits)
        made.symbol(f"__{level}_index_size", BASE + 4096 + 8 * at, 8)
    features = made.struct("cpuinfo_x86", [("x86_capability", made.array(made.int, 20))])
    made.variable("boot_cpu_data", features, BASE + 8192)
    made.write(BASE + 8192 + 4 * 7, 1 << 11, 4)
    return made


@pytest.mark.parametrize(
    ("platform", "kind"),
    [
        (X86, X86Geometry),
        (ARM64, Arm64Geometry),
        (S390, S390Geometry),
        (POWER, PowerpcGeometry),
    ],
)
def test_tables_of_processes(platform: Platform, kind: type) -> None:
    assert type(user_geometry(machine(platform).image)) is kind


@pytest.mark.parametrize(("platform", "kind"), [(X86, X86Geometry), (ARM64, Arm64Geometry)])
def test_tables_of_the_kernel(platform: Platform, kind: type) -> None:
    assert type(page_table_geometry(machine(platform).image)) is kind


@pytest.mark.parametrize(
    ("platform", "name"), [(S390, "S390X"), (POWER, "PPC64"), (RISCV, "RISCV64")]
)
def test_tables_of_the_kernel_that_are_not_known(platform: Platform, name: str) -> None:
    with pytest.raises(ImageError) as error:
        page_table_geometry(machine(platform).image)
    assert str(error.value) == (
        f"page tables of the kernel are read on X86_64, AARCH64 only, not on {name}"
    )


def test_tables_of_processes_that_are_not_known() -> None:
    with pytest.raises(ImageError) as error:
        user_geometry(machine(RISCV).image)
    assert str(error.value) == (
        "page tables of processes are read on X86_64, AARCH64, PPC64, S390X only, not on RISCV64"
    )


@pytest.mark.parametrize(
    ("platform", "page_shift", "order"),
    [(X86, 12, 9), (ARM64, 12, 9), (ARM64, 14, 11), (ARM64, 16, 13), (S390, 12, 8), (POWER, 16, 5)],
)
def test_a_huge_page_stands_for_a_table(platform: Platform, page_shift: int, order: int) -> None:
    assert huge_page_order(machine(platform, page_shift).image) == order


def test_only_x86_has_tables_of_user_space_besides_those_of_the_kernel() -> None:
    assert has_user_half(machine(X86).image)
    assert not has_user_half(machine(ARM64).image)
    assert not has_user_half(machine(S390).image)
    without = machine(X86)
    without.write(BASE + 8192 + 4 * 7, 0, 4)
    assert not has_user_half(without.image)


def test_where_code_is() -> None:
    in_x86, in_arm64 = 0xFFFFFFFF81000000, 0xFFFF800000001000
    assert is_text_address(machine(X86).image, in_x86)
    assert not is_text_address(machine(X86).image, in_arm64)
    assert is_text_address(machine(ARM64).image, in_arm64)
    assert not is_text_address(machine(ARM64).image, in_x86)
    for platform in (S390, POWER, RISCV):
        for address in (in_x86, in_arm64):
            assert not is_text_address(machine(platform).image, address)
