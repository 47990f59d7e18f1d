# SPDX-License-Identifier: LGPL-2.1-or-later
"""Readers that mirror ``io_uring/`` of the kernel."""
