# SPDX-License-Identifier: LGPL-2.1-or-later
"""The fuzzer runs every command."""

from __future__ import annotations

from fuzz.attempt import AUDIT, VIEWS

from memcg_inspect.names import COMMANDS


def test_every_command_is_tried() -> None:
    assert {AUDIT[0], *(view[0] for view in VIEWS)} == set(COMMANDS)
