# SPDX-License-Identifier: LGPL-2.1-or-later
"""
From BTF to drgn's types
------------------------

Makes a :class:`drgn.Type` of a type in BTF when it is first asked for. The members of a
structure get theirs when they are first looked at, so that a type costs what is used of it.

drgn trusts its types: a structure that contains itself would send it into a recursion
without end. So whatever a type drags in is checked for loops before it is made, and a member
that reaches past its structure is refused.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator

from drgn import (
    Object,
    Program,
    Qualifiers,
    Type,
    TypeEnumerator,
    TypeKind,
    TypeKindSet,
    TypeMember,
    TypeParameter,
    sizeof,
)

from memcg_inspect.btf.parse import SIZE_LIMIT, Btf, Kind, Member

__all__ = ("TypeMaker",)

#: Types inside types inside types: no kernel comes near.
DEPTH_LIMIT = 128

_QUALIFIERS = {
    Kind.CONST: Qualifiers.CONST,
    Kind.VOLATILE: Qualifiers.VOLATILE,
    Kind.RESTRICT: Qualifiers.RESTRICT,
    Kind.TYPE_TAG: Qualifiers.NONE,
}

#: Kinds of BTF that answer to a kind of drgn's.
_KINDS = {
    TypeKind.INT: (Kind.INT,),
    TypeKind.BOOL: (Kind.INT,),
    TypeKind.FLOAT: (Kind.FLOAT,),
    TypeKind.STRUCT: (Kind.STRUCT,),
    TypeKind.UNION: (Kind.UNION,),
    TypeKind.ENUM: (Kind.ENUM, Kind.ENUM64),
    TypeKind.TYPEDEF: (Kind.TYPEDEF,),
}

# BTF does not keep the integer type of an enumeration, only its size and sign.
_ENUM_TYPES = {
    1: ("unsigned char", "signed char"),
    2: ("unsigned short", "short"),
    4: ("unsigned int", "int"),
    8: ("unsigned long", "long"),
}
_LONG_ENUM_TYPE = ("unsigned long long", "long long")

# How a type is reached: as a part of another, through a pointer, or through a pointer and a
# name that hides what is behind it.
_PART, _POINTED, _HIDDEN = range(3)


class TypeMaker:
    """
    Makes the types of one BTF for one program.

    :param base: makes the types of the BTF that this one continues
    """

    def __init__(self, prog: Program, btf: Btf, base: TypeMaker | None = None) -> None:
        self.btf = btf
        self.base = base
        self.prog = prog
        self._types: dict[int, Type] = {}
        self._sound: set[tuple[int, int]] = set()

    def find(self, kinds: TypeKindSet, name: str) -> Type | None:
        """Return the first type of its own of a name, whichever of *kinds* it is."""
        wanted = [kind for of_drgn in kinds for kind in _KINDS.get(of_drgn, ())]
        for number in self.btf.find(name, *wanted):
            found = self.type(number)
            if found.kind in kinds:
                return found
        return None

    def type(self, number: int) -> Type:
        """
        Return a type by its id.

        :raises BtfError: if it, or anything it drags in, is damaged
        """
        if self.base is not None and number < self.btf.first:
            return self.base.type(number)
        found = self._types.get(number)
        if found is None:
            self._check(number)
            try:
                found = self._make(number)
            except (TypeError, ValueError, OverflowError) as error:
                raise self.btf.error(f"is damaged: type {number}: {error}") from None
            self._types[number] = found
        return found

    def _make(self, number: int) -> Type:
        btf, prog = self.btf, self.prog
        kind = btf.kind(number)
        if kind in _QUALIFIERS:
            inner = self.type(btf.target(number))
            return inner.qualified(inner.qualifiers | _QUALIFIERS[kind])
        if kind == Kind.VOID:
            return prog.void_type()
        if kind == Kind.INT:
            return self._int(number)
        if kind == Kind.PTR:
            return prog.pointer_type(self.type(btf.target(number)))
        if kind == Kind.ARRAY:
            return self._array(number)
        if kind in (Kind.STRUCT, Kind.UNION):
            make = prog.struct_type if kind == Kind.STRUCT else prog.union_type
            return make(btf.name_of(number) or None, btf.size(number), self._members(number))
        if kind in (Kind.ENUM, Kind.ENUM64):
            return self._enum(number)
        if kind == Kind.FWD:
            return self._forward(number)
        if kind == Kind.TYPEDEF:
            return prog.typedef_type(btf.name_of(number), self.type(btf.target(number)))
        if kind == Kind.FLOAT:
            return prog.float_type(btf.name_of(number), btf.size(number))
        if kind == Kind.FUNC_PROTO:
            return self._prototype(number)
        if kind in (Kind.FUNC, Kind.VAR):
            return self.type(btf.target(number))
        raise btf.error(f"is damaged: type {number} is a {kind.name}, not a type")

    def _int(self, number: int) -> Type:
        name, size = self.btf.name_of(number), self.btf.size(number)
        encoding = self.btf.encoding(number)
        if not 0 < size <= 16:
            raise self.btf.error(f"is damaged: type {number} is an integer of {size} bytes")
        if encoding.is_bool:
            return self.prog.bool_type(name, size)
        return self.prog.int_type(name, size, encoding.is_signed)

    def _array(self, number: int) -> Type:
        element, length = self.btf.array(number)
        type_ = self.part(element)
        if length and length * sizeof(type_) > SIZE_LIMIT:
            raise self.btf.error(f"is damaged: type {number} is an array of {length} {type_}")
        return self.prog.array_type(type_, length)

    def _enum(self, number: int) -> Type:
        size = self.btf.size(number)
        if size not in _ENUM_TYPES:
            raise self.btf.error(f"is damaged: type {number} is an enum of {size} bytes")
        is_signed = self.btf.flag(number)
        values = tuple(TypeEnumerator(*pair) for pair in self.btf.enumerators(number))
        names = _ENUM_TYPES[size]
        if size == 8 and sizeof(self.prog.type("long")) != 8:
            names = _LONG_ENUM_TYPE
        type_ = self.prog.int_type(names[is_signed], size, is_signed)
        return self.prog.enum_type(self.btf.name_of(number) or None, type_, values)

    def _forward(self, number: int) -> Type:
        definition = self.btf.complete(number)
        if definition is not None:
            return self.type(definition)
        make = self.prog.union_type if self.btf.flag(number) else self.prog.struct_type
        return make(self.btf.name_of(number))

    def _prototype(self, number: int) -> Type:
        parameters = self.btf.parameters(number)
        # What ends a list of parameters and has no type is an ellipsis.
        is_variadic = bool(parameters) and parameters[-1][1] == 0
        if is_variadic:
            parameters.pop()
        made = [
            TypeParameter(functools.partial(_parameter, weakref.ref(self), type_), name or None)
            for name, type_ in parameters
        ]
        returns = self.type(self.btf.target(number))
        if returns.unaliased().kind in (TypeKind.FUNCTION, TypeKind.ARRAY):
            raise ValueError(f"a function cannot return {returns}")
        return self.prog.function_type(returns, made, is_variadic)

    def part(self, number: int) -> Type:
        """Return a type that is an element or a parameter."""
        type_ = self.type(number)
        if type_.unaliased().kind in (TypeKind.FUNCTION, TypeKind.VOID):
            raise self.btf.error(f"is damaged: type {number} cannot be a part of another")
        return type_

    # Members

    def _members(self, number: int) -> list[TypeMember]:
        btf, me = self.btf, weakref.ref(self)
        size, members = btf.size(number), list(btf.members(number))
        # BTF writes "[]" and "[0]" alike; the former may only end a structure.
        ends = {len(members) - 1} if btf.kind(number) == Kind.STRUCT else range(len(members))
        return [
            TypeMember(
                functools.partial(_member, me, member, size, index in ends),
                member.name or None,
                member.bit_offset,
            )
            for index, member in enumerate(members)
        ]

    def member(self, member: Member, size: int, may_be_open: bool) -> Object | Type:
        """
        Return the type of a member of a structure, or an absent object if it is a bit field.

        :param size: of the structure, in bytes
        :param may_be_open: whether an array without elements is one without a bound
        :raises BtfError: if the member reaches past the structure
        """
        type_ = self.type(member.type)
        btf = self.btf.owner(member.type)
        if may_be_open and btf.kind(member.type) == Kind.ARRAY and not btf.array(member.type)[1]:
            return self.prog.array_type(type_.type)
        try:
            bits = member.bits or 8 * sizeof(type_)
            if member.bit_offset + bits > 8 * size:
                raise ValueError("reaches past its structure")
            if member.bit_offset % 8 and not member.bits:
                raise ValueError("does not start at a byte")
            return Object(self.prog, type_, bit_field_size=member.bits) if member.bits else type_
        except (TypeError, ValueError) as error:
            raise self.btf.error(f"is damaged: member {member.name!r}: {error}") from None

    # Loops

    def _check(self, number: int) -> None:
        """
        Check that nothing a type drags in leads back to it.

        A named structure behind a pointer drags nothing in, nor does a nameless one behind a
        pointer and a typedef: drgn prints such a name and does not look behind it.
        """
        btf = self.btf
        start = (number, _PART)
        if start in self._sound:
            return
        path, todo = {start: None}, [(start, self._inside(*start))]
        while todo:
            place, inside = todo[-1]
            step = next(inside, None)
            if step is None:
                todo.pop()
                del path[place]
                self._sound.add(place)
            elif step in path:
                raise btf.error(f"is damaged: type {step[0]} contains itself")
            elif step not in self._sound:
                if len(todo) > DEPTH_LIMIT:
                    raise btf.error(f"is damaged: type {number} has no end")
                path[step] = None
                todo.append((step, self._inside(*step)))

    def _inside(self, number: int, how: int) -> Iterator[tuple[int, int]]:
        btf = self.btf.owner(number)
        kind = btf.kind(number)
        targets: list[int] = []
        if kind in _QUALIFIERS or kind in (Kind.FUNC, Kind.VAR):
            targets.append(btf.target(number))
        elif kind == Kind.FWD:
            targets += filter(None, [btf.complete(number)])
        elif kind == Kind.ARRAY:
            targets.append(btf.array(number)[0])
        elif kind == Kind.PTR:
            how = max(how, _POINTED)
            targets.append(btf.target(number))
        elif kind == Kind.TYPEDEF:
            how = _HIDDEN if how else _PART
            targets.append(btf.target(number))
        elif kind == Kind.FUNC_PROTO:
            how = max(how, _POINTED)
            targets += [btf.target(number), *(type_ for _, type_ in btf.parameters(number))]
        elif kind in (Kind.STRUCT, Kind.UNION) and (
            how == _PART or (how == _POINTED and not btf.is_named(number))
        ):
            how = _PART
            targets += btf.member_types(number)
        return iter([(target, how) for target in targets])


def _parameter(maker: weakref.ref[TypeMaker], number: int) -> Type:
    return _alive(maker).part(number)


def _member(
    maker: weakref.ref[TypeMaker], member: Member, size: int, may_be_open: bool
) -> Object | Type:
    return _alive(maker).member(member, size, may_be_open)


def _alive(maker: weakref.ref[TypeMaker]) -> TypeMaker:
    found = maker()
    if found is None:
        raise ReferenceError("the program of this type is gone")
    return found
