# SPDX-License-Identifier: LGPL-2.1-or-later
"""The program memcg-inspect, also as ``python -m memcg_inspect``."""

from __future__ import annotations

import sys

__all__ = ("entry",)


def entry() -> None:
    """Run the program memcg-inspect."""
    try:
        # Importing drgn takes long enough for a Ctrl-C.
        from memcg_inspect.cli import entry as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    entry()
