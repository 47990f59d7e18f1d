# SPDX-License-Identifier: LGPL-2.1-or-later
"""Shared parts of the tests."""
