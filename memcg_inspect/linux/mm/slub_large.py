# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Large kmallocs of the kernel
----------------------------

``kmalloc()`` of more than a slab holds takes a compound page (``___kmalloc_large_node()`` of
:linux:`mm/slub.c`). Since v6.15, its ``struct page`` has the type ``large_kmalloc``. On older
kernels nothing marks it, so some that every machine has are found through the variables that refer
to them.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, offsetof, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.lib.list import OnFault, idr_entries, list_entries
from memcg_inspect.model import Coverage

__all__ = ("large_kmallocs",)

#: Pointers to tables: of TCP (:linux:`net/ipv4/tcp_metrics.c`), of kernfs
#: (:linux:`fs/kernfs/mount.c`), and of vmalloc areas (:linux:`mm/vmalloc.c`).
_POINTERS = ("tcp_metrics_hash", "kernfs_locks", "vmap_nodes")
#: Members of ``struct btf`` that are arrays of one element for each type, or copies of the data.
_BTF_MEMBERS = ("types", "resolved_ids", "resolved_sizes", "data")


def large_kmallocs(image: Image, coverage: Coverage) -> Iterator[int]:
    """
    Iterate over memory of the kernel that can be a large kmalloc.

    :param coverage: counts what is unreadable
    :return: addresses of the first bytes. Memory of slabs, of vmalloc areas and of the kernel's
        image can be among it.
    """

    def missed(error: FaultError) -> None:
        coverage.miss("large kmallocs", error.address, str(error))

    for name in _POINTERS:
        try:
            yield image.memory.word(image.symbol(name).address)
        except UnknownKernelError:
            continue
        except FaultError as error:
            missed(error)
    yield from _of_btf(image, missed)
    yield from _of_bpf(image, missed)
    yield from _of_serial(image, missed)


def _of_btf(image: Image, missed: OnFault) -> Iterator[int]:
    """Return the arrays of each ``struct btf`` (:linux:`kernel/bpf/btf.c`)."""
    try:
        idr, type_ = image.object("btf_idr"), image.type("struct btf")
    except UnknownKernelError:
        return  # CONFIG_BPF_SYSCALL=n
    members = [offsetof(type_, name) for name in _BTF_MEMBERS]
    for btf in idr_entries(image, "struct btf", idr, missed):
        try:
            data = image.memory.read(btf.value_(), sizeof(type_))
        except FaultError as error:
            missed(error)
            continue
        for member in members:
            yield image.memory.word_at(data, member)


def _of_bpf(image: Image, missed: OnFault) -> Iterator[int]:
    """Return the ``struct bpf_prog_pack``: which parts of a huge page BPF programs have."""
    if not has_type(image, "struct bpf_prog_pack"):
        return
    try:
        packs = image.object("pack_list").address_of_()
    except UnknownKernelError:
        return  # CONFIG_BPF_JIT=n
    for pack in list_entries(image, "struct bpf_prog_pack", packs, "list", missed):
        yield pack.value_()


def _of_serial(image: Image, missed: OnFault) -> Iterator[int]:
    """Return the states of serial ports (:linux:`drivers/tty/serial/8250/8250_core.c`)."""
    try:
        yield image.object("serial8250_reg").state.value_()
    except UnknownKernelError:
        return  # CONFIG_SERIAL_8250=n
    except FaultError as error:
        missed(error)
