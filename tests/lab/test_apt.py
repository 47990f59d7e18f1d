# SPDX-License-Identifier: LGPL-2.1-or-later
"""Reading the system's apt lists and choosing packages."""

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
Enabled: no

Types: deb-src
URIs: http://src.example/debian
Suites: bookworm
"""


def test_one_line_lists() -> None:
    sources = apt.parse_one_line(ONE_LINE)
    assert [source.uri for source in sources] == [
        "http://mirror.example/debian",
        "http://mirror.example/security",
        "https://other.example/apt",
    ]
    assert sources[0].suites == ("bookworm",)
    assert sources[0].signed_by is None
    assert sources[1].signed_by == "/keys/debian.gpg"


def test_deb822_lists() -> None:
    plain, secure = apt.parse_deb822(DEB822)
    assert plain == apt.Source(
        "http://mirror.example/debian", ("bookworm", "bookworm-updates"), "/keys/debian.gpg"
    )
    assert secure.signed_by is not None
    assert secure.signed_by.splitlines()[1:3] == [" -----BEGIN PGP PUBLIC KEY BLOCK-----", " ."]


@pytest.mark.parametrize("style", ["list", "sources"])
def test_the_labs_own_list_uses_the_systems_mirrors(tmp_path: Path, style: str) -> None:
    folder = tmp_path / "sources.list.d"
    folder.mkdir()
    (folder / f"debian.{style}").write_text(ONE_LINE if style == "list" else DEB822)
    (folder / "old.list.disabled").write_text("deb http://never.example/debian bookworm main\n")
    (tmp_path / "sources.list").write_text("")
    text = apt.lab_sources(apt.system_sources(tmp_path))
    # what is written is itself what apt, and this parser, can read
    plain, secure = apt.parse_deb822(text)
    assert plain.uri == "http://mirror.example/debian"
    assert "trixie-backports" in plain.suites
    assert secure.uri == "http://mirror.example/security"
    assert "bookworm-security" in secure.suites
    assert "never.example" not in text and "off.example" not in text


def test_no_debian_mirror_is_an_error() -> None:
    with pytest.raises(LabError, match="no Debian mirror"):
        apt.lab_sources([apt.Source("https://other.example", ("stable-tool-1",), None)][:0])


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
    with pytest.raises(LabError, match=r"no cloud kernel 7\.2"):
        debian.newest_release(NAMES, "7.2")


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
