# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The blocks of the documents that runs write, and how each is made.

A block is of one of three sorts. ``source`` follows from the source alone. ``image`` is output
on an image of the lab: what it says depends on the image only as far as
:func:`docblocks.comparable` leaves out. ``measured`` holds times, or is of a guest that runs.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import docscene
from docblocks import fenced, fields, shortened
from dochelp import DOCUMENT, EXAMPLES, examples_of
from drgn import Object
from labkit import images, kernels, seeds
from labkit.errors import LabError
from labkit.paths import cache_folder
from labkit.poke import poke

import memcg_inspect
from memcg_inspect.collect import collect
from memcg_inspect.image.image import image_of
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.slab import SlabReader
from memcg_inspect.model_pages import KINDS
from memcg_inspect.tables import columns_of
from memcg_inspect.views import tables

ROOT = Path(__file__).resolve().parent.parent

#: The image of scripts/demo.
DEMO = {"kernel": "7.3", "nodes": "4", "workload": "files"}

#: What grows beside its workload.
_LEAK = ROOT / "fixtures/scenes/leak.sh"

#: The tables that docs/output.md shows of it.
_SHOWN = ("identities", "slab", "skew")

#: A guest that profiles allocations.
_PROFILED = {"kernel": "7.3-lab", "append": "sysctl.vm.mem_profiling=1"}

#: A guest in which a module hides memory.
_HIDDEN = {
    "kernel": "7.3-lab",
    "nodes": "2",
    "modules": ((str(ROOT / "fixtures/modules/hider"), ""),),
}


def _run(*command: str | Path, status: int = 0, cwd: str | Path = ROOT) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, stdout=subprocess.PIPE, text=True
    )
    if done.returncode != status:
        raise LabError(f"{' '.join(map(str, command))}: exit status {done.returncode}")
    return done.stdout


def _output(script: str, *words: str) -> Callable[[], str]:
    """Return a function that runs a script of the project and shows what it printed."""
    return lambda: fenced(f"$ {' '.join((script, *words))}\n" + _run(script, *words))


def _audit(core: Path, *words: str, status: int = 0) -> str:
    """Return the text of an audit of an image that the reader calls ``vmcore``."""
    command = ("-m", "memcg_inspect", "audit", *words, "--debuginfo", "btf", "-c", core)
    shown = _run(*command, status=status).replace(f"-c {core} --debuginfo btf", "-c vmcore")
    return f"$ memcg-inspect {shlex.join(['audit', *words])} -c vmcore\n{shown}"


def _demo() -> str:
    return fenced(_audit(images.image(**DEMO)))


def _tables() -> str:
    """Return everything that the audit of the demo's image says, with short tables."""
    shown = shortened(_audit(images.image(**DEMO), "--all"), _SHOWN, whole=("identities",))
    names = re.compile(r"^(Not charged.*?: |  )((?:[^,:]+, ){3})[^:]*?(:.*)?$", re.MULTILINE)
    return fenced(names.sub(r"\1\2...\3", shown))


@contextmanager
def _wrong_owner() -> Iterator[Path]:
    """
    Yield a copy of the demo's image in which an object has another owner.

    The object takes between half a page and one, so the counters of pages differ by one page
    on every image.
    """
    vmlinux, image = kernels.debug_info(DEMO["kernel"]), images.image(**DEMO)
    prog = open_program(ImageSource(core=str(image), debuginfo="btf"))
    snapshot, slabs = collect(image_of(prog)), SlabReader(image_of(prog))
    memcgs = {m.path: m.address for m in snapshot.memcgs.values() if m.state == "online"}
    victim = next(
        obj
        for piece in scan_pages(image_of(prog))
        for page in piece.slabs
        if (slab := slabs.slab(page)) is not None
        if slab.nid == 2 and not slab.cache.reclaimable and 2048 < slab.cache.charge <= 4096
        for obj in slabs.charged_objects(slab)
        if snapshot.payer(obj.objcg) == memcgs["/files/mail"]
    )
    thief = Object(prog, "struct mem_cgroup *", memcgs["/files/db"]).nodeinfo[2].objcg
    with images.scratch() as folder:
        out = folder / "vmcore"
        poke(image, out, vmlinux, [(f"u64:{victim.element:#x}", thief.value_())])
        yield out


def _fault() -> str:
    with _wrong_owner() as core:
        return fenced(_audit(core, status=1))


def _finding() -> str:
    with _wrong_owner() as core:
        whole = _audit(core, "--findings", status=1)
    command, findings = whole.splitlines()[0], whole[whole.index("Finding 1:") :]
    return fenced(f"{command}\n[...]\n\n{findings}")


def _command(*arguments: str, most_rows: int = 16, **image: Any) -> Callable[[], str]:
    """Return a function that runs a command on an image, and shortens its tables."""

    def write() -> str:
        core = images.image(**{"kernel": "7.3", "nodes": "4", "workload": "mixed", **image})
        output = _run("-m", "memcg_inspect", *arguments, "--debuginfo", "btf", "-c", core)
        output = shortened(output, None, most_rows=most_rows)
        return fenced(f"$ memcg-inspect {' '.join(arguments)} -c vmcore\n" + output)

    return write


def _page_kinds() -> str:
    """Return the list of kinds of page frames."""
    width = max(map(len, KINDS))
    lines = (
        f"{name:{width}}  {kind.group:7}  {'memcg' if kind.is_charged else '-':5}  {kind.help}"
        for name, kind in KINDS.items()
    )
    return fenced("\n".join(lines))


def _growth(*arguments: str) -> Callable[[], str]:
    """Return a function that runs a command on two images, and says what grew."""

    def write() -> str:
        before, after = images.image(**DEMO), images.image(**DEMO, run=str(_LEAK))
        words = ("-m", "memcg_inspect", *arguments, "--debuginfo", "btf")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "before.json"
            file.write_text(_run(*words, "--json", "-c", before))
            output = _run(*words, "--since", file, "--top", "5", "-c", after)
        output = output.replace(str(file), file.name)
        command = f"$ memcg-inspect {' '.join(arguments)} --since before.json --top 5 -c VMCORE.2\n"
        return fenced(command + output)

    return write


def _who() -> str:
    """Return what ``who`` says of addresses that ``dying`` names as examples."""
    core = images.image(kernel="7.3", nodes="4", workload="dying")
    common = ("--debuginfo", "btf", "-c", core)
    memcg = ("dying", "--json", "--memcg", "/dying/family/a")
    left = json.loads(_run("-m", "memcg_inspect", *memcg, *common))["tables"][1]["rows"]
    wanted = ("lru", "slab", "percpu", "zswap")
    rows = (next(row for row in left if row["kind"] == kind and row["examples"]) for kind in wanted)
    addresses = [row["examples"].split()[0] for row in rows]
    output = shortened(_run("-m", "memcg_inspect", "who", *addresses, *common), None)
    return fenced(f"$ memcg-inspect who {' '.join(addresses)} -c vmcore\n" + output)


def _postmortem(*arguments: str) -> Callable[[], str]:
    """
    Return a function that runs a command on the dump of docs/postmortem.md.

    :param arguments: addresses in braces are those of the scene
    """

    def write() -> str:
        with images.scratch() as folder:
            core = folder / "vmcore"
            scene = docscene.broken(core)._asdict()
            words = [word.format(**scene) for word in arguments]
            if "audit" in words:
                return fenced(_audit(core, status=1))
            output = _run("-m", "memcg_inspect", *words, "--debuginfo", "btf", "-c", core)
        output = shortened(output, None, most_rows=8)
        return fenced(f"$ memcg-inspect {shlex.join(words)} -c vmcore\n{output}")

    return write


def _diff() -> str:
    """Return what grew between two images of which the second has a leak."""
    before, after = images.image(**DEMO), images.image(**DEMO, run=str(_LEAK))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "VMCORE").symlink_to(before)
        (Path(folder) / "VMCORE.2").symlink_to(after)
        shown = ""
        for words in (
            ("snapshot", "-c", "VMCORE", "-o", "before.memcg"),
            ("diff", "before.memcg", "VMCORE.2", "--top", "5"),
        ):
            command = ("-m", "memcg_inspect", *words, "--debuginfo", "btf")
            shown += f"$ memcg-inspect {' '.join(words)}\n{_run(*command, cwd=folder)}"
    return fenced(shown)


#: Programs that leak, and that come and go, in memcgs of their own.
_WATCHED = """
set -e
mkdir -p /run/leak && mount -t tmpfs none /run/leak
cd /sys/fs/cgroup
echo +memory >cgroup.subtree_control
mkdir leak noise
sh -c 'echo 0 >leak/cgroup.procs; while :; do
dd if=/dev/zero bs=65536 count=1 >>/run/leak/all; sleep 0.1; done' >/dev/null 2>&1 &
sh -c 'echo 0 >noise/cgroup.procs; while :; do
dd if=/dev/zero bs=65536 count=64 >/run/leak/some; sleep 0.7; : >/run/leak/some; sleep 0.7
done' >/dev/null 2>&1 &
"""


def _beside_a_leak(*words: str) -> str:
    """Return what a command says of a guest with a leak."""
    with _running() as socket:
        script = socket.with_name("script")
        script.write_text(_WATCHED)
        _run("scripts/lab", "exec", socket.parent, script)
        return _run("-m", "memcg_inspect", "--qemu", socket, *words)


def _watch() -> str:
    words = ("watch", "--every", "2", "--count", "8", "--top", "4")
    return fenced(
        f"$ memcg-inspect --qemu QMP_SOCKET {shlex.join(words)}\n{_beside_a_leak(*words)}"
    )


def _top() -> str:
    """Return the last page that ``top`` shows of a guest with a leak."""
    words = ("top", "--item", "shmem", "--sort", "rate")
    pages = _beside_a_leak(*words, "--batch", "--count", "3", "--every", "2")
    page = pages.rstrip().split("\n\n")[-1]
    return fenced(f"$ memcg-inspect --qemu QMP_SOCKET {shlex.join(words)}\n{page}\n")


def _metrics() -> str:
    """Return the metrics of the demo's image: what each means, and one of its samples."""
    words = ("metrics", "--debuginfo", "btf", "-c", images.image(**DEMO))
    lines, shown = _run("-m", "memcg_inspect", *words).splitlines(), list[str]()
    for line in lines:
        name = re.split("[{ ]", line)[0]
        if line.startswith("#") or not any(one.startswith(f"{name}{{") for one in shown):
            shown.append(line)
    return fenced("$ memcg-inspect metrics -c vmcore\n" + "\n".join(shown))


def _snapshot_fields() -> str:
    from memcg_inspect.snapshots.diff import DIFF

    return fields([columns_of(record) for record in DIFF.records])


def _fields(name: str) -> Callable[[], str]:
    return lambda: fields(tables(name))


def _figures() -> str:
    # Figures and the baseline are of one run.
    figures = _run("scripts/bench", "--figures", "--write-baseline")
    return fenced(f"$ scripts/bench --figures\n{figures}")


@contextmanager
def _running() -> Iterator[Path]:
    """Run a guest under load; yield its QMP socket."""
    lab = ROOT / "scripts" / "lab"
    with tempfile.TemporaryDirectory() as folder:
        _run(
            lab,
            "up",
            *["--kernel", "7.3", "--nodes", "4", "--workload", "churn", "--state"],
            folder,
        )
        try:
            yield Path(folder) / "qmp"
        finally:
            _run(lab, "down", folder)


def _live() -> str:
    with _running() as qmp:
        command = ("-m", "memcg_inspect", "audit", "--debuginfo", "btf", "--qemu", qmp)
        output = _run(*command, status=3).replace(f"--qemu {qmp} --debuginfo btf", "--qemu qmp")
    return fenced("$ memcg-inspect audit --qemu qmp\n" + output)


def _live_paused() -> str:
    with _running() as qmp:
        command = ("-m", "memcg_inspect", "audit", "--debuginfo", "btf", "--qemu", qmp)
        output = _run(*command, "--pause")
    return fenced("$ memcg-inspect audit --qemu qmp --pause\n" + output)


def _helpers() -> str:
    """The names that the package offers, and the first line of what each says of itself."""
    names = [n for n in memcg_inspect.__all__ if callable(getattr(memcg_inspect, n))]
    functions = [n for n in names if not isinstance(getattr(memcg_inspect, n), type)]
    lines = []
    for name in functions:
        function = getattr(memcg_inspect, name)
        first = next(line for line in (function.__doc__ or "").splitlines() if line.strip())
        lines.append(f"{name}{inspect.signature(inspect.unwrap(function))}\n    {first.strip()}")
    return fenced(re.sub(r"drgn\.|'|memcg_inspect\.[a-z.]*", "", "\n".join(lines)))


#: Lines that docs/interactive.md shows with their output. The first dentry may be that of a pipe
#: or of a file in sysfs, every eighth file has a longer name, and slabs of another node may hold a
#: part of what the memcg has.
_SESSION = (
    "from collections import Counter",
    "from drgn.helpers.linux.fs import dentry_path",
    "from memcg_inspect import *",
    "memcg = find_memcg('/files/web')",
    "memcg_counter(memcg, 'NR_SLAB_RECLAIMABLE_B', 0)",
    "objects = list(for_each_charged_slab_object(memcg=memcg, nid=0))",
    "sum(obj.charge for obj in objects)",
    "Counter(obj.slab_cache.name.string_() for obj in objects)[b'dentry']",
    "dentry_cache = find_slab_cache('dentry')",
    "path = lambda obj: dentry_path(Object(prog, 'struct dentry *', obj.address))",
    "dentries = (obj for obj in objects if obj.slab_cache == dentry_cache)",
    "dentry = next(obj for obj in dentries if path(obj)[4:].isdigit())",
    "path(dentry)",
    "hex(dentry.objcg), objcg_nid(dentry.objcg)",
    "memcg_path(objcg_memcg(dentry.objcg))",
)


def _interactive() -> str:
    typed = "".join(
        f"print('>>> ' + {line!r})\nexec(compile({line!r}, '-', 'single'))\n" for line in _SESSION
    )
    core = images.image(**DEMO)
    return fenced(_run("-m", "drgn", "-c", core, "--no-default-symbols", "-q", "-e", typed))


def _cost(*options: str | Path) -> tuple[float, float]:
    """Return seconds and MiB of an audit in a process of its own: the least of three."""
    best = (float("inf"), float("inf"))
    for _ in range(3):
        command = [sys.executable, "-m", "memcg_inspect", "audit", "--json", *map(str, options)]
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise LabError(f"{' '.join(command)}: exit status {process.returncode}")
        best = min(best, (time.perf_counter() - start, usage.ru_maxrss / 1024))
    return best


def _btf() -> str:
    """Return the cost of an audit with debug info and with BTF, on the same images."""
    lines = [f"{'':8}{'DWARF':>20}{'BTF':>20}"]
    for kernel in kernels.names(built_here=False):
        image, vmlinux = images.image(kernel, "4", "files"), kernels.debug_info(kernel)
        dwarf = _cost("-c", image, "-s", vmlinux)
        btf = _cost("-c", image, "--debuginfo", "btf")
        lines.append(f"{kernel:8}" + "".join(f"{s:8.2f} s {m:6.0f} MiB" for s, m in (dwarf, btf)))
    return fenced("\n".join(lines))


def _errors() -> str:
    """Return the errors of counters of mapped pages, by CPU and by node."""
    shown = []
    for kernel in seeds.RSS:
        core = images.image(kernel, "4", "rss", cpus=8)
        words = (
            "rss",
            "--memcg",
            "/rss/hopping-[01]",
            "--fields",
            "item,approximate,exact,error,bound",
        )
        output = _run("-m", "memcg_inspect", *words, "--debuginfo", "btf", "-c", core)
        shown.append(f"{kernel}$ memcg-inspect {shlex.join(words)} -c vmcore\n{output}")
    return fenced("\n".join(shown))


def _museum() -> str:
    return fenced("$ scripts/museum\n" + _run("scripts/museum"))


def _leak() -> str:
    """Return what the audit says of a bug that 7.3 has."""
    folder = ROOT / "fixtures"
    core = images.image(
        "7.3-lab",
        "2",
        modules=((str(folder / "modules" / "exhibits"), ""),),
        run=str(folder / "museum" / "speculative.sh"),
    )
    return fenced(_audit(core, status=1))


def _gate() -> str:
    """Return what the gate says of a kernel with a mistake that only some topologies show."""
    words = ["gate", "--kernel", "7.3-pernode-broken-kmem-high-order"]
    words += ["--only", "nodes=[12] mixed settled", "--only", "*+6mem mixed settled"]
    command = " ".join(["scripts/lab", *(shlex.quote(word) for word in words)])
    said = _run("scripts/lab", *words, status=1).replace(str(cache_folder()), "/CACHE")
    return fenced(f"$ {command}\n{said}")


def _measured(script: str) -> Callable[[], str]:
    """Return a function that runs a script, which goes on where it was interrupted."""

    def write() -> str:
        # Status 1: not all is well. The tables say what.
        done = subprocess.run([sys.executable, script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if done.returncode not in (0, 1):
            raise LabError(f"{script}: exit status {done.returncode}")
        return fenced(done.stdout)

    return write


class Block(NamedTuple):
    """
    A block.

    :ivar document: file that it is in
    :ivar write: makes it anew
    :ivar kernel: of the image that it needs
    """

    document: str
    write: Callable[[], str]
    sort: Literal["source", "image", "measured"] = "image"
    kernel: str = DEMO["kernel"]


#: Every block, by name.
BLOCKS = {
    "demo": Block("README.md", _demo),
    "fault": Block("README.md", _fault),
    "btf": Block("docs/btf.md", _btf, "measured"),
    "tables": Block("docs/output.md", _tables),
    "finding": Block("docs/output.md", _finding),
    "bench": Block("docs/performance.md", _output("scripts/bench"), "measured"),
    "overview": Block("docs/commands/overview.md", _command("overview", "--top", "8")),
    "overview_node": Block(
        "docs/commands/overview.md",
        _command("overview", "--node", "2", "--sort", "slab", "--top", "5"),
    ),
    "overview_fields": Block("docs/commands/overview.md", _fields("overview"), "source"),
    "usage": Block(
        "docs/commands/usage.md",
        _command("usage", "/churn/group-1", workload="churn", freeze="busy", seed=1),
    ),
    "usage_fields": Block("docs/commands/usage.md", _fields("usage"), "source"),
    "metrics": Block("docs/metrics.md", _metrics, "measured"),
    "diff": Block("docs/snapshots.md", _diff, "measured"),
    "diff_fields": Block("docs/snapshots.md", _snapshot_fields, "source"),
    "watch": Block("docs/snapshots.md", _watch, "measured"),
    "top": Block("docs/live.md", _top, "measured"),
    "drift": Block(
        "docs/commands/drift.md",
        _command("drift", "--sort", "error:asc", workload="churn", freeze="busy", seed=1),
    ),
    "drift_fields": Block("docs/commands/drift.md", _fields("drift"), "source"),
    "rss": Block(
        "docs/commands/rss.md",
        _command("rss", "--memcg", "/rss/hopping-[0-3]", workload="rss", cpus=8),
    ),
    "rss_check": Block(
        "docs/commands/rss.md",
        _command(
            "rss",
            "--check",
            "--memcg",
            "/rss/hopping-[01]",
            "--fields",
            "pid,item,exact,mapped,difference,status,node_0,node_1,node_2,node_3",
            workload="rss",
            cpus=8,
        ),
    ),
    "rss_fields": Block("docs/commands/rss.md", _fields("rss"), "source"),
    "pages": Block("docs/commands/pages.md", _command("pages", "--node", "2", most_rows=40)),
    "pages_bill": Block(
        "docs/commands/pages.md",
        _command("pages", "--node", "2", "--by", "memcg", "--top", "10"),
    ),
    "pages_counters": Block(
        "docs/commands/pages.md",
        _command("pages", "--node", "2", "--by", "zone", "--counters"),
    ),
    "pages_kinds": Block("docs/commands/pages.md", _page_kinds, "source"),
    "pages_fields": Block("docs/commands/pages.md", _fields("pages"), "source"),
    "where_kinds": Block(
        "docs/where-did-my-memory-go.md",
        _command("pages", "--by", "kind", "--top", "0", most_rows=40, **_HIDDEN),
        kernel=_HIDDEN["kernel"],
    ),
    "where_unknown": Block(
        "docs/where-did-my-memory-go.md",
        _command(*("pages", "--by", "kind,order,node", "--sort", "never", "--top", "6"), **_HIDDEN),
        kernel=_HIDDEN["kernel"],
    ),
    "where_site": Block(
        "docs/where-did-my-memory-go.md",
        _command(
            *("pages", "--by", "kind,caller", "--sort", "never", "--top", "4"),
            **_HIDDEN,
            append=_PROFILED["append"],
            workload="idle",
        ),
        kernel=_HIDDEN["kernel"],
    ),
    "where_bill": Block(
        "docs/where-did-my-memory-go.md",
        _command("pages", "--node", "2", "--by", "memcg", "--top", "6"),
    ),
    "percpu": Block(
        "docs/commands/percpu.md",
        _command("percpu", "--memcg", "/bpf-percpu*", "--top", "10"),
    ),
    "percpu_by": Block(
        "docs/commands/percpu.md",
        _command("percpu", "--node", "2", "--by", "memcg", "--top", "10"),
    ),
    "percpu_fields": Block("docs/commands/percpu.md", _fields("percpu"), "source"),
    "slabinfo": Block(
        "docs/commands/slabinfo.md",
        _command("slabinfo", "--memcg", "/files/*", "--top", "10"),
    ),
    "slabinfo_since": Block(
        "docs/commands/slabinfo.md", _growth("slabinfo", "--by", "cache"), "measured"
    ),
    "slabinfo_by": Block(
        "docs/commands/slabinfo.md",
        _command("slabinfo", "--node", "2", "--by", "memcg", "--top", "10"),
    ),
    "slabinfo_node": Block(
        "docs/commands/slabinfo.md",
        _command("slabinfo", "--node", "2", "--top", "10"),
    ),
    "slabinfo_fields": Block("docs/commands/slabinfo.md", _fields("slabinfo"), "source"),
    "museum": Block("docs/museum.md", _museum, "measured"),
    "leak": Block("docs/museum.md", _leak, "measured"),
    "gate": Block("docs/gate.md", _gate, "measured"),
    "kernel_cost": Block(
        "docs/pernode-kernel.md", _output("scripts/bench-kernel", "--cpus-255"), "measured"
    ),
    **{
        f"seeds_{table}": Block("docs/seeds.md", _output("scripts/seeds", table), "measured")
        for table in ("stock", "held", "profiling", "rss", "slabs")
    },
    "kselftests": Block(
        "docs/pernode-kernel.md", _output("scripts/seeds", "selftests"), "measured"
    ),
    "seeds_error": Block("docs/seeds.md", _errors, "measured"),
    "stat": Block("docs/commands/stat.md", _command("stat", "/files/web", workload="files")),
    "stat_fields": Block("docs/commands/stat.md", _fields("stat"), "source"),
    "stock": Block("docs/commands/stock.md", _command("stock")),
    "stock_fields": Block("docs/commands/stock.md", _fields("stock"), "source"),
    "tasks": Block("docs/commands/tasks.md", _command("tasks", "--sort", "memcg:desc")),
    "tasks_fields": Block("docs/commands/tasks.md", _fields("tasks"), "source"),
    "dying_summary": Block("docs/commands/dying.md", _command("dying", workload="dying")),
    "dying": Block(
        "docs/commands/dying.md",
        _command("dying", "--memcg", "/dying/family/a", workload="dying"),
    ),
    "dying_fields": Block("docs/commands/dying.md", _fields("dying"), "source"),
    "allocinfo": Block(
        "docs/commands/allocinfo.md",
        _command("allocinfo", "--top", "10", **_PROFILED),
        kernel=_PROFILED["kernel"],
    ),
    "allocinfo_by": Block(
        "docs/commands/allocinfo.md",
        _command(
            *("allocinfo", "--by", "memcg,node,kind,site", "--memcg", "/files/web"),
            *("--fields", "bytes,calls,memcg,node,kind,site,function"),
            **_PROFILED,
        ),
        kernel=_PROFILED["kernel"],
    ),
    "allocinfo_overhead": Block(
        "docs/commands/allocinfo.md",
        _command("allocinfo", "--overhead", **_PROFILED),
        kernel=_PROFILED["kernel"],
    ),
    "allocinfo_fields": Block("docs/commands/allocinfo.md", _fields("allocinfo"), "source"),
    **{
        name: Block("docs/performance.md", _output("scripts/bench", option), "measured")
        for name, option in {
            "bench_sites": "--call-sites",
            "bench_jobs": "--jobs",
            "bench_profile": "--profile",
            "bench_states": "--page-states",
            "scale": "--scale",
        }.items()
    },
    "figures": Block("docs/performance.md", _figures, "measured"),
    "live": Block("docs/live.md", _live, "measured"),
    "reliability": Block("docs/reliability.md", _measured("scripts/reliability"), "measured"),
    "damage": Block("docs/reliability.md", _measured("scripts/fuzz"), "measured"),
    "diagnosis": Block("docs/diagnosis.md", _measured("scripts/diagnosis"), "measured"),
    "breadth": Block("docs/reliability.md", _measured("scripts/breadth"), "measured"),
    "mutants": Block("docs/reliability.md", _measured("scripts/mutate"), "measured"),
    "live_paused": Block("docs/live.md", _live_paused, "measured"),
    "helpers": Block("docs/interactive.md", _helpers, "source"),
    "interactive": Block("docs/interactive.md", _interactive),
    "postmortem_audit": Block("docs/postmortem.md", _postmortem("audit"), kernel=docscene.KERNEL),
    "postmortem_who": Block(
        "docs/postmortem.md",
        _postmortem("who", "{victim:#x}", "{neighbour:#x}"),
        kernel=docscene.KERNEL,
    ),
    "postmortem_pointer": Block(
        "docs/postmortem.md", _postmortem("who", "{element:#x}"), kernel=docscene.KERNEL
    ),
    "postmortem_sites": Block(
        "docs/postmortem.md",
        _postmortem(
            *("allocinfo", "--by", "memcg,node,kind,site", "--memcg", "/shop/*"),
            *("--fields", "bytes,calls,memcg,node,kind,site,function"),
        ),
        kernel=docscene.KERNEL,
    ),
    "question_slab": Block(
        "docs/questions.md", _command("slabinfo", "--node", "2", "--by", "memcg", "--top", "4")
    ),
    "question_cache": Block(
        "docs/questions.md",
        _command(
            "slabinfo", "--node", "2", "--memcg", "/files/mail", "--by", "cache", "--top", "4"
        ),
    ),
    "question_overview": Block("docs/questions.md", _command("overview", "--top", "4")),
    "question_usage": Block("docs/questions.md", _command("usage", "/files/web")),
    "question_dying": Block("docs/questions.md", _command("dying", workload="dying")),
    "question_leak": Block(
        "docs/questions.md",
        _command(
            *("allocinfo", "--by", "memcg,site", "--memcg", "/files/web"),
            **_PROFILED,
        ),
        kernel=_PROFILED["kernel"],
    ),
    "question_growth": Block(
        "docs/questions.md", _growth("slabinfo", "--by", "memcg,cache"), "measured"
    ),
    "question_right": Block("docs/questions.md", _fault),
    "who": Block("docs/commands/who.md", _who),
    "who_fields": Block("docs/commands/who.md", _fields("who"), "source"),
    **{
        # Which columns fit depends on the amounts.
        f"help_{name}": Block(DOCUMENT, examples_of(name), "measured")
        for name in EXAMPLES
    },
}
