# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Diagnoses
---------

A fault in one place makes several rows differ. Each kind of fault is a cause with a signature:
what it adds to which rows, by the kernel's own arithmetic. A diagnosis is a cause in the smallest
set whose signatures add up to all rows that differ. :func:`diagnose` returns the diagnoses of a
report.
"""

from memcg_inspect.checks.diagnosis.diagnose import diagnose

__all__ = ("diagnose",)
