# SPDX-License-Identifier: LGPL-2.1-or-later
"""Fixtures of the lab's own tests."""

from pathlib import Path

import pytest


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache, so that a test neither uses nor changes the real one."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MEMCG_INSPECT_CACHE", str(folder))
    return folder
