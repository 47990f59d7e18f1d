# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Images of real kernels, made by the lab.

The fixtures ``lab`` and ``plant`` of conftest.py are made of this.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import lru_cache
from pathlib import Path

import drgn
from labkit import dump, images, kernels, poke
from labkit.machine import Options

from memcg_inspect.collect import audit
from memcg_inspect.image.image import image_of
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.report import Report

ROOT = Path(__file__).resolve().parent.parent.parent

#: Tests with a kernel as parameter run on the kernels of this architecture, by Debian's name.
ARCH = os.environ.get("LAB_ARCH", "amd64")
DEBIAN_KERNELS = tuple(kernels.names(built_here=False, arch=ARCH))
#: Kernels that the lab builds are tested if they are in the cache, since a build takes long. Those
#: with planted mistakes, and the debug kernel, have tests of their own.
HONEST_KERNELS = tuple(
    k
    for k in kernels.names(built_here=True, arch=ARCH)
    if "-broken-" not in k and not k.endswith("-debug")
)
NOT_BUILT = tuple(k for k in HONEST_KERNELS if not kernels.cached(k))
BUILT_KERNELS = tuple(k for k in HONEST_KERNELS if "-pernode" not in k and k not in NOT_BUILT)
#: Kernels of other architectures, which scripts/test fetches. A mirror may lack them.
OF_OTHERS = tuple(k for k in kernels.OF_OTHERS if kernels.cached(k))
KERNELS = (*DEBIAN_KERNELS, *BUILT_KERNELS)
PERNODE_KERNELS = tuple(k for k in HONEST_KERNELS if "-pernode" in k and k not in NOT_BUILT)


def series(kernel: str) -> str:
    """Return the series of one of Debian's kernels, of any architecture."""
    return kernel.partition("/")[0]


class GuestImage:
    """
    An image of a guest.

    :ivar core: the image
    :ivar guest: folder of files that the guest copied out: ``1`` and ``2`` hold the same files,
        copied some seconds apart before it was frozen, and ``3`` those of after it
    """

    def __init__(self, core: Path, vmlinux: Path | None = None) -> None:
        self.core = core
        self.guest = core.with_name(core.name + ".guest")
        self._vmlinux = vmlinux

    @classmethod
    def fresh(cls, core: Path, kernel: str, nodes: str, workload: str) -> GuestImage:
        """Boot a guest and make an image that no cache keeps."""
        dump.dump(Options(kernel, nodes, workload=workload), dump.Image("settled", "elf", 0), core)
        return cls(core)

    def remove(self) -> None:
        """Remove an image that no cache keeps, and forget what was read of it."""
        _program.cache_clear()
        self.core.unlink()
        shutil.rmtree(self.guest)

    def __repr__(self) -> str:
        return f"GuestImage({self.core})"

    @property
    def vmlinux(self) -> Path:
        """Return its debug info, which is fetched when a test first needs it."""
        return self._vmlinux or poke.vmlinux_of(self.core)

    def program(self, dwarf: bool = False) -> drgn.Program:
        """Return a program with types from BTF, or from debug info."""
        return _program(self.core, self._symbols(dwarf))

    def _symbols(self, dwarf: bool) -> Path | None:
        """Return the debug info that is asked for, or needed because BTF cannot be found."""
        meta = self.guest / "meta.json"
        kernel = json.loads(meta.read_bytes())["kernel"] if meta.exists() else None
        has_btf = kernel not in kernels.RECIPES or kernels.kernel(kernel).has_btf
        return self.vmlinux if dwarf or not has_btf else None

    def own_program(self) -> drgn.Program:
        """Return a program with types from BTF that no other test uses, and that may be changed."""
        return self.opened(self.core)

    def opened(self, core: Path) -> drgn.Program:
        """Return a program of a changed copy of the image."""
        return _opened(core, self._symbols(dwarf=False))

    def arguments(self, core: Path | None = None) -> list[str]:
        """Return the arguments of a command that name the image, or a changed copy of it."""
        vmlinux = self._symbols(dwarf=False)
        types = ["--debuginfo", "btf"] if vmlinux is None else ["-s", str(vmlinux)]
        return ["-c", str(core or self.core), *types]

    def report(self, dwarf: bool = False) -> Report:
        return _report(self.core, self._symbols(dwarf))


def _opened(core: Path, vmlinux: Path | None) -> drgn.Program:
    if vmlinux is not None:
        return open_program(ImageSource(core=str(core), symbols=(str(vmlinux),)))
    return open_program(ImageSource(core=str(core), debuginfo="btf"))


#: A key of ``Program.cache``.
_SHARED = "shared by tests"


# Debug info of a kernel takes hundreds of megabytes, so few programs are kept open.
@lru_cache(maxsize=3)
def _program(core: Path, vmlinux: Path | None) -> drgn.Program:
    prog = _opened(core, vmlinux)
    prog.cache[_SHARED] = True
    return prog


def is_shared(prog: drgn.Program) -> bool:
    """Return whether other tests use a program, too."""
    return bool(prog.cache.get(_SHARED))


@lru_cache(maxsize=200)
def _report(core: Path, vmlinux: Path | None) -> Report:
    return audit(image_of(_program(core, vmlinux)))


class Lab:
    """
    Makes images, or takes them from the cache.

    :param anew: a word for the kernels' command lines, which they ignore: images with another
        word are other images
    """

    def __init__(self, anew: str | None = None) -> None:
        self.anew = anew

    def image(
        self, kernel: str, nodes: str = "4", workload: str = "files", **more: object
    ) -> GuestImage:
        """Return an image; *more* are options of :func:`labkit.images.image`."""
        if self.anew:
            more["append"] = f"{more.get('append', '')} anew={self.anew}".strip()
        return GuestImage(images.image(kernel, nodes, workload, **more))  # type: ignore[arg-type]


def gigantic(lab: Lab, kernel: str) -> GuestImage:
    """Return an image with a page of 1 GiB in use, and 20 of 2 MiB that are free."""
    append = "hugepagesz=1G hugepages=1 hugepagesz=2M hugepages=20 hugetlb_free_vmemmap=on"
    return lab.image(kernel, "1", "gigantic", append=append, memory="3G")


def complaints(core: Path) -> list[str]:
    """Return the warnings in the guest's dmesg."""
    words = ("WARNING:", " BUG:", "INFO:", "suspicious RCU", "underflow")
    # What a busy host is to blame for.
    late = ("soft lockup", "workqueue lockup", " stall")
    lines = (core.with_name(core.name + ".guest") / "2" / "dmesg").read_text().splitlines()
    return [
        line
        for line in lines
        if any(word in line for word in words) and not any(word in line.lower() for word in late)
    ]


class Plant:
    """Plant faults into copies of images. The copies are removed after the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[Path] = []

    def __call__(self, image: GuestImage, *changes: tuple[str | int, str | int | bytes]) -> Report:
        out = self.folder / f"{len(self.made)}.core"
        self.made.append(out)
        poke.poke(image.core, out, image.vmlinux, changes)
        return audit(image_of(image.opened(out)))

    def remove(self) -> None:
        for path in self.made:
            path.unlink(missing_ok=True)


def isolated(lab: Lab, kernel: str) -> GuestImage:
    """Return a guest with page table isolation, in which many processes run."""
    scene = ROOT / "fixtures/scenes/processes.sh"
    return lab.image(kernel, "1", "idle", append="pti=on", run=str(scene))
