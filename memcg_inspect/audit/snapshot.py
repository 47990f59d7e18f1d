# SPDX-License-Identifier: LGPL-2.1-or-later
"""Everything that was read of one image, ready to be judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memcg_inspect.audit.counters import Counters
from memcg_inspect.audit.ledger import Ledger
from memcg_inspect.model import Coverage, ImageInfo, Memcg, Objcg, ObjStock

__all__ = ("Snapshot",)


@dataclass(frozen=True)
class Snapshot:
    """
    One image, collected.

    :ivar coverage: what could be read, by subject; see :attr:`complete`
    """

    image: ImageInfo
    memcgs: Mapping[int, Memcg]
    objcgs: Mapping[int, Objcg]
    ledger: Ledger
    counters: Counters
    stocks: Sequence[ObjStock]
    coverage: Mapping[str, Coverage]

    def complete(self, *subjects: str) -> bool:
        """Return whether everything on these subjects could be read."""
        return not any(self.coverage[s].unreadable for s in subjects if s in self.coverage)

    def payer(self, address: int) -> int | None:
        """
        Return the live memcg that a charge counts for today.

        :param address: of an obj_cgroup or of a mem_cgroup
        :return: ``None`` if there is no such obj_cgroup or memcg
        """
        objcg = self.objcgs.get(address)
        memcg = self.memcgs.get(address if objcg is None else objcg.memcg)
        return None if memcg is None else memcg.payer

    def live(self) -> list[Memcg]:
        """Return the memcgs that pay for themselves, parents first."""
        return [m for m in self.memcgs.values() if m.payer == m.address]
