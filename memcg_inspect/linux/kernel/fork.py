# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Cached kernel stacks
--------------------

Mirrors ``cached_stacks`` of :linux:`kernel/fork.c`. With ``CONFIG_VMAP_STACK``, each CPU keeps a
few stacks of tasks that have exited for new tasks. ``memcg_charge_kernel_stack()`` charges a stack
after it was taken from the cache, and ``exit_task_stack_account()`` uncharges it before it is put
there.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, offsetof
from drgn.helpers.linux.percpu import per_cpu_ptr

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import array_length
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.memcg_data import kernel_payers
from memcg_inspect.linux.mm.mmzone import mem_map, possible_cpus
from memcg_inspect.linux.mm.vmalloc import thread_size
from memcg_inspect.model import Coverage
from memcg_inspect.model_tasks import CachedStackPage

__all__ = ("caches_stacks", "read_cached_stacks")


def caches_stacks(image: Image) -> bool:
    """Return whether the kernel caches stacks: it does with ``CONFIG_VMAP_STACK``."""
    try:
        image.object("cached_stacks")
    except UnknownKernelError:
        return False
    return True


def read_cached_stacks(image: Image, coverage: Coverage) -> Iterator[CachedStackPage]:
    """
    Iterate over the pages of all cached stacks.

    :param coverage: counts the CPUs that were read, and what is unreadable
    """
    if not caches_stacks(image):
        return
    variable = image.object("cached_stacks").address_of_()
    for cpu in possible_cpus(image):
        try:
            cached = per_cpu_ptr(variable, cpu)[0]
            for i in range(array_length(cached.type_)):
                yield from _pages(image, cpu, int(cached[i].address_ or 0))
            coverage.read += 1
        except FaultError as error:
            coverage.miss("cached stack", error.address, str(error))


def _pages(image: Image, cpu: int, pointer: int) -> list[CachedStackPage]:
    """
    Read the pages of a cached stack.

    :param pointer: address of the ``struct vm_struct *``
    :return: empty if there is no stack, or if a task of a running kernel took it meanwhile
    """
    memory, struct = image.memory, image.type("struct vm_struct")
    area = memory.word(pointer)
    if not area:
        return []
    count = thread_size(image) // mem_map(image).page_size
    pages = memory.word(area + offsetof(struct, "pages"))
    found = kernel_payers(image, memory.words(memory.read(pages, count * memory.word_size)))
    if memory.word(pointer) != area:
        return []
    return [CachedStackPage(cpu, page, nid, objcg) for page, (objcg, nid) in found.items()]
