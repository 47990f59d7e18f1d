# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Guests that are stopped at one instruction of a charge after the other: nothing is accused.

At a random moment, most CPUs are not in the middle of a charge. Here one always is, and the others
may be, since they have stopped with it.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from labkit import dump, freeze, machine
from labkit.errors import LabError
from labkit.machine import Options
from support import breadth
from support.guests import DEBIAN_KERNELS

from memcg_inspect.collect import audit
from memcg_inspect.image.image import image_of
from memcg_inspect.image.program import ImageSource, open_program

pytestmark = [pytest.mark.image, pytest.mark.long]

#: Functions that change two things that belong together. Names differ between kernels: the first
#: one that the kernel has is used. Those that the compiler inlined are reached through others.
FUNCTIONS = {
    "user page": ("charge_memcg", "__mem_cgroup_charge"),
    "user page, freed": ("uncharge_folio", "__mem_cgroup_uncharge_folios", "uncharge_batch"),
    "charge stock": ("refill_stock", "try_charge_memcg"),
    "charge stock, drained": ("drain_stock", "drain_stock_fully"),
    "kernel page": ("__memcg_kmem_charge_page", "obj_cgroup_charge_pages"),
    "kernel page, freed": ("__memcg_kmem_uncharge_page", "obj_cgroup_uncharge_pages"),
    "slab object": ("__memcg_slab_post_alloc_hook", "obj_cgroup_charge"),
    "slab object, freed": ("__memcg_slab_free_hook", "obj_cgroup_uncharge", "refill_obj_stock"),
    "object stock": ("refill_obj_stock", "drain_obj_stock"),
    "zswap": ("obj_cgroup_charge_zswap", "zswap_store"),
    "zswap, freed": ("obj_cgroup_uncharge_zswap", "zswap_entry_free", "zswap_free_entry"),
    "swap": ("mem_cgroup_swapout", "__mem_cgroup_try_charge_swap"),
    "socket": ("mem_cgroup_charge_skmem", "mem_cgroup_sk_charge"),
    "flush": ("mem_cgroup_css_rstat_flush",),
    "removal": ("mem_cgroup_css_offline", "memcg_offline_kmem", "memcg_reparent_objcgs"),
    "last reference": ("obj_cgroup_release",),
}
#: Each takes some seconds: the image is written and audited.
STOPS = 10


@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
@pytest.mark.parametrize("names", FUNCTIONS.values(), ids=FUNCTIONS)
def test_nothing_is_accused_at_any_instruction(
    tmp_path: Path, kernel: str, names: tuple[str, ...]
) -> None:
    [busy] = [c for k, c in breadth.pairs() if k == kernel and "under load" in c.name]
    assert _accused(tmp_path, breadth.options_of(kernel, busy), names) == []


@pytest.mark.parametrize("name", ["obj_cgroup_charge_shared", "obj_cgroup_uncharge_shared"])
def test_nothing_is_accused_where_nodes_are_charged(tmp_path: Path, name: str) -> None:
    """On so many nodes, the kernel that counts by node charges percpu memory past the stocks."""
    options = Options("7.3-pernode", "2cpu+6mem", workload="churn", cpus=4)
    assert _accused(tmp_path, options, (name,)) == []


def _accused(
    folder: Path, options: Options, names: tuple[str, ...]
) -> list[tuple[str, int, str, str, int | None]]:
    """
    Stop a guest under load in a function, and after some more instructions each time.

    Returns the function, the number of instructions, and the findings of the audit.
    """
    core, chance = folder / "vmcore", random.Random()
    with machine.booted(options, ready=machine.check(options)) as running:
        dump.at_work(running)
        freeze.let_run(None)
        function, address = _known(running, names)
        accused = []
        strides = [chance.randint(1, 12) for _ in range(STOPS - 1)]
        for done in freeze.stepped(running, address, strides):
            core.unlink(missing_ok=True)
            dump.write_elf(running, core)
            program = open_program(ImageSource(core=str(core), debuginfo="btf"))
            report = audit(image_of(program))
            accused += [(function, done, f.identity, f.item, f.difference) for f in report.findings]
    return accused


def _known(running: machine.Machine, names: tuple[str, ...]) -> tuple[str, int]:
    """Return the first function that the kernel has, and its address."""
    for name in names:
        try:
            return name, freeze.address(running, name)
        except LabError:
            continue
    raise AssertionError(f"the kernel has none of {', '.join(names)}")
