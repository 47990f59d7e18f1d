# SPDX-License-Identifier: LGPL-2.1-or-later
"""Images of guests that profile allocations, and the guests' own ``/proc/allocinfo``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from support.guests import BUILT_KERNELS, GuestImage, Lab

#: Kernel, and what it was booted with.
GUESTS = [
    (kernel, append)
    for kernel, append in (
        ("7.3-lab", "sysctl.vm.mem_profiling=1"),
        ("7.3-lab", "sysctl.vm.mem_profiling=1,compressed"),
        ("6.12-lab", "sysctl.vm.mem_profiling=1"),
    )
    if kernel in BUILT_KERNELS
]


def guest_image(lab: Lab, kernel: str, append: str) -> GuestImage:
    return lab.image(kernel, "4", "mixed", append=append)


class Line(NamedTuple):
    """One line of ``/proc/allocinfo``."""

    bytes: int
    calls: int
    file: str
    line: int
    module: str | None
    function: str
    accurate: bool


_LINE = re.compile(r" *(-?\d+) +(\d+) ([^ ]+):(\d+) (?:\[([^ ]+)\] )?func:([^ ]+)( accurate:no)? ")


def parse(text: str) -> tuple[str, list[Line]]:
    """Parse the text of the file; return its version and its lines."""
    first, second, *rest = text.splitlines()
    assert second == "#     <size>  <calls> <tag info>"
    lines = []
    for text_line in rest:
        found = _LINE.fullmatch(text_line)
        assert found is not None, text_line
        size, calls, file, line, module, function, mark = found.groups()
        lines.append(Line(int(size), int(calls), file, int(line), module, function, not mark))
    return first.removeprefix("allocinfo - version: "), lines


def said(image: GuestImage, when: int) -> tuple[str, list[Line]]:
    """Return version and lines of one of the copies that the guest made of the file."""
    return parse((image.guest / f"{when}/proc/allocinfo").read_text())


#: Functions that allocate for the task that read the file in the guest: the task, its stack,
#: credentials and signals; its open files and the buffer of allocinfo; its address space and page
#: tables. The task existed at both times, and is gone when the guest is frozen.
RECORDER = {
    "alloc_pid", "alloc_task_exec_state", "alloc_task_struct_node", "alloc_thread_stack_node",
    "copy_fs_struct", "copy_sighand", "copy_signal", "dup_fd", "prepare_creds",
    "__get_vm_area_node", "__alloc_empty_sheaf",
    "alloc_empty_file", "allocinfo_start", "proc_reg_open", "__seq_open_private",
    "seq_buf_alloc", "seq_open",
    "anon_vma_alloc", "anon_vma_chain_alloc", "dup_mm", "mm_alloc", "mt_alloc_bulk",
    "mt_alloc_one", "vm_area_alloc", "vm_area_dup", "vma_lock_alloc",
    "__p4d_alloc", "__pmd_alloc", "__pud_alloc", "folio_prealloc", "pte_alloc_one",
    "_pgd_alloc", "__percpu_counter_init_many",
}  # fmt: skip
#: So many other lines may move and move back between two copies: the guest's init writes files, and
#: what RCU, workers and batches of CPUs free late (memory policies, ``kvfree_rcu()``) is freed at
#: any time.
MOVED_LINES = 8


def check_against_guest(found: list[Line], copies: Sequence[list[Line]]) -> None:
    """
    Check that the lines that are the same in all copies are the same at the freeze, except for
    those of the task that read the file, and a few of what the guest does by itself.

    :param copies: what the guest said, before the freeze and after it
    """
    assert all([line[2:6] for line in found] == [line[2:6] for line in copy] for copy in copies)
    pairs = [
        (line, first)
        for line, first, *others in zip(found, *copies, strict=True)
        if all(other == first for other in others) and line.function not in RECORDER
    ]
    moved = [(line, last) for line, last in pairs if line != last]
    assert len(moved) <= MOVED_LINES, moved
    assert sum(line.calls > 0 for line, _ in pairs) - len(moved) >= 400
