# SPDX-License-Identifier: LGPL-2.1-or-later
"""Tests of many like things, of which the default run has time for some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Sampled:
    """
    What to test of many things: all, or one of so many.

    :param all: whether pytest was called with ``--all``
    """

    all: bool

    def __call__(self, things: Sequence[T], one_in: int) -> Sequence[T]:
        """Return the things to test: each, or every *one_in*-th."""
        return things if self.all else things[::one_in]
