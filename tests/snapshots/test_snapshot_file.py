# SPDX-License-Identifier: LGPL-2.1-or-later
"""Files of snapshots: what is written is read, and nothing else."""

from __future__ import annotations

import os
import random
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.made_snapshots import snapshot

from memcg_inspect.model import MemcgInspectError
from memcg_inspect.model_snapshot import ChargeSnapshot, SavedCharge, SavedMemcg, SavedSlab
from memcg_inspect.snapshots import file
from memcg_inspect.snapshots.file import is_snapshot, read_snapshot, write_snapshot

WHOLE = snapshot(
    {
        ("/a", 0, "slab"): 640,
        ("/a", 1, "lru"): 8192,
        (None, 0, "slab"): 64,
        ("/b\\x1b", 0, "kmem"): 1,
    },
    sites={"mm/slub.c:1 f": 99},
    unread={"slab": 3},
    missing={"slab": "slab memory is not all in the image"},
    boot_id="3b8f",
    dying=["/a"],
)


def written(folder: Path, some: ChargeSnapshot = WHOLE) -> str:
    path = str(folder / "a?b#c%20.memcg")
    write_snapshot(path, some)
    return path


@pytest.mark.parametrize(
    "some", [WHOLE, snapshot({}), snapshot({}, uptime=None), snapshot({}, sites={})]
)
def test_what_is_written_is_read(tmp_path: Path, some: ChargeSnapshot) -> None:
    path = written(tmp_path, some)
    assert is_snapshot(path)
    assert read_snapshot(path) == some
    assert [file.name for file in tmp_path.iterdir()] == ["a?b#c%20.memcg"]
    assert Path(path).stat().st_mode & 0o777 == 0o600


def test_it_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = written(tmp_path)
    huge = replace(WHOLE, charges=(SavedCharge(0, 0, None, "lru", "", 1 << 80, 1),))
    with pytest.raises(MemcgInspectError, match="cannot be written"):
        write_snapshot(path, huge)
    assert read_snapshot(path) == WHOLE
    assert len(list(tmp_path.iterdir())) == 1


def test_it_can_be_queried(tmp_path: Path) -> None:
    with closing(sqlite3.connect(written(tmp_path))) as database:
        rows = database.execute("SELECT memcg, sum(bytes) FROM charges GROUP BY memcg").fetchall()
        assert dict(rows) == {"/a": 8832, "/b\\x1b": 1}
        assert database.execute("SELECT * FROM slabs").fetchall() == [
            ("/a", 0, "kmalloc-64", 640, 10),
            (None, 0, "kmalloc-64", 64, 1),
        ]
        assert database.execute("SELECT site FROM sites").fetchall() == [("mm/slub.c:1 f",)]
        assert database.execute("SELECT * FROM counters").fetchall() == [
            ("/", None, "MEMCG_KMEM", 7, 6),
            ("/", 1, "NR_SHMEM", -3, None),
        ]


def test_ten_thousand_memcgs_fit_into_20_mb(tmp_path: Path) -> None:
    """With what a service has: eight kinds of charges and twenty caches, on two nodes."""
    memcgs = [SavedMemcg(f"/system.slice/unit-{n}.service", n, "online") for n in range(10_000)]
    kinds = ("lru", "slab", "kmem", "percpu")
    charges = tuple(
        SavedCharge(n, node, None, kind, "", 4096 * n, n)
        for n in range(10_000)
        for node in (0, 1)
        for kind in kinds
    )
    slabs = tuple(
        SavedSlab(n, node, f"cache-{cache}", 64 * n, n)
        for n in range(10_000)
        for node in (0, 1)
        for cache in range(20)
    )
    large = replace(WHOLE, memcgs=tuple(memcgs), charges=charges, slabs=slabs)
    assert write_snapshot(str(tmp_path / "large"), large) < 20_000_000


def refused(path: str) -> str:
    with pytest.raises(MemcgInspectError) as error:
        read_snapshot(path)
    return str(error.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "some"
    assert "is no snapshot" in refused(str(path))
    path.write_bytes(b"SQLite format 3\0" + bytes(200))
    assert not is_snapshot(str(path))
    assert refused(str(path)) == f"{path} is no snapshot of memcg-inspect"
    assert "is no snapshot" in refused(str(tmp_path))


def test_a_later_version(tmp_path: Path) -> None:
    path = written(tmp_path)
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 9")
    assert "has version 9 of the format, and this program reads 2" in refused(path)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE charge SET memcg = 99",
        "UPDATE charge SET memcg = -1",
        "UPDATE charge SET memcg = 'x'",
        "UPDATE charge SET bytes = 'x'",
        "UPDATE charge SET bytes = 1.5",
        "UPDATE charge SET kind = 99",
        "UPDATE charge SET kind = x'00'",
        "UPDATE counter SET memcg = 99",
        "UPDATE memcg SET path = x'ff'",
        "UPDATE memcg SET id = id + 100",
        "UPDATE name SET name = x'ff'",
        "UPDATE image SET value = '{' WHERE name = 'nodes'",
        "UPDATE image SET value = '7' WHERE name = 'nodes'",
        "UPDATE image SET value = '[1.5]' WHERE name = 'nodes'",
        f"UPDATE image SET value = '{'[' * 100_000}' WHERE name = 'nodes'",
        "UPDATE image SET value = 'x' WHERE name = 'boottime'",
        "UPDATE image SET value = 9223372036854775807 WHERE name = 'boottime'",
        "UPDATE image SET value = -1 WHERE name = 'boottime'",
        "UPDATE memcg SET state = 'zombie'",
        "UPDATE unread SET number = 0",
        "DROP TABLE missing",
        "DELETE FROM image",
        "DROP TABLE slab",
        "ALTER TABLE charge ADD COLUMN more",
        "DROP TABLE unread; CREATE VIEW unread AS SELECT load_extension('x'), 1",
    ],
)
def test_tables_that_are_damaged(tmp_path: Path, statement: str) -> None:
    path = written(tmp_path)
    with closing(sqlite3.connect(path)) as database:
        database.executescript(statement)
    assert refused(path).startswith(f"{path} is damaged: ")


def test_a_view_in_place_of_a_table_is_not_read(tmp_path: Path) -> None:
    """It could have rows without end."""
    path = written(tmp_path)
    with closing(sqlite3.connect(path)) as database:
        database.executescript(
            "DROP TABLE counter; CREATE VIEW counter AS WITH RECURSIVE n(i) AS "
            "(SELECT 0 UNION ALL SELECT i + 1 FROM n) SELECT 0, NULL, 0, i FROM n"
        )
    assert refused(path) == f"{path} is damaged: there is no table counter"


def test_the_work_for_a_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    monkeypatch.setattr(file, "_STEP", 10)
    monkeypatch.setattr(file, "_MOST_STEPS", 3)
    assert refused(path) == f"{path} is damaged: interrupted"


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert not is_snapshot(str(pipe))
    for path in (str(pipe), "/dev/null"):
        with pytest.raises(MemcgInspectError, match="is no regular file"):
            write_snapshot(path, WHOLE)
    target = tmp_path / "target"
    (tmp_path / "link").symlink_to(target)
    write_snapshot(str(tmp_path / "link"), WHOLE)
    assert (tmp_path / "link").is_symlink()
    assert read_snapshot(str(target)) == WHOLE


def test_names_of_any_bytes(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.memcg")
    write_snapshot(path, WHOLE)
    assert read_snapshot(path) == WHOLE


def test_any_damage_is_told_in_one_line(tmp_path: Path) -> None:
    """Whatever byte is changed: a snapshot, or one line."""
    path = Path(written(tmp_path))
    data, chance, failed = path.read_bytes(), random.Random(1), 0
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(chance.randrange(1, 30)):
            damaged[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(damaged[: chance.choice((len(data), chance.randrange(len(data))))])
        try:
            read_snapshot(str(path))
        except MemcgInspectError as error:
            failed += 1
            assert "\n" not in str(error)
    assert failed > 100


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(MemcgInspectError, match="No such file or directory"):
        write_snapshot(str(tmp_path / "none" / "a"), WHOLE)
    with pytest.raises(MemcgInspectError, match="is no regular file"):
        write_snapshot(str(tmp_path), WHOLE)
