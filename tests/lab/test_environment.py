# SPDX-License-Identifier: LGPL-2.1-or-later
"""Scripts need nothing but the system's Python to find the environment of the project."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from labkit import environment
from support.guests import ROOT

BARE = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def needing_drgn() -> list[str]:
    """Return the names of all scripts in Python that use the environment, and `lab`."""
    texts = {path.name: path.read_text() for path in (ROOT / "scripts").iterdir() if path.is_file()}
    return sorted(n for n, text in texts.items() if n == "lab" or "environment.enter()" in text)


@pytest.mark.parametrize("name", needing_drgn())
def test_a_script_without_the_environment(name: str) -> None:
    words = ["gate", "--list"] if name == "lab" else ["--help"]
    command = ["/usr/bin/python3", ROOT / "scripts" / name, *words]
    done = subprocess.run(
        command, env={**BARE, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_no_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says what makes it."""
    monkeypatch.setattr(environment, "_PYTHON", tmp_path / "python")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["scripts/fuzz"])
    with pytest.raises(SystemExit) as ended:
        environment.enter()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "fuzz: drgn is missing: run scripts/setup\n"
