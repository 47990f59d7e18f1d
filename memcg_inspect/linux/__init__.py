# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Readers of Linux kernel memory
------------------------------

The modules are named after the kernel sources that they mirror. All knowledge of kernel releases
and architectures is here. Readers find differences between releases from the types, never from a
version number, once for each :class:`~memcg_inspect.image.image.Image`. They return plain data,
or records of :mod:`memcg_inspect.model`.
"""
