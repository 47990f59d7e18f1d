# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Diagnoses
---------

A fault in one place makes several rows differ. Each kind of fault is a cause with a signature:
what it adds to which rows, by the kernel's own arithmetic. A diagnosis is a cause in the smallest
set whose signatures add up to all rows that differ. :func:`diagnose` returns the diagnoses of a
report, and :func:`half_done_charges` the causes of rows in flight, which are no faults.
"""

from memcg_inspect.checks.diagnosis.diagnose import diagnose
from memcg_inspect.checks.diagnosis.half_done import half_done_charges

__all__ = ("diagnose", "half_done_charges")
