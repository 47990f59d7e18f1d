# SPDX-License-Identifier: LGPL-2.1-or-later
"""Types from BTF are compared with those from DWARF, for every test kernel."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

import pytest
from drgn import Architecture, Module, Platform, Program, SymbolKind
from labkit import kernels
from support.guests import KERNELS
from support.spell import definition

from memcg_inspect.btf.parse import Btf, BtfKind
from memcg_inspect.btf.source import from_file
from memcg_inspect.btf.types import TypeMaker

SPELLED = {
    BtfKind.STRUCT: "struct ",
    BtfKind.UNION: "union ",
    BtfKind.ENUM: "enum ",
    BtfKind.ENUM64: "enum ",
    BtfKind.TYPEDEF: "",
}

#: Defined more than once, in headers that no symbol names.
HEADERS = ("bus_numa.h", "pci_x86.h", "irq.c", "binfmt_elf.c", "iommu_pt.h")

#: One source file compiled twice into different types: drgn finds one of them.
TWICE = {
    "struct elf_note_info",
    "struct elf_thread_core_info",
    "struct pt_iommu_map_args",
}
#: Of a header with a name that another has, too.
HIDDEN = {"struct irq_info", "struct pci_root_info"}


@lru_cache(maxsize=1)
def _both(name: str) -> tuple[Program, TypeMaker, dict[str, list[int]]]:
    vmlinux = kernels.debug_info(name)
    dwarf = Program(Platform(Architecture.X86_64))
    module = dwarf.extra_module("vmlinux", create=True)
    found = module if isinstance(module, Module) else module[0]
    found.try_file(str(vmlinux))
    btf = Btf(from_file(str(vmlinux)).data)
    numbers = defaultdict(list)
    for number in btf.of_kind(*SPELLED):
        if btf.is_named(number):
            numbers[SPELLED[btf.kind(number)] + btf.name_of(number)].append(number)
    return dwarf, TypeMaker(Program(Platform(Architecture.X86_64)), btf), numbers


#: Each takes most of a minute.
NEWEST_FIRST = [
    pytest.param(name, marks=() if name == "7.3" else pytest.mark.long) for name in KERNELS
]


@pytest.mark.parametrize("name", NEWEST_FIRST)
def test_types(name: str) -> None:
    dwarf, maker, numbers = _both(name)
    wrong, unknown = [], []
    for spelled, ids in numbers.items():
        try:
            wanted = definition(dwarf.type(spelled))
        except LookupError:
            unknown.append(spelled)
            continue
        have = [definition(maker.type(number)) for number in ids]
        if wanted not in have:
            wrong.append((spelled, wanted, have))
    assert not wrong
    assert len(numbers) > 5000
    # Types inside functions, which drgn does not index, and some that only BTF has.
    assert len(unknown) <= 30, unknown


@pytest.mark.parametrize("name", NEWEST_FIRST)
def test_types_that_share_a_name(name: str) -> None:
    dwarf, maker, numbers = _both(name)
    files = {s.name for s in dwarf.symbols() if s.kind == SymbolKind.FILE} | set(HEADERS)
    shared = {spelled: ids for spelled, ids in numbers.items() if len(ids) > 1}
    assert shared
    for spelled, ids in shared.items():
        wanted: set[str] = set()
        for file in (None, *files):
            try:
                wanted.add(definition(dwarf.type(spelled, file)))
            except LookupError:
                continue
        have = [definition(maker.type(number)) for number in ids]
        if not wanted:
            continue  # inside a function, where drgn does not look
        unmatched = [text for text in have if text not in wanted]
        assert not unmatched or spelled in TWICE | HIDDEN, (spelled, unmatched)
        assert len(unmatched) < len(have), spelled
