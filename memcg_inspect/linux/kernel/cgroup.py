# SPDX-License-Identifier: LGPL-2.1-or-later
"""
References to a memcg
---------------------

Mirrors ``struct cgroup_subsys_state`` of :linux:`kernel/cgroup/cgroup.c`, and
``struct mem_cgroup_id`` of :linux:`mm/memcontrol.c`. A memcg is freed when ``css.refcnt`` drops
to 0. These hold references:

- found here: the memcg itself, its ID, ``struct css_set``, ``struct mm_struct`` on the list of the
  multi-gen LRU, ``struct bdi_writeback``, and events of cgroup v1;
- found by other modules: its children, stocks, sockets, groups of inotify and fanotify, zswap's
  cursor, and user pages (up to 7.0).

kmem does not hold any: its obj_cgroups are reparented.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from drgn import FaultError, Object, offsetof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import constant
from memcg_inspect.linux.kernel.cgroup_kill import CSS_DYING, CSS_ONLINE, running_kills
from memcg_inspect.linux.kernel.workqueue import is_pending
from memcg_inspect.linux.lib.list import OnFault, list_entries
from memcg_inspect.linux.lib.percpu_refcount import percpu_ref_counts
from memcg_inspect.linux.mm.backing_dev import cgwbs, offline_cgwbs
from memcg_inspect.model import Coverage, CssRefs, Memcg

__all__ = ("read_css_refs",)


def read_css_refs(
    image: Image, memcgs: Mapping[int, Memcg], coverage: Coverage
) -> dict[int, CssRefs]:
    """
    Read the references to all memcgs but the root, to which they are not counted.

    :param memcgs: by ``struct mem_cgroup *``
    :param coverage: counts the memcgs that were read, and what is unreadable
    :return: by ``struct mem_cgroup *``. Memcgs that could not be read are left out.
    """
    faults: list[FaultError] = []
    offline = offline_cgwbs(image, faults.append)
    for fault in faults:
        coverage.miss("list of writebacks", fault.address, str(fault))
    kills = _running_kills(image, memcgs, coverage)
    found: dict[int, CssRefs] = {}
    below_root = [address for address, memcg in memcgs.items() if memcg.parent is not None]
    counts = _refcnts(image, below_root)
    for address in below_root:
        css = image.pointer("struct mem_cgroup *", address)
        try:
            count = counts[address]
            if isinstance(count, FaultError):
                raise count
            refs = _read(image, css, count, offline.get(address, ()), bool(faults), coverage)
            found[address] = refs._replace(base=refs.base + _deferred_kill(css, kills))
            coverage.read += 1
        except FaultError as error:
            coverage.miss("references to a memcg", error.address, str(error))
    return found


def _refcnts(image: Image, memcgs: Sequence[int]) -> dict[int, int | FaultError]:
    """Return the references to memcgs, by ``struct mem_cgroup *``."""
    at = offsetof(image.type("struct mem_cgroup"), "css.refcnt")
    refs = [image.pointer("struct percpu_ref *", address + at) for address in memcgs]
    return {address - at: count for address, count in percpu_ref_counts(image, refs).items()}


def _read(
    image: Image,
    memcg: Object,
    count: int,
    offline: Sequence[int],
    is_broken: bool,
    coverage: Coverage,
) -> CssRefs:
    faults: list[FaultError] = []
    flags = int(memcg.css.flags)
    is_online = bool(flags & (constant(image, "CSS_ONLINE") or CSS_ONLINE))
    is_dying = bool(flags & (constant(image, "CSS_DYING") or CSS_DYING))
    writebacks = [wb.value_() for wb in cgwbs(image, memcg, faults.append)]
    refs = CssRefs(
        refs=count,
        id=int(memcg.id.id),
        id_refs=int(memcg.id.ref.refs.counter),
        is_online=is_online,
        # percpu_ref_init() takes one. kill_css() takes another, and percpu_ref_kill() drops the
        # first. css_killed_work_fn() drops the other when the memcg is offline.
        base=int(is_online or not is_dying),
        css_sets=_css_sets(image, memcg, faults.append),
        mms=_mms(image, memcg, faults.append),
        writebacks=(*writebacks, *offline),
        events=_events(image, memcg, faults.append),
        whole=not faults and not is_broken,
    )
    for fault in faults:
        coverage.miss("holders of references to a memcg", fault.address, str(fault))
    return refs


def _running_kills(image: Image, memcgs: Mapping[int, Memcg], coverage: Coverage) -> frozenset[int]:
    if not any(memcg.state == "dying" and not memcg.offline for memcg in memcgs.values()):
        return frozenset()

    def missed(error: FaultError) -> None:
        coverage.miss("work items", error.address, str(error))

    return running_kills(image, missed)


def _deferred_kill(memcg: Object, running: Container[int]) -> int:
    # css_update_populated() takes a reference for kill_css_finish_work_fn() (7.2).
    css = memcg.css
    if not css.type_.has_member("kill_finish_work"):
        return 0
    return int(is_pending(css.kill_finish_work) or css.address_of_().value_() in running)


def _css_sets(image: Image, memcg: Object, on_fault: OnFault) -> tuple[int, ...]:
    # find_css_set() takes a reference. put_css_set() drops it when the last task is freed.
    subsys = constant(image, "memory_cgrp_id") or 0
    head = memcg.css.cgroup.e_csets[subsys].address_of_()
    sets = list_entries(image, "struct css_set", head, f"e_cset_node[{subsys}]", on_fault)
    # The list is that of the cgroup. When the controller was disabled and enabled again, it has the
    # css_sets of the new memcg, and those of zombies, which still refer to the old one.
    css = memcg.css.address_of_().value_()
    return tuple(cset.value_() for cset in sets if cset.subsys[subsys].value_() == css)


def _mms(image: Image, memcg: Object, on_fault: OnFault) -> tuple[int, ...]:
    # lru_gen_add_mm() takes a reference. CONFIG_LRU_GEN_WALKS_MMU (CONFIG_LRU_GEN up to 6.6)
    if not memcg.type_.type.has_member("mm_list"):
        return ()
    head = memcg.mm_list.fifo.address_of_()
    mms = list_entries(image, "struct mm_struct", head, "lru_gen.list", on_fault)
    return tuple(mm.value_() for mm in mms)


def _events(image: Image, memcg: Object, on_fault: OnFault) -> int:
    # memcg_write_event_control() of cgroup v1 takes a reference. CONFIG_MEMCG_V1 since 6.11
    if not memcg.type_.type.has_member("event_list"):
        return 0
    head = memcg.event_list.address_of_()
    return sum(1 for _ in list_entries(image, "struct mem_cgroup_event", head, "list", on_fault))
