# SPDX-License-Identifier: LGPL-2.1-or-later
"""
memcg_inspect
-------------

Holds the kernel memory charged to Linux memory cgroups against the kernel's counters, to
the byte, in a vmcore or a running kernel.
"""

__version__ = "0.1.0"
