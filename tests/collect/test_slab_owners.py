# SPDX-License-Identifier: LGPL-2.1-or-later
"""Sockets and files in slabs that own pages."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from drgn import FaultError

from memcg_inspect.collect import slab_owners
from memcg_inspect.collect.slab_owners import SlabOwnerReader, SlabOwners
from memcg_inspect.linux.fs.file_table import OpenFile
from memcg_inspect.model import Coverage

SLAB: Any = object()


class Readers:
    """
    Take the place of the readers of sockets and files.

    :ivar made: what they were made with
    :ivar asked: what they were asked for
    """

    def __init__(self) -> None:
        self.made: dict[str, tuple[Any, ...]] = {}
        self.asked: list[Any] = []
        self.coverage: Coverage | None = None
        self.files = [
            OpenFile("pipefifo_fops", 0x70, True),
            OpenFile("pipefifo_fops", 0x71, False),
            OpenFile("perf_fops", 0x72, True),
            OpenFile("pipefifo_fops", 0x73, True),
        ]
        self.is_broken = False

    def sock_reader(self, *args: Any) -> Any:
        self.made["socks"] = args
        self.socks = SimpleNamespace(read=self._socks, in_use=lambda slab: [0x11, 0x12])
        return self.socks

    def _socks(self, slab: Any, memcgs: Any) -> Any:
        self.asked.append((slab, memcgs, self.socks.coverage))
        return [SimpleNamespace(address=0x10), SimpleNamespace(address=0x11)]

    def file_reader(self, *args: Any) -> Any:
        self.made["files"] = args
        return SimpleNamespace(read=self._files)

    def _files(self, slab: Any) -> Any:
        assert slab is SLAB
        yield from self.files
        if self.is_broken:
            raise FaultError("not in the image", 0x1230)


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> Readers:
    found = Readers()
    monkeypatch.setattr(slab_owners, "SockReader", found.sock_reader)
    monkeypatch.setattr(slab_owners, "FileReader", found.file_reader)
    monkeypatch.setattr(slab_owners, "socket_caches", lambda image, coverage: (image, coverage))
    return found


def test_owners_of_a_slab(readers: Readers) -> None:
    """Files that are being closed own nothing any more."""
    image, slabs, memcgs, protocols = Any, Any, {0x1}, Coverage()
    reader = SlabOwnerReader(image, slabs, memcgs, protocols)  # type: ignore[arg-type]
    assert readers.made["socks"] == (image, slabs, (image, protocols))
    assert readers.made["files"] == (image, slabs, "pipefifo_fops", "pipeanon_fops", "perf_fops")
    found, coverage = SlabOwners(), defaultdict[str, Coverage](Coverage)
    reader.add(SLAB, found, coverage)
    assert found.socks == {0x10, 0x11, 0x12}
    assert found.files == {"pipefifo_fops": {0x70, 0x73}, "perf_fops": {0x72}}
    assert readers.asked == [(SLAB, memcgs, coverage["sock"])]
    assert readers.asked[0][2] is coverage["sock"]
    assert not any(part.unreadable for part in coverage.values())


def test_a_slab_of_files_that_is_not_in_the_image(readers: Readers) -> None:
    readers.is_broken = True
    found, coverage = SlabOwners(), defaultdict[str, Coverage](Coverage)
    SlabOwnerReader(None, None, (), Coverage()).add(SLAB, found, coverage)  # type: ignore[arg-type]
    assert found.files["perf_fops"] == {0x72}
    (missed,) = coverage["files"].examples
    assert (missed.what, missed.address) == ("slab of files", 0x1230)


def test_owners_of_several_slabs() -> None:
    found = SlabOwners({0x10}, {"perf_fops": {0x72}})
    found.merge(SlabOwners({0x11}, {"perf_fops": {0x73}, "pipefifo_fops": {0x74}}))
    assert found == SlabOwners({0x10, 0x11}, {"perf_fops": {0x72, 0x73}, "pipefifo_fops": {0x74}})
