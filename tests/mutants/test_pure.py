# SPDX-License-Identifier: LGPL-2.1-or-later
"""Most small changes to the checks and to the rendering are noticed by a test."""

from __future__ import annotations

import pytest
from support.mutation import check_most_are_noticed


@pytest.mark.long
def test_most_mutants_are_noticed() -> None:
    check_most_are_noticed("pure")
