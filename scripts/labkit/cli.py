# SPDX-License-Identifier: LGPL-2.1-or-later
"""The command line of `scripts/lab`."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import dump, environment, gate, given, hotplug, images, kernels, kmodules, live, poke, updown
from .errors import LabError
from .machine import Options
from .programs import workload_names

Parser = argparse.ArgumentParser

_NODES_HELP = "NUMA nodes: 4, or 2cpu+6mem for 2 nodes with CPUs and 6 without (default: 1)"


def _kernel(args: argparse.Namespace) -> int:
    ready = kernels.kernel(args.name, refresh=args.refresh)
    if not kernels.recipe(args.name).part:
        kernels.debug_info(args.name)
    print(ready.folder)
    for package, version in ready.facts["packages"].items():
        print(f"lab: {args.name} is {package} {version}", file=sys.stderr)
    return 0


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < float("inf"):
            return seconds
    raise argparse.ArgumentTypeError(f"not a number of seconds above 0: {text!r}")


def _module(text: str) -> tuple[str, str]:
    folder, _, args = text.partition(":")
    own = kmodules.own_name(Path(folder)) is not None
    return folder if own else str(Path(folder).absolute()), args


def _options(args: argparse.Namespace) -> Options:
    return Options(
        kernel=args.kernel,
        nodes=args.nodes,
        cpus=args.cpus,
        memory=args.memory,
        append=args.append,
        cgroup=args.cgroup,
        workload=args.workload,
        modules=tuple(args.module),
        run=args.run,
    )


def _image(args: argparse.Namespace) -> dump.Image:
    if args.seed is not None and args.freeze == "settled":
        raise LabError("--seed needs --freeze busy or panic")
    return dump.Image(args.freeze, args.format, args.level, args.seed)


def _dump(args: argparse.Namespace) -> int:
    if args.hotplug is not None:
        if _image(args) != dump.Image():
            raise LabError("--hotplug makes settled ELF images only")
        hotplug.hotplugged(_options(args), args.hotplug, args.out.absolute())
        return 0
    dump.dump(_options(args), _image(args), args.out.absolute())
    return 0


def _cached_image(args: argparse.Namespace) -> int:
    print(images.cached(_options(args), _image(args)))
    return 0


def _live(args: argparse.Namespace) -> int:
    command = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not command:
        raise LabError("live: no command given (lab live [OPTIONS] -- COMMAND)")
    return live.live(_options(args), command, timeout=args.timeout)


def _up(args: argparse.Namespace) -> int:
    print(updown.up(_options(args), args.freeze, args.state))
    return 0


def _exec(args: argparse.Namespace) -> int:
    status, out, err = updown.execute(args.state, Path(args.script).read_text(), args.timeout)
    sys.stdout.buffer.write(out)
    sys.stdout.flush()
    sys.stderr.buffer.write(err)
    return status


def _down(args: argparse.Namespace) -> int:
    updown.down(args.state)
    return 0


def _poke(args: argparse.Namespace) -> int:
    changes = []
    for change in args.change:
        what, sign, value = change.rpartition("=")
        if not sign:
            raise LabError(f"{change!r} is not WHAT=VALUE")
        changes.append((what, value))
    for address, data in poke.poke(args.image, args.out, args.symbols, changes):
        print(f"{address:#x} {data[::-1].hex()}")
    return 0


def _gate(args: argparse.Namespace) -> int:
    environment.enter()  # It audits images.
    tests = gate.chosen(args.only)
    if args.list:
        print(*(test.name for test in tests), sep="\n")
        return 0
    if args.kernel:
        kernel = kernels.kernel(args.kernel)
    elif args.kernel_dir:
        kernel = given.from_folder(args.kernel_dir)
    elif args.source:
        kernel = given.from_source(args.source)
    else:
        raise LabError("gate: give --kernel-dir, --source or --kernel")
    return gate.gate(kernel, tests)


def _guest_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--kernel", required=True, metavar="NAME")
    command.add_argument(
        "--nodes",
        default="1",
        metavar="SPEC",
        help=_NODES_HELP,
    )
    command.add_argument("--cpus", type=int, metavar="N")
    command.add_argument("--memory", metavar="SIZE", help="of all nodes together, e.g. 2G")
    command.add_argument("--append", default="", metavar="ARGS", help="kernel parameters to add")
    command.add_argument("--cgroup", default="v2", choices=["v1", "v2"])
    known = ", ".join(workload_names())
    command.add_argument("--workload", default="idle", metavar="WL", help=known)
    command.add_argument("--module", action="append", default=[], type=_module,
                         metavar="DIR[:ARGS]",
                         help="build a test module and load it; +NAME: load a module of the kernel "
                         "itself, after those that it depends on")  # fmt: skip
    command.add_argument("--run", metavar="SCRIPT", help="script for busybox sh in the guest")


def _image_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--freeze", default="settled", metavar="{settled,busy,panic,in:[CALLER/]FUNCTION}"
    )
    command.add_argument("--seed", type=int, help="of the moment to stop the guest")
    command.add_argument("--format", default="elf", choices=["elf", "kdump"])
    command.add_argument("--level", type=int, default=0, metavar="N", help="makedumpfile -d")


def _gate_arguments(command: argparse.ArgumentParser) -> None:
    which = command.add_mutually_exclusive_group()
    which.add_argument(
        "--kernel-dir",
        type=Path,
        metavar="DIR",
        help="a kernel build tree, or a folder as `lab kernel` prints it",
    )
    which.add_argument(
        "--source",
        type=Path,
        metavar="TREE",
        help="build this kernel source with the lab's configuration",
    )
    which.add_argument("--kernel", metavar="NAME", help="a kernel of the lab")
    command.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only tests whose name matches this shell pattern; may be repeated",
    )
    command.add_argument("--list", action="store_true", help="list the tests, and run none")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lab",
        description="Boot kernels in QEMU, and take images of their memory.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, call: Callable[[argparse.Namespace], int], help: str) -> Parser:
        command = commands.add_parser(name, help=help, description=help)
        command.set_defaults(call=call)
        return command

    command = add("kernel", _kernel, "make a kernel ready, and print its folder")
    command.add_argument("name", metavar="NAME", help=", ".join(kernels.RECIPES))
    command.add_argument("--refresh", action="store_true", help="fetch a newer one if there is one")

    command = add(
        "dump",
        _dump,
        "boot a guest, run a workload, and write its memory to a file",
    )
    _guest_arguments(command)
    _image_arguments(command)
    command.add_argument("--hotplug", metavar="SIZE",
                         help="add memory to node 0 when the workload is ready; 256M@new: to a "
                              "node of its own")  # fmt: skip
    command.add_argument("--out", required=True, type=Path, metavar="FILE")

    command = add("image", _cached_image, "like dump, but into the cache; print the path")
    _guest_arguments(command)
    _image_arguments(command)

    command = add("live", _live, "run a command of this machine in a guest")
    _guest_arguments(command)
    command.add_argument("--timeout", type=_seconds, metavar="SECONDS")
    command.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND...")

    command = add("up", _up, "boot a guest that stays, and print the path of its QMP socket")
    _guest_arguments(command)
    command.add_argument("--freeze", default="none", choices=["settled", "busy", "none"])
    command.add_argument("--state", required=True, type=Path, metavar="DIR")

    command = add("exec", _exec, "run a shell script in a guest that `up` booted")
    command.add_argument("state", type=Path, metavar="DIR")
    command.add_argument("script", metavar="SCRIPT")
    command.add_argument("--timeout", type=_seconds, default=60.0, metavar="SECONDS")

    command = add("down", _down, "end a guest that `up` booted")
    command.add_argument("state", type=Path, metavar="DIR|SOCKET")

    _gate_arguments(add("gate", _gate, "test the memcg accounting of a kernel, and print KTAP"))

    command = add("poke", _poke, "copy an ELF image, and change words in the copy")
    command.add_argument("-s", "--symbols", type=Path, metavar="VMLINUX")
    command.add_argument("image", type=Path, metavar="IMAGE")
    command.add_argument("out", type=Path, metavar="OUT")
    command.add_argument("change", nargs="+", metavar="WHAT=VALUE")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit status."""
    args = _parser().parse_args(argv)
    # SIGTERM acts like Ctrl-C: it ends guests and removes temporary files.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status: int = args.call(args)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"lab: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("lab: interrupted", file=sys.stderr)
        return 130
    return status
