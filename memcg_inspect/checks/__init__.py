# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Checks
------

Pure functions over the records of :mod:`memcg_inspect.model`: the ledger of charges that were
found, the counters, the identities between them (:mod:`memcg_inspect.checks.identities`), and
findings. This layer imports neither drgn nor readers of kernel memory.
"""
