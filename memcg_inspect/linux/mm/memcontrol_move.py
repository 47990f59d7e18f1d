# SPDX-License-Identifier: LGPL-2.1-or-later
"""
A task that takes its pages along
---------------------------------

On cgroup v1, up to Linux 6.13, a task that moves to another memcg can take its pages along
(``memory.move_charge_at_immigrate``). ``mc`` of :linux:`mm/memcontrol.c` is about that task. One
task moves at a time.
"""

from __future__ import annotations

from collections.abc import Collection

from drgn import FaultError, Object, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.model import Coverage
from memcg_inspect.model_kernel import Moving

__all__ = ("read_moving",)


def read_moving(image: Image, memcgs: Collection[int], coverage: Coverage) -> Moving | None:
    """
    Return what is being moved; ``None`` if nothing is, or if that is not known.

    :param memcgs: all memcgs, ``struct mem_cgroup *``
    :param coverage: counts what was read
    """
    if not has_type(image, "struct move_charge_struct"):
        return None
    try:
        symbol = image.symbol("mc")
        if symbol.size not in (0, sizeof(image.type("struct move_charge_struct"))):
            return None  # another variable
        mc = Object(image.prog, "struct move_charge_struct", address=symbol.address)
        moving = Moving(
            source=mc.member_("from").value_(),
            target=mc.to.value_(),
            precharged=int(mc.precharge),
            moved=int(mc.moved_charge),
            moved_swap=int(mc.moved_swap),
        )
    except UnknownKernelError:
        return None
    except FaultError as error:
        coverage.miss("struct move_charge_struct", error.address, str(error))
        return None
    coverage.read += 1
    # mem_cgroup_clear_mc() sets them to NULL.
    return moving if moving.source in memcgs and moving.target in memcgs else None
