# SPDX-License-Identifier: LGPL-2.1-or-later
"""Helpers of interactive sessions, held against drgn's own and what the guest says."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections import Counter

import drgn
import pytest
from drgn.helpers.linux.cgroup import cgroup_path
from drgn.helpers.linux.mm import for_each_page
from drgn.helpers.linux.percpu import per_cpu_ptr
from drgn.helpers.linux.slab import slab_object_info
from support.guest_files import numbers, path_of
from support.guests import DEBIAN_KERNELS, KERNELS, GuestImage, Lab

import memcg_inspect
from memcg_inspect.model import MemcgInspectError

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def image(kernel: str, lab: Lab) -> GuestImage:
    return lab.image(kernel, workload="mixed")


def stood_still(image: GuestImage) -> dict[tuple[str, str, int | None], int]:
    """What memory.stat of each memcg said twice alike, by path and item."""
    first, last = (numbers(image.guest / which / "cgroup", "memory.stat") for which in "12")
    return {key: value for key, value in last.items() if first.get(key) == value}


def test_memcgs_are_the_guests(image: GuestImage) -> None:
    prog = image.program()
    memcgs = list(memcg_inspect.for_each_memcg(prog))
    assert {memcg.type_.type_name() for memcg in memcgs} == {"struct mem_cgroup *"}
    paths = [memcg_inspect.memcg_path(memcg) for memcg in memcgs]
    said = {
        path_of(f, image.guest / "2/cgroup") for f in image.guest.glob("2/cgroup/**/memory.stat")
    }
    assert said <= set(paths)
    for memcg, path in zip(memcgs, paths, strict=True):
        cgroup = memcg.css.cgroup
        if path in said and memcg == memcg_inspect.find_memcg(prog, path):
            assert cgroup_path(cgroup).decode() == path
    with pytest.raises(MemcgInspectError, match="there is no memcg /nowhere"):
        memcg_inspect.find_memcg(prog, "/nowhere")


def test_counters_are_the_guests(image: GuestImage) -> None:
    prog = image.program()
    compared = 0
    for memcg in memcg_inspect.for_each_memcg(prog):
        path = memcg_inspect.memcg_path(memcg)
        if memcg != memcg_inspect.find_memcg(prog, path):
            continue
        for item, name in (("NR_SLAB_RECLAIMABLE_B", "slab_reclaimable"), ("MEMCG_SOCK", "sock")):
            said = stood_still(image).get((path, name, None))
            if said is not None:
                value = memcg_inspect.memcg_counter(memcg, item)
                unit = 1 if item.endswith("_B") else 4096
                assert (path, value.exact * unit) == (path, said)
                compared += said > 0
    assert compared > 5
    root = memcg_inspect.find_memcg(prog, "/")
    whole = memcg_inspect.memcg_counter(root, "NR_SLAB_UNRECLAIMABLE_B").exact
    nodes = [memcg_inspect.memcg_counter(root, "NR_SLAB_UNRECLAIMABLE_B", nid) for nid in range(4)]
    assert sum(value.exact for value in nodes) == whole > 0
    with pytest.raises(MemcgInspectError, match="keeps no NO_SUCH_ITEM"):
        memcg_inspect.memcg_counter(root, "NO_SUCH_ITEM")


def test_slab_objects_are_drgns(image: GuestImage) -> None:
    prog = image.program()
    seen: Counter[str] = Counter()
    slabs = {}
    for thing in memcg_inspect.for_each_charged_slab_object(prog):
        seen[thing.cache] += 1
        if seen[thing.cache] <= 3:
            slabs[thing.address] = thing
    assert sum(seen.values()) > 1000
    for address, thing in slabs.items():
        info = slab_object_info(prog, address)
        assert info is not None
        assert (info.address, info.slab) == (address, thing.slab)
        assert info.slab_cache.name.string_().decode() == thing.cache
        index = (address - info.slab_cache.red_left_pad.value_() - first(thing)) // thing.size
        assert memcg_inspect.slab_objcg(thing.slab, index) == thing.objcg
        assert memcg_inspect.page_to_nid(thing.slab) == thing.nid
        nid = memcg_inspect.objcg_nid(thing.objcg)
        assert (nid is None) == (not image.report().image.accounting.startswith("objcg-per"))
    some = next(iter(slabs.values()))
    memcg = memcg_inspect.objcg_memcg(some.objcg)
    mine = memcg_inspect.for_each_charged_slab_object(prog, memcg=memcg, nid=some.nid)
    assert any(thing == some for thing in mine)
    assert not memcg_inspect.slab_objcg(some.slab, 100_000)


def first(thing: memcg_inspect.ChargedSlabObject) -> int:
    from drgn.helpers.linux.mm import page_to_virt

    return int(page_to_virt(drgn.cast("struct page *", thing.slab)).value_())


def test_nodes_of_pages_are_drgns(lab: Lab) -> None:
    prog = lab.image(DEBIAN_KERNELS[-1]).program()
    starts = {
        nid: int(prog["node_data"][nid].node_start_pfn) for nid in range(4)
    }  # a node's page frames begin there
    nids = Counter()
    for number, page in enumerate(for_each_page(prog)):
        if number % 997 == 0:
            pfn = (page.value_() - prog["vmemmap"].value_()) // drgn.sizeof(page[0])
            nid = max((n for n in starts if starts[n] <= pfn), key=lambda n: starts[n], default=0)
            assert memcg_inspect.page_to_nid(page) == nid
            nids[nid] += 1
    assert len(nids) == 4


def test_percpu_is_the_guests(image: GuestImage) -> None:
    prog = image.program()
    said = {path: v for (path, name, _), v in stood_still(image).items() if name == "percpu"}
    by_memcg: Counter[int] = Counter()
    for alloc in memcg_inspect.for_each_pcpu_alloc(prog):
        by_memcg[memcg_inspect.objcg_memcg(alloc.objcg).value_()] += alloc.charge
        assert sum(alloc.nodes.values()) == 4 * alloc.size
    compared = 0
    paths = [memcg_inspect.memcg_path(memcg) for memcg in memcg_inspect.for_each_memcg(prog)]
    for path, percpu in said.items():
        if path != "/" and not any(other.startswith(path + "/") for other in paths):
            found = memcg_inspect.for_each_pcpu_alloc(prog, memcg=path)
            assert sum(alloc.charge for alloc in found) == percpu, path
            memcg = memcg_inspect.find_memcg(prog, path)
            assert by_memcg[memcg.value_()] <= percpu
            compared += percpu > 0
    assert compared > 3


def test_percpu_pointers_are_the_kernels(image: GuestImage) -> None:
    """The memcgs' own counters are percpu memory that their parents pay for."""
    prog = image.program()
    pointers = {alloc.pointer for alloc in memcg_inspect.for_each_pcpu_alloc(prog)}
    memcgs = list(memcg_inspect.for_each_memcg(prog))[1:]
    held = [memcg.vmstats_percpu for memcg in memcgs]
    assert sum(pointer.value_() in pointers for pointer in held) > 3
    assert per_cpu_ptr(held[-1], 0).value_()


def converse(image: GuestImage, *lines: str) -> list[str]:
    """Type lines into a real drgn session, and return what each was answered."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "drgn", "-c", str(image.core), "--no-default-symbols", "-q"]
    environment = os.environ | {"TERM": "dumb", "PYTHON_BASIC_REPL": "1", "COLUMNS": "200"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True
    ) as process:
        os.close(theirs)
        # drgn begins with lines of its own that look as if they were typed
        wait_for(ours, "import *\r\n>>> ")
        said = []
        for line in lines:
            os.write(ours, line.encode() + b"\n")
            said.append(wait_for(ours, "\r\n>>> ").partition("\n")[2])
        os.write(ours, b"exit()\n")
        wait_for(ours, None)
        process.wait(timeout=30)
    os.close(ours)
    return [answer.removesuffix(">>> ").replace("\r", "").strip() for answer in said]


def wait_for(terminal: int, prompt: str | None) -> str:
    """Read until a prompt is shown, or until nobody is left."""
    shown, end = "", time.monotonic() + 90
    while prompt is None or not shown.endswith(prompt):
        ready, _, _ = select.select([terminal], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"no answer after: {shown}"
        try:
            data = os.read(terminal, 65536)
        except OSError:
            break
        if not data:
            break
        shown += data.decode(errors="replace")
    return shown


def test_in_a_session(lab: Lab) -> None:
    image = lab.image(DEBIAN_KERNELS[-1], workload="mixed")
    audited, cpus, missing, nonsense, text, verdict, _, path, number = converse(
        image,
        "%memcg audit --json | grep -c verdict",
        "%memcg stock --scripted --fields cpu | sort -u",
        "%memcg stat /nowhere",
        "%memcg nonsense",
        "%memcg audit",
        "_.verdict",
        "import memcg_inspect",
        "memcg_inspect.memcg_path(memcg_inspect.find_memcg('/dying'))",
        "sum(1 for m in memcg_inspect.for_each_memcg())",
    )
    assert audited == "1"
    assert cpus.split() == ["0", "1", "2", "3"]
    assert missing.startswith("drgn: error: there is no memcg /nowhere")
    assert "invalid choice: 'nonsense'" in nonsense
    assert text.startswith("EXACT")
    assert "references" in text
    assert verdict == "'exact'"
    assert path == "'/dying'"
    assert int(number) == len(image.report().memcgs)


def test_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys\nbefore = set(sys.modules)\nimport memcg_inspect.commands\n"
        "new = set(sys.modules) - before\n"
        "print(*sorted(m for m in new if 'memcg_inspect' in m or m == 'rich'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import drgn, drgn.commands.linux\n{code}"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["memcg_inspect", "memcg_inspect.commands"]
