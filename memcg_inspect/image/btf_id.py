# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Types by BTF id
---------------

Some structures of the kernel name a type by its id in the kernel's BTF (``BTF_ID()`` of
:linux:`include/linux/btf_ids.h`). The ids are resolved with BTF also if the types of a program are
from DWARF.
"""

from __future__ import annotations

from memcg_inspect.btf import StructNames, struct_names
from memcg_inspect.image.image import Image, per_image

__all__ = ("struct_of_btf_id",)


def struct_of_btf_id(image: Image, number: int) -> str | None:
    """
    Return the name of a structure, without ``struct``.

    :param number: its id in the BTF of the kernel
    :return: ``None`` if it is not a structure, or the kernel has no BTF
    """
    return _names(image)(number)


@per_image
def _names(image: Image) -> StructNames:
    return struct_names(image.prog)
