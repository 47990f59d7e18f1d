# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What holds a removed memcg
--------------------------

Mirrors the references to a ``struct cgroup_subsys_state`` of
:linux:`include/linux/cgroup-defs.h` that the memory controller and its users take. A memcg is
freed when ``css.refcnt`` is 0. Charged user pages (before 7.2), sockets and stocks hold one
reference each and are found elsewhere; the others are found here.
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

    :ivar refs: all of them, ``css.refcnt``
    :ivar swap_entries: swap entries that keep its id, ``id.ref``: one reference for all of them
    :ivar removal: 1 while it is being taken offline, see ``kill_css()``
    :ivar css_sets: ``struct css_set *`` with tasks, dead ones included, that were in it
    :ivar mms: ``struct mm_struct *`` on its list of the multi-gen LRU
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
    Read what holds a memcg that is being removed.

    :param memcg: ``struct mem_cgroup *``
    :param is_offline: whether it was taken offline
    :return: ``None`` if that could not be read; it is counted
    """
    faults: list[FaultError] = []
    try:
        refs = percpu_ref_count(image, memcg.css.refcnt.address_of_())
        # One of its own until it is offline. Private ids of 7.2 are counted alike.
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
    # find_css_set() takes a reference; it goes with the last task, when that is freed.
    subsys = constant(image, "memory_cgrp_id") or 0
    head = memcg.css.cgroup.e_csets[subsys].address_of_()
    sets = list_entries(image, "struct css_set", head, f"e_cset_node[{subsys}]", faults.append)
    return tuple(css_set.value_() for css_set in sets)


def _mms(image: Image, memcg: Object, faults: list[FaultError]) -> tuple[int, ...]:
    # lru_gen_add_mm() takes a reference; CONFIG_LRU_GEN_WALKS_MMU (CONFIG_LRU_GEN before 6.7).
    if not memcg.type_.type.has_member("mm_list"):
        return ()
    head = memcg.mm_list.fifo.address_of_()
    mms = list_entries(image, "struct mm_struct", head, "lru_gen.list", faults.append)
    return tuple(mm.value_() for mm in mms)
