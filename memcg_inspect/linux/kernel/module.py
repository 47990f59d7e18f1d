# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Modules
-------

Mirrors ``struct module`` of :linux:`kernel/module/main.c`.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import Object

from memcg_inspect.image.image import Image
from memcg_inspect.image.strings import text
from memcg_inspect.linux.lib.list import list_entries, raise_fault

__all__ = ("foreign_modules", "has_module")

#: ``TAINT_PROPRIETARY_MODULE`` and ``TAINT_OOT_MODULE``.
_FOREIGN = 1 << 0 | 1 << 12


def foreign_modules(image: Image) -> Iterator[str]:
    """
    Return the names of loaded modules that were not built with the kernel (out-of-tree modules).

    :raises drgn.FaultError: if a module cannot be read
    :raises UnknownKernelError: if the kernel has no modules (``CONFIG_MODULES=n``)
    """
    for module in _modules(image):
        if int(module.taints) & _FOREIGN:
            yield text(module.name.string_())


def has_module(image: Image, name: bytes) -> bool:
    """
    Return whether a module is loaded.

    :raises drgn.FaultError: if a module cannot be read
    :raises UnknownKernelError: if the kernel has no modules (``CONFIG_MODULES=n``)
    """
    return any(module.name.string_() == name for module in _modules(image))


def _modules(image: Image) -> Iterator[Object]:
    """
    Walk the ``struct module *`` of all modules.

    :raises drgn.FaultError: if the list is broken
    """

    head = image.object("modules").address_of_()
    return list_entries(image, "struct module", head, "list", raise_fault)
