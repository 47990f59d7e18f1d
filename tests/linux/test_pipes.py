# SPDX-License-Identifier: LGPL-2.1-or-later
"""Pages in pipes, and those that pipes keep, made as fs/pipe.c fills them."""

from __future__ import annotations

import pytest
from support.layouts import FRAMES, MadeImage

from memcg_inspect.linux.fs.pipe import FILE_OPERATIONS, pipe_pages, spare_pages
from memcg_inspect.model import Coverage

PIPES, BUFS, MISSING = 0xFFFF888000111000, 0xFFFF888000222000, 0xFFFF888077700000
PAGES = FRAMES.base + 0x100000
#: The pages that a pipe keeps: one, two since 6.15, and an array with a length since 7.3.
SPARE = {
    "6.12": "struct page *tmp_page;",
    "6.15": "struct page *tmp_page[2];",
    "7.3": "struct anon_pipe_prealloc prealloc;",
}


def machine(release: str = "7.3") -> MadeImage:
    image = MadeImage()
    image.declare(
        """
        struct page { unsigned long flags; unsigned long compound_head; };
        struct pipe_buffer { struct page *page; unsigned int offset; unsigned int len; };
        struct anon_pipe_prealloc { struct page *pages[8]; unsigned int count; };
        """
        "struct pipe_inode_info { unsigned int head; unsigned int tail; unsigned int ring_size;"
        f" unsigned int files; struct pipe_buffer *bufs; {SPARE[release]} }};"
    )
    image.enum("pageflags", PG_head=6)
    for number in range(64):
        image.words(PAGES + 64 * number, 0, 0)
    return image


def pipe(image: MadeImage, number: int, head: int, tail: int, size: int = 4, files: int = 2) -> int:
    """Make a pipe, whose slot N has page number N."""
    at, bufs = PIPES + 256 * number, BUFS + 256 * number
    fields = {"head": head, "tail": tail, "ring_size": size, "files": files, "bufs": bufs}
    image.make("struct pipe_inode_info", at, fields)
    for slot in range(8):
        image.words(bufs + 16 * slot, PAGES + 64 * (8 * number + slot), 0)
    return at


def found(image: MadeImage, *pipes: int) -> tuple[list[int], Coverage]:
    """Return the numbers of the pages in pipes."""
    coverage = Coverage()
    return [(page - PAGES) // 64 for page in pipe_pages(image, pipes, coverage)], coverage


@pytest.mark.parametrize(
    ("head", "tail", "slots"),
    [
        (0, 0, []),
        (1, 0, [0]),
        (4, 0, [0, 1, 2, 3]),
        (6, 3, [3, 0, 1]),
        (1, (1 << 32) - 2, [2, 3, 0]),  # the counts wrap around
        (5, 0, []),  # more than there are slots
        (3, 4, []),
    ],
)
def test_slots_that_are_in_use(head: int, tail: int, slots: list[int]) -> None:
    image = machine()
    assert found(image, pipe(image, 0, head, tail)) == (slots, Coverage())


def test_pipes_that_are_none() -> None:
    """A pipe that was freed has no files; a ring is a power of 2."""
    image = machine()
    pipes = [pipe(image, 0, 2, 0, files=0), pipe(image, 1, 2, 0, size=6), pipe(image, 2, 2, 0)]
    assert found(image, *pipes) == ([16, 17], Coverage())
    assert found(image, pipe(image, 3, 1, 0, size=1, files=1)) == ([24], Coverage())


def test_the_head_of_a_page() -> None:
    image = machine()
    at = pipe(image, 0, 3, 0)
    image.words(PAGES + 64 + 8, PAGES + 64 * 40 + 1)
    image.words(BUFS + 32, 0)
    assert found(image, at) == ([0, 40], Coverage())


def test_pipes_that_are_not_in_the_image() -> None:
    image = machine()
    pages, coverage = found(image, MISSING, pipe(image, 1, 1, 0))
    assert pages == [8]
    assert coverage.unreadable == 1
    assert coverage.examples[0].what == "pipe"


@pytest.mark.parametrize("release", SPARE)
def test_pages_for_the_next_write(release: str) -> None:
    image, coverage = machine(release), Coverage()
    pipes = [pipe(image, 0, 0, 0), pipe(image, 1, 0, 0, files=0), pipe(image, 2, 0, 0)]
    for number, at in enumerate(pipes):
        made = image.pointer("struct pipe_inode_info *", at)
        pages = [PAGES + 64 * number, *(PAGES + 64 * 20,) * (release != "6.12")]
        if release == "7.3":
            image.words(made.prealloc.pages.address_ or 0, *pages, PAGES + 64 * 30)
            image.write(made.prealloc.count.address_ or 0, bytes([len(pages)]))
        else:
            image.words(made.tmp_page.address_ or 0, *pages)
    of_each = [0, 20] if release != "6.12" else [0]
    wanted = [*of_each, 2, *of_each[1:]]
    spare = [(page - PAGES) // 64 for page in spare_pages(image, [*pipes, MISSING], coverage)]
    assert spare == wanted
    assert coverage.unreadable == 1
    assert coverage.examples[0].what == "pipe"
    image = machine(release)
    assert list(spare_pages(image, [pipe(image, 0, 0, 0)], Coverage())) == []


def test_files_of_pipes() -> None:
    """Those of pipes without a name have operations of their own since v6.15."""
    assert FILE_OPERATIONS == ("pipefifo_fops", "pipeanon_fops")
