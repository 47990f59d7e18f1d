# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Wheel and source distribution: what is in them, and that they install and run.

By default the wheel is installed without its dependencies for the running Python. The long tests
make an environment for each Python from 3.10 to 3.13 that this machine has.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.guests import ROOT, Lab

VERSIONS = [(3, minor) for minor in (10, 11, 12, 13)]
RUNNING = (sys.version_info.major, sys.version_info.minor)

#: Imports every module, and prints where the package is and how many modules there are.
IMPORTS = """
import importlib, pkgutil, memcg_inspect
names = [m.name for m in pkgutil.walk_packages(memcg_inspect.__path__, "memcg_inspect.")]
for name in names:
    name.endswith("__main__") or importlib.import_module(name)
print(memcg_inspect.__file__, len(names), callable(memcg_inspect.audit))
"""


def run(*command: object, cwd: Path | None = None, **env: str) -> str:
    """Run a command to its end and return its standard output."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=os.environ | env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def candidates(major: int, minor: int) -> Iterator[str]:
    """Yield commands that may be a Python of this version: running, on PATH, or pyenv's."""
    if (major, minor) == RUNNING:
        yield sys.executable
    name = f"python{major}.{minor}"
    if (found := shutil.which(name)) is not None:
        yield found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(pyenv.glob(f"versions/{major}.{minor}*/bin/{name}")))


def interpreters() -> dict[str, str]:
    """Return the command of each Python that this machine has, by its version."""
    ask = "import ensurepip, sys, venv; print(*sys.version_info[:2])"
    found: dict[str, str] = {}
    for version in VERSIONS:
        for command in candidates(*version):
            # pyenv's shim of a version that is not chosen is there, but fails
            done = subprocess.run([command, "-c", ask], capture_output=True, text=True, check=False)
            if done.stdout.split() == [str(number) for number in version]:
                found[".".join(map(str, version))] = command
                break
    return found


INTERPRETERS = interpreters()


def package_files() -> set[str]:
    """Return the files of the package, modules and others."""
    files = (ROOT / "memcg_inspect").rglob("*")
    return {
        str(path.relative_to(ROOT))
        for path in files
        if path.is_file() and path.parent.name != "__pycache__"
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build wheel and source distribution from a copy, and return their folder."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    leave_out = shutil.ignore_patterns("__pycache__")
    for name in ("memcg_inspect", "LICENSES"):
        shutil.copytree(ROOT / name, source / name, ignore=leave_out)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source)
    return folder


def wheel_of(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


def version_of(built: Path) -> str:
    return wheel_of(built).name.split("-")[1]


def test_the_wheel_holds_the_whole_package(built: Path) -> None:
    names = zipfile.ZipFile(wheel_of(built)).namelist()
    files = {name for name in names if ".dist-info/" not in name}
    assert files == package_files()
    assert "memcg_inspect/py.typed" in files
    licences = {name.rsplit("/", 1)[1] for name in names if ".dist-info/licenses/" in name}
    assert licences >= {"LICENSE", "LGPL-2.1-or-later.txt"}


def test_the_source_distribution_holds_the_whole_package(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    assert package_files() | {"pyproject.toml", "README.md", "LICENSE"} <= names


def test_metadata(built: Path) -> None:
    with zipfile.ZipFile(wheel_of(built)) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        head = wheel.read(name).decode().split("\n\n")[0]
    required = re.findall(r"(?m)^Requires-Dist: ([\w-]+)[^;\n]*$", head)
    assert sorted(required) == ["drgn", "rich"]
    assert "Requires-Python: >=3.10\n" in head
    assert "License-Expression: LGPL-2.1-or-later\n" in head
    for major, minor in VERSIONS:
        assert f"Classifier: Programming Language :: Python :: {major}.{minor}\n" in head
    assert "Typing :: Typed" in head


def test_the_wheel_runs(built: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    run(*pip, "--disable-pip-version-check", "--target", tmp_path / "lib", wheel_of(built))
    env = {"PYTHONPATH": str(tmp_path / "lib")}
    said = run(sys.executable, "-c", IMPORTS, cwd=tmp_path, **env).split()
    assert Path(said[0]).is_relative_to(tmp_path / "lib")
    assert int(said[1]) > 100 and said[2] == "True"
    command = tmp_path / "lib" / "bin" / "memcg-inspect"
    assert version_of(built) in run(command, "--version", cwd=tmp_path, **env)


def test_the_running_python_is_among_those_tested() -> None:
    assert ".".join(map(str, RUNNING)) in INTERPRETERS


def installed(python: str, what: Path, folder: Path) -> Path:
    """Install `what` with its dependencies into a new environment; return its bin folder."""
    run(python, "-m", "venv", folder)
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "install", "-q", what)
    run(*pip, "check")
    return folder / "bin"


def check_environment(bin: Path, version: str, lab: Lab, folder: Path) -> None:
    """Import the package, and audit an image, in an environment of its own."""
    said = run(bin / "python", "-c", IMPORTS, cwd=folder).split()
    assert Path(said[0]).is_relative_to(bin.parent)
    assert int(said[1]) > 100 and said[2] == "True"
    assert version in run(bin / "memcg-inspect", "--version", cwd=folder)
    image = lab.image("7.3", "4").core
    words = ["audit", "--debuginfo", "btf", "-c", image, "--json"]
    report = json.loads(run(bin / "memcg-inspect", *words, cwd=folder))
    assert report["verdict"] == "exact"
    assert report["image"]["nodes"] == [0, 1, 2, 3]


@pytest.mark.long
@pytest.mark.image
@pytest.mark.parametrize("version", INTERPRETERS)
def test_the_wheel_in_a_new_environment(
    version: str, built: Path, lab: Lab, tmp_path: Path
) -> None:
    bin = installed(INTERPRETERS[version], wheel_of(built), tmp_path / "venv")
    check_environment(bin, version_of(built), lab, tmp_path)


@pytest.mark.long
@pytest.mark.image
def test_the_source_distribution_in_a_new_environment(
    built: Path, lab: Lab, tmp_path: Path
) -> None:
    (archive,) = built.glob("*.tar.gz")
    bin = installed(sys.executable, archive, tmp_path / "venv")
    check_environment(bin, version_of(built), lab, tmp_path)
