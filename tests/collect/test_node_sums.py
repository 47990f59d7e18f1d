# SPDX-License-Identifier: LGPL-2.1-or-later
"""Pages of vmalloc areas and stacks, percpu memory and pages on LRU lists, added up by node."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
from drgn import Object, Program
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.mm import page_to_pfn
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import for_each_task
from drgn.helpers.linux.sched import idle_task
from support.guests import Lab
from support.reference import node_spans

from memcg_inspect.checks.ledger import Ledger
from memcg_inspect.collect.node_uses import NodeUses
from memcg_inspect.collect.partial import Partial
from memcg_inspect.collect.percpu import add_percpu, percpu_usage
from memcg_inspect.collect.zones import read_zone_counters
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.mm.mm_types import LruFlags, scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.percpu import PcpuArea, PercpuReader
from memcg_inspect.linux.mm.vmalloc import VmArea, vm_areas
from memcg_inspect.model import Coverage

pytestmark = pytest.mark.image


@pytest.fixture(scope="module")
def image(lab: Lab) -> Image:
    return image_of(lab.image("7.3", "4", "mixed").program())


def node_of(prog: Program, pfn: int) -> int:
    spans = sorted(node_spans(prog))
    return spans[bisect_right([start for start, _, _ in spans], pfn) - 1][2]


def of_areas(image: Image, areas: list[VmArea]) -> Counter[tuple[str, int]]:
    uses, found = NodeUses(image, areas, Coverage()), Counter[tuple[str, int]]()
    for piece in scan_pages(image):
        assert piece.raw is not None
        found.update(dict(uses.of(piece.raw)))
        # A piece with pages of several nodes has the node of each.
        nids = [piece.raw.nid(number) for number in range(piece.raw.columns.count)]
        assert +uses.of(piece.raw._replace(nids=nids)) == +uses.of(piece.raw)
    return +found


def stacks_of_tasks(prog: Program) -> list[Object]:
    """Return the areas of the stacks of tasks that have not exited."""
    idle = [idle_task(prog, cpu) for cpu in for_each_possible_cpu(prog)]
    tasks = [task for task in (*for_each_task(prog), *idle) if not task.exit_state]
    return [task.stack_vm_area for task in tasks if task.stack_vm_area]


def stacks_of_nobody(image: Image, areas: list[VmArea]) -> Iterator[tuple[bool, list[int]]]:
    """
    Return stacks that no task has, and that no CPU keeps for the next one.

    RCU may not have freed the stack of a task that has exited.

    :return: whether it is charged, and so counted, and its ``struct page *``
    """
    prog, used = image.prog, stacks_of_tasks(image.prog)
    cached = [per_cpu(prog["cached_stacks"], cpu) for cpu in for_each_possible_cpu(prog)]
    kept = [area for stacks in cached for area in stacks if area]
    known = {area.addr.value_() for area in (*used, *kept)}
    callers = {area.caller.value_() for area in used}
    for area in areas:
        if area.address not in known and area.caller in callers and len(area.pages) == 4:
            first = Object(prog, "struct page *", area.pages[0])
            yield bool(first.memcg_data & prog["MEMCG_DATA_KMEM"]), area.pages


def test_pages_of_areas_and_stacks(image: Image) -> None:
    """Each stack of a task has four pages; areas that are not counted are left out."""
    areas, frames = list(vm_areas(image, Coverage(), Coverage())), mem_map(image)
    counted = [area for area in areas if area.is_counted]
    expected: Counter[tuple[str, int]] = Counter(
        ("vmalloc", node_of(image.prog, frames.pfn(page)))
        for area in counted
        for page in area.pages
    )
    for area in stacks_of_tasks(image.prog):
        pages = [page_to_pfn(area.pages[number]).value_() for number in range(4)]
        expected.update(("stack", node_of(image.prog, page)) for page in pages)
    for is_charged, stack in stacks_of_nobody(image, areas):
        use = "stack" if is_charged else "unknown stack"
        expected.update((use, node_of(image.prog, frames.pfn(page))) for page in stack)
    found = of_areas(image, areas)
    assert found == expected
    assert len({nid for _, nid in found}) == 4
    # The same areas, as if none were counted, or if nobody knew who uses the stacks.
    others = [a._replace(is_counted=False, user="unknown" if a.is_stack else "") for a in areas]
    stacks = sum(len(area.pages) for area in areas if area.is_stack)
    found = of_areas(image, others)
    assert {use for use, _ in found} == {"unknown stack"}
    assert found.total() == stacks


def test_percpu_memory(image: Image) -> None:
    """An allocation is one charge, whatever the nodes of its copies and of its vector are."""
    ledger, reader, seen = Ledger(), PercpuReader(image), list[PcpuArea]()
    add_percpu(ledger, reader, None, seen.append)
    charges, data = Counter[int](), Counter[int]()
    for chunk in PercpuReader(image).chunks():
        for area in PercpuReader(image).charged(chunk):
            charges[area.objcg] += 1
            data[area.objcg] += area.size * len(reader.unit_offsets())
    found: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for entry, amount in ledger:
        found["charges"][entry.payer] += amount.charges
        found[entry.detail][entry.payer] += amount.bytes
        assert entry.kind == "percpu"
    assert found["charges"] == charges
    assert found["data"] == data
    # PCPU_MIN_ALLOC_SIZE is 4, and a pointer has 8 bytes.
    cpus = len(reader.unit_offsets())
    assert found["metadata"] == Counter({o: size // cpus // 4 * 8 for o, size in data.items()})
    assert sum(bool(area.objcg) for area in seen) == charges.total()
    assert not ledger.may_miss("percpu")
    usage = percpu_usage(ledger, reader)
    assert [row.nid for row in usage] == [0, 1, 2, 3]
    assert sum(row.charged for row in usage) == data.total()
    by_node = Counter[int]()
    for entry, amount in ledger:
        by_node[entry.nid] += amount.bytes if entry.detail == "data" else 0
    assert {row.nid: row.charged for row in usage} == by_node


def test_percpu_memory_that_could_not_all_be_read(image: Image) -> None:
    reader, ledger = PercpuReader(image), Ledger()
    reader.coverage.miss("percpu chunk", 0x1000, "not in the image")
    add_percpu(ledger, reader, None)
    assert ledger.may_miss("percpu")


#: A folio on a list of inactive pages of files.
FILE = LruFlags(True, False, False, False, 0)


@pytest.mark.parametrize(
    ("flags", "item"),
    [
        (FILE, "NR_ZONE_INACTIVE_FILE"),
        (FILE._replace(active=True), "NR_ZONE_ACTIVE_FILE"),
        (FILE._replace(swapbacked=True), "NR_ZONE_INACTIVE_ANON"),
        (FILE._replace(swapbacked=True, active=True), "NR_ZONE_ACTIVE_ANON"),
        (FILE._replace(unevictable=True, active=True), "NR_ZONE_UNEVICTABLE"),
    ],
)
def test_lists_that_zones_count(image: Image, flags: LruFlags, item: str) -> None:
    """The names are those of ``enum zone_stat_item``; who pays makes no difference to a zone."""
    total = Partial()
    total.lru = Counter({(7, 1, 2, flags): 3, (8, 1, 2, flags): 4, (8, 0, 2, flags): 5})
    total.zone_free, total.zone_pages = Counter({(0, 1, 2): 3}), Counter()
    zones = read_zone_counters(image, total, Coverage())
    assert zones.listed == {(1, 2, item): 7, (0, 2, item): 5}
    assert item in zones.totals
    assert zones.free == {(0, 1, 2): 3}
    assert not zones.has_generations
    total.lru[7, 1, 2, flags._replace(generation=3)] += 1
    assert read_zone_counters(image, total, Coverage()).has_generations
