# SPDX-License-Identifier: LGPL-2.1-or-later
"""Modules that are loaded, and what taints the kernel."""

from __future__ import annotations

import pytest
from drgn import FaultError
from support.guests import DEBIAN_KERNELS, Lab
from support.layouts import MadeImage

from memcg_inspect.image.image import image_of
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.fs.nfs import counts_writeback
from memcg_inspect.linux.kernel.module import foreign_modules, has_module

AT, MODULES = 0xFFFFFFFF82000000, 0xFFFF888000111000
MISSING = 0xFFFF888077700000
#: Numbers of :linux:`include/linux/panic.h`: TAINT_PROPRIETARY_MODULE, TAINT_CRAP,
#: TAINT_OOT_MODULE, TAINT_UNSIGNED_MODULE and TAINT_LIVEPATCH.
TAINTS = {
    b"clean": 0,
    b"proprietary": 1 << 0,
    b"staging": 1 << 10,
    b"outside": 1 << 12 | 1 << 13,
    b"unsigned": 1 << 13,
    b"patch": 1 << 15,
    b"both\xff": 1 << 12 | 1 << 0,
}


def machine() -> MadeImage:
    image = MadeImage()
    image.declare(
        """
        struct list_head { struct list_head *next; struct list_head *prev; };
        struct module { int state; struct list_head list; char name[56]; unsigned long taints; };
        """
    )
    image.variable("modules", "struct list_head", AT)
    links = [AT, *(MODULES + 128 * number + 8 for number in range(len(TAINTS)))]
    for number, (name, taints) in enumerate(TAINTS.items()):
        image.make("struct module", MODULES + 128 * number, {"taints": taints})
        image.write(MODULES + 128 * number + 24, name)
    for number, link in enumerate(links):
        image.words(link, links[(number + 1) % len(links)], links[number - 1])
    return image


def test_modules_that_were_not_built_with_the_kernel() -> None:
    assert list(foreign_modules(machine())) == ["proprietary", "outside", "both\\xff"]


def test_names_of_modules() -> None:
    image = machine()
    assert all(has_module(image, name) for name in TAINTS)
    assert not has_module(image, b"clea")
    assert not has_module(image, b"")


def test_a_list_of_modules_that_is_broken() -> None:
    image = machine()
    image.words(MODULES + 128 * 6 + 8, MISSING)
    with pytest.raises(FaultError):
        has_module(image, b"none")
    with pytest.raises(FaultError):
        list(foreign_modules(image))


def test_a_kernel_without_modules() -> None:
    with pytest.raises(UnknownKernelError):
        has_module(MadeImage(), b"none")


def test_an_nfs_client_is_a_module_or_built_in() -> None:
    """A server of NFS does not count pages that are written back."""
    image = machine()
    assert counts_writeback(image) is False
    image.write(MODULES + 128 + 24, b"nfsd".ljust(56, b"\0"))
    assert counts_writeback(image) is False
    image.write(MODULES + 128 + 24, b"nfs\0")
    assert counts_writeback(image) is True
    image = MadeImage()  # CONFIG_MODULES=n
    assert counts_writeback(image) is False
    image.symbol_at("nfs_commit_inode", AT)
    assert counts_writeback(image) is True


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_modules_are_those_of_the_guest(lab: Lab, kernel: str) -> None:
    guest = lab.image(kernel)
    image, lines = image_of(guest.program()), (guest.guest / "2/proc/modules").read_text()
    names = [line.split()[0] for line in lines.splitlines()]
    assert names
    assert all(has_module(image, name.encode()) for name in names)
    assert list(foreign_modules(image)) == []
