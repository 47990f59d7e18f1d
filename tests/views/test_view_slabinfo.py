# SPDX-License-Identifier: LGPL-2.1-or-later
"""
``slabinfo`` is compared with the guest's memory.numa_stat and /proc/slabinfo, a plain walk of
all objects, and the allocations of a module.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest
from drgn import FaultError, Program
from drgn.helpers.linux.percpu import per_cpu_ptr
from support.charge_module import PAGE, guest_image
from support.guest_files import still, still_slabinfo
from support.guests import BUILT_KERNELS, KERNELS, PERNODE_KERNELS, GuestImage, Lab
from support.reference import plain_slabs
from support.views import number, rows

from memcg_inspect.image.image import image_of
from memcg_inspect.image.memory import Memory
from memcg_inspect.linux.mm.kfence import kfence_pages
from memcg_inspect.linux.mm.memcontrol_stock import read_obj_stocks
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.slab import SlabReader
from memcg_inspect.model import Coverage
from memcg_inspect.tables import Choice, NotRead, choose
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.slabinfo import LARGE_KMALLOC, slabinfo

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]

ALL = (*KERNELS, *PERNODE_KERNELS)


def is_below(path: str, top: str) -> bool:
    return path == top or path.startswith(top.rstrip("/") + "/")


@pytest.mark.parametrize("kernel", ALL)
def test_sums_are_what_the_guest_read(lab: Lab, kernel: str) -> None:
    check_sums(lab.image(kernel, "4", "mixed"))


def check_sums(image: GuestImage) -> None:
    """Counters do not include what stocks hold, so that is subtracted from the amount found."""
    prog = image.program()
    charged: Counter[tuple[str, bool, int | None]] = Counter()
    for row in rows(slabinfo(image_of(prog), by_node=True)):
        if row["memcg"] is not None:
            where = str(row["memcg"]), bool(row["reclaimable"])
            charged[(*where, number(row, "node"))] += number(row, "charged")
    payers = Payers(image_of(prog))
    for held in read_obj_stocks(image_of(prog), Coverage()):
        path = str(payers.path(payers.payer(held.objcg)))
        charged[path, True, held.nid] -= held.reclaimable
        charged[path, False, held.nid] -= held.unreclaimable
    compared = 0
    for (path, name, nid), value in still(image, "memory.numa_stat").items():
        if name in ("slab_reclaimable", "slab_unreclaimable"):
            found = sum(
                size
                for (where, reclaimable, node), size in charged.items()
                if is_below(where, path) and (reclaimable, node) == (name[5] == "r", nid)
            )
            assert (path, name, nid, found) == (path, name, nid, value)
            compared += value > 0
    assert compared > 60


@pytest.mark.parametrize("kernel", ["7.2"])
def test_objects_of_kfence_are_charged_all_the_same(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "4", "mixed", append="kfence.sample_interval=1")
    check_sums(image)
    prog = image.program()
    pool, slabs, given = kfence_pages(image_of(prog)), SlabReader(image_of(prog)), Counter[str]()
    for piece in scan_pages(image_of(prog)):
        for page in piece.slabs:
            slab = slabs.slab(page)
            if slab is not None and slab.page in pool and slab.charged:
                given[slab.cache.name] += sum(slab.charged.values())
    assert given
    # They are in no slab of their cache: a plain walk of these finds all others.
    plain, apart = Plain(prog), Counter[str]()
    for row in rows(slabinfo(image_of(prog), by_node=True)):
        if row["memcg"] is None or row["cache"] == LARGE_KMALLOC:
            continue
        key = row["memcg_address"], str(row["cache"]), number(row, "node")
        apart[str(row["cache"])] += number(row, "objects") - plain.objects[key]
        if row["utilisation"] is not None:
            slabs = plain.slabs[key]
            inside, room = sum(count for count, *_ in slabs), sum(room for _, room, _ in slabs)
            assert row["utilisation"] == inside / room
    assert +apart == given


@pytest.mark.parametrize("kernel", ALL)
def test_caches_are_those_of_proc_slabinfo(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "4", "mixed")
    objects, sizes = Counter[str](), {}
    for row in rows(slabinfo(image_of(image.program()), by_node=True)):
        if row["cache"] != LARGE_KMALLOC:
            objects[str(row["cache"])] += number(row, "objects")
            sizes[str(row["cache"])] = row["size"]
    same = still_slabinfo(image)
    assert all(sizes[cache] == size for cache, (_, size) in same.items() if cache in sizes)
    # Slabs that a CPU allocates from count as full there; newer kernels have none of these.
    with_cpu_slabs = kernel.startswith("6.")
    equal = {c for c, (active, _) in same.items() if objects[c] == active}
    other = {c: (objects[c], same[c]) for c in same.keys() - equal}
    wrong = {c: v for c, v in other.items() if not (with_cpu_slabs and v[0] < v[1][0])}
    # What was the same in both copies may still have changed before the guest was frozen.
    assert len(wrong) <= len(same) // 20, wrong
    assert len(equal) > 90
    assert objects.total() > 50_000


class Plain:
    """Return the same values, one object at a time."""

    def __init__(self, prog: Program) -> None:
        self.objects: Counter[tuple[object, str, int]] = Counter()
        self.slabs: defaultdict[tuple[object, str, int], list[tuple[int, int, set[object]]]]
        self.slabs = defaultdict(list)
        payers = Payers(image_of(prog))
        for slab in plain_slabs(prog):
            owners = Counter[object]()
            for objcg, count in slab.charged.items():
                owners[payers.payer(objcg)] += count
            owners[None] = slab.inuse - owners.total()
            owners = +owners
            for owner, count in owners.items():
                key = owner, slab.cache.name.string_().decode(), slab.nid
                self.objects[key] += count
                self.slabs[key].append((count, slab.room, set(owners) - {owner}))


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_are_those_of_the_plain_walk(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "files").program()
    plain = Plain(prog)
    found = [r for r in rows(slabinfo(image_of(prog), by_node=True)) if r["cache"] != LARGE_KMALLOC]
    assert len(found) == len(plain.objects) > 100
    shared = 0
    for row in found:
        key = row["memcg_address"], str(row["cache"]), number(row, "node")
        slabs = plain.slabs[key]
        others = set().union(*(others for _, _, others in slabs)) - {None}
        expected = (
            plain.objects[key], len(slabs), sum(bool(o) for _, _, o in slabs), len(others),
            sum(count for count, _, _ in slabs) / sum(room for _, room, _ in slabs),
        )  # fmt: skip
        assert expected == tuple(
            row[f] for f in ("objects", "slabs", "shared", "others", "utilisation")
        )
        shared += len(others) > 1
    assert shared > 20


@pytest.mark.parametrize("kernel", ALL)
def test_without_nodes_it_is_the_sum(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    by_node: Counter[tuple[object, ...]] = Counter()
    for row in rows(slabinfo(image_of(prog), by_node=True)):
        if row["memcg"] is not None:
            for field in ("objects", "bytes", "charged", "slabs", "slab_bytes", "shared"):
                key = row["memcg_address"], row["cache"], row["size"], field
                by_node[key] += number(row, field)
    answer = slabinfo(image_of(prog))
    assert "node" not in {column.name for column in answer.tables[0].columns}
    total: Counter[tuple[object, ...]] = Counter()
    for row in rows(answer):
        assert row["memcg"] is not None
        for field in ("objects", "bytes", "charged", "slabs", "slab_bytes", "shared"):
            total[row["memcg_address"], row["cache"], row["size"], field] += number(row, field)
    assert total == by_node
    large = [row for row in rows(answer) if row["cache"] == LARGE_KMALLOC]
    assert {row["bytes"] for row in large} == {row["charged"] for row in large} != set()


@pytest.mark.parametrize("kernel", ALL)
def test_nodes_are_those_of_the_kernel(lab: Lab, kernel: str) -> None:
    """Slab pages match the counters of the nodes, and each belongs to a known use."""
    prog = lab.image(kernel, "4", "mixed").program()
    answer = slabinfo(image_of(prog), by_node=True)
    pages: Counter[tuple[int, str]] = Counter()
    unpaid: Counter[tuple[int, str]] = Counter()
    for row in rows(answer, 1):
        kind, nid = str(row["kind"]), number(row, "node")
        if kind == LARGE_KMALLOC and row["unpaid"] is None:
            continue  # not marked: some may be missing
        parts = [number(row, part) for part in ("paid", "unpaid", "unused")]
        assert number(row, "slab_bytes") == sum(parts)
        assert min(parts) >= 0
        item = "RECLAIMABLE" if kind == "reclaimable" else "UNRECLAIMABLE"
        pages[nid, f"NR_SLAB_{item}_B"] += number(row, "slab_bytes") // PAGE
        unpaid[nid, kind] += number(row, "unpaid")
    marked = kernel.startswith("7.")
    for (nid, item), found in pages.items():
        pgdat, slot = prog["node_data"][nid], prog[item].value_()
        counter = pgdat.vm_stat[slot].counter.value_()
        for cpu in range(4):
            local = per_cpu_ptr(pgdat.per_cpu_nodestats, cpu)
            counter += local.vm_node_stat_diff[slot].value_()
        if marked or item == "NR_SLAB_RECLAIMABLE_B":
            assert (nid, item, found) == (nid, item, counter)
        else:
            assert 0 <= counter - found <= counter // 3
    # The rows of what nobody pays for are the same.
    for row in rows(answer):
        if row["memcg"] is None:
            kind = "reclaimable" if row["reclaimable"] else "unreclaimable"
            kind = LARGE_KMALLOC if row["cache"] == LARGE_KMALLOC else kind
            unpaid[number(row, "node"), kind] -= number(row, "bytes")
    assert set(unpaid.values()) == {0}


@pytest.mark.parametrize("kernel", [k for k in BUILT_KERNELS if k in ("6.12-lab", "7.3-lab")])
def test_what_a_module_planted(lab: Lab, kernel: str, tmp_path: Path) -> None:
    prog = guest_image(lab, kernel, "", tmp_path).program()
    found: Counter[tuple[str, object, object]] = Counter()
    for row in rows(slabinfo(image_of(prog), by_node=True)):
        if row["memcg"] in ("/many", "/few"):
            found[str(row["memcg"]), row["size"], row["node"]] += number(row, "objects")
    sizes = {128, 200, 4096, PAGE << 2, PAGE << 3}
    assert {key: count for key, count in found.items() if key[1] in sizes} == {
        ("/many", 128, 1): 5,
        ("/many", 4096, 2): 3,
        ("/many", 200, 1): 7,
        ("/many", 200, 3): 150,
        ("/many", PAGE << 3, 3): 2,
        ("/many", PAGE << 2, 0): 1,
        ("/few", 200, 3): 11,
    }


def test_choice_of_memcg_and_node(lab: Lab) -> None:
    answer = slabinfo(image_of(lab.image("7.3", "4", "mixed").program()), by_node=True)
    chosen = choose(answer, Choice(memcgs=["/files/*"], nodes=[2], fields=["all"]))
    assert {row["memcg"] for row in rows(chosen)} == {
        f"/files/{name}" for name in ("build", "db", "mail", "web")
    }
    assert {row["node"] for row in rows(chosen)} == {row["node"] for row in rows(chosen, 1)} == {2}
    totals = chosen.tables[0].totals
    assert totals is not None
    assert totals["charged"] == sum(number(row, "charged") for row in rows(chosen)) > 0


def test_what_is_not_in_the_image_is_no_zero(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    prog = lab.image("7.3", "4", "mixed").program()
    slabs, vectors = SlabReader(image_of(prog)), set()
    read = Memory.read
    original = slabinfo(image_of(prog), by_node=True)

    def damaged(self: Memory, address: int, size: int) -> bytes:
        if address in vectors:
            raise FaultError("not there", address)
        return read(self, address, size)

    for piece in scan_pages(image_of(prog)):
        for page in piece.slabs:
            slab = slabs.slab(page)
            if slab is not None and slab.vector and slab.cache.name == "filp" and slab.nid == 2:
                vectors.add(slab.vector.address)
    assert vectors
    monkeypatch.setattr(Memory, "read", damaged)
    answer = slabinfo(image_of(prog), by_node=True)
    assert not answer.is_whole
    assert answer.coverage["slab"].unreadable == len(vectors)
    assert "missing" in answer.notes[-1]
    lost = [r for r in rows(original) if (r["cache"], r["node"]) == ("filp", 2)]
    kept = [r for r in rows(answer) if (r["cache"], r["node"]) == ("filp", 2)]
    assert len(lost) > len(kept)
    assert all(isinstance(r["objects"], NotRead) for r in kept if r["memcg"] is None)
    (node,) = [r for r in rows(answer, 1) if (r["node"], r["kind"]) == (2, "unreclaimable")]
    assert isinstance(node["paid"], NotRead)
    assert number(node, "slab_bytes") > 0
