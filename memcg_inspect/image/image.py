# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Images
------

There is one :class:`Image` for each :class:`drgn.Program`, and every reader takes it as an
argument. It provides the program, bulk reads of memory, types and symbols, the progress of a walk,
and cached results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from drgn import Object, ObjectNotFoundError, Program, ProgramFlags, Symbol, Type

from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.memory import Memory
from memcg_inspect.image.opened import prepare
from memcg_inspect.image.pool import Pool
from memcg_inspect.image.progress import Progress

__all__ = ("Image", "image_of", "per_image")

T = TypeVar("T")

_KEY = ("memcg_inspect", "image")


class Image:
    """
    A vmcore, a QEMU guest, or the running kernel.

    :ivar prog: its ``drgn.Program``
    :ivar memory: bulk reads of its memory
    :ivar progress: progress and cancellation of the current walk
    :ivar stopped: whether the guest is paused while it is read
    :ivar jobs: number of processes that walk over all pages; ``None`` for as many as are fastest
    :ivar pool: processes elsewhere that walk over all pages, in place of this one
    :ivar keeps_walks: whether the result of a walk is kept for the next command, as long as memory
        cannot change
    """

    def __init__(self, prog: Program) -> None:
        self.prog = prog
        self.memory = Memory(prog)
        self.progress = Progress()
        self.stopped = False
        self.jobs: int | None = 1
        self.pool: Pool | None = None
        self.keeps_walks = False
        self._found: dict[Callable[..., Any], Any] = {}
        self._types_by_name: dict[str, Type] = {}

    @property
    def is_moving(self) -> bool:
        """Return whether memory may change while it is read."""
        return bool(self.prog.flags & ProgramFlags.IS_LIVE) and not self.stopped

    def type(self, name: str) -> Type:
        """
        Return the type with a name, e.g. ``struct slab``.

        :raises UnknownKernelError: if there is none
        """
        found = self._types_by_name.get(name)
        if found is None:
            try:
                found = self._types_by_name[name] = self.prog.type(name)
            except LookupError as error:
                raise UnknownKernelError(error) from error
        return found

    def pointer(self, type_name: str, address: int) -> Object:
        """
        Return a pointer.

        :param type_name: e.g. ``struct mem_cgroup *``
        :raises UnknownKernelError: if there is no such type
        """
        return Object(self.prog, self.type(type_name), value=address)

    def object(self, name: str, filename: str | None = None) -> Object:
        """
        Return the variable, enumerator, macro or function with a name.

        :param filename: source file that defines it; by default, any
        :raises UnknownKernelError: if there is none
        """
        try:
            return self.prog.object(name, filename=filename)
        except ObjectNotFoundError as error:
            raise UnknownKernelError(error) from error

    def symbol(self, place: str | int) -> Symbol:
        """
        Return the symbol with a name, or the symbol that contains an address.

        :raises UnknownKernelError: if there is none
        """
        try:
            return self.prog.symbol(place)
        except LookupError as error:
            raise UnknownKernelError(error) from error

    def once(self, find: Callable[[Image], T]) -> T:
        """Return the result of *find* for this image. *find* is called the first time only."""
        try:
            return self._found[find]  # type: ignore[no-any-return]
        except KeyError:
            value = self._found[find] = find(self)
            return value

    def keep(self, walk: Callable[[Image], T]) -> T:
        """
        Return the result of a walk, which the next command reuses.

        The walk is repeated if memory may have changed since, if the first one was interrupted, and
        outside of sessions (:attr:`keeps_walks`). Nobody may change the result.
        """
        if not self.keeps_walks or self.is_moving:
            return walk(self)
        if walk in self._found:
            return self._found[walk]  # type: ignore[no-any-return]
        found = walk(self)
        if not self.progress.stop:
            self._found[walk] = found
        return found

    def keep_as(self, walk: Callable[[Image], T], found: T) -> None:
        """Keep for :meth:`keep` what another walk has found, on the same conditions."""
        if self.keeps_walks and not self.is_moving and not self.progress.stop:
            self._found.setdefault(walk, found)

    def kept(self, walk: Callable[[Image], T]) -> T | None:
        """Return what :meth:`keep` has kept of a walk; ``None`` if it has kept nothing."""
        return None if self.is_moving else self._found.get(walk)


def per_image(find: Callable[[Image], T]) -> Callable[[Image], T]:
    """Make a function run once for each image. The image keeps the result."""

    @functools.wraps(find)
    def once(image: Image) -> T:
        return image.once(find)

    return once


def image_of(prog: Program) -> Image:
    """
    Return the one :class:`Image` of a program. ``prog.cache`` keeps it.

    :raises ImageError: if drgn opened a dump that it cannot read right; see
        :func:`~memcg_inspect.image.opened.prepare`
    """
    try:
        return prog.cache[_KEY]  # type: ignore[no-any-return]
    except KeyError:
        prepare(prog)
        image = prog.cache[_KEY] = Image(prog)
        return image
