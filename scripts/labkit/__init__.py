# SPDX-License-Identifier: LGPL-2.1-or-later
"""The lab boots real kernels in QEMU and takes images of their memory.

It needs only the standard library, but `poke` needs drgn and pyelftools, and `--format kdump`
needs pyelftools. Start with :mod:`labkit.cli` for the commands, :mod:`labkit.kernels` for the
kernels, and :mod:`labkit.machine` for how a guest is booted.
"""
