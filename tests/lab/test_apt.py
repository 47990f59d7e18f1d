# SPDX-License-Identifier: LGPL-2.1-or-later
"""Find Debian's mirrors with apt, and choose packages of kernels."""

from pathlib import Path

import pytest
from labkit import apt, debian
from labkit.errors import LabError

ONE_LINE = """
# a comment
deb http://mirror.example/debian bookworm main contrib  # trailing
deb-src http://mirror.example/debian bookworm main
deb [arch=amd64 signed-by=/keys/debian.gpg] http://mirror.example/security bookworm-security main
deb https://other.example/apt stable-tool main
"""

DEB822 = """Types: deb deb-src
# a comment inside
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /keys/debian.gpg

Types: deb
URIs: http://mirror.example/security
Suites: bookworm-security
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc
 -----END PGP PUBLIC KEY BLOCK-----

Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
Enabled: no

Types: deb-src
URIs: http://src.example/debian
Suites: bookworm
Components: main
"""


def etc(folder: Path, **lists: str) -> Path:
    """Make a folder like /etc/apt."""
    (folder / "sources.list.d").mkdir()
    (folder / "sources.list").write_text("")
    for name, text in lists.items():
        (folder / "sources.list.d" / name.replace("_", ".")).write_text(text)
    return folder


def test_one_line_lists(tmp_path: Path) -> None:
    assert apt.system_targets(etc(tmp_path, debian_list=ONE_LINE)) == [
        apt.Target("http://mirror.example/debian/", "bookworm"),
        apt.Target("http://mirror.example/security/", "bookworm-security"),
        apt.Target("https://other.example/apt/", "stable-tool"),
    ]


def test_deb822_lists(tmp_path: Path) -> None:
    assert apt.system_targets(etc(tmp_path, debian_sources=DEB822)) == [
        apt.Target("http://mirror.example/debian/", "bookworm"),
        apt.Target("http://mirror.example/debian/", "bookworm-updates"),
        apt.Target("http://mirror.example/security/", "bookworm-security"),
    ]


def test_a_damaged_list_is_named(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"Malformed entry 1 in list file .*damaged\.list"):
        apt.system_targets(etc(tmp_path, damaged_list="deb nothing\n"))


@pytest.mark.parametrize("style", ["list", "sources"])
def test_the_labs_own_list_uses_the_systems_mirrors(tmp_path: Path, style: str) -> None:
    (tmp_path / "etc").mkdir()
    system = {f"debian_{style}": ONE_LINE if style == "list" else DEB822}
    system["old_list.disabled"] = "deb http://never.example/debian bookworm main\n"
    text = apt.lab_sources(apt.system_targets(etc(tmp_path / "etc", **system)))
    # apt reads the list that the lab writes
    (tmp_path / "lab").mkdir()
    read = apt.system_targets(etc(tmp_path / "lab", lab_sources=text))
    plain = ("bookworm", "trixie", "trixie-updates", "trixie-backports")
    assert read == [
        *(apt.Target("http://mirror.example/debian/", suite) for suite in plain),
        *(
            apt.Target("http://mirror.example/security/", suite)
            for suite in ("bookworm-security", "trixie-security")
        ),
    ]


def test_the_list_of_one_release(tmp_path: Path) -> None:
    system = [
        apt.Target("http://mirror.example/debian", "bookworm"),
        apt.Target("http://mirror.example/security", "bookworm-security"),
    ]
    (tmp_path / "lab").mkdir()
    read = apt.system_targets(etc(tmp_path / "lab", lab_sources=apt.lab_sources(system, "trixie")))
    assert [target.suite for target in read] == [
        *("trixie", "trixie-updates", "trixie-backports"),
        "trixie-security",
    ]


def test_no_debian_mirror_is_an_error() -> None:
    with pytest.raises(LabError, match="no Debian mirror"):
        apt.lab_sources([apt.Target("https://other.example/", "tool-bookworm")])


NAMES = {
    "linux-image-6.1.0-9-cloud-amd64-dbg",
    "linux-image-6.1.0-9-cloud-amd64-unsigned",
    "linux-image-6.1.0-56-cloud-amd64-dbg",
    "linux-image-6.1.0-56-cloud-amd64-unsigned",
    # no image to boot for this one, and debug info of this other not yet there
    "linux-image-6.1.0-57-cloud-amd64-dbg",
    "linux-image-6.1.0-58-cloud-amd64-unsigned",
    "linux-image-6.12.117+deb12-cloud-amd64-dbg",
    "linux-image-6.12.117+deb12-cloud-amd64-unsigned",
    "linux-image-6.12.117+deb13-cloud-amd64-dbg",
    "linux-image-6.12.117+deb13-cloud-amd64-unsigned",
    "linux-image-6.12.9+deb13-rt-amd64-dbg",
    "linux-image-7.3.4+deb13-cloud-amd64-dbg",
    "linux-binary-unsigned-7.3.4+deb13-cloud-amd64",
    "linux-modules-7.3.4+deb13-cloud-amd64",
    "linux-base-7.3.4+deb13-cloud-amd64",
    "linux-image-6.6.2-cloud-amd64-unsigned",
    "linux-image-6.6.10-cloud-amd64-unsigned",
}


@pytest.mark.parametrize(
    ("series", "release"),
    [
        ("6.1", "6.1.0-56-cloud-amd64"),
        ("6.12", "6.12.117+deb13-cloud-amd64"),
        ("7.3", "7.3.4+deb13-cloud-amd64"),
        # debug info is not needed to boot
        ("6.6", "6.6.10-cloud-amd64"),
    ],
)
def test_the_newest_release_that_can_be_booted(series: str, release: str) -> None:
    assert debian.newest_release(NAMES, series) == release


def test_a_series_that_left_the_archive() -> None:
    with pytest.raises(LabError, match=r"no cloud-amd64 kernel 7\.2"):
        debian.newest_release(NAMES, "7.2")


def test_a_flavour_is_the_whole_end_of_a_name() -> None:
    names = {
        f"linux-image-{release}"
        for release in ("7.3.9+deb13-cloud-arm64", "7.3.8+deb13-rt-arm64", "7.3.1+deb13-arm64")
    }
    assert debian.newest_release(names, "7.3", "arm64") == "7.3.1+deb13-arm64"
    assert debian.newest_release(names, "7.3", "cloud-arm64") == "7.3.9+deb13-cloud-arm64"


def test_packages_of_both_layouts() -> None:
    assert debian.image_packages(NAMES, "6.1.0-56-cloud-amd64") == [
        "linux-image-6.1.0-56-cloud-amd64-unsigned"
    ]
    assert [
        name.split("-7")[0] for name in debian.image_packages(NAMES, "7.3.4+deb13-cloud-amd64")
    ] == [
        "linux-binary-unsigned",
        "linux-modules",
        "linux-base",
    ]
