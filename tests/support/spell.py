# SPDX-License-Identifier: LGPL-2.1-or-later
"""Write types as text, so that types of two programs can be compared."""

from __future__ import annotations

from drgn import Type, TypeKind

COMPOUND = (TypeKind.STRUCT, TypeKind.UNION)


def definition(type_: Type) -> str:
    """Return the definition of a named type; other named types are given by name."""
    if type_.kind in COMPOUND:
        if type_.members is None:
            return f"{type_.kind.name} {type_.tag}, incomplete"
        members = [
            f"{member.name} at {member.bit_offset}:{member.bit_field_size} {use(member.type)}"
            for member in type_.members
        ]
        return f"{type_.kind.name} {type_.tag} of {type_.size}: {'; '.join(members)}"
    if type_.kind == TypeKind.ENUM:
        # BTF has the size and the sign of the enumeration's integer type, but not its name.
        kind = f"{type_.type.size} {type_.type.is_signed}" if type_.type else "incomplete"
        return f"enum {type_.tag} of {kind}: {[tuple(e) for e in type_.enumerators or ()]}"
    return f"typedef {type_.name}: {use(type_.type)}"


def use(type_: Type) -> str:
    """Return a type as it is used in a declaration: by name if it has one."""
    qualifiers = f"{type_.qualifiers} " if type_.qualifiers else ""
    return qualifiers + _use(type_)


def _use(type_: Type) -> str:
    kind = type_.kind
    if kind == TypeKind.POINTER:
        return f"pointer to {use(type_.type)}"
    if kind == TypeKind.ARRAY:
        # BTF has "[6]" for "[2][3]", and "[0]" for "[]".
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
    """Return the layout of the type of a variable, without typedefs and qualifiers."""
    type_ = type_.unaliased()
    if type_.kind == TypeKind.POINTER:
        return f"pointer to {layout(type_.type)}"
    if type_.kind == TypeKind.ARRAY:
        return f"{type_.length} times {layout(type_.type)}"
    if type_.kind in (*COMPOUND, TypeKind.ENUM):
        size = type_.size if type_.kind in COMPOUND else None
        return f"{type_.kind.name} {type_.tag} of {size}"
    return f"{type_.name} of {type_.size}" if type_.kind != TypeKind.VOID else "void"
