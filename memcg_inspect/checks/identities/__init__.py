# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identities
----------

One module for each identity. Its docstring states the equation, and its ``CHECK`` is the
definition (:class:`memcg_inspect.checks.check.Check`). :mod:`memcg_inspect.checks.registry`
lists them.
"""
