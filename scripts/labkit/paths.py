# SPDX-License-Identifier: LGPL-2.1-or-later
"""Where things are: the project's own files, and the cache."""

import os
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent.parent
FIXTURES = PROJECT / "fixtures"


def cache() -> Path:
    """The folder that holds everything fetched or built."""
    chosen = os.environ.get("MEMCG_INSPECT_CACHE")
    if chosen:
        return Path(chosen).absolute()
    return Path.home() / ".cache" / "memcg-inspect"


def cache_folder(*names: str) -> Path:
    """A folder inside the cache, made when it is not there."""
    folder = cache().joinpath(*names)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
