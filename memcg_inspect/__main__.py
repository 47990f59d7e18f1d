# SPDX-License-Identifier: LGPL-2.1-or-later
"""The program memcg-inspect, also as ``python -m memcg_inspect``."""

from __future__ import annotations

import sys

__all__ = ("entry",)


def entry() -> None:
    """Run the program memcg-inspect."""
    try:
        # Importing drgn takes long enough for a Ctrl-C.
        import signal

        from memcg_inspect.cli import main

        status = main(sys.argv[1:])
        # Python would print a traceback of a Ctrl-C while it exits. There is nothing left to do.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(status)


if __name__ == "__main__":
    entry()
