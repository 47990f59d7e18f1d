# SPDX-License-Identifier: LGPL-2.1-or-later
"""Description of an image."""

from __future__ import annotations

from typing import Literal

from drgn import FaultError, ProgramFlags

from memcg_inspect.btf import debug_info_source
from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.strings import text
from memcg_inspect.linux.mm.memcontrol import accounting
from memcg_inspect.linux.mm.mmzone import mem_map, online_nodes, possible_cpus
from memcg_inspect.model import ImageInfo

__all__ = ("image_info",)


def image_info(image: Image) -> ImageInfo:
    """Return the kernel release, source, nodes, CPUs, accounting and host of an image."""
    source: Literal["vmcore", "live", "qemu"] = "vmcore"
    if image.prog.flags & ProgramFlags.IS_LIVE:
        source = "live" if image.prog.flags & ProgramFlags.IS_LOCAL else "qemu"
    return ImageInfo(
        release=text(image.object("UTS_RELEASE").string_()),
        source=source,
        nodes=online_nodes(image),
        cpus=len(possible_cpus(image)),
        page_size=mem_map(image).page_size,
        accounting=accounting(image),
        debug_info=debug_info_source(image.prog),
        host=_host(image),
    )


@per_image
def _host(image: Image) -> str:
    try:
        name: bytes = image.object("init_uts_ns").name.nodename.string_()
    except FaultError:
        return ""
    return text(name)
