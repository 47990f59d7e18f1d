# SPDX-License-Identifier: LGPL-2.1-or-later
"""The plugin: registered before debug info is looked for, and silent where there is some."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from drgn import Architecture, Platform, Program
from support.guests import DEBIAN_KERNELS, Lab

from memcg_inspect.btf import debug_info_source
from memcg_inspect.btf.plugin import drgn_prog_set
from memcg_inspect.btf.session import session_of


def test_other_programs_are_left_alone() -> None:
    prog = Program(Platform(Architecture.X86_64))
    drgn_prog_set(prog)
    assert session_of(prog) is None
    assert "btf" not in prog.registered_type_finders()


@pytest.mark.image
def test_nothing_is_read_until_asked(lab: Lab) -> None:
    prog = Program()
    prog.set_core_dump(lab.image(DEBIAN_KERNELS[-1]).core)
    drgn_prog_set(prog)
    assert "_makers=[]" in f"_makers={vars(session_of(prog))['_makers']}"
    assert prog.type("struct page").size > 0
    assert debug_info_source(prog) == "BTF of the image"


@pytest.mark.image
def test_a_kernel_without_btf_gives_one_warning(
    lab: Lab, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memcg_inspect.btf import session
    from memcg_inspect.btf.parse import BtfError

    def nothing(*_: object) -> None:
        raise BtfError("this kernel has no BTF")

    monkeypatch.setattr(session, "from_image", nothing)
    # whatever the command line has set in another test
    caplog.set_level("WARNING", logger="memcg_inspect")
    prog = Program()
    prog.set_core_dump(lab.image(DEBIAN_KERNELS[-1]).core)
    drgn_prog_set(prog)
    for _ in range(2):
        with pytest.raises(LookupError):
            prog.type("struct page")
    assert [r.getMessage() for r in caplog.records] == ["this kernel has no BTF"]
    assert debug_info_source(prog) == "none"


@pytest.mark.image
def test_in_drgn_itself(lab: Lab) -> None:
    image = lab.image(DEBIAN_KERNELS[-1])
    environment = os.environ | {
        "DRGN_PLUGINS": "btf=memcg_inspect.btf.plugin",
        "DRGN_DISABLE_PLUGINS": "*",
    }
    done = subprocess.run(
        [sys.executable, "-m", "drgn", "-c", image.core, "--no-default-symbols", "-q", "-e",
         "print(prog['init_task'].comm.string_().decode())"],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == "swapper/0\n", done.stderr
