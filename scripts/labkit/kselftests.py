# SPDX-License-Identifier: LGPL-2.1-or-later
"""The kernel's own tests of cgroups and of percpu operations, in a guest."""

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from . import kernels, kmodules, source
from .arch import arch
from .errors import LabError
from .machine import Options, booted
from .paths import cache_folder
from .run import need, run
from .store import fresh_folder, locked, read_stamp, text_hash, tree_hash, write_stamp

#: The kernels that are compared.
KERNELS = ("7.3-lab", "7.3-pernode")
#: Programs of tools/testing/selftests/cgroup.
PROGRAMS = ("test_kmem", "test_memcontrol", "test_zswap")
#: A test that is a module. It is never loaded: its last line returns -EAGAIN.
_MODULE = "percpu_test"
#: What it prints. Each operation that is wrong warns in between.
_WHOLE = re.compile(r"percpu test start\n(.*)percpu test done\n", re.DOTALL)
#: How each line of a test begins.
_LINE = re.compile(r"^(ok|not ok) \d+ (# SKIP )?(\w+)", re.MULTILINE)
_FLAGS = ["-static", "-O2", "-g0", "-pthread", "-D_GNU_SOURCE"]
_MOST = 600.0
#: The tests of page cache need files on a disk, and those of swap a device.
_DISK_SIZE = 1 << 30
_PREPARE = (
    "mkswap /dev/vda && swapon /dev/vda && mkdir -p /mnt && mount -t ext4 /dev/vdb /mnt"
    " && echo 1 >/sys/module/zswap/parameters/enabled"
)

#: "pass", "fail" or "skip", by the name of a test.
Results = Mapping[str, str]


def programs(series: str) -> dict[str, bytes]:
    """Compile the tests of a kernel's source; return them by name."""
    tree, version = source.source(series)
    place = tree / "tools" / "testing" / "selftests"
    folder = place / "cgroup"
    machine = arch("amd64")
    need(machine.compiler, machine.headers)
    made = (
        cache_folder("programs")
        / f"kselftests-{text_hash([version, _FLAGS, tree_hash(folder)])[:16]}"
    )
    with locked(f"program-{made.name}"):
        if read_stamp(made) is None:
            with fresh_folder(made) as new:
                for name in PROGRAMS:
                    _compile(machine.compiler, folder, place, name, new / name)
                write_stamp(new, {"source": version})
    return {name: (made / name).read_bytes() for name in PROGRAMS}


def percpu_test(kernel: str) -> bytes:
    """Return the module ``lib/percpu_test.c`` of a kernel's source."""
    tree, _ = source.source("7.3")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / _MODULE
        folder.mkdir()
        shutil.copy(tree / "lib" / f"{_MODULE}.c", folder)
        (folder / "Kbuild").write_text(f"obj-m := {_MODULE}.o\n")
        return kmodules.build_module(kernels.kernel(kernel), folder).read_bytes()


def _compile(compiler: str, folder: Path, place: Path, name: str, out: Path) -> None:
    headers = [f"-I{place}", f"-I{folder / 'lib' / 'include'}"]
    units = [folder / f"{name}.c", *sorted((folder / "lib").glob("*.c"))]
    run([compiler, *_FLAGS, *headers, "-o", out, *units], what=f"compile {name}", cwd=folder)


def parse(text: str) -> Results:
    """Return the results that a program printed."""
    words = {"ok": "pass", "not ok": "fail"}
    return {name: "skip" if skipped else words[word] for word, skipped, name in _LINE.findall(text)}


def parse_log(text: str) -> str:
    """Return the result of the test that is a module, from the kernel's log."""
    whole = _WHOLE.search(text)
    return "pass" if whole and "WARNING:" not in whole[1] else "fail"


def _in_words(outcomes: list[str]) -> str:
    """Return the outcomes of a test in several runs: one, or how many passed."""
    if len(set(outcomes)) == 1:
        return outcomes[0]
    return f"{outcomes.count('pass')} of {len(outcomes)} pass"


def table(found: Mapping[str, list[Results]]) -> str:
    """Return a table of all tests, by kernel."""
    lines = [f"{'test':55}" + "".join(f"{kernel:>14}" for kernel in found)]
    for name in next(iter(found.values()))[0]:
        cells = (_in_words([one.get(name, "-") for one in runs]) for runs in found.values())
        lines.append(f"{name:55}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)


def results(kernel: str, runs: int = 1) -> list[Results]:
    """
    Boot a guest and run the tests.

    :param runs: how often, in the same guest
    :return: for each run, the results of all programs, by ``PROGRAM.TEST``
    :raises LabError: if a program did not print anything
    """
    module = f"lab/tests/{_MODULE}.ko"
    options = Options(kernel, "2", cpus=4, memory="2G")
    extra = {f"lab/tests/{name}": data for name, data in programs("7.3").items()}
    extra[module] = percpu_test(kernel)
    found: list[Results] = []
    with (
        _disk() as disk,
        booted(options, extra_files=extra, extra_args=("-drive", disk)) as running,
    ):
        running.guest.must(_PREPARE, what="preparing", timeout=60)
        for _ in range(runs):
            one: dict[str, str] = {}
            for name in PROGRAMS:
                # Its exit status says no more than its lines.
                script = f"cd /mnt && timeout {_MOST:.0f} /lab/tests/{name}; true"
                said = running.guest.must(script, what=name, timeout=_MOST + 60)
                told = parse(said.decode(errors="replace"))
                if not told:
                    raise LabError(f"{name} printed no result: {said[-500:]!r}")
                one |= {f"{name}.{test}": result for test, result in told.items()}
            said = running.guest.must(
                f"dmesg -C; insmod /{module}; dmesg", what=_MODULE, timeout=60
            )
            one[_MODULE] = parse_log(said.decode(errors="replace"))
            found.append(one)
    return found


@contextmanager
def _disk() -> Iterator[str]:
    """Make a disk with a file system; yield QEMU's words for it."""
    need("mkfs.ext4")
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(_DISK_SIZE)
        run(["mkfs.ext4", "-q", "-F", file.name], what="make a file system")
        yield f"file={file.name},if=virtio,format=raw"
