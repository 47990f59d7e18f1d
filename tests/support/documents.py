# SPDX-License-Identifier: LGPL-2.1-or-later
"""JSON documents, as a strict parser reads them."""

from __future__ import annotations

import json
from typing import Any


def strictly(text: str) -> dict[str, Any]:
    """Parse a document. ``NaN`` and infinite numbers are not JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    loaded: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return loaded
