# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The call site of one object, percpu allocation or block of pages, in modules that are loaded or
were unloaded.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.allocinfo import GUESTS
from support.charge_module import GUESTS as CHARGED
from support.charge_module import NO_KFENCE, Held, call_sites, guest_image, held
from support.guests import ROOT, Lab

from memcg_inspect.collect import collect
from memcg_inspect.collect.site import SiteFinder
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.linux.mm.slab import SlabReader

pytestmark = pytest.mark.image


@pytest.mark.parametrize(("kernel", "append"), CHARGED)
def test_of_what_a_module_holds(lab: Lab, kernel: str, append: str, tmp_path: Path) -> None:
    """The module prints the address of each allocation; its source has the line of each call."""
    image = guest_image(lab, kernel, append, tmp_path)
    prog = image.program(dwarf=True)
    finder, frames = SiteFinder(image_of(prog)), mem_map(image_of(prog))
    slabs, objects = SlabReader(image_of(prog)), {}
    for piece in scan_pages(image_of(prog)):
        for slab in map(slabs.slab, piece.slabs):
            assert slab is not None
            objects |= {at: (slab, number) for number, at in enumerate(slabs.objects(slab))}
    reader = PercpuReader(image_of(prog))
    first = prog["pcpu_unit_offsets"][0].value_() - prog["__per_cpu_offset"][0].value_()
    percpu = {
        (chunk.base + alloc.offset + first) % 2**64: alloc
        for chunk in reader.chunks()
        for alloc in reader.recorded(chunk)
    }

    def site_of(thing: Held) -> str | None:
        if thing.kind == "percpu":
            site = finder.of_percpu(percpu[thing.address])
        elif thing.address in objects:
            site = finder.of_slab_object(*objects[thing.address])
        else:
            site = finder.of_page(frames.virt_to_page(thing.address))
        return None if site is None else Path(site.site).name

    things = [thing for thing in held(image) if thing.kind != "vmalloc"]
    assert len(things) > 180
    profiled = "profiling" in append
    assert (finder.why_not is None) == profiled
    for thing in things:
        assert (thing, site_of(thing)) == (thing, call_sites()[thing.kind] if profiled else None)
    assert finder.coverage.unreadable == 0


LEAVER = ROOT / "fixtures" / "modules" / "leaver"
LINE = {
    call: next(n for n, text in enumerate((LEAVER / "leaver.c").read_text().splitlines(), 1)
               if call in text)
    for call in ("kmalloc(", "alloc_pages(")
}  # fmt: skip
#: Allocations that the module does not free: kind, line, bytes and calls.
LEFT = {("slab", LINE["kmalloc("], 3 * 1024, 3), ("page", LINE["alloc_pages("], 4 * 4096, 1)}


@pytest.mark.parametrize(
    ("kernel", "append"),
    [
        pytest.param(*guest, marks=pytest.mark.long) if "compressed" in guest[1] else guest
        for guest in GUESTS
    ],
)
def test_of_a_module_that_is_gone(lab: Lab, kernel: str, append: str, tmp_path: Path) -> None:
    """Call sites stay while memory refers to them; since 6.13 they lose their names."""
    script = tmp_path / "leave"
    script.write_text("rmmod leaver\n")
    append = f"{NO_KFENCE} {append}".strip()
    image = lab.image(
        kernel, "4", "idle", modules=((str(LEAVER), ""),), run=str(script), append=append
    )
    assert "leaver" not in (image.guest / "2/proc/modules").read_text()
    assert "leaver" not in (image.guest / "2/proc/allocinfo").read_text()
    profile = collect(image_of(image.program())).profile
    assert profile is not None
    ours = [
        (use, profile.sites[use.codetag], amount)
        for use, amount in profile
        if profile.sites[use.codetag].module in ("leaver", "?")
    ]
    assert {(use.kind, site.line, size, calls) for use, site, (size, calls) in ours} == LEFT
    named = {("leaver", "leaver_init")} if kernel == "6.12-lab" else {("?", "?")}
    assert {(site.module, site.function) for _, site, _ in ours} == named
    assert image.report().verdict == "exact"
