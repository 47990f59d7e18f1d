# SPDX-License-Identifier: LGPL-2.1-or-later
"""The memcgs that pay for charges, and their paths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches

from memcg_inspect.collect.owners import read_owners
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.memcontrol import read_memcgs, recover_objcgs
from memcg_inspect.linux.mm.mmzone import online_nodes
from memcg_inspect.model import Coverage, Memcg, Objcg
from memcg_inspect.tables import (
    Choice,
    NotRead,
    UsageError,
    Value,
    as_path,
    matches,
    with_subtrees,
)

__all__ = ("Payers", "checked_choice")


_MOST_EXAMPLES = 12
_NO_NAME = "''"


def checked_choice(image: Image, choice: Choice, gone: Collection[object] = ()) -> Choice:
    """
    Check that the memcgs and the nodes that the user asks for exist.

    Otherwise a misspelled name would look like a memcg without memory.

    :param gone: paths of other memcgs that rows may be of
    :return: the choice, with the memcgs below those that the user asks for, if they are wanted
    :raises UsageError: if one does not exist
    """
    for nid in choice.nodes:
        if nid not in (nodes := online_nodes(image)):
            some = ", ".join(map(str, nodes))
            raise UsageError(f"there is no node {nid}; there are: {some}")
    if not choice.memcgs:
        return choice
    memcgs, is_whole = _known(image)
    for wanted in choice.memcgs:
        is_gone = any(matches(wanted, path, None) for path in gone)
        if is_whole and not is_gone and not _matching(wanted, memcgs):
            raise _no_memcg(wanted, memcgs)
    return with_subtrees(choice, memcgs)


def _known(image: Image) -> tuple[Collection[Memcg], bool]:
    """Return all memcgs, and whether they could all be read, with their names."""
    if image.keeps_walks:
        owners = read_owners(image)
        coverage = owners.coverage
        is_whole = not coverage["memcgs"].unreadable and not coverage["names"].unreadable
        return owners.memcgs.values(), is_whole
    found = Coverage()
    memcgs = read_memcgs(image, found, found).values()
    return memcgs, not found.unreadable


def _matching(wanted: str, memcgs: Iterable[Memcg]) -> list[Memcg]:
    return [memcg for memcg in memcgs if matches(wanted, memcg.path, memcg.address)]


def _no_memcg(wanted: str, memcgs: Collection[Memcg]) -> UsageError:
    paths = sorted({memcg.path for memcg in memcgs})
    near = get_close_matches(wanted, paths, n=_MOST_EXAMPLES)
    some = ", ".join([*near, *(path for path in paths if path not in near)][:_MOST_EXAMPLES])
    return UsageError(f"there is no memcg {wanted or _NO_NAME}; there are, for example: {some}")


class Payers:
    """
    All memcgs of an image and their obj_cgroups.

    :ivar memcgs: by ``struct mem_cgroup *``, parents before their children
    :ivar coverage: what could be read, by subject; a view adds subjects of its own
    """

    def __init__(self, image: Image) -> None:
        self.image = image
        self.coverage: defaultdict[str, Coverage] = defaultdict(Coverage)
        owners = read_owners(image)
        for subject, found in owners.coverage.items():
            self.coverage[subject].add(found)
        self.memcgs: Mapping[int, Memcg] = owners.memcgs
        self._objcgs = dict(owners.objcgs)

    def objcg(self, address: int) -> Objcg | None:
        """
        Return an obj_cgroup.

        :param address: ``struct obj_cgroup *``
        :return: ``None`` if there is none at this address
        """
        if address not in self._objcgs:
            self._objcgs |= recover_objcgs(
                self.image, self.memcgs, True, [address], self.coverage["objcgs"]
            )
        return self._objcgs.get(address)

    def objcgs(self) -> Mapping[int, Objcg]:
        """Return the obj_cgroups read so far, by address."""
        return self._objcgs

    def payer(self, address: int) -> int | None:
        """
        Return the memcg that pays for a charge now, ``struct mem_cgroup *``.

        :param address: ``struct obj_cgroup *`` or ``struct mem_cgroup *``
        :return: ``None`` if there is neither at this address
        """
        memcg = self.memcgs.get(address)
        if memcg is None:
            objcg = self.objcg(address)
            memcg = None if objcg is None else self.memcgs.get(objcg.memcg)
        return None if memcg is None else memcg.payer

    def path(self, memcg: int | None) -> Value:
        """
        Return the path of a memcg.

        :param memcg: ``struct mem_cgroup *``; ``None`` for no memcg
        """
        if memcg is None:
            return None
        known = self.memcgs.get(memcg)
        return known.path if known is not None else NotRead(f"there is no memcg at {memcg:#x}")

    def find(self, wanted: str) -> list[Memcg]:
        """
        Return the memcgs with a path, or the one at an address.

        Removed memcgs may have the path of another memcg.

        :param wanted: a path, a shell pattern that one path matches, or an address
        :raises UsageError: if there is none
        """
        wanted = as_path(wanted)
        matching = _matching(wanted, self.memcgs.values())
        found = [memcg for memcg in matching if memcg.path == wanted] or matching
        if not found:
            raise _no_memcg(wanted, self.memcgs.values())
        paths = sorted({memcg.path for memcg in found})
        if len(paths) > 1:
            some = ", ".join(paths[:_MOST_EXAMPLES])
            raise UsageError(f"{len(paths)} memcgs match {wanted}; choose one, for example: {some}")
        return found
