# SPDX-License-Identifier: LGPL-2.1-or-later
"""Pages for kvfree_rcu(), and large kmallocs, which only variables of the kernel refer to."""

from __future__ import annotations

import pytest
from drgn import Object, Program, sizeof
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.idr import idr_for_each_entry
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import find_task
from support.guests import DEBIAN_KERNELS, GuestImage, Lab
from support.missing_pages import excluded
from support.planting import Overlay, Write

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.slab_common import kvfree_rcu_pages
from memcg_inspect.linux.mm.slub_large import large_kmallocs
from memcg_inspect.model import Coverage

pytestmark = [
    pytest.mark.image,
    pytest.mark.each_kernel,
    pytest.mark.parametrize("kernel", DEBIAN_KERNELS),
]

CPUS = 4


@pytest.fixture
def image(lab: Lab, kernel: str) -> GuestImage:
    return lab.image(kernel, "4", "mixed")


def place(thing: Object) -> int:
    assert thing.address_ is not None
    return int(thing.address_)


def words(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


def kept(prog: Program) -> tuple[list[int], Coverage]:
    coverage = Coverage()
    return list(kvfree_rcu_pages(image_of(prog), coverage)), coverage


def heads(cache: Object, name: str, free: str) -> list[Object]:
    """Return the heads of lists of a CPU: what it fills, and what waits for readers."""
    found = list(cache.member_(name))
    for work in cache.krw_arr:
        found += list(work.member_(free))
    return found


def emptied(prog: Program) -> tuple[list[list[Object]], list[Write]]:
    """Return all heads of each CPU, and what makes their lists empty."""
    every, writes = [], []
    for cpu in for_each_possible_cpu(prog):
        cache = per_cpu(prog["krc"], cpu)
        writes.append(Write(place(cache.bkvcache), words(0)))
        if cache.type_.has_member("bulk_head"):
            every.append(heads(cache, "bulk_head", "bulk_head_free"))
            writes += [Write(place(head), words(place(head)) * 2) for head in every[-1]]
        else:
            every.append(heads(cache, "bkvhead", "bkvhead_free"))
            writes += [Write(place(head), words(0)) for head in every[-1]]
    return every, writes


def test_pages_for_kvfree_rcu(image: GuestImage) -> None:
    """Two that CPU 1 keeps, and one on each of its lists; two on the last one."""
    prog = image.own_program()
    overlay, (every, writes) = Overlay(prog), emptied(prog)
    overlay.write(tuple(writes))
    found, coverage = kept(prog)
    assert (found, coverage.read, coverage.unreadable) == ([], CPUS, 0)
    memory, lists = find_task(prog, 1).stack.value_() + 0x400, every[1]
    assert len(lists) == 6
    cache = per_cpu(prog["krc"], 1)
    a, b = memory, memory + 64
    blocks = [memory + 128 + 64 * n for n in range(7)]
    new = [Write(place(cache.bkvcache), words(a)), Write(a, words(b)), Write(b, words(0))]
    is_list = cache.type_.has_member("bulk_head")
    on = {n: [block] for n, block in enumerate(blocks[:6])}
    on[5].append(blocks[6])
    link = 0
    if not is_list:
        members = {m.name: m.offset for m in prog.type("struct kvfree_rcu_bulk_data").members}
        link = members["next"]
    for n, head in enumerate(lists):
        ring = [place(head), *on[n]]
        if is_list:
            for before, at, after in zip(ring[-1:] + ring, ring, ring[1:] + ring[:1], strict=False):
                new.append(Write(at, words(after, before)))
        else:
            new += [
                Write(at + link * (at != ring[0]), words(after))
                for at, after in zip(ring, [*ring[1:], 0], strict=True)
            ]
    overlay.write(tuple(new))
    found, coverage = kept(prog)
    assert found == [a, b, *blocks]
    assert (coverage.read, coverage.unreadable) == (CPUS, 0)
    # A circle, and a page that is missing
    overlay.write((Write(b, words(a)),))
    found, coverage = kept(prog)
    assert (found, coverage.read, coverage.unreadable) == ([a, b], CPUS - 1, 1)
    assert "does not end" in coverage.examples[0].reason
    overlay.write((Write(b, words(0x1000)),))
    found, coverage = kept(prog)
    assert (found, coverage.read, coverage.unreadable) == ([a, b, 0x1000], CPUS - 1, 1)


def plain_large(prog: Program) -> list[int]:
    found = []
    for name in ("tcp_metrics_hash", "kernfs_locks", "vmap_nodes"):
        try:
            found.append(prog.read_word(prog.symbol(name).address))
        except LookupError:
            continue  # vmap_nodes came in 6.9
    for _, pointer in idr_for_each_entry(prog["btf_idr"].address_of_(), "struct btf"):
        for member in ("types", "resolved_ids", "resolved_sizes", "data"):
            found.append(pointer.member_(member).value_())
    packs = list_for_each_entry("struct bpf_prog_pack", prog["pack_list"].address_of_(), "list")
    found += [pack.value_() for pack in packs]
    return [*found, prog["serial8250_reg"].state.value_()]


def large(prog: Program) -> tuple[list[int], Coverage]:
    coverage = Coverage()
    return list(large_kmallocs(image_of(prog), coverage)), coverage


def test_large_kmallocs_that_variables_refer_to(image: GuestImage) -> None:
    prog = image.program()
    found, coverage = large(prog)
    assert sorted(found) == sorted(plain_large(prog))
    assert len(found) > 6
    assert not coverage.unreadable


def test_large_kmallocs_that_are_missing(image: GuestImage) -> None:
    """A pointer, a ``struct btf``, the list of packs, and the state of serial ports."""
    prog = image.own_program()
    whole = plain_large(prog)
    _, btf = next(iter(idr_for_each_entry(prog["btf_idr"].address_of_(), "struct btf")))
    arrays = [btf.member_(n).value_() for n in ("types", "resolved_ids", "resolved_sizes", "data")]
    table = prog.symbol("kernfs_locks").address
    state = prog["serial8250_reg"].state
    gone = [*arrays, prog.read_word(table), state.value_()]
    for address, size in ((table, 8), (btf.value_(), 8), (place(state), sizeof(state))):
        prog.add_memory_segment(address, size, excluded, False)
    found, coverage = large(prog)
    left = list(whole)
    for address in gone:
        left.remove(address)
    assert sorted(found) == sorted(left)
    assert coverage.unreadable == 3
    assert {missed.what for missed in coverage.examples} == {"large kmallocs"}
