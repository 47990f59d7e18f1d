# SPDX-License-Identifier: LGPL-2.1-or-later
"""``usage`` is compared with the guest's memory.current and memory.stat."""

from __future__ import annotations

from typing import Any

import pytest
from drgn import Program
from support.guest_files import still, still_current
from support.guests import KERNELS, Lab
from support.views import with_more_usage

from memcg_inspect.image.image import image_of
from memcg_inspect.tables import UsageError
from memcg_inspect.views.usage import usage

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]

#: Bytes of user pages that four CPUs can have in their folio batches: 31 small folios each.
BATCHES = 4 * 31 * 4096
NO_ROW = "memory.current", "not found"


def rows_of(prog: Program, path: str) -> dict[str, dict[str, Any]]:
    [table] = usage(image_of(prog), path).tables
    rows = [table.values(row) for row in table.rows]
    return {str(row["what"]): row for row in rows}


@pytest.mark.parametrize("kernel", KERNELS)
def test_terms_add_up_to_what_the_guest_read(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "4", "mixed")
    prog = image.program()
    stats = {
        (path, name): v for (path, name, n), v in still(image, "memory.stat").items() if n is None
    }
    current = still_current(image)
    seen, compared = set[str](), 0
    for path in sorted(path for path in current if path.count("/") == 1 and path != "/"):
        rows = rows_of(prog, path)
        terms = [row for what, row in rows.items() if what not in NO_ROW]
        assert rows["not found"]["bytes"] == 0
        assert sum(row["bytes"] for row in terms) == rows["memory.current"]["bytes"]
        assert rows["memory.current"]["bytes"] == current[path]
        for row in terms:
            items = row["items"].split(" + ") if row["items"] else []
            if items:
                read = row["memory_stat"] + row["not_folded"]
                # Folios in the batches of CPUs are on no LRU list yet.
                most = BATCHES if row["what"] == "user pages and page cache" else 0
                assert 0 <= row["bytes"] - read - row["in_stocks"] <= most, (path, row)
                if all((path, item) in stats for item in items):
                    assert read == sum(stats[path, item] for item in items)
                    compared += 1
            else:
                assert row["memory_stat"] is None
            seen.update([row["what"]] if row["bytes"] else [])
    assert compared > 20
    assert seen >= {
        "user pages and page cache",
        "slab objects",
        "percpu memory",
        "kernel stacks",
        "page tables",
        "sockets",
        "other pages of the kernel",
        "charged for objects, and unused",
    }


@pytest.mark.parametrize("kernel", ["6.1", "7.3"])
def test_what_is_not_found_is_said(lab: Lab, kernel: str) -> None:
    prog = with_more_usage(lab.image(kernel, "4", "mixed"), "/files/web", 7)
    answer = usage(image_of(prog), "/files/web")
    [table] = answer.tables
    assert table.values(table.rows[-1])["bytes"] == 7 * 4096
    assert any("memcg-inspect audit" in note for note in answer.notes)


def test_memcgs_without_the_file(lab: Lab) -> None:
    prog = lab.image("7.3", "4", "dying").program()
    with pytest.raises(UsageError, match="the root has no memory.current"):
        usage(image_of(prog), "/")
    with pytest.raises(UsageError, match="there is no memcg /nope"):
        usage(image_of(prog), "/nope")
