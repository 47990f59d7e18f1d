# SPDX-License-Identifier: LGPL-2.1-or-later
"""
A kernel for arm64 with ``CONFIG_KASAN_SW_TAGS``: pointers have a tag in their highest byte.

drgn reads memory at tagged pointers. Its helpers that compare an address do not take them.
"""

from __future__ import annotations

import pytest
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.slab import for_each_slab_cache
from labkit import kernels
from support.exact import check_exact, not_kept
from support.guests import ARCH, Lab

from memcg_inspect.cli import main
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.arch.processor import untagged
from memcg_inspect.views.who import who

pytestmark = [pytest.mark.image, pytest.mark.long]

#: None unless the kernel was built: ``scripts/test --all --part arm64-kernels``.
TAGGED = [k for k in kernels.names_of_part("tags") if ARCH == "arm64" and kernels.cached(k)]

#: A pointer that is not tagged has 0xff there.
_TAGS = 0xFF << 56


@pytest.mark.parametrize("kernel", TAGGED)
@pytest.mark.parametrize(
    ("nodes", "workload", "freeze"),
    [
        ("4", "mixed", "settled"),
        ("1", "dying", "settled"),
        ("2cpu+6mem", "mixed", "settled"),
        ("4", "churn", "busy"),
    ],
)
def test_audits(lab: Lab, kernel: str, nodes: str, workload: str, freeze: str) -> None:
    report = lab.image(kernel, nodes, workload, freeze=freeze, seed=1).report()
    if freeze == "settled":
        check_exact(report, not_kept(kernel))
    assert not report.findings
    assert not any(found.unreadable for found in report.coverage.values())


@pytest.mark.parametrize("kernel", TAGGED)
@pytest.mark.parametrize(
    "command",
    ["dying", "overview", "pages", "percpu", "rss --check", "slabinfo", "stock", "tasks"],
)
def test_commands_read_everything(lab: Lab, kernel: str, command: str) -> None:
    """The exit status is 3 if something could not be read."""
    assert main([*command.split(), *lab.image(kernel, "4", "mixed").arguments()]) == 0


@pytest.mark.parametrize("kernel", TAGGED)
def test_objects_at_tagged_pointers(lab: Lab, kernel: str) -> None:
    """A cache is itself an object of the cache of caches, whose objects begin at a pointer."""
    image = image_of(lab.image(kernel, "4", "mixed").program())
    caches = [cache.value_() for cache in for_each_slab_cache(image.prog)]
    assert len({cache & _TAGS for cache in caches}) > 50
    seen = 0
    for cache in caches:
        (table,) = who(image, [cache + 8]).tables
        rows = [table.values(row) for row in table.rows]
        for row in rows:
            if row["layer"] == "object":
                assert str(row["what"]).startswith(("kmem_cache [", "kmem_cache, allocated"))
                assert (row["start"], row["offset"]) == (untagged(image, cache), 8)
                seen += 1
    assert seen > 100


@pytest.mark.parametrize("kernel", TAGGED)
def test_objects_in_sheaves_are_free(lab: Lab, kernel: str) -> None:
    """The full sheaves of nodes have pointers with the tags that the objects had."""
    image = image_of(lab.image(kernel, "4", "mixed").program())
    free = [
        obj.value_()
        for cache in for_each_slab_cache(image.prog)
        for nid in range(4)
        if (barn := cache.per_node[nid].barn.read_())
        for sheaf in list_for_each_entry(
            "struct slab_sheaf", barn.sheaves_full.address_of_(), "barn_list"
        )
        for obj in sheaf.objects[: sheaf.size].read_()
    ]
    assert len({obj & _TAGS for obj in free}) > 50
    for table in who(image, free[::20]).tables:
        [row] = [row for row in map(table.values, table.rows) if row["layer"] == "object"]
        assert str(row["what"]).endswith(("], free", "end of an RCU grace period")), row
