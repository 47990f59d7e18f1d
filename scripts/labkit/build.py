# SPDX-License-Identifier: LGPL-2.1-or-later
"""Kernels built here, from Debian's linux-source and the project's config fragments.

Kbuild writes absolute paths into the commands it compares, those of the source and
of the build tree, so a build tree is only good at its place for a source at its place.
A patched kernel is therefore built where the unpatched one was: in a mount namespace
of its own, its source and its copy of the build tree lie over the other's, and only
what the patches touch is built.
"""

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import source
from .errors import LabError
from .paths import FIXTURES, cache_folder
from .progress import doing
from .run import BUILD_TOOLS, need, run
from .store import fresh_folder, locked, text_hash, tree_hash


def fragment_text(fragments: tuple[str, ...], localversion: str) -> str:
    """The config fragments of a kernel, with the version suffix that tells it apart."""
    paths = [FIXTURES / "kernels" / f"{name}.config" for name in fragments]
    text = "".join(path.read_text() for path in paths)
    return text + f'CONFIG_LOCALVERSION="-{localversion}"\n'


def check_config(fragment: str, config: str, allowed: frozenset[str] = frozenset()) -> list[str]:
    """Lines of the fragment that did not take effect in the finished config."""
    have = set(config.splitlines())
    missed = []
    for line in fragment.splitlines():
        if not line.startswith("CONFIG_"):
            continue
        name, value = line.split("=", 1)
        wanted = f"# {name} is not set" if value == "n" else line
        absent = value == "n" and not re.search(rf"(?m)^{name}=", config)
        if wanted not in have and not absent and name not in allowed:
            missed.append(line)
    return missed


def make_command(tree: Path, output: Path, over: Sequence[tuple[Path, Path]] = ()) -> list[str]:
    """How to call make on a source; `over` are (folder, where it is to be mounted)."""
    command = ["make", "-C", str(tree), f"O={output}", "ARCH=x86_64"]
    if not over:
        return command
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    mounts = [f"mount --bind {shlex.quote(str(a))} {shlex.quote(str(b))}" for a, b in over]
    script = " && ".join([*mounts, 'exec "$@"'])
    return ["unshare", "--mount", *root, "sh", "-c", script, "sh", *command]


def kernel_command(place: str, series: str, root: str | None) -> list[str]:
    """How to call make for a kernel built here, also for a module of it.

    `place` names its build tree, and its source when that is patched; `root` is the
    kernel without any patches then, behind whose paths both are mounted.
    """
    tree, trees = source.folder(series), cache_folder("build")
    if root is None:
        return make_command(tree, trees / place)
    over = [(source.patched_folder(place), tree), (trees / place, trees / root)]
    return make_command(tree, trees / root, over)


def configure(make: list[str], output: Path, text: str, *, optional: frozenset[str]) -> None:
    """Write .config from the fragment, when the fragment is another than last time."""
    output.mkdir(parents=True, exist_ok=True)
    written = output / ".lab-fragment"
    if written.exists() and written.read_text() == text and (output / ".config").exists():
        return
    given = output / ".lab-fragment.new"
    given.write_text(text)
    target = [f"KCONFIG_ALLCONFIG={given}", "allnoconfig"]
    run([*make, *target], what="configuring the kernel")
    missed = check_config(text, (output / ".config").read_text(), optional)
    if missed:
        raise LabError("the kernel's configuration refused: " + ", ".join(missed))
    given.rename(written)


def compile_kernel(make: list[str], name: str) -> None:
    """Build vmlinux, bzImage and modules, going on from what is built already."""
    log = cache_folder("logs") / f"build-{name}.log"
    jobs = max(2, len(os.sched_getaffinity(0)) + 1)
    targets = [f"-j{jobs}", "vmlinux", "bzImage", "modules"]
    run([*make, *targets], what=f"building kernel {name}", log=log)


def collect(output: Path, folder: Path) -> str:
    """Put what the lab needs of a build into `folder`; returns the release."""
    release = (output / "include" / "config" / "kernel.release").read_text().strip()
    with doing(f"copying kernel {release}"):
        shutil.copy2(output / "vmlinux", folder / "vmlinux")
        shutil.copy2(output / "arch" / "x86" / "boot" / "bzImage", folder / "bzImage")
        shutil.copy2(output / ".config", folder / "config")
        modules = folder / "modules"
        modules.mkdir()
        shutil.copy2(output / "modules.builtin", modules / "modules.builtin")
        for line in (output / "modules.order").read_text().split():
            built = output / line.replace(".o", ".ko")
            if built.exists():
                shutil.copy2(built, modules / built.name)
    (folder / "release").write_text(release + "\n")
    return release


def inputs(series_version: str, text: str, patches: list[Path]) -> str:
    """A hash of all that decides how a kernel built here comes out."""
    return text_hash([series_version, text, [tree_hash(patch) for patch in patches]])


@dataclass(frozen=True)
class Base:
    """Where the build of a patched kernel starts: another one without these patches."""

    # the place of its build tree, and of its source when it is patched, too
    place: str
    # the kernel without any patches behind it, perhaps itself
    root: str
    # what decided how it came out
    inputs: str


def build(
    name: str,
    series: str,
    folder: Path,
    *,
    fragments: tuple[str, ...],
    localversion: str,
    optional: frozenset[str],
    refresh: bool,
    place: str,
    patches: list[Path],
    all_patches: list[Path],
    base: Base | None,
) -> dict[str, Any]:
    """Fill `folder` with a kernel built here; returns what it was built from.

    The build tree stays in the cache, so the next build only makes what changed.
    With patches, the source is a patched copy of that of `base`, and the build tree
    starts as a copy of its; `all_patches` are these and those of the base.
    """
    need(*BUILD_TOOLS)
    tree, version = source.source(series, refresh=refresh)
    text = fragment_text(fragments, localversion)
    output = cache_folder("build") / place
    with locked(f"build-{place}"):
        if base is not None:
            _start_from(base, output, place)
            below = tree if base.place == base.root else source.patched_folder(base.place)
            source.patched(place, below, f"{version} {base.inputs}", patches)
        make = kernel_command(place, series, base.root if base else None)
        configure(make, output, text, optional=optional)
        compile_kernel(make, name)
        release = collect(output, folder)
    return {
        "release": release,
        "packages": {f"linux-source-{series}": version},
        "inputs": inputs(version, text, all_patches),
    }


def _start_from(base: Base, output: Path, place: str) -> None:
    # a build tree is as good as the source it was built from, and as its base is current
    mark, patched = output / ".lab-base", source.patched_folder(place)
    if mark.exists() and mark.read_text() == base.inputs and patched.exists():
        return
    # so that all that is patched looks newer than what is copied
    if patched.exists():
        shutil.rmtree(patched)
    with fresh_folder(output) as made:
        copy = ["cp", "-a", "--reflink=auto", f"{cache_folder('build') / base.place}/.", made]
        run(copy, what=f"copying the build of {base.place}")
        (made / ".lab-base").write_text(base.inputs)
