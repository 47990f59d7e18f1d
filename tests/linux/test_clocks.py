# SPDX-License-Identifier: LGPL-2.1-or-later
"""The clocks of an image, where each release keeps them, and as the log of the guest has them."""

from __future__ import annotations

import re

import pytest
from support.guests import ARCH, DEBIAN_KERNELS, Lab
from support.layouts import MadeImage

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.kernel.time.timekeeping import read_time

AT, SECOND = 0xFFFFFFFF82000000, 10**9
#: 2026-11-28, in seconds since 1970, when the machine had run for 1,000 s and slept for 50 s.
NOW, RAN, SLEPT = 1795827605, 1000, 50
TIMEKEEPER = """
    struct timespec64 { long tv_sec; long tv_nsec; };
    struct tk_read_base { unsigned int shift; unsigned long xtime_nsec; };
    struct timekeeper { struct tk_read_base tkr_mono; unsigned long xtime_sec;
        struct timespec64 wall_to_monotonic; long offs_boot; };
    struct tk_data { int lock; struct timekeeper timekeeper; struct timekeeper shadow; };
"""
#: The variable with the clocks, its type, and where the clocks are in it.
PLACES = {
    "6.12": ("shadow_timekeeper", "struct timekeeper", 0),
    "6.13": ("tk_core", "struct tk_data", 8),
    "6.17": ("timekeeper_data", "struct tk_data[2]", 8),
}
FIELDS = {
    "tkr_mono.shift": 8,
    "tkr_mono.xtime_nsec": 123_456_789 << 8 | 0x7F,
    "xtime_sec": NOW,
    # 300 ns less than a second more, since tv_nsec is not negative.
    "wall_to_monotonic.tv_sec": RAN - NOW - 1,
    "wall_to_monotonic.tv_nsec": SECOND - 300,
    "offs_boot": SLEPT * SECOND,
}


def clocks(release: str, **changed: int) -> MadeImage:
    """Return an image of a release with these clocks."""
    image = MadeImage()
    image.declare(TIMEKEEPER)
    name, type_, offset = PLACES[release]
    image.variable(name, type_, AT)
    fields = FIELDS | {key.replace("__", "."): value for key, value in changed.items()}
    image.make("struct tk_data", AT, {})
    image.make(
        "struct timekeeper",
        AT + offset,
        {k: v % (1 << (32 if "shift" in k else 64)) for k, v in fields.items()},
    )
    return image


@pytest.mark.parametrize("release", PLACES)
def test_clocks_of_each_release(release: str) -> None:
    found = read_time(clocks(release))
    assert found is not None
    assert found.realtime == NOW * SECOND + 123_456_789
    assert found.boottime == (RAN + SLEPT) * SECOND + 123_456_789 - 300


def test_an_image_without_clocks() -> None:
    assert read_time(MadeImage()) is None
    image = MadeImage()
    image.declare(TIMEKEEPER)
    image.variable("shadow_timekeeper", "struct timekeeper", AT)  # not in the image
    assert read_time(image) is None


@pytest.mark.parametrize("release", PLACES)
def test_clocks_that_cannot_be_right(release: str) -> None:
    assert read_time(clocks(release, tkr_mono__shift=33)) is None
    assert read_time(clocks(release, xtime_sec=NOW - RAN - SLEPT - 2)) is None  # before it booted
    assert read_time(clocks(release, offs_boot=-(RAN + 1) * SECOND)) is None
    assert read_time(clocks(release, offs_boot=NOW * SECOND)) is None  # it booted before 1970
    assert read_time(clocks(release, xtime_sec=530 * 365 * 86400)) is None
    assert read_time(clocks(release, tkr_mono__shift=32, tkr_mono__xtime_nsec=5 << 32)) is not None


def test_bounds_of_clocks() -> None:
    last = 530 * 365 * 86400
    at_last = {"wall_to_monotonic__tv_sec": -last, "wall_to_monotonic__tv_nsec": 0}
    whole = {"tkr_mono__xtime_nsec": 0, "offs_boot": 0}
    found = read_time(clocks("6.13", xtime_sec=last, **at_last, **whole))
    assert found is not None
    assert (found.realtime, found.boottime) == (last * SECOND, 0)
    assert read_time(clocks("6.13", xtime_sec=last, **at_last, tkr_mono__xtime_nsec=1 << 8)) is None
    # A machine whose clock began at 1970.
    since = {"wall_to_monotonic__tv_sec": 0, "wall_to_monotonic__tv_nsec": 0}
    found = read_time(clocks("6.13", xtime_sec=7, **since, **whole))
    assert found is not None
    assert found.realtime == found.boottime == 7 * SECOND


def test_a_place_that_is_damaged_is_not_the_last_one() -> None:
    """Kernels with tk_core have shadow_timekeeper in it; but either can be asked."""
    image = clocks("6.17", tkr_mono__shift=77)
    image.variable("shadow_timekeeper", "struct timekeeper", AT + 0x1000)
    image.make(
        "struct timekeeper",
        AT + 0x1000,
        {"xtime_sec": NOW, "wall_to_monotonic.tv_sec": (RAN - NOW) % (1 << 64)},
    )
    found = read_time(image)
    assert found is not None
    assert (found.realtime, found.boottime) == (NOW * SECOND, RAN * SECOND)


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS if ARCH == "amd64" else ())
def test_clocks_are_those_of_the_log(lab: Lab, kernel: str) -> None:
    """The log has the time since the boot in each line, and when the clock was set."""
    image = lab.image(kernel)
    found = read_time(image_of(image.program()))
    assert found is not None
    log = (image.guest / "2/dmesg").read_text()
    times = [float(at) for at in re.findall(r"^<\d+>\[ *([\d.]+)\]", log, re.MULTILINE)]
    [(at, epoch)] = re.findall(r"\[ *([\d.]+)\].*setting system clock to .* \((\d+)\)", log)
    assert times[-1] < found.boottime / SECOND < times[-1] + 3600
    booted = (found.realtime - found.boottime) / SECOND
    assert abs(booted - (int(epoch) - float(at))) < 5
