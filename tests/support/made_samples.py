# SPDX-License-Identifier: LGPL-2.1-or-later
"""What top reads, made by hand."""

from __future__ import annotations

from memcg_inspect.checks.counters import Counters
from memcg_inspect.collect.counter_sample import Sample
from memcg_inspect.linux.mm.memcontrol_stat import StatLine
from memcg_inspect.model import ImageInfo, Memcg, Stat

ROOT, APP, GONE = 0x1000, 0x2000, 0x3000
SLAB = StatLine("slab", ("A", "B"), "bytes", 1, True)
STACK = StatLine("kernel_stack", ("KB",), "bytes", 1024, True)
MEMCGS = {
    ROOT: Memcg(ROOT, "/", 1, "online", None, ROOT),
    APP: Memcg(APP, "/app", 7, "online", ROOT, APP),
    GONE: Memcg(GONE, "/app/gone", 9, "dying", APP, APP),
}


def made_sample(seconds: float, slab: int, memcgs: dict[int, Memcg] = MEMCGS) -> Sample:
    """Make a sample: a live memcg uses *slab* bytes on node 1, 100 of them pending."""
    kept = Stat(slab - 100, 0, 100)
    nothing = Stat(0, 0, 0)
    of_app = {"A": kept, "B": nothing, "KB": Stat(2, 0, 0)}
    none = {"A": nothing, "B": nothing, "KB": nothing}
    everything = {"A": Stat(slab - 100, 0, 0), "B": nothing, "KB": Stat(2, 0, 0)}
    by_memcg = {ROOT: everything, APP: of_app, GONE: none}
    return Sample(
        image=ImageInfo("7.3.4", "qemu", (0, 1), 4, 4096, "memcg", "BTF", "web"),
        seconds=seconds,
        clock=1_700_000_000 + seconds,
        memcgs=memcgs,
        lines={"slab": SLAB, "kernel_stack": STACK},
        nodes=(0, 1),
        unread=0,
        _usage={APP: 8192},
        _counters=Counters(
            memcgs,
            by_memcg,
            {(m, nid): none if nid == 0 else by_memcg[m] for m in by_memcg for nid in (0, 1)},
        ),
    )
