# SPDX-License-Identifier: LGPL-2.1-or-later
"""
memcg_inspect
-------------

Compare the memory that is charged to Linux memory cgroups with the kernel's counters, to the byte,
in a vmcore or a running kernel.

In a drgn session, ``import memcg_inspect`` provides :func:`audit` and the helpers of
:mod:`memcg_inspect.helpers`, and in scripts ``memcg_inspect.open()``. They are imported on first
use, since drgn imports this package in every session.
"""

from __future__ import annotations

# Not that of typing, whose import takes longer than that of this package: memcg_inspect.__main__
# handles a Ctrl-C only after this module.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from memcg_inspect.helpers import (
        ChargedSlabObject,
        CounterValue,
        PcpuAllocation,
        find_memcg,
        for_each_charged_slab_object,
        for_each_memcg,
        for_each_pcpu_alloc,
        memcg_counter,
        memcg_path,
        objcg_memcg,
        objcg_nid,
        page_to_nid,
        slab_objcg,
    )
    from memcg_inspect.session import audit
    from memcg_inspect.session import open as open

__version__ = "0.1.0"

__all__ = (
    "ChargedSlabObject",
    "CounterValue",
    "PcpuAllocation",
    "audit",
    "find_memcg",
    "for_each_charged_slab_object",
    "for_each_memcg",
    "for_each_pcpu_alloc",
    "memcg_counter",
    "memcg_path",
    "objcg_memcg",
    "objcg_nid",
    "page_to_nid",
    "slab_objcg",
)


# Not in __all__: "from memcg_inspect import *" must not replace the open() of Python.
_OF_SESSION = ("audit", "open")


def __getattr__(name: str) -> Any:
    if name not in (*__all__, *_OF_SESSION):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from memcg_inspect import helpers, session

    return getattr(session if name in _OF_SESSION else helpers, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_OF_SESSION})
