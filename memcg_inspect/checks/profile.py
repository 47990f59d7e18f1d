# SPDX-License-Identifier: LGPL-2.1-or-later
"""Allocations by call site, kind, payer and backing node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from memcg_inspect.checks.ledger import Amount
from memcg_inspect.model import CallSite

__all__ = ("Profile", "Use")


class Use(NamedTuple):
    """
    The key that allocations are added up by.

    :ivar codetag: their call site, ``struct codetag *``
    :ivar kind: ``slab`` (objects) or ``percpu``; for pages ``kmem``, ``lru``, ``slab_page`` (pages
        of slabs) or ``page`` (all others)
    :ivar payer: ``struct obj_cgroup *``, or ``struct mem_cgroup *`` where the memcg itself is
        charged; 0 for none
    :ivar nid: backing node
    """

    codetag: int
    kind: str
    payer: int
    nid: int


@dataclass
class Profile:
    """
    The call sites of an image, and what was allocated there.

    :ivar why_not: why the kernel does not profile allocations; ``None`` if it does
    :ivar sites: by ``struct codetag *``, in the kernel's order; those of unloaded modules last
    :ivar one_cpu: by call site, bytes that one CPU has of its percpu memory, which is what some
        kernels count
    :ivar uncharged: objects that no memcg pays for, of caches that always account, by ``struct
        kmem_cache *`` and call site
    :ivar missing: why references may be missing; ``None`` if none is
    """

    why_not: str | None = None
    sites: dict[int, CallSite] = field(default_factory=dict)
    one_cpu: Counter[int] = field(default_factory=Counter)
    uncharged: Counter[tuple[int, int]] = field(default_factory=Counter)
    missing: str | None = None
    _uses: dict[Use, Amount] = field(default_factory=dict)

    def add(self, use: Use, size: int, calls: int) -> None:
        """Add *calls* allocations of *size* bytes in all."""
        self._uses[use] = self._uses.get(use, Amount(0, 0)).plus(Amount(size, calls))

    def __iter__(self) -> Iterator[tuple[Use, Amount]]:
        return iter(self._uses.items())

    def codetags(self) -> set[int]:
        """Return all call sites that something refers to, ``struct codetag *``."""
        return {use.codetag for use in self._uses}

    def by_site(self) -> Mapping[int, Mapping[str, Amount]]:
        """Return what was found by call site, then by kind."""
        found: dict[int, dict[str, Amount]] = {}
        for use, amount in self:
            kinds = found.setdefault(use.codetag, {})
            kinds[use.kind] = kinds.get(use.kind, Amount(0, 0)).plus(amount)
        return found
