# SPDX-License-Identifier: LGPL-2.1-or-later
"""Paths of the project and of the cache."""

import os
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent.parent
FIXTURES = PROJECT / "fixtures"


def cache() -> Path:
    """Return the folder of the cache, which holds everything fetched, built or made."""
    chosen = os.environ.get("MEMCG_INSPECT_CACHE")
    if chosen:
        return Path(chosen).absolute()
    return Path.home() / ".cache" / "memcg-inspect"


def cache_folder(*names: str) -> Path:
    """Return a folder inside the cache; make it if it is missing."""
    folder = cache().joinpath(*names)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
