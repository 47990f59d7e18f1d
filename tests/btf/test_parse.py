# SPDX-License-Identifier: LGPL-2.1-or-later
"""BTF made by hand, in both byte orders, is parsed and converted to drgn's types."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import drgn
import pytest
from drgn import (
    Architecture,
    Platform,
    PlatformFlags,
    Program,
    Symbol,
    SymbolBinding,
    SymbolKind,
    TypeKind,
)
from support.btf_builder import Builder, Order

from memcg_inspect.btf import BtfError, debug_info_source, load_btf
from memcg_inspect.btf.parse import Btf, BtfKind
from memcg_inspect.btf.source import from_image
from memcg_inspect.btf.types import TypeMaker
from memcg_inspect.model import ImageError

ORDERS: list[Order] = ["little", "big"]


def program(order: Order = "little", bits: int = 64) -> Program:
    flags = PlatformFlags(0)
    if order == "little":
        flags |= PlatformFlags.IS_LITTLE_ENDIAN
    if bits == 64:
        flags |= PlatformFlags.IS_64_BIT
    return Program(Platform(Architecture.UNKNOWN, flags))


def loaded(builder: Builder, tmp_path: Path, order: Order = "little", bits: int = 64) -> Program:
    path = tmp_path / "btf"
    path.write_bytes(builder.data(order))
    prog = program(order, bits)
    load_btf(prog, str(path))
    return prog


def everything() -> Builder:
    b = Builder()
    long_ = b.int("long unsigned int", 8)
    char = b.int("char", 1, encoding=1)
    bool_ = b.int("_Bool", 1, encoding=4)
    int_ = b.int("int", 4, encoding=1)
    b.to(BtfKind.TYPEDEF, bool_, "bool")
    node = b.add(BtfKind.STRUCT, "node", 16, [b.name("next"), 6 + 1, 0], 1)
    assert node == 6
    pointer = b.to(BtfKind.PTR, node)
    assert pointer == 7
    b.compound(BtfKind.STRUCT, "flags", 16, [
        ("low", int_, 0, 3), ("high", int_, 3, 29), ("word", long_, 64, 0),
    ])  # fmt: skip
    inner = b.compound(BtfKind.UNION, "", 8, [("a", long_, 0), ("b", pointer, 0)])
    flexible = b.array(char, 0, int_)
    b.compound(BtfKind.STRUCT, "outer", 24, [
        ("first", b.to(BtfKind.CONST, b.to(BtfKind.VOLATILE, long_)), 0),
        ("", inner, 64),
        ("tail", flexible, 128),
    ])  # fmt: skip
    b.enum("color", 4, {"RED": 0, "GREEN": -1, "BLUE": 7})
    b.enum("large", 8, {"HUGE_VALUE": 1 << 40, "TINY": 1}, wide=True)
    b.enum("", 1, {"NAMELESS": 3})
    b.add(BtfKind.FLOAT, "double", 8)
    proto = b.prototype(int_, [("fd", int_), ("name", b.to(BtfKind.PTR, char)), ("", 0)])
    b.to(BtfKind.TYPEDEF, b.to(BtfKind.PTR, proto), "printer")
    b.add(BtfKind.FWD, "opaque")
    b.to(BtfKind.TYPEDEF, b.add(BtfKind.FWD, "node"), "node_t")
    b.to(BtfKind.TYPEDEF, b.to(BtfKind.TYPE_TAG, long_, "rcu"), "tagged")
    b.compound(BtfKind.UNION, "mix", 8, [("open", b.array(int_, 0, int_), 0), ("l", long_, 0)])
    return b


@pytest.mark.parametrize("order", ORDERS)
def test_every_kind(order: Order, tmp_path: Path) -> None:
    prog = loaded(everything(), tmp_path, order)
    assert prog.type("unsigned long").size == 8
    assert prog.type("char").is_signed
    assert prog.type("bool").type.kind == TypeKind.BOOL
    assert prog.type("double").kind == TypeKind.FLOAT
    flags = prog.type("struct flags")
    assert [(m.name, m.bit_offset, m.bit_field_size) for m in flags.members] == [
        ("low", 0, 3), ("high", 3, 29), ("word", 64, None),
    ]  # fmt: skip
    outer = prog.type("struct outer")
    assert [m.name for m in outer.members] == ["first", None, "tail"]
    assert str(outer.members[0].type) == "const volatile unsigned long"
    assert outer.has_member("b")
    assert outer.members[2].type.length is None
    assert outer.member("b").type.type.tag == "node"
    assert prog.type("union mix").members[0].type.length is None
    assert str(prog.type("printer").type) == "int (*)(int fd, char *name, ...)"
    assert not prog.type("struct node").members[0].type.type.members[0].bit_field_size
    assert prog.type("node_t").type.is_complete()
    assert prog.type("tagged").type.name == "unsigned long"


@pytest.mark.parametrize("order", ORDERS)
def test_values_are_read_in_the_order_of_the_image(order: Order, tmp_path: Path) -> None:
    prog = loaded(everything(), tmp_path, order)
    form = "<" if order == "little" else ">"
    raw = struct.pack(f"{form}IIQ", 0, 0, 0x1122334455667788)
    value = drgn.Object.from_bytes_(prog, "struct flags", raw)
    assert value.word == 0x1122334455667788
    first = 0b101 if order == "little" else 0b101 << 29
    value = drgn.Object.from_bytes_(
        prog, "struct flags", struct.pack(f"{form}I", first) + bytes(12)
    )
    assert value.low == -3  # three bits, signed
    assert value.high == 0


@pytest.mark.parametrize("order", ORDERS)
def test_enumerators(order: Order, tmp_path: Path) -> None:
    prog = loaded(everything(), tmp_path, order)
    assert prog["GREEN"].value_() == -1
    assert prog["BLUE"].type_.tag == "color"
    assert prog["HUGE_VALUE"].value_() == 1 << 40
    assert prog["NAMELESS"].value_() == 3
    assert prog["NAMELESS"].type_.tag is None
    assert prog.type("enum large").type.name == "unsigned long"
    with pytest.raises(KeyError):
        prog["PURPLE"]


@pytest.mark.parametrize("order", ORDERS)
def test_signs_of_enumerators(order: Order, tmp_path: Path) -> None:
    """An enum is signed as a whole: BTF says so once, and not of each value."""
    b = everything()
    b.enum(
        "wide_signed", 8, {"LEAST": -(1 << 63), "BELOW": -(1 << 40), "MOST": (1 << 63) - 1}, True
    )
    b.enum("wide_unsigned", 8, {"HIGHEST": (1 << 64) - 1, "HIGH": 1 << 63}, True)
    b.enum("signed_", 4, {"LEAST_INT": -(1 << 31), "MOST_INT": (1 << 31) - 1})
    b.enum("unsigned_", 4, {"HIGHEST_INT": (1 << 32) - 1, "HIGH_INT": 1 << 31})
    prog = loaded(b, tmp_path, order)
    expected = {
        "LEAST": -(1 << 63), "BELOW": -(1 << 40), "MOST": (1 << 63) - 1,
        "HIGHEST": (1 << 64) - 1, "HIGH": 1 << 63,
        "LEAST_INT": -(1 << 31), "MOST_INT": (1 << 31) - 1,
        "HIGHEST_INT": (1 << 32) - 1, "HIGH_INT": 1 << 31,
    }  # fmt: skip
    assert {name: prog[name].value_() for name in expected} == expected
    names = [prog.type(f"enum {name}").type.name for name in ("wide_signed", "wide_unsigned")]
    assert names == ["long", "unsigned long"]
    names = [prog.type(f"enum {name}").type.name for name in ("signed_", "unsigned_")]
    assert names == ["int", "unsigned int"]


def test_32_bit(tmp_path: Path) -> None:
    b = Builder()
    b.to(BtfKind.TYPEDEF, b.to(BtfKind.PTR, b.int("int", 4, 1)), "ip")
    b.enum("large", 8, {"HUGE_VALUE": 1 << 40}, wide=True)
    prog = loaded(b, tmp_path, "big", 32)
    assert drgn.sizeof(prog.type("ip")) == 4
    assert prog.type("enum large").type.name == "unsigned long long"


def test_split_btf_continues_its_base() -> None:
    base = Btf(everything().data())
    more = Builder(base)
    more.compound(BtfKind.STRUCT, "mine", 8, [("theirs", base.find("color", BtfKind.ENUM)[0], 0)])
    more.add(BtfKind.FWD, "outer")
    split = Btf(more.data(), base, "BTF of module m")
    kernel = TypeMaker(program(), base)
    module = TypeMaker(kernel.prog, split, kernel)
    mine = module.type(split.find("mine", BtfKind.STRUCT)[0])
    assert mine.members[0].name == "theirs"
    assert mine.members[0].type.tag == "color"
    assert split.find("color", BtfKind.ENUM) == []
    assert module.type(split.end - 1).is_complete()


def test_a_declaration_with_two_definitions_stays_one(tmp_path: Path) -> None:
    b = Builder()
    for size in (4, 8):
        b.compound(BtfKind.STRUCT, "twin", size, [])
    b.to(BtfKind.TYPEDEF, b.add(BtfKind.FWD, "twin"), "twin_t")
    prog = loaded(b, tmp_path)
    assert not prog.type("twin_t").type.is_complete()
    assert prog.type("struct twin").size == 4


def _loops() -> dict[str, Builder]:
    found = {}
    for kind in (BtfKind.PTR, BtfKind.TYPEDEF, BtfKind.CONST):
        found[kind.name] = b = Builder()
        b.to(kind, 1, "t" if kind == BtfKind.TYPEDEF else "")
        b.to(BtfKind.TYPEDEF, 1, "top")
    found["two typedefs"] = b = Builder()
    b.to(BtfKind.TYPEDEF, 2, "top")
    b.to(BtfKind.TYPEDEF, 1, "t")
    found["itself"] = b = Builder()
    b.compound(BtfKind.STRUCT, "s", 8, [("again", 1, 0)])
    b.to(BtfKind.TYPEDEF, 1, "top")
    found["nameless itself"] = b = Builder()
    b.compound(BtfKind.STRUCT, "", 8, [("", 1, 0)])
    b.to(BtfKind.TYPEDEF, 1, "top")
    found["a declaration of itself"] = b = Builder()
    b.compound(BtfKind.STRUCT, "s", 8, [("again", 2, 0)])
    b.add(BtfKind.FWD, "s")
    b.to(BtfKind.TYPEDEF, 1, "top")
    found["array of itself"] = b = Builder()
    b.array(1, 4)
    b.to(BtfKind.TYPEDEF, 1, "top")
    found["nameless, by pointer"] = b = Builder()
    b.compound(BtfKind.STRUCT, "", 8, [("next", 2, 0)])
    b.to(BtfKind.PTR, 1)
    b.to(BtfKind.TYPEDEF, 2, "top")
    found["parameter"] = b = Builder()
    b.prototype(0, [("f", 2)])
    b.to(BtfKind.PTR, 1)
    b.to(BtfKind.TYPEDEF, 2, "top")
    found["a long way"] = b = Builder()
    for number in range(1, 1000):
        b.to(BtfKind.PTR, number + 1)
    b.int("int", 4)
    b.to(BtfKind.TYPEDEF, 1, "top")
    return found


@pytest.mark.parametrize("name", _loops())
def test_loops_are_refused(name: str, tmp_path: Path) -> None:
    prog = loaded(_loops()[name], tmp_path)
    with pytest.raises(BtfError, match="is damaged: type"):
        prog.type("top")


def _damaged() -> dict[str, tuple[Any, str]]:
    b = everything()
    good = b.data()

    def changed(at: int, word: int) -> bytes:
        return good[:at] + struct.pack("<I", word) + good[at + 4 :]

    return {
        "nothing": (b"", "neither BTF nor an ELF file"),
        "magic": (b"\x7fELG" + good[4:], "neither BTF nor an ELF file"),
        "short header": (good[:20], "truncated"),
        "version": (good[:2] + b"\2" + good[3:], "version 2"),
        "truncated": (good[:-40], "truncated"),
        "types out of range": (changed(12, 1 << 31), "truncated or damaged"),
        "strings out of range": (changed(16, 1 << 31), "truncated or damaged"),
        "unknown kind": (changed(28, 100 << 24), "kind 100"),
        "endless vlen": (changed(24 + 16 + 4, 4 << 24 | 0xFFFFFF), "exceeds the size of its types"),
        "no types": (Builder().data(), "has no types"),
    }


@pytest.mark.parametrize("name", _damaged())
def test_what_is_no_btf_is_told_in_one_line(name: str, tmp_path: Path) -> None:
    data, what = _damaged()[name]
    path = tmp_path / "btf"
    path.write_bytes(data)
    prog = program()
    with pytest.raises(ImageError, match=what) as caught:
        load_btf(prog, str(path))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert debug_info_source(prog) == "none"
    with pytest.raises(LookupError):
        prog.type("struct page")


def test_damaged_types_leave_the_others(tmp_path: Path) -> None:
    b = Builder()
    int_ = b.int("int", 4, 1)
    b.compound(BtfKind.STRUCT, "good", 4, [("i", int_, 0)])
    b.compound(BtfKind.STRUCT, "past", 4, [("i", int_, 0), ("j", int_, 32)])
    b.compound(BtfKind.STRUCT, "dangling", 4, [("i", 999, 0)])
    b.enum("odd", 3, {"ODD": 1})
    b.to(BtfKind.TYPEDEF, b.array(int_, 1 << 30), "vast")
    prog = loaded(b, tmp_path)
    assert prog.type("struct good").members[0].type.size == 4
    with pytest.raises(BtfError, match="not within its structure"):
        _ = prog.type("struct past").members[1].type
    with pytest.raises(BtfError, match="refers to type 999"):
        prog.type("struct dangling")
    with pytest.raises(BtfError, match="enum of 3 bytes"):
        prog.type("enum odd")
    with pytest.raises(BtfError, match="array of"):
        prog.type("vast")


def test_a_program_without_references_is_freed(tmp_path: Path) -> None:
    import gc
    import weakref

    class Sentinel:
        pass

    def use() -> weakref.ref[Sentinel]:
        prog = loaded(everything(), tmp_path)
        sentinel = prog.cache["sentinel"] = Sentinel()
        str(prog.type("struct outer"))
        str(prog["BLUE"])
        return weakref.ref(sentinel)

    seen = use()
    gc.collect()
    assert seen() is None


def test_elf_files(tmp_path: Path) -> None:
    data = everything().data()
    for wide, order in ((True, "<"), (False, "<"), (True, ">"), (False, ">")):
        path = tmp_path / "elf"
        path.write_bytes(_elf(data, wide, order))
        load_btf(prog := program(), str(path))
        assert prog.type("struct node").size == 16
        assert debug_info_source(prog) == f"BTF of {path}"
    path.write_bytes(_elf(data, True, "<", name=b".other"))
    with pytest.raises(ImageError, match="no section .BTF"):
        load_btf(program(), str(path))
    with pytest.raises(ImageError, match="No such file"):
        load_btf(program(), str(tmp_path / "missing"))


class Said:
    """Symbols that a test chooses."""

    def __init__(self, **addresses: int) -> None:
        self.addresses = addresses

    def named(self, name: str) -> list[Symbol]:
        address = self.addresses.get(name)
        unknown = SymbolBinding.UNKNOWN, SymbolKind.UNKNOWN
        return [] if address is None else [Symbol(name, address, 0, *unknown)]


def test_what_an_image_lacks_is_told_in_one_line() -> None:
    prog = program()
    data = everything().data()
    prog.add_memory_segment(0x1000, len(data), lambda _, n, at, __: data[at : at + n])
    ends = {"__start_BTF": 0x1000, "__stop_BTF": 0x1000 + len(data)}
    assert from_image(prog, Said(**ends)).data == data  # type: ignore[arg-type]
    for said, what in (
        ({}, "built without CONFIG_DEBUG_INFO_BTF"),
        ({"_stext": 0x8000}, r"have no variables, so .* cannot be found \(CONFIG_KALLSYMS_ALL=n\)"),
        ({"_stext": 0x8000, "init_task": 0x9000}, "built without CONFIG_DEBUG_INFO_BTF"),
        ({"__start_BTF": 0x1000, "__stop_BTF": 0x1000}, "impossible size of 0 bytes"),
        ({"__start_BTF": 0x1000, "__stop_BTF": 1 << 40}, "impossible size"),
        ({"__start_BTF": 0x800, "__stop_BTF": 0x1100}, "is not in the image"),
    ):
        with pytest.raises(BtfError, match=what) as caught:
            from_image(prog, Said(**said))  # type: ignore[arg-type]
        assert "vmlinux" in str(caught.value)
        assert "\n" not in str(caught.value)


def _elf(data: bytes, wide: bool, order: str, name: bytes = b".BTF") -> bytes:
    names = b"\0" + name + b"\0.shstrtab\0"
    ident = b"\x7fELF" + bytes([1 + wide, 1 if order == "<" else 2, 1]) + bytes(9)
    header, place = (64, "QQQ") if wide else (52, "III")
    size = 64 if wide else 40
    start = header + 3 * size
    form = f"{order}HHI{place}IHHHHHH"
    head = ident + struct.pack(form, 2, 62, 1, 0, 0, header, 0, header, 0, 0, size, 3, 2)
    section = f"{order}IIQQQQIIQQ" if wide else f"{order}IIIIIIIIII"
    sections = [
        struct.pack(section, *([0] * 10)),
        struct.pack(section, 1, 1, 2, 0, start, len(data), 0, 0, 1, 0),
        struct.pack(section, 2 + len(name), 3, 0, 0, start + len(data), len(names), 0, 0, 1, 0),
    ]
    return head + b"".join(sections) + data + names
