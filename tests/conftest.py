# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Options, marks and fixtures of the tests.

Tests on images are marked ``image`` and get kernels by parameter, so that one test on one
kernel is ``scripts/test -k 'slab and 7.3-lab'``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from labkit import kernels
from support.guests import ARCH, DEBIAN_KERNELS, NOT_BUILT, OF_OTHERS, Lab, Plant, series
from support.planting import left_behind
from support.sampling import Sampled

# On a loaded machine any example can take long. Without --all, the examples are the same each time.
_SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("loaded", **_SLOW)
settings.register_profile("loaded, the same", derandomize=True, **_SLOW)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the long tests, too")
    parser.addoption("--soak", action="store_true", help="run nothing but the soak")
    parser.addoption("--anew", metavar="WORD", help="make images anew, for each WORD once")
    parser.addoption(
        "--fuzz", type=int, default=100, metavar="N", help="damaged images to try (default: 100)"
    )
    parser.addoption("--write-docs", action="store_true", help="write what docs/ say of runs")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("loaded" if config.getoption("--all") else "loaded, the same")
    config.addinivalue_line("markers", "image: needs an image of a real kernel")
    config.addinivalue_line("markers", "long: runs only with --all")
    config.addinivalue_line("markers", "soak: runs only with --soak")
    config.addinivalue_line(
        "markers",
        "each_kernel: runs on the newest kernel, on four nodes, and on all kernels and topologies "
        "with --all. What is below OLDEST_TOO runs on the oldest kernel, too",
    )
    config.addinivalue_line(
        "markers",
        "newest_kernel: runs on the newest kernel, on four nodes, and on all kernels and "
        "topologies with --all",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Deselected rather than skipped, since a skipped test is easily taken for a passed one.
    left = [item for item in items if not _is_wanted(config, item)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if _is_wanted(config, item)]


def _is_wanted(config: pytest.Config, item: pytest.Item) -> bool:
    if _has_no_kernel(item) or not _is_of_architecture(item):
        return False
    if bool(config.getoption("--soak")) != bool(item.get_closest_marker("soak")):
        return False
    long = item.get_closest_marker("long") or _is_one_more(item)
    return bool(config.getoption("--all")) or not long


def _has_no_kernel(item: pytest.Item) -> bool:
    """Return whether a test needs kernels that the lab builds, and none is in the cache."""
    reasons = [str(mark.kwargs.get("reason", "")) for mark in item.iter_markers("skip")]
    return any(reason.startswith("got empty parameter set") for reason in reasons)


def _is_of_architecture(item: pytest.Item) -> bool:
    """Return whether a test runs on a kernel of the chosen architecture."""
    params = getattr(item, "callspec", None)
    kernel = None if params is None else params.params.get("kernel")
    return ARCH == "amd64" or (kernel is not None and kernels.recipe(kernel).arch == ARCH)


_OLDEST, _NEWEST = min(DEBIAN_KERNELS, key=series), DEBIAN_KERNELS[-1]
#: Audits and readers are tested on two kernels without --all: the default run has a limit of time.
OLDEST_TOO = ("btf", "collect", "diagnosis", "lab", "linux")


def _is_one_more(item: pytest.Item) -> bool:
    """Return whether a test with a kernel as parameter runs only with --all."""
    params = getattr(item, "callspec", None)
    given = {} if params is None else params.params
    kernel, nodes = given.get("kernel", _NEWEST), given.get("nodes", "4")
    marks = [m for m in ("each_kernel", "newest_kernel") if item.get_closest_marker(m)]
    if not marks:
        return False
    is_wanted = kernel == _NEWEST or (
        kernel == _OLDEST and marks == ["each_kernel"] and item.path.parent.name in OLDEST_TOO
    )
    return not is_wanted or nodes != "4"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if missed := sorted(set(kernels.OF_OTHERS) - set(OF_OTHERS)):
        terminalreporter.section("kernels of other architectures")
        terminalreporter.line(f"not in the cache, so not tested: {', '.join(missed)}")
    if NOT_BUILT:
        terminalreporter.section("kernels not tested")
        terminalreporter.line(
            f"not in the cache, so not tested: {', '.join(NOT_BUILT)} "
            "(scripts/test --all builds them)"
        )


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest) -> Lab:
    return Lab(request.config.getoption("--anew"))


@pytest.fixture
def sampled(request: pytest.FixtureRequest) -> Sampled:
    return Sampled(bool(request.config.getoption("--all")))


@pytest.fixture(autouse=True)
def faults_are_taken_back() -> Iterator[None]:
    """Fail a test that leaves a fault in the memory that the tests after it read."""
    yield
    assert left_behind() == []


@pytest.fixture
def plant(tmp_path: Path) -> Iterator[Plant]:
    plant = Plant(tmp_path)
    yield plant
    plant.remove()
