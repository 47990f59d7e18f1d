# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Snapshots of charges: files with them, and what changed between them.

This package reads no kernel memory.
"""
