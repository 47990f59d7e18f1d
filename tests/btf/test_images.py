# SPDX-License-Identifier: LGPL-2.1-or-later
"""BTF and kallsyms are compared with DWARF and ELF, on images of every test kernel."""

from __future__ import annotations

import dataclasses
import random
import sys
from types import FrameType

import pytest
from drgn import FindObjectFlags, Object, Program, Symbol, Type, TypeKind
from drgn.helpers.linux.kallsyms import load_vmlinux_kallsyms
from support.guests import DEBIAN_KERNELS, KERNELS, NOT_BUILT, GuestImage, Lab
from support.spell import layout

from memcg_inspect.btf import debug_info_source, load_btf
from memcg_inspect.btf.globals import VARIABLES
from memcg_inspect.btf.parse import BtfKind
from memcg_inspect.btf.session import session_of
from memcg_inspect.btf.symbols import Kallsyms
from memcg_inspect.collect import audit
from memcg_inspect.image.image import image_of

pytestmark = pytest.mark.image

#: Arrays whose length is found by the next symbol, which leaves room for alignment.
ROOMY = {name for name, entry in VARIABLES.items() if "[*]" in str(entry)}
#: Variables that no kernel of the lab has: without CONFIG_NUMA or CONFIG_SPARSEMEM, with
#: CONFIG_KEXEC_HANDOVER, and, of tk_core's with a named type, 6.13 to 6.16.
ELSEWHERE = {"contig_page_data", "crashing_cpu", "kho_in", "max_mapnr", "mem_map", "tk_core"}


#: Debug info of a Debian kernel takes half a minute: the oldest and the newest one by default.
ALL = [pytest.param(k, marks=pytest.mark.long) if k in DEBIAN_KERNELS[1:-1] else k for k in KERNELS]


@pytest.fixture(scope="session", params=ALL)
def image(request: pytest.FixtureRequest, lab: Lab) -> GuestImage:
    return lab.image(request.param)


@pytest.fixture
def btf(image: GuestImage) -> Program:
    prog = Program()
    prog.set_core_dump(image.core)
    load_btf(prog)
    return prog


def _variable(prog: Program, name: str) -> Object | None:
    try:
        return prog.object(name, FindObjectFlags.VARIABLE)
    except LookupError:
        return None


def _named(type_: Type) -> bool:
    """Whether a type is spelled without a structure that has no name."""
    while type_.kind in (TypeKind.ARRAY, TypeKind.POINTER):
        type_ = type_.type
    return type_.kind not in (TypeKind.STRUCT, TypeKind.UNION, TypeKind.ENUM) or bool(type_.tag)


def test_the_table_of_variables(image: GuestImage, btf: Program) -> None:
    dwarf = image.program(dwarf=True)
    for name in VARIABLES:
        wanted, have = _variable(dwarf, name), _variable(btf, name)
        if wanted is not None and not _named(wanted.type_):
            # BTF has no variables of a kernel's own, so a type is all that can be asked for.
            assert have is None, name
            continue
        assert (wanted is None) == (have is None), name
        if wanted is None or have is None:
            continue
        assert have.address_ == wanted.address_, name
        if name in ROOMY and wanted.type_.length != have.type_.length:
            assert 0 < (have.type_.length - wanted.type_.length) * 4 < 64, name
            assert layout(have.type_.type) == layout(wanted.type_.type), name
        else:
            assert layout(have.type_) == layout(wanted.type_), name


@pytest.mark.parametrize("kernels", [KERNELS] if not NOT_BUILT else [])
def test_every_entry_of_the_table_is_checked(lab: Lab, kernels: tuple[str, ...]) -> None:
    """The test above, which runs in any process, compares each with debug info of some kernel."""
    checked = set()
    for kernel in kernels:
        dwarf = lab.image(kernel).program(dwarf=True)
        for name in VARIABLES:
            variable = _variable(dwarf, name)
            if variable is not None and _named(variable.type_):
                checked.add(name)
    assert set(VARIABLES) - checked <= ELSEWHERE


def test_per_cpu_variables(image: GuestImage, btf: Program) -> None:
    dwarf, session = image.program(dwarf=True), session_of(btf)
    assert session is not None
    names = [session.kernel.btf.name_of(v) for v in session.kernel.btf.of_kind(BtfKind.VAR)]
    seen = 0
    for name in names:
        wanted, have = _variable(dwarf, name), _variable(btf, name)
        # Of several variables of one name drgn takes any.
        if names.count(name) > 1 or len(btf.symbols(name)) > 1:
            continue
        # Aliases of the linker's, and what the compiler gave a number, have no DWARF.
        if wanted is not None and wanted.address_ is not None:
            seen += 1
            assert have is not None
            assert have.address_ == wanted.address_, name
            assert layout(have.type_) == layout(wanted.type_), name
    assert seen > 200


def test_symbols_are_those_that_drgn_unpacks(btf: Program) -> None:
    ours, theirs = Kallsyms(btf), load_vmlinux_kallsyms(btf)

    def key(symbol: Symbol) -> tuple[object, ...]:
        return symbol.name, symbol.address, symbol.size, symbol.binding, symbol.kind

    every = sorted((key(s) for s in theirs(btf, None, None, False)), key=str)
    assert sorted((key(s) for s in ours.everything()), key=str) == every
    for name, address, *_ in random.Random(4).sample(every, 1000):
        assert sorted(map(key, ours.named(str(name))), key=str) == sorted(
            map(key, theirs(btf, str(name), None, False)), key=str
        )
        for at in (int(str(address)), int(str(address)) + 3):
            assert list(map(key, ours.containing(at))) == list(
                map(key, theirs(btf, None, at, False))
            )
    assert ours.named("no_such_symbol") == []
    assert ours.containing(1 << 40) == []


def test_set_up_makes_only_what_is_looked_up(image: GuestImage) -> None:
    """Reading BTF and kallsyms calls no Python function for each type or symbol."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    prog = Program()
    prog.set_core_dump(image.core)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        load_btf(prog)
        prog.type("struct page")
        _ = prog["init_task"]
    finally:
        sys.setprofile(before)
    session = session_of(prog)
    assert session is not None
    assert calls < session.kernel.btf.end


def test_debug_info_comes_first(image: GuestImage, btf: Program) -> None:
    assert debug_info_source(btf) == "BTF of the image"
    session = session_of(btf)
    assert session is not None
    assert not session.is_silent()
    btf.load_debug_info([image.vmlinux])
    assert session.is_silent()
    assert debug_info_source(btf) == f"DWARF: {image.vmlinux}"
    assert btf.type("struct page").members
    assert btf.enabled_type_finders()[-1] == "btf"


def test_the_audit_says_the_same(image: GuestImage, btf: Program) -> None:
    wanted, have = image.report(dwarf=True), audit(image_of(btf))
    assert wanted.image.debug_info.startswith("DWARF: ")
    assert have.image.debug_info == "BTF of the image"
    assert dataclasses.replace(have, image=wanted.image, timings=wanted.timings) == wanted


@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_types_and_symbols_of_modules(lab: Lab, kernel: str) -> None:
    btf = Program()
    btf.set_core_dump(lab.image(kernel).core)
    load_btf(btf)
    session = session_of(btf)
    assert session is not None
    # built into the kernels that are built here
    assert btf.type("struct fw_cfg_sysfs_entry").has_member("select")
    assert session.find_symbols("fw_cfg_sysfs_probe")
    symbol = btf.symbol("fw_cfg_sysfs_probe")
    assert btf.symbol(symbol.address + 1).name == "fw_cfg_sysfs_probe"
