# SPDX-License-Identifier: LGPL-2.1-or-later
"""Debian's kernels are prepared without debug info, which is downloaded when it is first needed."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from labkit import cli, debian, kernels, poke
from labkit.errors import LabError

RELEASE = "7.3.9+deb13-cloud-amd64"
IMAGE = f"linux-image-{RELEASE}-unsigned"
DEBUG = f"linux-image-{RELEASE}-dbg"
CONTENTS = {
    IMAGE: {
        f"boot/vmlinuz-{RELEASE}": "to boot",
        f"boot/config-{RELEASE}": "CONFIG_NUMA=y\n",
        f"lib/modules/{RELEASE}/kernel/one.ko": "a module",
    },
    DEBUG: {f"usr/lib/debug/boot/vmlinux-{RELEASE}": "debug info"},
}


class Archive:
    """A mirror with two packages, made by dpkg-deb."""

    versions = {IMAGE: "7.3.9-1", DEBUG: "7.3.9-1"}
    downloaded: list[str] = []

    def __init__(self, arch: str) -> None:
        assert arch == "amd64"

    def names(self, prefix: str) -> set[str]:
        return set(self.versions)

    def version(self, package: str) -> str:
        return self.versions[package]

    def download(self, package: str, folder: Path) -> Path:
        self.downloaded.append(package)
        tree = folder / f"{package}.tree"
        control = (
            f"Package: {package.lower()}\nVersion: {self.versions[package]}\n"
            "Architecture: amd64\nMaintainer: nobody <nobody@example.org>\n"
            "Description: made for a test\n"
        )
        for name, text in ({"DEBIAN/control": control} | CONTENTS[package]).items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(text)
        deb = folder / f"{package}.deb"
        subprocess.run(["dpkg-deb", "--build", tree, deb], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["rm", "-r", tree], check=True)
        return deb


@pytest.fixture
def archive(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Archive]]:
    monkeypatch.setattr(debian, "Archive", Archive)
    monkeypatch.setattr(Archive, "versions", dict(Archive.versions))
    monkeypatch.setattr(Archive, "downloaded", [])
    kernels._ready.cache_clear()
    yield Archive
    kernels._ready.cache_clear()


def test_debug_info_is_fetched_when_asked_for(archive: type[Archive]) -> None:
    ready = kernels.kernel("7.3")
    assert ready.release == RELEASE
    assert ready.bzimage.read_text() == "to boot"
    assert (archive.downloaded, ready.vmlinux.exists()) == ([IMAGE], False)
    for _ in range(2):
        assert kernels.debug_info("7.3") == ready.vmlinux
        assert ready.vmlinux.read_text() == "debug info"
        assert archive.downloaded == [IMAGE, DEBUG]
    # it is the same kernel as before, whose images stay valid
    found = kernels.cached("7.3")
    assert found is not None and found.facts == ready.facts
    left = {path.name for path in ready.folder.iterdir()}
    assert left == {"bzImage", "config", "modules", "release", "stamp.json", "vmlinux"}


def test_the_command_gives_a_whole_folder(
    archive: type[Archive], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["kernel", "7.3"]) == 0
    assert (Path(capsys.readouterr().out.strip()) / "vmlinux").read_text() == "debug info"


def test_debug_info_of_another_build_is_not_taken(archive: type[Archive]) -> None:
    ready = kernels.kernel("7.3")
    archive.versions[DEBUG] = "7.3.9-2"
    with pytest.raises(LabError, match=r"no linux-image-.*-dbg 7\.3\.9-1 any more"):
        kernels.debug_info("7.3")
    assert not ready.vmlinux.exists()


def test_a_package_without_vmlinux_leaves_none(
    archive: type[Archive], monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = kernels.kernel("7.3")
    monkeypatch.setitem(CONTENTS, DEBUG, {"usr/share/doc/nothing": ""})
    with pytest.raises(LabError, match="holds no vmlinux"):
        kernels.debug_info("7.3")
    assert not ready.vmlinux.exists()
    assert not list(ready.folder.glob(".vmlinux.*"))


def test_that_of_an_image(archive: type[Archive], tmp_path: Path) -> None:
    ready = kernels.kernel("7.3")
    beside = tmp_path / "vmcore.guest"
    beside.mkdir()
    with pytest.raises(LabError, match="no vmlinux is noted"):
        poke.vmlinux_of(tmp_path / "vmcore")
    (beside / "vmlinux").symlink_to(ready.vmlinux)
    (beside / "meta.json").write_text(json.dumps({"kernel": "7.3"}))
    assert poke.vmlinux_of(tmp_path / "vmcore") == ready.vmlinux
    assert archive.downloaded == [IMAGE, DEBUG]
    # that of a lab elsewhere, or of a kernel that was replaced, is not guessed
    (beside / "vmlinux").unlink()
    (beside / "vmlinux").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LabError, match="no vmlinux is noted"):
        poke.vmlinux_of(tmp_path / "vmcore")
