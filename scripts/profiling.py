# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Show which functions take the time of an audit: `scripts/bench --profile`.

The profiler makes calls of Python functions slower, and built-in ones hardly: shares of the former
are too large.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from cProfile import Profile
from dataclasses import replace
from pathlib import Path
from types import CodeType
from unittest import mock

import scaling

from memcg_inspect import collect
from memcg_inspect.collect.clock import Clock
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.image.program import ImageSource, open_program

#: 16 GiB with many slabs, and many memcgs.
IMAGES = {
    "16 GiB, 1,000 memcgs, 2,000,000 slab objects": replace(
        scaling.BASE, memory=16, objects=2_000_000
    ),
    "8 GiB, 10,000 memcgs": replace(scaling.BASE, memcgs=10_000),
}
#: Functions of a step that are shown, and the least share of the audit that a step must have.
_MOST, _LEAST = 5, 0.05


class _Profiles(Clock):
    """A clock that profiles each step."""

    def __init__(self, image: Image) -> None:
        super().__init__(image)
        self.profiles: dict[str, Profile] = {}

    @contextmanager
    def measure(self, step: str) -> Iterator[None]:
        """Profile a step, and add its time."""
        profile = self.profiles.setdefault(step, Profile())
        with super().measure(step):
            profile.enable()
            try:
                yield
            finally:
                profile.disable()


def report_lines() -> Iterator[str]:
    """Audit the images with one process each; yield the lines of a table."""
    for number, (name, size) in enumerate(IMAGES.items()):
        if number:
            yield ""
        yield name
        yield from _lines(size.image())


def _lines(core: Path) -> Iterator[str]:
    image = image_of(open_program(ImageSource(core=str(core), debuginfo="btf")))
    image.jobs = 1
    clock = _Profiles(image)
    with mock.patch.object(collect, "Clock", lambda image: clock):
        collect.audit(image)
    whole = sum(clock.seconds.values())
    for step, seconds in sorted(clock.seconds.items(), key=lambda item: -item[1]):
        if seconds < _LEAST * whole:
            continue
        yield f"  {step:10}{seconds / whole:6.0%} of the audit"
        entries = clock.profiles[step].getstats()
        total = sum(entry.inlinetime for entry in entries)
        for entry in sorted(entries, key=lambda entry: -entry.inlinetime)[:_MOST]:
            yield f"    {entry.inlinetime / total:6.0%}  {_name(entry.code)}"


def _name(code: CodeType | str) -> str:
    if isinstance(code, str):  # a built-in function
        return re.sub(" at 0x[0-9a-f]+", "", code.strip("<>"))
    if code.co_filename == "<string>":
        return f"{code.co_name} of a dataclass or a named tuple"
    place = re.sub(r".*/(memcg_inspect|site-packages|python3\.\d+)/", "", code.co_filename)
    if "/memcg_inspect/" in code.co_filename:
        return f"{place}: {code.co_name}"
    return f"{place.removesuffix('.py').replace('/', '.')}.{code.co_name}"
