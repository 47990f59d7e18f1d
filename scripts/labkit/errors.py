# SPDX-License-Identifier: LGPL-2.1-or-later
"""Errors of the lab."""


class LabError(Exception):
    """An error whose message is printed without a traceback."""


class GuestError(LabError):
    """An error in the guest. The message contains the end of its console."""


class BootError(GuestError):
    """A guest whose init did not start."""


class StaleCodeError(GuestError):
    """A CPU of the guest ran code that another CPU had patched. That is QEMU's fault.

    The kernel patches the code of a static key by way of a breakpoint (smp_text_poke_single()).
    Under TCG, a CPU may run the breakpoint when the kernel no longer expects it.
    """
