# SPDX-License-Identifier: LGPL-2.1-or-later
"""A plugin of pytest that lets coverage.py see the programs that the tests start, too.

They read the file that COVERAGE_RCFILE names. COVERAGE_PROCESS_START must not be set before pytest
starts: it would be measured twice.
"""

import os


def pytest_configure() -> None:
    """Start coverage.py in each Python that begins from now on."""
    os.environ["COVERAGE_PROCESS_START"] = os.environ["COVERAGE_RCFILE"]
