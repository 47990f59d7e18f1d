# SPDX-License-Identifier: LGPL-2.1-or-later
"""The lab: real kernels, real machines, real images of their memory.

Only the standard library is needed, but `poke` needs drgn and pyelftools, and
`--format kdump` pyelftools. Start with
:mod:`labkit.cli` for the commands, :mod:`labkit.kernels` for the kernels there
are, and :mod:`labkit.machine` for how one is booted and spoken to.
"""
