# SPDX-License-Identifier: LGPL-2.1-or-later
"""Boot a guest, load its modules, start its workload."""

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import initramfs, kmodules, topology
from .errors import BootError, GuestError, LabError
from .guest import PORTS, Guest
from .kernels import Kernel, kernel, kernel_arch, tools
from .programs import workload_parts, workload_programs
from .progress import doing
from .qemu import Qemu
from .run import BUILD_TOOLS, need
from .share import Share, shared

_COMMAND_LINE = "loglevel=5 oops=panic panic=-1 rdinit=/init"
_SWAP_SIZE = 1 << 30
# How long to wait for a guest to boot, in seconds, for each attempt.
_PATIENCE = (60.0, 90.0, 180.0)


@dataclass(frozen=True)
class Options:
    """The options of a guest, as on the command line of `lab dump`."""

    kernel: str
    nodes: str = "1"
    cpus: int | None = None
    memory: str | None = None
    append: str = ""
    cgroup: str = "v2"
    workload: str = "idle"
    # (folder of the module, its arguments) each
    modules: tuple[tuple[str, str], ...] = ()
    # path of a shell script that runs in the guest when the workload is ready
    run: str | None = None

    @property
    def topology(self) -> topology.Topology:
        """The topology that nodes, cpus and memory describe."""
        memory = None if self.memory is None else topology.parse_size(self.memory)
        unit = kernel_arch(self.kernel).node_unit
        return topology.parse(self.nodes, self.cpus, memory, unit)

    def facts(self) -> dict[str, Any]:
        """Return the options as plain data for JSON."""
        facts = asdict(self)
        facts["modules"] = [[Path(folder).name, args] for folder, args in self.modules]
        return facts


def check(options: Options, *also: str) -> Kernel:
    """Check the options and the programs needed, then make the kernel ready and return it.

    :raises LabError: before anything slow begins
    """
    workload_parts(options.workload)
    _ = options.topology
    if options.cgroup not in ("v1", "v2"):
        raise LabError(f"--cgroup must be v1 or v2, not {options.cgroup!r}")
    if options.run is not None and not Path(options.run).is_file():
        raise LabError(f"--run: no such file: {options.run}")
    for folder, _ in options.modules:
        kmodules.check_folder(Path(folder))
    build = BUILD_TOOLS if options.modules else ()
    need(*kernel_arch(options.kernel).tools, *tools(options.kernel), *build, *also)
    if not kernel_arch(options.kernel).has_nodes and len(options.topology.nodes) > 1:
        raise LabError(f"--nodes {options.nodes}: machines of {options.kernel} have one node")
    ready = kernel(options.kernel)
    # CONFIG_MEMCG_V1 came with 6.11. Kernels before it always have cgroup v1.
    if options.cgroup == "v1" and not {"CONFIG_MEMCG_V1", "CONFIG_MEMCG_KMEM"} & set(ready.config):
        raise LabError(f"kernel {options.kernel} has no cgroup v1 memory controller")
    return ready


class Machine:
    """A booted guest."""

    def __init__(
        self, options: Options, ready: Kernel, qemu: Qemu, guest: Guest, share: Share | None
    ) -> None:
        self.options = options
        # set when the guest can mount this machine's files
        self.share = share
        self.kernel = ready
        self.qemu = qemu
        self.guest = guest
        self.times: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, name: str, what: str) -> Iterator[None]:
        """Show progress of a step, and keep its duration in `times`."""
        began = time.monotonic()
        with doing(what):
            yield
        self.times[name] = round(time.monotonic() - began, 2)

    def load_modules(self) -> None:
        """Load the test modules (--module)."""
        for folder, args in self.options.modules:
            name = kmodules.build_module(self.kernel, Path(folder)).name
            self.guest.must(f"insmod /lab/modules/{name} {args}", what=f"load {name}")

    def start_workload(self) -> None:
        """Start the workload, and return when its setup is done."""
        with self.timed("workload", f"workload {self.options.workload}"):
            for part in workload_parts(self.options.workload):
                script = f"exec /lab/workloads/{part}"
                self.guest.must(script, what=f"workload {part}", timeout=300)

    def run_script(self) -> None:
        """Run the script (--run) in the guest's root cgroup."""
        if self.options.run is not None:
            with self.timed("run", f"run {self.options.run} in the guest"):
                script = Path(self.options.run).read_text()
                self.guest.must(script, what=self.options.run, timeout=300)


@contextlib.contextmanager
def booted(
    options: Options,
    *,
    ready: Kernel | None = None,
    host_files: bool = False,
    extra_files: dict[str, bytes] | None = None,
    extra_args: Sequence[str] = (),
    append: str = "",
) -> Iterator[Machine]:
    """Boot a guest up to its init. End it when the block is left."""
    ready = ready or check(options)
    what = f"boot {ready.release} with nodes {options.nodes}"
    with tempfile.TemporaryDirectory(prefix="lab.") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "initrd").write_bytes(
            initramfs.guest(
                ready,
                programs=workload_programs(options.workload, ready.arch),
                modules=[kmodules.build_module(ready, Path(p)) for p, _ in options.modules],
                extra=extra_files or {},
                shares=host_files,
            )
        )
        with open(folder / "swap", "wb") as file:
            file.truncate(_SWAP_SIZE)
        words = (ready.arch.parameters, _COMMAND_LINE, f"lab.cgroup={options.cgroup}", append)
        line = " ".join((*words, options.append)).strip()
        for patience in _PATIENCE:
            began = time.monotonic()
            attempt = stack.enter_context(contextlib.ExitStack())
            share = attempt.enter_context(shared(ready)) if host_files else None
            args = [*_devices(options, ready, folder, line, share), *extra_args]
            try:
                with doing(what):
                    qemu = attempt.enter_context(contextlib.closing(Qemu(args, PORTS, ready.arch)))
                    guest = Guest(qemu, timeout=patience)
                break
            except GuestError as error:
                # Under TCG a guest sometimes hangs early, or runs into code that another CPU
                # has just patched. Nothing has been done in the guest yet: boot it again.
                attempt.close()
                if patience == _PATIENCE[-1]:
                    raise BootError(str(error)) from None
                print(f"lab: booting again: {error}", file=sys.stderr)
        machine = Machine(options, ready, qemu, guest, share)
        machine.times["boot"] = round(time.monotonic() - began, 2)
        yield machine


def _devices(
    options: Options, ready: Kernel, folder: Path, line: str, share: Share | None
) -> list[str]:
    """Return QEMU's options for a guest."""
    return [
        "-kernel", str(ready.bzimage), "-initrd", str(folder / "initrd"), "-append", line,
        *options.topology.qemu_args(
            shared=share is not None and share.shared_memory, has_nodes=ready.arch.has_nodes
        ),
        "-drive", f"file={folder / 'swap'},format=raw,if=virtio,cache=unsafe",
        *(share.args if share else []),
    ]  # fmt: skip
