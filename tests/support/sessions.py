# SPDX-License-Identifier: LGPL-2.1-or-later
"""Real drgn sessions on images."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time

from support.guests import GuestImage


def converse(image: GuestImage, *lines: str) -> list[str]:
    """Type lines into a real drgn session; return what each of them printed."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "drgn", "-c", str(image.core), "--no-default-symbols", "-q"]
    environment = os.environ | {"TERM": "dumb", "PYTHON_BASIC_REPL": "1", "COLUMNS": "200"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True
    ) as process:
        os.close(theirs)
        # drgn begins with lines of its own that look as if they were typed
        wait_for(ours, "import *\r\n>>> ")
        said = []
        for line in lines:
            os.write(ours, line.encode() + b"\n")
            said.append(wait_for(ours, "\r\n>>> ").partition("\n")[2])
        os.write(ours, b"exit()\n")
        wait_for(ours, None)
        process.wait(timeout=30)
    os.close(ours)
    return [answer.removesuffix(">>> ").replace("\r", "").strip() for answer in said]


def wait_for(terminal: int, prompt: str | None) -> str:
    """Read until a prompt is shown, or until the session ends."""
    shown, end = "", time.monotonic() + 90
    while prompt is None or not shown.endswith(prompt):
        ready, _, _ = select.select([terminal], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"no answer after: {shown}"
        try:
            data = os.read(terminal, 65536)
        except OSError:
            break
        if not data:
            break
        shown += data.decode(errors="replace")
    return shown
