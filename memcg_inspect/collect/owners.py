# SPDX-License-Identifier: LGPL-2.1-or-later
"""The memcgs of an image and their obj_cgroups, which every command begins with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.memcontrol import read_memcgs, read_objcgs
from memcg_inspect.model import Coverage, Memcg, Objcg

__all__ = ("Owners", "read_owners")


class Owners(NamedTuple):
    """
    All that charges may belong to.

    :ivar memcgs: by ``struct mem_cgroup *``, parents before their children
    :ivar objcgs: by ``struct obj_cgroup *``
    :ivar unreadable: memcgs with unreadable obj_cgroups
    :ivar coverage: what could be read, by subject: ``memcgs``, ``names`` and ``objcgs``
    """

    memcgs: Mapping[int, Memcg]
    objcgs: Mapping[int, Objcg]
    unreadable: frozenset[int]
    coverage: Mapping[str, Coverage]

    def payer(self, objcg: int) -> int | None:
        """Return the memcg that pays, ``struct mem_cgroup *``; ``None`` if it is not known."""
        found = self.objcgs.get(objcg)
        memcg = None if found is None else self.memcgs.get(found.memcg)
        return None if memcg is None else memcg.payer


def read_owners(image: Image) -> Owners:
    """Read the memcgs and their obj_cgroups; in a session, once."""
    return image.keep(_read)


def _read(image: Image) -> Owners:
    coverage: defaultdict[str, Coverage] = defaultdict(Coverage)
    memcgs = read_memcgs(image, coverage["memcgs"], coverage["names"])
    unreadable: set[int] = set()
    objcgs = read_objcgs(image, memcgs, coverage["objcgs"], unreadable)
    return Owners(memcgs, objcgs, frozenset(unreadable), coverage)
