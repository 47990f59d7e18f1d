# SPDX-License-Identifier: LGPL-2.1-or-later
"""Most small changes to the readers and to the collection are noticed by a test of images."""

from __future__ import annotations

import pytest
from support.mutation import check_most_are_noticed


@pytest.mark.long
@pytest.mark.image
def test_most_mutants_are_noticed() -> None:
    check_most_are_noticed("readers")
