# SPDX-License-Identifier: LGPL-2.1-or-later
"""Every identity is defined once, in a module of its own, and listed in docs/identities.md."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import get_args

import pytest
from support.made_charges import image

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.registry import CHECKS, check_of, items_read
from memcg_inspect.model import NodeStat, Unit, Vectors

ROOT = Path(__file__).resolve().parents[2]
PLANTERS = ROOT / "tests" / "support" / "planters"
DOCUMENT = (ROOT / "docs/identities.md").read_text()
BY_NAME = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)


def line(check: Check) -> str:
    """The line of an identity in the document."""

    def quoted(parts: tuple[str, ...]) -> str:
        return ", ".join(f"`{part}`" for part in parts)

    cells = (
        f"`{check.name}`",
        check.counter,
        check.unit,
        check.found,
        quoted(check.sources),
        quoted(check.places),
    )
    return f"| {' | '.join(cells)} |"


def test_the_document_lists_the_identities() -> None:
    listed = DOCUMENT.split("## The identities")[1].split("##")[0]
    lines = [text for text in listed.splitlines() if text.startswith("| `")]
    assert lines == [line(check) for check in CHECKS]


def test_each_module_defines_one_identity_that_is_registered() -> None:
    folder = ROOT / "memcg_inspect/checks/identities"
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert modules == {check.name for check in CHECKS}
    assert len(CHECKS) == len(modules)
    for check in CHECKS:
        text = (folder / f"{check.name}.py").read_text()
        assert len(re.findall(r"^CHECK = Check\($", text, re.MULTILINE)) == 1
        assert f"Identity ``{check.name}``" in text


@BY_NAME
def test_units_are_those_of_rows(check: Check) -> None:
    units = set(check.unit.split(", "))
    assert (check.derive is None) == (units <= set(get_args(Unit)))


@BY_NAME
def test_a_difference_is_proved_or_has_kinds_of_its_own(check: Check) -> None:
    assert check.above != check.below
    # What addresses prove needs no candidates.
    assert check.prove is None or check.charges is None


def test_checks_that_derive_rows_come_last() -> None:
    derived = [check.derive is not None for check in CHECKS]
    assert derived == sorted(derived)
    assert any(derived)


def names(flag: str) -> set[str]:
    """The identities that have a flag."""
    return {check.name for check in CHECKS if getattr(check, flag)}


def test_flags() -> None:
    assert names("counters_only") == {
        "levels",
        "local",
        "local_fold",
        "node_levels",
        "node_totals",
        "page_levels",
        "updated",
        "zone_totals",
    }
    # Stacks and vmalloc areas are not what this program allocates.
    assert names("of_whole_nodes") == {
        *("node_levels", "node_pagetable", "node_slab"),
        *("zone_free", "zone_free_area", "zone_lru"),
    }
    page_counters = {"usage", "swap_usage", "kmem_usage", "tcpmem"}
    assert names("of_subtrees") == {*page_counters, "hierarchy"}
    assert {check.name for check in CHECKS if check.page_counters} == page_counters
    # A wrong node shows where nodes or obj_cgroups are compared, and not in sums over them.
    assert names("by_node_rule") == {"kmem", "objcg_bytes", "references", "hierarchy"}


def test_counters_are_read_once() -> None:
    items = items_read()
    assert len(items) == len(set(items))
    assert set(items) == {item for check in CHECKS for item in check.items}


def test_rows_have_the_parts_that_are_documented() -> None:
    taken = image(
        node_stats={(0, "NR_SLAB_RECLAIMABLE_B"): NodeStat(1, 0)},
        vectors={0: Vectors(1)},
    )
    seen: defaultdict[str, set[str]] = defaultdict(set)
    for row in judge(taken).rows:
        check = check_of(row)
        assert row.found.keys() <= set(check.sources), check.name
        assert (row.claimed or {}).keys() <= set(check.places), check.name
        assert row.unit in check.unit.split(", ") or check.derive is not None
        seen[row.identity] |= row.found.keys() | (row.claimed or {}).keys()
    whole = {"percpu", "kernel_stack", "pagetable", "vmalloc", "kmem", "objcg_bytes", "zswap"}
    whole |= {"sock", "usage", "placement", "hierarchy"}
    for check in CHECKS:
        if check.name in whole:
            assert seen[check.name] == {*check.sources, *check.places}, check.name


def test_no_other_module_asks_for_an_identity_by_name() -> None:
    """
    Adding an identity must not require changes in other modules.

    Only causes of findings do: a row that none knows is not explained.
    """
    wrong = []
    for path in sorted((ROOT / "memcg_inspect").rglob("*.py")):
        if path.parent.name == "diagnosis":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Compare):
                continue
            sides = [node.left, *node.comparators]
            named = any(
                isinstance(side, ast.Attribute) and side.attr == "identity" for side in sides
            )
            text = any(isinstance(part, ast.Constant) for side in sides for part in ast.walk(side))
            if named and text:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert wrong == []


def test_every_identity_has_planters() -> None:
    """See tests/support/planting.py: a module of the same name plants faults for an identity."""
    assert {path.stem for path in PLANTERS.glob("*.py")} == {c.name for c in CHECKS} | {"__init__"}
