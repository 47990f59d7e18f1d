# SPDX-License-Identifier: LGPL-2.1-or-later
"""Whether a crash would leave what an audit needs: files of machines that are made up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memcg_inspect.crash.config import advice, checks

DEBIAN = "etc/default/kdump-tools"


def machine(folder: Path, **files: str) -> str:
    """Make the files of a machine; ``__`` in a name is a slash, and ``_`` a dash."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("kdump_tools", "kdump-tools")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


def good(folder: Path, release: str, defaults: str = "USE_KDUMP=1\n") -> str:
    return machine(
        folder,
        etc__default__kdump_tools=defaults,
        etc__debian_version="13.0\n",
        sys__kernel__kexec_crash_size=f"{512 << 20}\n",
        sys__kernel__kexec_crash_loaded="1\n",
        proc__sys__kernel__osrelease=f"{release}\n",
    )


def told(root: str) -> dict[str, tuple[bool | None, str]]:
    return {check.name: (check.is_good, check.fix) for check in checks(root)}


def test_a_machine_that_is_set_up(tmp_path: Path) -> None:
    assert {is_good for is_good, _ in told(good(tmp_path, "6.12.9")).values()} == {True}


@pytest.mark.parametrize(
    ("release", "line", "is_good", "fix"),
    [
        ("6.12.0", "", True, ""),
        ("7.0.12", 'MAKEDUMP_ARGS="-c -d 31"', True, ""),
        ("7.1.0-1-amd64", "", False, 'set MAKEDUMP_ARGS="-c -d 23" in /etc/default/kdump-tools'),
        ("7.3.4", 'MAKEDUMP_ARGS="-F -l -d31" # -d 1', False,
         'set MAKEDUMP_ARGS="-F -l -d23" in /etc/default/kdump-tools'),
        ("7.3.4", 'MAKEDUMP_ARGS="-cd 0x1f"', False,
         'set MAKEDUMP_ARGS="-cd 23" in /etc/default/kdump-tools'),
        ("7.3.4", 'MAKEDUMP_ARGS="-d 17,31 -l"', False,
         'set MAKEDUMP_ARGS="-d 23 -l" in /etc/default/kdump-tools'),
        ("7.3.4", 'MAKEDUMP_ARGS="-d 17 --message-level 31"', True, ""),
        ("7.3.4", 'MAKEDUMP_ARGS="-c -d 23"', True, ""),
        ("7.3.4", '#MAKEDUMP_ARGS="-c -d 23"', False,
         'set MAKEDUMP_ARGS="-c -d 23" in /etc/default/kdump-tools'),
        ("7.3.4", 'MAKEDUMP_ARGS="-c"', True, ""),
        ("7.3.4", 'MAKEDUMP_ARGS="-c -d 031"', False,
         'set MAKEDUMP_ARGS="-c -d 23" in /etc/default/kdump-tools'),
        ("7.3.4", 'MAKEDUMP_ARGS="-d 23 -d 31"', False,
         'set MAKEDUMP_ARGS="-d 23 -d 23" in /etc/default/kdump-tools'),
        ("10.0", "MAKEDUMP_ARGS='-d 8'", False,
         'set MAKEDUMP_ARGS="-d 23" in /etc/default/kdump-tools'),
        ("strange", "", None, 'set MAKEDUMP_ARGS="-c -d 23" in /etc/default/kdump-tools'),
    ],
)  # fmt: skip
def test_the_level(tmp_path: Path, release: str, line: str, is_good: bool | None, fix: str) -> None:
    root = good(tmp_path, release, f"USE_KDUMP=1\n{line}\n")
    assert told(root)["dump level"] == (is_good, fix)


@pytest.mark.parametrize(
    ("line", "name", "is_good", "found"),
    [
        ("", "compression", True, "zlib"),
        ('MAKEDUMP_ARGS="-d 31"', "compression", True, "none"),
        ('MAKEDUMP_ARGS="-z -d 31"', "compression", True, "zstd"),
        ("KDUMP_COMPRESSION=xz", "compression", True, "xz: of the whole file"),
        ("KDUMP_COMPRESSION=other", "compression", None, "other: of the whole file"),
        ("", "filters", True, "none"),
        (
            'MAKEDUMP_ARGS="-c -d 31 --config /etc/f"',
            "filters",
            None,
            "--config: what is erased cannot be audited",
        ),
    ],
)
def test_filters_and_compression(
    tmp_path: Path, line: str, name: str, is_good: bool | None, found: str
) -> None:
    root = good(tmp_path, "6.12.0", f"USE_KDUMP=1\n{line}\n")
    (check,) = [check for check in checks(root) if check.name == name]
    assert (check.is_good, check.found) == (is_good, found)
    assert bool(check.fix) == (name == "filters" and is_good is None)


def test_other_distributions(tmp_path: Path) -> None:
    common = {"proc__sys__kernel__osrelease": "7.3.1\n"}
    text = "# core_collector a\ncore_collector makedumpfile -l -d 31  # -d 1\n"
    fedora = machine(tmp_path / "f", etc__kdump_conf=text, **common)
    (tmp_path / "f/etc/kdump_conf").rename(tmp_path / "f/etc/kdump.conf")
    level = told(fedora)["dump level"]
    assert level == (False, "set core_collector makedumpfile -l -d 23 in /etc/kdump.conf")
    suse = machine(tmp_path / "s", etc__sysconfig__kdump='KDUMP_DUMPLEVEL="31"\n', **common)
    assert told(suse)["dump level"] == (False, "set KDUMP_DUMPLEVEL=23 in /etc/sysconfig/kdump")
    assert told(suse)["kdump"][0]


@pytest.mark.parametrize(
    ("name", "text", "is_good", "found"),
    [
        ("kdump-tools", "", True, "/var/crash"),
        ("kdump-tools", "KDUMP_COREDIR=/var/crash/", True, "/var/crash"),
        ("kdump-tools", 'KDUMP_COREDIR="/srv/dumps"', False, "/srv/dumps"),
        ("kdump-tools", 'SSH="root@far"', None, "SSH: "),
        ("kdump-tools", "NFS=far:/x", None, "NFS: "),
        ("kdump.conf", "# path /x\npath /var/crash", True, "/var/crash"),
        ("kdump.conf", "path /srv/dumps", False, "/srv/dumps"),
        ("kdump.conf", "ssh root@far\npath /x", None, "ssh: "),
        ("kdump", "KDUMP_SAVEDIR=/var/crash", True, "/var/crash"),
        ("kdump", 'KDUMP_SAVEDIR="file:///srv/dumps"', False, "/srv/dumps"),
        ("kdump", "KDUMP_SAVEDIR=ftp://far/x", None, "ftp://far/x: "),
    ],
)
def test_where_dumps_are_saved(
    tmp_path: Path, name: str, text: str, is_good: bool | None, found: str
) -> None:
    folder = {"kdump-tools": "etc/default", "kdump.conf": "etc", "kdump": "etc/sysconfig"}[name]
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / name).write_text(f"{text}\n")
    (check,) = [check for check in checks(str(tmp_path)) if check.name == "target"]
    assert check.is_good == is_good
    assert check.found.startswith(found)


def test_a_number_that_is_none(tmp_path: Path) -> None:
    root = machine(tmp_path, sys__kernel__kexec_crash_size="\u00b2\n")
    assert told(root)["reserved memory"][0] is None


def test_nothing_is_there(tmp_path: Path) -> None:
    found = told(str(tmp_path))
    assert found["kdump"] == (False, "install the package kexec-tools")
    assert found["reserved memory"][0] is None
    assert found["crash kernel"][0] is None


@pytest.mark.parametrize(
    ("files", "name", "fix"),
    [
        ({"etc__default__kdump_tools": "USE_KDUMP=0\n"}, "kdump", "set USE_KDUMP=1"),
        ({"sys__kernel__kexec_crash_size": "0\n"}, "reserved memory", "update-grub"),
        ({"sys__kernel__kexec_crash_loaded": "0\n"}, "crash kernel", "kdump-config load"),
    ],
)
def test_what_is_missing_is_told(
    tmp_path: Path, files: dict[str, str], name: str, fix: str
) -> None:
    good(tmp_path, "6.12.0")
    is_good, line = told(machine(tmp_path, **files))[name]
    assert not is_good
    assert fix in line


def test_advice(tmp_path: Path) -> None:
    root = good(tmp_path, "7.3.4")
    assert advice(root) == (
        "So that the next dump of this machine has all that an audit needs:\n"
        '    set MAKEDUMP_ARGS="-c -d 23" in /etc/default/kdump-tools\n'
    )
    assert "crash config" in advice(good(tmp_path, "6.12.0"))


def run(*words: str) -> tuple[int, list[str]]:
    command = [sys.executable, "-m", "memcg_inspect", "crash", "config", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_the_command(tmp_path: Path) -> None:
    root = good(tmp_path, "6.12.0")
    status, lines = run("--check", "--root", root)
    assert (status, lines[-1]) == (0, "A crash leaves what an audit needs.")
    assert run("--fix", "--root", root) == (0, [])
    (tmp_path / "sys/kernel/kexec_crash_size").write_text(f"{160 << 20}\n")
    status, lines = run("--root", root)
    assert (status, lines[-1]) == (3, "It cannot be told whether a crash leaves what is needed.")
    (tmp_path / DEBIAN).write_text('USE_KDUMP=0\nMAKEDUMP_ARGS="unfinished\n')
    (tmp_path / "proc/sys/kernel/osrelease").write_text("7.3.0\n")
    status, lines = run("--root", root)
    assert (status, lines[-1]) == (1, "A crash would not leave what an audit needs.")
    assert run("--fix", "--root", root) == (1, [
        "set USE_KDUMP=1 in /etc/default/kdump-tools",
        'set MAKEDUMP_ARGS="-c -d 23" in /etc/default/kdump-tools',
    ])  # fmt: skip
