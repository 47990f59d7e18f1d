# SPDX-License-Identifier: LGPL-2.1-or-later
"""What one step could not read is in the coverage of the whole."""

from __future__ import annotations

from typing import NoReturn

import pytest
from drgn import FaultError
from support.guests import DEBIAN_KERNELS, Lab

from memcg_inspect.collect import audit, collector, page_uses
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.model import Coverage

pytestmark = [
    pytest.mark.image,
    pytest.mark.newest_kernel,
    pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:]),
]


def test_the_cursor_of_zswap(lab: Lab, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not knowing which memcg it refers to, nothing is EXACT."""

    def unread(image: Image) -> NoReturn:
        raise FaultError("not in the image", 0x5000)

    monkeypatch.setattr(collector, "zswap_cursors", unread)
    report = audit(image_of(lab.image(kernel).program()))
    [missed] = report.coverage["zswap_cursor"].examples
    assert (missed.what, missed.address) == ("cursor of zswap", 0x5000)
    assert report.verdict == "incomplete"


def test_the_pass_for_pages_of_others(
    lab: Lab, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Coverage(read=2)
    passes.miss("rings of io_uring", 0x6000, "not in the image")
    monkeypatch.setattr(page_uses, "_pages_of_others", lambda image: ({0x7000}, passes))
    coverage = Coverage(read=1)
    image = image_of(lab.image(kernel).program())
    assert page_uses.compound_pages_of_others(image, coverage) == {0x7000}
    assert (coverage.read, coverage.unreadable) == (3, 1)
