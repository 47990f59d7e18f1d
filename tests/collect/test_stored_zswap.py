# SPDX-License-Identifier: LGPL-2.1-or-later
"""Guests that are stopped while they store pages in zswap."""

from __future__ import annotations

import pytest
from support.findings import named
from support.guests import Lab
from support.planting import Fault, Subject

from memcg_inspect.image.image import Image
from memcg_inspect.linux.kernel.stacktrace import read_running
from memcg_inspect.linux.mm.zswap import ZswapReader

IDENTITIES = ("zswap", "objcg_bytes", "references", "kmem")


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", ["7.3"])
def test_entries_that_are_not_charged_to_anybody_yet(lab: Lab, kernel: str) -> None:
    """zswap_store_page() charges an entry in a tree before it sets ``entry->objcg``."""
    freeze = "in:obj_cgroup_charge_zswap"
    # Another CPU could be storing a page, too, and be one step further.
    image = lab.image(kernel, "1", "zswapout", freeze=freeze, seed=1, cpus=1)
    subject = Subject(image.program())
    report, unlisted = subject.report, subject.snapshot.unlisted_zswap
    assert unlisted
    assert not report.findings
    assert not report.coverage["zswap"].unreadable
    shown = [row for row in report.rows if "with zswap entry" in (row.reason or "")]
    assert {(row.identity, row.status) for row in shown} == {("references", "in-flight")}
    # What the slot had before: a memcg that stores nothing, and an obj_cgroup that is gone.
    storing = {row.objcg for row in shown}
    other = next(objcg for objcg in subject.snapshot.objcgs if subject.path(objcg) == "/" and objcg)
    for stale in (other, other + 8, 0):
        writes = tuple(
            subject.put(subject.object("struct zswap_entry *", address).objcg, stale)
            for address in unlisted
        )
        found = subject.audit(Fault(writes, (), set()))
        assert [(r.identity, r.memcg, r.status) for r in found.rows] == [
            (r.identity, r.memcg, r.status) for r in report.rows
        ]
        assert not found.findings
    # One that no task stores is not left out silently.
    held = {h.address for cpu in read_running(subject.image) for h in cpu.held or ()}
    entry = next(
        e
        for e in ZswapReader(subject.image).entries()
        if e.listed and subject.path(e.objcg) == "/zswapout/kept" and e.address not in held
    )
    lru = subject.object("struct zswap_entry *", entry.address).lru
    head = lru.address_of_().value_()
    fault = Fault((subject.put(lru.next, head), subject.put(lru.prev, head)), (), set())
    found = subject.audit(fault)
    assert not found.findings
    assert found.coverage["zswap"].unreadable == 1
    path, status = subject.path(entry.objcg), {}
    for row in found.rows:
        if row.identity in IDENTITIES and row.memcg == subject.paths[path] and row.difference:
            status[row.identity, row.item] = row.status
    assert status["zswap", "MEMCG_ZSWAPPED"] == status["zswap", "MEMCG_ZSWAP_B"] == "unverifiable"
    # More than what is stored is a finding, in a memcg of which a page is being stored, too.
    path = subject.path(next(iter(storing)) or 0)
    key = "zswap", subject.paths[path], "MEMCG_ZSWAP_B"
    # A task that was preempted may have changed the counter, and not the entry.
    [own] = [r.difference or 0 for r in report.rows if (r.identity, r.memcg, r.item) == key]
    counter = subject.percpu_counter(path, "MEMCG_ZSWAP_B")
    found = subject.audit(Fault((subject.add(counter, 9_000),), (path,), set()))
    assert (path, None, "MEMCG_ZSWAP_B", own + 9_000) in named(found, "zswap")


@pytest.mark.image
@pytest.mark.newest_kernel
def test_entries_take_few_reads(lab: Lab) -> None:
    """Entries and handles lie in slabs, and many objects in one zspage."""
    image = Image(lab.image("7.3", "4", "mixed").program())
    reader, before = ZswapReader(image), image.memory.reads
    entries = list(reader.entries())
    assert len(entries) > 1_000
    assert image.memory.reads - before < len(entries) // 8
    pages = {part.page for entry in entries for part in reader.parts(entry) or ()}
    assert reader.placement.read == len(entries)
    # Of each zspage, its structure, its class and its pages.
    assert image.memory.reads - before < 3 * len(pages) + len(entries) // 4
