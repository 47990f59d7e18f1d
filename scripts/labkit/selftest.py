# SPDX-License-Identifier: LGPL-2.1-or-later
"""Images of guests in which the module ``pernode_selftest`` made known charges on every node."""

from pathlib import Path

from . import images
from .paths import FIXTURES

MODULE = FIXTURES / "modules" / "pernode_selftest"
FOLDER = "/sys/kernel/debug/pernode_selftest"

#: The slab cache of its objects.
CACHE = "pernode_selftest"
#: The memcg that pays.
MEMCG = "/self/here"

_SETUP = """\
set -e
cd /sys/fs/cgroup
echo +memory +cpuset >cgroup.subtree_control
mkdir self self/here
echo +memory >self/cgroup.subtree_control
MAKE={folder}/do
"""
_ALL = "(echo 0 >self/here/cgroup.procs; echo all >$MAKE{more})\n"

#: By stage, what the guest does before the image is taken. "cpuless" needs a node 5.
STAGES = {
    "before": "",
    "all": _ALL.format(more=""),
    "half": _ALL.format(more="; echo free odd >$MAKE"),
    # New percpu chunks, made by a task that may use only a node without CPUs.
    "cpuless": (
        "echo +cpuset >self/cgroup.subtree_control\necho 5 >self/here/cpuset.mems\n"
        "(echo 0 >self/here/cgroup.procs; echo percpu 32768 100 >$MAKE)\n"
    ),
    "gone": _ALL.format(more="; echo free odd >$MAKE") + "echo free all >$MAKE\nsleep 3\n",
    "removed": _ALL.format(more="; echo free odd >$MAKE")
    + "rmdir self/here\necho free all >$MAKE\nsleep 3\n",
}


def script(folder: Path, stage: str) -> Path:
    """Write the script of a stage, which runs in the guest, and return its path."""
    path = folder / stage
    path.write_text(_SETUP.format(folder=FOLDER) + STAGES[stage])
    return path


def selftest(tmp_path: Path, kernel: str, stage: str) -> Path:
    """Return an image of a guest with eight nodes, taken at a stage."""
    run = str(script(tmp_path, stage))
    return images.image(
        kernel, "2cpu+6mem", modules=((str(MODULE), ""),), run=run, append="nokaslr"
    )


def held(image: Path) -> list[tuple[str, int, dict[int, int]]]:
    """Read what the module says it holds: kind, size or order, and bytes by node."""
    folder = image.with_name(image.name + ".guest") / "2"
    lines = (folder / FOLDER.lstrip("/") / "held").read_text().splitlines()
    found = []
    for _, kind, size, _, _, *cells in map(str.split, lines):
        nodes = {int(n): int(b) for n, b in (cell.split(":") for cell in cells)}
        found.append((kind, int(size), nodes))
    return found
