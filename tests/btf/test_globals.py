# SPDX-License-Identifier: LGPL-2.1-or-later
"""Every variable that a reader looks up can be found without debug info."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from drgn import Program
from support.layouts import MadeImage

from memcg_inspect.btf.globals import VARIABLES, type_of

PACKAGE = Path(__file__).resolve().parents[2] / "memcg_inspect"

#: What drgn itself knows of every kernel.
OF_DRGN = {
    "PAGE_SHIFT",
    "SECTIONS_PER_ROOT",
    "SECTION_SIZE_BITS",
    "UTS_RELEASE",
    "VMCOREINFO",
    "vmemmap",
}
#: Enumerators, per-CPU variables and functions, which BTF describes.
IN_BTF = {
    *("N_MEMORY", "N_POSSIBLE", "NR_FREE_PAGES", "PIDTYPE_PID"),
    *("cached_stacks", "int_active_memcg", "krc", "memcg_stock", "numa_node", "rcu_data"),
    *("runqueues", "trace_buffered_event", "vm_event_states"),
    *("__preempt_count", "pcpu_hot"),
    "__get_obj_cgroup_from_memcg",
}


def asked_for(path: Path) -> Iterator[str]:
    """Return names in ``prog["name"]``, ``image.object("name")`` and ``static_key_enabled()``."""
    for node in ast.walk(ast.parse(path.read_text())):
        named: ast.expr | None = None
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("prog"):
            named = node.slice
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "static_key_enabled":
            named = node.args[-1]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("image.object"):
            # With the name of a file it is a static variable, for which BTF has no type.
            named = node.args[0] if len(node.args) == 1 else None
        if isinstance(named, ast.Constant) and isinstance(named.value, str):
            yield named.value


def test_variables_that_readers_ask_for_are_in_the_table() -> None:
    asked = {
        (name, path.name)
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "btf"
        for name in asked_for(path)
    }
    assert len(asked) > 20
    assert {a for a in asked if a[0] not in VARIABLES | dict.fromkeys(OF_DRGN | IN_BTF)} == set()


class Place(NamedTuple):
    """A variable without a type."""

    prog: Program
    address: int
    room: int | None


@pytest.mark.parametrize(("release", "length"), [("6.5", 255), ("6.6", None)])
def test_metadata_of_kfence(release: str, length: int | None) -> None:
    """mm/kfence/core.c: an array up to 6.5; since 6.6 a pointer, beside kfence_metadata_init."""
    image = MadeImage()
    image.declare("struct kfence_metadata { unsigned long list[2]; unsigned long addr; };")
    if release == "6.6":
        image.symbol_at("kfence_metadata_init", 0xFFFFFFFF82000008)
    found = type_of("kfence_metadata", Place(image.prog, 0xFFFFFFFF82000000, 255 * 24 + 8))
    assert found is not None
    name = "struct kfence_metadata"
    assert found.type_name() == (f"{name} *" if length is None else f"{name} [{length}]")


@pytest.mark.parametrize(
    ("release", "name", "expected"),
    [
        ("6.9", "struct zswap_tree { unsigned long rbroot; };", "struct zswap_tree *[32]"),
        ("6.10", "struct xarray { unsigned long xa_head; };", "struct xarray *[32]"),
    ],
)
def test_trees_of_zswap(release: str, name: str, expected: str) -> None:
    """mm/zswap.c: ``struct zswap_tree`` is gone in 6.10."""
    image = MadeImage()
    image.declare(name)
    found = type_of("zswap_trees", Place(image.prog, 0xFFFFFFFF82000000, 256))
    assert found is not None
    assert found.type_name() == expected
