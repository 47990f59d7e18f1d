# SPDX-License-Identifier: LGPL-2.1-or-later
"""Files of a guest's cgroups, copied twice before the guest was frozen."""

from __future__ import annotations

from pathlib import Path

from support.guests import GuestImage

#: The most memcgs with memory that is freed just before the freeze, and those above them. What
#: stood still for seconds may be freed by then, e.g. by a callback of RCU.
MOST_MOVED = 8

Said = dict[tuple[str, str, int | None], int]  # (path, name, node)


def path_of(file: Path, folder: Path) -> str:
    return "/" + str(file.parent.relative_to(folder)).removeprefix(".")


def numbers(folder: Path, name: str) -> Said:
    """Read a file of every memcg, of lines like ``name value`` or ``name N0=value N1=value``."""
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
    """Return the values that are the same in both copies."""
    first, second = (numbers(image.guest / which / "cgroup", name) for which in "12")
    return {key: value for key, value in second.items() if first.get(key) == value}


def still_current(image: GuestImage) -> dict[str, int]:
    """Return the memory.current of memcgs that is the same in both copies, in bytes."""
    first, second = (
        {
            path_of(file, image.guest / which / "cgroup"): int(file.read_text())
            for file in (image.guest / which / "cgroup").rglob("memory.current")
        }
        for which in "12"
    )
    return {path: size for path, size in second.items() if first[path] == size}


def still_slabinfo(image: GuestImage) -> dict[str, tuple[int, int]]:
    """
    Return the active objects and their size, by cache, of /proc/slabinfo.

    Caches are left out that are not the same in both copies.
    """
    first, second = (
        {
            words[0]: (int(words[1]), int(words[3]))
            for words in map(str.split, file.read_text().splitlines()[2:])
        }
        for file in (image.guest / which / "proc/slabinfo" for which in "12")
    )
    return {cache: value for cache, value in second.items() if first.get(cache) == value}


#: Items of the root that change after the second copy: memory of the guest's own programs. The one
#: that copies may still exit when the guest is frozen.
MOVES_IN_ROOT = {
    "anon", "anon_thp", "file", "shmem", "file_mapped", "active_anon", "inactive_anon",
    "pagetables", "kernel", "pgfault",
}  # fmt: skip
