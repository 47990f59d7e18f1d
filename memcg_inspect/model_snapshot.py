# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Snapshots of charges
--------------------

What ``memcg-inspect snapshot`` keeps of an image: who pays for what, on which node, without the
addresses, which mean nothing on another boot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from memcg_inspect.model import ImageInfo

__all__ = (
    "SITES",
    "ChargeSnapshot",
    "ImageTime",
    "MemcgKey",
    "SavedCharge",
    "SavedCounter",
    "SavedMemcg",
    "SavedSite",
    "SavedSlab",
    "is_same_boot",
)


#: In :attr:`ChargeSnapshot.missing`: references to call sites.
SITES = "sites"
#: Without IDs of boots, in nanoseconds: two boots of a machine are further apart. Clocks may be set
#: meanwhile.
_SAME_BOOT = 60 * 10**9


class ImageTime(NamedTuple):
    """
    The clocks of a machine, in nanoseconds.

    :ivar realtime: ``CLOCK_REALTIME``, since 1970
    :ivar boottime: ``CLOCK_BOOTTIME``, since boot, suspend included
    """

    realtime: int
    boottime: int


class MemcgKey(NamedTuple):
    """
    A memcg on one boot. One that is made again at the same path or address is another one.

    :ivar path: its path
    :ivar cgroup_id: inode number of its cgroup; ``None`` if it could not be read
    """

    path: str
    cgroup_id: int | None


class SavedMemcg(NamedTuple):
    """
    One memcg.

    :ivar path: path in the cgroup hierarchy
    :ivar cgroup_id: inode number of its cgroup; ``None`` if it could not be read
    :ivar state: ``online`` or ``dying``
    """

    path: str
    cgroup_id: int | None
    state: str


class SavedCharge(NamedTuple):
    """
    Charges that are added up.

    :ivar memcg: index in :attr:`ChargeSnapshot.memcgs`; ``None``: no memcg pays, or it is not known
    :ivar node: backing node; ``None`` if there is none (sockets)
    :ivar charged_node: node of the ``obj_cgroup`` that pays, on kernels with one for each node
    :ivar kind: ``slab``, ``percpu``, ``kmem``, ``zswap``, ``lru`` or ``sock``
    :ivar what: part of the kind: use of kernel pages, protocol of sockets, ``reclaimable``
    :ivar bytes: bytes of all of them
    :ivar number: number of charges
    """

    memcg: int | None
    node: int | None
    charged_node: int | None
    kind: str
    what: str
    bytes: int
    number: int


class SavedSlab(NamedTuple):
    """
    Objects of one slab cache.

    :ivar memcg: as in :class:`SavedCharge`
    :ivar node: node of the slabs
    :ivar cache: name of the cache
    :ivar bytes: size of all of them; of those that a memcg pays for, with one pointer for each
    :ivar number: number of objects
    """

    memcg: int | None
    node: int | None
    cache: str
    bytes: int
    number: int


class SavedSite(NamedTuple):
    """
    Allocations of one call site.

    :ivar memcg: as in :class:`SavedCharge`
    :ivar node: backing node
    :ivar kind: as in :class:`memcg_inspect.checks.profile.Use`
    :ivar site: file, line and function
    :ivar bytes: bytes of all of them
    :ivar number: number of allocations
    """

    memcg: int | None
    node: int | None
    kind: str
    site: str
    bytes: int
    number: int


class SavedCounter(NamedTuple):
    """
    A counter of a memcg itself, as after a flush.

    :ivar memcg: index in :attr:`ChargeSnapshot.memcgs`
    :ivar node: ``None`` for counters that are not kept by node
    :ivar item: enumerator of ``enum node_stat_item`` or ``enum memcg_stat_item``
    :ivar value: in the unit of the item
    :ivar found: for the counter of kernel memory, what was found in memory, in the same unit;
        ``None`` if that is not known, and for the other counters
    """

    memcg: int
    node: int | None
    item: str
    value: int
    found: int | None = None


@dataclass(frozen=True)
class ChargeSnapshot:
    """
    The charges of an image.

    :ivar image: the image
    :ivar time: when it was; ``None`` if that is not known
    :ivar boot_id: ``/proc/sys/kernel/random/boot_id``, which is made when it is first read; empty
        if it was not made, or is not known
    :ivar memcgs: the memcgs that charges and counters are of
    :ivar charges: what memcgs pay for
    :ivar slabs: slab objects, also those that no memcg pays for
    :ivar sites: allocations by call site; ``None`` if the kernel does not profile allocations
    :ivar counters: counters that are not 0, and those of kernel memory
    :ivar is_moving: whether the machine ran while it was read
    :ivar missing: kinds of charges that may not all be there, with the reason
    :ivar unread: number of things that could not be read, by subject
    """

    image: ImageInfo
    time: ImageTime | None
    boot_id: str
    memcgs: tuple[SavedMemcg, ...]
    charges: tuple[SavedCharge, ...]
    slabs: tuple[SavedSlab, ...]
    sites: tuple[SavedSite, ...] | None
    counters: tuple[SavedCounter, ...]
    is_moving: bool = False
    missing: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether everything was read."""
        return not self.unread


def is_same_boot(one: ChargeSnapshot, other: ChargeSnapshot) -> bool:
    """Return whether two snapshots are of the same boot of a machine."""
    if one.boot_id and other.boot_id:
        return one.boot_id == other.boot_id
    if one.time is None or other.time is None or one.image.host != other.image.host:
        return False
    booted = [some.time.realtime - some.time.boottime for some in (one, other) if some.time]
    return abs(booted[0] - booted[1]) < _SAME_BOOT
