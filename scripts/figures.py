# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Figures of speed and memory that can be compared between machines: `scripts/bench --figures`, and
`scripts/bench --check`, which compares them with those of a baseline that is checked in.

All but the memory are ratios of times that were measured in turn, in one run on one image.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import scaling
from labkit import images
from labkit.errors import LabError
from support.formats import Formats
from support.live_guest import kept
from support.reference import charged_slab_objects

from memcg_inspect.btf.source import from_image
from memcg_inspect.btf.symbols import load_symbols
from memcg_inspect.collect import audit
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.image.memory import PIECE
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.linux.mm.mmzone import mem_map, page_ranges

BASELINE = Path(__file__).with_name("figures.json")
#: A figure may be worse than that of the baseline by this factor: other work on the machine, and
#: other processors, change the ratio of reads to computation.
TOLERANCE = 1.5
#: Measurements of each figure.
TIMES = 5
#: Machines whose images are read: of 8 and of 16 GiB.
SIZES = (scaling.BASE, replace(scaling.BASE, memory=16))
#: Commands whose memory is measured.
COMMANDS = ("audit", "pages", "slabinfo", "overview", "percpu", "dying", "tasks", "stock")

#: Nodes and workload of a guest that is audited live, and of a dump in several formats.
_SMALL = ("4", "files")
#: Formats of dumps.
_FORMATS = ("zlib", "lzo", "snappy", "zstd", "flattened")

#: Opens an image, or runs a command. What getrusage() says includes the memory of the process that
#: forked this one.
_PROGRAM = """\
import re, sys
from memcg_inspect.cli import main
from memcg_inspect.image.image import image_of
from memcg_inspect.image.program import ImageSource, open_program
core, *command = sys.argv[1:]
if command:
    status = main([*command, "-c", core, "--debuginfo", "btf"])
else:
    image_of(open_program(ImageSource(core=core, debuginfo="btf")))
    status = 0
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())
print(peak[1], file=sys.stderr)
sys.exit(status)
"""


class Figure(NamedTuple):
    """
    One figure.

    :ivar name: what was measured
    :ivar values: all measurements
    :ivar unit: e.g. ``x raw read``
    :ivar better: which values are better
    """

    name: str
    values: Sequence[float]
    unit: str
    better: Literal["less", "more"] = "less"

    @property
    def median(self) -> float:
        """The median of the measurements."""
        return statistics.median(self.values)

    @property
    def key(self) -> str:
        """The name of the figure in the baseline."""
        return f"{self.name}, {self.unit}"

    def is_worse(self, than: float) -> bool:
        """Return whether the figure is worse than that of the baseline, beyond the tolerance."""
        if self.better == "more":
            return self.median * TOLERANCE < than
        return self.median > than * TOLERANCE


def raw_read(image: Image) -> int:
    """Read the whole memory map, and return its size in bytes."""
    memory, frames, size = image.memory, mem_map(image), 0
    for start, end in page_ranges(image):
        length = (end - start) * frames.size
        for offset in range(0, length, PIECE):
            size += len(memory.read(frames.page(start) + offset, min(PIECE, length - offset)))
    return size


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _opened(core: Path) -> Image:
    image = image_of(open_program(ImageSource(core=str(core), debuginfo="btf")))
    image.jobs = 1
    return image


def _of_image(size: scaling.Size) -> Iterator[Figure]:
    core, name = size.image(), f"{size.memory} GiB"
    _seconds(lambda: raw_read(_opened(core)))  # the file is in memory afterwards
    passes, audits, raw_times = [], [], []
    for _ in range(TIMES):
        image = _opened(core)
        raw_times.append(min(_seconds(partial(raw_read, image)) for _ in range(3)))
        report = audit(image)
        if report.verdict != "exact":
            raise LabError(f"{core}: the verdict is {report.verdict}")
        passes.append(report.timings["pages"])
        audits.append(sum(report.timings.values()))
    raw = statistics.median(raw_times)
    plain = _seconds(lambda: charged_slab_objects(_opened(core).prog))
    yield Figure(f"{name}: pass over pages and slabs", [t / raw for t in passes], "x raw read")
    yield Figure(f"{name}: whole audit", [t / raw for t in audits], "x raw read")
    faster = "x faster than plain walker"
    yield Figure(f"{name}: pass over pages and slabs", [plain / t for t in passes], faster, "more")
    yield Figure(f"{name}: whole audit", [plain / t for t in audits], faster, "more")


def _peak(core: Path, *command: str) -> float:
    """
    Return the most memory that a program had resident, in MiB.

    :param command: a command on the image; if not given, it is opened only
    """
    program = [sys.executable, "-c", _PROGRAM, str(core), *command]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: exit status {done.returncode}: {done.stderr}")
    return int(done.stderr.split()[-1]) / 1024


def _memory(size: scaling.Size) -> Iterator[Figure]:
    core = size.image()
    opened = _peak(core)
    for command in COMMANDS:
        more = _peak(core, command) - opened
        yield Figure(f"{size.memory} GiB: memory of {command}", [more], "MiB more than opened")


def _start() -> Figure:
    def run(*arguments: str) -> float:
        command = [sys.executable, *arguments]
        return _seconds(lambda: subprocess.run(command, check=True, capture_output=True))

    values = [run("-m", "memcg_inspect", "--help") / run("-c", "pass") for _ in range(TIMES)]
    return Figure("memcg-inspect --help", values, "x python -c pass")


def _btf_start(size: scaling.Size) -> Figure:
    """Measure the opening of an image with its BTF, as a ratio to a read of the BTF."""
    core = size.image()
    prog = _opened(core).prog
    symbols = load_symbols(prog)
    read = min(_seconds(lambda: from_image(prog, symbols)) for _ in range(TIMES))
    values = [_seconds(lambda: _opened(core)) / read for _ in range(TIMES)]
    return Figure("open an image with BTF", values, "x read of the BTF")


def _audit_of(core: Path, times: int = 3) -> float:
    """Return the shortest time to open and audit a dump, in seconds."""
    return min(_seconds(lambda: audit(_opened(core))) for _ in range(times))


def _formats() -> Iterator[Figure]:
    """Measure audits of dumps in other formats, as ratios to that of the same dump in ELF."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, XDG_CACHE_HOME=folder),  # where copies are kept
    ):
        formats = Formats(images.image(scaling.KERNEL, *_SMALL), Path(folder))
        for name in _FORMATS:
            path = formats.file(name)
            first = _audit_of(path, 1)
            pairs = [(_audit_of(path), _audit_of(formats.elf)) for _ in range(TIMES)]
            elf = statistics.median(of_elf for _, of_elf in pairs)
            if name == "flattened":
                yield Figure("flattened dump, the first time", [first / elf], "x ELF dump")
            values = [seconds / of_elf for seconds, of_elf in pairs]
            yield Figure(f"{name} dump", values, "x ELF dump")


def _audited(*where: str) -> tuple[float, int]:
    """Return the CPU time of an audit in seconds, and the number of its samples."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "memcg_inspect", "audit", "--json", "--jobs", "1", *where]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if not done.stdout:
        raise LabError(f"{' '.join(command)}: exit status {done.returncode}: {done.stderr}")
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return seconds, int(json.loads(done.stdout)["looks"])


def _live() -> Figure:
    """Measure audits of an idle guest, as a ratio to those of an image, for each sample."""
    core = images.image(scaling.KERNEL, *_SMALL)
    values = []
    with tempfile.TemporaryDirectory() as folder:
        words = ("--nodes", _SMALL[0], "--workload", _SMALL[1], "--freeze", "none")
        with kept(Path(folder), scaling.KERNEL, *words) as qmp:
            for _ in range(TIMES):
                frozen, _ = _audited("-c", str(core), "--debuginfo", "btf")
                live, samples = _audited("--qemu", str(qmp))
                values.append(live / frozen / samples)
    return Figure("live audit, for each sample", values, "x audit of an image")


def figures() -> Iterator[Figure]:
    """Measure all figures."""
    for size in SIZES:
        yield from _of_image(size)
    yield from _memory(SIZES[-1])
    yield _start()
    yield _btf_start(SIZES[0])
    yield from _formats()
    yield _live()


def report_lines(is_baseline: bool) -> Iterator[str]:
    """
    Yield the lines of a table of all figures as they are known.

    :param is_baseline: whether to make them the baseline
    """
    yield f"{scaling.KERNEL}, {scaling.NODES} nodes, 1,000 memcgs, one process: medians of {TIMES}"
    yield ""
    yield f"{'':36}{'median':>8}{'least':>8}{'most':>8}"
    found = {}
    for figure in figures():
        found[figure.key] = round(figure.median, 2)
        values = (figure.median, min(figure.values), max(figure.values))
        yield f"{figure.name:36}{''.join(f'{value:8.1f}' for value in values)}  {figure.unit}"
    if is_baseline:
        BASELINE.write_text(json.dumps(found, indent=1) + "\n")


def check() -> Iterator[tuple[str, bool]]:
    """Compare all figures with the baseline; yield a line for each, and whether it is worse."""
    baseline = json.loads(BASELINE.read_text())
    yield f"{'':36}{'now':>8}{'baseline':>10}", False
    for figure in figures():
        than = baseline[figure.key]
        is_worse = figure.is_worse(than)
        line = f"{figure.name:36}{figure.median:8.1f}{than:10.1f}  {figure.unit}"
        yield line + (f": worse by more than {TOLERANCE} x" if is_worse else ""), is_worse
