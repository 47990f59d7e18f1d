# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Notes for crash dumps
---------------------

Mirrors ``crash_save_vmcoreinfo_init()`` of :linux:`kernel/vmcore_info.c`, up to 6.8 of
:linux:`kernel/crash_core.c`.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.model import Coverage

__all__ = ("vmcoreinfo_pages",)


def vmcoreinfo_pages(image: Image, coverage: Coverage) -> Iterator[int]:
    """
    Iterate over the pages with VMCOREINFO: its text, and the ELF note made of it.

    :param coverage: counts what is unreadable
    :return: addresses of the first bytes
    """
    for name in ("vmcoreinfo_data", "vmcoreinfo_note"):
        try:
            yield image.memory.word(image.symbol(name).address)
        except UnknownKernelError:
            continue  # CONFIG_VMCORE_INFO=n
        except FaultError as error:
            coverage.miss(name, error.address, str(error))
