# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Rendering
---------

Reports and tables as text and as JSON. This package depends on the data model only.
"""
