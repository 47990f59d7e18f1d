# SPDX-License-Identifier: LGPL-2.1-or-later
"""Physical addresses: the tree of resources, as kernel/resource.c links it."""

from __future__ import annotations

import re

import pytest
from drgn import FaultError
from support.guests import ARCH, DEBIAN_KERNELS, Lab
from support.layouts import MadeImage

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.kernel import resource
from memcg_inspect.linux.kernel.resource import MemoryResource, memory_resources, system_ram

AT, NAMES = 0xFFFFFFFF82000000, 0xFFFFFFFF83000000
MISSING = 0xFFFF888077700000
#: ``IORESOURCE_MEM`` and ``IORESOURCE_SYSTEM_RAM``.
DEVICE, RAM = 0x200, 0x01000200

#: Number of a resource: first and last address, flags, numbers of its sibling and its first child.
TREE: dict[int, tuple[int, int, int, int, int]] = {
    0: (0, (1 << 52) - 1, DEVICE, 0, 1),
    1: (0x1000, 0x9FBFF, RAM, 2, 0),
    2: (0xA0000, 0xFFFFF, DEVICE, 3, 5),
    3: (0x100000, 0x7FFFFFF, RAM, 4, 6),
    4: (0x8000001, 0x9000FFF, RAM, 8, 0),
    5: (0xF0000, 0xFFFFF, DEVICE, 0, 0),
    6: (0x1000000, 0x1FFFFFF, DEVICE, 0, 7),  # Kernel code
    7: (0x1200000, 0x12FFFFF, RAM, 0, 0),  # memory that is part of other memory
    8: (0xA000800, 0xA0017FE, RAM, 9, 0),  # less than a whole page
    9: (0x9001000, 0x9FFFFFF, RAM, 10, 0),  # continues number 4
    10: (0x9002000, 0x9003FFF, RAM, 0, 0),  # is in number 9, where it should not be
}


def machine(tree: dict[int, tuple[int, int, int, int, int]]) -> MadeImage:
    image = MadeImage()
    image.declare(
        """
        struct resource { unsigned long start; unsigned long end; char *name;
            unsigned long flags; unsigned long desc;
            struct resource *parent; struct resource *sibling; struct resource *child; };
        """
    )
    image.variable("iomem_resource", "struct resource", AT)
    for number, (start, end, flags, sibling, child) in tree.items():
        fields = {"start": start, "end": end, "flags": flags, "name": NAMES + 16 * number}
        fields |= {"sibling": AT + 64 * sibling} if sibling else {}
        fields |= {"child": AT + 64 * child} if child else {}
        image.make("struct resource", AT + 64 * number, fields)
        image.write(NAMES + 16 * number, f"name {number}\0".encode())
    return image


def test_all_resources_are_found_parents_first() -> None:
    found = list(memory_resources(machine(TREE)))
    order = [resource.name for resource in found]
    assert set(found) == {
        MemoryResource(f"name {n}", start, end + 1, flags == RAM, n in (6, 7))
        for n, (start, end, flags, _, _) in TREE.items()
        if n
    }
    assert len(found) == len(TREE) - 1
    for parent, child in ((2, 5), (3, 6), (6, 7)):
        assert order.index(f"name {parent}") < order.index(f"name {child}")


def test_memory_is_rounded_to_whole_pages_and_joined() -> None:
    """
    memblock_region_memory_base_pfn() rounds up, and ..._end_pfn() down.

    Numbers 4 and 9 are one range of memblock, so the large page that has the border is memory.
    """
    assert system_ram(machine(TREE), 12) == [(1, 0x9F), (0x100, 0x8000), (0x8001, 0xA000)]
    assert system_ram(machine(TREE), 16) == [(1, 9), (0x10, 0x800), (0x801, 0xA00)]


def test_memory_that_is_split_inside_a_page_is_memory() -> None:
    """Up to 6.14: data of the boot loader, at any byte, see e820__reserve_setup_data()."""
    tree = {
        0: (0, (1 << 52) - 1, DEVICE, 0, 1),
        1: (0x100000, 0x8000017, RAM, 2, 0),
        2: (0x8000018, 0x8012657, RAM, 3, 0),
        3: (0x8012658, 0x9FFF7FF, RAM, 4, 0),
        4: (0x9FFF801, 0xAFFFFFF, RAM, 0, 0),  # a byte is missing before it
    }
    assert system_ram(machine(tree), 12) == [(0x100, 0x9FFF), (0xA000, 0xB000)]


def test_a_machine_without_resources() -> None:
    assert list(memory_resources(machine({0: (0, 99, DEVICE, 0, 0)}))) == []
    assert system_ram(machine({0: (0, 99, DEVICE, 0, 0)}), 12) == []


def test_a_resource_without_a_name() -> None:
    image = machine(TREE)
    image.words(AT + 64 + 16, 0)
    assert next(memory_resources(image)).name == ""


@pytest.mark.parametrize(("number", "to"), [(9, 1), (7, 6), (5, 2), (1, 1)])
def test_a_tree_with_a_circle(number: int, to: int) -> None:
    image = machine(TREE)
    image.words(AT + 64 * number + 48, AT + 64 * to)
    with pytest.raises(FaultError, match="^the tree of resources does not end"):
        list(memory_resources(image))


def test_more_resources_than_any_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resource._MOST_RESOURCES == 256 * 1024
    monkeypatch.setattr(resource, "_MOST_RESOURCES", len(TREE) - 1)
    assert len(list(memory_resources(machine(TREE)))) == len(TREE) - 1
    monkeypatch.setattr(resource, "_MOST_RESOURCES", len(TREE) - 2)
    with pytest.raises(FaultError, match="^the tree of resources does not end"):
        list(memory_resources(machine(TREE)))


def test_a_tree_that_is_not_in_the_image() -> None:
    image = machine(TREE)
    image.words(AT + 64 * 9 + 48, MISSING)
    with pytest.raises(FaultError):
        list(memory_resources(image))


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS if ARCH == "amd64" else ())
def test_memory_is_that_of_the_log(lab: Lab, kernel: str) -> None:
    """The kernel says the memory of each node when it boots."""
    image = lab.image(kernel)
    log = (image.guest / "2/dmesg").read_text()
    said = sorted(
        (int(start, 16) >> 12, int(end, 16) + 1 >> 12)
        for start, end in re.findall(r"node +\d+: \[mem 0x(\w+)-0x(\w+)\]", log)
    )
    joined: list[list[int]] = []
    for start, end in said:
        if joined and joined[-1][1] == start:
            joined[-1][1] = end
        else:
            joined.append([start, end])
    assert system_ram(image_of(image.program()), 12) == [tuple(one) for one in joined]
