# SPDX-License-Identifier: LGPL-2.1-or-later
"""Spells types out, so that types of two programs can be compared."""

from __future__ import annotations

from drgn import Type, TypeKind

COMPOUND = (TypeKind.STRUCT, TypeKind.UNION)


def definition(type_: Type) -> str:
    """All that the C source says of a type with a name, down to the names of others."""
    if type_.kind in COMPOUND:
        if type_.members is None:
            return f"{type_.kind.name} {type_.tag}, incomplete"
        members = [
            f"{member.name} at {member.bit_offset}:{member.bit_field_size} {use(member.type)}"
            for member in type_.members
        ]
        return f"{type_.kind.name} {type_.tag} of {type_.size}: {'; '.join(members)}"
    if type_.kind == TypeKind.ENUM:
        # What the enumeration's integer type is called is lost; its size and sign are not.
        kind = f"{type_.type.size} {type_.type.is_signed}" if type_.type else "incomplete"
        return f"enum {type_.tag} of {kind}: {[tuple(e) for e in type_.enumerators or ()]}"
    return f"typedef {type_.name}: {use(type_.type)}"


def use(type_: Type) -> str:
    """A type where it is used: by name if it has one."""
    qualifiers = f"{type_.qualifiers} " if type_.qualifiers else ""
    return qualifiers + _use(type_)


def _use(type_: Type) -> str:
    kind = type_.kind
    if kind == TypeKind.POINTER:
        return f"pointer to {use(type_.type)}"
    if kind == TypeKind.ARRAY:
        # "[2][3]" is "[6]" in BTF, "[]" is "[0]".
        length = 1
        while type_.kind == TypeKind.ARRAY:
            length *= type_.length or 0
            type_ = type_.type
        return f"{length} times {use(type_)}"
    if kind in (*COMPOUND, TypeKind.ENUM):
        return f"{kind.name} {type_.tag}" if type_.tag else f"({definition(type_)})"
    if kind == TypeKind.FUNCTION:
        parameters = ", ".join(use(parameter.type) for parameter in type_.parameters)
        return f"function of {parameters}, {type_.is_variadic}, to {use(type_.type)}"
    if kind == TypeKind.INT:
        return f"{type_.name} of {type_.size} {type_.is_signed}"
    return "void" if kind == TypeKind.VOID else str(type_.name)


def layout(type_: Type) -> str:
    """What matters of the type of a variable: typedefs and qualifiers do not."""
    type_ = type_.unaliased()
    if type_.kind == TypeKind.POINTER:
        return f"pointer to {layout(type_.type)}"
    if type_.kind == TypeKind.ARRAY:
        return f"{type_.length} times {layout(type_.type)}"
    if type_.kind in (*COMPOUND, TypeKind.ENUM):
        size = type_.size if type_.kind in COMPOUND else None
        return f"{type_.kind.name} {type_.tag} of {size}"
    return f"{type_.name} of {type_.size}" if type_.kind != TypeKind.VOID else "void"
