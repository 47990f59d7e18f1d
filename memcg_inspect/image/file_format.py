# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Formats of files
----------------

What a file is, by the bytes that it begins with. Of one that is no dump, the libraries that read
dumps only say what it is not.
"""

from __future__ import annotations

from memcg_inspect.elf import MAGIC
from memcg_inspect.image.compressed import compression_of
from memcg_inspect.image.flattened import MAGIC as FLATTENED
from memcg_inspect.model import ImageError

__all__ = ("HEAD", "check_format", "is_dump")

_KDUMP = (b"KDUMP   ", b"DISKDUMP")
#: The first page of a dump in the kdump format has its header.
HEAD = _LEAST_KDUMP = 4096
_TAR_AT = 257


def is_dump(start: bytes) -> bool:
    """
    Return whether a file begins as a dump that drgn opens.

    :param start: its first :data:`HEAD` bytes
    """
    return start.startswith((MAGIC, *_KDUMP))


def check_format(path: str) -> None:
    """
    Check that a file may be a dump, or a dump that is flattened or compressed.

    :param path: path of the file
    :raises ImageError: if it is not; the message says what it is, and what to do
    """
    with open(path, "rb") as file:
        start = file.read(_LEAST_KDUMP)
    if start.startswith(b"PK\x03\x04"):
        raise ImageError(f"{path} is a zip archive: unpack it first (unzip)")
    if start[_TAR_AT:].startswith(b"ustar"):
        raise ImageError(f"{path} is a tar archive: unpack it first (tar -x)")
    if not start:
        raise ImageError(
            f"{path} is empty: copy it again; if the original is empty, too, there was no room "
            "where it was written"
        )
    if start.startswith(_KDUMP):
        if len(start) < _LEAST_KDUMP:
            raise ImageError(
                f"{path} is truncated: it has {len(start):,} bytes, which is less than the header "
                "of a dump: copy it again; if the original has the same size, there was no room "
                "where it was written"
            )
    elif not (is_dump(start) or start.startswith(FLATTENED) or compression_of(start)):
        raise ImageError(
            f"{path} is neither an ELF core nor a dump of makedumpfile: give the vmcore that "
            "kdump, makedumpfile or dump-guest-memory of QEMU wrote"
        )
