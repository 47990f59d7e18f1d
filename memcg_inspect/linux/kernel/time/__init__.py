# SPDX-License-Identifier: LGPL-2.1-or-later
"""Readers of structures of ``kernel/time/``."""
