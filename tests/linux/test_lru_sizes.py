# SPDX-License-Identifier: LGPL-2.1-or-later
"""Sizes of LRU lists, and the words that they are in, as debug info tells these."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from drgn import FaultError, Object, Program
from drgn.helpers.linux.cgroup import css_for_each_descendant_pre
from fuzz.damage import damaged
from support.guests import DEBIAN_KERNELS, Lab
from support.planting import Overlay, Write

from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.mm.mm_inline import LruReader, Sizes
from memcg_inspect.linux.mm.mm_types import LruFlags
from memcg_inspect.linux.mm.page_flags import page_flags
from memcg_inspect.model import Coverage

pytestmark = [
    pytest.mark.image,
    pytest.mark.newest_kernel,
    pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:]),
]
Key = tuple[int, int]


def lruvecs(prog: Program) -> dict[Key, Object]:
    """Return the ``struct mem_cgroup_per_node *`` of each memcg and node that are not offline."""
    root = prog["root_mem_cgroup"].css.address_of_()
    found = {}
    for css in css_for_each_descendant_pre(root):
        memcg = Object(prog, "struct mem_cgroup *", css.value_())
        for nid in range(int(prog["nr_node_ids"])):
            found[css.value_(), nid] = memcg.nodeinfo[nid]
    return found


def enumerators(prog: Program, name: str) -> list[str]:
    return [e.name for e in prog.type(name).enumerators]


def each_counter(prog: Program, pn: Object) -> Iterator[tuple[str, str, Object]]:
    """Yield the list, the member that counts its pages, and the counter, by members and names."""
    zones = [z for z in enumerators(prog, "enum zone_type") if z != "__MAX_NR_ZONES"]
    lists = [name for name in enumerators(prog, "enum lru_list") if name != "NR_LRU_LISTS"]
    for z, zone in enumerate(zones):
        for n, name in enumerate(lists):
            item = f"lru_zone_size[{zone}][{name}]"
            yield item, "lru_zone_size", pn.lru_zone_size[z][n]
    for generation, types in enumerate(pn.lruvec.lrugen.nr_pages):
        for kind, by_zone in zip(("LRU_GEN_ANON", "LRU_GEN_FILE"), types, strict=True):
            for zone, counter in zip(zones, by_zone, strict=True):
                item = f"lrugen.nr_pages[{generation}][{kind}][{zone}]"
                yield item, "nr_pages", counter


def test_sizes_of_all_lists(lab: Lab, kernel: str) -> None:
    prog, coverage = lab.image(kernel, "4", "mixed").program(dwarf=True), Coverage()
    pns = lruvecs(prog)
    reader = LruReader(image_of(prog), coverage)
    found = reader.sizes(pns)
    expected: dict[Key, Sizes] = {}
    for key, pn in pns.items():
        expected[key] = {}
        for item, member, counter in each_counter(prog, pn):
            if counter.value_():
                expected[key][item] = {member: counter.value_()}
    assert found == expected
    assert reader.by_generation
    assert (coverage.read, coverage.unreadable) == (len(pns), 0)
    assert (reader.walks.read, reader.walks.unreadable) == (0, 0)
    assert sum(map(len, expected.values())) > 20


def test_words_of_all_lists(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program(dwarf=True)
    reader = LruReader(image_of(prog), Coverage())
    for pn in list(lruvecs(prog).values())[:5]:
        words = list(reader.words(pn))
        assert [(word.array, word.item, word.address, word.size) for word in words] == [
            ("lists", item, counter.address_, 8) for item, _, counter in each_counter(prog, pn)
        ]


def test_lists_of_folios_by_their_flags(lab: Lab, kernel: str) -> None:
    """``folio_lru_list()`` and ``lru_gen_add_folio()``."""
    prog = lab.image(kernel, "4", "mixed").program()
    reader, normal = LruReader(image_of(prog), Coverage()), prog["ZONE_NORMAL"].value_()
    is_file = LruFlags(True, False, False, False, 0)
    for flags, item in (
        (is_file, "lru_zone_size[ZONE_NORMAL][LRU_INACTIVE_FILE]"),
        (is_file._replace(active=True), "lru_zone_size[ZONE_NORMAL][LRU_ACTIVE_FILE]"),
        (is_file._replace(swapbacked=True), "lru_zone_size[ZONE_NORMAL][LRU_INACTIVE_ANON]"),
        (is_file._replace(unevictable=True), "lru_zone_size[ZONE_NORMAL][LRU_UNEVICTABLE]"),
        (
            LruFlags(True, True, True, True, 0),
            "lru_zone_size[ZONE_NORMAL][LRU_UNEVICTABLE]",
        ),
        (is_file._replace(generation=1), "lrugen.nr_pages[0][LRU_GEN_FILE][ZONE_NORMAL]"),
        (LruFlags(True, True, False, True, 4), "lrugen.nr_pages[3][LRU_GEN_ANON][ZONE_NORMAL]"),
    ):
        assert reader.item(normal, flags) == item
    assert reader.item(9, is_file) == "lru_zone_size[9][LRU_INACTIVE_FILE]"
    reader.by_generation = False
    of_type = "all lists of LRU_GEN_{} in ZONE_NORMAL"
    for flags, item in (
        (is_file, of_type.format("FILE")),
        (LruFlags(True, True, False, True, 2), of_type.format("ANON")),
        (is_file._replace(unevictable=True), "lru_zone_size[ZONE_NORMAL][LRU_UNEVICTABLE]"),
    ):
        assert reader.item(normal, flags) == item


def test_lruvecs_that_are_not_in_the_image(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "4", "mixed")
    pns = lruvecs(image.program())
    gone, *_ = pns
    changed, coverage = damaged(image.core, (pns[gone].lruvec.address_, "missing")), Coverage()
    again = {key: Object(changed.prog, "struct mem_cgroup_per_node *", pn.value_())
             for key, pn in pns.items()}  # fmt: skip
    found = LruReader(changed, coverage).sizes(again)
    assert gone not in found
    assert coverage.read == len(found) and coverage.unreadable == len(pns) - len(found)
    assert coverage.examples[0].what == "sizes of LRU lists"
    whole = LruReader(image_of(image.program()), Coverage()).sizes(pns)
    assert found == {key: whole[key] for key in found}


def first_folios(pns: dict[Key, Object]) -> list[tuple[int, Object]]:
    """Return generation and first folio of each list of the multi-gen LRU that is not empty."""
    found = []
    for pn in pns.values():
        for generation, types in enumerate(pn.lruvec.lrugen.folios):
            for by_zone in types:
                for head in by_zone:
                    if head.next and head.next.value_() != head.address_:
                        page = head.prog_.type("struct page")
                        at = head.next.value_() - page.member("lru").bit_offset // 8
                        found.append((generation, Object(head.prog_, "struct page *", at)))
    return found


@pytest.mark.parametrize(
    "changed", ["none", "no generation", "half of them", "most of them", "first", "last", "fifth"]
)
def test_whether_the_generation_is_read_from_the_right_bits(
    lab: Lab, kernel: str, changed: str
) -> None:
    """
    The first folio of each list has a generation, and most have that of their list.

    ``folio_update_gen()`` changes the flags of a folio before it moves to the other list.
    """
    image = lab.image(kernel, "4", "mixed")
    folios = first_folios(lruvecs(image.program(dwarf=True)))
    assert len(folios) >= 4
    prog = image.own_program()
    overlay = Overlay(prog)
    bits = page_flags(Image(prog)).generation
    assert bits is not None
    number = {"none": 0, "half of them": len(folios) // 2, "most of them": len(folios) // 2 + 1}
    other = {"no generation": 0, "first": 1, "last": 4, "fifth": 5}
    writes = []
    for at, (generation, folio) in enumerate(folios):
        word = int.from_bytes(prog.read(folio.flags.address_of_(), 8), "little")
        # zswap has pages reclaimed, so a folio may have another generation already.
        right = generation + 1
        new = other.get(changed, right % 4 + 1) if at < number.get(changed, 1) else right
        word ^= (bits.get(word) ^ new) << bits.shift
        writes.append(Write(folio.flags.address_of_().value_(), word.to_bytes(8, "little")))
    overlay.write(tuple(writes))
    reader = LruReader(Image(prog), Coverage())
    reader.sizes(lruvecs(prog))
    assert reader.by_generation == (changed not in ("no generation", "most of them", "fifth"))


def test_first_folios_that_are_not_in_the_image(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "4", "mixed")
    _, folio = first_folios(lruvecs(image.program(dwarf=True)))[0]
    prog, coverage = image.own_program(), Coverage()

    def missing(address: int, count: int, offset: int, physical: bool) -> bytes:
        raise FaultError("not there", address)

    prog.add_memory_segment(folio.value_() & ~4095, 4096, missing, False)
    reader = LruReader(Image(prog), coverage)
    found = reader.sizes(lruvecs(prog))
    assert reader.by_generation  # the others tell it
    assert len(found) == coverage.read == len(lruvecs(prog))
    assert {e.what for e in coverage.examples} == {"first folio of an LRU list"}
