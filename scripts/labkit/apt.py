# SPDX-License-Identifier: LGPL-2.1-or-later
"""Debian's archive, suites beyond the system's own included.

apt gets folders of its own, so the system's lists stay as they are. The mirror is
read from the system's own list files and named nowhere in this project.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from .errors import LabError
from .paths import cache_folder
from .run import need, run
from .store import write_atomically

# suites that carry the kernels, on the main mirror and on the one for security
_MAIN_SUITES = ("bookworm", "trixie", "trixie-updates", "trixie-backports")
_SECURITY_SUITES = ("bookworm-security", "trixie-security")


@dataclass(frozen=True)
class Source:
    """One entry of an apt list: where, which suites, and the key's field, if any."""

    uri: str
    suites: tuple[str, ...]
    signed_by: str | None


def parse_one_line(text: str) -> list[Source]:
    """Entries of a one-line style `.list` file."""
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)", line.split("#")[0])
        if match:
            options = dict(o.split("=", 1) for o in (match[1] or "").split() if "=" in o)
            found.append(Source(match[2], (match[3],), options.get("signed-by")))
    return found


def parse_deb822(text: str) -> list[Source]:
    """Entries of a deb822 style `.sources` file."""
    found = []
    for stanza in re.split(r"\n\s*\n", re.sub(r"(?m)^#.*\n?", "", text)):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line[:1] in (" ", "\t"):
                fields[name] = fields.get(name, "") + "\n" + line
            elif ":" in line:
                name, value = line.split(":", 1)
                name = name.strip().lower()
                fields[name] = value.strip()
        if "deb" not in fields.get("types", "").split():
            continue
        if fields.get("enabled", "yes").lower() in ("no", "false", "0"):
            continue
        suites = tuple(fields.get("suites", "").split())
        for uri in fields.get("uris", "").split():
            found.append(Source(uri, suites, fields.get("signed-by")))
    return found


def system_sources(etc: Path = Path("/etc/apt")) -> list[Source]:
    """What the system's own apt uses."""
    found = []
    for path in [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))]:
        if path.is_file() and path.suffix in (".list", ".sources"):
            parse = parse_one_line if path.suffix == ".list" else parse_deb822
            found += parse(path.read_text(errors="replace"))
    return found


def lab_sources(system: list[Source]) -> str:
    """The lab's own deb822 file, on the mirrors that `system` uses for Debian."""
    known = re.compile(r"(bookworm|trixie|forky|sid|stable|testing|unstable|oldstable)\b")
    debian = [s for s in system if any(known.match(suite) for suite in s.suites)]
    secure = [s for s in debian if any("-security" in x or "/updates" in x for x in s.suites)]
    plain = [s for s in debian if s not in secure]
    if not plain:
        raise LabError("no Debian mirror is named in /etc/apt; the lab takes its kernels from one")
    stanzas = []
    for sources, suites in ((plain, _MAIN_SUITES), (secure, _SECURITY_SUITES)):
        if sources:
            entry = f"Types: deb\nURIs: {sources[0].uri}\nSuites: {' '.join(suites)}\n"
            entry += "Components: main\n"
            if sources[0].signed_by:
                entry += f"Signed-By: {sources[0].signed_by}\n"
            stanzas.append(entry)
    return "\n".join(stanzas)


class Archive:
    """Debian's archive through apt, with the lab's own lists."""

    def __init__(self) -> None:
        need("apt-get", "dpkg-deb")
        self._root = cache_folder("apt")
        for name in ("lists/partial", "cache/archives/partial", "parts"):
            (self._root / name).mkdir(parents=True, exist_ok=True)
        sources = lab_sources(system_sources())
        write_atomically(self._root / "parts" / "lab.sources", sources.encode())
        self._apt("apt-get", "update", "-q", what="asking Debian's archive what it has")

    def _apt(self, program: str, *words: str, what: str, cwd: Path | None = None) -> str:
        options = {
            "Dir::Etc::SourceList": "/dev/null",
            "Dir::Etc::SourceParts": self._root / "parts",
            "Dir::State::Lists": self._root / "lists",
            "Dir::Cache": self._root / "cache",
            "APT::Sandbox::User": "root",
            "APT::Update::Error-Mode": "any",
        }
        given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return run([program, *given, *words], what=what, cwd=cwd)

    def names(self, prefix: str) -> set[str]:
        """All package names that begin with `prefix`."""
        return set(self._apt("apt-cache", "pkgnames", prefix, what="reading apt's lists").split())

    def version(self, package: str) -> str:
        """The version that download() would bring."""
        text = self._apt("apt-cache", "policy", package, what="reading apt's lists")
        match = re.search(r"Candidate: (\S+)", text)
        if not match or match[1] == "(none)":
            raise LabError(f"Debian's archive has no package {package}")
        return match[1]

    def download(self, package: str, folder: Path) -> Path:
        """Fetch a package file into `folder`; apt checks its hash."""
        before = set(folder.glob("*.deb"))
        self._apt("apt-get", "download", package, what=f"downloading {package}", cwd=folder)
        new = set(folder.glob("*.deb")) - before
        if len(new) != 1:
            raise LabError(f"apt-get download {package} left {len(new)} files, not one")
        return new.pop()
