# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The layers of addresses, compared with the objects that a test module made, with drgn's
``identify_address()``, and with the kernel's own lists.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from drgn import FaultError, Object, Program, cast
from drgn.helpers.common.memory import identify_address_all
from drgn.helpers.linux.cgroup import cgroup_path, css_for_each_descendant_pre
from drgn.helpers.linux.common import (
    IdentifiedPage,
    IdentifiedSlabObject,
    IdentifiedTaskStack,
    IdentifiedTaskStruct,
    IdentifiedVmap,
)
from drgn.helpers.linux.fs import for_each_file
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.mm import (
    compound_head,
    compound_order,
    page_to_virt,
    pfn_to_page,
    pfn_to_virt,
    virt_to_page,
)
from drgn.helpers.linux.mmzone import for_each_online_pgdat
from drgn.helpers.linux.percpu import per_cpu_ptr
from drgn.helpers.linux.pid import for_each_task
from drgn.helpers.linux.slab import find_containing_slab_cache
from labkit import poke
from support.charge_module import CPUS, GUESTS, Group, groups, guest_image, held
from support.charge_module import owners as planted_owners
from support.guests import (
    KERNELS,
    PERNODE_KERNELS,
    ROOT,
    GuestImage,
    Lab,
    series,
)
from support.schemas import checked
from support.sockets import protocol_of

from memcg_inspect.cli import main
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.kfence import kfence_object, kfence_pages
from memcg_inspect.linux.mm.mmzone import mem_map, page_ranges
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.linux.mm.zswap import ZswapReader
from memcg_inspect.tables import UsageError, Value
from memcg_inspect.views.who import parse_address, who

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]

on_kernel = pytest.mark.parametrize("kernel", KERNELS)

PAGE = 4096

NO_OBJECT = "none: the address is between the objects of the slab"
KFENCE = "in the pool of kfence"

Row = dict[str, Value]


def rows_of(prog: Program, *addresses: int) -> list[list[Row]]:
    answer = who(image_of(prog), addresses)
    assert answer.is_whole, answer.coverage
    return [[t.values(row) for row in t.rows] for t in answer.tables]


def layer(rows: list[Row], name: str) -> Row:
    (row,) = [row for row in rows if row["layer"] == name]
    return row


def layers(rows: list[Row]) -> list[Value]:
    return [row["layer"] for row in rows]


def charge_of(row: Row) -> tuple[Value, Value, Value, Value]:
    return row["memcg"], row["removed"], row["node"], row["charged"]


# What a test module planted


def sizes(group: Group) -> Iterator[tuple[str, int, int]]:
    """Return kind, charged bytes and bytes of each requested charge, in order."""
    for order in group.orders:
        total = sum(order.expected.values())
        kind, first, second, _ = order.line.split()
        size = {"cache": 200, "percpu": int(first), "pages": PAGE << int(second)}.get(
            kind, int(second)
        )
        for _ in range(order.count):
            yield kind, total // order.count, size


@pytest.mark.parametrize(("kernel", "append"), GUESTS)
def test_what_was_planted(lab: Lab, kernel: str, append: str, tmp_path: Path) -> None:
    image = guest_image(lab, kernel, append, tmp_path)
    prog, wanted = image.program(), groups(kernel)
    per_group = {path: sizes(group) for path, group in wanted.items()}
    seen: Counter[str] = Counter()
    profiled = "mem_profiling=1" in append
    for thing, (path, group) in zip(held(image), planted_owners(wanted), strict=True):
        kind, charged, size = next(per_group[path])
        seen[kind] += 1
        assert thing.kind == kind
        if kind == "cache" and seen[kind] % 10:
            continue  # enough of them
        ((first), (inside)) = rows_of(prog, thing.address, thing.address + size - 1)
        for rows, offset in ((first, 0), (inside, size - 1)):
            if kind == "percpu":
                check_percpu(prog, rows, thing.address, offset, (path, charged, size))
            elif kind == "vmalloc":
                area = layer(rows, "vmalloc area")
                assert (area["start"], area["offset"]) == (thing.address, offset)
                assert charge_of(layer(rows, "pages")) == (path, False, group.nid, charged)
                assert charge_of(layer(rows, "page")) == (path, False, group.nid, PAGE)
            elif "slab" in layers(rows):
                row = layer(rows, "object")
                assert charge_of(row) == (path, False, thing.nid, charged)
                assert (row["start"], row["offset"]) == (thing.address, offset)
                cache = {"cache": "charge_test"}.get(kind, "kmalloc")
                assert re.match(rf"{cache}\S* \[\d+\], allocated$", str(row["what"]))
            else:
                row = layer(rows, "page")
                assert charge_of(row) == (path, False, thing.nid, charged)
                assert (row["start"], row["offset"]) == (thing.address, offset)
            if kernel.startswith("7."):
                assert {row["charged_node"] for row in rows if row["objcg"]} == {group.nid}
            check_code(rows, kind, profiled)
    assert seen == {"kmalloc": 11, "cache": 168, "pages": 7, "percpu": 4, "vmalloc": 2}


#: What the module calls to make a thing of each kind.
CALLS = {
    "kmalloc": "kmalloc_node(held->size",
    "cache": "kmem_cache_alloc_node(cache",
    "pages": "alloc_pages_node(held->node",
    "percpu": "__alloc_percpu_gfp(held->size",
    "vmalloc": "__vmalloc(held->size",
}


def check_code(rows: list[Row], kind: str, profiled: bool) -> None:
    """With profiling, ``who`` names the source line that made the allocation."""
    code = [str(row["what"]) for row in rows if row["layer"] == "allocated at"]
    if not profiled:
        assert code == []
        return
    source = (ROOT / "fixtures/modules/charge/charge.c").read_text().splitlines()
    (line,) = [n for n, text in enumerate(source, 1) if CALLS[kind] in text]
    assert [re.sub(r"^.*/", "", what) for what in code] == [f"charge.c:{line} [charge] allocate()"]


def check_percpu(
    prog: Program, rows: list[Row], pointer: int, offset: int, expected: tuple[str, int, int]
) -> None:
    path, charged, size = expected
    row = layer(rows, "percpu")
    assert (row["start"], row["offset"], row["size"]) == (pointer, offset, size)
    assert (row["memcg"], row["charged"], row["node"]) == (path, charged, None)
    copies = {row["node"]: row["size"] for row in rows if row["layer"] == "copies"}
    assert copies == dict.fromkeys(range(CPUS), size)
    for cpu in range(CPUS):  # CPU n is on node n
        address = per_cpu_ptr(Object(prog, "void *", pointer + offset), cpu).value_()
        (rows,) = rows_of(prog, address)
        row = layer(rows, "percpu")
        assert (row["start"], row["offset"]) == (address - offset, offset)
        assert charge_of(row) == (path, False, cpu, charged)
        assert row["what"] == f"copy of CPU {cpu} of __percpu pointer {pointer:#x}"


@pytest.mark.parametrize("kernel", PERNODE_KERNELS)
def test_percpu_memory_is_charged_by_node(lab: Lab, kernel: str) -> None:
    """On the per-node kernel each part belongs to the obj_cgroup of its node."""
    prog = lab.image(kernel, "4", "mixed").program()
    reader = PercpuReader(image_of(prog))
    allocs = [a for chunk in reader.chunks() for a in reader.charged(chunk)][::40]
    tables = rows_of(prog, *map(reader.pointer, allocs))
    for alloc, rows in zip(allocs, tables, strict=True):
        copies = [row for row in rows if row["layer"] == "copies"]
        assert [row["charged_node"] for row in copies] == [row["node"] for row in copies]
        assert sum(int(str(row["charged"])) for row in copies) == reader.charge(alloc)
        assert layer(rows, "percpu")["charged"] is None
    assert len(allocs) > 5


# What drgn makes of it


@lru_cache(maxsize=1)
def some_addresses(core: Path) -> list[int]:
    """Yield addresses of all sorts: pages, structures in the memory map, vmalloc areas."""
    prog, random = GuestImage(core).program(), Random(7)
    pfns = [
        random.randrange(r.start, r.end) for r in page_ranges(image_of(prog)) for _ in range(120)
    ]
    addresses = [pfn_to_virt(prog, pfn).value_() + random.randrange(PAGE) for pfn in pfns]
    addresses += [pfn_to_page(prog, pfn).value_() + random.randrange(64) for pfn in pfns[:20]]
    tasks = list(for_each_task(prog))
    slabs = [compound_head(virt_to_page(task)) for task in tasks[::9]]
    ends = [page_to_virt(p).value_() + (PAGE << compound_order(p).value_()) for p in slabs]
    addresses += [end - 8 for end in ends]
    addresses += [task.value_() + 123 for task in tasks[::9]]
    addresses += [task.stack.value_() + 777 for task in tasks[::9]]
    for task in tasks:
        for _, file in list(for_each_file(task))[:10] if task.files else ():
            addresses += [file.value_(), file.f_inode.value_(), file.f_path.dentry.value_()]
    return addresses[:1000]


@on_kernel
def test_as_drgn_identifies_it(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "4", "mixed")
    prog, cache, addresses = image.program(), {}, some_addresses(image.core)
    seen: Counter[str] = Counter()
    for address, rows in zip(addresses, rows_of(prog, *addresses), strict=True):
        if is_unused_of_kfence(rows):
            # drgn takes the slabs of the pool for others; these have no cache.
            seen["kfence"] += 1
            continue
        found = list(identify_address_all(prog, address, cache=cache))
        if not found:
            # drgn says nothing of pages that are no slabs.
            assert layers(rows)[0] == "page", hex(address)
            assert "slab" not in layers(rows)
            seen["page"] += 1
        for thing in found:
            seen[type(thing).__name__] += 1
            check_identified(prog, rows, thing, address)
    least = {
        "page": 100, "IdentifiedSlabObject": 100, "IdentifiedTaskStruct": 5,
        "IdentifiedTaskStack": 5, "IdentifiedVmap": 5, "IdentifiedPage": 20,
    }  # fmt: skip
    assert {name for name, number in least.items() if seen[name] < number} == set(), seen


def is_unused_of_kfence(rows: list[Row]) -> bool:
    return any(row["layer"] == "slab" and row["what"] == "(no cache): kfence" for row in rows)


def is_behind_objects(prog: Program, address: int) -> bool:
    """Return whether an address is in what the objects of a slab leave over of its pages."""
    page = compound_head(virt_to_page(prog, address))
    slab = cast("struct slab *", page)
    size = slab.objects.value_() * slab.slab_cache.size.value_()
    return bool(address - page_to_virt(page).value_() >= size)


def check_identified(prog: Program, rows: list[Row], thing: Any, address: int) -> None:
    if any(row["what"] == NO_OBJECT for row in rows):
        # drgn takes it for one more object.
        assert is_behind_objects(prog, address)
        return
    if any(KFENCE in str(row["what"]) for row in rows):
        return  # drgn does not know where such an object begins
    if isinstance(thing, IdentifiedSlabObject):
        info, row = thing.slab_object_info, layer(rows, "object")
        name = info.slab_cache.name.string_().decode()
        state = str(row["what"]).partition("], ")[2]
        assert str(row["what"]).startswith(f"{name} [")
        assert row["start"] == info.address
        assert row["offset"] == address - info.address
        assert (state == "allocated") is info.allocated
    elif isinstance(thing, IdentifiedTaskStruct):
        row, task = layer(rows, "task"), thing.task
        assert row["start"] == task.value_()
        assert row["what"] == f"{task.pid.value_()} ({task.comm.string_().decode()})"
        assert row["memcg"] == memcg_path_of(task)
    elif isinstance(thing, IdentifiedTaskStack):
        row, task = layer(rows, "kernel stack"), thing.task
        assert row["what"] == f"of task {task.pid.value_()} ({task.comm.string_().decode()})"
        assert row["start"] == task.stack.value_()
    elif isinstance(thing, IdentifiedVmap):
        row, area = layer(rows, "vmalloc area"), thing.vmap_area
        assert row["start"] == area.va_start.value_()
        assert row["size"] == area.va_end.value_() - area.va_start.value_()
    elif isinstance(thing, IdentifiedPage):
        assert layer(rows, "struct page")["what"] == f"of page frame {thing.pfn:#x}"
        assert f"page frame {thing.pfn:#x}" in str(layer(rows, "page")["what"])
    else:
        raise AssertionError(f"{thing} of {address:#x}")


def memcg_path_of(task: Object) -> str:
    css = task.cgroups.subsys[int(task.prog_["memory_cgrp_id"])]
    return cgroup_path(css.cgroup).decode()


# The kernel's own lists


@on_kernel
def test_free_blocks_are_told_whole(lab: Lab, kernel: str) -> None:
    """The middle of each block on the buddy allocator's lists is found to be free."""
    prog = lab.image(kernel, "4", "mixed").program()
    blocks = list(free_blocks(prog))
    page = mem_map(image_of(prog)).page_size
    addresses = [start + middle(page << order) for start, order, _ in blocks]
    for (start, order, nid), rows in zip(blocks, rows_of(prog, *addresses), strict=True):
        (row,) = rows
        assert re.match("free; page frame 0x[0-9a-f]+$", str(row["what"]))
        assert (row["start"], row["offset"]) == (start, middle(page << order))
        assert (row["size"], row["node"], row["charged"]) == (page << order, nid, 0)
    # Some orders may have no free block at the moment.
    seen = Counter(order for _, order, _ in blocks)
    assert len(seen) > 5 and seen.total() > 30, seen


def middle(size: int) -> int:
    return size // 2 + 5


def free_blocks(prog: Program) -> Iterator[tuple[int, int, int]]:
    """Return address, order and node of some free blocks."""
    for pgdat in for_each_online_pgdat(prog):
        for zone in pgdat.node_zones:
            if not zone.present_pages:
                continue  # its lists are not initialised
            for order, area in enumerate(zone.free_area):
                for head in area.free_list:
                    pages = list_for_each_entry("struct page", head.address_of_(), "buddy_list")
                    for page in islice(pages, 4):
                        yield page_to_virt(page).value_(), order, int(pgdat.node_id)


@on_kernel
def test_memcgs_and_their_obj_cgroups(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "dying").program()
    root = prog["root_mem_cgroup"].css.address_of_()
    left_behind = 0
    for css in css_for_each_descendant_pre(root):
        memcg = cast("struct mem_cgroup *", css)  # its first member
        removed = not css.flags & prog["CSS_ONLINE"]
        path = cgroup_path(css.cgroup).decode()
        holders = [memcg]
        if not memcg.type_.type.has_member("objcg"):
            holders = [memcg.nodeinfo[nid] for nid in range(4)]
        objcgs = [holder.objcg or getattr(holder, "orig_objcg", None) for holder in holders]
        (rows,) = rows_of(prog, memcg.value_() + 8)
        row = layer(rows, "mem_cgroup")
        assert (row["memcg"], row["removed"], row["offset"]) == (path, removed, 8)
        assert row["memcg_address"] == row["start"] == memcg.value_()
        for nid, objcg in enumerate(objcgs):
            if not objcg or path == "/":
                continue
            (rows,) = rows_of(prog, objcg.value_())
            row = layer(rows, "obj_cgroup")
            assert row["memcg_address"] == objcg.memcg.value_()
            assert row["charged_node"] == (nid if len(objcgs) > 1 else None)
            assert (f"left behind by {path} at" in str(row["what"])) is bool(removed)
            assert row["left_by"] == (path if removed else None)
            left_behind += bool(removed)
    # Before 6.7 a removed memcg does not tell which were its own.
    assert left_behind == 0 if series(kernel) == "6.1" else left_behind >= 11


@on_kernel
def test_open_files_and_sockets(lab: Lab, kernel: str) -> None:
    """Stacks of tasks are found from their ``task_struct``."""
    prog = lab.image(kernel, "4", "mixed").program()
    operations = prog.symbol("socket_file_ops").address
    names, owners = {}, {}
    for task in for_each_task(prog):
        for _, file in for_each_file(task) if task.files else ():
            if file.f_op.value_() == operations:
                sock = cast("struct socket *", file.private_data).sk
                owners[sock.value_()] = sock.sk_memcg.value_()
            elif file.f_inode.i_mode & 0o170000 == 0o100000:
                names[file.value_()] = file.f_path.dentry.d_name.name.string_().decode()
    for (_, name), rows in zip(names.items(), rows_of(prog, *names), strict=True):
        assert str(layer(rows, "open file")["what"]).endswith(name)
    for (_, memcg), rows in zip(owners.items(), rows_of(prog, *owners), strict=True):
        found = [row["memcg_address"] for row in rows if row["layer"] == "socket"]
        assert found == ([memcg] if memcg else [])
    for address, rows in zip(owners, rows_of(prog, *owners), strict=True):
        for row in rows:
            if row["layer"] == "socket":
                assert row["what"] == protocol_of(Object(prog, "struct sock *", address))
    assert len(names) > 10
    assert sum(map(bool, owners.values())) > 20


@on_kernel
def test_compressed_pages(lab: Lab, kernel: str) -> None:
    """A zswap entry leads to its data, and the data lead to the entry."""
    prog = lab.image(kernel, "4", "mixed").program()
    entries = list(ZswapReader(image_of(prog)).addresses()) if kernel.startswith("7.") else []
    for address in entries[:: max(len(entries) // 8, 1)]:
        entry = Object(prog, "struct zswap_entry *", address)
        (rows,) = rows_of(prog, address)
        row = layer(rows, "zswap entry")
        is_root = bool(entry.objcg.is_root)
        assert (row["objcg"], row["start"]) == (entry.objcg.value_(), address)
        assert row["charged"] == (0 if is_root else entry.length.value_())
        parts = [row for row in rows if row["layer"] == "zswap data"]
        assert sum(int(str(part["size"])) for part in parts) == entry.length.value_()
        for part in parts:
            last = int(str(part["start"])) + int(str(part["size"])) - 1
            (back,) = rows_of(prog, last)
            assert layer(back, "zswap entry")["start"] == address
            assert "zsmalloc" in str(layer(back, "page")["what"])
            if len(parts) == 1:
                (beyond,) = rows_of(prog, last + 1)
                others = [row["start"] for row in beyond if row["layer"] == "zswap entry"]
                assert address not in others
    assert len(entries) > 100 or kernel.startswith("6.")


@on_kernel
def test_objects_of_kfence(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    seen = 0
    for page in kfence_pages(image_of(prog)):
        thing = kfence_object(image_of(prog), page)
        if thing is None or thing.state != "allocated":
            continue
        (rows,) = rows_of(prog, thing.address + thing.size - 1)
        row = layer(rows, "object")
        assert (row["start"], row["offset"]) == (thing.address, thing.size - 1)
        cache = find_containing_slab_cache(prog, thing.address).name.string_().decode()
        assert row["what"] == f"{cache}, allocated, {KFENCE}"
        for address in (thing.address - 1, thing.address + thing.size):
            (rows,) = rows_of(prog, address)
            if address // PAGE == thing.address // PAGE:
                row = rows[-1]
                assert row["what"] == f"{cache}, allocated, {KFENCE}; the address is outside of it"
                assert (row["start"], row["offset"]) == (thing.address, address - thing.address)
        seen += 1
    assert seen > 10 or not kfence_pages(image_of(prog))


# What can go wrong


@pytest.mark.parametrize("kernel", ["7.3"])
def test_reads_little(lab: Lab, kernel: str) -> None:
    """One object of a slab needs no pass over the memory map, which is 16 MiB here."""
    prog = lab.image(kernel, "4", "mixed").program()
    address = next(iter(for_each_task(prog))).value_()
    rows_of(prog, address)
    memory = image_of(prog).memory
    before = memory.bytes_read
    rows_of(prog, address)
    assert memory.bytes_read - before < 1 << 20


@pytest.mark.parametrize("kernel", ["7.3"])
def test_what_is_of_nothing(lab: Lab, kernel: str, capsys: pytest.CaptureFixture[str]) -> None:
    core = lab.image(kernel, "4", "mixed").core
    for word, said in (
        ("ffff0000deadbeef", "unknown address: 0xffff0000deadbeef"),
        ("0x7fff00001000", "unknown address: 0x7fff00001000"),
        ("task", "task is not an address: an address is a hexadecimal number"),
        ("1" + 16 * "0", "is not an address: an address is a hexadecimal number"),
    ):
        assert main(["who", word, "-c", str(core), "--debuginfo", "btf"]) == 2
        out, error = capsys.readouterr()
        assert (out, len(error.splitlines())) == ("", 1)
        assert said in error


def test_addresses() -> None:
    assert parse_address("0xFF") == parse_address("ff") == 255
    for word in ("", "-1", "0x", "ff ff x"):
        with pytest.raises(UsageError):
            parse_address(word)


@on_kernel
def test_several_at_once(lab: Lab, kernel: str, capsys: pytest.CaptureFixture[str]) -> None:
    image = lab.image(kernel, "4", "mixed")
    first, second = [task.value_() for task in for_each_task(image.program())][:2]
    status = main(["who", f"{first:x}", f"{second:#x}", "--json", *image.arguments()])
    document = checked(json.loads(capsys.readouterr().out))
    assert status == 0
    asked = [{row["address"] for row in table["rows"]} for table in document["tables"]]
    assert asked == [{f"{first:#x}"}, {f"{second:#x}"}]


@on_kernel
def test_broken_cache_of_a_slab(
    lab: Lab, kernel: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page is identified; its slab is counted as unreadable."""
    image = lab.image(kernel, "4", "mixed")
    prog = image.program()
    task = next(iter(for_each_task(prog)))
    page = pfn_to_page(prog, 0)
    for info in identify_address_all(prog, task.value_()):
        if isinstance(info, IdentifiedSlabObject):
            page = info.slab_object_info.slab
    out = tmp_path / "poked.core"
    place = page.slab_cache.address_
    poke.poke(image.core, out, image.vmlinux, [(f"u64:{place:#x}", 0xDEAD000000000000)])
    status = main(["who", f"{task.value_():x}", "--json", *image.arguments(out)])
    (table,) = checked(json.loads(capsys.readouterr().out))["tables"]
    assert status == 3
    assert [row["layer"] for row in table["rows"]] == ["page"]
    with pytest.raises(FaultError):
        prog.read(0xDEAD000000000000, 8)
    out.unlink()
