# SPDX-License-Identifier: LGPL-2.1-or-later
"""What ``--memcg``, ``--subtree`` and ``--node`` leave, in commands that share them."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from support.guests import KERNELS, Lab

from memcg_inspect.cli import main

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]

Rows = list[dict[str, Any]]


class Asked:
    """Runs commands on an image."""

    def __init__(self, core: object, capsys: pytest.CaptureFixture[str]) -> None:
        self._core, self._capsys = str(core), capsys

    def __call__(self, *words: str) -> Rows:
        assert main([*words, "--json", "-c", self._core, "--debuginfo", "btf"]) == 0
        rows: Rows = json.loads(self._capsys.readouterr().out)["tables"][0]["rows"]
        return rows


def charged(rows: Rows) -> int:
    return sum(row["charged"] for row in rows)


def exact(rows: Rows, *items: str) -> int:
    return sum(row["exact"] for row in rows if row["node"] is None and row["item"] in items)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_memcg_and_its_subtree_are_the_same_in_all_commands(
    lab: Lab, kernel: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    The objects that are found are compared with what counters and stocks say.

    ``charged`` of slab objects includes what CPUs hold in stocks: memory.stat has it later.
    """
    ask = Asked(lab.image(kernel, "4", "mixed").core, capsys)
    stocks: Counter[str] = Counter()
    for row in ask("stock"):
        for field in ("reclaimable", "unreclaimable"):
            stocks[row["memcg"]] += row.get(field) or 0
    found: dict[tuple[str, bool], int] = {}
    for path in ("/files", "/files/web", "/dying", "/pages"):
        for below in (False, True):
            option = ["--subtree"] if below else []
            slabs = ask("slabinfo", "--memcg", path, *option)
            areas = ask("percpu", "--memcg", path, *option)
            stat = ask("stat", path, "--all", *option)
            wanted = {p for p in stocks if p == path or (below and p.startswith(f"{path}/"))}
            found[path, below] = charged(slabs)
            in_counters = charged(slabs) - sum(stocks[p] for p in wanted)
            assert exact(stat, "slab_reclaimable", "slab_unreclaimable") == in_counters
            assert exact(stat, "percpu") == charged(areas)
    assert found["/files", True] > found["/files", False]
    assert found["/files/web", True] == found["/files/web", False] > 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_memcgs_and_nodes_add_up(lab: Lab, kernel: str, capsys: pytest.CaptureFixture[str]) -> None:
    ask = Asked(lab.image(kernel, "4", "mixed").core, capsys)

    def keys(*words: str) -> set[tuple[Any, ...]]:
        rows = ask("slabinfo", *words)
        return {
            (r["memcg_address"], r["cache"], r["size"], r.get("node"), r["bytes"]) for r in rows
        }

    web, mail = keys("--memcg", "/files/web"), keys("--memcg", "/files/mail")
    assert web and mail and keys("--memcg", "*/web", "--memcg", "files/mail") == web | mail
    first, third = keys("--node", "0"), keys("--node", "2")
    assert first and third and keys("--node", "2", "--node", "0") == first | third
    both = keys("--memcg", "/files", "--subtree", "--node", "2", "--node", "0")
    files = {key[:1] for key in keys("--memcg", "/files*")}
    assert both == {key for key in first | third if key[:1] in files}


def test_audit_drift_and_dying(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    ask = Asked(lab.image("7.3", "4", "mixed").core, capsys)
    for words in (["audit", "--rows"], ["drift", "--all"], ["dying", "--each"], ["overview"]):
        below = {row["memcg_address"] for row in ask(*words, "--memcg", "/dying", "--subtree")}
        alone = {row["memcg_address"] for row in ask(*words, "--memcg", "/dying")}
        whole = {row["memcg_address"]: row["memcg"] for row in ask(*words) if row["memcg"]}
        assert below == {a for a, path in whole.items() if f"{path}/".startswith("/dying/")}
        assert alone == {a for a, path in whole.items() if path == "/dying"}
        assert below > alone
