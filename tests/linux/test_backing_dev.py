# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which files are written back, and the structures for writeback that belong to memcgs."""

from __future__ import annotations

import pytest
from drgn import FaultError, Object
from support.layouts import MadeImage

from memcg_inspect.linux.mm.backing_dev import (
    MappingReader,
    cgwbs,
    offline_cgwbs,
    released_cgwbs,
)

VARIABLES, MEMORY = 0xFFFFFFFF82000000, 0xFFFF888000100000
GONE = 0xFFFF88807FFF0000
#: The magic number of the file system of block devices (include/uapi/linux/magic.h), and of tmpfs.
BDEVFS, TMPFS = 0x62646576, 0x01021994


# Files


def files() -> MadeImage:
    image = MadeImage()
    image.declare("""
        struct backing_dev_info { unsigned long id; unsigned int capabilities; unsigned int max; };
        struct super_block { unsigned long s_flags; unsigned long s_magic;
                             struct backing_dev_info *s_bdi; };
        struct inode { unsigned long i_ino; struct super_block *i_sb; };
        struct address_space { unsigned long nrpages; struct inode *host; };
    """)
    return image


def put_file(
    image: MadeImage, n: int, magic: int, capabilities: int, bdi: int | None = None
) -> int:
    """Make a file of a file system of its own; return its ``struct address_space *``."""
    mapping, inode, sb, device = (MEMORY + 0x1000 * n + 64 * part for part in range(4))
    image.make("struct address_space", mapping, {"host": inode})
    image.make("struct inode", inode, {"i_sb": sb})
    s_bdi = device if bdi is None else bdi
    image.make("struct super_block", sb, {"s_magic": magic, "s_bdi": s_bdi})
    # The word beside the capabilities is all ones.
    members = {"capabilities": capabilities, "max": 0xFFFFFFFF, "id": (1 << 64) - 1}
    image.make("struct backing_dev_info", device, members)
    return mapping


def test_which_files_are_written_back() -> None:
    """``BDI_CAP_WRITEBACK`` of include/linux/backing-dev.h is 1, and others do not matter."""
    image = files()
    reader = MappingReader(image)
    for n, (magic, capabilities, expected) in enumerate(
        [
            (0xEF53, 1, True),
            (0xEF53, 7, True),
            (0xEF53, 6, False),
            (TMPFS, 0, False),
            (BDEVFS, 0, True),
            (BDEVFS + 1, 0, False),
        ]
    ):
        assert reader.can_writeback(put_file(image, n, magic, capabilities)) is expected
    # Only a file system of block devices needs no bdi of its own.
    assert reader.can_writeback(put_file(image, 7, BDEVFS, 0, bdi=GONE)) is True
    alone = MEMORY + 0x8000
    image.make("struct address_space", alone, {"host": 0})
    assert reader.can_writeback(alone) is False


@pytest.mark.parametrize("part", ["mapping", "inode", "sb", "bdi"])
def test_files_that_are_not_in_the_image(part: str) -> None:
    image = files()
    mapping = put_file(image, 0, 0xEF53, 1, bdi=GONE if part == "bdi" else None)
    if part == "inode":
        image.words(mapping + 8, GONE)
    if part == "sb":
        image.words(mapping + 64 + 8, GONE)
    with pytest.raises(FaultError):
        MappingReader(image).can_writeback(GONE if part == "mapping" else mapping)


def test_what_was_read_is_remembered() -> None:
    image = files()
    first, second = (put_file(image, n, 0xEF53, 1) for n in range(2))
    image.words(second + 64 + 8, first + 128)  # both are of the same file system
    reader = MappingReader(image)
    before = image.memory.reads
    assert reader.can_writeback(first)
    of_first = image.memory.reads - before
    assert reader.can_writeback(second)
    of_second = image.memory.reads - before - of_first
    assert 0 < of_second < of_first
    assert reader.can_writeback(first) and reader.can_writeback(second)
    assert image.memory.reads - before == of_first + of_second


# Structures for writeback


def kernel() -> MadeImage:
    image = MadeImage()
    image.declare("""
        struct list_head { struct list_head *next; struct list_head *prev; };
        struct cgroup_subsys_state { unsigned long cgroup; };
        struct work_struct { unsigned long data; };
        struct bdi_writeback {
            unsigned long state; struct cgroup_subsys_state *memcg_css;
            struct list_head memcg_node; struct list_head offline_node;
            struct work_struct release_work;
        };
        struct mem_cgroup { unsigned long id; struct cgroup_subsys_state css;
                            struct list_head cgwb_list; };
    """)
    return image


#: Offsets of the above.
MEMCG_NODE, OFFLINE_NODE, RELEASE_WORK, CSS, CGWB_LIST = 16, 32, 48, 8, 16
MEMCG, OTHER = MEMORY + 0x10000, MEMORY + 0x11000
WBS = [MEMORY + 0x20000 + 0x100 * n for n in range(3)]


def link(image: MadeImage, *heads: int) -> None:
    """Make a circular list."""
    for n, at in enumerate(heads):
        image.words(at, heads[(n + 1) % len(heads)], heads[n - 1])


def memcg_of(image: MadeImage, address: int = MEMCG) -> Object:
    return Object(image.prog, "struct mem_cgroup *", address)


def fail(error: FaultError) -> None:
    raise AssertionError(error)


def test_structures_of_a_memcg() -> None:
    image = kernel()
    image.make("struct mem_cgroup", MEMCG, {})
    assert list(cgwbs(image, memcg_of(image), fail)) == []  # it was taken offline
    link(image, MEMCG + CGWB_LIST)
    assert list(cgwbs(image, memcg_of(image), fail)) == []
    link(image, MEMCG + CGWB_LIST, *(wb + MEMCG_NODE for wb in WBS))
    found = list(cgwbs(image, memcg_of(image), fail))
    assert [wb.value_() for wb in found] == WBS
    assert found[0].type_.type_name() == "struct bdi_writeback *"


def test_a_list_of_a_memcg_that_is_broken() -> None:
    image, faults = kernel(), list[FaultError]()
    link(image, MEMCG + CGWB_LIST, *(wb + MEMCG_NODE for wb in WBS))
    image.words(WBS[0] + MEMCG_NODE, GONE)
    found = [wb.value_() for wb in cgwbs(image, memcg_of(image), faults.append)]
    assert set(found) >= set(WBS)
    assert len(faults) == 1
    with pytest.raises(FaultError):
        list(cgwbs(image, memcg_of(image, GONE), fail))


def test_kernels_without_writeback_by_memcg() -> None:
    """CONFIG_CGROUP_WRITEBACK=n"""
    image = MadeImage()
    image.declare("struct mem_cgroup { unsigned long id; };")
    assert list(cgwbs(image, memcg_of(image), fail)) == []
    assert offline_cgwbs(image, fail) == {}
    assert released_cgwbs(image) is None


def offline() -> MadeImage:
    """Make two structures of a memcg, and one of another, that were taken offline."""
    image = kernel()
    image.variable("offline_cgwbs", "struct list_head", VARIABLES)
    link(image, VARIABLES, *(wb + OFFLINE_NODE for wb in WBS))
    for wb, memcg in zip(WBS, (MEMCG, OTHER, MEMCG), strict=True):
        image.words(wb + 8, memcg + CSS)
    return image


def test_structures_that_were_taken_offline() -> None:
    image = offline()
    assert offline_cgwbs(image, fail) == {MEMCG: [WBS[0], WBS[2]], OTHER: [WBS[1]]}
    link(image, VARIABLES)
    assert offline_cgwbs(image, fail) == {}


def test_one_that_was_taken_offline_is_not_in_the_image() -> None:
    image, faults = offline(), list[FaultError]()
    image.words(WBS[1] + OFFLINE_NODE, GONE)
    found = offline_cgwbs(image, faults.append)
    assert found[MEMCG] == [WBS[0], WBS[2]]
    assert found[OTHER] == [WBS[1]]
    # The list is broken, and what would be the next of it is not there.
    assert len(faults) == 2


def test_structures_that_workers_are_releasing() -> None:
    """A worker has the structure itself, or the ``work_struct`` in it."""
    image, start = offline(), 0xFFFFFFFF81234000
    assert released_cgwbs(image) is None  # it was inlined, or there is no such function
    image.symbol_at("cgwb_release_workfn", start, 0x40)
    freeing = released_cgwbs(image)
    assert freeing is not None
    assert freeing.places == frozenset(range(start, start + 0x40))
    memcgs = (MEMCG, OTHER, MEMCG)
    assert [freeing.refers_to(wb) for wb in WBS] == list(memcgs)
    assert [freeing.refers_to(wb + RELEASE_WORK) for wb in WBS] == list(memcgs)
    assert freeing.refers_to(WBS[0] + 8) is None
    image.words(WBS[1] + OFFLINE_NODE, GONE)
    lost = released_cgwbs(image)
    assert lost is not None and lost.refers_to(WBS[0]) == MEMCG
