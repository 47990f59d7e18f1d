# SPDX-License-Identifier: LGPL-2.1-or-later
"""Uses of charged pages and owners of compound pages that a test makes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from drgn import FaultError
from support.made_memory import MadeMemory

from memcg_inspect.collect import page_uses as module
from memcg_inspect.collect.page_uses import (
    CompoundOwners,
    PageUses,
    compound_pages_of_others,
    keep_pages_of_others,
    page_uses,
    uses_of_areas,
)
from memcg_inspect.linux.fs.file_table import OpenFile
from memcg_inspect.linux.mm.mm_types import KmemPage
from memcg_inspect.linux.mm.vmalloc import VmArea
from memcg_inspect.model import Coverage

IMAGE: Any = object()
#: Blocks of eight pages.
BLOCKS: Any = SimpleNamespace(order=lambda page: 3)
PAGE = 0x1000


def uses_of(known: dict[int, str], marks: bool = False, are_blocks: bool = False) -> PageUses:
    found = PageUses.__new__(PageUses)
    found._uses, found._has_large_kmalloc = known, marks
    found.stacks_are_blocks = are_blocks
    return found


def kmem(type_: str = "", order: int = 0, compound: bool = False) -> KmemPage:
    return KmemPage(PAGE, 0, order, compound, type_, 0x2000)


@pytest.mark.parametrize(
    ("page", "use", "marks", "expected", "may_be_of_others"),
    [
        (kmem("table"), "", False, ("table", 1), False),
        (kmem("table", 2, True), "", False, ("table", 4), False),
        (kmem("table", 1, True), "stack", False, ("table", 2), False),
        # A compound page is a large kmalloc, unless it has another owner.
        (kmem("", 2, True), "", False, ("large_kmalloc", 4), True),
        (kmem("", 2, True), "vmalloc", False, ("vmalloc", 4), False),
        (kmem("", 2, True), "", True, ("other", 4), False),
        (kmem("large_kmalloc", 3, True), "", True, ("large_kmalloc", 8), False),
        # Nothing stores the order of other blocks.
        (kmem(), "", False, ("other", 8), False),
        (kmem(), "stack", False, ("stack", 1), False),
    ],
)
def test_uses(
    page: KmemPage, use: str, marks: bool, expected: tuple[str, int], may_be_of_others: bool
) -> None:
    uses = uses_of({PAGE: use} if use else {}, marks)
    assert uses.of(page, BLOCKS) == expected
    assert uses.may_be_of_others(page) is may_be_of_others


def area(*pages: int, is_stack: bool = False) -> VmArea:
    return VmArea(*[0] * len(VmArea._fields))._replace(is_stack=is_stack, pages=list(pages))


def test_pages_of_areas() -> None:
    found = uses_of_areas([area(1, 2), area(3, is_stack=True)])
    assert found == {1: "vmalloc", 2: "vmalloc", 3: "stack"}


@pytest.mark.parametrize("blocks", [[], [5, 6]])
def test_stacks_that_are_blocks(monkeypatch: pytest.MonkeyPatch, blocks: list[int]) -> None:
    coverage: defaultdict[str, Coverage] = defaultdict(Coverage)
    areas = [area(1), area(2, is_stack=True)]

    def vm_areas(image: Any, vmalloc: Coverage, stacks: Coverage) -> Iterator[VmArea]:
        vmalloc.read, stacks.read = 7, 8
        yield from areas

    def node_uses(image: Any, given: Any, stacks: Coverage) -> Any:
        assert stacks is coverage["stacks"]
        return "on nodes", given

    def stack_blocks(image: Any, stacks: Coverage) -> Any:
        assert stacks is coverage["stacks"]
        return blocks

    monkeypatch.setattr(module, "page_layout", lambda _: SimpleNamespace(has_large_kmalloc=True))
    monkeypatch.setattr(module, "vm_areas", vm_areas)
    monkeypatch.setattr(module, "NodeUses", node_uses)
    monkeypatch.setattr(module, "stack_blocks", stack_blocks)
    uses = PageUses(IMAGE, coverage)
    assert uses.stacks_are_blocks is bool(blocks)
    assert uses.on_nodes == ("on nodes", areas)
    assert uses._uses == {1: "vmalloc", 2: "stack"} | dict.fromkeys(blocks, "stack")
    assert {subject: part.read for subject, part in coverage.items()} == {"vmalloc": 7, "stacks": 8}


def test_owners_are_read_once_in_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command counts what could be read."""
    made: list[Any] = []

    def uses(image: Any, coverage: Any) -> Any:
        coverage["stacks"].read = 3
        made.append(object())
        return made[-1]

    monkeypatch.setattr(module, "PageUses", uses)
    image = MadeMemory().image
    image.keeps_walks = True
    for _ in range(2):
        coverage: defaultdict[str, Coverage] = defaultdict(Coverage)
        coverage["stacks"].read = 10
        assert page_uses(image, coverage) is made[0]
        assert coverage["stacks"].read == 13
    assert len(made) == 1


class Owners:
    """
    Owners of compound pages.

    :ivar asked: the files that each reader was asked for
    :ivar broken: readers that meet memory that is not in the image
    """

    READERS = {
        "io_uring.io_uring_pages": [0x10, 0x11],
        "pipe.pipe_pages": [0x20, 0x11],
        "unix_socket_pages": [0x30],
        "top_table_pages": [0x40],
    }

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, set[int]] = {}
        self.broken: set[str] = set()
        self.can_read = True
        self.operations: tuple[str, ...] = ()
        self.found: Any = lambda slab: [OpenFile("pipefifo_fops", slab, True)] * 2
        monkeypatch.setattr(module, "FileReader", self._files)
        for name in self.READERS:
            where: Any = module
            *others, last = name.split(".")
            for other in others:
                where = getattr(where, other)
            monkeypatch.setattr(where, last, self._reader(name))

    def _files(self, image: Any, slabs: Any, *operations: str) -> Any:
        self.operations = operations
        return SimpleNamespace(
            can_read=self.can_read,
            read=lambda slab: iter(self.found(slab)),
            may_read=lambda cache: cache == "filp",
        )

    def _reader(self, name: str) -> Any:
        def read(image: Any, *args: Any) -> Iterator[int]:
            assert isinstance(args[-1], Coverage)
            for given in args[:-1]:
                self.asked[name] = given
            yield from self.READERS[name][:1]
            if name in self.broken:
                raise FaultError("not in the image", 0x1230)
            yield from self.READERS[name][1:]

        return read

    def owners(self) -> CompoundOwners:
        return CompoundOwners(IMAGE, None)  # type: ignore[arg-type]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Owners:
    return Owners(monkeypatch)


def test_owners_of_compound_pages(made: Owners) -> None:
    """io_uring_release() leaves a ring to others. A pipe that is closed has no pages."""
    files = [
        OpenFile("io_uring_fops", 0x1, True),
        OpenFile("io_uring_fops", 0x2, False),
        OpenFile("pipefifo_fops", 0x3, True),
        OpenFile("pipefifo_fops", 0x4, False),
        OpenFile("pipeanon_fops", 0x5, True),
    ]
    coverage = Coverage()
    assert made.owners().pages(files, coverage) == {0x10, 0x11, 0x20, 0x30, 0x40}
    assert made.operations == ("io_uring_fops", "pipefifo_fops", "pipeanon_fops")
    assert made.asked["io_uring.io_uring_pages"] == {0x1, 0x2}
    assert made.asked["pipe.pipe_pages"] == {0x3, 0x5}
    assert (coverage.read, coverage.unreadable) == (6, 0)
    assert made.owners().may_read("filp")  # type: ignore[arg-type]
    assert not made.owners().may_read("dentry")  # type: ignore[arg-type]


def test_an_owner_that_is_not_in_the_image(made: Owners) -> None:
    """What was found before counts."""
    made.broken = {"pipe.pipe_pages"}
    coverage = Coverage()
    assert made.owners().pages([], coverage) == {0x10, 0x11, 0x20}
    assert coverage.read == 3
    (missed,) = coverage.examples
    assert (missed.what, missed.address) == ("owners of compound pages", 0x1230)


def test_the_cache_of_files_may_be_missing(made: Owners) -> None:
    made.can_read = False
    coverage = Coverage()
    assert made.owners().pages([], coverage) == {0x10, 0x11, 0x20, 0x30, 0x40}
    (missed,) = coverage.examples
    assert (missed.what, missed.address) == ("cache of files", 0)
    assert missed.reason == "filp_cachep is not known"


class Pass:
    """A pass over the slabs of an image whose names are numbers."""

    def __init__(self, made: Owners, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = made
        self.marks = False
        self.image = MadeMemory().image
        pieces = [(None, [1, 2]), (0x700, []), (None, [3])]
        monkeypatch.setattr(
            module, "page_layout", lambda _: SimpleNamespace(has_large_kmalloc=self.marks)
        )
        monkeypatch.setattr(module, "scan_pages", lambda _: self._pieces(pieces))
        slabs = SimpleNamespace(slab=lambda page: None if page.page == 2 else page.page)
        monkeypatch.setattr(module, "SlabReader", lambda _: slabs)

    def _pieces(self, pieces: Any) -> Iterator[Any]:
        for unreadable, slabs in pieces:
            pages = [SimpleNamespace(page=page) for page in slabs]
            yield SimpleNamespace(unreadable=unreadable, slabs=pages)

    def found(self) -> tuple[set[int], list[tuple[str, int, str]]]:
        coverage = Coverage()
        pages = compound_pages_of_others(self.image, coverage)
        reasons = [(m.what, m.address, m.reason.partition(": 0x")[0]) for m in coverage.examples]
        return pages, reasons


@pytest.fixture
def walk(made: Owners, monkeypatch: pytest.MonkeyPatch) -> Pass:
    return Pass(made, monkeypatch)


def test_a_pass_for_files(walk: Pass) -> None:
    """Files in slabs that could not be read may own pages."""
    pages, reasons = walk.found()
    assert pages == {0x10, 0x11, 0x20, 0x30, 0x40}
    assert walk.made.asked["pipe.pipe_pages"] == {1, 3}
    assert reasons == [
        ("files", 2, "the cache of a slab is not known"),
        ("files", 0x700, "not in the image"),
    ]


def test_a_slab_of_files_that_is_not_in_the_image(walk: Pass) -> None:
    def read(slab: int) -> list[OpenFile]:
        if slab == 1:
            raise FaultError("not there", 0x1230)
        return [OpenFile("pipefifo_fops", slab, True)]

    walk.made.found = read
    _, reasons = walk.found()
    assert walk.made.asked["pipe.pipe_pages"] == {3}
    assert ("files", 0x1230, "not there") in reasons


def test_a_kernel_that_marks_large_kmallocs(walk: Pass) -> None:
    """No owner of other compound pages is needed."""
    walk.marks = True
    assert walk.found() == (set(), [])
    assert walk.made.asked == {}


def test_what_the_audit_found_is_kept(walk: Pass) -> None:
    """In a session only."""
    keep_pages_of_others(walk.image, {0x50}, Coverage(4))
    assert walk.found()[0] == {0x10, 0x11, 0x20, 0x30, 0x40}
    walk.image.keeps_walks = True
    keep_pages_of_others(walk.image, {0x50}, Coverage(4))
    coverage = Coverage(1)
    assert compound_pages_of_others(walk.image, coverage) == {0x50}
    assert coverage.read == 5
