# SPDX-License-Identifier: LGPL-2.1-or-later
"""A plugin of pytest that writes down which functions of the package the tests call.

`pytest -p labkit.called` writes the lines of these functions, by file, to the file that the
variable CALLED of the environment names. It sees calls in the first thread only, and none in other
processes.
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType

_CODES: set[CodeType] = set()


def _called(frame: FrameType, event: str, _argument: object) -> None:
    if event == "call":
        _CODES.add(frame.f_code)


def pytest_sessionfinish() -> None:
    """Write the lines of all functions that were called."""
    sys.setprofile(None)
    root, lines = Path.cwd(), defaultdict[str, set[int]](set)
    for code in _CODES:
        path = Path(code.co_filename)
        if path.is_relative_to(root):
            found = {line for _, _, line in code.co_lines() if line}
            lines[str(path.relative_to(root))] |= found
    Path(os.environ["CALLED"]).write_text(json.dumps({p: sorted(n) for p, n in lines.items()}))


sys.setprofile(_called)
