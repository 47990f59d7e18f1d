# SPDX-License-Identifier: LGPL-2.1-or-later
"""Plant faults into copies of ELF images.

drgn translates addresses, and the program headers of the file give their offsets. The copy is
opened again to verify that drgn reads the new values.
"""

import builtins
import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from . import elf, kernels
from .errors import LabError
from .run import find

_WORD = re.compile(r"(?s)([us])(8|16|32|64):(.*)")
_PAGE = 4096


def _drgn() -> Any:
    try:
        import drgn
    except ImportError:
        raise LabError("poke needs drgn: pip install drgn") from None
    return drgn


def open_program(image: Path, vmlinux: Path) -> Any:
    """Return a drgn.Program of an image with debug info."""
    drgn = _drgn()
    program = drgn.Program()
    try:
        program.set_core_dump(str(image))
        program.load_debug_info([str(vmlinux)])
    except Exception as error:
        raise LabError(f"drgn cannot open {image} with {vmlinux}: {error}") from error
    return program


def vmlinux_of(image: Path) -> Path:
    """Return the vmlinux that belongs to an image, by the note of `lab dump` beside it.

    The debug info of a kernel in the lab's cache is fetched if it is missing.
    """
    beside = image.with_name(image.name + ".guest")
    noted = beside / "vmlinux"
    if not noted.exists():
        with contextlib.suppress(OSError, ValueError, KeyError):
            name = json.loads((beside / "meta.json").read_bytes())["kernel"]
            if name in kernels.RECIPES and kernels.kernel(name).vmlinux == noted.readlink():
                return kernels.debug_info(name)
        raise LabError(f"no vmlinux is noted beside {image}; give one with -s")
    return noted.resolve()


def names(program: Any) -> dict[str, Any]:
    """Return the names for expressions: drgn, its Linux helpers and `prog`."""
    import drgn.helpers.linux

    found: dict[str, Any] = {"drgn": drgn, "prog": program}
    for name in drgn.helpers.linux.__all__:
        found[name] = getattr(drgn.helpers.linux, name)
    for name in ("cast", "container_of", "reinterpret", "sizeof", "offsetof", "Object", "NULL"):
        found[name] = getattr(drgn, name)
    return found


def _evaluate(program: Any, scope: Mapping[str, Any], expression: str, **more: Any) -> Any:
    class Symbols(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            # Other names are kernel variables; helpers and builtins come first.
            if name in known or hasattr(builtins, name):
                raise KeyError(name)
            return program[name]

    known = {**scope, **more}
    drgn = _drgn()
    try:
        before = drgn.get_default_prog()
    except drgn.NoDefaultProgramError:
        before = None
    # Helpers can then be called without prog, as at drgn's prompt.
    drgn.set_default_prog(program)
    try:
        return eval(expression, known, Symbols())
    except Exception as error:
        raise LabError(f"{expression!r}: {type(error).__name__}: {error}") from error
    finally:
        drgn.set_default_prog(before)


def _place(program: Any, scope: Mapping[str, Any], what: str) -> tuple[int, int, bool]:
    """Return address, size in bytes and signedness of the word that `what` names."""
    drgn = _drgn()
    if match := _WORD.fullmatch(what):
        address = _evaluate(program, scope, match[3])
        return int(address), int(match[2]) // 8, match[1] == "s"
    thing = _evaluate(program, scope, what)
    if not isinstance(thing, drgn.Object) or thing.address_ is None:
        raise LabError(f"{what!r} is not an object in memory; write u64:ADDRESS for an address")
    if thing.bit_field_size_ is not None:
        raise LabError(f"{what!r} is a bit field; name the word that holds it")
    kind = thing.type_
    while kind.kind == drgn.TypeKind.TYPEDEF:
        kind = kind.type
    if kind.kind == drgn.TypeKind.STRUCT and len(kind.members) == 1:
        # atomic_t, page_counter and the like: the only member
        return _place(program, {**scope, "_thing": thing}, f"_thing.{kind.members[0].name}")
    if kind.kind not in (drgn.TypeKind.INT, drgn.TypeKind.POINTER, drgn.TypeKind.BOOL,
                         drgn.TypeKind.ENUM):  # fmt: skip
        raise LabError(f"{what!r} is a {thing.type_.type_name()}, not a word")
    signed = kind.kind == drgn.TypeKind.INT and kind.is_signed
    return thing.address_, drgn.sizeof(thing), signed


def physical(program: Any, address: int) -> int:
    """Translate a virtual address of the kernel to a physical one (follow_phys())."""
    from drgn.helpers.linux.mm import follow_phys

    try:
        return int(follow_phys(program["init_mm"].address_of_(), address).value_())
    except Exception as error:
        raise LabError(f"{address:#x} is not mapped: {error}") from error


def copy(image: Path, out: Path) -> None:
    """Copy an image. Holes stay holes; blocks are shared if the filesystem can do that."""
    if image.resolve() == out.resolve():
        raise LabError("OUT is IMAGE itself; give the copy another name")
    if find("cp"):
        command = ["cp", "--reflink=auto", "--sparse=always", str(image), str(out)]
        subprocess.run(command, check=True)
    else:
        shutil.copyfile(image, out)


def byte_order(program: Any) -> Literal["little", "big"]:
    """Return the order of the bytes of a number in an image."""
    little = program.platform.flags & _drgn().PlatformFlags.IS_LITTLE_ENDIAN
    return "little" if little else "big"


def _changes(
    program: Any, changes: Sequence[tuple[str | int, str | int | bytes]]
) -> list[tuple[int, bytes]]:
    scope, order = names(program), byte_order(program)
    found = []
    for what, value in changes:
        if isinstance(value, bytes):
            address = what if isinstance(what, int) else _place(program, scope, what)[0]
            found.append((address, value))
            continue
        if isinstance(what, int):
            what = f"u64:{what:#x}"
        address, size, signed = _place(program, scope, what)
        old = int.from_bytes(program.read(address, size), order, signed=signed)
        new = _evaluate(program, scope, value, old=old) if isinstance(value, str) else value
        bits = 8 * size
        number = int(new)
        if not -(1 << bits - 1) <= number < 1 << bits:
            raise LabError(f"{what} holds {bits} bits; {number} does not fit")
        found.append((address, (number & (1 << bits) - 1).to_bytes(size, order)))
    return found


def poke(
    image: Path,
    out: Path,
    vmlinux: Path | None,
    changes: Sequence[tuple[str | int, str | int | bytes]],
) -> list[tuple[int, bytes]]:
    """Copy `image` to `out` and change words in the copy.

    Each change is (what, value). `what` is an expression for an object of the kernel,
    ``u64:ADDRESS`` (u8 to u64, s8 to s64), or an address. `value` is an expression, which may
    use ``old`` (the present value), a number, or bytes.

    :return: (address, bytes) of each change, as written
    """
    table = elf.segments(image)
    vmlinux = vmlinux or vmlinux_of(image)
    program = open_program(image, vmlinux)
    writes = _changes(program, changes)
    pieces = []
    for address, data in writes:
        # Pages that are contiguous in virtual memory may be anywhere in the file.
        at = 0
        while at < len(data):
            size = min(len(data) - at, _PAGE - (address + at) % _PAGE)
            where = elf.file_offset(table, physical(program, address + at), size)
            pieces.append((where, data[at : at + size]))
            at += size
    temporary = out.with_name(f".{out.name}.poking")
    try:
        copy(image, temporary)
        with open(temporary, "r+b") as file:
            for where, data in pieces:
                file.seek(where)
                file.write(data)
        # Later changes replace earlier ones: compare each byte with its last value.
        wanted = {address + i: byte for address, data in writes for i, byte in enumerate(data)}
        changed = open_program(temporary, vmlinux)
        for address, byte in wanted.items():
            if changed.read_u8(address) != byte:
                raise LabError(f"drgn reads another value at {address:#x} than was written")
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    note = out.with_name(out.name + ".guest")
    note.mkdir(exist_ok=True)
    link = note / "vmlinux"
    link.unlink(missing_ok=True)
    link.symlink_to(vmlinux.resolve())
    return writes
