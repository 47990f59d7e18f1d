# SPDX-License-Identifier: LGPL-2.1-or-later
"""Readers that mirror ``drivers/`` of the kernel."""
