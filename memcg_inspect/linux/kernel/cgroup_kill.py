# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Memcgs whose removal waits for tasks
------------------------------------

Mirrors ``kill_css_sync()``, ``css_update_populated()`` and ``kill_css_finish_work_fn()`` of
:linux:`kernel/cgroup/cgroup.c` (7.2). A cgroup can be removed while tasks in it still exit. Its
memcg is online until the last of them is gone, with ``CSS_DYING`` and a live ``css->refcnt``. Then
a work item kills the reference count. In older kernels, rmdir() does both under ``cgroup_mutex``.
"""

from __future__ import annotations

from collections.abc import Container

from drgn import FaultError, Object, container_of

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import constant
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.kernel.workqueue import is_pending, works_of
from memcg_inspect.linux.lib.list import OnFault
from memcg_inspect.linux.lib.percpu_refcount import percpu_ref_is_dying

__all__ = ("CSS_DYING", "CSS_ONLINE", "kill_is_deferred", "running_kills")

#: Flags of include/linux/cgroup-defs.h, for images whose types lack the anonymous enum.
CSS_ONLINE = 2
CSS_VISIBLE = 8
CSS_DYING = 16


def running_kills(image: Image, on_fault: OnFault) -> frozenset[int]:
    """
    Return the memcgs for which a worker runs ``kill_css_finish_work_fn()``.

    The work item holds a reference to the memcg, and is not pending any more.

    :param on_fault: called for each part of the lists of work items that cannot be read
    :return: ``struct cgroup_subsys_state *``
    """
    try:
        function = image.symbol("kill_css_finish_work_fn").address
    except UnknownKernelError:
        return frozenset()
    found = set()
    for work in works_of(image, function, on_fault):
        try:
            if not is_pending(work):
                css = container_of(work, "struct cgroup_subsys_state", "kill_finish_work")
                found.add(css.value_())
        except FaultError as error:
            on_fault(error)
    return frozenset(found)


def kill_is_deferred(image: Image, css: Object, running: Container[int]) -> bool:
    """
    Return whether a css with ``CSS_DYING`` waits for ``kill_css_finish()``.

    ``CSS_DYING`` alone does not show it: the flag can be damaged. What ``kill_css_sync()`` and its
    callers change elsewhere must agree.

    :param css: ``struct cgroup_subsys_state``, of a memcg
    :param running: result of :func:`running_kills`
    :raises drgn.FaultError: if it, its cgroup or the parent of that cannot be read
    """
    if not css.type_.has_member("kill_finish_work"):
        return False  # before 7.2
    flags = int(css.flags)
    online = constant(image, "CSS_ONLINE") or CSS_ONLINE
    # offline_css() clears CSS_ONLINE after kill_css_finish(), css_clear_dir() clears CSS_VISIBLE
    # before that.
    if not flags & online or flags & (constant(image, "CSS_VISIBLE") or CSS_VISIBLE):
        return False
    waits = (
        css.nr_populated_csets
        or css.nr_populated_children
        or is_pending(css.kill_finish_work)
        or css.address_of_().value_() in running
    )
    subsys = constant(image, "memory_cgrp_id") or 0
    cgroup = css.cgroup
    if not waits or int(cgroup.nr_dying_subsys[subsys]) < 1:
        return False
    return _is_removed(image, cgroup, online) or not _has_controller(cgroup, subsys)


def _is_removed(image: Image, cgroup: Object, online: int) -> bool:
    # cgroup_destroy_locked()
    own = cgroup.self
    return not int(own.flags) & online and percpu_ref_is_dying(own.refcnt.address_of_())


def _has_controller(cgroup: Object, subsys: int) -> bool:
    """
    Return whether a controller is switched on in a cgroup; see ``cgroup_ss_mask()``.

    If it is not, cgroup_apply_control_disable() kills the css, and the cgroup stays.

    :param cgroup: ``struct cgroup *``
    """
    parent = container_of(cgroup.self.parent.read_(), "struct cgroup", "self")
    # The memory controller is not one of those that threaded cgroups can have.
    is_threaded = cgroup.dom_cgrp != cgroup
    return bool(int(parent.subtree_ss_mask) >> subsys & 1) and not is_threaded
