# SPDX-License-Identifier: LGPL-2.1-or-later
"""
``slabinfo --by`` and ``percpu --by`` are compared with sums over plain walks, which read one
object and one bit at a time.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest
from drgn import Program
from support.charge_module import CPUS, PAGE
from support.guests import KERNELS, Lab
from support.percpu import PlainArea, nid_of, plain_areas
from support.reference import PlainSlab, node_spans, plain_slabs
from support.views import ask

from memcg_inspect.cli import main
from memcg_inspect.image.image import image_of
from memcg_inspect.tables import Answer, Value
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.percpu import percpu
from memcg_inspect.views.slabinfo import LARGE_KMALLOC, slabinfo

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]

Row = dict[str, Value]
Key = tuple[Value, ...]
#: The fields that stand for the dimensions in keys.
FIELDS = {"memcg": "memcg_address", "cache": "cache_address", "node": "node"}
#: ``sizeof(struct obj_cgroup *)``, which is charged for each object and each four bytes of percpu.
POINTER = 8


def rows(answer: Answer) -> list[Row]:
    return [answer.tables[0].values(row) for row in answer.tables[0].rows]


def number(value: Value) -> int:
    assert isinstance(value, int)
    return value


def key_of(row: Row, by: Iterable[str]) -> Key:
    return tuple(row[FIELDS[name]] for name in by)


def found(answer: Answer, by: Iterable[str], fields: Iterable[str]) -> dict[Key, Key]:
    by, fields = list(by), list(fields)
    made = {key_of(row, by): tuple(row[field] for field in fields) for row in rows(answer)}
    assert len(made) == len(rows(answer))
    sizes = [number(row["bytes"]) for row in rows(answer)]
    assert sizes == sorted(sizes, reverse=True)
    return made


class SlabSums:
    """Sums of slabs and of large kmallocs by any dimensions."""

    def __init__(self, prog: Program, by: Iterable[str]) -> None:
        self.by = list(by)
        self.payers = Payers(image_of(prog))
        self.sums: defaultdict[Key, Counter[str]] = defaultdict(Counter)
        self.room: Counter[Key] = Counter()
        self.others: defaultdict[Key, set[Value]] = defaultdict(set)

    def _key(self, payer: Value, cache: Value, nid: Value) -> Key:
        values = {"memcg": payer, "cache": cache, "node": nid}
        return tuple(values[name] for name in self.by)

    def slab(self, slab: PlainSlab) -> None:
        size, owners = slab.cache.size.value_(), Counter[Value]()
        for objcg, count in slab.charged.items():
            owners[self.payers.payer(objcg)] += count
        charged = owners.total()
        owners[None] = slab.inuse - charged
        owners = +owners
        seen = set()
        for payer, count in owners.items():
            key = self._key(payer, slab.cache.value_(), slab.nid)
            charge = count * (size + POINTER) if payer is not None else 0
            self.sums[key].update(objects=count, bytes=count * size, charged=charge)
            if key not in seen:
                self.sums[key].update(slabs=1, slab_bytes=slab.pages * PAGE)
                self.room[key] += slab.room * size
                self.sums[key]["shared"] += len(owners) > 1
                self.others[key] |= owners.keys() - {payer, None}
            seen.add(key)

    def large(self, row: Row) -> None:
        """Add a row of large kmallocs by memcg and node, which other tests compare with nodes."""
        key = self._key(row["memcg_address"], None, row["node"])
        for field in ("objects", "bytes", "charged", "slabs", "slab_bytes"):
            self.sums[key][field] += number(row[field] or 0)
        self.room[key] += number(row["bytes"])

    def expected(self, fields: Iterable[str]) -> dict[Key, Key]:
        for key, sums in self.sums.items():
            sums["others"] = len(self.others[key])
        made = {}
        for key, sums in self.sums.items():
            share = sums["bytes"] / self.room[key]
            made[key] = tuple(share if f == "utilisation" else sums[f] for f in fields)
        return made


@pytest.mark.parametrize("kernel", KERNELS)
def test_slabs_by_any_dimensions_are_plain_sums(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    slabs = list(plain_slabs(prog))
    large = [r for r in rows(slabinfo(image_of(prog), by_node=True)) if r["cache"] == LARGE_KMALLOC]
    assert large
    every = ("objects", "bytes", "charged", "slabs", "slab_bytes", "utilisation")
    for by in (
        ("memcg",), ("cache",), ("node",), ("memcg", "node"), ("memcg", "cache"),
        ("cache", "node"), ("memcg", "cache", "node"),
    ):  # fmt: skip
        fields = (*every, "shared", "others") if "memcg" in by else every
        answer = slabinfo(image_of(prog), by=by)
        if "cache" in by:
            # Large kmallocs have a row for each size, or numbers that are not known.
            answer.tables[0].rows[:] = [  # type: ignore[index]
                row for row in answer.tables[0].rows if row.cache != LARGE_KMALLOC
            ]
        sums = SlabSums(prog, by)
        for slab in slabs:
            sums.slab(slab)
        for row in large if "cache" not in by else ():
            sums.large(row)
        assert found(answer, by, fields) == sums.expected(fields), by


@pytest.mark.parametrize("kernel", KERNELS)
def test_bytes_of_large_kmallocs_by_cache_are_those_by_memcg(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    for field in ("bytes", "charged", "slab_bytes"):
        by_cache, by_node = (
            sum(number(r[field]) for r in rows(answer) if r["cache"] == LARGE_KMALLOC)
            for answer in (
                slabinfo(image_of(prog), by=["cache"]),
                slabinfo(image_of(prog), by_node=True),
            )
        )
        assert by_cache == by_node > 0


class PercpuSums:
    """Sums of percpu allocations by any dimensions."""

    def __init__(self, prog: Program) -> None:
        self.payers, self.spans = Payers(image_of(prog)), node_spans(prog)
        self.prog = prog
        self.offsets = [prog["pcpu_unit_offsets"][cpu].value_() for cpu in range(CPUS)]

    def nodes(self, area: PlainArea) -> Counter[int]:
        """Return the bytes of all copies, by the node of each page that they are on."""
        sizes: Counter[int] = Counter()
        for offset in self.offsets:
            start = area.base + area.offset + offset
            for page in range(start // PAGE, (start + area.size - 1) // PAGE + 1):
                low, high = max(start, page * PAGE), min(start + area.size, (page + 1) * PAGE)
                sizes[nid_of(self.prog, self.spans, low)] += high - low
        return sizes

    def expected(self, areas: Iterable[PlainArea], by: Iterable[str]) -> dict[Key, Key]:
        by, sums = list(by), defaultdict[Key, Counter[str]](Counter)
        for area in areas:
            payer = self.payers.payer(area.objcg) if area.objcg else None
            charged = area.size * CPUS + area.size // 4 * POINTER if area.objcg else 0
            sizes = self.nodes(area)
            for nid in sizes if "node" in by else (None,):
                key = tuple({"memcg": payer, "node": nid}[name] for name in by)
                part = sizes.total() if nid is None else sizes[nid]
                sums[key].update(count=1, bytes=part, charged=charged)
        fields = ("count", "bytes") if "node" in by else ("count", "bytes", "charged")
        return {key: tuple(found[field] for field in fields) for key, found in sums.items()}


@pytest.mark.parametrize("kernel", KERNELS)
def test_percpu_by_any_dimensions_is_a_plain_sum(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    areas, sums = plain_areas(prog), PercpuSums(prog)
    for by in (("memcg",), ("node",), ("memcg", "node")):
        answer = percpu(image_of(prog), by=by)
        names = {column.name for column in answer.tables[0].columns}
        fields = ["count", "bytes", *(["charged"] if "charged" in names else [])]
        assert ("node" in by) == ("node" in names) != ("node_0" in names) == ("charged" in names)
        assert found(answer, by, fields) == sums.expected(areas, by), by


@pytest.mark.parametrize("kernel", KERNELS)
def test_choosing_rows_keeps_them_apart(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    for view, of in (("slabinfo", "cache"), ("percpu", "memcg")):
        answer = ask(prog, view, "--by", of, "--memcg", "/files/web", "--node", "2")
        assert {"memcg", "node"} <= {column.name for column in answer.tables[0].columns}
        assert answer == ask(prog, view, "--by", f"node,{of},memcg")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("view", ["slabinfo", "percpu"])
def test_text_lists_the_largest_and_sums_up_the_others(
    lab: Lab, kernel: str, view: str, capsys: pytest.CaptureFixture[str]
) -> None:
    core = str(lab.image(kernel, "4", "mixed").core)
    command = (view, "--by", "memcg", "--fields", "memcg,charged,bytes", "-c", core)
    common = ("--debuginfo", "btf")
    assert main((*command, *common, "--scripted")) == 0
    scripted = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    whole = [(int(c), int(b)) for _, c, b in (line.split("\t") for line in scripted)]
    for option, most in (((), 20), (("--top", "3"), 3)):
        assert main((*command, *common, *option)) == 0
        said = capsys.readouterr().out.split("\n\n")[1].splitlines()[2:]
        cells = [re.split(r" {3,}", line.strip()) for line in said]
        amounts = [tuple(int(cell.replace(",", "")) for cell in line[1:]) for line in cells]
        assert amounts[:most] == whole[:most]
        rest = whole[most:]
        if rest:
            assert cells[most][0] == f"({len(rest)} other row{'s' * (len(rest) > 1)})"
            assert amounts[most:] == [(sum(c for c, _ in rest), sum(b for _, b in rest))]
        else:
            assert len(amounts) == len(whole)
