# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Readers of Linux kernel memory
------------------------------

One module for each kernel source it mirrors. All knowledge of kernel versions
and of architectures lives here; a difference is found from the types, once for
each :class:`drgn.Program`, and handed on as plain offsets. Readers return plain
data or nouns of :mod:`memcg_inspect.model`.
"""
