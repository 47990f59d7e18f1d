# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Snapshots of real images: held against the guest's memory.numa_stat and its clock, against a plain
walk of all slab objects, and on the command line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support.guest_files import still, still_on_lists
from support.guests import BUILT_KERNELS, KERNELS, GuestImage, Lab
from support.reference import charged_slab_objects

from memcg_inspect.collect import charge_snapshot
from memcg_inspect.collect.charge_snapshot import take_snapshot
from memcg_inspect.collect.owners import read_owners
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.model import ImageError
from memcg_inspect.model_snapshot import ChargeSnapshot
from memcg_inspect.snapshots.file import read_snapshot

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]


def taken(image: GuestImage) -> tuple[Image, ChargeSnapshot]:
    found = image_of(image.program())
    return found, take_snapshot(found)


def below(found: ChargeSnapshot, path: str) -> set[int]:
    """Return the numbers of a memcg and of those below it."""
    return {
        number
        for number, memcg in enumerate(found.memcgs)
        if path == "/" or memcg.path == path or memcg.path.startswith(f"{path}/")
    }


@pytest.mark.parametrize("kernel", KERNELS)
def test_charges_are_what_the_guest_says(lab: Lab, kernel: str) -> None:
    """User pages of each memcg and node are on its LRU lists, as memory.numa_stat has them."""
    guest = lab.image(kernel, "4", "mixed")
    _, found = taken(guest)
    assert found.is_whole
    compared = 0
    for (path, nid), value in still_on_lists(guest).items():
        memcgs = below(found, path)
        users = [c for c in found.charges if c.kind == "lru" and c.memcg in memcgs]
        assert sum(c.bytes for c in users if c.node == nid) == value, (path, nid)
        compared += value > 0
    assert compared >= 10


@pytest.mark.parametrize("kernel", KERNELS)
def test_slab_objects_are_those_of_a_plain_walk(lab: Lab, kernel: str) -> None:
    image, found = taken(lab.image(kernel, "2", "files"))
    owners = read_owners(image)
    addresses = list(owners.memcgs)
    sizes, numbers = charged_slab_objects(image.prog)
    expected: Counter[tuple[int, int, str]] = Counter()
    for (objcg, nid, _), size in sizes.items():
        payer = owners.memcgs[owners.objcgs[objcg].memcg].payer
        expected[addresses.index(payer), nid, "bytes"] += size
    for (objcg, nid, _), number in numbers.items():
        payer = owners.memcgs[owners.objcgs[objcg].memcg].payer
        expected[addresses.index(payer), nid, "number"] += number
    of_caches: Counter[tuple[int, int, str]] = Counter()
    of_ledger: Counter[tuple[int, int, str]] = Counter()
    for slab in found.slabs:
        if slab.memcg is not None and slab.node is not None:
            of_caches[slab.memcg, slab.node, "bytes"] += slab.bytes
            of_caches[slab.memcg, slab.node, "number"] += slab.number
    for charge in found.charges:
        if charge.kind == "slab" and charge.memcg is not None and charge.node is not None:
            of_ledger[charge.memcg, charge.node, "bytes"] += charge.bytes
            of_ledger[charge.memcg, charge.node, "number"] += charge.number
    assert of_caches == of_ledger == expected
    assert any(slab.memcg is None for slab in found.slabs)


@pytest.mark.parametrize("kernel", KERNELS)
def test_counters_are_what_the_guest_says(lab: Lab, kernel: str) -> None:
    """``shmem`` of memcgs without children, as in memory.stat after the guest has flushed it."""
    guest = lab.image(kernel, "4", "mixed")
    _, found = taken(guest)
    own = {
        found.memcgs[counter.memcg].path: counter.value * found.image.page_size
        for counter in found.counters
        if counter.item == "NR_SHMEM"
        and counter.node is None
        and found.memcgs[counter.memcg].state == "online"
    }
    by_node: Counter[str] = Counter()
    for counter in found.counters:
        if counter.item == "NR_SHMEM" and counter.node is not None:
            by_node[found.memcgs[counter.memcg].path] += counter.value * found.image.page_size
    said = still(guest, "memory.stat")
    paths = [memcg.path for memcg in found.memcgs if memcg.state == "online"]
    leaves = [p for p in paths if not any(q.startswith(f"{p}/") for q in paths) and p != "/"]
    compared = 0
    for path in leaves:
        value = said.get((path, "shmem", None))
        if value:
            assert by_node[path] == value
            assert own.get(path, value) == value
            compared += 1
    assert compared


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_time_is_that_of_the_guest(lab: Lab, kernel: str) -> None:
    """The guest's clock is that of this machine. The file is written when the guest has stopped."""
    guest = lab.image(kernel, "2", "files")
    found = image_of(guest.program())
    time = take_snapshot(found).time
    assert time is not None
    written = guest.core.stat().st_mtime
    assert written - 600 < time.realtime / 10**9 <= written + 5
    assert 0 < time.boottime / 10**9 < 600


def test_several_processes_take_the_same(lab: Lab) -> None:
    guest = lab.image("7.3", "4", "mixed")
    alone, image = take_snapshot(image_of(guest.program())), image_of(guest.program())
    image.jobs = 3
    assert take_snapshot(image) == alone


def test_a_running_kernel_is_read_three_times(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was missing the first times may be there then."""
    image = image_of(lab.image("7.3", "2", "files").program())
    whole = take_snapshot(image)
    gaps, taken = replace(whole, unread={"slab": 1}), list[ChargeSnapshot | Exception]()

    def take(_: Image) -> ChargeSnapshot:
        if isinstance(found := taken.pop(0), Exception):
            raise found
        return found

    monkeypatch.setattr(charge_snapshot, "_take", take)
    error = ImageError("a list that does not end")
    taken[:] = [gaps, whole]
    assert take_snapshot(image) == gaps
    monkeypatch.setattr(Image, "is_moving", True)
    for several in (
        [whole],
        [gaps, whole],
        [gaps, gaps, whole],
        [error, gaps, error],
        [error, whole],
    ):
        taken[:] = [*several, error]
        expected = next((one for one in several if one is whole), gaps)
        assert take_snapshot(image) == expected
        assert taken == [error]
    taken[:] = [error, error, error, whole]
    with pytest.raises(ImageError):
        take_snapshot(image)
    assert taken == [whole]
    # Who asked for it does not wait any longer.
    taken[:] = [gaps, whole]
    monkeypatch.setattr(image.progress, "stop", True)
    assert take_snapshot(image) == gaps


@pytest.mark.parametrize("kernel", [k for k in ("7.3-lab",) if k in BUILT_KERNELS])
def test_call_sites(lab: Lab, kernel: str) -> None:
    """All that memcgs pay for was allocated somewhere."""
    guest = lab.image(kernel, "2", "files", append="sysctl.vm.mem_profiling=1")
    _, found = taken(guest)
    assert found.sites
    assert any(site.site.startswith("fs/dcache.c:") for site in found.sites)
    charged = sum(site.bytes for site in found.sites if site.memcg is not None)
    assert charged > 1 << 20


def run(folder: Path, *words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "memcg_inspect", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ | {"COLUMNS": "80"},
        timeout=600,
    )
    return done.returncode, done.stdout, done.stderr


def test_commands(lab: Lab, tmp_path: Path) -> None:
    core = str(lab.image("7.3", "2", "files").core)
    later = str(lab.image("7.3", "4", "mixed").core)
    status, said, error = run(tmp_path, "snapshot", "-c", core, "-o", "a.memcg")
    assert (status, error) == (0, "")
    assert said.startswith("a.memcg: ")
    assert "memcgs, " in said
    assert read_snapshot(str(tmp_path / "a.memcg")).is_whole
    # A snapshot, a vmcore; either way round.
    status, said, error = run(tmp_path, "diff", "a.memcg", later, "--json")
    assert (status, error) == (0, "")
    document = json.loads(said)
    assert document["command"] == "diff"
    first = document["tables"][0]
    assert [row["growth"] for row in first["rows"]] == sorted(
        (row["growth"] for row in first["rows"]), reverse=True
    )
    status, said, _ = run(tmp_path, "diff", later, "a.memcg", "--json")
    back = json.loads(said)["tables"][0]
    assert first["totals"]["growth"] == -back["totals"]["growth"]
    # The default name has the host and the time.
    status, said, error = run(tmp_path, "snapshot", "-c", core)
    assert (status, error) == (0, "")
    assert len(list(tmp_path.glob("*Z.memcg"))) == 1


def test_wrong_arguments(lab: Lab, tmp_path: Path) -> None:
    core = str(lab.image("7.3", "2", "files").core)
    (tmp_path / "some").write_bytes(b"x" * 10_000)
    for words, why in (
        (["diff", "some"], "name two snapshots or more"),
        (["diff", "none", "none"], "none: No such file"),
        (["diff", "some", "some"], "some is neither an ELF core nor a dump"),
        (["-c", core, "diff", "some", "some"], "diff takes files as arguments"),
        (["diff", "a", "b", "--by", "cpu"], "'cpu' is not one of memcg, node"),
        (["watch", "-c", core], "a vmcore does not change"),
        (["watch", "--qemu", "none", "--pause"], "--pause would stop the guest all the time"),
        (["watch", "--qemu", "none", "--every", "0"], "'0' is not a number from 1 to 86,400"),
        (["watch", "--qemu", "none"], "No such file"),
        (["snapshot", "-c", core, "-o", "/nowhere/a"], "No such file or directory"),
        (["snapshot", "-c", core, "--pause"], "--pause needs --qemu"),
    ):
        status, said, error = run(tmp_path, *words)
        assert (status, said) == (2, ""), words
        assert len(error.splitlines()) == 1, error
        assert why in error, error
