# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Images on which the module ``fixtures/modules/charge`` made charges of known sizes.

The memcgs that it charges have no other charges, so the expected sums are plain arithmetic. The
module lists the address of each charge in a file, which the guest copies out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from support.guests import BUILT_KERNELS, ROOT, GuestImage, Lab

MODULE = (str(ROOT / "fixtures" / "modules" / "charge"), "")

#: Kernel and its options. Allocation profiling puts tags between the pointers to obj_cgroups.
GUESTS = [
    (kernel, append)
    for kernel, append in (
        ("6.12-lab", ""),
        ("7.3-lab", ""),
        ("6.12-lab", "sysctl.vm.mem_profiling=1"),
        ("7.3-lab", "sysctl.vm.mem_profiling=1"),
        ("7.3-lab", "sysctl.vm.mem_profiling=1,compressed"),
    )
    if kernel in BUILT_KERNELS
]

CPUS = 4  # on nodes 0 to 3, one each

PAGE = 4096

POINTER = 8

#: KFENCE takes an object out of its slab now and then.
NO_KFENCE = "kfence.sample_interval=0"


class Order(NamedTuple):
    """
    One line of orders to the module.

    :ivar expected: bytes by (kind, detail, node); node ``None`` if they may be on any node
    """

    line: str
    count: int
    expected: dict[tuple[str, str, int | None], int]


def slab(line: str, size: int) -> Order:
    """
    Objects of ``size`` bytes in their slab, each with a pointer beside it.

    :param line: kind, node, size and number
    """
    nid, count = int(line.split()[1]), int(line.split()[3])
    return Order(line, count, {("slab", "unreclaimable", nid): (size + POINTER) * count})


def pages(line: str, detail: str, order: int) -> Order:
    nid, count = int(line.split()[1]), int(line.split()[3])
    return Order(line, count, {("kmem", detail, nid): (PAGE << order) * count})


def percpu(size: int, count: int) -> Order:
    """Percpu memory on the node of each CPU, and a pointer for each four bytes of one CPU."""
    data = {("percpu", "data", nid): size * count for nid in range(CPUS)}
    return Order(
        f"percpu {size} 8 {count}",
        count,
        {**data, ("percpu", "metadata", None): size // 4 * POINTER * count},
    )


def vmalloc(size: int, count: int, nid: int) -> Order:
    """Whole pages on the node that the task runs on."""
    whole = -(-size // PAGE) * PAGE
    return Order(f"vmalloc -1 {size} {count}", count, {("kmem", "vmalloc", nid): whole * count})


@dataclass(frozen=True)
class Group:
    """A memcg, the node that its task runs on, and what the task asks for."""

    nid: int
    orders: tuple[Order, ...]

    def expected(self) -> dict[tuple[str, str, int | None], int]:
        total: defaultdict[tuple[str, str, int | None], int] = defaultdict(int)
        for order in self.orders:
            for key, size in order.expected.items():
                total[key] += size
        return dict(total)


def groups(kernel: str) -> dict[str, Group]:
    # Up to 6.12 large kmallocs cannot be told from other compound pages.
    order = 2 if kernel.startswith("7.") else 0
    return {
        "/many": Group(
            nid=2,
            orders=(
                slab("kmalloc 1 100 5", 128),
                slab("kmalloc 2 3000 3", 4096),
                slab("cache 1 0 7", 200),
                slab("cache 3 0 150", 200),
                pages("kmalloc 3 20000 2", "large_kmalloc", 3),
                pages("kmalloc 0 9000 1", "large_kmalloc", 2),
                pages(f"pages 3 {order} 3", "other", order),
                pages("pages 0 0 4", "other", 0),
                pages("block 1 5 2", "other", 5),
                pages("block 2 1 4", "other", 1),
                pages("block 3 3 1", "other", 3),
                percpu(4096, 2),
                percpu(8192, 1),
                vmalloc(100_000, 2, nid=2),
            ),
        ),
        "/few": Group(nid=0, orders=(slab("cache 3 0 11", 200), percpu(4096, 1))),
        "/none": Group(nid=1, orders=()),
    }


def script(wanted: dict[str, Group]) -> str:
    """
    Return the script for the guest. It opens every file before the task enters the memcg, so that
    only what the module makes is charged to it.
    """
    lines = ["set -e", "cd /sys/fs/cgroup", "echo +memory >cgroup.subtree_control"]
    for path, group in wanted.items():
        words = " ".join(f"'{order.line}'" for order in group.orders)
        lines += [
            f"mkdir .{path}",
            f"taskset {1 << group.nid:x} sh -c '",
            "\texec 7>/sys/kernel/debug/charge/make 8>$0/cgroup.procs",
            "\techo 0 >&8",
            f'\tfor line; do echo "$line" >&7; done\' .{path} {words}',
        ]
    return "\n".join(lines) + "\n"


def guest_image(lab: Lab, kernel: str, append: str, folder: Path) -> GuestImage:
    path = folder / "plant"
    path.write_text(script(groups(kernel)))
    append = f"{NO_KFENCE} {append}".strip()
    return lab.image(kernel, "4", "idle", modules=(MODULE,), run=str(path), append=append)


class Held(NamedTuple):
    """
    One line of what the module holds.

    :ivar address: of percpu memory, the pointer that :c:func:`per_cpu_ptr` takes
    """

    kind: str
    nid: int
    address: int


def held(image: GuestImage) -> list[Held]:
    text = (image.guest / "2/sys/kernel/debug/charge/held").read_text()
    lines = [line.split() for line in text.splitlines()]
    return [Held(kind, int(nid), int(address, 0)) for _, kind, nid, _, address, _ in lines]


def owners(wanted: dict[str, Group]) -> Iterator[tuple[str, Group]]:
    """Return the path and the group of each held charge, in the order in which they were made."""
    for path, group in wanted.items():
        for order in group.orders:
            yield from [(path, group)] * order.count


def call_sites() -> dict[str, str]:
    """Return, by kind, the file and line where the module allocates, from its source."""
    lines = (ROOT / "fixtures/modules/charge/charge.c").read_text().splitlines()
    calls = {
        "held": "kzalloc(", "kmalloc": "kmalloc_node(", "cache": "kmem_cache_alloc_node(",
        "pages": "alloc_pages_node(held->node, bound | __GFP_COMP",
        "block": "alloc_pages_node(held->node, bound, held",
        "percpu": "__alloc_percpu_gfp(", "vmalloc": "__vmalloc(",
    }  # fmt: skip
    found = {}
    for kind, call in calls.items():
        (found[kind],) = (
            f"charge.c:{number}" for number, line in enumerate(lines, 1) if f"= {call}" in line
        )
    return found
