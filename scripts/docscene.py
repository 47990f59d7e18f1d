# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The dump of docs/postmortem.md.

Two services use objects of one driver, the test module charge; the kernel profiles
allocations. In a copy of the guest's image one object of ``/shop/batch`` is charged to
``/shop/web``, as if the driver had overwritten the pointer.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from drgn import Object
from labkit import images, kernels
from labkit.poke import poke

from memcg_inspect.collect import collect
from memcg_inspect.image.image import image_of
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.slab import SlabReader

ROOT = Path(__file__).resolve().parent.parent
KERNEL = "7.3-lab"
#: KFENCE takes an object out of its slab now and then.
_OPTIONS = "kfence.sample_interval=0 sysctl.vm.mem_profiling=1"


class Scene(NamedTuple):
    """
    Addresses in the dump.

    :ivar victim: address of the object that is charged to another memcg
    :ivar neighbour: address of the object behind it, which is charged correctly
    :ivar element: address of the pointer that is wrong
    """

    victim: int
    neighbour: int
    element: int


def whole() -> Path:
    """Return the image without the fault."""
    return images.image(
        KERNEL,
        "4",
        "idle",
        modules=((str(ROOT / "fixtures/modules/charge"), ""),),
        run=str(ROOT / "fixtures/scenes/postmortem.sh"),
        append=_OPTIONS,
    )


def broken(out: Path) -> Scene:
    """Write the dump with the fault to a file; return where the fault is."""
    image = whole()
    prog = open_program(ImageSource(core=str(image), debuginfo="btf"))
    snapshot, slabs = collect(image_of(prog)), SlabReader(image_of(prog))
    memcgs = {m.path: m.address for m in snapshot.memcgs.values() if m.state == "online"}
    objects = (
        obj
        for piece in scan_pages(image_of(prog))
        for page in piece.slabs
        if (slab := slabs.slab(page)) is not None and slab.cache.name == "charge_test"
        for obj in slabs.charged_objects(slab)
    )
    victims = [v for v in objects if snapshot.payer(v.objcg) == memcgs["/shop/batch"]]
    victim = victims[len(victims) // 2]
    thief = Object(prog, "struct mem_cgroup *", memcgs["/shop/web"]).nodeinfo[1].objcg
    change = (f"u64:{victim.element:#x}", thief.value_())
    poke(image, out, kernels.debug_info(KERNEL), [change])
    return Scene(victim.address, victim.address + victim.slab.cache.size, victim.element)
