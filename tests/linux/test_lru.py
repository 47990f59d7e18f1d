# SPDX-License-Identifier: LGPL-2.1-or-later
"""LRU lists: the flags of folios, compared with the lists and with the guest's own files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import drgn
import pytest
from drgn import Object, Program, sizeof
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.mm import compound_order
from support.free_pages import free_page
from support.guest_files import still
from support.guests import (
    DEBIAN_KERNELS,
    KERNELS,
    PERNODE_KERNELS,
    GuestImage,
    Lab,
    Plant,
)
from support.planting import Fault, Subject

from memcg_inspect.checks.evidence_query import EvidenceQuery
from memcg_inspect.checks.identities.lru import lru_rows
from memcg_inspect.collect import collect
from memcg_inspect.collect.evidence import find_evidence
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.memcontrol import nodeinfo
from memcg_inspect.linux.mm.mm_inline import LruReader
from memcg_inspect.linux.mm.mm_types import LruFlags
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.page_flags import FlagBits, page_flags
from memcg_inspect.model import Coverage
from memcg_inspect.report import Row

#: The items of memory.numa_stat that count pages of these lists.
KINDS = {"anon": ("ANON]", "_ANON]"), "file": ("FILE]", "_FILE]")}

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]

#: Kernels that are booted with a movable zone.
MOVABLE = [k if k == "7.3" else pytest.param(k, marks=pytest.mark.long) for k in KERNELS]


def lists(pn: Object) -> list[tuple[str, Object]]:
    """Return the head of each list of a lruvec with the name of its counter."""
    prog = pn.prog_
    zones = {e.value: e.name for e in prog.type("enum zone_type").enumerators}
    heads = [
        (name, pn.lruvec.lists[prog[name].value_()])
        for name in (
            *("LRU_INACTIVE_ANON", "LRU_ACTIVE_ANON"),
            *("LRU_INACTIVE_FILE", "LRU_ACTIVE_FILE"),
        )
    ]
    if not hasattr(pn.lruvec, "lrugen"):
        return heads
    gen = pn.lruvec.lrugen
    array = gen.folios if hasattr(gen, "folios") else gen.lists
    for generation, types in enumerate(array):
        for kind, by_zone in zip(("LRU_GEN_ANON", "LRU_GEN_FILE"), types, strict=True):
            heads += [(f"[{generation}][{kind}][{zones[z]}]", h) for z, h in enumerate(by_zone)]
    return heads


def walked(prog: Program, memcgs: list[int]) -> Counter[tuple[int, int, str]]:
    """Count the pages on each list by walking the list."""
    pages: Counter[tuple[int, int, str]] = Counter()
    for memcg in memcgs:
        for nid, pn in nodeinfo(image_of(prog), Object(prog, "struct mem_cgroup *", memcg)):
            for name, head in lists(pn):
                for page in list_for_each_entry("struct page", head.address_of_(), "lru"):
                    pages[memcg, nid, name] += 1 << compound_order(page).value_()
    return pages


def by_type(pages: Counter[tuple[int, int, str]]) -> Counter[tuple[int, int, str]]:
    """Add up the generations of each type and zone."""
    sums: Counter[tuple[int, int, str]] = Counter()
    for (memcg, nid, name), amount in pages.items():
        sums[memcg, nid, re.sub(r"^\[\d\]", "", name)] += amount
    return sums


def aged_lruvecs(prog: Program, memcgs: list[int]) -> Iterator[tuple[int, int]]:
    """Find lruvecs that have a new generation since lru_gen_init_lruvec(), by memcg and node."""
    for memcg in memcgs:
        for nid, pn in nodeinfo(image_of(prog), Object(prog, "struct mem_cgroup *", memcg)):
            gen = getattr(pn.lruvec, "lrugen", None)
            if gen is not None and gen.max_seq != 3:  # MIN_NR_GENS + 1
                yield memcg, nid


def name_of_list(item: str) -> str:
    """Return the name of a list in :func:`lists`. Lists of the classic LRU have no zones."""
    if item.startswith("lrugen."):
        return item.removeprefix("lrugen.nr_pages")
    return item.split("[")[-1].removesuffix("]")


@pytest.mark.parametrize("workload", ["mixed", "dying"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_folios_are_on_the_lists_they_say(lab: Lab, kernel: str, workload: str) -> None:
    prog = lab.image(kernel, "4", workload).program(dwarf=True)
    snapshot = collect(image_of(prog))
    assert snapshot.lru is not None and snapshot.lru.by_generation
    found: Counter[tuple[int, int, str]] = Counter()
    for row in lru_rows(snapshot):
        if "LRU_UNEVICTABLE" not in row.item:  # counted, and on no list
            found[row.memcg or 0, row.nid or 0, name_of_list(row.item)] += row.found["lru"]
    on_lists = walked(prog, list(snapshot.memcgs))
    assert by_type(found) == by_type(on_lists)
    # folio_update_gen() changes the flags of a folio before it moves to the other list.
    aged = set(aged_lruvecs(prog, list(snapshot.memcgs)))
    found, on_lists = (
        Counter({key: pages for key, pages in of.items() if key[:2] not in aged})
        for of in (found, on_lists)
    )
    assert on_lists.total() > 1000
    assert found == on_lists


@pytest.mark.parametrize("nodes", ["1", "4", "2cpu+6mem"])
@pytest.mark.parametrize("workload", ["mixed", "dying"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_list_has_its_size(lab: Lab, kernel: str, workload: str, nodes: str) -> None:
    report = lab.image(kernel, nodes, workload).report()
    rows = [row for row in report.rows if row.identity == "lru"]
    assert [row for row in rows if row.status != "exact"] == []
    assert report.coverage["lru"].unreadable == 0
    root = next(m.address for m in report.memcgs if m.parent is None)
    # Up to 7.0, pages of the root memcg are not charged.
    assert any(row.memcg == root for row in rows)
    assert len({row.memcg for row in rows}) >= 3
    assert sum(row.found["lru"] for row in rows) > 1000


@pytest.mark.long
@pytest.mark.parametrize("kernel", MOVABLE)
def test_folios_in_another_zone(lab: Lab, kernel: str) -> None:
    report = lab.image(kernel, "2", "mixed", append="movablecore=400M").report()
    rows = [row for row in report.rows if row.identity == "lru"]
    assert [row for row in rows if row.status != "exact"] == []
    in_zone = Counter(next(z for z in ("DMA", "NORMAL", "MOVABLE") if z in r.item) for r in rows)
    assert in_zone["MOVABLE"] > 5
    assert len(in_zone) == 2


@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_generation_is_where_it_was_derived(lab: Lab, kernel: str) -> None:
    """No other field of the flags matches the lists as well as the derived one."""
    prog = lab.image(kernel, "4", "mixed").program(dwarf=True)
    root = prog["root_mem_cgroup"]
    gen = root.nodeinfo[0].lruvec.lrugen
    enabled = bool(gen.enabled)
    flags = page_flags(image_of(prog))
    assert flags.generation is not None
    samples = [
        (generation + 1, flags_word(page))
        for child in [root, *children(root)]
        for _, pn in nodeinfo(image_of(prog), child)
        for generation, heads in enumerate(generations(pn))
        for head in heads
        for page in list_for_each_entry("struct page", head.address_of_(), "lru")
    ]
    assert bool(samples) == enabled
    width = flags.generation.width
    right = {
        shift
        for shift in range(25, flags.zone.shift - width + 1)
        if samples and all(FlagBits(shift, width).get(word) == g for g, word in samples)
    }
    assert right == ({flags.generation.shift} if enabled else set())


def flags_word(page: Object) -> int:
    is_struct = page.flags.type_.unaliased_kind() == drgn.TypeKind.STRUCT  # 7.x
    return page.flags.f.value_() if is_struct else page.flags.value_()


def children(memcg: Object) -> list[Object]:
    return [
        drgn.container_of(css, "struct mem_cgroup", "css")
        for css in list_for_each_entry(
            "struct cgroup_subsys_state", memcg.css.children.address_of_(), "sibling"
        )
    ]


def generations(pn: Object) -> list[list[Object]]:
    gen = pn.lruvec.lrugen
    array = gen.folios if hasattr(gen, "folios") else gen.lists
    return [[head for by_zone in types for head in by_zone] for types in array]


@pytest.mark.long
@pytest.mark.parametrize("kernel", MOVABLE)
def test_zone_holds_the_page(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "2", "mixed", append="movablecore=400M").program()
    bits, seen = page_flags(image_of(prog)).zone, set()
    for nid in (0, 1):
        for number, zone in enumerate(prog["node_data"][nid].node_zones):
            if zone.present_pages:
                page = prog["vmemmap"] + zone.zone_start_pfn
                assert bits.get(flags_word(page)) == number
                seen.add(number)
    assert len(seen) >= 2


def sums_below(
    snapshot_rows: list[Row], below: dict[int, set[int]]
) -> Counter[tuple[int, str, int]]:
    """Return pages by (memcg, item, node), including descendants."""
    sums: Counter[tuple[int, str, int]] = Counter()
    for row in snapshot_rows:
        kind = next((k for k, ends in KINDS.items() if any(e in row.item for e in ends)), "other")
        for memcg, members in below.items():
            if row.memcg in members:
                sums[memcg, kind, row.nid or 0] += row.found["lru"]
    return sums


@pytest.mark.parametrize("kernel", KERNELS)
def test_numa_stat_says_the_same(lab: Lab, kernel: str) -> None:
    image: GuestImage = lab.image(kernel, "4", "mixed")
    snapshot = collect(image_of(image.program()))
    below: dict[int, set[int]] = {m: {m} for m in snapshot.memcgs}
    for memcg in reversed(list(snapshot.memcgs.values())):
        if memcg.parent is not None:
            below[memcg.parent] |= below[memcg.address]
    sums = sums_below(lru_rows(snapshot), below)
    by_path = {m.path: m.address for m in snapshot.memcgs.values() if m.state == "online"}
    said = still(image, "memory.numa_stat")
    size, compared = snapshot.image.page_size, 0
    for (path, name, nid), value in said.items():
        kind = name.removeprefix("active_")
        if kind == name or kind not in KINDS or path == "/":
            continue  # the processes that read these files are in the root memcg
        inactive = said.get((path, f"in{name}", nid))
        if inactive is None or nid is None:
            continue  # the value changed
        both = value + inactive
        assert (path, kind, nid, sums[by_path[path], kind, nid] * size) == (path, kind, nid, both)
        compared += both > 0
    assert compared > 20


@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_without_generations_types_are_compared(
    lab: Lab, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the field of the generation is wrong, sums by type are still exact."""
    monkeypatch.setattr(LruReader, "_generations_are_right", lambda self, lruvecs: False)
    snapshot = collect(image_of(lab.image(kernel, "4", "mixed").program()))
    assert snapshot.lru is not None and not snapshot.lru.by_generation
    rows = lru_rows(snapshot)
    assert {row.status for row in rows} == {"exact"}
    assert all(r.item.startswith("all lists of") for r in rows if "UNEVICTABLE" not in r.item)
    assert all("generation" in (row.reason or "") for row in rows if "all" in row.item)


def test_wrong_place_of_the_generation_is_noticed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    prog = lab.image("7.3", "4", "mixed").program()
    flags = page_flags(image_of(prog))
    assert flags.generation is not None
    wrong = flags._replace(generation=flags.generation._replace(shift=flags.generation.shift + 1))
    monkeypatch.setattr("memcg_inspect.linux.mm.mm_inline.page_flags", lambda prog: wrong)
    lruvecs = {
        (child.value_(), nid): pn
        for child in children(prog["root_mem_cgroup"])
        for nid, pn in nodeinfo(image_of(prog), child)
    }
    reader = LruReader(image_of(prog), Coverage())
    assert any(reader.sizes(lruvecs).values())
    assert not reader.by_generation
    assert reader.item(1, LruFlags(True, False, False, True, 2)) == (
        "all lists of LRU_GEN_ANON in ZONE_DMA32"
    )


def test_promotions_not_handed_in_yet_are_counted(lab: Lab, plant: Plant) -> None:
    """A planted ``struct lru_gen_mm_walk`` of a task has 5 pages to add to a list."""
    image = lab.image("7.3", "4", "mixed")
    prog = image.program(dwarf=True)
    rows = [r for r in image.report().rows if r.identity == "lru" and "GEN_ANON" in r.item]
    row = max(rows, key=lambda r: r.found["lru"])
    match = re.fullmatch(r"lrugen.nr_pages\[(\d)\]\[LRU_GEN_ANON\]\[(ZONE_\w+)\]", row.item)
    assert match
    generation, zone = int(match[1]), prog[match[2]].value_()
    page = mem_map(image_of(prog)).virt(free_page(prog, other_than=0))
    walk, state = prog.type("struct lru_gen_mm_walk"), prog.type("struct reclaim_state")
    pn = f"Object(prog, 'struct mem_cgroup *', {row.memcg:#x}).nodeinfo[{row.nid}]"
    at = page + sizeof(state)
    blank = [(f"u64:{page + 8 * n:#x}", 0) for n in range((sizeof(state) + sizeof(walk)) // 8)]
    report = plant(
        image,
        *blank,
        ("find_task(prog, 1).reclaim_state", page),
        (f"Object(prog, 'struct reclaim_state *', {page:#x}).mm_walk", at),
        (f"Object(prog, 'struct lru_gen_mm_walk *', {at:#x}).lruvec", lruvec_of(prog, row)),
        (
            f"Object(prog, 'struct lru_gen_mm_walk *', {at:#x}).nr_pages[{generation}][0][{zone}]",
            5,
        ),
        (f"{pn}.lruvec.lrugen.nr_pages[{generation}][0][{zone}]", "old - 5"),
    )
    (same,) = (
        r
        for r in report.rows
        if (r.identity, r.memcg, r.nid, r.item) == ("lru", row.memcg, row.nid, row.item)
    )
    assert same.claimed == {"nr_pages": row.found["lru"] - 5, "mm_walk": 5}
    assert same.status == "exact"


def lruvec_of(prog: Program, row: Row) -> int:
    memcg = Object(prog, "struct mem_cgroup *", row.memcg)
    return memcg.nodeinfo[row.nid].lruvec.address_of_().value_()


@pytest.mark.parametrize("kernel", [k for k in (*KERNELS, *PERNODE_KERNELS) if k[0] == "7"])
def test_folios_charged_to_the_objcg_of_another_node(lab: Lab, kernel: str) -> None:
    """The kernel rules it out: folio_lruvec_lock() relies on it."""
    subject = Subject(lab.image(kernel, "4", "mixed").program())
    assert {s.kind for s in subject.report.skew if s.kind == "lru"} == {"lru"}
    path, nid = subject.largest("lru")
    objcgs = {
        objcg.nid: objcg.address
        for objcg in subject.snapshot.objcgs.values()
        if objcg.memcg == subject.paths[path] and objcg.memcg_refs
    }
    query = EvidenceQuery("lru", frozenset({objcgs[nid]}), nid=nid)
    page = find_evidence(subject.image, subject.snapshot, [query])[query].listed[0].page
    assert page is not None
    folio = subject.object("struct page *", page)
    other = next(node for node in objcgs if node != nid)
    write = subject.put(folio.memcg_data, objcgs[other])
    report = subject.audit(Fault((write,), (path,), set()))
    [finding] = [f for f in report.findings if f.kind == "skew"]
    assert (finding.identity, finding.memcg, finding.nid) == ("lru", subject.paths[path], nid)
    assert [(e.page, e.objcg) for e in finding.evidence] == [(page, objcgs[other])]
    assert {f.identity for f in report.findings} == {"lru", "references"}
