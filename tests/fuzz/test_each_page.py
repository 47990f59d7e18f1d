# SPDX-License-Identifier: LGPL-2.1-or-later
"""Each page that an audit of a healthy guest reads may be missing: nothing is found."""

from __future__ import annotations

import random

import pytest
from support.guests import Lab
from support.missing_pages import ask_without, pages_read

from memcg_inspect.collect import audit

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]


@pytest.mark.parametrize("size", [2048, pytest.param(32, marks=pytest.mark.long)])
@pytest.mark.parametrize("kernel", ["6.1", "7.3"])
def test_an_audit_without_some_pages_finds_nothing(lab: Lab, kernel: str, size: int) -> None:
    image = lab.image(kernel, "4", "mixed")
    pages = pages_read(image, audit)
    assert len(pages) > 4096
    random.Random(1).shuffle(pages)
    for start in range(0, len(pages), size):
        report, left = ask_without(image, pages[start : start + size], audit)
        assert not report.findings, left
        assert report.verdict == "incomplete" or size < 2048
