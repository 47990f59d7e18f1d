# SPDX-License-Identifier: LGPL-2.1-or-later
"""Copies of the project, in which the source is changed and tests run."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .paths import PROJECT
from .run import ending_all

#: Memory of a test, which changed source may make ask for any amount.
_MOST_MEMORY = 6 << 30


def copy_project(tree: Path) -> None:
    """Copy all files that git knows, or would know."""
    git = ["git", "-C", str(PROJECT), "ls-files", "-co", "--exclude-standard", "-z"]
    for name in subprocess.check_output(git, text=True).split("\0"):
        if name and (PROJECT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / name, tree / name)


def pytest(
    tree: Path,
    words: Sequence[str],
    variables: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> int | None:
    """
    Run tests in a copy, up to the first that fails.

    :param words: arguments of pytest
    :param variables: added to the environment
    :param timeout: in seconds
    :return: the exit status of pytest; ``None`` if it did not end in time
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    # Of the test that runs this program, if one does.
    inherited = {name: v for name, v in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    places = os.pathsep.join((str(tree), str(tree / "scripts")))
    with ending_all(
        [*command, "--hypothesis-seed=0", *words],
        cwd=tree,
        env={**inherited, "PYTHONPATH": places, **(variables or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY,) * 2),
    ) as process:
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
