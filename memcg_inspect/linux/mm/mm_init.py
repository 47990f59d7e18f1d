# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Hash tables whose size follows that of memory
---------------------------------------------

Mirrors ``alloc_large_system_hash()`` of :linux:`mm/mm_init.c`, up to 6.3 of
:linux:`mm/page_alloc.c`. On machines with one node, such a table is a range of pages
(``alloc_pages_exact()``). On others, it is a vmalloc area (``hashdist``). Tables that are made
early are from memblock, and so reserved.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, Object, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import array_length, has_type, member_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import Coverage

__all__ = ("hash_tables",)

#: Tables of namespaces, of routes (``ip_idents`` and ``ip_tstamps``) and of MPTCP: variables with
#: the address and the mask, and the size or the type of an entry.
_MASKED: tuple[tuple[str, str, int | str], ...] = (
    ("mount_hashtable", "m_hash_mask", "struct hlist_head"),
    ("mountpoint_hashtable", "mp_hash_mask", "struct hlist_head"),
    ("ip_idents", "ip_idents_mask", 4),
    ("ip_tstamps", "ip_idents_mask", 4),
    ("token_hash", "token_mask", "struct token_bucket"),
)
#: Tables of sockets: the variable, and members with the address and the mask.
_OF_SOCKETS = (
    ("tcp_hashinfo", "ehash", "ehash_mask"),
    ("tcp_hashinfo", "lhash2", "lhash2_mask"),
    *(("udp_table", hash_, "mask") for hash_ in ("hash", "hash2", "hash4")),
    *(("udplite_table", hash_, "mask") for hash_ in ("hash", "hash2")),
)


def hash_tables(image: Image, coverage: Coverage) -> Iterator[int]:
    """
    Iterate over the pages of the tables that are known.

    :param coverage: counts the tables that were read, and those that are unreadable
    :return: the address of each page. Tables can be in vmalloc areas, and in reserved memory.
    """
    step = mem_map(image).page_size
    orders = array_length(member_type(image.type("struct zone"), "free_area"))
    for read in (_masked, _of_sockets, _of_futexes):
        try:
            for start, size in read(image):
                coverage.read += 1
                # A larger one is a vmalloc area.
                if size <= step << orders - 1:
                    yield from range(start, start + size, step)
        except FaultError as error:
            coverage.miss("hash table", error.address, str(error))


def _masked(image: Image) -> Iterator[tuple[int, int]]:
    """
    Return address and size of tables that are variables by themselves.

    :raises drgn.FaultError: if one cannot be read
    """
    for name, mask, entry in _MASKED:
        try:
            start = image.memory.word(image.symbol(name).address)
            data = image.memory.read(image.symbol(mask).address, 4)
            size = entry if isinstance(entry, int) else sizeof(image.type(entry))
        except UnknownKernelError:
            continue  # the kernel has no such table
        yield start, (int.from_bytes(data, image.memory.order) + 1) * size


def _of_sockets(image: Image) -> Iterator[tuple[int, int]]:
    """
    Return address and size of tables of sockets.

    :raises drgn.FaultError: if one cannot be read
    """
    for name, member, mask in _OF_SOCKETS:
        try:
            tables = image.object(name)
        except UnknownKernelError:
            continue
        if tables.type_.has_member(member):
            yield _sized(tables.member_(member), int(tables.member_(mask)) + 1)
    try:
        tcp = image.object("tcp_hashinfo")
    except UnknownKernelError:
        return  # CONFIG_INET=n
    # The second half of one table since 6.1.
    for member in ("bhash", "bhash2"):
        if tcp.type_.has_member(member):
            yield _sized(tcp.member_(member), int(tcp.bhash_size))


def _sized(table: Object, entries: int) -> tuple[int, int]:
    return table.value_(), entries * sizeof(table.type_.type)


def _of_futexes(image: Image) -> Iterator[tuple[int, int]]:
    """
    Return address and size of the table of futexes, up to 6.15: since then, there is one by node.

    :raises drgn.FaultError: if it cannot be read
    """
    try:
        at = image.symbol("__futex_data").address
    except UnknownKernelError:
        return
    if has_type(image, "struct futex_private_hash"):
        return  # since 6.16
    start, entries = image.memory.words(image.memory.read(at, 2 * image.memory.word_size))
    yield start, entries * sizeof(image.type("struct futex_hash_bucket"))
