# SPDX-License-Identifier: LGPL-2.1-or-later
"""Pages of processes in device memory are charged, and the audit does not read them."""

from __future__ import annotations

import pytest
from support.guests import DEBIAN_KERNELS, Lab

from memcg_inspect.collect import audit, collector
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.memremap import has_user_pages_on_devices

pytestmark = pytest.mark.image


@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_guests_have_none(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    assert not prog["pgmap_array"].xa_head
    assert not has_user_pages_on_devices(image_of(prog))


def test_rows_that_they_concern(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that may lack such pages are unverifiable. No lab guest has such a device."""
    monkeypatch.setattr(collector, "has_user_pages_on_devices", lambda image: True)
    report = audit(image_of(lab.image("7.3", "4", "files").program()))
    assert report.verdict == "incomplete"
    statuses = {identity.name: identity.status for identity in report.identities}
    assert statuses["usage"] == statuses["lru"] == "unverifiable"
    assert statuses["slab"] == statuses["kmem"] == "exact"
