# SPDX-License-Identifier: LGPL-2.1-or-later
"""Write the format of an initramfs: cpio "newc" (Documentation/driver-api/early-userspace)."""

import os
import stat
from pathlib import Path


class Cpio:
    """An archive. Parent folders of a file are added automatically."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._inode = 0
        self._folders: set[str] = set()

    def _entry(self, name: str, mode: int, content: bytes = b"", device: int = 0) -> None:
        self._inode += 1
        fields = [
            self._inode, mode, 0, 0, 1, 0, len(content), 0, 0,
            os.major(device), os.minor(device), len(name.encode()) + 1, 0,
        ]  # fmt: skip
        self._data += b"070701" + b"".join(b"%08X" % value for value in fields)
        self._data += name.encode() + b"\0"
        self._pad()
        self._data += content
        self._pad()

    def _pad(self) -> None:
        self._data += b"\0" * (-len(self._data) % 4)

    def _parents(self, name: str) -> None:
        for parent in reversed(Path(name).parents[:-1]):
            self.folder(str(parent))

    def folder(self, name: str) -> None:
        """Add a folder, unless it is there."""
        name = name.strip("/")
        if name not in self._folders:
            self._parents(name)
            self._folders.add(name)
            self._entry(name, stat.S_IFDIR | 0o755)

    def file(self, name: str, content: bytes, mode: int = 0o644) -> None:
        """Add a file."""
        name = name.strip("/")
        self._parents(name)
        self._entry(name, stat.S_IFREG | mode, content)

    def link(self, name: str, target: str) -> None:
        """Add a symbolic link."""
        name = name.strip("/")
        self._parents(name)
        self._entry(name, stat.S_IFLNK | 0o777, target.encode())

    def character_device(self, name: str, major: int, minor: int) -> None:
        """Add a character device. The kernel opens /dev/console before init runs."""
        self._parents(name)
        self._entry(name, stat.S_IFCHR | 0o600, device=os.makedev(major, minor))

    def finish(self) -> bytes:
        """Return the archive."""
        self._inode = 0
        self._entry("TRAILER!!!", 0)
        return bytes(self._data) + b"\0" * (-len(self._data) % 512)
