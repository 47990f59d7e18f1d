# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``user_pages`` must name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from drgn import Object

from memcg_inspect.checks.identities.user_pages import ITEMS, has_nodes
from memcg_inspect.linux.mm.mm_types import page_layout, scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from support.planting import Fault, NoVictim, Planter, Subject, Write

_LARGEST = 5_000
#: What collapse_file() does not move up to 6.19.
_OF_FILES = ("NR_FILE_PAGES", "NR_SHMEM")


def _counter(item: str) -> Planter:
    """Return a planter that changes a CPU's part of a counter of a memcg with user pages."""

    def plant(subject: Subject, size: int) -> Fault:
        if item not in subject.snapshot.features.items:
            raise NoVictim(f"the kernel does not count {item}")
        if item in _OF_FILES and subject.snapshot.user_pages.may_have_collapsed_files:
            raise NoVictim(f"khugepaged ran, and on this kernel it makes {item} wrong")
        path, nid = subject.largest("lru")
        where = nid if has_nodes(subject.snapshot, item) else None
        write = subject.add(subject.percpu_counter(path, item, where), size)
        return Fault((write,), (path,), {(path, where, item, size)})

    return Planter(f"a CPU's part of {item}", plant, (3, -1, _LARGEST))


#: What a page must be for its state to be changed.
_Kind = Literal["anon", "file"]


def _page(subject: Subject, kind: _Kind, flags: int) -> tuple[Object, str, int]:
    """
    Return a small folio of a victim, the victim, and the node of the folio.

    :param flags: page flags, of which it has none
    """
    victims, layout = set(subject.victims()), page_layout(subject.image)
    frames, memory = mem_map(subject.image), subject.image.memory
    page = subject.prog.type("struct page")
    mapping, mapcount = page.member("mapping"), page.member("_mapcount")
    for piece in scan_pages(subject.image):
        raw = piece.raw
        if raw is None or not {subject.path(p.payer) for p in piece.lru if p.payer} & victims:
            continue
        for i, word in enumerate(memory.words(raw.data, layout.memcg_data, frames.size)):
            data = raw.data[i * frames.size : (i + 1) * frames.size]
            is_single = not layout.head.is_set(data) and not layout.tail.is_set(data)
            if not word or not is_single or not layout.lru.is_set(data):
                continue
            where = memory.word_at(data, mapping.bit_offset // 8)
            mapped = memory.word_at(data, mapcount.bit_offset // 8) & 0xFFFFFFFF
            wanted = where & 1 and not mapped if kind == "anon" else where and not where & 3
            has = memory.word_at(data, frames.flags) & flags
            if wanted and not has and subject.path(word) in victims:
                found = subject.object("struct page *", raw.page + i * frames.size)
                return found, subject.path(word), raw.nid(i)
    raise NoVictim(f"no memcg has a small folio of kind {kind}")


def _flag(subject: Subject, page: Object, name: str) -> Write:
    """Set a page flag."""
    bit, word = subject.prog[name].value_(), page.value_() + mem_map(subject.image).flags
    return subject.put(word, subject.image.memory.word(word) | 1 << bit)


def _with_flag(kind: _Kind, flag: str, *items: str) -> Callable[[Subject, int], Fault]:
    def plant(subject: Subject, size: int) -> Fault:
        page, path, nid = _page(subject, kind, 1 << subject.prog[flag].value_())
        kept = [item for item in items if item in subject.snapshot.features.items]
        named = {
            (path, nid if has_nodes(subject.snapshot, item) else None, item, -1) for item in kept
        }
        return Fault((_flag(subject, page, flag),), (path,), named)

    return plant


def _not_mapped(subject: Subject, size: int) -> Fault:
    page, path, nid = _page(subject, "anon", 0)
    write = subject.put(page._mapcount, -1)
    return Fault((write,), (path,), {(path, nid, "NR_ANON_MAPPED", 1)})


def _left_the_file(subject: Subject, size: int) -> Fault:
    page, path, nid = _page(subject, "file", 0)
    named: set[tuple[str, int | None, str, int | None]] = {(path, None, "NR_FILE_PAGES", 1)}
    bit = subject.prog["PG_swapbacked"].value_()
    if subject.image.memory.word(page.value_() + mem_map(subject.image).flags) >> bit & 1:
        named.add((path, nid, "NR_SHMEM", 1))
    return Fault((subject.put(page.mapping, 0),), (path,), named)


PLANTERS = tuple(_counter(item) for item in ITEMS)
#: Faults of the pages themselves. The identity names them, but no cause that diagnoses know.
PAGES = (
    Planter("a page is written", _with_flag("anon", "PG_writeback", "NR_WRITEBACK")),
    Planter("a page is in the swap cache", _with_flag("anon", "PG_swapcache", "NR_SWAPCACHE")),
    Planter("a page has no mapcount", _not_mapped),
    Planter("a page has no file", _left_the_file),
)
