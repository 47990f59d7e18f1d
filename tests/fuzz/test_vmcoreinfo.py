# SPDX-License-Identifier: LGPL-2.1-or-later
"""VMCOREINFO that is damaged is refused in one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.guests import Lab

from memcg_inspect.cli import main

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]

RELEASE = b"OSRELEASE=7."


@pytest.mark.parametrize("also", [b"", b"SYMBOL(_stext)"])
def test_a_release_that_is_no_text(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str], also: bytes
) -> None:
    """What libkdumpfile says of it has the byte that is no text, and drgn decodes that."""
    core = tmp_path / "vmcore"
    shutil.copy(lab.image("7.3", "4", "mixed", format="kdump").core, core)
    with core.open("r+b") as file:
        head = file.read(1 << 16)
        file.seek(head.index(RELEASE) + len(RELEASE))
        file.write(b"\xff")
        file.seek(head.index(also))
        file.write(head[head.index(also) :][: len(also)].lower())
    capsys.readouterr()  # of the lab
    assert main(["stock", "-c", str(core)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == ("memcg-inspect: the dump cannot be read: its VMCOREINFO is damaged\n")


@pytest.mark.parametrize("of_note", [False, True])
def test_a_name_that_begins_with_a_dot(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str], of_note: bool
) -> None:
    """libkdumpfile would end by a signal, wherever it takes VMCOREINFO from."""
    core = tmp_path / "vmcore"
    shutil.copy(lab.image("7.3", "4", "mixed", format="kdump").core, core)
    with core.open("r+b") as file:
        file.seek(file.read(1 << 16).index(b"\nPAGESIZE=") + 1)
        file.write(b".")
        if of_note:
            # offset_vmcoreinfo and size_vmcoreinfo of struct kdump_sub_header
            file.seek(4096 + 32)
            file.write(bytes(16))
    capsys.readouterr()  # of the lab
    assert main(["stock", "-c", str(core)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "cannot be opened: the file is truncated or damaged: its VMCOREINFO is" in said.err
    assert said.err.count("\n") == 1
