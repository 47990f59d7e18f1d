# SPDX-License-Identifier: LGPL-2.1-or-later
"""Opening an image and reading its memory."""
