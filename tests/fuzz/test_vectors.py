# SPDX-License-Identifier: LGPL-2.1-or-later
"""A vector of obj_cgroups that is something else, in a real image."""

from __future__ import annotations

import pytest
from drgn import Object
from fuzz.damage import damaged
from support.guests import BUILT_KERNELS, Lab

from memcg_inspect.collect import audit
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.percpu import PercpuReader

pytestmark = pytest.mark.image


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["7.3"])
def test_the_vector_of_a_percpu_chunk_is_something_else(lab: Lab, kernel: str) -> None:
    """The fuzzer found it: 79,000 findings, and a document that took all memory."""
    image = lab.image(kernel, "4", "mixed")
    prog = image.program()
    largest = max(
        (chunk for chunk in PercpuReader(image_of(prog)).chunks() if chunk.vector),
        key=lambda chunk: chunk.alloc_map.bit_count(),
    )
    chunk = Object(prog, "struct pcpu_chunk *", largest.address)
    # Between two words of the image, where nothing is 0 for long
    somewhere = prog.symbol("__start_BTF").address + 1
    found = audit(damaged(image.core, (chunk.obj_exts.address_, somewhere)))
    assert found.verdict == "findings"
    [unknown] = [finding for finding in found.findings if finding.kind == "unknown-objcg"]
    assert (unknown.identity, unknown.objcg) == ("percpu", None)
    assert "addresses that are not obj_cgroups" in unknown.what
    assert len(found.findings) < 500


@pytest.mark.parametrize("kernel", [k for k in BUILT_KERNELS if k == "7.3-lab"])
def test_what_lies_beside_the_call_sites_of_pages(lab: Lab, kernel: str) -> None:
    """The fuzzer found it: 132,000 findings about addresses that are no call sites."""
    image = lab.image(kernel, "1", "mixed", append="sysctl.vm.mem_profiling=1")
    prog = image.program()
    size = prog["page_ext_size"]
    found = audit(damaged(image.core, (size.address_, 8 * int(size))))
    assert found.verdict == "findings"
    unknown = [f for f in found.findings if f.item is not None and "no call site at" in f.item]
    assert len(unknown) <= 2
    assert len(found.findings) < 10_000
