# SPDX-License-Identifier: LGPL-2.1-or-later
"""Images: a guest's memory, frozen and written as a vmcore."""

import contextlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import crash, freeze, kdump, machine
from .errors import LabError
from .kernels import Kernel
from .machine import Machine, Options
from .programs import ENDLESS, workload_parts
from .run import find
from .store import write_atomically


@dataclass(frozen=True)
class Image:
    """How a guest's memory is to be frozen and written."""

    freeze: str = "settled"
    format: str = "elf"
    level: int = 0
    seed: int | None = None


def check(options: Options, image: Image) -> None:
    """Find mistakes in what was asked for."""
    if image.freeze == "settled" and ENDLESS & set(workload_parts(options.workload)):
        raise LabError(f"{options.workload} never rests: --freeze busy or panic")
    if image.freeze not in ("settled", "busy", "panic"):
        raise LabError(f"--freeze is settled, busy or panic, not {image.freeze}")
    if image.format not in ("elf", "kdump"):
        raise LabError(f"--format is elf or kdump, not {image.format}")
    if not 0 <= image.level <= 31:
        raise LabError("--level is 0 to 31")
    if image.level and image.format == "elf" and image.freeze != "panic":
        raise LabError("--level needs --format kdump, or --freeze panic")


def beside(out: Path) -> Path:
    """The folder with what the guest itself said."""
    return out.with_name(out.name + ".guest")


@contextlib.contextmanager
def _replacing(out: Path) -> Iterator[tuple[Path, Path]]:
    """Temporary names for an image and its folder, renamed into place at the end."""
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
    """Give back the disk space of zeros."""
    program = find("fallocate")
    if program:
        # a filesystem without holes only costs space
        subprocess.run([program, "-d", path], capture_output=True, check=False)


def write_elf(running: Machine, path: Path) -> None:
    """Write a stopped guest's memory as QEMU does."""
    with running.timed("dump", "writing the guest's memory"):
        running.qemu.monitor.call(
            "dump-guest-memory", paging=False, protocol=f"file:{path}", format="elf"
        )
        dig_holes(path)


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


def _at_work(running: Machine) -> None:
    running.load_modules()
    running.start_workload()
    running.run_script()


def _frozen(
    options: Options, image: Image, ready: Kernel, made: Path, told: Path
) -> dict[str, float]:
    """The memory of a guest that QEMU stopped."""
    with machine.booted(options, ready=ready) as running:
        _at_work(running)
        if image.freeze == "settled":
            freeze.settled(running, told)
        else:
            freeze.busy(running, image.seed)
        elf = made.with_name("elf") if image.format == "kdump" else made
        write_elf(running, elf)
        (told / "console").write_text(running.qemu.console())
    if image.format == "kdump":
        with running.timed("makedumpfile", f"makedumpfile at level {image.level}"):
            kdump.convert(elf, made, image.level)
        elf.unlink()
    return running.times


def _crashed(
    options: Options, image: Image, ready: Kernel, made: Path, told: Path
) -> dict[str, float]:
    """The memory of a guest that crashed, as its crash kernel saved it."""
    files = crash.files(ready)
    with machine.booted(options, ready=ready, extra_files=files, append=crash.APPEND) as running:
        crash.load(running, image.format, image.level)
        _at_work(running)
        freeze.let_run(image.seed)
        flattened = image.format == "kdump" or image.level > 0
        crash.crash(running, made, flattened=flattened)
        (told / "console").write_text(running.qemu.console())
    return running.times


def dump(options: Options, image: Image, out: Path) -> None:
    """Boot, work, freeze, and write `out` and `out`.guest/."""
    check(options, image)
    crashing = image.freeze == "panic"
    also = ["makedumpfile"] if crashing or image.format == "kdump" else []
    ready = machine.check(options, *also)
    if crashing and options.memory is None:
        options = replace(options, memory=crash.enough_memory(options.topology))
    with _replacing(out) as (made, told):
        take = _crashed if crashing else _frozen
        times = take(options, image, ready, made, told)
        (told / "vmlinux").symlink_to(ready.vmlinux)
        meta = _meta(options, image, ready, times)
        write_atomically(told / "meta.json", json.dumps(meta, indent=1).encode() + b"\n")
