# SPDX-License-Identifier: LGPL-2.1-or-later
"""The Python environment that `scripts/setup` makes."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from .paths import PROJECT

_PYTHON = PROJECT / ".venv" / "bin" / "python"


def enter() -> None:
    """
    Start the script again with the Python of `.venv`, if this one has no drgn.

    If there is no `.venv`, the script ends with a line that says what makes it.
    """
    if importlib.util.find_spec("drgn") is not None:
        return
    # Python is a link, and what it links to is not the environment.
    if _PYTHON.exists() and Path(sys.prefix) != _PYTHON.parent.parent:
        os.execv(_PYTHON, [str(_PYTHON), *sys.argv])
    print(f"{Path(sys.argv[0]).name}: drgn is missing: run scripts/setup", file=sys.stderr)
    sys.exit(2)
