# SPDX-License-Identifier: LGPL-2.1-or-later
"""
``percpu`` is compared with the guest's memory.stat and /proc/meminfo, a plain walk of the
bitmaps, and the allocations of a module.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from drgn import FaultError, Object, cast
from drgn.helpers.linux.percpu import per_cpu_ptr
from support.charge_module import CPUS, PAGE, guest_image, held
from support.guest_files import still
from support.guests import BUILT_KERNELS, KERNELS, PERNODE_KERNELS, Lab
from support.percpu import nid_of, plain_areas
from support.reference import node_spans
from support.views import number, rows

from memcg_inspect.image.image import image_of
from memcg_inspect.image.memory import Memory
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.views.percpu import percpu

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]

ALL = (*KERNELS, *PERNODE_KERNELS)


@pytest.mark.parametrize("kernel", ALL)
def test_sums_are_what_the_guest_read(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "4", "mixed")
    answer = percpu(image_of(image.program()))
    charged: Counter[str] = Counter()
    for row in rows(answer):
        if row["memcg"] is not None:
            charged[str(row["memcg"])] += number(row, "charged")
        else:
            assert row["charged"] == 0
    compared = 0
    for (path, name, _), value in still(image, "memory.stat").items():
        if name == "percpu":
            below = path.rstrip("/") + "/"
            found = sum(s for where, s in charged.items() if f"{where}/".startswith(below))
            assert (path, found) == (path, value)
            compared += value > 0
    assert compared >= 10


@pytest.mark.parametrize("kernel", ALL)
def test_pages_are_those_of_meminfo(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "4", "mixed")
    answer = percpu(image_of(image.program()))
    nodes = rows(answer, 1)
    backing = sum(number(row, "backing") for row in nodes)
    populated = image.program().symbol("pcpu_nr_populated").address
    assert backing == image.program().read_u64(populated) * CPUS * PAGE
    # A worker populates pages, and gives some back, when it likes.
    text = (image.guest / "2/proc/meminfo").read_text()
    (said,) = re.findall(r"^Percpu: +(\d+) kB$", text, re.M)
    assert abs(backing - int(said) * 1024) <= 8 * CPUS * PAGE
    for row in nodes:
        assert 0 < number(row, "paid") < number(row, "allocated") < number(row, "backing")
    # What is allocated is told apart: static variables (in a note), and rows.
    (static,) = re.findall(r"([\d,]+) bytes for each CPU", answer.notes[0])
    found = sum(number(row, "bytes") for row in rows(answer))
    assert found + CPUS * int(static.replace(",", "")) == sum(
        number(row, "allocated") for row in nodes
    )
    assert "counts them as allocated" in answer.notes[0]
    for row in nodes:
        paid = sum(number(r, f"node_{row['node']}") for r in rows(answer) if r["memcg"] is not None)
        assert row["paid"] == paid


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_is_what_the_plain_walk_finds(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    expected = {(a.chunk, a.offset): (a.size, a.objcg) for a in plain_areas(prog)}
    found: dict[tuple[int, int], tuple[int, int]] = {}
    offsets = [prog["pcpu_unit_offsets"][cpu].value_() for cpu in range(CPUS)]
    spans = node_spans(prog)
    some = 0
    for number_of_row, row in enumerate(rows(percpu(image_of(prog), each=True))):
        chunk = Object(prog, "struct pcpu_chunk *", number(row, "chunk"))
        pointer = Object(prog, "void *", number(row, "pointer"))
        addresses = [per_cpu_ptr(pointer, cpu).value_() for cpu in range(CPUS)]
        base = chunk.base_addr.value_()
        (offset,) = {a - base - o for a, o in zip(addresses, offsets, strict=True)}
        objcg = row["objcg"] or 0
        assert isinstance(objcg, int)
        found[chunk.value_(), offset] = number(row, "size"), objcg
        if number_of_row % 40 == 0:
            # where each CPU's copy is, byte by byte
            nodes: Counter[int] = Counter()
            for address in addresses:
                for at in range(address, address + number(row, "size"), 4):
                    nodes[nid_of(prog, spans, at)] += 4
            assert [row[f"node_{nid}"] for nid in range(4)] == [nodes[nid] for nid in range(4)]
            some += 1
    assert found == expected
    assert len(found) > 2000
    assert some > 50


@pytest.mark.parametrize("kernel", ALL)
def test_groups_are_sums(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    total: Counter[tuple[object, ...]] = Counter()
    fields = ("bytes", "charged", "node_0", "node_1", "node_2", "node_3")
    for row in rows(percpu(image_of(prog), each=True)):
        key = row["memcg_address"], row["size"], row["nodes"]
        total[(*key, "count")] += 1
        for field in fields:
            total[(*key, field)] += number(row, field)
    grouped = {
        (row["memcg_address"], row["size"], row["nodes"], field): row[field]
        for row in rows(percpu(image_of(prog)))
        for field in ("count", *fields)
    }
    assert grouped == total
    assert {row["nodes"] for row in rows(percpu(image_of(prog)))} == {"0,1,2,3"}


@pytest.mark.parametrize("kernel", [k for k in BUILT_KERNELS if k in ("6.12-lab", "7.3-lab")])
def test_what_a_module_planted(lab: Lab, kernel: str, tmp_path: Path) -> None:
    image = guest_image(lab, kernel, "", tmp_path)
    found = {
        row["pointer"]: (row["memcg"], row["size"], row["charged"])
        for row in rows(percpu(image_of(image.program()), each=True))
        if row["memcg"] in ("/many", "/few")
    }
    planted = [thing.address for thing in held(image) if thing.kind == "percpu"]
    assert len(planted) == 4
    assert {found[address] for address in planted} == {
        ("/many", 4096, 4096 * CPUS + 4096 // 4 * 8),
        ("/many", 8192, 8192 * CPUS + 8192 // 4 * 8),
        ("/few", 4096, 4096 * CPUS + 4096 // 4 * 8),
    }
    assert sum(size in (4096, 8192) for _, size, _ in found.values()) == 4


@pytest.mark.parametrize("kernel", [k for k in BUILT_KERNELS if k == "7.3-lab"])
def test_call_sites_where_they_are_known(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed", append="sysctl.vm.mem_profiling=1").program()
    sites: Counter[tuple[object, object]] = Counter()
    unknown = 0
    for row in rows(percpu(image_of(prog))):
        sites[row["memcg"], row["site"]] += number(row, "count")
        unknown += number(row, "count") if row["site"] is None else 0
    places = {str(site) for _, site in sites if site is not None}
    assert any(re.match(r"kernel/bpf/\S+:\d+ \w+$", place) for place in places), places
    assert any("mm/memcontrol.c" in place for place in places)
    assert unknown < sum(sites.values()) // 2
    by_site: Counter[object] = Counter()
    for row in rows(percpu(image_of(prog), each=True)):
        by_site[row["site"]] += number(row, "bytes")
    summed = rows(percpu(image_of(prog), by=["site"]))
    assert [(row["site"], row["bytes"]) for row in summed] == sorted(
        by_site.items(), key=lambda item: (-item[1], str(item[0]))
    )
    # elsewhere there is no such field
    other = percpu(image_of(lab.image(kernel, "4", "mixed").program()))
    assert "site" not in {column.name for column in other.tables[0].columns}


def test_what_is_not_in_the_image_is_missing_and_said_so(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    prog = lab.image("7.3", "4", "mixed").program()
    whole = rows(percpu(image_of(prog), each=True))
    chunk = max(PercpuReader(image_of(prog)).chunks(), key=lambda c: bool(c.vector))
    lost = range(chunk.vector + 4096, chunk.vector + 3 * 4096)  # of 8 bytes for each 4
    read = Memory.read

    def damaged(self: Memory, address: int, size: int) -> bytes:
        if address < lost.stop and lost.start < address + size:
            raise FaultError("not there", address)
        return read(self, address, size)

    monkeypatch.setattr(Memory, "read", damaged)
    answer = percpu(image_of(prog), each=True)
    assert not answer.is_whole
    assert "missing" in answer.notes[-1]
    base = cast("unsigned long", Object(prog, "struct pcpu_chunk *", chunk.address).base_addr)
    first = per_cpu_ptr(Object(prog, "void *", 0), 0).value_() - prog["pcpu_unit_offsets"][0]
    gone = {
        row["pointer"]
        for row in whole
        if row["chunk"] == chunk.address
        and 2048 <= (number(row, "pointer") + first - base).value_() % 2**64 < 3 * 2048
    }
    assert gone
    left = {row["pointer"] for row in rows(answer)}
    assert left == {row["pointer"] for row in whole} - gone
