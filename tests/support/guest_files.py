# SPDX-License-Identifier: LGPL-2.1-or-later
"""Files of a guest's cgroups, copied twice before the guest was frozen, and once after it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from support.guests import GuestImage

#: Folders of the copies: two before the guest was frozen, and one when it ran on.
COPIES = "123"

Said = dict[tuple[str, str, int | None], int]  # (path, name, node)
_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


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


def in_all(copies: Iterable[Mapping[_Key, _Value]]) -> dict[_Key, _Value]:
    """Return what all copies have, with the same value."""
    first, *others = copies
    return {
        key: value
        for key, value in first.items()
        if all(other.get(key) == value for other in others)
    }


def still(image: GuestImage, name: str) -> Said:
    """Return the values that are the same in all copies, and so were when the guest was frozen."""
    return in_all(numbers(image.guest / which / "cgroup", name) for which in COPIES)


#: Lines of memory.numa_stat that are pages on LRU lists.
LISTS = ("inactive_anon", "active_anon", "inactive_file", "active_file", "unevictable")


def still_on_lists(image: GuestImage) -> dict[tuple[str, int], int]:
    """
    Return the bytes on all LRU lists of each memcg and node, without the root.

    A memcg of which one list changed between the copies is left out.
    """
    lists: dict[tuple[str, int], list[int]] = {}
    for (path, item, nid), value in still(image, "memory.numa_stat").items():
        if item in LISTS and nid is not None and path != "/":
            lists.setdefault((path, nid), []).append(value)
    return {key: sum(values) for key, values in lists.items() if len(values) == len(LISTS)}


def still_current(image: GuestImage) -> dict[str, int]:
    """Return the memory.current of memcgs that is the same in all copies, in bytes."""
    return in_all(
        {
            path_of(file, image.guest / which / "cgroup"): int(file.read_text())
            for file in (image.guest / which / "cgroup").rglob("memory.current")
        }
        for which in COPIES
    )


def still_slabinfo(image: GuestImage) -> dict[str, tuple[int, int]]:
    """
    Return the active objects and their size, by cache, of /proc/slabinfo.

    Caches are left out that are not the same in all copies.
    """
    return in_all(
        {
            words[0]: (int(words[1]), int(words[3]))
            for words in map(str.split, file.read_text().splitlines()[2:])
        }
        for file in (image.guest / which / "proc/slabinfo" for which in COPIES)
    )


#: Items of the root that change after the second copy: memory of the guest's own programs. The one
#: that copies may still exit when the guest is frozen.
MOVES_IN_ROOT = {
    "anon", "anon_thp", "file", "shmem", "file_mapped", "active_anon", "inactive_anon",
    "pagetables", "kernel", "pgfault",
}  # fmt: skip
