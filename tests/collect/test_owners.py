# SPDX-License-Identifier: LGPL-2.1-or-later
"""Who pays for charges to an obj_cgroup, and what could not be read of all that may."""

from __future__ import annotations

from typing import Any

import pytest
from support.made import DEAD, OBJCG_DEAD, ROOT, A, B, family, family_objcgs
from support.made_memory import MadeMemory

from memcg_inspect.collect import owners
from memcg_inspect.collect.owners import Owners, read_owners
from memcg_inspect.model import Coverage, Objcg


def test_payers() -> None:
    """Those of a removed memcg are paid for by its parent."""
    objcgs = family_objcgs() | {0xE0: Objcg(0xE0, DEAD, 0, False, 0)}
    objcgs |= {0xF0: Objcg(0xF0, 0x9000, 0, False, 0)}
    found = Owners(family(), objcgs, frozenset(), {})
    assert [found.payer(objcg) for objcg in (0xA0, 0xB0, OBJCG_DEAD, 0xE0)] == [A, B, A, A]
    assert found.payer(0xF0) is None  # of a memcg that was not read
    assert found.payer(0x1234) is None


def test_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session reads it once."""
    reads: list[str] = []

    def read_memcgs(image: Any, memcgs: Coverage, names: Coverage) -> Any:
        reads.append("memcgs")
        memcgs.read, names.read = 4, 5
        return family()

    def read_objcgs(image: Any, memcgs: Any, coverage: Coverage, unreadable: set[int]) -> Any:
        assert memcgs == family()
        coverage.read = 6
        unreadable.add(ROOT)
        return family_objcgs()

    monkeypatch.setattr(owners, "read_memcgs", read_memcgs)
    monkeypatch.setattr(owners, "read_objcgs", read_objcgs)
    image = MadeMemory().image
    found = read_owners(image)
    assert (found.memcgs, found.objcgs) == (family(), family_objcgs())
    assert found.unreadable == frozenset({ROOT})
    assert {subject: part.read for subject, part in found.coverage.items()} == {
        "memcgs": 4,
        "names": 5,
        "objcgs": 6,
    }
    read_owners(image)
    assert reads == ["memcgs"] * 2
    image.keeps_walks = True
    assert read_owners(image) is read_owners(image)
    assert reads == ["memcgs"] * 3
