# SPDX-License-Identifier: LGPL-2.1-or-later
"""``python -m memcg_inspect``."""

from memcg_inspect.cli import entry

entry()
