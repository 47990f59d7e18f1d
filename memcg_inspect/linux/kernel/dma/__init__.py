# SPDX-License-Identifier: LGPL-2.1-or-later
"""Readers that mirror ``kernel/dma/`` of the kernel."""
