# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Many dumps
----------

Audits any number of dumps, on this machine or on the workers of dask, and sums up what was found.
"""
