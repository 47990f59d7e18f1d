# SPDX-License-Identifier: LGPL-2.1-or-later
"""Add memory to a running guest, and write the memory of that guest as a vmcore."""

import functools
from pathlib import Path

from . import dump, machine, topology
from .errors import LabError
from .fingerprint import code_hash
from .images import kept, key
from .machine import Machine, Options
from .store import text_hash

# Free memory of a fresh guest is zero, and a memory map of zeros looks right. This leaves bytes
# 0xaa in it: a struct page of these bytes looks charged.
_USE_MEMORY = """
mkdir -p /tmp/used
mount -t tmpfs -o size=100% none /tmp/used
yes "$(printf '\\252\\252\\252\\252\\252\\252\\252')" | head -c 4194304 >/tmp/used/part
free_kbytes() {
	while read -r key value unit; do
		[ "$key" != MemFree: ] || echo "$value"
	done </proc/meminfo
}
kbytes=$(cat /proc/sys/vm/min_free_kbytes)
echo 4096 >/proc/sys/vm/min_free_kbytes
while [ "$(free_kbytes)" -gt 30000 ]; do
	cat /tmp/used/part >>/tmp/used/file || exit 1
done
echo "$kbytes" >/proc/sys/vm/min_free_kbytes
umount /tmp/used
"""
_WAIT = """
n=0
while [ "$(ls -d /sys/devices/system/memory/memory* | wc -l)" = {blocks} ]; do
	sleep 0.1
	n=$((n + 1))
	[ $n -lt 200 ] || exit 1
done
sleep 0.5
"""


def _plug(running: Machine, size: int, node: int) -> None:
    """Add a DIMM to a node, and return when the guest's kernel has found it."""
    with running.timed("hotplug", "add memory"):
        running.guest.must(_USE_MEMORY, what="use memory", timeout=300)
        blocks = int(running.guest.must("ls -d /sys/devices/system/memory/memory* | wc -l",
                                        what="count the blocks of memory"))  # fmt: skip
        monitor = running.qemu.monitor
        monitor.call("object-add", **{"qom-type": "memory-backend-ram", "id": "hot", "size": size})
        monitor.call("device_add", driver="pc-dimm", id="dimm", memdev="hot", node=node)
        running.guest.must(_WAIT.format(blocks=blocks), what="find the added memory")


def hotplugged(options: Options, size: str, out: Path) -> None:
    """Write `out` and `out`.guest/ like dump.dump(), of a guest with a DIMM of `size` added.

    `256M@new` adds 256 MiB to a node of its own, which has no other memory. The DIMM is added
    after the workload is ready and before the script runs. The kernel brings it online as its
    parameters say (memhp_default_state).
    """
    amount, _, place = size.partition("@")
    extra = topology.parse_size(amount)
    if place not in ("", "new"):
        raise LabError(f"not a place for memory: {place!r} (use for example 256M or 256M@new)")
    most = options.topology.memory + extra
    ready = machine.check(options)
    told = dump.beside(out)
    told.mkdir(parents=True)
    args = ["-m", f"slots=1,maxmem={most // topology.MIB}M"]
    node = 0
    if place:
        node = len(options.topology.nodes)
        args += ["-numa", f"node,nodeid={node}"]
    with machine.booted(options, ready=ready, extra_args=args) as running:
        running.load_modules()
        running.start_workload()
        _plug(running, extra, node)
        running.run_script()
        dump.write_settled(running, told, out)
    (told / "vmlinux").symlink_to(ready.vmlinux)


def image(options: Options, size: str) -> Path:
    """Return the path of such an image; make it unless it is in the cache."""
    ready = machine.check(options)
    name = text_hash(
        {
            "image": key(options, dump.Image(), ready),
            "hotplug": size,
            "by": code_hash(Path(__file__)),
        }
    )[:24]
    return kept(name, functools.partial(hotplugged, options, size), ready)
