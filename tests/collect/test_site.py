# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Call sites of single allocations, and what may be missing of them.

``tests/linux/test_call_site_of.py`` finds them on kernels that profile.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from drgn import FaultError

from memcg_inspect.collect import site
from memcg_inspect.collect.site import SiteFinder
from memcg_inspect.model import Coverage

IMAGE: Any = object()
SLAB: Any = object()
#: A ``struct codetag *``, and ``CODETAG_EMPTY``.
TAG, EMPTY = 0x100, 1


class Tags:
    """
    The codetags of an image.

    :ivar why_not: why there are none
    :ivar of: returns that of a page, or of an object of a slab
    :ivar read: codetags that were read, and the coverage
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.why_not: str | None = None
        self.of: Callable[..., int] = lambda *_: TAG
        self.read: list[tuple[int, Coverage]] = []
        self.made: list[str] = []
        monkeypatch.setattr(site, "why_not_profiled", lambda _: self.why_not)
        monkeypatch.setattr(site, "read_call_site", self._read)
        monkeypatch.setattr(site, "SlabReader", lambda _: self._reader("slabs"))
        monkeypatch.setattr(site, "PageTagReader", lambda _: self._reader("pages"))

    def _reader(self, name: str) -> Any:
        self.made.append(name)
        return SimpleNamespace(codetag=lambda *args: self.of(*args))

    def _read(self, image: Any, codetag: int, coverage: Coverage) -> Any:
        self.read.append((codetag, coverage))
        return f"site {codetag:#x}"


@pytest.fixture
def tags(monkeypatch: pytest.MonkeyPatch) -> Tags:
    return Tags(monkeypatch)


def all_of(finder: SiteFinder, codetag: int) -> list[Any]:
    area: Any = SimpleNamespace(codetag=codetag)
    return [finder.of_slab_object(SLAB, 3), finder.of_percpu(area), finder.of_page(0x40)]


def test_each_call_site_is_read_once(tags: Tags) -> None:
    finder = SiteFinder(IMAGE)
    for _ in range(2):
        assert all_of(finder, TAG) == ["site 0x100"] * 3
    assert tags.read == [(TAG, finder.coverage)]
    assert tags.made == ["slabs", "pages"]


@pytest.mark.parametrize("codetag", [0, EMPTY])
def test_an_allocation_without_a_call_site(tags: Tags, codetag: int) -> None:
    finder = SiteFinder(IMAGE)
    tags.of = lambda *_: codetag
    assert all_of(finder, codetag) == [None] * 3
    assert tags.read == []
    tags.of = lambda *_: EMPTY + 1
    assert all_of(finder, EMPTY + 1) == ["site 0x2"] * 3


def test_what_is_asked_for(tags: Tags) -> None:
    asked: list[tuple[Any, ...]] = []

    def of(*args: Any) -> int:
        asked.append(args)
        return TAG

    tags.of = of
    all_of(SiteFinder(IMAGE), TAG)
    assert asked == [(SLAB, 3), (0x40,)]


def test_a_kernel_that_does_not_profile(tags: Tags) -> None:
    tags.why_not = "it was not built in"
    finder = SiteFinder(IMAGE)
    assert finder.why_not == "it was not built in"
    assert all_of(finder, TAG) == [None] * 3
    assert (tags.made, tags.read) == ([], [])


def test_tags_that_are_not_in_the_image(tags: Tags) -> None:
    def missing(*_: object) -> int:
        raise FaultError("not in the image", 0x1230)

    tags.of = missing
    finder = SiteFinder(IMAGE)
    assert all_of(finder, TAG) == [None, "site 0x100", None]
    assert [(missed.what, missed.address) for missed in finder.coverage.examples] == [
        ("codetag of a page", 0x1230),
        ("codetag of a slab object", 0x1230),
    ]
    assert all("not in the image" in missed.reason for missed in finder.coverage.examples)
