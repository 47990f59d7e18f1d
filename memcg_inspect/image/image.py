# SPDX-License-Identifier: LGPL-2.1-or-later
"""
An image and what is known of it
--------------------------------

An :class:`Image` is made once for each :class:`drgn.Program` and handed to every reader. It
holds the program, its memory for bulk reads, the progress of the walk, and the layouts that
readers found in the types.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from drgn import Object, ObjectNotFoundError, Program, ProgramFlags, Symbol, Type

from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.memory import Memory
from memcg_inspect.image.progress import Progress

__all__ = ("Image", "image_of", "per_image")

T = TypeVar("T")

_KEY = ("memcg_inspect", "image")


class Image:
    """
    A vmcore, a guest, or the running kernel.

    :ivar prog: program that reads it
    :ivar memory: its memory
    :ivar progress: how far the current walk is, and whether it should end
    :ivar stopped: whether the machine was stopped by whoever reads it
    """

    def __init__(self, prog: Program) -> None:
        self.prog = prog
        self.memory = Memory(prog)
        self.progress = Progress()
        self.stopped = False
        self._found: dict[Callable[..., Any], Any] = {}

    @property
    def is_moving(self) -> bool:
        """Whether memory may change while it is read."""
        return bool(self.prog.flags & ProgramFlags.IS_LIVE) and not self.stopped

    def type(self, name: str) -> Type:
        """
        Return the type of a name, e.g. ``struct slab``.

        :raises UnknownKernelError: if there is none
        """
        try:
            return self.prog.type(name)
        except LookupError as error:
            raise UnknownKernelError(error) from error

    def object(self, name: str) -> Object:
        """
        Return the variable, enumerator, macro or function of a name.

        :raises UnknownKernelError: if there is none
        """
        try:
            return self.prog[name]
        except ObjectNotFoundError as error:
            raise UnknownKernelError(error) from error

    def symbol(self, place: str | int) -> Symbol:
        """
        Return the symbol of a name, or the one that an address is in.

        :raises UnknownKernelError: if there is none
        """
        try:
            return self.prog.symbol(place)
        except LookupError as error:
            raise UnknownKernelError(error) from error

    def once(self, find: Callable[[Image], T]) -> T:
        """Return what *find* returns for this image. It is called the first time only."""
        try:
            return self._found[find]  # type: ignore[no-any-return]
        except KeyError:
            value = self._found[find] = find(self)
            return value


def per_image(find: Callable[[Image], T]) -> Callable[[Image], T]:
    """Make a function run once for each image. The image keeps the result."""

    @functools.wraps(find)
    def once(image: Image) -> T:
        return image.once(find)

    return once


def image_of(prog: Program) -> Image:
    """Return the one :class:`Image` of a program. ``prog.cache`` keeps it."""
    try:
        return prog.cache[_KEY]  # type: ignore[no-any-return]
    except KeyError:
        image = prog.cache[_KEY] = Image(prog)
        return image
