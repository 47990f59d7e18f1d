# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Files of snapshots
------------------

A snapshot is a database of SQLite, which Python's standard library reads and writes: it is small,
can be queried with any tool that knows SQLite, and has views with names in place of numbers for
that. Only the tables below are read, and only if the file says that it is such a snapshot.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from memcg_inspect.files import replace_file
from memcg_inspect.model import ImageInfo, MemcgInspectError
from memcg_inspect.model_snapshot import (
    ChargeSnapshot,
    ImageTime,
    SavedCharge,
    SavedCounter,
    SavedMemcg,
    SavedSite,
    SavedSlab,
)

__all__ = ("APPLICATION_ID", "VERSION", "is_snapshot", "read_snapshot", "write_snapshot")

#: ``PRAGMA application_id`` of snapshots: "mcgs".
APPLICATION_ID = 0x6D636773
#: ``PRAGMA user_version``: number of the format.
VERSION = 2
_MAGIC = b"SQLite format 3\0"
#: Offset of the application ID in the header of a database.
_ID_OFFSET = 68
#: The most work for a file: instructions of SQLite's virtual machine, and how often it counts them.
#: A row of a table takes about ten.
_STEP, _MOST_STEPS = 100_000, 20_000

#: The tables. ``what``, ``cache``, ``site`` and the like are numbers of names.
_TABLES = """
CREATE TABLE image (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE missing (kind TEXT PRIMARY KEY, reason TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE unread (subject TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE name (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE memcg (
    id INTEGER PRIMARY KEY, path TEXT NOT NULL, cgroup_id INTEGER, state TEXT NOT NULL);
CREATE TABLE charge (
    memcg INTEGER, node INTEGER, charged_node INTEGER, kind INTEGER NOT NULL,
    what INTEGER NOT NULL, bytes INTEGER NOT NULL, number INTEGER NOT NULL);
CREATE TABLE slab (
    memcg INTEGER, node INTEGER, cache INTEGER NOT NULL, bytes INTEGER NOT NULL,
    number INTEGER NOT NULL);
CREATE TABLE site (
    memcg INTEGER, node INTEGER, kind INTEGER NOT NULL, site INTEGER NOT NULL,
    bytes INTEGER NOT NULL, number INTEGER NOT NULL);
CREATE TABLE counter (
    memcg INTEGER NOT NULL, node INTEGER, item INTEGER NOT NULL, value INTEGER NOT NULL,
    found INTEGER);
CREATE VIEW charges AS SELECT memcg.path AS memcg, node, charged_node, k.name AS kind,
    w.name AS what, bytes, number FROM charge LEFT JOIN memcg ON memcg.id = charge.memcg
    JOIN name AS k ON k.id = kind JOIN name AS w ON w.id = what;
CREATE VIEW slabs AS SELECT memcg.path AS memcg, node, c.name AS cache, bytes, number
    FROM slab LEFT JOIN memcg ON memcg.id = slab.memcg JOIN name AS c ON c.id = cache;
CREATE VIEW sites AS SELECT memcg.path AS memcg, node, k.name AS kind, s.name AS site, bytes,
    number FROM site LEFT JOIN memcg ON memcg.id = site.memcg
    JOIN name AS k ON k.id = kind JOIN name AS s ON s.id = site.site;
CREATE VIEW counters AS SELECT memcg.path AS memcg, node, i.name AS item, value, found
    FROM counter JOIN memcg ON memcg.id = counter.memcg JOIN name AS i ON i.id = item;
"""

_NAMES = ("image", "missing", "unread", "name", "memcg", "charge", "slab", "site", "counter")

R = TypeVar("R", SavedCharge, SavedSlab, SavedSite, SavedCounter)


def is_snapshot(path: str) -> bool:
    """Return whether a file is a snapshot. One that cannot be read is not."""
    try:
        if not os.path.isfile(path):
            return False  # a pipe would be waited for
        with open(path, "rb") as file:
            header = file.read(_ID_OFFSET + 4)
    except (OSError, ValueError):
        return False
    return header.startswith(_MAGIC) and header[_ID_OFFSET:] == APPLICATION_ID.to_bytes(4, "big")


def write_snapshot(path: str, snapshot: ChargeSnapshot) -> int:
    """
    Write a snapshot. A file that exists is replaced once all of it is written.

    :return: size of the file in bytes
    :raises MemcgInspectError: if it cannot be written, or is no regular file
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise MemcgInspectError(f"{path} is no regular file")

    def write(temporary: Path) -> None:
        with closing(sqlite3.connect(temporary)) as database:
            database.execute("PRAGMA journal_mode = OFF")
            _fill(database, snapshot)
            database.commit()
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())

    try:
        replace_file(target, write)
        return target.stat().st_size
    except OSError as error:
        raise MemcgInspectError(f"{path}: {error.strerror}") from None
    except (sqlite3.Error, OverflowError) as error:
        raise MemcgInspectError(f"{path} cannot be written: {error}") from None


def _fill(database: sqlite3.Connection, snapshot: ChargeSnapshot) -> None:
    database.executescript(f"PRAGMA application_id = {APPLICATION_ID};"
                           f"PRAGMA user_version = {VERSION};{_TABLES}")  # fmt: skip
    names: dict[str, int] = {}

    def numbered(rows: Iterable[R]) -> Iterator[tuple[int | None, ...]]:
        for row in rows:
            yield tuple(
                names.setdefault(value, len(names)) if isinstance(value, str) else value
                for value in row
            )

    for table, rows in (
        ("charge", snapshot.charges),
        ("slab", snapshot.slabs),
        ("site", snapshot.sites or ()),
        ("counter", snapshot.counters),
    ):
        columns = {"charge": 7, "slab": 5, "site": 6, "counter": 5}[table]
        places = ", ".join("?" * columns)
        database.executemany(f"INSERT INTO {table} VALUES ({places})", numbered(rows))  # type: ignore[type-var]
    database.executemany("INSERT INTO name VALUES (?, ?)", ((n, name) for name, n in names.items()))
    memcgs = ((number, *memcg) for number, memcg in enumerate(snapshot.memcgs))
    database.executemany("INSERT INTO memcg VALUES (?, ?, ?, ?)", memcgs)
    database.executemany("INSERT INTO missing VALUES (?, ?)", snapshot.missing.items())
    database.executemany("INSERT INTO unread VALUES (?, ?)", snapshot.unread.items())
    database.executemany("INSERT INTO image VALUES (?, ?)", _facts(snapshot).items())


def _facts(snapshot: ChargeSnapshot) -> dict[str, str | int | None]:
    image, time = snapshot.image, snapshot.time
    return {
        "release": image.release,
        "source": image.source,
        "nodes": json.dumps(image.nodes),
        "cpus": image.cpus,
        "page_size": image.page_size,
        "accounting": image.accounting,
        "debug_info": image.debug_info,
        "host": image.host,
        "realtime": None if time is None else time.realtime,
        "boottime": None if time is None else time.boottime,
        "boot_id": snapshot.boot_id,
        "profiles": int(snapshot.sites is not None),
        "moving": int(snapshot.is_moving),
    }


def read_snapshot(path: str) -> ChargeSnapshot:
    """
    Read a snapshot.

    :raises MemcgInspectError: if it is none, or is damaged, or of a later version
    """
    if not is_snapshot(path):
        raise MemcgInspectError(f"{path} is no snapshot of memcg-inspect")
    # Nothing is written, not even a journal beside it.
    uri = f"file:{quote(os.fsencode(os.path.abspath(path)))}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as database:
            database.execute("PRAGMA trusted_schema = OFF")
            database.execute("PRAGMA cell_size_check = ON")
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version != VERSION:
                raise MemcgInspectError(
                    f"{path} has version {version} of the format, and this program reads {VERSION}"
                )
            steps = iter(range(_MOST_STEPS))
            database.set_progress_handler(lambda: next(steps, None) is None, _STEP)
            return _Reader(database).read()
    except (sqlite3.Error, _Damaged, RecursionError, ValueError) as error:
        # SQLite may say what it could not understand, in several lines.
        why = next(iter(str(error).splitlines()), "unreadable")
        raise MemcgInspectError(f"{path} is damaged: {why}") from None


class _Damaged(Exception):
    """A value is not what it must be."""


class _Reader:
    """Reads the tables, and checks each value."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._names: dict[int, str] = {}
        self._memcgs = 0

    def read(self) -> ChargeSnapshot:
        self._check_tables()
        facts = dict(self._rows("image", 2))
        names = self._rows("name", 2)
        self._names = {_of(int, number): _of(str, name) for number, name in names}
        memcgs = sorted(self._rows("memcg", 4), key=lambda row: _of(int, row[0]))
        self._memcgs = len(memcgs)
        if [row[0] for row in memcgs] != list(range(len(memcgs))):
            raise _Damaged("memcgs are missing")
        sites = self._all("site", SavedSite, _memcg, _number, _name, _name, _whole, _whole)
        return ChargeSnapshot(
            image=_image(facts),
            time=_time(facts),
            boot_id=_of(str, facts.get("boot_id")),
            memcgs=tuple(SavedMemcg(_of(str, path), _of((int, type(None)), number), _state(state))
                         for _, path, number, state in memcgs),
            charges=self._all(
                "charge", SavedCharge, _memcg, _number, _number, _name, _name, _whole, _whole
            ),
            slabs=self._all("slab", SavedSlab, _memcg, _number, _name, _whole, _whole),
            sites=sites if facts.get("profiles") else None,
            counters=self._all(
                "counter", SavedCounter, _known_memcg, _number, _name, _whole, _number
            ),
            is_moving=bool(facts.get("moving")),
            missing={_of(str, kind): _of(str, why) for kind, why in self._rows("missing", 2)},
            unread={_of(str, subject): _above(n) for subject, n in self._rows("unread", 2)},
        )  # fmt: skip

    def _check_tables(self) -> None:
        """Check that they are tables. A view could have any number of rows."""
        rows = self._database.execute("SELECT name, type FROM sqlite_master")
        kinds = dict(rows)
        for name in _NAMES:
            if kinds.get(name) != "table":
                raise _Damaged(f"there is no table {name}")

    def _rows(self, table: str, columns: int) -> Iterator[tuple[Any, ...]]:
        for row in self._database.execute(f"SELECT * FROM {table}"):
            if len(row) != columns:
                raise _Damaged(f"table {table} has {len(row)} columns")
            yield row

    def _all(
        self, table: str, record: type[R], *convert: Callable[[_Reader, Any], Any]
    ) -> tuple[R, ...]:
        return tuple(
            record(*(f(self, value) for f, value in zip(convert, row, strict=True)))
            for row in self._rows(table, len(convert))
        )

    def name(self, value: Any) -> str:
        """Return the name with a number."""
        try:
            return self._names[value]
        except (KeyError, TypeError):
            raise _Damaged(f"there is no name {value!r}") from None

    def memcg(self, value: Any) -> int:
        """Check the number of a memcg."""
        if 0 <= _of(int, value) < self._memcgs:
            return int(value)
        raise _Damaged(f"there is no memcg {value}")


def _of(wanted: type | tuple[type, ...], value: Any) -> Any:
    if not isinstance(value, wanted):
        raise _Damaged(f"{value!r:.40} is no {getattr(wanted, '__name__', 'number')}")
    return value


def _state(value: Any) -> str:
    if value not in ("online", "dying"):
        raise _Damaged(f"{value!r:.40} is no state of a memcg")
    return str(value)


def _above(value: Any) -> int:
    if _of(int, value) < 1:
        raise _Damaged(f"{value} is not above 0")
    return int(value)


def _memcg(reader: _Reader, value: Any) -> int | None:
    return None if value is None else reader.memcg(value)


def _known_memcg(reader: _Reader, value: Any) -> int:
    return reader.memcg(value)


def _number(reader: _Reader, value: Any) -> int | None:
    return None if value is None else int(_of(int, value))


def _whole(reader: _Reader, value: Any) -> int:
    return int(_of(int, value))


def _name(reader: _Reader, value: Any) -> str:
    return reader.name(value)


def _image(facts: dict[str, Any]) -> ImageInfo:
    nodes = json.loads(_of(str, facts.get("nodes")))
    return ImageInfo(
        release=_of(str, facts.get("release")),
        source=_of(str, facts.get("source")),
        nodes=tuple(_of(int, nid) for nid in _of(list, nodes)),
        cpus=_of(int, facts.get("cpus")),
        page_size=_of(int, facts.get("page_size")),
        accounting=_of(str, facts.get("accounting")),
        debug_info=_of(str, facts.get("debug_info")),
        host=_of(str, facts.get("host")),
    )


def _time(facts: dict[str, Any]) -> ImageTime | None:
    if facts.get("realtime") is None:
        return None
    found = ImageTime(_of(int, facts["realtime"]), _of(int, facts.get("boottime")))
    if not 0 <= found.boottime <= found.realtime:
        raise _Damaged("there is no such time")
    return found
