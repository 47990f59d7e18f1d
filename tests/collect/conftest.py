# SPDX-License-Identifier: LGPL-2.1-or-later
"""Fixtures of several files of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.guests import Lab
from support.page_board import Board


@pytest.fixture(scope="module")
def of_module(lab: Lab) -> Board:
    """A board that tests of a file share; each clears it."""
    return Board(lab.image("7.3", "4", "mixed").own_program())


@pytest.fixture
def board(of_module: Board) -> Iterator[Board]:
    of_module.clear()
    yield of_module
