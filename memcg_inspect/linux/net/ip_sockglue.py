# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Tasks that read error queues
----------------------------

Mirrors ``ip_recv_error()`` of :linux:`net/ipv4/ip_sockglue.c`, ``ipv6_recv_error()`` and
``sock_recv_errqueue()``. They take a buffer off ``sk_error_queue``, copy it to user space, and
free it then. A page fault can make the task sleep meanwhile: the buffer is in no queue, and still
counted in ``sk_rmem_alloc``. The socket is not locked.
"""

from __future__ import annotations

from drgn import FaultError, Object, offsetof

from memcg_inspect.image.image import Image
from memcg_inspect.linux.kernel.sched import find_tasks
from memcg_inspect.linux.kernel.stacktrace_words import places_in, stack_of, unwind
from memcg_inspect.model import Coverage

__all__ = ("socks_with_error_readers",)

#: The callers of ``sock_dequeue_err_skb()`` for protocols that account memory.
_CALLERS = ("ip_recv_error", "ipv6_recv_error", "sock_recv_errqueue")


def socks_with_error_readers(image: Image, coverage: Coverage) -> set[int]:
    """
    Return the sockets whose error queues tasks are reading.

    The stacks of all tasks are searched for a return address into one of the callers. The socket,
    or a buffer that refers to it (``skb->sk``), is on the same stack.

    :param coverage: counts the tasks whose stacks are unreadable
    :return: ``struct sock *``, among other words of these stacks
    """
    memory, found = image.memory, set[int]()
    callers = places_in(image, _CALLERS)
    sk = offsetof(image.type("struct sk_buff"), "sk")

    def missed(error: FaultError) -> None:
        coverage.miss("stack of a task", error.address, str(error))

    for task in find_tasks(image, missed):
        try:
            words = _stack_words(image, task, callers)
        except FaultError as error:
            missed(error)
            continue
        for word in words:
            found.add(word)
            try:
                found.add(memory.word(word + sk))
            except FaultError:
                continue  # the word is not a pointer
    return found


def _stack_words(image: Image, task: Object, callers: frozenset[int]) -> set[int]:
    """
    Return the words on the stack of a task that is in one of *callers*; empty for other tasks.

    :param task: ``struct task_struct *``
    :raises drgn.FaultError: if the stack cannot be read
    """
    memory, (start, size) = image.memory, stack_of(image, task)
    if not start:
        return set()  # put_task_stack(): it has exited
    words = memory.words(memory.read(start, size))
    if callers.isdisjoint(words):
        return set()
    # What is below the stack pointer is left over from earlier calls.
    below = (_stack_pointer(image, task) - start) // memory.word_size
    if 0 < below < len(words):
        words = words[below:]
    if callers.isdisjoint(words):
        return set()
    return set(words)


def _stack_pointer(image: Image, task: Object) -> int:
    """Return the stack pointer of a task; 0 if it is not known."""
    try:
        return int(unwind(image, task)[0].sp)
    except (FaultError, LookupError, ValueError):
        return 0
