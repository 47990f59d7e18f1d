# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Views
-----

Each answers one question that people ask of an image, with typed rows.
"""
