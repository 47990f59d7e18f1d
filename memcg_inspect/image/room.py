# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Room on file systems
--------------------

How many bytes a copy of a dump may take, and a file that takes no more. What a dump says of its
size may be wrong on purpose, so the bytes that are written are counted.
"""

from __future__ import annotations

import errno
import os

from memcg_inspect.model import ImageError

__all__ = ("NoRoomError", "Output", "room")

#: What is left free on a file system: a part of it, and this many bytes at most.
_RESERVE_SHARE, _MOST_RESERVE = 20, 1 << 30

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NoRoomError(ImageError):
    """
    There is no room for a copy of a dump.

    :ivar needed: bytes that the copy takes at least
    """

    def __init__(self, needed: int) -> None:
        super().__init__(f"there is no room for {needed:,} bytes")
        self.needed = needed


def room(folder: str) -> int:
    """
    Return how many bytes a new file in a folder may take.

    :raises OSError: if there is no such folder
    """
    found = os.statvfs(folder)
    reserve = min(found.f_blocks * found.f_frsize // _RESERVE_SHARE, _MOST_RESERVE)
    return max(0, found.f_bavail * found.f_frsize - reserve)


class Output:
    """
    A new file, which is written anywhere, in any order.

    :ivar descriptor: file descriptor that is open for writing
    :ivar most: bytes that may be written
    :ivar written: bytes that were written so far
    """

    def __init__(self, descriptor: int, most: int) -> None:
        self.descriptor = descriptor
        self.most = most
        self.written = 0

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """
        Write bytes.

        :param offset: where in the file
        :raises NoRoomError: if there is no room for them
        """
        self.written += len(data)
        if self.written > self.most:
            raise NoRoomError(self.written)
        left = memoryview(data)
        try:
            while left:
                written = os.pwrite(self.descriptor, left, offset)
                left, offset = left[written:], offset + written
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise NoRoomError(self.written) from None
            raise

    def end_at(self, size: int) -> None:
        """
        Set the size of the file. What was not written reads as zeroes.

        :raises NoRoomError: if a file cannot be that large
        """
        try:
            os.ftruncate(self.descriptor, size)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise NoRoomError(size) from None
            raise
