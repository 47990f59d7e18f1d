# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Results of long measurements, kept in the cache.

They are kept by the code that they depend on: the program, the lab, and what plants and judges. A
commit that changes none of it, such as one of the documents, leaves them valid. So a measurement
that was interrupted goes on where it was.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from labkit import parts
from labkit.paths import PROJECT, cache_folder
from labkit.store import write_atomically

__all__ = ("begin", "code", "keep", "load")

_CODE = ("memcg_inspect", "scripts/labkit", "fixtures", "tests/support", "tests/fuzz")


@functools.cache
def code(*more: str) -> str | None:
    """
    Return a hash of the code at this commit; ``None`` if not everything is committed.

    :param more: paths that a measurement depends on, too
    """
    if parts.commit() is None:
        return None
    names = [f"HEAD:{path}" for path in (*_CODE, *more)]
    git = ["git", "-C", str(PROJECT), "rev-parse", *names]
    trees = subprocess.run(git, capture_output=True, check=True).stdout
    return hashlib.sha256(trees).hexdigest()[:24]


def begin(program: str) -> str:
    """
    Return the commit of the code that is measured, in words.

    Called before processes are forked, it makes all of them keep their results as of one code,
    whatever is committed meanwhile.
    """
    commit = parts.commit()
    if commit is None or code() is None:
        print(f"{program}: not everything is committed, so results are not kept", file=sys.stderr)
        return "with changes that are not committed"
    return commit[:12]


def _path(measurement: str, name: str) -> Path | None:
    at = code()
    if at is None:
        return None
    words = re.sub(r"[^\w.]+", "-", name)
    return cache_folder(measurement, at) / f"{words}.json"


def load(measurement: str, name: str) -> Any:
    """Return a result that was kept, as JSON has it; ``None`` if there is none."""
    path = _path(measurement, name)
    return json.loads(path.read_bytes()) if path is not None and path.exists() else None


def keep(measurement: str, name: str, result: Any) -> None:
    """Keep a result. A named tuple comes back as a list."""
    path = _path(measurement, name)
    if path is not None:
        write_atomically(path, json.dumps(result).encode())
