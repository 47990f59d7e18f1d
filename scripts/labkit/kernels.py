# SPDX-License-Identifier: LGPL-2.1-or-later
"""The kernels that the lab can boot, and how to make each one ready."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import build, debian
from .arch import Arch, arch
from .errors import LabError
from .paths import FIXTURES, cache_folder
from .run import BUILD_TOOLS, FETCH_TOOLS, need
from .store import STAMP, fresh_folder, locked, read_stamp, write_stamp


@dataclass(frozen=True)
class Recipe:
    """How to get a kernel: fetch it from Debian, or build it."""

    series: str
    # of Debian's kernels: configuration and architecture
    flavour: str = "cloud-amd64"
    arch: str = "amd64"
    # the part of the tests that alone boots it: "arches", "breadth", "museum", "seeds", "tags"; and
    # "refused" if drgn cannot read its images, "untested" if the mirrors had none. Empty if all may
    part: str = ""
    # config fragments in fixtures/kernels/; a later one overrides an earlier one
    fragments: tuple[str, ...] = ()
    localversion: str = ""
    # options of the fragments that this series does not have
    optional: frozenset[str] = frozenset()
    # patches, or folders of patches, in fixtures/, in the order to apply them
    patches: tuple[str, ...] = ()
    # of a patched kernel: the kernel without the patches, from whose build tree it starts
    base: str | None = None
    # name of a build tree that several kernels share; only one is built at a time
    place: str | None = None


# Options that were added or removed between 6.12 and 7.3, and between 6.1 and 6.12.
_NOT_IN_6_12 = frozenset({"CONFIG_SYSCTL"})
_NOT_IN_6_1 = _NOT_IN_6_12 | {
    "CONFIG_MEMCG_V1",
    "CONFIG_MEM_ALLOC_PROFILING",
    "CONFIG_MEM_ALLOC_PROFILING_ENABLED_BY_DEFAULT",
}

# Options of x86, and of what has it.
_NOT_ON_ARM64 = frozenset(
    f"CONFIG_{option}"
    for option in (
        *("HYPERVISOR_GUEST", "KVM_GUEST", "PVH", "X86_X2APIC", "X86_64_ACPI_NUMA"),
        *("X86_MSR", "X86_CPUID", "KERNEL_LZ4", "UNWINDER_ORC"),
    )
)

RECIPES: dict[str, Recipe] = {
    "6.1": Recipe("6.1"),
    "6.12": Recipe("6.12"),
    "7.2": Recipe("7.2"),
    "7.3": Recipe("7.3"),
    **{
        series: Recipe(series, part="breadth")
        for series in ("6.16", "6.17", "6.18", "6.19", "7.0", "7.1")
    },
    **{
        f"{series}-rt": Recipe(series, flavour="rt-amd64", part="breadth")
        for series in ("6.1", "6.12", "7.3")
    },
    **{
        f"{series}/s390x": Recipe(series, flavour="s390x", arch="s390x", part="arches")
        for series in ("6.1", "6.12")
    },
    "6.1/ppc64el": Recipe("6.1", flavour="powerpc64le", arch="ppc64el", part="refused"),
    "6.12/ppc64el": Recipe("6.12", flavour="powerpc64le", arch="ppc64el", part="arches"),
    **{
        f"{series}/{arch}": Recipe(series, flavour=flavour, arch=arch, part="untested")
        for series in ("7.2", "7.3")
        for arch, flavour in (("s390x", "s390x"), ("ppc64el", "powerpc64le"))
    },
    "6.12/ppc64el-64k": Recipe("6.12", flavour="powerpc64le-64k", arch="ppc64el", part="arches"),
    "7.3/arm64-16k": Recipe("7.3", flavour="arm64-16k", arch="arm64", part="arches"),
    **{
        f"{series}/arm64": Recipe(series, flavour="cloud-arm64", arch="arm64", part="arches")
        for series in ("6.1", "6.12", "7.2", "7.3")
    },
    **{
        f"7.3/arm64-{what}": Recipe(
            "7.3",
            arch="arm64",
            part=part,
            fragments=("lab", "lab-arm64", f"lab-{what}"),
            localversion="lab",
            optional=_NOT_ON_ARM64,
        )
        for what, part in (("64k", "arches"), ("tags", "tags"))
    },
    **{
        f"7.3-{what}": Recipe(
            "7.3", part="breadth", fragments=("lab", f"lab-{what}"), localversion="lab"
        )
        for what in ("kasan", "tiny")
    },
    "6.12-lab": Recipe(
        "6.12", fragments=("lab", "lab-6.12"), localversion="lab", optional=_NOT_IN_6_12
    ),
    "6.1-lab": Recipe(
        "6.1",
        part="seeds",
        fragments=("lab", "lab-6.12", "lab-6.1"),
        localversion="lab",
        optional=_NOT_IN_6_1,
    ),
    "7.3-lab": Recipe("7.3", fragments=("lab",), localversion="lab"),
    "7.3-lab-moving": Recipe(
        "7.3", part="museum", fragments=("lab", "lab-moving"), localversion="lab", base="7.3-lab"
    ),
    "7.3-pernode": Recipe(
        "7.3",
        fragments=("lab",),
        localversion="lab",
        patches=("patches/7.3-pernode",),
        base="7.3-lab",
    ),
    "7.3-pernode-debug": Recipe(
        "7.3",
        fragments=("lab", "lab-debug"),
        localversion="lab",
        patches=("patches/7.3-pernode",),
        base="7.3-lab",
    ),
}

# Kernels whose cost is measured: with more CPUs, and with counters of mapped pages by node.
RECIPES |= {
    "7.3-lab-256": replace(
        RECIPES["7.3-lab"], part="seeds", fragments=("lab", "lab-256"), base="7.3-lab"
    ),
    "7.3-pernode-256": replace(
        RECIPES["7.3-pernode"], part="seeds", fragments=("lab", "lab-256"), base="7.3-lab-256"
    ),
    "7.3-nodecounter": replace(
        RECIPES["7.3-pernode"], part="seeds", patches=("patches/7.3-nodecounter",)
    ),
}

# 7.3-pernode with one mistake each, named after the patch that makes the mistake.
BROKEN = tuple(
    sorted(path.stem for path in (FIXTURES / "patches" / "7.3-pernode-broken").glob("*.patch"))
)
RECIPES |= {
    f"7.3-pernode-broken-{mistake}": Recipe(
        "7.3",
        fragments=("lab",),
        localversion="lab",
        patches=(f"patches/7.3-pernode-broken/{mistake}.patch",),
        base="7.3-pernode",
        place="7.3-pernode-broken",
    )
    for mistake in BROKEN
}


# Bugs of migration.
_MOVING = frozenset({"codetag-migrate", "shmem-thp-migrate"})


def _museum(series: str, folder: str) -> dict[str, Recipe]:
    """Return the kernels that have a real bug of Linux put back, named after the patch."""
    made = {}
    for path in sorted((FIXTURES / folder).glob("*.patch")):
        kind = "-moving" if path.stem in _MOVING else ""
        made[f"{series}-museum-{path.stem}"] = replace(
            RECIPES[f"{series}-lab{kind}"],
            part="museum",
            patches=(f"{folder}/{path.name}",),
            base=f"{series}-lab{kind}",
            place=f"{series}-museum{kind}",
        )
    return made


RECIPES |= _museum("7.3", "museum") | _museum("6.12", "museum/6.12")


#: Kernels of other architectures that are tested with those of this one.
OF_OTHERS = ("7.3/arm64",)


@dataclass(frozen=True)
class Kernel:
    """A kernel that is ready to boot.

    `facts` is what it was made from: release, packages, and a hash of the inputs of a build.
    `tree` is the build tree of a kernel that somebody else built, if there is one.
    """

    name: str
    folder: Path
    facts: dict[str, Any] = field(repr=False)
    tree: Path | None = None

    @property
    def release(self) -> str:
        """The release, as `uname -r` prints it in the guest."""
        return str(self.facts["release"])

    @property
    def vmlinux(self) -> Path:
        """The path of vmlinux with debug info. debug_info() fetches Debian's."""
        return self.folder / "vmlinux"

    @property
    def bzimage(self) -> Path:
        """The path of the kernel to boot: a bzImage, or what the architecture has instead."""
        return self.folder / "bzImage"

    @property
    def has_btf(self) -> bool:
        """Whether an image is enough to find its types: symbols of variables lead to BTF."""
        wanted = ("CONFIG_DEBUG_INFO_BTF", "CONFIG_KALLSYMS_ALL")
        return not self.config or all(self.config.get(option) == "y" for option in wanted)

    @property
    def arch(self) -> Arch:
        """The architecture."""
        return kernel_arch(self.name)

    @property
    def file_name(self) -> str:
        """The name of the kernel, as a part of names of files."""
        return _file_name(self.name)

    @property
    def module_command(self) -> list[str] | None:
        """The make command for modules of this kernel; None without a build tree."""
        if self.name in _given:
            clang = ["LLVM=1"] if self.config.get("CONFIG_CC_IS_CLANG") == "y" else []
            return None if self.tree is None else ["make", "-C", str(self.tree), *clang]
        how = RECIPES[self.name]
        if not how.fragments:
            return None
        # A shared build tree may hold another kernel. Modules of the base fit this one as well.
        name = how.base if how.place and how.base else self.name
        root = None if _root(name) == name else _file_name(_root(name))
        return build.kernel_command(_file_name(name), how.series, root, how.arch)

    @functools.cached_property
    def config(self) -> dict[str, str]:
        """The configuration, CONFIG_X -> value, without options that are not set."""
        lines = (self.folder / "config").read_text(errors="replace").splitlines()
        return dict(x.split("=", 1) for x in lines if x.startswith("CONFIG_") and "=" in x)


def kernel_arch(name: str) -> Arch:
    """Return the architecture of a kernel, without making it ready."""
    return arch("amd64" if name in _given else recipe(name).arch)


def _file_name(name: str) -> str:
    return name.replace("/", "-")


# By name, the kernels that somebody else built.
_given: dict[str, Kernel] = {}


def give(kernel: Kernel) -> None:
    """Let a kernel that somebody else built be booted by its name, in this process."""
    _given[kernel.name] = kernel


def _patch_files(recipe: Recipe) -> list[Path]:
    found: list[Path] = []
    for name in recipe.patches:
        place = FIXTURES / name
        files = [place] if place.is_file() else sorted(place.glob("*.patch"))
        if not files:
            raise LabError(f"no patches in {place}")
        found += files
    return found


def _root(name: str) -> str:
    """Return the name of the kernel without patches that a kernel is based on."""
    base = recipe(name).base
    return name if base is None else _root(base)


def _all_patches(recipe: Recipe) -> list[Path]:
    below = _all_patches(RECIPES[recipe.base]) if recipe.base else []
    return below + _patch_files(recipe)


def _current(recipe: Recipe, facts: dict[str, Any] | None) -> bool:
    """Return whether a kernel in the cache is what its recipe would make now."""
    if facts is None:
        return False
    if not recipe.fragments:
        return True
    version = facts["packages"][f"linux-source-{recipe.series}"]
    text = build.fragment_text(recipe.fragments, recipe.localversion)
    return bool(facts["inputs"] == build.inputs(version, text, _all_patches(recipe)))


def tools(name: str) -> tuple[str, ...]:
    """Return the programs needed to make a kernel ready; none if it is in the cache."""
    if name in _given:
        return ()
    how = recipe(name)
    if (_folder(name) / STAMP).exists():
        return ()
    return FETCH_TOOLS + ((*BUILD_TOOLS, arch(how.arch).compiler) if how.fragments else ())


def _make(name: str, recipe: Recipe, folder: Path, refresh: bool) -> dict[str, Any]:
    if not recipe.fragments:
        return debian.fetch(recipe.series, recipe.flavour, recipe.arch, folder)
    base = None
    if recipe.base:
        below = kernel(recipe.base)
        base = build.Base(recipe.base, _root(recipe.base), below.facts["inputs"])
    return build.build(
        name,
        recipe.series,
        folder,
        target=recipe.arch,
        fragments=recipe.fragments,
        localversion=recipe.localversion,
        optional=recipe.optional,
        refresh=refresh,
        place=recipe.place or _file_name(name),
        patches=_patch_files(recipe),
        all_patches=_all_patches(recipe),
        base=base,
    )


def recipe(name: str) -> Recipe:
    """Return the recipe of a kernel."""
    if name not in RECIPES:
        raise LabError(f"no kernel {name!r}; there are: {', '.join(RECIPES)}")
    return RECIPES[name]


def _folder(name: str) -> Path:
    return cache_folder("kernels") / _file_name(name)


def cached(name: str) -> Kernel | None:
    """Return a kernel if it is in the cache, complete and up to date."""
    folder = _folder(name)
    facts = read_stamp(folder)
    return Kernel(name, folder, facts) if facts and _current(recipe(name), facts) else None


@functools.cache
def _ready(name: str) -> Kernel:
    return cached(name) or _renew(name, refresh=False)


def _renew(name: str, *, refresh: bool) -> Kernel:
    target = _folder(name)
    with locked(f"kernel-{name}"):
        # Another process may have made it while this one waited for the lock.
        if not refresh and (found := cached(name)):
            return found
        with fresh_folder(target) as made:
            facts = _make(name, recipe(name), made, refresh)
            write_stamp(made, facts)
    return Kernel(name, target, facts)


def kernel(name: str, *, refresh: bool = False) -> Kernel:
    """Return a kernel; make it ready if it is missing, out of date, or if `refresh` is set."""
    if name in _given:
        return _given[name]
    need(*(FETCH_TOOLS if refresh else ()), *tools(name))
    if refresh:
        _ready.cache_clear()
        return _renew(name, refresh=True)
    return _ready(name)


def debug_info(name: str) -> Path:
    """Return the path of a kernel's vmlinux with debug info; fetch Debian's if it is missing.

    It has hundreds of megabytes. A guest boots without it, and BTF is enough to read an image.
    """
    ready = kernel(name)
    if not ready.vmlinux.exists():
        need(*FETCH_TOOLS)
        with locked(f"kernel-{name}"):
            # Another process may have fetched it while this one waited for the lock.
            if not ready.vmlinux.exists():
                debian.fetch_vmlinux(ready.facts, ready.arch.name, ready.vmlinux)
    return ready.vmlinux


def names(built_here: bool | None = None, arch: str = "amd64") -> Sequence[str]:
    """Return the names of the kernels that tests boot: all, or those (not) built here."""
    part = "" if arch == "amd64" else "arches"
    return [
        name
        for name, how in RECIPES.items()
        if (how.part, how.arch) == (part, arch)
        and (built_here is None or built_here == bool(how.fragments))
    ]


def names_of_part(part: str) -> Sequence[str]:
    """Return the names of the kernels that only one part of the tests boots."""
    return [name for name, how in RECIPES.items() if how.part == part]
