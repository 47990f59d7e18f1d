# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Types from BTF
--------------

A kernel with ``CONFIG_DEBUG_INFO_BTF`` has its types in memory, in the BPF Type Format, and its
symbols in kallsyms. :func:`load_btf` registers them with a drgn program that has no debug info::

    >>> from memcg_inspect.btf import load_btf
    >>> load_btf(prog)

They are used only while drgn has no debug info for the kernel.
"""

from memcg_inspect.btf.api import StructNames, debug_info_source, load_btf, struct_names
from memcg_inspect.btf.parse import BtfError

__all__ = ("BtfError", "StructNames", "debug_info_source", "load_btf", "struct_names")
