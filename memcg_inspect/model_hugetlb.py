# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Cgroups of hugetlb
------------------

What the hugetlb controller charges its cgroups for (``struct hugetlb_cgroup``). They are not
memcgs: the controller may have a hierarchy of its own, or be off where the memory controller is on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

__all__ = ("Compared", "Hugetlb", "HugetlbCgroup", "HugetlbCharges", "HugetlbSize")

#: Pages by cgroup (``struct hugetlb_cgroup *``), order of the huge page, and node.
HugetlbCharges = Mapping[tuple[int, int, int], int]


class HugetlbSize(NamedTuple):
    """
    A size of huge pages (``struct hstate``).

    :ivar name: as in names of files, e.g. ``2MB``
    :ivar order: of a huge page
    """

    name: str
    order: int

    @property
    def pages(self) -> int:
        """The pages of a huge page."""
        return 1 << self.order


class HugetlbCgroup(NamedTuple):
    """
    A cgroup of the hugetlb controller.

    :ivar address: ``struct hugetlb_cgroup *``
    :ivar path: of the cgroup. Several that were removed may have the same one
    :ivar parent: ``struct hugetlb_cgroup *``; ``None`` for the root
    :ivar is_online: whether it was not removed
    :ivar usage: page counters (``hugepage``), in pages, by size: as in :attr:`Hugetlb.sizes`.
        They include descendants
    :ivar on_nodes: ``usage`` in pages by size and node, without descendants
    """

    address: int
    path: str
    parent: int | None
    is_online: bool
    usage: tuple[int, ...]
    on_nodes: Mapping[tuple[int, int], int]


class Compared(NamedTuple):
    """
    Pages found, and what the kernel claims.

    :ivar found: pages of huge pages that refer to the cgroup
    :ivar claimed: ``None`` if the cgroup has no such counter
    """

    found: int
    claimed: int | None

    @property
    def is_zero(self) -> bool:
        """Whether both are known, and 0."""
        return self == (0, 0)

    @property
    def difference(self) -> int:
        """Claimed less found."""
        return 0 if self.claimed is None else self.claimed - self.found


@dataclass(frozen=True)
class Hugetlb:
    """
    The cgroups of the hugetlb controller, and the huge pages that they are charged for.

    :ivar sizes: sizes of huge pages
    :ivar cgroups: by ``struct hugetlb_cgroup *``, parents first
    :ivar charged: huge pages that refer to a cgroup
    :ivar nids: nodes with memory
    :ivar moves_usage: whether the kernel moves the usage of a node together with a huge page
    :ivar is_locked: whether a CPU holds ``hugetlb_lock``, under which pages and usages of nodes
        change; ``None`` if that cannot be told
    :ivar not_kept: why this kernel has no such cgroups; ``None`` if it has
    """

    sizes: tuple[HugetlbSize, ...] = ()
    cgroups: Mapping[int, HugetlbCgroup] = field(default_factory=dict)
    charged: HugetlbCharges = field(default_factory=dict)
    nids: tuple[int, ...] = ()
    moves_usage: bool = False
    is_locked: bool | None = None
    not_kept: str | None = None

    @cached_property
    def referred(self) -> Sequence[int]:
        """All cgroups, and what huge pages refer to that is no cgroup which is known."""
        return *self.cgroups, *sorted({c for c, _, _ in self.charged} - self.cgroups.keys())

    @cached_property
    def usage(self) -> Mapping[tuple[int, int], Compared]:
        """By cgroup and index of the size: pages, and the page counter without descendants."""
        pages, own = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        for (cgroup, n, _), number in self._by_size.items():
            pages[cgroup, n] += number
        for one in self.cgroups.values():
            for n, usage in enumerate(one.usage):
                own[one.address, n] += usage
                if one.parent is not None:
                    own[one.parent, n] -= usage
        return {
            (cgroup, n): Compared(pages[cgroup, n], own[cgroup, n])
            for cgroup in self.referred
            for n in range(len(self.sizes))
        }

    @cached_property
    def on_nodes(self) -> Mapping[tuple[int, int, int], Compared]:
        """By cgroup, index of the size, and node: pages, and the usage of the node."""
        found: dict[tuple[int, int, int], Compared] = {}
        used = {nid for one in self.cgroups.values() for (_, nid), n in one.on_nodes.items() if n}
        nids = sorted({*self.nids, *used, *(nid for _, _, nid in self.charged)})
        for cgroup in self.referred:
            one = self.cgroups.get(cgroup)
            for n in range(len(self.sizes)):
                for nid in nids:
                    usage = 0 if one is None else one.on_nodes.get((n, nid))
                    found[cgroup, n, nid] = Compared(self._by_size[cgroup, n, nid], usage)
        return found

    @cached_property
    def usage_off(self) -> Mapping[int, int]:
        """By index of the size, the most pages that page counters are too high, or too low."""
        return _most((n, compared) for (_, n), compared in self.usage.items())

    @cached_property
    def on_nodes_off(self) -> Mapping[int, int]:
        """By index of the size, the most pages that usages of nodes are too high, or too low."""
        return _most((n, compared) for (_, n, _), compared in self.on_nodes.items())

    @cached_property
    def _by_size(self) -> Counter[tuple[int, int, int]]:
        index = {size.order: n for n, size in enumerate(self.sizes)}
        found: Counter[tuple[int, int, int]] = Counter()
        for (cgroup, order, nid), pages in self.charged.items():
            found[cgroup, index[order], nid] += pages
        return found


def _most(compared: Iterable[tuple[int, Compared]]) -> Mapping[int, int]:
    """Return the larger one of the sums of differences above and below 0, by size."""
    above, below = Counter[int](), Counter[int]()
    for n, one in compared:
        above[n] += max(one.difference, 0)
        below[n] += max(-one.difference, 0)
    return above | below
