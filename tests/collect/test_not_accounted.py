# SPDX-License-Identifier: LGPL-2.1-or-later
"""Machines on which no memcg is charged for kernel memory, or for sockets or BPF."""

from __future__ import annotations

import pytest
from support.guests import DEBIAN_KERNELS, Lab
from support.printed import text

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
