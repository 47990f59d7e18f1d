# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Types without debug info
------------------------

A kernel built with ``CONFIG_DEBUG_INFO_BTF`` carries its types, in the BPF Type Format, and
its symbols. :func:`load_btf` makes drgn use them, in any session::

    >>> from memcg_inspect.btf import load_btf
    >>> load_btf(prog)

Debug info always comes first: as soon as drgn has some for the kernel, BTF is silent.
"""

from memcg_inspect.btf.api import debug_info_source, load_btf
from memcg_inspect.btf.parse import BtfError

__all__ = ("BtfError", "debug_info_source", "load_btf")
