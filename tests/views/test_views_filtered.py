# SPDX-License-Identifier: LGPL-2.1-or-later
"""``dying`` and ``who`` on dumps that lack pages of the kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.guests import DEBIAN_KERNELS, GuestImage, Lab
from support.missing_pages import filtered
from support.schemas import checked

from memcg_inspect.cli import main
from memcg_inspect.image.image import image_of
from memcg_inspect.views.dying import dying

pytestmark = [pytest.mark.image, pytest.mark.long]


def rows_of(image: GuestImage) -> list[dict[str, Any]]:
    table, *_ = dying(image_of(image.program())).tables
    return [table.values(row) for row in table.rows]


@pytest.mark.parametrize("kernel", [k for k in DEBIAN_KERNELS if k != "6.1"])
def test_nothing_is_made_up(
    lab: Lab, kernel: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = lab.image(kernel, "4", "dying")
    core = tmp_path / "kdump"
    filtered(image, core, 31)
    whole = {f"{row['memcg_address']:#x}": row for row in rows_of(image)}

    assert main(["dying", "--json", "-c", str(core), "--debuginfo", "btf"]) == 3
    document = checked(json.loads(capsys.readouterr().out))
    removed, left, _ = (table["rows"] for table in document["tables"])
    assert any("makedumpfile" in note for note in document["notes"])
    for row in removed:
        there = whole[row["memcg_address"]]
        # Values that are given are right. Unknown values are null, with a reason.
        assert row["references"] in (there["references"], None)
        assert row["unexplained"] in (0, None)
        assert row["explained"] <= there["references"]
        for kind in ("lru", "kmem", "slab", "percpu", "zswap", "sock", "swap"):
            assert row[kind] is None or row[kind] <= there[kind]
            assert (row[kind] is None) is (kind in row.get("not_read", {}))
    assert removed
    assert any(row["unexplained"] is None for row in removed)

    addresses = [word for row in left for word in str(row["examples"] or "").split()][::5]
    addresses += [row["memcg_address"] for row in removed]
    status = main(["who", *addresses, "--json", "-c", str(core), "--debuginfo", "btf"])
    tables = checked(json.loads(capsys.readouterr().out))["tables"]
    assert status == 3
    assert len(tables) == len(addresses)
    assert sum(bool(table["rows"]) for table in tables) > len(tables) / 2
    core.unlink()
