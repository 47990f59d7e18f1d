# SPDX-License-Identifier: LGPL-2.1-or-later
"""What to say of an exception that nobody expected. Nothing else of the package needs to work."""

from __future__ import annotations

import traceback

from memcg_inspect import __version__
from memcg_inspect.escape import printable

__all__ = ("BUG", "traceback_lines")

#: What to say of an exception that is no :class:`~memcg_inspect.model.MemcgInspectError`.
BUG = (
    f"this is a bug in memcg-inspect {__version__}: please report it to its maintainers, with the "
    "lines above and the release of the kernel"
)
#: Frames of a traceback to print, the innermost ones.
_FRAMES = 8


def traceback_lines(error: Exception) -> str:
    """Return the last lines of the traceback of an error. Names from the image are escaped."""
    lines = "".join(traceback.format_exception(error, limit=-_FRAMES)).splitlines()
    return "".join(f"{printable(line)}\n" for line in lines)
