# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Who pays on kernels that account by node, and what each rule of doing so says; see
:mod:`memcg_inspect.checks.pernode`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from memcg_inspect.checks.ledger import ChargeKind
from memcg_inspect.model import Misplaced, Objcg

__all__ = ("ByNode",)

#: Bytes by the obj_cgroup that pays and the node it pays for.
Booked = Mapping[tuple[int, int], int]


class ByNode:
    """
    Finds the obj_cgroups of parts of a charge, and notes where the two rules part.

    :ivar posted: by kind, bytes beyond those that are there that the posted rule would book
    :ivar straddling: charges that the posted rule books elsewhere
    :ivar misplaced: charges that both rules book elsewhere
    """

    def __init__(self, objcgs: Mapping[int, Objcg], is_whole: bool) -> None:
        """:param is_whole: whether all obj_cgroups were read; else some parts have no payer"""
        self.objcgs = objcgs
        self.posted: dict[ChargeKind, Counter[tuple[int, int]]] = {
            "percpu": Counter(),
            "zswap": Counter(),
        }
        self.straddling: list[Misplaced] = []
        self.misplaced: list[Misplaced] = []
        self._is_whole = is_whole
        # Without siblings, a part is paid for by the obj_cgroup in use now.
        self._current = {(o.memcg, o.nid): o.address for o in objcgs.values() if o.memcg_refs}

    def payer(self, objcg: int, nid: int) -> int:
        """Return the obj_cgroup that pays for what a charge to this one has on a node."""
        known = self.objcgs.get(objcg)
        if known is None:
            return objcg
        if 0 <= nid < len(known.siblings) and known.siblings[nid]:
            return known.siblings[nid]
        return self._current.get((known.memcg, nid), objcg if self._is_whole else 0)

    def compare(self, kind: ChargeKind, address: int, physical: Booked, posted: Booked) -> None:
        """
        Note where the posted rule books other bytes of a charge than are there.

        :param address: of the charge, for who wants to look
        """
        extra = Counter({k: posted.get(k, 0) - physical.get(k, 0) for k in {*physical, *posted}})
        if not any(extra.values()):
            return
        (objcg, charged), _ = extra.most_common(1)[0]
        for (payer, nid), size in extra.items():
            self.posted[kind][payer, nid] += size
            if size < 0:
                self.straddling.append(Misplaced(kind, address, objcg, charged, nid, -size))
