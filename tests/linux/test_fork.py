# SPDX-License-Identifier: LGPL-2.1-or-later
"""Kernel stacks that CPUs keep for new tasks. Those of tasks are planted where they are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from drgn import Object, Program
from drgn.helpers.linux.mm import page_to_pfn
from drgn.helpers.linux.mmzone import for_each_online_pgdat
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import for_each_task
from support.guests import DEBIAN_KERNELS, Lab
from support.made_memory import MadeMemory
from support.planting import Overlay, Write

from memcg_inspect.image.image import Image
from memcg_inspect.linux.kernel import fork
from memcg_inspect.linux.kernel.fork import caches_stacks, read_cached_stacks
from memcg_inspect.linux.mm.mmzone import possible_cpus
from memcg_inspect.model import Coverage
from memcg_inspect.model_tasks import CachedStackPage

#: ``LIST_POISON1`` of include/linux/poison.h: no address.
POISON = 0xDEAD000000000100
#: ``NR_CACHED_STACKS``, and the size of a stack in pages (x86-64, arm64).
SLOTS, PAGES = 2, 4

on_images = [
    pytest.mark.image,
    pytest.mark.each_kernel,
    pytest.mark.parametrize("kernel", DEBIAN_KERNELS),
]


@pytest.fixture
def overlay(lab: Lab, kernel: str) -> Iterator[Overlay]:
    """The memory of an image in which no CPU keeps a stack."""
    overlay = Overlay(lab.image(kernel, "4", "mixed").program())
    for cpu in range(4):
        for n in range(SLOTS):
            overlay.write((keep(overlay.prog, cpu, n, 0),))
    yield overlay
    overlay.clear()


def keep(prog: Program, cpu: int, n: int, area: int) -> Write:
    """Let a CPU keep a stack."""
    slot = per_cpu(prog["cached_stacks"], cpu)[n]
    return Write(slot.address_ or 0, area.to_bytes(8, "little"))


def charged(prog: Program) -> Object:
    """Return the area of a stack that a memcg pays for."""
    return next(
        t.stack_vm_area
        for t in for_each_task(prog)
        if t.mm and t.pid > 1 and t.stack_vm_area.pages[0].memcg_data.value_()
    )


def nid_of(page: Object) -> int:
    """Return the node whose range of page frames a page is in."""
    pfn = page_to_pfn(page)
    for node in for_each_online_pgdat(page.prog_):
        if node.node_start_pfn <= pfn < node.node_start_pfn + node.node_spanned_pages:
            return int(node.node_id)
    raise AssertionError


def read(prog: Program) -> tuple[list[CachedStackPage], Coverage]:
    coverage = Coverage()
    return list(read_cached_stacks(Image(prog), coverage)), coverage


class TestOnImages:
    pytestmark = on_images

    def test_each_slot_of_each_cpu(self, overlay: Overlay) -> None:
        prog = overlay.prog
        cpus = list(possible_cpus(Image(prog)))
        pages, coverage = read(prog)
        assert pages == []
        assert (coverage.read, coverage.unreadable) == (len(cpus), 0)
        area = charged(prog)
        stack = [area.pages[n] for n in range(PAGES)]
        # MEMCG_DATA_KMEM is in the lowest bits.
        expected = [(page.value_(), nid_of(page), page.memcg_data.value_() & ~7) for page in stack]
        for cpu, slot in ((0, 1), (3, 0)):
            overlay.write((keep(prog, cpu, slot, area.value_()),))
            pages, coverage = read(prog)
            assert pages == [CachedStackPage(cpu, *page) for page in expected]
            overlay.write((keep(prog, cpu, slot, 0),))

    def test_a_stack_that_is_missing(self, overlay: Overlay) -> None:
        prog, area = overlay.prog, charged(overlay.prog)
        cpus = list(possible_cpus(Image(prog)))
        overlay.write((keep(prog, 1, 0, POISON), keep(prog, 2, 1, area.value_())))
        pages, coverage = read(prog)
        assert {page.cpu for page in pages} == {2}
        assert len(pages) == PAGES
        assert (coverage.read, coverage.unreadable) == (len(cpus) - 1, 1)
        assert coverage.examples[0].what == "cached stack"

    def test_a_stack_that_a_new_task_takes_meanwhile(
        self, overlay: Overlay, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """alloc_thread_stack_node() takes it from the CPU, before the stack is charged."""
        prog, area = overlay.prog, charged(overlay.prog)
        overlay.write((keep(prog, 1, 0, area.value_()),))
        image, coverage = Image(prog), Coverage()
        assert {page.cpu for page in read_cached_stacks(image, coverage)} == {1}
        original = fork.kernel_payers

        def payers(*given: Any) -> Mapping[int, tuple[int, int]]:
            overlay.write((keep(prog, 1, 0, 0),))
            return original(*given)

        monkeypatch.setattr(fork, "kernel_payers", payers)
        assert list(read_cached_stacks(image, coverage)) == []
        assert coverage.unreadable == 0


def test_a_kernel_that_keeps_no_stacks() -> None:
    """Without CONFIG_VMAP_STACK."""
    made, coverage = MadeMemory(), Coverage()
    assert not caches_stacks(made.image)
    assert list(read_cached_stacks(made.image, coverage)) == []
    assert (coverage.read, coverage.unreadable) == (0, 0)
