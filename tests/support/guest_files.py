# SPDX-License-Identifier: LGPL-2.1-or-later
"""What the files of a guest said, read twice before the guest was frozen."""

from __future__ import annotations

from pathlib import Path

from support.guests import GuestImage

Said = dict[tuple[str, str, int | None], int]  # (path, name, node)


def path_of(file: Path, folder: Path) -> str:
    return "/" + str(file.parent.relative_to(folder)).removeprefix(".")


def numbers(folder: Path, name: str) -> Said:
    """A file of lines like ``name value`` or ``name N0=value N1=value``, of every memcg."""
    values: Said = {}
    for file in folder.rglob(name):
        path = path_of(file, folder)
        for line in file.read_text().splitlines():
            item, *words = line.split()
            for word in words:
                node, _, value = word.rpartition("=")
                nid = int(node.removeprefix("N")) if node else None
                values[path, item, nid] = int(value)
    return values


def still(image: GuestImage, name: str) -> Said:
    """What the guest said twice."""
    first, second = (numbers(image.guest / which / "cgroup", name) for which in "12")
    return {key: value for key, value in second.items() if first.get(key) == value}


#: The guest's own programs run in the root, and this is their memory: it moves after the last
#: reading.
MOVES_IN_ROOT = {
    "anon", "file", "shmem", "file_mapped", "active_anon", "inactive_anon", "pagetables",
    "kernel", "pgfault",
}  # fmt: skip
