# SPDX-License-Identifier: LGPL-2.1-or-later
"""The lab's own tests: pure pieces purely, and a few real boots."""

import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(PROJECT / "scripts"))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, so that a test neither uses nor alters the real one."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MEMCG_INSPECT_CACHE", str(folder))
    return folder


def pytest_configure(config: pytest.Config) -> None:
    # also declared above this folder, where the option --all is, too
    config.addinivalue_line("markers", "long: runs only with --all")
    config.addinivalue_line("markers", "each_kernel: on fewer kernels without --all")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all", default=False):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]
