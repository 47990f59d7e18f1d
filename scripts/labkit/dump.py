# SPDX-License-Identifier: LGPL-2.1-or-later
"""Freeze a guest and write its memory as a vmcore."""

import contextlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import crash, elf, freeze, kdump, kmodules, machine
from .errors import LabError
from .kernels import Kernel
from .machine import Machine, Options
from .programs import ENDLESS, workload_parts
from .run import find, run
from .store import write_atomically

#: Bytes at the beginning of /proc/kcore that contain its notes.
_KCORE_HEADERS = 1 << 16


@dataclass(frozen=True)
class Image:
    """How to freeze a guest and write its memory: --freeze, --format, --level, --seed."""

    freeze: str = "settled"
    format: str = "elf"
    level: int = 0
    seed: int | None = None


def check(options: Options, image: Image) -> None:
    """Raise LabError for options that do not go together."""
    if image.freeze == "settled" and ENDLESS & set(workload_parts(options.workload)):
        raise LabError(f"workload {options.workload} never rests: use --freeze busy or panic")
    if image.freeze not in ("settled", "busy", "panic") and not image.freeze.startswith("in:"):
        raise LabError(
            f"--freeze must be settled, busy, panic or in:[CALLER/]FUNCTION, not {image.freeze!r}"
        )
    if image.format not in ("elf", "kdump"):
        raise LabError(f"--format must be elf or kdump, not {image.format!r}")
    if not 0 <= image.level <= 31:
        raise LabError(f"--level must be 0 to 31, not {image.level}")
    if image.level and image.format == "elf" and image.freeze != "panic":
        raise LabError("--level needs --format kdump, or --freeze panic")


def beside(out: Path) -> Path:
    """Return the folder beside an image that holds the guest's own files (/proc, /sys)."""
    return out.with_name(out.name + ".guest")


@contextlib.contextmanager
def _replacing(out: Path) -> Iterator[tuple[Path, Path]]:
    """Yield temporary names for an image and its folder; rename both at the end."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        made, told = Path(folder) / "image", Path(folder) / "guest"
        told.mkdir()
        yield made, told
        told.chmod(0o755)
        made.chmod(0o644)
        shutil.rmtree(beside(out), ignore_errors=True)
        told.rename(beside(out))
        made.replace(out)


def dig_holes(path: Path) -> None:
    """Replace zeros in a file by holes (fallocate -d)."""
    program = find("fallocate")
    if program:
        # Failure is harmless: the file then takes more space.
        subprocess.run([program, "-d", path], capture_output=True, check=False)


def write_elf(running: Machine, path: Path) -> None:
    """Write the memory of a stopped guest with QEMU's dump-guest-memory."""
    with running.timed("dump", "write the guest's memory"):
        running.qemu.monitor.call(
            "dump-guest-memory", paging=False, protocol=f"file:{path}", format="elf"
        )
        if running.kernel.arch.is_little_endian:
            elf.make_little_endian(path)
        elf.number_cpus(path)
        dig_holes(path)


def write_settled(running: Machine, told: Path, path: Path) -> None:
    """Write the memory of a guest that is idle, and what it said before and after that."""
    freeze.settled(running, told)
    write_elf(running, path)
    freeze.record_again(running, told)


def _meta(options: Options, image: Image, ready: Kernel, times: dict[str, float]) -> dict[str, Any]:
    topology = options.topology
    return {
        "kernel": ready.name,
        "release": ready.release,
        "packages": ready.facts["packages"],
        "vmlinux": str(ready.vmlinux),
        "nodes": options.nodes,
        "cpus": topology.cpus,
        "memory": topology.memory,
        "options": options.facts(),
        "workload": options.workload,
        "freeze": image.freeze,
        "format": image.format,
        "level": image.level,
        "seed": image.seed,
        "times": times,
    }


def at_work(running: Machine) -> None:
    """Load the modules of a guest, and start its workload and its script."""
    running.load_modules()
    running.start_workload()
    running.run_script()


def _vmcoreinfo(running: Machine, told: Path) -> bytes:
    """Return the guest's VMCOREINFO note, which QEMU only has if the guest's driver told it."""
    kcore = told / "kcore"
    script = f"head -c {_KCORE_HEADERS} /proc/kcore"
    kcore.write_bytes(running.guest.must(script, what="read VMCOREINFO"))
    note = elf.note(kcore, "VMCOREINFO")
    kcore.unlink()
    return note


def _frozen(
    options: Options, image: Image, ready: Kernel, made: Path, told: Path
) -> dict[str, float]:
    """Write the memory of a guest that QEMU stops; return the seconds of each step."""
    with machine.booted(options, ready=ready) as running:
        knows = ready.arch.has_vmcoreinfo and kmodules.has_driver(
            ready, "qemu_fw_cfg", "CONFIG_FW_CFG_SYSFS"
        )
        note = b"" if knows else _vmcoreinfo(running, told)
        at_work(running)
        core = made.with_name("elf") if image.format == "kdump" else made
        if image.freeze == "settled":
            write_settled(running, told, core)
        else:
            if image.freeze.startswith("in:"):
                freeze.inside(running, image.freeze.removeprefix("in:"), image.seed)
            else:
                freeze.busy(running, image.seed)
            write_elf(running, core)
        (told / "console").write_text(running.qemu.console())
    if note:
        elf.add_note(core, "VMCOREINFO", note)
    if image.format == "kdump":
        with running.timed("makedumpfile", f"makedumpfile at level {image.level}"):
            kdump.convert(core, made, image.level)
        core.unlink()
    return running.times


def _crashed(
    options: Options, image: Image, ready: Kernel, made: Path, told: Path
) -> dict[str, float]:
    """Write the memory of a guest that crashes; return the seconds of each step."""
    files = crash.files(ready)
    with machine.booted(
        options, ready=ready, extra_files=files, append=crash.append(ready)
    ) as running:
        crash.load(running, image.format, image.level)
        at_work(running)
        freeze.let_run(image.seed)
        flattened = image.format == "kdump" or image.level > 0
        crash.crash(running, made, flattened=flattened)
        (told / "console").write_text(running.qemu.console())
    return running.times


def convert(core: Path, image: Image, out: Path) -> None:
    """Write a kdump `out`, and `out`.guest/, of an ELF image."""
    with _replacing(out) as (made, told):
        shutil.copytree(beside(core), told, symlinks=True, dirs_exist_ok=True)
        meta = json.loads((told / "meta.json").read_bytes())
        meta |= {"format": image.format, "level": image.level}
        write_atomically(told / "meta.json", json.dumps(meta, indent=1).encode() + b"\n")
        copy = made.with_name("elf")
        run(["cp", "--sparse=always", core, copy], what=f"copy {core}")
        kdump.convert(copy, made, image.level)
        copy.unlink()


def dump(options: Options, image: Image, out: Path) -> None:
    """Boot a guest, run the workload, freeze it, and write `out` and `out`.guest/."""
    check(options, image)
    if out.is_dir():
        raise LabError(f"--out: {out} is a folder")
    crashing = image.freeze == "panic"
    also = ["makedumpfile"] if crashing or image.format == "kdump" else []
    ready = machine.check(options, *also)
    if crashing and options.memory is None:
        options = replace(options, memory=crash.enough_memory(ready.arch, options.topology))
    with _replacing(out) as (made, told):
        take = _crashed if crashing else _frozen
        times = take(options, image, ready, made, told)
        (told / "vmlinux").symlink_to(ready.vmlinux)
        meta = _meta(options, image, ready, times)
        write_atomically(told / "meta.json", json.dumps(meta, indent=1).encode() + b"\n")
