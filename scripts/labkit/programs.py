# SPDX-License-Identifier: LGPL-2.1-or-later
"""Compile the C programs that run in the guest, and keep them in the cache."""

from pathlib import Path

from . import foreign
from .arch import Arch
from .errors import LabError
from .paths import FIXTURES, cache_folder
from .run import find, need, run
from .store import fresh_folder, locked, read_stamp, text_hash, tree_hash, write_stamp

WORKLOADS = FIXTURES / "workloads"
#: Those that provoke bugs that were put back into a kernel.
MUSEUM = FIXTURES / "museum"
GUEST = FIXTURES / "guest"
# Workloads that never become idle.
ENDLESS = frozenset(
    {
        "churn",
        "highforks",
        "hugepages",
        "mapchurn",
        "mlocking",
        "moving",
        "rmdirs",
        "sockdiag",
        "states",
        "testrun",
        "thpsplit",
        "traffic",
        "zswapout",
    }
)
_FLAGS = ["-static", "-O2", "-g0", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread"]


def compiled(arch: Arch, source: Path, *with_files: Path) -> bytes:
    """Return a static program made of `source` and the other C files."""
    need(arch.compiler, arch.headers)
    hashes = [tree_hash(path) for path in (source, *with_files)]
    key = text_hash([arch.name, _FLAGS, hashes])[:16]
    folder = cache_folder("programs") / f"{source.stem}-{key}"
    with locked(f"program-{folder.name}"):
        if read_stamp(folder) is None:
            units = [source, *(path for path in with_files if path.suffix == ".c")]
            with fresh_folder(folder) as made:
                headers = [f"-I{path.parent}" for path in with_files if path.suffix == ".h"]
                command = [arch.compiler, *_FLAGS, *headers, "-o", made / "program", *units]
                run(command, what=f"compile {source.name}")
                write_stamp(made, {"source": source.name})
    return (folder / "program").read_bytes()


def busybox(arch: Arch) -> bytes:
    """Return busybox, that of this machine if it is of this architecture, or Debian's."""
    if not arch.cross:
        need("busybox")
        own = find("busybox")
        assert own is not None
        return Path(own).read_bytes()
    return foreign.file_of(arch, "busybox-static", "busybox")


def source(part: str) -> Path:
    """Return the source of a program of a workload. It need not be there."""
    own = WORKLOADS / f"{part}.c"
    return own if own.exists() else MUSEUM / f"{part}.c"


def workload_names() -> list[str]:
    """Return the names of all workloads, without those of the museum."""
    names = {path.stem for path in WORKLOADS.glob("*.c")} - {"common"}
    return sorted(names | {path.stem for path in WORKLOADS.glob("*.list")})


def workload_parts(name: str) -> list[str]:
    """Return the programs of a workload; a `.list` file names several."""
    together = WORKLOADS / f"{name}.list"
    if together.exists():
        lines = together.read_text().splitlines()
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if name == "common" or not source(name).exists():
        raise LabError(f"no workload {name!r}; there are: {', '.join(workload_names())}")
    return [name]


def workload_programs(name: str, arch: Arch) -> dict[str, bytes]:
    """Return the compiled programs of a workload, by name."""
    common = (WORKLOADS / "common.c", WORKLOADS / "common.h")
    return {part: compiled(arch, source(part), *common) for part in workload_parts(name)}
