# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Names of commands
-----------------

One line of help for each command. The list of commands needs nothing else, so that it is there at
once.
"""

from __future__ import annotations

__all__ = ("COMMANDS", "COMMAND_HELP", "MORE_HELP")

#: The commands that answer a question about an image.
COMMAND_HELP = {
    "audit": "compare all memory charged to memcgs with the counters",
    "overview": "what each memcg is charged for, and memory.current, in one line",
    "pages": "all page frames by node, zone and use, and who pays",
    "slabinfo": "slab objects by memcg, cache and node, and how slabs are shared",
    "percpu": "percpu allocations by owner, size, node and call site",
    "usage": "what memory.current consists of, and what memory.stat shows of it",
    "stat": "memory.stat of a memcg, also by node, exact as after a flush",
    "stock": "what CPUs have charged in advance, for which memcg and node",
    "tasks": "memcg of each task, and the obj_cgroup that it has cached",
    "dying": "removed memcgs that still exist, and what keeps each alive",
    "rss": "pages that processes map: approximate counters and their error",
    "drift": "errors of memcg counters that are not folded, and their bounds",
    "allocinfo": "allocated memory by call site, memcg and node",
    "who": "what is at an address, and who pays for it",
}
#: The other commands of the program.
MORE_HELP = {
    "snapshot": "write a small file with what each memcg is charged for",
    "diff": "what grew between snapshots or dumps, and how fast",
    "watch": "take snapshots of a running machine, and tell what leaks",
    "top": "memcgs of a running machine by node, and how fast they grow",
    "metrics": "figures of an audit for Prometheus",
    "crash": "report on the dumps of kdump, after each crash",
    "fleet": "audit many dumps; one line of JSON each",
    "summary": "sum up what fleet found, by kernel, host and cause",
    "schema": "print the JSON Schema of the document of a command",
    "completion": "print the completion script of a shell",
}
COMMANDS = tuple(COMMAND_HELP)
