# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What the tests run on: images of real kernels, made by the lab.

Tests on images are marked ``image`` and get kernels by parameter, so that one test on one
kernel is ``scripts/test -k 'slab and 7.3-lab'``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import drgn
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from labkit import images, kernels, poke  # noqa: E402

from memcg_inspect.collect import audit  # noqa: E402
from memcg_inspect.linux.program import ImageSource, open_image  # noqa: E402
from memcg_inspect.model import Report  # noqa: E402

#: Kernels built here take long to build: they are tested when they are in the cache.
DEBIAN_KERNELS = tuple(kernels.names(built_here=False))
BUILT_KERNELS = tuple(k for k in kernels.names(built_here=True) if kernels.cached(k))
NOT_BUILT = tuple(k for k in kernels.names(built_here=True) if k not in BUILT_KERNELS)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the long tests, too")
    parser.addoption("--fuzz", action="store_true", help="many more generated cases")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "image: needs an image of a real kernel")
    config.addinivalue_line("markers", "long: runs only with --all")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Not run at all, rather than skipped: a skipped test looks like a passed one.
    if config.getoption("--all"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if NOT_BUILT:
        terminalreporter.section("kernels not tested")
        terminalreporter.line(
            f"not in the cache, so not tested: {', '.join(NOT_BUILT)} "
            "(scripts/test --all builds them)"
        )


class Image:
    """An image of a guest, and what the guest itself said before it was frozen."""

    def __init__(self, core: Path, vmlinux: Path | None = None) -> None:
        self.core = core
        self.guest = core.with_name(core.name + ".guest")
        self.vmlinux = vmlinux or (self.guest / "vmlinux").resolve()

    def __repr__(self) -> str:
        return f"Image({self.core})"

    def program(self, dwarf: bool = False) -> drgn.Program:
        """With types from BTF, unless debug info is what a test is about."""
        return _program(self.core, self.vmlinux if dwarf else None)

    def report(self, dwarf: bool = False) -> Report:
        return _report(self.core, self.vmlinux if dwarf else None)


# Debug info of one kernel takes hundreds of megabytes: few programs are kept open.
@lru_cache(maxsize=3)
def _program(core: Path, vmlinux: Path | None) -> drgn.Program:
    if vmlinux is None:
        return open_image(ImageSource(core=str(core), debuginfo="btf"))
    return open_image(ImageSource(core=str(core), symbols=(str(vmlinux),)))


@lru_cache(maxsize=200)
def _report(core: Path, vmlinux: Path | None) -> Report:
    return audit(_program(core, vmlinux))


class Lab:
    """Makes images, or takes them from the cache."""

    Image = Image

    def image(
        self, kernel: str, nodes: str = "4", workload: str = "files", **more: object
    ) -> Image:
        path = images.image(kernel, nodes, workload, **more)  # type: ignore[arg-type]
        return Image(path, kernels.kernel(kernel).vmlinux)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    yield Lab()


class Plant:
    """Plants faults into copies of images; the copies go when the test is over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[Path] = []

    def __call__(self, image: Image, *changes: tuple[str | int, str | int | bytes]) -> Report:
        out = self.folder / f"{len(self.made)}.core"
        self.made.append(out)
        poke.poke(image.core, out, image.vmlinux, changes)
        return audit(open_image(ImageSource(core=str(out), debuginfo="btf")))

    def remove(self) -> None:
        for path in self.made:
            path.unlink(missing_ok=True)


@pytest.fixture
def plant(tmp_path: Path) -> Iterator[Plant]:
    plant = Plant(tmp_path)
    yield plant
    plant.remove()
