# SPDX-License-Identifier: LGPL-2.1-or-later
"""Build kernels from Debian's linux-source and the project's config fragments.

A patched kernel starts from a copy of the build tree of the kernel without the patches, so that
only what the patches touch is built. Kbuild compares commands (.*.cmd), which contain the
absolute paths of source and build tree. The copies are therefore mounted over the originals, in
a mount namespace of their own.
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
from .arch import arch
from .errors import LabError
from .paths import FIXTURES, cache_folder
from .progress import doing
from .run import BUILD_TOOLS, need, run
from .store import fresh_folder, locked, text_hash, tree_hash


@dataclass(frozen=True)
class Target:
    """An architecture that kernels are built for here, as Kbuild names it."""

    name: str
    # the kernel to boot: what to make, and where it is in the build tree
    image: str
    path: str


#: By Debian's names of architectures.
TARGETS = {
    "amd64": Target("x86_64", "bzImage", "arch/x86/boot/bzImage"),
    "arm64": Target("arm64", "Image", "arch/arm64/boot/Image"),
}


def fragment_text(fragments: tuple[str, ...], localversion: str) -> str:
    """Return the config fragments of a kernel, with CONFIG_LOCALVERSION at the end."""
    paths = [FIXTURES / "kernels" / f"{name}.config" for name in fragments]
    text = "".join(path.read_text() for path in paths)
    return text + f'CONFIG_LOCALVERSION="-{localversion}"\n'


def check_config(fragment: str, config: str, allowed: frozenset[str] = frozenset()) -> list[str]:
    """Return the lines of a fragment that did not take effect in the finished config.

    Of several lines with one option, the last one counts.
    """
    have = set(config.splitlines())
    given = [line for line in fragment.splitlines() if line.startswith("CONFIG_")]
    missed = []
    for name, value in dict(line.split("=", 1) for line in given).items():
        line = f"{name}={value}"
        wanted = f"# {name} is not set" if value == "n" else line
        absent = value == "n" and not re.search(rf"(?m)^{name}=", config)
        if wanted not in have and not absent and name not in allowed:
            missed.append(line)
    return missed


def make_command(
    tree: Path,
    output: Path,
    over: Sequence[tuple[Path, Path]] = (),
    *,
    target: str = "amd64",
) -> list[str]:
    """Return the make command for a source.

    :param over: (folder, where to mount it)
    :param target: architecture, by Debian's name
    """
    cross = arch(target).cross
    command = ["make", "-C", str(tree), f"O={output}", f"ARCH={TARGETS[target].name}"]
    command += [f"CROSS_COMPILE={cross}"] if cross else []
    if not over:
        return command
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    mounts = [f"mount --bind {shlex.quote(str(a))} {shlex.quote(str(b))}" for a, b in over]
    script = " && ".join([*mounts, 'exec "$@"'])
    return ["unshare", "--mount", *root, "sh", "-c", script, "sh", *command]


def kernel_command(place: str, series: str, root: str | None, target: str = "amd64") -> list[str]:
    """Return the make command for a kernel that is built here, and for modules of it.

    :param place: name of its build tree, and of its source if that is patched
    :param root: of a patched kernel, the kernel without patches; source and build tree are
        mounted over the ones of that kernel
    :param target: architecture, by Debian's name
    """
    tree, trees = source.folder(series), cache_folder("build")
    if root is None:
        return make_command(tree, trees / place, target=target)
    over = [(source.patched_folder(place), tree), (trees / place, trees / root)]
    return make_command(tree, trees / root, over, target=target)


def configure(make: list[str], output: Path, text: str, *, optional: frozenset[str]) -> list[str]:
    """Write .config from the fragment, unless it was made from the same fragment.

    :return: the lines of optional options that did not take effect
    """
    output.mkdir(parents=True, exist_ok=True)
    written = output / ".lab-fragment"
    config = output / ".config"
    if written.exists() and written.read_text() == text and config.exists():
        return check_config(text, config.read_text())
    given = output / ".lab-fragment.new"
    given.write_text(text)
    target = [f"KCONFIG_ALLCONFIG={given}", "allnoconfig"]
    run([*make, *target], what="configure the kernel")
    missed = check_config(text, config.read_text(), optional)
    if missed:
        raise LabError("options without effect in the kernel's configuration: " + ", ".join(missed))
    given.rename(written)
    return check_config(text, config.read_text())


def compile_kernel(make: list[str], name: str, place: str, target: Target) -> None:
    """Build vmlinux, the kernel to boot and modules. make skips what is up to date."""
    log = cache_folder("logs") / f"build-{place}.log"
    jobs = max(2, len(os.sched_getaffinity(0)) + 1)
    targets = [f"-j{jobs}", "vmlinux", target.image, "modules"]
    run([*make, *targets], what=f"build kernel {name}", log=log)


def collect(output: Path, folder: Path, target: Target) -> str:
    """Copy what the lab needs of a build into `folder`, and return the release."""
    release = (output / "include" / "config" / "kernel.release").read_text().strip()
    with doing(f"copy kernel {release}"):
        shutil.copy2(output / "vmlinux", folder / "vmlinux")
        shutil.copy2(output / target.path, folder / "bzImage")
        shutil.copy2(output / ".config", folder / "config")
        modules = folder / "modules"
        modules.mkdir()
        # A kernel without loadable modules has neither file.
        order, builtin = output / "modules.order", output / "modules.builtin"
        if builtin.exists():
            shutil.copy2(builtin, modules / "modules.builtin")
        for line in order.read_text().split() if order.exists() else ():
            built = output / line.replace(".o", ".ko")
            if built.exists():
                shutil.copy2(built, modules / built.name)
    (folder / "release").write_text(release + "\n")
    return release


def inputs(series_version: str, text: str, patches: list[Path]) -> str:
    """Return a hash of everything that a kernel is built from."""
    return text_hash([series_version, text, [tree_hash(patch) for patch in patches]])


@dataclass(frozen=True)
class Base:
    """The kernel from whose build tree a patched kernel starts."""

    # the name of its build tree, and of its source if that is patched
    place: str
    # the kernel without patches that it is based on, perhaps itself
    root: str
    # the hash of what it was built from
    inputs: str


def build(
    name: str,
    series: str,
    folder: Path,
    *,
    target: str,
    fragments: tuple[str, ...],
    localversion: str,
    optional: frozenset[str],
    refresh: bool,
    place: str,
    patches: list[Path],
    all_patches: list[Path],
    base: Base | None,
) -> dict[str, Any]:
    """Build a kernel into `folder`, and return what it was built from.

    The build tree stays in the cache, so the next build only makes what changed.

    :param target: architecture, by Debian's name
    :param patches: to apply to the source of `base`
    :param all_patches: `patches` and those of the base
    """
    need(*BUILD_TOOLS, arch(target).compiler)
    tree, version = source.source(series, refresh=refresh)
    text = fragment_text(fragments, localversion)
    output = cache_folder("build") / place
    with locked(f"build-{place}"):
        if base is not None:
            _start_from(base, output, place)
            below = tree if base.place == base.root else source.patched_folder(base.place)
            source.patched(place, below, f"{version} {base.inputs}", patches)
        make = kernel_command(place, series, base.root if base else None, target)
        configure(make, output, text, optional=optional)
        compile_kernel(make, name, place, TARGETS[target])
        release = collect(output, folder, TARGETS[target])
    return {
        "release": release,
        "packages": {f"linux-source-{series}": version},
        "inputs": inputs(version, text, all_patches),
    }


def _start_from(base: Base, output: Path, place: str) -> None:
    # Keep a build tree only if both its base and its patched source are the same as before.
    mark, patched = output / ".lab-base", source.patched_folder(place)
    if mark.exists() and mark.read_text() == base.inputs and patched.exists():
        return
    # Patched files must be newer than the copied build tree.
    if patched.exists():
        shutil.rmtree(patched)
    with fresh_folder(output) as made:
        copy = ["cp", "-a", "--reflink=auto", f"{cache_folder('build') / base.place}/.", made]
        run(copy, what=f"copy the build of {base.place}")
        (made / ".lab-base").write_text(base.inputs)
