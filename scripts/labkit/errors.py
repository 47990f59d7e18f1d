# SPDX-License-Identifier: LGPL-2.1-or-later
"""What the lab says when it cannot go on."""


class LabError(Exception):
    """A failure with a message for the person at the terminal, no traceback."""


class GuestError(LabError):
    """The guest did not do what was asked of it; the message shows its console."""
