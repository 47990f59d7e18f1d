# SPDX-License-Identifier: LGPL-2.1-or-later
"""Debian's archive, also of releases other than this machine's.

apt reads and parses all lists. The lab has lists of its own, so those of the system stay as
they are. They name the mirrors that the system uses for Debian; the project names none.
"""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .errors import LabError
from .paths import cache_folder
from .run import need, run
from .store import locked, write_atomically

# The suites that have the kernels, on a mirror of Debian and on one of its security updates.
_MAIN_SUITES = ("bookworm", "trixie", "trixie-updates", "trixie-backports")
_SECURITY_SUITES = ("bookworm-security", "trixie-security")
_DEBIAN = re.compile(r"(bookworm|trixie|forky|sid|stable|testing|unstable|oldstable)\b")

# From the package debian-archive-keyring, which every Debian system has.
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class Target(NamedTuple):
    """One repository of the system: its URI, and the suite as the system's list calls it."""

    uri: str
    suite: str


def system_targets(etc: Path | None = None) -> list[Target]:
    """Return the repositories that the system's apt uses (`apt-get indextargets`).

    :param etc: a folder in place of /etc/apt
    """
    options = [
        # Without these, apt leaves out repositories whose lists it has not fetched yet.
        "APT::Get::IndexTargets::OnlyPresent=false",
        "APT::Get::IndexTargets::ReleaseInfo=false",
        *([] if etc is None else [f"Dir::Etc={etc}"]),
    ]
    words = [word for option in options for word in ("-o", option)]
    form = ["--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages"]
    text = run(["apt-get", *words, "indextargets", *form], what="read the system's apt lists")
    targets = [Target(*line.split(" ", 1)) for line in text.splitlines()]
    # One repository has a target for each component and architecture.
    return list(dict.fromkeys(targets))


def lab_sources(system: list[Target], only: str = "") -> str:
    """Return the lab's own list (deb822) with the mirrors that `system` uses for Debian.

    :param only: leave out the suites of other releases
    """
    debian = [target for target in system if _DEBIAN.match(target.suite)]
    secure = [t for t in debian if "-security" in t.suite or "/updates" in t.suite]
    plain = [target for target in debian if target not in secure]
    if not plain:
        raise LabError("no Debian mirror is named in /etc/apt; the lab takes its kernels from one")
    stanzas = []
    for targets, every in ((plain, _MAIN_SUITES), (secure, _SECURITY_SUITES)):
        suites = [suite for suite in every if suite.startswith(only)]
        if targets and suites:
            entry = f"Types: deb\nURIs: {targets[0].uri.rstrip('/')}\nSuites: {' '.join(suites)}\n"
            entry += "Components: main\n"
            if _KEYRING.exists():
                entry += f"Signed-By: {_KEYRING}\n"
            stanzas.append(entry)
    return "\n".join(stanzas)


class Archive:
    """Debian's archive through apt, with the lab's own lists, updated when one is made.

    :param arch: architecture of its packages, by Debian's name
    """

    def __init__(self, arch: str = "amd64") -> None:
        need("apt-get", "dpkg-deb")
        self._arch = arch
        self._root = cache_folder("apt" if arch == "amd64" else f"apt-{arch}")
        for name in ("lists/partial", "cache/archives/partial", "parts"):
            (self._root / name).mkdir(parents=True, exist_ok=True)
        sources = lab_sources(system_targets())
        # apt-get fails at once if another one updates the same lists.
        with locked(self._root.name):
            write_atomically(self._root / "parts" / "lab.sources", sources.encode())
            self._update()

    def _update(self) -> None:
        what = "update the lists of Debian's archive"
        try:
            self._apt("apt-get", "-o", "APT::Update::Error-Mode=any", "update", "-q", what=what)
        except LabError as error:
            if self._arch == "amd64":
                raise
            # Mirrors of rarer architectures lag behind. Packages of the other suites will do.
            missed = re.findall(r"Err:\d+ \S+ (\S+)/", str(error))
            print(f"lab: not read for {self._arch}: {', '.join(missed)}", file=sys.stderr)

    def _apt(self, program: str, *words: str, what: str, cwd: Path | None = None) -> str:
        options = {
            "Dir::Etc::SourceList": "/dev/null",
            "Dir::Etc::SourceParts": self._root / "parts",
            "Dir::State::Lists": self._root / "lists",
            "Dir::Cache": self._root / "cache",
            "APT::Architecture": self._arch,
            "APT::Architectures": self._arch,
            "APT::Sandbox::User": "root",
        }
        given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        # apt-cache translates the names of fields.
        env = {**os.environ, "LC_ALL": "C"}
        return run([program, *given, *words], what=what, cwd=cwd, env=env)

    def names(self, prefix: str) -> set[str]:
        """Return the names of all packages that begin with `prefix`."""
        return set(
            self._apt(
                "apt-cache", "pkgnames", prefix, what="read the lists of Debian's archive"
            ).split()
        )

    def version(self, package: str) -> str:
        """Return the version that download() would fetch."""
        text = self._apt("apt-cache", "policy", package, what="read the lists of Debian's archive")
        match = re.search(r"Candidate: (\S+)", text)
        if not match or match[1] == "(none)":
            raise LabError(f"Debian's archive has no package {package}")
        return match[1]

    def with_libraries(self, packages: Sequence[str]) -> list[str]:
        """Return packages and those with the libraries that they depend on."""
        found = list(packages)
        for package in found:
            text = self._apt(
                "apt-cache", "depends", "--no-recommends", "--no-suggests", "--no-conflicts",
                "--no-breaks", "--no-replaces", "--no-enhances", package,
                what="read the lists of Debian's archive",
            )  # fmt: skip
            # An alternative begins with a bar: the last one counts.
            names = re.findall(r"^  (?:Pre)?Depends: ([a-z0-9.+-]+)$", text, re.MULTILINE)
            libraries = [name for name in names if name.startswith(("lib", "zlib"))]
            found += [name for name in dict.fromkeys(libraries) if name not in found]
        return found

    def download(self, package: str, folder: Path) -> Path:
        """Fetch a package into `folder` and return its path. apt checks its hash."""
        before = set(folder.glob("*.deb"))
        self._apt("apt-get", "download", package, what=f"download {package}", cwd=folder)
        new = set(folder.glob("*.deb")) - before
        if len(new) != 1:
            raise LabError(f"apt-get download {package} left {len(new)} files, not one")
        return new.pop()
