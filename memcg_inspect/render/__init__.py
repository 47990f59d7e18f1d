# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Renderers
---------

Reports and rows as text for a terminal and as JSON. Knows the nouns, no kernel.
"""
