# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Ticks
-----

Mirrors ``jiffies_64`` of :linux:`include/linux/jiffies.h`. A machine whose CPUs are all idle may
have no ticks (``CONFIG_NO_HZ_IDLE``). Any other has one every 1 to 10 ms.
"""

from __future__ import annotations

from drgn.helpers.linux.percpu import per_cpu

from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.mmzone import online_cpus

__all__ = ("is_idle", "read_jiffies")


def read_jiffies(image: Image) -> int:
    """
    Return the number of ticks.

    :raises UnknownKernelError: if the image has no such variable
    :raises drgn.FaultError: if it cannot be read
    """
    return int(image.object("jiffies_64").value_())


def is_idle(image: Image) -> bool:
    """
    Return whether all CPUs run their idle tasks.

    :raises UnknownKernelError: if the image has no runqueues
    :raises ImageError: if the mask of online CPUs cannot be right
    :raises drgn.FaultError: if a runqueue cannot be read
    """
    runqueues = image.object("runqueues")
    found = (per_cpu(runqueues, cpu) for cpu in online_cpus(image))
    return all(rq.curr.value_() == rq.idle.value_() for rq in found)
