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


@pytest.fixture
def core(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return a copy of a dump, to be damaged."""
    copy = tmp_path / "vmcore"
    shutil.copy(lab.image("7.3", "4", "mixed", format="kdump").core, copy)
    capsys.readouterr()  # of the lab
    return copy


def refusal(core: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command says of a dump that it refuses."""
    assert main(["stock", "-c", str(core)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


@pytest.mark.parametrize("also", [b"", b"SYMBOL(_stext)"])
def test_a_release_that_is_no_text(
    core: Path, capsys: pytest.CaptureFixture[str], also: bytes
) -> None:
    """What libkdumpfile says of it has the byte that is no text, and drgn decodes that."""
    with core.open("r+b") as file:
        head = file.read(1 << 16)
        file.seek(head.index(RELEASE) + len(RELEASE))
        file.write(b"\xff")
        file.seek(head.index(also))
        file.write(head[head.index(also) :][: len(also)].lower())
    said = refusal(core, capsys)
    assert said == "memcg-inspect: the dump cannot be read: its VMCOREINFO is damaged\n"


@pytest.mark.parametrize("of_note", [False, True])
def test_a_name_that_begins_with_a_dot(
    core: Path, capsys: pytest.CaptureFixture[str], of_note: bool
) -> None:
    """libkdumpfile would end by a signal, wherever it takes VMCOREINFO from."""
    with core.open("r+b") as file:
        file.seek(file.read(1 << 16).index(b"\nPAGESIZE=") + 1)
        file.write(b".")
        if of_note:
            # offset_vmcoreinfo and size_vmcoreinfo of struct kdump_sub_header
            file.seek(4096 + 32)
            file.write(bytes(16))
    said = refusal(core, capsys)
    assert "cannot be opened: the file is truncated or damaged: its VMCOREINFO is" in said
    assert said.count("\n") == 1
