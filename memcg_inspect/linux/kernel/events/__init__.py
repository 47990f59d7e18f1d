# SPDX-License-Identifier: LGPL-2.1-or-later
"""Readers that mirror ``kernel/events/`` of the kernel."""
