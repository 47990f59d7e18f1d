# SPDX-License-Identifier: LGPL-2.1-or-later
"""``rss`` on a kernel that counts the pages of processes by node, not by CPU."""

from __future__ import annotations

import pytest
from drgn.helpers.linux.pid import find_task
from support.guests import Lab
from support.rss import PROCESSES, STATUS, by_status, checked, guest_image, number, said

pytestmark = [pytest.mark.image, pytest.mark.long]

KERNEL, BATCH, NODES = "7.3-nodecounter", 32, 4


def test_it_is_what_is_mapped_and_what_the_guest_read(lab: Lab) -> None:
    image = guest_image(lab, KERNEL)
    rows, wrong = checked(image), set()
    for (pid, _), values in rows.items():
        assert (values["status"], values["difference"]) == ("exact", 0)
        assert values["bound"] == (BATCH - 1) * NODES
        assert abs(number(values, "error")) <= (BATCH - 1) * NODES
        if values["error"]:
            wrong.add(pid)
    assert len(wrong & said(image).keys()) >= PROCESSES // 2
    told = by_status(image)
    assert len(told) == PROCESSES
    for pid, items in told.items():
        for item, pages in items.items():
            values = rows.get((pid, item), {"exact": 0})
            assert values["exact"] == pages, (pid, item)


def test_against_a_plain_walker(lab: Lab) -> None:
    image = guest_image(lab, KERNEL)
    rows, prog = checked(image), image.program()
    for pid in list(said(image))[:3]:
        for item, name in zip(STATUS, ("FILE", "ANON", "SWAP", "SHMEM"), strict=True):
            slot = prog[f"MM_{name}{'ENTS' if name == 'SWAP' else 'PAGES'}"]
            counter = find_task(prog, pid).mm.rss_stat[slot]
            count = int(counter.count.counter)
            parts = [int(counter.nodes[n].parts[counter.index].counter) for n in range(NODES)]
            assert all(abs(part) < BATCH for part in parts)
            values = rows.get((pid, item), {"approximate": 0, "exact": 0})
            assert (values["approximate"], values["exact"]) == (max(count, 0), count + sum(parts))


def test_memory_only_nodes_hold_nothing(lab: Lab) -> None:
    """The bound counts the nodes that have CPUs."""
    rows = checked(lab.image(KERNEL, "2cpu+6mem", "rss", cpus=8))
    assert {values["bound"] for values in rows.values()} == {(BATCH - 1) * 2}
    assert all(values["status"] == "exact" for values in rows.values())
