# SPDX-License-Identifier: LGPL-2.1-or-later
"""NUMA topologies: parse `4` or `2cpu+6mem`, and make QEMU's options of it."""

import re
from dataclasses import dataclass

from .errors import LabError

MIB = 1 << 20
_LEAST_A_NODE = 128 * MIB
_UNITS = {"": MIB, "M": MIB, "G": 1024 * MIB}


def parse_size(text: str) -> int:
    """Return the bytes of a size like `512M`, `2G` or `512` (MiB)."""
    match = re.fullmatch(r"(\d+)([MG]?)", text.upper())
    if not match:
        raise LabError(f"not a memory size: {text!r} (use for example 512M or 2G)")
    return int(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True)
class Topology:
    """The CPUs and the memory of each NUMA node."""

    spec: str
    # (CPUs, bytes) of each node; a node without CPUs has memory only
    nodes: tuple[tuple[tuple[int, ...], int], ...]

    @property
    def cpus(self) -> int:
        """The number of CPUs."""
        return sum(len(cpus) for cpus, _ in self.nodes)

    @property
    def memory(self) -> int:
        """The memory of all nodes together, in bytes."""
        return sum(size for _, size in self.nodes)

    def qemu_args(self, *, shared: bool = False, has_nodes: bool = True) -> list[str]:
        """Return QEMU's options. vhost-user devices need `shared` memory.

        :param has_nodes: whether the machine has NUMA nodes
        """
        if not has_nodes:
            return ["-m", f"{self.memory // MIB}M", "-smp", str(self.cpus)]
        with_cpus = sum(1 for cpus, _ in self.nodes if cpus)
        # The kernel warns about NUMA nodes that split a package (topology_sane()).
        sockets = with_cpus if self.cpus % with_cpus == 0 else self.cpus
        smp = f"{self.cpus},sockets={sockets},cores={self.cpus // sockets},threads=1"
        args = ["-m", f"{self.memory // MIB}M", "-smp", smp]
        kind = "memory-backend-memfd,share=on" if shared else "memory-backend-ram"
        for nid, (cpus, size) in enumerate(self.nodes):
            args += ["-object", f"{kind},id=m{nid},size={size // MIB}M"]
            numa = f"node,nodeid={nid},memdev=m{nid}"
            if cpus:
                numa += f",cpus={cpus[0]}-{cpus[-1]}"
            args += ["-numa", numa]
        return args


def parse(
    spec: str, cpus: int | None = None, memory: int | None = None, unit: int = 2 * MIB
) -> Topology:
    """Parse `N` (N nodes with CPUs) or `Ncpu+Mmem`: N nodes with CPUs, and M without.

    :param memory: of all nodes together, in bytes
    :param unit: bytes that the memory of a node is a multiple of
    :raises LabError: for anything else, and for too few CPUs or too little memory
    """
    match = re.fullmatch(r"(\d+)(?:cpu(?:\+(\d+)mem)?)?", spec)
    if not match or int(match[1]) == 0:
        raise LabError(f"not a topology: {spec!r} (use for example 4 or 2cpu+6mem)")
    with_cpus, without = int(match[1]), int(match[2] or 0)
    count = with_cpus + without
    cpus = max(2, with_cpus) if cpus is None else cpus
    if cpus < with_cpus:
        raise LabError(f"--nodes {spec}: {with_cpus} nodes need at least {with_cpus} CPUs")
    if memory is None:
        memory = max(1024 * MIB, count * max(192 * MIB, unit))
    size = memory // count // unit * unit
    if size < _LEAST_A_NODE:
        least = max(_LEAST_A_NODE, unit) // MIB
        raise LabError(f"--nodes {spec}: {memory // MIB}M is less than {least}M for each node")
    nodes = []
    first = 0
    for nid in range(count):
        share = 0
        if nid < with_cpus:
            share = cpus // with_cpus + (1 if nid < cpus % with_cpus else 0)
        nodes.append((tuple(range(first, first + share)), size))
        first += share
    return Topology(spec, tuple(nodes))
