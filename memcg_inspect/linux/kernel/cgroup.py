# SPDX-License-Identifier: LGPL-2.1-or-later
"""
References to a removed memcg
-----------------------------

Mirrors ``struct cgroup_subsys_state`` of :linux:`kernel/cgroup/cgroup.c`. A memcg is freed when
``css.refcnt`` drops to 0. These hold references:

- found here: swap entries, the removal itself, ``struct css_set``, and ``struct mm_struct`` on the
  list of the multi-gen LRU;
- found by other modules: user pages (up to 7.1), sockets, and stocks.
"""

from __future__ import annotations

from typing import NamedTuple

from drgn import FaultError, Object

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import constant
from memcg_inspect.linux.lib.list import list_entries
from memcg_inspect.linux.lib.percpu_refcount import percpu_ref_count
from memcg_inspect.model import Coverage

__all__ = ("CssHolders", "read_css_holders")


class CssHolders(NamedTuple):
    """
    References to a memcg.

    :ivar refs: number of all references, ``css.refcnt``
    :ivar swap_entries: number of swap entries that keep the ID of the memcg, ``id.ref``. All of
        them together hold one reference
    :ivar removal: 1 from ``kill_css()``, which takes a reference, until the memcg is offline
    :ivar css_sets: ``struct css_set *`` of tasks in the memcg, dead tasks included; each holds one
        reference
    :ivar mms: ``struct mm_struct *`` on the list of the multi-gen LRU; each holds one reference
    """

    refs: int
    swap_entries: int
    removal: int
    css_sets: tuple[int, ...]
    mms: tuple[int, ...]


def read_css_holders(
    image: Image, memcg: Object, is_offline: bool, coverage: Coverage
) -> CssHolders | None:
    """
    Read the references to a memcg that was removed.

    :param memcg: ``struct mem_cgroup *``
    :param is_offline: whether ``mem_cgroup_css_offline()`` has run
    :param coverage: counts the memcg as read or unreadable
    :return: ``None`` if any part is unreadable
    """
    faults: list[FaultError] = []
    try:
        refs = percpu_ref_count(image, memcg.css.refcnt.address_of_())
        # The memcg itself holds one until it is offline.
        ids = int(memcg.id.ref.refs.counter) - (not is_offline)
        css_sets = _css_sets(image, memcg, faults)
        mms = _mms(image, memcg, faults)
    except FaultError as error:
        faults.append(error)
    if faults:
        coverage.miss("references to a memcg", faults[0].address, str(faults[0]))
        return None
    coverage.read += 1
    return CssHolders(refs, ids, 0 if is_offline else 1, css_sets, mms)


def _css_sets(image: Image, memcg: Object, faults: list[FaultError]) -> tuple[int, ...]:
    # find_css_set() takes a reference. put_css_set() drops it when the last task is freed.
    subsys = constant(image, "memory_cgrp_id") or 0
    head = memcg.css.cgroup.e_csets[subsys].address_of_()
    sets = list_entries(image, "struct css_set", head, f"e_cset_node[{subsys}]", faults.append)
    return tuple(css_set.value_() for css_set in sets)


def _mms(image: Image, memcg: Object, faults: list[FaultError]) -> tuple[int, ...]:
    # lru_gen_add_mm() takes a reference. CONFIG_LRU_GEN_WALKS_MMU (CONFIG_LRU_GEN up to 6.6)
    if not memcg.type_.type.has_member("mm_list"):
        return ()
    head = memcg.mm_list.fifo.address_of_()
    mms = list_entries(image, "struct mm_struct", head, "lru_gen.list", faults.append)
    return tuple(mm.value_() for mm in mms)
