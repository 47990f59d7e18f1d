# SPDX-License-Identifier: LGPL-2.1-or-later
"""Readers of what the sources in :linux:`block` and :linux:`drivers/block` define."""
