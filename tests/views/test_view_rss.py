# SPDX-License-Identifier: LGPL-2.1-or-later
"""
``rss`` is compared with the guest's files, its page tables, and planted faults.

The processes of the workload have 64 threads that moved over 8 CPUs. After they stopped, the
kernel walked their page tables for smaps and numa_maps, which the guest printed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from drgn import FaultError, Object, Program, sizeof
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.percpu import per_cpu_ptr
from drgn.helpers.linux.pid import find_task, for_each_task
from labkit import poke
from support.guests import KERNELS, PERNODE_KERNELS, Lab, series
from support.rss import PROCESSES, STATUS, by_status, checked, guest_image, number, rows_of, said

from memcg_inspect.image.image import Image, image_of
from memcg_inspect.image.memory import Memory
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.linux.kernel.sched import has_mm
from memcg_inspect.tables import NotRead
from memcg_inspect.views.rss import rss

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]

THREADS, NODES = 64, range(4)


@pytest.mark.parametrize("kernel", (*KERNELS, *PERNODE_KERNELS))
def test_errors_are_over_zero_and_the_exact_value_is_what_is_mapped(lab: Lab, kernel: str) -> None:
    image = guest_image(lab, kernel)
    wrong: set[int] = set()
    rows = checked(image)
    for (pid, _), values in rows.items():
        assert values["status"] == "exact"
        assert values["exact"] == values["mapped"]
        assert number(values, "error") == number(values, "approximate") - number(values, "exact")
        assert abs(number(values, "error")) <= number(values, "bound")
        assert values["node_bound"] == 128
        if values["error"] and pid in said(image):
            wrong.add(pid)
    assert len(wrong) >= 10
    assert {item for _, item in rows} == set(STATUS)
    threads = {values["threads"] for (pid, _), values in rows.items() if pid in said(image)}
    assert threads == {THREADS + 1}


@pytest.mark.parametrize("kernel", (*KERNELS, *PERNODE_KERNELS))
def test_page_tables_are_what_the_kernel_found_in_them(lab: Lab, kernel: str) -> None:
    image = guest_image(lab, kernel)
    rows = checked(image)
    for pid, told in said(image).items():
        mapped = {item: rows[pid, item] for item in STATUS if (pid, item) in rows}
        resident = [values for item, values in mapped.items() if item != "swapents"]
        assert sum(number(values, "mapped") for values in resident) == told["rss"]
        assert mapped["anon"]["mapped"] == told["anon"]
        swapped = mapped.get("swapents")
        assert (0 if swapped is None else swapped["mapped"]) == told["swap"]
        # The vdso is memory of the kernel, which numa_maps leaves out.
        for nid in NODES:
            on_node = sum(number(values, f"node_{nid}") for values in resident)
            assert told[f"N{nid}"] <= on_node <= told[f"N{nid}"] + told["vdso"]
    assert sum(told["swap"] for told in said(image).values()) >= 100
    assert all(told[f"N{nid}"] for told in said(image).values() for nid in NODES)


@pytest.mark.parametrize("kernel", (*KERNELS, *PERNODE_KERNELS))
def test_counters_are_what_the_guest_read(lab: Lab, kernel: str) -> None:
    """6.1 shows the approximate value in /proc; newer kernels add up the values of all CPUs."""
    image = guest_image(lab, kernel)
    rows, shown = checked(image), "approximate" if series(kernel) == "6.1" else "exact"
    compared = 0
    for pid, told in by_status(image).items():
        for item, pages in told.items():
            values = rows.get((pid, item))
            assert (0 if values is None else values[shown]) == pages, (item, told)
            compared += values is not None
    assert compared >= 3 * PROCESSES


def plain_counters(prog: Program, pid: int) -> dict[str, tuple[int, int]]:
    """Return the approximate value and the sum, one member at a time."""
    mm = find_task(prog, pid).mm
    found: dict[str, tuple[int, int]] = {}
    for item, name in zip(STATUS, ("FILE", "ANON", "SWAP", "SHMEM"), strict=True):
        slot = int(prog[f"MM_{name}{'ENTS' if name == 'SWAP' else 'PAGES'}"])
        try:
            cheap = int(mm.rss_stat.count[slot].counter)
        except (AttributeError, LookupError):
            cheap = int(mm.rss_stat[slot].count)
            counters = mm.rss_stat[slot].counters
            parts = [int(per_cpu_ptr(counters, c)[0]) for c in for_each_possible_cpu(prog)]
        else:
            users = [task for task in for_each_task(prog) if task.mm == mm]
            parts = [int(task.rss_stat.count[slot]) for task in users]
        found[item] = cheap, cheap + sum(parts)
    return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_against_a_plain_walker(lab: Lab, kernel: str) -> None:
    image = guest_image(lab, kernel)
    rows = checked(image)
    for pid in [*list(said(image))[:2], 1]:
        for item, (cheap, total) in plain_counters(image.program(), pid).items():
            values = rows.get((pid, item))
            found = None if values is None else (values["approximate"], values["exact"])
            assert found == (None if (cheap, total) == (0, 0) else (max(cheap, 0), total))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("workload", ["mixed", "churn"])
def test_other_guests(lab: Lab, kernel: str, workload: str) -> None:
    """Other guests: rows are exact, or ``moving`` if the machine was stopped at work."""
    busy = {"freeze": "busy", "seed": 1} if workload == "churn" else {}
    answer = rss(image_of(lab.image(kernel, "4", workload, **busy).program()), check=True)
    assert answer.is_whole
    rows = rows_of(answer)
    assert len(rows) > 10
    for values in rows.values():
        if workload == "mixed" or values["status"] == "exact":
            assert (values["status"], values["difference"]) == ("exact", 0)
        else:
            assert values["status"] == "moving"
        assert abs(number(values, "error")) <= number(values, "bound")


def levels_of(prog: Program) -> int:
    return 5 if b"pgtable_l5_enabled)=1" in prog["VMCOREINFO"].string_() else 4


def anonymous_entry(prog: Program, pid: int) -> tuple[int, int]:
    """Return address and value of a page table entry of an anonymous page of a process."""
    mm, levels = find_task(prog, pid).mm, levels_of(prog)
    start = int(prog["page_offset_base"]) if "page_offset_base" in prog else 0xFFFF888000000000
    todo = [(int(mm.pgd.value_()), levels)]
    while todo:
        table, level = todo.pop()
        for i in range(256 if level == levels else 512):
            entry = prog.read_u64(table + 8 * i)
            below = start + (entry & 0xFFFFFFFFFF000)
            if level > 1 and entry & 0x81 == 1:
                todo.append((below, level - 1))
            elif level == 1 and entry & 0x201 == 1:
                page = prog["vmemmap"] + ((entry & 0xFFFFFFFFFF000) >> 12)
                if int(page.mapping) & 1:
                    return table + 8 * i, entry
    raise AssertionError("no such entry")


def swap_entry(kind: int, offset: int) -> int:
    """Return a swap entry as a PTE, as ``swp_entry_to_pte()`` of x86-64."""
    return kind << 59 | (~offset & (1 << 50) - 1) << 9


#: 6.12-lab has page tables of four levels, the others of five.
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k in ("6.1", "6.12-lab", "7.3")])
def test_planted_entries(lab: Lab, kernel: str, tmp_path: Path) -> None:
    image = guest_image(lab, kernel)
    prog = image.program()
    pids = sorted(said(image))
    moved, marked, swapped, hidden, lost, counted = pids[:6]
    changes: list[tuple[str | int, str | int | bytes]] = []

    def plant(pid: int, value: int) -> None:
        address, _ = anonymous_entry(prog, pid)
        changes.append((f"u64:{address:#x}", value))

    assert levels_of(prog) == (4 if kernel == "6.12-lab" else 5)
    # On its way to another place; above its number stands whether it was in use.
    _, entry = anonymous_entry(prog, moved)
    age = 3 << (40 if levels_of(prog) == 5 else 34)
    plant(moved, swap_entry(29, (entry & 0xFFFFFFFFFF000) >> 12 | age))
    plant(marked, swap_entry(31, 4))
    plant(swapped, swap_entry(0, 77))
    # There, but not to be touched: the address is inverted.
    _, entry = anonymous_entry(prog, hidden)
    plant(hidden, (entry & ~1 | 0x100) ^ 0xFFFFFFFFFF000)
    # Memory that this machine does not have.
    plant(lost, 0x7FFFFFFFF067)
    mm = find_task(prog, counted).mm
    member = "rss_stat.count[1].counter" if series(kernel) == "6.1" else "rss_stat[1].count"
    where = Object(prog, "struct mm_struct *", mm.value_())
    for part in re.findall(r"\w+", member):
        where = where[int(part)] if part.isdigit() else where.member_(part)
    changes.append((f"s64:{where.address_:#x}", "old + 5"))
    out = tmp_path / "core"
    poke.poke(image.core, out, image.vmlinux, changes)
    prog = open_program(ImageSource(core=str(out), debuginfo="btf"))
    answer = rss(image_of(prog), check=True)
    out.unlink()
    rows, before = rows_of(answer), checked(image)
    changed = {
        key: values["difference"] for key, values in rows.items() if values["status"] != "exact"
    }
    nothing = {(lost, item) for item in STATUS if (lost, item) in before}
    assert {key for key, value in changed.items() if isinstance(value, NotRead)} == nothing
    assert {key: value for key, value in changed.items() if key not in nothing} == {
        (marked, "anon"): 1,
        (swapped, "anon"): 1,
        (swapped, "swapents"): -1,
        (counted, "anon"): 5,
    }
    assert {values["status"] for key, values in rows.items() if key[0] == counted} == {
        "exact", "differs",
    }  # fmt: skip
    assert not answer.is_whole
    assert answer.coverage["page_tables"].unreadable == 1


@pytest.mark.parametrize("kernel", ["6.1", "7.3"])
def test_what_is_not_in_the_image_is_no_zero(
    lab: Lab, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = guest_image(lab, kernel)
    prog, before = image.program(), checked(guest_image(lab, kernel))
    first, second, *_ = sorted(said(image))
    mms = {pid: before[pid, "anon"]["mm"] for pid in (first, second)}
    pgd = find_task(prog, first).mm.pgd.value_()
    read, size_of_mm = Memory.read, sizeof(prog.type("struct mm_struct"))

    def damaged(self: Memory, address: int, size: int) -> bytes:
        mm = mms[second]
        assert isinstance(mm, int)
        if address == pgd or mm < address < mm + size_of_mm:
            raise FaultError("not there", address)
        return read(self, address, size)

    monkeypatch.setattr(Memory, "read", damaged)
    answer = rss(image_of(prog), check=True)
    assert not answer.is_whole
    for (pid, item), values in rows_of(answer).items():
        gone = {name for name, value in values.items() if isinstance(value, NotRead)}
        if pid == first:
            on_nodes = {f"node_{nid}" for nid in NODES} if item != "swapents" else set()
            assert gone == {"mapped", "difference", *on_nodes}
        elif pid == second:
            assert gone >= {"approximate", "exact", "error", "difference"}
        else:
            assert (gone, values) == (set(), before[pid, item])


@pytest.mark.parametrize("kernel", ["6.1", "7.3"])
def test_processes_that_end_are_left_out(
    lab: Lab, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a live kernel, processes are read one by one, and one that has exited has no rows."""
    image = guest_image(lab, kernel)
    prog, before = image.program(), checked(image)
    first, second, *_ = sorted(said(image))
    pgd = find_task(prog, first).mm.pgd.value_()
    read = Memory.read

    def freed(self: Memory, address: int, size: int) -> bytes:
        if address == pgd:
            raise FaultError("not there", address)
        return read(self, address, size)

    def is_there(image: Program, task: int, mm: int) -> bool:
        return has_mm(image, task, mm) and mm != before[first, "anon"]["mm"]

    assert not has_mm(
        image_of(prog), find_task(prog, first).value_(), number(before[second, "anon"], "mm")
    )
    monkeypatch.setattr(Memory, "read", freed)
    monkeypatch.setattr(Image, "is_moving", True)
    monkeypatch.setattr("memcg_inspect.views.rss.has_mm", is_there)
    answer = rss(image_of(prog), check=True)
    assert answer.notes == ("1 process ended before all of it was read.",)
    assert answer.is_whole
    assert rows_of(answer) == {key: row for key, row in before.items() if key[0] != first}
