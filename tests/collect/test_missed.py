# SPDX-License-Identifier: LGPL-2.1-or-later
"""What one step could not read is in the coverage of the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import pytest
from drgn import FaultError
from support.guests import DEBIAN_KERNELS, Lab

from memcg_inspect.collect import audit, collect, collector, page_uses
from memcg_inspect.collect.css_stacks import with_css_stacks
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.kernel.bpf import MapReferences, read_map_references
from memcg_inspect.model import Coverage, Running
from memcg_inspect.report import Row

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


def test_references_of_bpf_maps(lab: Lab, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(image: Image, coverage: Coverage) -> MapReferences:
        coverage.miss("BPF map", 0x5000, "not in the image")
        return read_map_references(image, Coverage())

    monkeypatch.setattr(collector, "read_map_references", unread)
    report = audit(image_of(lab.image(kernel).program()))
    assert [one.what for one in report.coverage["bpf"].examples] == ["BPF map"]
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


def test_callbacks_that_a_cpu_is_calling(lab: Lab, kernel: str) -> None:
    """It has taken them off all lists, so what they hold is not known."""
    image = image_of(lab.image(kernel).program())
    snapshot = collect(image)
    root = next(iter(snapshot.memcgs))
    row = Row("css_refs", root, None, None, "css", "references", "differs", {}, {"css": 1})

    def others(*functions: str) -> str | None:
        running = (Running(0, 0, "idle", (), False), Running(3, 7, "some", functions, True))
        found = with_css_stacks(image, replace(snapshot, running=running), [row])
        return found.css_others

    assert others("kfree") is None
    why = "RCU callbacks that CPU 3 is calling may hold references"
    assert others("kfree", "rcu_do_batch") == why


def test_obj_cgroups_that_are_found_again(
    lab: Lab, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are among those of the snapshot."""
    image = image_of(lab.image(kernel).program())
    whole = collect(image)
    found = {0x5000: replace(next(iter(whole.objcgs.values())), address=0x5000)}
    monkeypatch.setattr(collector, "_recovered", lambda *_: found)
    assert collect(Image(image.prog)).objcgs == {**whole.objcgs, **found}
