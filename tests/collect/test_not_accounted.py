# SPDX-License-Identifier: LGPL-2.1-or-later
"""Machines on which no memcg is charged for kernel memory, or for sockets or BPF."""

from __future__ import annotations

import pytest
from support.guests import DEBIAN_KERNELS, Lab
from support.missing_pages import excluded, opened
from support.planting import Overlay, change
from support.printed import text

from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.memcontrol import not_accounted
from memcg_inspect.model import Coverage

pytestmark = pytest.mark.image

#: Charges of kernel memory. Linux 7.2 and 7.3 charge zswap entries with ``nokmem``, too: since
#: user pages refer to obj_cgroups, there are some.
KERNEL = {"slab", "percpu", "kmem"}


@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_everything_is_accounted_by_default(lab: Lab, kernel: str) -> None:
    report = lab.image(kernel).report()
    assert report.not_accounted == ()
    assert {"slab", "kmem"} <= {charged.kind for charged in report.charges}
    assert "not accounted" not in text(report)


@pytest.mark.long
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
@pytest.mark.parametrize("without", ["nokmem", "nosocket", "nobpf"])
def test_what_the_kernel_was_told_not_to_account(lab: Lab, kernel: str, without: str) -> None:
    report = lab.image(kernel, "2", "mixed", append=f"cgroup.memory={without}").report()
    assert report.verdict == "exact"
    if (kernel, without) == ("6.1", "nobpf"):
        # It does not know the option.
        assert report.not_accounted == ()
        return
    names = {"nokmem": "kernel memory", "nosocket": "sockets", "nobpf": "BPF"}
    assert report.not_accounted == (names[without],)
    kinds = {charged.kind for charged in report.charges if charged.bytes}
    if without == "nokmem":
        assert not kinds & KERNEL
        first = text(report).splitlines()[0]
        assert first.startswith("EXACT: ")
        assert "kernel memory is not accounted on this machine" in first
    else:
        assert kinds > {"slab"}


@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_keys_that_are_off(lab: Lab, kernel: str) -> None:
    """Each says of one sort of memory that it is not accounted; Linux 6.1 has none for BPF."""
    prog = lab.image(kernel).program()
    keys = {
        "memcg_kmem_enabled_key" if kernel == "6.1" else "memcg_kmem_online_key": "kernel memory",
        "memcg_sockets_enabled_key": "sockets",
    }
    keys |= {} if kernel == "6.1" else {"memcg_bpf_enabled_key": "BPF"}
    overlay = Overlay(prog)
    for key, what in keys.items():
        enabled = prog[key].key.enabled.counter
        overlay.write((change(enabled, 0),))
        coverage = Coverage()
        assert not_accounted(Image(prog), coverage) == (what,)
        assert (coverage.read, coverage.unreadable) == (3, 0)
        overlay.clear()
        missing = opened(lab.image(kernel).core)
        missing.add_memory_segment(enabled.address_ or 0, 4, excluded, False)
        coverage = Coverage()
        assert not_accounted(Image(missing), coverage) == ()
        assert [one.what for one in coverage.examples] == [f"whether {what} is accounted"]
