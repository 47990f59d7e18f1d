# SPDX-License-Identifier: LGPL-2.1-or-later
"""Objects that are being freed."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ("Transient",)


class Transient(NamedTuple):
    """
    An object that is being freed, and that may still hold references to an obj_cgroup.

    :ivar what: kind of the object, in words
    :ivar address: address of the object
    :ivar references: the most references to one obj_cgroup that it may still hold
    :ivar freed_by: what will free it, in words; ``None`` if nothing was found that will
    :ivar unsure: whether something may free it that cannot be found
    :ivar parent: of a memcg, ``struct mem_cgroup *`` of its parent; ``None`` if it was not read
    :ivar swap_id: of a memcg, its ID, which swap entries record (``memcg->id.id``); 0 for none
    :ivar sock_pages: of a memcg, the pages of its sockets that it has handed up (``MEMCG_SOCK``)
    """

    what: str
    address: int
    references: int = 1
    freed_by: str | None = None
    unsure: bool = False
    parent: int | None = None
    swap_id: int = 0
    sock_pages: int = 0
