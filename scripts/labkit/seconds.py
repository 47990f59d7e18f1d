# SPDX-License-Identifier: LGPL-2.1-or-later
"""A plugin of pytest that writes down how long each test takes.

`pytest -p labkit.seconds` writes the seconds by ID of the test to the file that the variable
SECONDS of the environment names.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

_SECONDS = Counter[str]()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add the time of one phase of a test."""
    _SECONDS[report.nodeid] += report.duration


def pytest_sessionfinish() -> None:
    """Write the times of all tests."""
    Path(os.environ["SECONDS"]).write_text(json.dumps(_SECONDS))
