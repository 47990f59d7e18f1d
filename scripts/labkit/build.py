# SPDX-License-Identifier: LGPL-2.1-or-later
"""Kernels built here, from Debian's linux-source and the project's config fragments.

Kbuild writes the source's path into every command it compares, so a build tree is
only good for a source at the same path. A patched kernel is therefore built with its
source mounted over the shared one, in a mount namespace of its own: its build tree
starts as a copy of the unpatched kernel's, and only what the patches touch is built.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from . import source
from .errors import LabError
from .paths import FIXTURES, cache_folder
from .progress import doing
from .run import BUILD_TOOLS, need, run
from .store import fresh_folder, text_hash, tree_hash


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


def make_command(tree: Path, over: Path | None) -> list[str]:
    """How to call make on a source; `over` is a patched one to be mounted over it."""
    command = ["make", "-C", str(tree), "ARCH=x86_64"]
    if over is None:
        return command
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    script = 'mount --bind "$0" "$1" && shift && exec "$@"'
    mount = ["unshare", "--mount", *root, "sh", "-c", script, str(over), str(tree)]
    return [*mount, *command]


def module_command(name: str, series: str, patched: bool) -> list[str]:
    """How to call make for an out-of-tree module of a kernel built here."""
    tree = cache_folder("src") / f"linux-source-{series}"
    command = make_command(tree, source.patched_folder(name) if patched else None)
    return [*command, f"O={cache_folder('build') / name}"]


def configure(make: list[str], output: Path, text: str, *, optional: frozenset[str]) -> None:
    """Write .config from the fragment, when the fragment is another than last time."""
    output.mkdir(parents=True, exist_ok=True)
    written = output / ".lab-fragment"
    if written.exists() and written.read_text() == text and (output / ".config").exists():
        return
    given = output / ".lab-fragment.new"
    given.write_text(text)
    target = [f"O={output}", f"KCONFIG_ALLCONFIG={given}", "allnoconfig"]
    run([*make, *target], what="configuring the kernel")
    missed = check_config(text, (output / ".config").read_text(), optional)
    if missed:
        raise LabError("the kernel's configuration refused: " + ", ".join(missed))
    given.rename(written)


def compile_kernel(make: list[str], output: Path, name: str) -> None:
    """Build vmlinux, bzImage and modules, going on from what is built already."""
    log = cache_folder("logs") / f"build-{name}.log"
    jobs = max(2, len(os.sched_getaffinity(0)) + 1)
    targets = [f"O={output}", f"-j{jobs}", "vmlinux", "bzImage", "modules"]
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


def build(
    name: str,
    series: str,
    folder: Path,
    *,
    fragments: tuple[str, ...],
    localversion: str,
    optional: frozenset[str],
    patches: list[Path],
    base: str | None,
    refresh: bool,
) -> dict[str, Any]:
    """Fill `folder` with a kernel built here; returns what it was built from.

    The build tree stays in the cache, so the next build only makes what changed.
    With patches, the source is a patched copy, and the build tree starts as a
    copy of `base`'s.
    """
    need(*BUILD_TOOLS)
    tree, version = source.source(series, refresh=refresh)
    text = fragment_text(fragments, localversion)
    output = cache_folder("build") / name
    over = None
    if patches:
        # without the source it was built from, a build tree cannot be trusted
        if base and not (output.exists() and source.patched_folder(name).exists()):
            _copy_build(cache_folder("build") / base, output)
        over = source.patched(name, tree, version, patches)
    make = make_command(tree, over)
    configure(make, output, text, optional=optional)
    compile_kernel(make, output, name)
    release = collect(output, folder)
    return {
        "release": release,
        "packages": {f"linux-source-{series}": version},
        "inputs": inputs(version, text, patches),
    }


def _copy_build(base: Path, output: Path) -> None:
    with fresh_folder(output) as made:
        copy = ["cp", "-a", "--reflink=auto", f"{base}/.", made]
        run(copy, what=f"copying the build of {base.name}")
