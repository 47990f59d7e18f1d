# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Judgement
---------

Pure functions over the nouns of :mod:`memcg_inspect.model`: the ledger of what was found,
the counters of what is claimed, the identities between them, and findings. Knows neither
drgn nor kernel memory.
"""
