# SPDX-License-Identifier: LGPL-2.1-or-later
"""Reports on dumps that kdump has left: which there are, what is written, and who is told."""
