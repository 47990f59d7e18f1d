# SPDX-License-Identifier: LGPL-2.1-or-later
"""What is being looked at."""

from __future__ import annotations

from typing import Literal

from drgn import Program, ProgramFlags

from memcg_inspect.btf import debug_info_source
from memcg_inspect.linux.mm.memcontrol import accounting
from memcg_inspect.linux.mm.mmzone import mem_map, online_nodes, possible_cpus
from memcg_inspect.model import ImageInfo

__all__ = ("image_info",)


def image_info(prog: Program) -> ImageInfo:
    """Describe an image: its kernel, its nodes and CPUs, and where its types come from."""
    source: Literal["vmcore", "live", "qemu"] = "vmcore"
    if prog.flags & ProgramFlags.IS_LIVE:
        source = "live" if prog.flags & ProgramFlags.IS_LOCAL else "qemu"
    return ImageInfo(
        release=prog["UTS_RELEASE"].string_().decode(errors="backslashreplace"),
        source=source,
        nodes=online_nodes(prog),
        cpus=len(possible_cpus(prog)),
        page_size=mem_map(prog).page_size,
        accounting=accounting(prog),
        debug_info=debug_info_source(prog),
    )
