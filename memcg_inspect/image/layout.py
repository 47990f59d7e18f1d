# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Layouts of types
----------------

Helpers for readers: offsets, bit fields and enumerators from the types of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from drgn import Type, TypeKind, TypeMember, sizeof

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.lookup import UnknownKernelError

__all__ = (
    "BitField",
    "WordField",
    "array_length",
    "bit_field",
    "constant",
    "has_member",
    "has_type",
    "member_type",
    "static_key_enabled",
    "word_field",
)


def has_type(image: Image, name: str) -> bool:
    """Return whether the image has a type with a name, e.g. ``struct slab``."""
    try:
        image.type(name)
    except UnknownKernelError:
        return False
    return True


def has_member(image: Image, type_name: str, member: str) -> bool:
    """Return whether a structure exists and has a member, also in anonymous members."""
    return has_type(image, type_name) and image.type(type_name).has_member(member)


def constant(image: Image, *names: str) -> int | None:
    """Return the value of the first enumerator or macro of *names* that exists."""
    known = _constants(image)
    for name in names:
        if name not in known:
            known[name] = _constant(image, name)
        if known[name] is not None:
            return known[name]
    return None


@per_image
def _constants(image: Image) -> dict[str, int | None]:
    return {}


def _constant(image: Image, name: str) -> int | None:
    try:
        return int(image.object(name).value_())
    except UnknownKernelError:
        return None


def static_key_enabled(image: Image, name: str) -> bool | None:
    """
    Return whether a static key is enabled.

    :param name: name of a ``struct static_key_true`` or ``struct static_key_false``
    :return: ``None`` if there is no such key
    """
    try:
        key = image.object(name)
    except UnknownKernelError:
        return None
    return int(key.key.enabled.counter) > 0


def array_length(type_: Type) -> int:
    """Return the number of elements of an array type; 0 for a flexible array."""
    type_ = type_.unaliased()
    if type_.kind != TypeKind.ARRAY:
        raise ValueError(f"not an array: {type_}")
    return type_.length or 0


def member_type(type_: Type, name: str) -> Type:
    """
    Return the type of a member of a structure, also in anonymous members.

    :raises UnknownKernelError: if there is no such member
    """
    found = _find(type_.unaliased(), name, 0)
    if found is None:
        raise UnknownKernelError(f"'{type_.type_name()}' has no member '{name}'")
    return found[1].type


class BitField(NamedTuple):
    """
    Place of a bit field or an integer in a structure.

    :ivar offset: offset of the first byte
    :ivar size: number of bytes
    :ivar shift: lowest bit of the field in the integer made of these bytes
    :ivar mask: mask of the field, after the shift
    :ivar order: byte order of the image, ``little`` or ``big``
    """

    offset: int
    size: int
    shift: int
    mask: int
    order: str

    def get(self, data: bytes, base: int = 0) -> int:
        """Return the value in *data*, in which the structure begins at *base*."""
        start = base + self.offset
        word = int.from_bytes(data[start : start + self.size], self.order)  # type: ignore[arg-type]
        return word >> self.shift & self.mask


class WordField(NamedTuple):
    """
    Place of a bit field or an integer in a structure that is read as an array of words.

    :ivar word: index of the word
    :ivar shift: lowest bit of the field in the word
    :ivar mask: mask of the field, after the shift
    """

    word: int
    shift: int
    mask: int

    def get(self, words: Sequence[int]) -> int:
        """Return the value in the words of the structure."""
        return words[self.word] >> self.shift & self.mask


def word_field(image: Image, type_name: str, member: str) -> WordField:
    """
    Return the place of a member in a structure that is read as an array of words.

    :param member: name of a bit field, an integer or a pointer, also in anonymous members
    :raises UnknownKernelError: if there is no such member
    """
    size = image.memory.word_size
    field = bit_field(image, type_name, member)
    word, byte = divmod(field.offset, size)
    below = byte if field.order == "little" else size - byte - field.size
    return WordField(word, field.shift + 8 * below, field.mask)


def bit_field(image: Image, type_name: str, member: str) -> BitField:
    """
    Return the place of a member of a structure.

    :param member: name of a bit field, an integer or a pointer, also in anonymous members
    :raises UnknownKernelError: if there is no such member
    """
    found = _find(image.type(type_name).unaliased(), member, 0)
    if found is None:
        raise UnknownKernelError(f"'{type_name}' has no member '{member}'")
    bit, found_member = found
    width = found_member.bit_field_size or 8 * sizeof(found_member.type)
    little = image.memory.order == "little"
    first, last = bit // 8, (bit + width - 1) // 8
    size = last - first + 1
    shift = bit % 8 if little else 8 * size - bit % 8 - width
    return BitField(first, size, shift, (1 << width) - 1, "little" if little else "big")


def _find(type_: Type, name: str, base: int) -> tuple[int, TypeMember] | None:
    for member in type_.members or ():
        if member.name == name:
            return base + member.bit_offset, member
        inner = member.type.unaliased()
        if member.name is None and inner.kind in (TypeKind.STRUCT, TypeKind.UNION):
            found = _find(inner, name, base + member.bit_offset)
            if found is not None:
                return found
    return None
