# SPDX-License-Identifier: LGPL-2.1-or-later
"""The commands of `scripts/lab`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import dump, kernels
from .errors import LabError
from .machine import Options
from .programs import workload_names


def _kernel(args: argparse.Namespace) -> int:
    ready = kernels.kernel(args.name, refresh=args.refresh)
    print(ready.folder)
    for package, version in ready.facts["packages"].items():
        print(f"lab: {args.name} is {package} {version}", file=sys.stderr)
    return 0


def _module(text: str) -> tuple[str, str]:
    folder, _, args = text.partition(":")
    return str(Path(folder).absolute()), args


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
    return dump.Image(args.freeze, args.format, args.level, args.seed)


def _dump(args: argparse.Namespace) -> int:
    dump.dump(_options(args), _image(args), args.out.absolute())
    return 0


def _guest_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--kernel", required=True, metavar="NAME")
    command.add_argument("--nodes", default="1", metavar="SPEC", help="like 4, or 2cpu+6mem")
    command.add_argument("--cpus", type=int, metavar="N")
    command.add_argument("--memory", metavar="SIZE", help="of all nodes together, like 2G")
    command.add_argument("--append", default="", metavar="ARGS", help="for the kernel")
    command.add_argument("--cgroup", default="v2", choices=["v1", "v2"])
    known = ", ".join(workload_names())
    command.add_argument("--workload", default="idle", metavar="WL", help=known)
    command.add_argument("--module", action="append", default=[], type=_module,
                         metavar="DIR[:ARGS]", help="build and load a test module")  # fmt: skip
    command.add_argument("--run", metavar="SCRIPT", help="run in the guest, by busybox sh")


def _image_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--freeze", default="settled", choices=["settled", "busy", "panic"])
    command.add_argument("--seed", type=int, help="of the moment that busy stops at")
    command.add_argument("--format", default="elf", choices=["elf", "kdump"])
    command.add_argument("--level", type=int, default=0, metavar="N", help="makedumpfile's -d")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser("kernel", help="make a kernel ready and print its folder")
    command.add_argument("name", metavar="NAME", help=", ".join(kernels.RECIPES))
    command.add_argument("--refresh", action="store_true", help="look for a newer one")
    command.set_defaults(call=_kernel)
    command = commands.add_parser("dump", help="boot, work, freeze, and write the memory")
    _guest_arguments(command)
    _image_arguments(command)
    command.add_argument("--out", required=True, type=Path, metavar="FILE")
    command.set_defaults(call=_dump)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.call(args)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("lab: interrupted", file=sys.stderr)
        return 130
    return status
