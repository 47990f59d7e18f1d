# SPDX-License-Identifier: LGPL-2.1-or-later
"""Files and folders in the cache, complete or absent.

Each is made under a temporary name and renamed at the end, so an interrupted run leaves nothing
incomplete. A folder is complete if its stamp, which is written last, has the hashes of its files.
"""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .paths import cache_folder
from .progress import doing

STAMP = "stamp.json"


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold a lock between processes for as long as the block lasts."""
    path = cache_folder("locks") / name.replace("/", "_")
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with doing(f"wait for another lab that makes {name}"):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def fresh_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder that replaces `target` when the block succeeds.

    The caller holds the lock of `target`, so temporary folders beside it are from runs that
    were killed. They are removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".{glob.escape(target.name)}.*"):
        shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        made.chmod(0o755)
        yield made
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
            target.rename(old / target.name)
            made.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            made.rename(target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file completely or not at all, also across a power failure."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return (
            hashlib.file_digest(file, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else _slow_hash(path)
        )


def _slow_hash(path: Path) -> str:
    # hashlib.file_digest() came with Python 3.11.
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def tree_hash(*roots: Path) -> str:
    """Return one hash over names and contents of files, and of all files below folders."""
    digest = hashlib.sha256()
    for root in roots:
        paths = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
        for path in paths:
            name = path.name if path == root else str(path.relative_to(root))
            digest.update(f"{name}\0{file_hash(path)}\n".encode())
    return digest.hexdigest()


def text_hash(value: object) -> str:
    """Return a hash of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_stamp(folder: Path, facts: Mapping[str, Any]) -> None:
    """Mark a folder as complete: write its facts, and size, hash and time of each file."""
    files = {
        str(path.relative_to(folder)): [
            path.stat().st_size,
            file_hash(path),
            path.stat().st_mtime_ns,
        ]
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.name != STAMP
    }
    stamp = {"facts": dict(facts), "files": files}
    write_atomically(folder / STAMP, json.dumps(stamp, indent=1).encode())


def read_stamp(folder: Path) -> dict[str, Any] | None:
    """Return the facts of a complete folder; None if a file is missing or changed."""
    try:
        stamp = json.loads((folder / STAMP).read_bytes())
        for name, (size, digest, *time) in stamp["files"].items():
            path = folder / name
            found = path.stat()
            if found.st_size != size:
                return None
            # Do not read a file again that has its old time: images are large.
            if [found.st_mtime_ns] != time and file_hash(path) != digest:
                return None
        facts = stamp["facts"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return facts if isinstance(facts, dict) else None
