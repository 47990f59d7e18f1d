# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Formats of files
----------------

What a file is that is no dump, by the bytes that it begins with. The libraries that read dumps only
say what it is not.
"""

from __future__ import annotations

from memcg_inspect.elf import MAGIC
from memcg_inspect.model import ImageError

__all__ = ("check_format",)

_KDUMP = (b"KDUMP   ", b"DISKDUMP")
#: Of a dump that makedumpfile wrote to a pipe (``-F``).
_FLATTENED = b"makedumpfile\0\0\0\0"

#: How a file begins, what wrote it, and what undoes that.
_COMPRESSED = (
    (b"\x1f\x8b", "gzip", "gunzip"),
    (b"\xfd7zXZ\0", "xz", "unxz"),
    (b"BZh", "bzip2", "bunzip2"),
    (b"\x28\xb5\x2f\xfd", "zstd", "unzstd"),
    (b"\x04\x22\x4d\x18", "lz4", "unlz4"),
)
#: The first page of a dump in the kdump format has its header.
_LEAST_KDUMP = 4096
_TAR_AT = 257


def check_format(path: str) -> None:
    """
    Check that a file may be a dump.

    :param path: path of the file
    :raises ImageError: if it is not; the message says what it is, and what to do
    """
    with open(path, "rb") as file:
        start = file.read(_LEAST_KDUMP)
    for magic, program, undo in _COMPRESSED:
        if start.startswith(magic):
            raise ImageError(f"{path} is compressed by {program}: decompress it first ({undo})")
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
    elif not start.startswith((MAGIC, _FLATTENED)):
        raise ImageError(
            f"{path} is neither an ELF core nor a dump of makedumpfile: give the vmcore that "
            "kdump, makedumpfile or dump-guest-memory of QEMU wrote"
        )
