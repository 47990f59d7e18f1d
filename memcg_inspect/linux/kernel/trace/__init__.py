# SPDX-License-Identifier: LGPL-2.1-or-later
"""Readers that mirror ``kernel/trace/`` of the kernel."""
