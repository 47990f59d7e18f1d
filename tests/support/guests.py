# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What the tests run on: images of real kernels, made by the lab.

Shared by the tests; the fixtures made of it are in conftest.py.
"""

from __future__ import annotations

import shutil
from functools import lru_cache
from pathlib import Path

import drgn
from labkit import dump, images, kernels, poke
from labkit.machine import Options

from memcg_inspect.collect import audit
from memcg_inspect.image.image import image_of
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.model import Report

ROOT = Path(__file__).resolve().parent.parent.parent

DEBIAN_KERNELS = tuple(kernels.names(built_here=False))
#: Kernels built here take long to build: they are tested when they are in the cache. Those
#: with mistakes of their own, and the one for the soak, have tests of their own.
HONEST_KERNELS = tuple(
    k for k in kernels.names(built_here=True) if "-broken-" not in k and not k.endswith("-debug")
)
NOT_BUILT = tuple(k for k in HONEST_KERNELS if not kernels.cached(k))
BUILT_KERNELS = tuple(k for k in HONEST_KERNELS if k.endswith("-lab") and k not in NOT_BUILT)
KERNELS = (*DEBIAN_KERNELS, *BUILT_KERNELS)
PERNODE_KERNELS = tuple(k for k in HONEST_KERNELS if "-pernode" in k and k not in NOT_BUILT)


class GuestImage:
    """An image of a guest, and what the guest itself said before it was frozen."""

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
        """Its debug info, which is fetched when a test first asks for it."""
        return self._vmlinux or poke.vmlinux_of(self.core)

    def program(self, dwarf: bool = False) -> drgn.Program:
        """With types from BTF, unless debug info is what a test is about."""
        return _program(self.core, self.vmlinux if dwarf else None)

    def report(self, dwarf: bool = False) -> Report:
        return _report(self.core, self.vmlinux if dwarf else None)


# Debug info of one kernel takes hundreds of megabytes: few programs are kept open.
@lru_cache(maxsize=3)
def _program(core: Path, vmlinux: Path | None) -> drgn.Program:
    if vmlinux is None:
        return open_program(ImageSource(core=str(core), debuginfo="btf"))
    return open_program(ImageSource(core=str(core), symbols=(str(vmlinux),)))


@lru_cache(maxsize=200)
def _report(core: Path, vmlinux: Path | None) -> Report:
    return audit(image_of(_program(core, vmlinux)))


class Lab:
    """Makes images, or takes them from the cache."""

    def image(
        self, kernel: str, nodes: str = "4", workload: str = "files", **more: object
    ) -> GuestImage:
        return GuestImage(images.image(kernel, nodes, workload, **more))  # type: ignore[arg-type]


def complaints(core: Path) -> list[str]:
    """What the guest's kernel complained about before the image was taken."""
    words = ("WARNING:", " BUG:", "INFO:", "suspicious RCU", "underflow")
    lines = (core.with_name(core.name + ".guest") / "2" / "dmesg").read_text().splitlines()
    return [line for line in lines if any(word in line for word in words)]


class Plant:
    """Plants faults into copies of images; the copies go when the test is over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[Path] = []

    def __call__(self, image: GuestImage, *changes: tuple[str | int, str | int | bytes]) -> Report:
        out = self.folder / f"{len(self.made)}.core"
        self.made.append(out)
        poke.poke(image.core, out, image.vmlinux, changes)
        return audit(image_of(open_program(ImageSource(core=str(out), debuginfo="btf"))))

    def remove(self) -> None:
        for path in self.made:
            path.unlink(missing_ok=True)
