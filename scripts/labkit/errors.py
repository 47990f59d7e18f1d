# SPDX-License-Identifier: LGPL-2.1-or-later
"""Errors of the lab."""


class LabError(Exception):
    """An error whose message is printed without a traceback."""


class GuestError(LabError):
    """An error in the guest. The message contains the end of its console."""
