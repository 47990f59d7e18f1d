# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Work items
----------

Mirrors ``struct worker_pool``, ``struct worker`` and ``struct pool_workqueue`` of
:linux:`kernel/workqueue.c`.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, Object

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member
from memcg_inspect.linux.lib.list import OnFault, idr_entries, list_entries

__all__ = ("is_pending", "works_of")

#: ``WORK_STRUCT_PENDING_BIT`` is bit 0 of ``work->data``.
_PENDING = 1


def is_pending(work: Object) -> bool:
    """
    Return whether a work item waits to be run: ``WORK_STRUCT_PENDING_BIT`` is set.

    queue_rcu_work() sets the bit before the grace period begins.

    :param work: ``struct work_struct``
    :raises drgn.FaultError: if it cannot be read
    """
    return bool(int(work.data.counter) & _PENDING)


def works_of(image: Image, function: int, on_fault: OnFault) -> Iterator[Object]:
    """
    Iterate over the work items of one function that are queued or running.

    :param function: address of the ``work_func_t``
    :param on_fault: called for each part of the lists that cannot be read
    :return: ``struct work_struct *``. A work item that was just queued, or that just ended, can be
        missing, or be there twice.
    """
    # delayed_works until commit f97a4a1a3f87 ("workqueue: Rename "delayed" (delayed by active
    # management) to "inactive"") (in v5.15).
    has_inactive = has_member(image, "struct pool_workqueue", "inactive_works")
    inactive = "inactive_works" if has_inactive else "delayed_works"
    for pool in idr_entries(image, "struct worker_pool", image.object("worker_pool_idr"), on_fault):
        lists = [pool.worklist]
        for worker in list_entries(
            image, "struct worker", pool.workers.address_of_(), "node", on_fault
        ):
            try:
                if worker.current_func.value_() == function and worker.current_work:
                    yield worker.current_work.read_()
                lists.append(worker.scheduled)
            except FaultError as error:
                on_fault(error)
        for head in lists:
            yield from _of(image, head, function, on_fault)
    for workqueue in list_entries(
        image,
        "struct workqueue_struct",
        image.object("workqueues").address_of_(),
        "list",
        on_fault,
    ):
        for pwq in list_entries(
            image,
            "struct pool_workqueue",
            workqueue.pwqs.address_of_(),
            "pwqs_node",
            on_fault,
        ):
            yield from _of(image, pwq.member_(inactive), function, on_fault)


def _of(image: Image, head: Object, function: int, on_fault: OnFault) -> Iterator[Object]:
    """Iterate over a ``struct list_head`` of work items."""
    for work in list_entries(image, "struct work_struct", head.address_of_(), "entry", on_fault):
        try:
            if work.func.value_() == function:
                yield work
        except FaultError as error:
            on_fault(error)
