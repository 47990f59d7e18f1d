# SPDX-License-Identifier: LGPL-2.1-or-later
"""
``stat`` is compared with the guest's memory.stat and memory.numa_stat.

Reading these files flushes the counters, so they show exact values of what did not change later.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from drgn import FaultError, Object, Program
from drgn.helpers.linux.percpu import per_cpu_ptr
from labkit import poke
from support.guest_files import MOVES_IN_ROOT, numbers, still
from support.guests import (
    BUILT_KERNELS,
    KERNELS,
    PERNODE_KERNELS,
    GuestImage,
    Lab,
    series,
)

from memcg_inspect.image.image import image_of
from memcg_inspect.image.memory import Memory
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.session import session_image
from memcg_inspect.tables import Answer, NotRead, UsageError
from memcg_inspect.views.dying import dying
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.stat import stat

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]

FILES = ("memory.stat", "memory.numa_stat")


def columns(answer: Answer, *names: str) -> list[tuple[object, ...]]:
    table = answer.tables[0]
    return [tuple(table.values(row)[name] for name in names) for row in table.rows]


@pytest.mark.parametrize("kernel", (*KERNELS, *PERNODE_KERNELS))
def test_exact_is_what_the_guest_read(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "4", "mixed")
    settled = {key: value for file in FILES for key, value in still(image, file).items()}
    said = {key for file in FILES for key in numbers(image.guest / "2/cgroup", file)}
    order = [
        line.split()[0] for line in (image.guest / "2/cgroup/memory.stat").read_text().splitlines()
    ]
    over_zero: set[str] = set()
    nodes = 0
    once = session_image(image.own_program())
    for path in {path for path, _, _ in said}:
        rows = columns(stat(once, path, True), "item", "node", "exact")
        assert {(item, nid) for item, nid, _ in rows} == {
            (item, nid) for where, item, nid in said if where == path
        }
        assert [item for item, nid, _ in rows if nid is None] == order
        for item, nid, exact in rows:
            key = (path, str(item), nid)
            assert isinstance(exact, int)
            if key in settled and not (path == "/" and item in MOVES_IN_ROOT):
                assert (*key, exact) == (*key, settled[key])  # type: ignore[arg-type]
                if exact:
                    over_zero.add(str(item))
                    nodes += nid is not None
    assert over_zero >= {
        "anon", "shmem", "kernel", "kernel_stack", "pagetables", "percpu", "sock", "vmalloc",
        "slab", "slab_reclaimable", "slab_unreclaimable", "pgfault",
    }  # fmt: skip
    assert nodes > 200


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("subtree", [False, True])
def test_found_is_exact_on_an_idle_guest(lab: Lab, kernel: str, subtree: bool) -> None:
    image = lab.image(kernel, "4", "mixed")
    compared: set[str] = set()
    once = session_image(image.own_program())
    for path in ("/files", "/pages/user", "/zswap"):
        answer = stat(once, path, True, subtree)
        for item, nid, exact, found in columns(answer, "item", "node", "exact", "found"):
            assert found in (None, exact), (path, item, nid)
            compared |= {str(item)} if found else set()
    assert compared >= {"anon", "file", "shmem", "kernel", "slab", "percpu"}


def test_found_is_not_what_a_wrong_counter_says(lab: Lab, tmp_path: Path) -> None:
    image, out = lab.image("7.3", "4", "mixed"), tmp_path / "wrong.core"
    web = Payers(image_of(image.program())).memcgs
    memcg = next(m.address for m in web.values() if m.path == "/files/web")
    stats = Object(image.program(), "struct mem_cgroup *", memcg).vmstats_percpu
    slot = slot_of(image.program(), "NR_FILE_PAGES")
    at = per_cpu_ptr(stats, 1).state[slot].address_
    poke.poke(image.core, out, image.vmlinux, [(f"s64:{at:#x}", "old + 7")])
    answer = stat(image_of(GuestImage(out).program()), "/files/web")
    out.unlink()
    [(exact, found)] = [
        (exact, found)
        for item, nid, exact, found in columns(answer, "item", "node", "exact", "found")
        if (item, nid) == ("file", None)
    ]
    assert isinstance(found, int)
    assert exact == found + 7 * 4096


def test_a_removed_memcg_has_nothing_to_find(lab: Lab) -> None:
    prog = lab.image("7.3", "4", "dying").program()
    removed = next(m for m in Payers(image_of(prog)).memcgs.values() if m.state == "dying")
    answer = stat(image_of(prog), f"{removed.address:#x}", True)
    assert {found for (found,) in columns(answer, "found")} == {None}


def test_hugetlb_is_a_line_where_it_is_accounted(lab: Lab, tmp_path: Path) -> None:
    """The kernel prints ``hugetlb`` if cgroup2 was mounted with memory_hugetlb_accounting."""
    image, path = lab.image("7.3", "4", "mixed"), tmp_path / "mounted.core"
    flags = image.program()["cgrp_dfl_root"].flags
    accounting = 1 << 19  # CGRP_ROOT_MEMORY_HUGETLB_ACCOUNTING
    poke.poke(
        image.core, path, image.vmlinux,
        [(f"u32:{flags.address_:#x}", flags.value_() | accounting)],
    )  # fmt: skip
    shown = {}
    for core in (image.core, path):
        rows = columns(stat(image_of(GuestImage(core).program()), "/files", True), "item", "node")
        shown[core] = [nid for item, nid in rows if item == "hugetlb"]
    assert shown == {image.core: [0, 1, 2, 3], path: [None, 0, 1, 2, 3]}
    path.unlink()


def slot_of(prog: Program, item: str) -> int:
    """Return the index of an item in the arrays of counters."""
    slot = int(prog[item].value_())
    with suppress(KeyError):
        return int(prog["mem_cgroup_stats_index"][slot].value_())
    return slot


def plain_value(prog: Program, address: int, item: str, nid: int | None) -> tuple[int, int]:
    """Return a counter, read one member at a time: the folded value, and what is not folded yet."""
    memcg = Object(prog, "struct mem_cgroup *", address)
    slot = slot_of(prog, item)
    holder = memcg if nid is None else memcg.nodeinfo[nid]
    name = "vmstats" if nid is None else "lruvec_stats"
    stats, percpu = holder.member_(name), holder.member_(f"{name}_percpu")
    waiting = stats.state_pending[slot].value_()
    for cpu in range(4):
        local = Object(prog, percpu.type_, percpu.value_() + int(prog["__per_cpu_offset"][cpu]))
        waiting += local.state[slot].value_() - local.state_prev[slot].value_()
    return stats.state[slot].value_(), waiting


@pytest.mark.parametrize("kernel", KERNELS)
def test_folded_and_pending_are_what_stands_there(lab: Lab, kernel: str, tmp_path: Path) -> None:
    image, out = lab.image(kernel, "4", "churn", freeze="busy", seed=1), tmp_path / "core"
    prog = image.program()
    payers = Payers(image_of(prog))
    parents = {memcg.parent for memcg in payers.memcgs.values()}
    # The guest may have been stopped right after a flush.
    leaf = next(address for address in payers.memcgs if address not in parents)
    local = per_cpu_ptr(Object(prog, "struct mem_cgroup *", leaf).vmstats_percpu, 1)
    slot = slot_of(prog, "MEMCG_KMEM")
    poke.poke(
        image.core, out, image.vmlinux, [(f"s64:{local.state[slot].address_:#x}", "old + 1000")]
    )
    prog = open_program(ImageSource(core=str(out), debuginfo="btf"))
    out.unlink()
    payers = Payers(image_of(prog))
    units = {"MEMCG_KMEM": ("kernel", 4096), "NR_SLAB_UNRECLAIMABLE_B": ("slab_unreclaimable", 1)}
    waiting, once = 0, session_image(prog)
    for memcg in payers.memcgs.values():
        if memcg.address in parents:
            continue  # one that has nobody below it, so that pending is all its own
        rows = {
            (item, nid): (folded, pending)
            for item, nid, folded, pending in columns(
                stat(once, f"{memcg.address:#x}", True),
                "item",
                "node",
                "folded",
                "pending",
            )
        }
        for item, (name, unit) in units.items():
            for nid in (None, 0, 3) if item.endswith("_B") else (None,):
                found = tuple(value * unit for value in plain_value(prog, memcg.address, item, nid))
                assert rows[name, nid] == found
                waiting += bool(found[1])
    assert waiting


@pytest.mark.parametrize("kernel", [k for k in BUILT_KERNELS if k in ("6.12-lab", "7.3-lab")])
def test_cgroup_v1(lab: Lab, kernel: str) -> None:
    """On v1 the file has other lines, and hierarchical values are called total_*."""
    image = lab.image(kernel, "4", "mixed", cgroup="v1")
    said, compared = still(image, "memory.stat"), 0
    once = session_image(image.own_program())
    for path in {path for path, _, _ in said} - {"/"}:
        answer = stat(once, path, True)
        assert "cgroup v1" in answer.notes[-1]
        for item, nid, exact in columns(answer, "item", "node", "exact"):
            value = said.get((path, f"total_{item}", None))
            if nid is None and value is not None:
                assert (path, item, exact) == (path, item, value)
                compared += value > 0
    assert compared > 60


def test_choice_of_memcg(lab: Lab) -> None:
    once = session_image(lab.image("7.3", "4", "mixed").own_program())
    with pytest.raises(UsageError, match="no memcg /nowhere"):
        stat(once, "/nowhere")
    everything, some = stat(once, "/files", True), stat(once, "/files")
    hidden = {i for (i,) in columns(everything, "item")} - {i for (i,) in columns(some, "item")}
    assert some.notes == (f"{len(hidden)} items that are 0 everywhere are left out; "
                          "--all shows them.",)  # fmt: skip
    values = columns(everything, "item", "folded", "pending", "exact")
    assert hidden == {i for i, *_ in values} - {i for i, *v in values if any(v)}
    # Removed memcgs are still there, under an address if another one has their path.
    memcgs = Payers(once).memcgs.values()
    online = {m.path: m.address for m in memcgs if m.state == "online"}
    removed = next(m for m in memcgs if m.state == "dying" and m.path in online)
    (address,) = {a for (a,) in columns(stat(once, f"{removed.address:#x}", True), "memcg_address")}
    assert address == removed.address
    answer = stat(once, f"{removed.address:#x}", True)
    assert any("was removed" in note for note in answer.notes)
    answer = stat(once, removed.path, True)
    assert not any("was removed" in note for note in answer.notes)
    assert {a for (a,) in columns(answer, "memcg_address")} == {online[removed.path]}
    assert f"{removed.address:#x}" in answer.notes[0]


@pytest.mark.parametrize("kernel", ["6.1", "7.2", "7.3"])
def test_removed_memcgs_are_not_kept_up(lab: Lab, kernel: str) -> None:
    """The charges that dying finds are compared with the counters, kind by kind."""
    prog = lab.image(kernel, "4", "dying").program()
    removed = [m for m in Payers(image_of(prog)).memcgs.values() if m.state == "dying"]
    table = dying(image_of(prog)).tables[0]
    below, compared = {m.parent for m in removed}, 0
    for memcg in removed:
        if memcg.address in below:
            continue  # its counters hold those of others
        (row,) = [row for row in table.rows if row.memcg_address == memcg.address]
        left = table.values(row)
        answer = stat(image_of(prog), f"{memcg.address:#x}", True)
        (note,) = [note for note in answer.notes if "was removed" in note]
        values = {i: v for i, nid, v in columns(answer, "item", "node", "exact") if nid is None}
        if series(kernel) == "6.1":
            assert "Only user pages, page cache and sockets still count here" in note
            assert left["lru"] == sum(int(str(values[i])) for i in ("anon", "file", "swapcached"))
            assert left["sock"] == values["sock"]
        elif series(kernel) == "7.2":
            assert "Only sockets still count here" in note
            assert left["sock"] == values["sock"]
        else:
            assert "Nothing counts here any more" in note
            assert left["slab"] != values["slab"] == 0
        compared += 1
    assert compared == 9


def test_what_is_not_in_the_image_is_no_zero(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    prog = lab.image("7.3", "4", "mixed").program()
    memcgs = Payers(image_of(prog)).memcgs
    web = next(m for m in memcgs.values() if m.path == "/files/web")
    lost = Object(prog, "struct mem_cgroup *", web.address).vmstats.value_()
    read = Memory.read

    def damaged(self: Memory, address: int, size: int) -> bytes:
        if address == lost:
            raise FaultError("not there", address)
        return read(self, address, size)

    monkeypatch.setattr(Memory, "read", damaged)
    for path in ("/files/web", "/files"):
        answer = stat(image_of(prog), path)
        assert not answer.is_whole
        for item, nid, exact in columns(answer, "item", "node", "exact"):
            assert isinstance(exact, NotRead) == (nid is None), item
    assert stat(image_of(prog), "/files/db").is_whole
