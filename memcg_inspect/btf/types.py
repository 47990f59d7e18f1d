# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Conversion of BTF to drgn types
-------------------------------

Converts a type in BTF to a :class:`drgn.Type` when it is first looked up. The types of members are
converted when the members are first used.

drgn does not check its types: a structure that contains itself leads to endless recursion.
So this module checks a type, and all types that it needs, for loops before it makes the type, and
rejects a member that lies outside of its structure.
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

from memcg_inspect.btf.parse import SIZE_LIMIT, Btf, BtfKind, Member

__all__ = ("TypeMaker",)

#: Nesting of types. Kernels stay far below.
DEPTH_LIMIT = 128

_QUALIFIERS = {
    BtfKind.CONST: Qualifiers.CONST,
    BtfKind.VOLATILE: Qualifiers.VOLATILE,
    BtfKind.RESTRICT: Qualifiers.RESTRICT,
    BtfKind.TYPE_TAG: Qualifiers.NONE,
}

#: Kinds of BTF for each kind of drgn.
_KINDS = {
    TypeKind.INT: (BtfKind.INT,),
    TypeKind.BOOL: (BtfKind.INT,),
    TypeKind.FLOAT: (BtfKind.FLOAT,),
    TypeKind.STRUCT: (BtfKind.STRUCT,),
    TypeKind.UNION: (BtfKind.UNION,),
    TypeKind.ENUM: (BtfKind.ENUM, BtfKind.ENUM64),
    TypeKind.TYPEDEF: (BtfKind.TYPEDEF,),
}

# BTF has the size and the sign of the integer type of an enumeration, but not its name.
_ENUM_TYPES = {
    1: ("unsigned char", "signed char"),
    2: ("unsigned short", "short"),
    4: ("unsigned int", "int"),
    8: ("unsigned long", "long"),
}
_LONG_ENUM_TYPE = ("unsigned long long", "long long")

# How a type is reached from another: as a member or element, through a pointer, or through a
# pointer and then a typedef.
_PART, _POINTED, _HIDDEN = range(3)


class TypeMaker:
    """
    Converts the types of one BTF for one program.

    :param base: converts the types of the base of split BTF
    """

    def __init__(self, prog: Program, btf: Btf, base: TypeMaker | None = None) -> None:
        self.btf = btf
        self.base = base
        self.prog = prog
        self._types: dict[int, Type] = {}
        self._sound: set[tuple[int, int]] = set()

    def find(self, kinds: TypeKindSet, name: str) -> Type | None:
        """Return the first type with a name and one of *kinds*, without those of the base."""
        wanted = [kind for of_drgn in kinds for kind in _KINDS.get(of_drgn, ())]
        for number in self.btf.find(name, *wanted):
            found = self.type(number)
            if found.kind in kinds:
                return found
        return None

    def type(self, number: int) -> Type:
        """
        Return a type by its id.

        :raises BtfError: if the type, or a type that it needs, is damaged
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
        if kind == BtfKind.VOID:
            return prog.void_type()
        if kind == BtfKind.INT:
            return self._int(number)
        if kind == BtfKind.PTR:
            return prog.pointer_type(self.type(btf.target(number)))
        if kind == BtfKind.ARRAY:
            return self._array(number)
        if kind in (BtfKind.STRUCT, BtfKind.UNION):
            make = prog.struct_type if kind == BtfKind.STRUCT else prog.union_type
            return make(btf.name_of(number) or None, btf.size(number), self._members(number))
        if kind in (BtfKind.ENUM, BtfKind.ENUM64):
            return self._enum(number)
        if kind == BtfKind.FWD:
            return self._forward(number)
        if kind == BtfKind.TYPEDEF:
            return prog.typedef_type(btf.name_of(number), self.type(btf.target(number)))
        if kind == BtfKind.FLOAT:
            return prog.float_type(btf.name_of(number), btf.size(number))
        if kind == BtfKind.FUNC_PROTO:
            return self._prototype(number)
        if kind in (BtfKind.FUNC, BtfKind.VAR):
            return self.type(btf.target(number))
        raise btf.error(f"is damaged: {kind.name} {number} is used as a type")

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
        # A last parameter without a type is an ellipsis.
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
        """Return the type of an element or a parameter."""
        type_ = self.type(number)
        if type_.unaliased().kind in (TypeKind.FUNCTION, TypeKind.VOID):
            raise self.btf.error(
                f"is damaged: type {number} cannot be the type of an element or a parameter"
            )
        return type_

    # Members

    def _members(self, number: int) -> list[TypeMember]:
        btf, me = self.btf, weakref.ref(self)
        size, members = btf.size(number), list(btf.members(number))
        # BTF does not tell "[]" from "[0]". Only the last member of a structure can be "[]".
        ends = {len(members) - 1} if btf.kind(number) == BtfKind.STRUCT else range(len(members))
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

        :param size: size of the structure, in bytes
        :param may_be_open: whether an array of length 0 is taken for a flexible array
        :raises BtfError: if the member does not lie within the structure
        """
        type_ = self.type(member.type)
        btf = self.btf.owner(member.type)
        if may_be_open and btf.kind(member.type) == BtfKind.ARRAY and not btf.array(member.type)[1]:
            return self.prog.array_type(type_.type)
        try:
            bits = member.bits or 8 * sizeof(type_)
            if member.bit_offset + bits > 8 * size:
                raise ValueError("is not within its structure")
            if member.bit_offset % 8 and not member.bits:
                raise ValueError("is not a bit field and does not start at a byte")
            return Object(self.prog, type_, bit_field_size=member.bits) if member.bits else type_
        except (TypeError, ValueError) as error:
            raise self.btf.error(f"is damaged: member {member.name!r}: {error}") from None

    # Loops

    def _check(self, number: int) -> None:
        """
        Check that a type does not need itself.

        A pointer to a named structure does not need the structure, and neither does a pointer to
        a typedef of an anonymous one: drgn prints the name and does not use what it refers to.
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
                    raise btf.error(f"is damaged: type {number} is nested too deeply")
                path[step] = None
                todo.append((step, self._inside(*step)))

    def _inside(self, number: int, how: int) -> Iterator[tuple[int, int]]:
        btf = self.btf.owner(number)
        kind = btf.kind(number)
        targets: list[int] = []
        if kind in _QUALIFIERS or kind in (BtfKind.FUNC, BtfKind.VAR):
            targets.append(btf.target(number))
        elif kind == BtfKind.FWD:
            targets += filter(None, [btf.complete(number)])
        elif kind == BtfKind.ARRAY:
            targets.append(btf.array(number)[0])
        elif kind == BtfKind.PTR:
            how = max(how, _POINTED)
            targets.append(btf.target(number))
        elif kind == BtfKind.TYPEDEF:
            how = _HIDDEN if how else _PART
            targets.append(btf.target(number))
        elif kind == BtfKind.FUNC_PROTO:
            how = max(how, _POINTED)
            targets += [btf.target(number), *(type_ for _, type_ in btf.parameters(number))]
        elif kind in (BtfKind.STRUCT, BtfKind.UNION) and (
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
