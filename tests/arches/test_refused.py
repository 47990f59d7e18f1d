# SPDX-License-Identifier: LGPL-2.1-or-later
"""An image that drgn cannot read is refused in one line that says what it needs."""

from __future__ import annotations

import pytest
from labkit import images
from support.guests import ARCH

from memcg_inspect.cli import main

pytestmark = [pytest.mark.image, pytest.mark.long]


@pytest.mark.parametrize("kernel", ["6.1/ppc64el"] if ARCH == "ppc64el" else [])
def test_an_mmu_that_is_not_known(kernel: str, capsys: pytest.CaptureFixture[str]) -> None:
    core = images.image(kernel, "1", "idle")
    capsys.readouterr()  # the lab tells what it does
    assert main(["audit", "-c", str(core)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        "memcg-inspect: drgn needs the debug info of this kernel to translate addresses (could "
        "not find 'cur_cpu_spec'): name its vmlinux with -s\n"
    )
