# SPDX-License-Identifier: LGPL-2.1-or-later
"""
An image in each format that makedumpfile and kdump-tools write.

The audit of each must be that of the image itself, byte for byte. One part of a split dump is never
audited alone.
"""

from __future__ import annotations

import filecmp
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import drgn
import pytest
from support.formats import PARTS, Formats, makedumpfile
from support.guests import GuestImage, Lab
from support.sessions import converse

import memcg_inspect
from memcg_inspect.cli import main
from memcg_inspect.image import dump_file
from memcg_inspect.image.image import image_of
from memcg_inspect.image.split import part_of
from memcg_inspect.model import ImageError

pytestmark = pytest.mark.image


@pytest.fixture(scope="module")
def formats(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Formats]:
    folder = tmp_path_factory.mktemp("formats")
    yield Formats(lab.image("7.3", "1", "idle").core, folder)
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MEMCG_INSPECT_COPIES", raising=False)
    yield tmp_path / "memcg-inspect" / "dumps"
    shutil.rmtree(tmp_path / "memcg-inspect", ignore_errors=True)


def audited(capsys: pytest.CaptureFixture[str], *paths: Path) -> str:
    """Return the document of an audit without its times."""
    words = [word for path in paths for word in ("-c", str(path))]
    status = main(["audit", "--json", "--all", "--debuginfo", "btf", *words])
    shown = capsys.readouterr()
    assert (status, shown.err) == (0, "")
    document: dict[str, Any] = json.loads(shown.out)
    assert document["verdict"] == "exact"
    return json.dumps({**document, "timings": None})


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """The document of the image itself."""
    return {}


NAMES = ["zlib", "lzo", "snappy", "zstd", "flattened", "flattened_elf"]
NAMES += ["dump.gz", "dump.xz", "dump.bz2", "dump.lz4", "split"]


@pytest.mark.parametrize("name", NAMES)
def test_each_format_says_the_same(
    formats: Formats,
    expected: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    cache: Path,
    name: str,
) -> None:
    if not expected:
        expected["elf"] = audited(capsys, formats.elf)
    path = formats.parts()[-1] if name == "split" else formats.file(name)
    assert audited(capsys, path) == expected["elf"]
    is_copied = name not in ("zlib", "lzo", "snappy", "zstd")
    assert cache.exists() is is_copied
    if is_copied:
        assert [file.suffix for file in cache.iterdir()] == [".core"]


def test_a_copy_is_what_makedumpfile_makes(formats: Formats, tmp_path: Path) -> None:
    for name in ("flattened", "flattened_elf"):
        by_tool = tmp_path / f"{name}.by-tool"
        with formats.file(name).open("rb") as data:
            subprocess.run(
                ["makedumpfile", "-R", by_tool], stdin=data, check=True, capture_output=True
            )
        found = dump_file.open_dump([str(formats.file(name))])
        assert filecmp.cmp(found.path, by_tool, shallow=False)
        by_tool.unlink()


def test_a_joined_dump_is_what_makedumpfile_makes(formats: Formats, tmp_path: Path) -> None:
    """At level 0, it keeps no page of zeroes for all parts."""
    paths = [tmp_path / f"vmcore.{number}" for number in range(PARTS)]
    makedumpfile("-l", "-d", 0, "--split", "--splitblock-size", 1024, formats.elf, *paths)
    makedumpfile("--reassemble", *paths, tmp_path / "by-tool")
    found = dump_file.open_dump([str(paths[1])])
    assert filecmp.cmp(found.path, tmp_path / "by-tool", shallow=False)
    for path in (*paths, tmp_path / "by-tool"):
        path.unlink()


def test_what_a_flattened_elf_dump_leaves_out_is_not_zero(
    formats: Formats, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """libkdumpfile, which opens it, takes it for zeroes."""
    flattened = formats.file("filtered_elf")
    by_tool = tmp_path / "by-tool"
    with flattened.open("rb") as data:
        subprocess.run(["makedumpfile", "-R", by_tool], stdin=data, check=True, capture_output=True)
    said = []
    for path in (by_tool, flattened):
        status = main(["audit", "--json", "--debuginfo", "btf", "-c", str(path)])
        said.append((status, {**json.loads(capsys.readouterr().out), "timings": None}))
    assert said[0] == said[1]
    assert (said[0][0], said[0][1]["verdict"]) == (3, "incomplete")
    by_tool.unlink()


def test_all_parts_have_pages(formats: Formats) -> None:
    """Or else these tests would test nothing."""
    parts = [part_of(str(path)) for path in formats.parts()]
    assert all(part and part.range[0] < part.range[1] for part in parts)
    assert all(path.stat().st_blocks * 512 > 100_000 for path in formats.parts())


@pytest.mark.parametrize("number", range(PARTS))
def test_one_part_alone_is_refused(
    formats: Formats, capsys: pytest.CaptureFixture[str], tmp_path: Path, number: int
) -> None:
    path = tmp_path / "vmcore"
    path.symlink_to(formats.parts()[number])
    for words in (["--debuginfo", "btf"], []):
        assert main(["audit", "-c", str(path), *words]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        (line,) = shown.err.splitlines()
        assert "is one part of a split dump" in line
        assert "give all parts" in line


@pytest.mark.parametrize("number", range(PARTS))
def test_one_part_alone_is_refused_in_a_session(formats: Formats, number: int) -> None:
    """drgn opens it."""
    prog = drgn.Program()
    prog.set_core_dump(formats.parts()[number])
    for ask in (image_of, memcg_inspect.audit):
        with pytest.raises(ImageError, match="is one part of a split dump"):
            ask(prog)


def test_commands_of_a_session_refuse_one_part(formats: Formats) -> None:
    said = converse(GuestImage(formats.parts()[0]), "%memcg audit", "%memcg overview")
    for text in said:
        assert "is one part of a split dump" in text
        assert "Traceback" not in text


def test_parts_that_are_truncated_are_not_exact(
    formats: Formats, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A page that is missing is not zero."""
    paths = []
    for path in formats.parts():
        paths.append(tmp_path / path.name)
        shutil.copyfile(path, paths[-1])
        with paths[-1].open("r+b") as file:
            file.truncate(path.stat().st_size * 9 // 10)
    status = main(["audit", "--debuginfo", "btf", "-c", str(paths[0])])
    shown = capsys.readouterr()
    assert status in (2, 3)
    assert "EXACT" not in shown.out
    for path in paths:
        path.unlink()


def test_a_session_opens_them(formats: Formats) -> None:
    for given in (formats.file("dump.gz"), formats.parts(), str(formats.parts()[0])):
        prog = memcg_inspect.open(given, debuginfo="btf")
        assert prog["init_task"].comm.string_() == b"swapper/0"
