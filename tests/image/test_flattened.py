# SPDX-License-Identifier: LGPL-2.1-or-later
"""Flattened dumps, written by hand."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from memcg_inspect.image.flattened import MAGIC, Extent, measure, unflatten
from memcg_inspect.image.room import NoRoomError, Output
from memcg_inspect.model import ImageError

END = struct.pack(">qq", -1, -1)
MOST = 1 << 20


def header(type: int = 1, version: int = 1) -> bytes:
    return (MAGIC + struct.pack(">qq", type, version)).ljust(4096, b"\0")


def record(offset: int, data: bytes, length: int | None = None) -> bytes:
    return struct.pack(">qq", offset, len(data) if length is None else length) + data


#: Written out of order, one piece twice, with a gap of ten bytes.
STREAM = header() + record(20, b"second") + record(0, b"x" * 10) + record(3, b"first") + END
DUMP = b"xxxfirstxx" + bytes(10) + b"second"


def measured(stream: bytes) -> Extent:
    return measure(io.BytesIO(stream), len(stream))


def written(path: Path, stream: bytes, most: int = MOST, step: int = 1 << 30) -> bytes:
    """
    Return what a stream unpacks to.

    :param step: bytes that the stream returns at most
    """
    file = io.BytesIO(stream)
    with path.open("w+b") as out:
        unflatten(lambda size: file.read(min(size, step)), Output(out.fileno(), most))
        out.seek(0)
        return out.read()


@pytest.mark.parametrize("step", [1, 7, 1 << 30])
def test_pieces_are_put_where_they_belong(tmp_path: Path, step: int) -> None:
    assert written(tmp_path / "out", STREAM, step=step) == DUMP
    assert measured(STREAM) == Extent(21, 26)


def test_a_piece_is_copied_in_parts(tmp_path: Path) -> None:
    data = bytes(range(256)) * (3 << 12)  # 3 MiB
    stream = header() + record(5, data) + END
    assert written(tmp_path / "out", stream, most=4 << 20) == bytes(5) + data
    assert measured(stream) == Extent(3 << 20, (3 << 20) + 5)


def test_what_follows_the_end_is_ignored(tmp_path: Path) -> None:
    assert written(tmp_path / "out", STREAM + bytes(1000)) == DUMP
    assert measured(STREAM + bytes(1000)) == Extent(21, 26)


def test_wherever_it_is_cut(tmp_path: Path) -> None:
    ends = [*range(1, 40), *range(4080, len(STREAM))]
    for size in ends:
        for read in (lambda cut: written(tmp_path / "out", cut), measured):
            with pytest.raises(ImageError, match="is truncated"):
                read(STREAM[:size])


def damaged() -> Iterator[tuple[str, bytes]]:
    yield "its signature is missing", b"x" + STREAM[1:]
    yield "type 2 and version 1 are unknown", header(type=2) + END
    yield "type 1 and version 9 are unknown", header(version=9) + END
    yield "a piece of 4 bytes at -2,", header() + record(-2, b"abcd") + END
    yield "a piece of 0 bytes at 5,", header() + record(5, b"") + END
    yield "a piece of -1 bytes at 5,", header() + record(5, b"", -1) + END
    for offset, length in ((1 << 62, 4), (5, 1 << 62), ((1 << 63) - 1, (1 << 63) - 1)):
        yield f"a piece of {length:,} bytes at {offset:,}", header() + record(offset, b"", length)
    # Within what a dump may have, but nothing is before it.
    yield "a piece ends at byte 8,589,934,593", header() + record(1 << 33, b"a") + END


@pytest.mark.parametrize(("what", "stream"), [*damaged()], ids=range(len([*damaged()])))
def test_a_damaged_stream(tmp_path: Path, what: str, stream: bytes) -> None:
    for read in (lambda: written(tmp_path / "out", stream), lambda: measured(stream)):
        with pytest.raises(ImageError, match="is damaged") as error:
            read()
        assert what in str(error.value)


def test_the_list_of_pages_may_have_a_gap_at_first(tmp_path: Path) -> None:
    """Before the end of the stream, pages may lie far beyond what was written of the list."""
    at = 2 << 30
    fill = header() + record(at, b"page")
    stream = fill + b"".join(record(n << 20, bytes(1 << 20)) for n in range(1024, 2048)) + END
    assert measured(stream) == Extent((1 << 30) + 4, at + 4)


def test_no_more_is_written_than_there_is_room_for(tmp_path: Path) -> None:
    assert written(tmp_path / "out", STREAM, most=21) == DUMP
    with pytest.raises(NoRoomError) as error:
        written(tmp_path / "out", STREAM, most=20)
    assert error.value.needed == 21
    # The same bytes again and again.
    stream = header() + record(0, bytes(1000)) * 100 + END
    with pytest.raises(NoRoomError):
        written(tmp_path / "out", stream, most=50_000)
    assert (tmp_path / "out").stat().st_size == 1000


def test_progress(tmp_path: Path) -> None:
    seen: list[int] = []
    with (tmp_path / "out").open("w+b") as out:
        unflatten(io.BytesIO(STREAM).read, Output(out.fileno(), MOST), seen.append)
    assert seen == [6, 16, 21]
