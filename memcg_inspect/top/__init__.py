# SPDX-License-Identifier: LGPL-2.1-or-later
"""A live view of memcgs, on a terminal."""
