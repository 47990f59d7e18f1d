# SPDX-License-Identifier: LGPL-2.1-or-later
"""The examples that ``--help`` of each command prints, and how their output is made."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from docblocks import fenced, shortened
from labkit import images
from labkit.errors import LabError

ROOT = Path(__file__).resolve().parent.parent

#: The document that has them, and the columns of the terminal that its commands write to.
DOCUMENT = "memcg_inspect/examples.md"
COLUMNS = 76
#: The most rows of a table, and the most lines of one example.
MOST_ROWS = 4
MOST_LINES = 26

_PROFILED = {"kernel": "7.3-lab", "workload": "files", "append": "sysctl.vm.mem_profiling=1"}
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Example(NamedTuple):
    """
    One example.

    :ivar question: what the command answers
    :ivar words: arguments of the program; those in braces are addresses of :func:`_addresses`
    :ivar image: of the lab
    """

    question: str
    words: str
    image: dict[str, Any] = {}


_DYING: dict[str, Any] = {"workload": "dying"}
_RSS: dict[str, Any] = {"workload": "rss", "cpus": 8}
_BUSY: dict[str, Any] = {"workload": "churn", "freeze": "busy", "seed": 1}

#: Three examples of each command.
EXAMPLES: dict[str, tuple[Example, ...]] = {
    "audit": (
        Example("Do the counters agree with what is charged?", "audit"),
        Example(
            "Which rows are there for one memcg and node?",
            "audit --rows --memcg /files/web --node 2 --fields identity,item,status,found,claimed",
        ),
        Example(
            "Which charges are not on the node that was charged?",
            "audit --skew --memcg /files --subtree",
        ),
    ),
    "overview": (
        Example("Which memcgs use most memory, and for what?", "overview --top 3"),
        Example(
            "What do the memcgs below one use?", "overview --memcg /files --subtree --sort slab"
        ),
        Example("Who uses node 2?", "overview --node 2 --top 3"),
    ),
    "slabinfo": (
        Example("Who uses the slab memory of node 2?", "slabinfo --node 2 --by memcg --top 3"),
        Example("What is it used for?", "slabinfo --memcg /files/mail --by cache --top 3"),
        Example(
            "The same for a script, with exact sizes:",
            "slabinfo --memcg /files/mail --scripted --fields cache,objects,bytes",
        ),
    ),
    "percpu": (
        Example("Who uses percpu memory?", "percpu --by memcg --top 3"),
        Example("Who uses that of node 2?", "percpu --by memcg --node 2 --top 3"),
        Example("Which allocations are there, and where?", "percpu --each --top 3"),
    ),
    "pages": (
        Example("What is the memory of the machine used for?", "pages --by kind --top 4"),
        Example("Who pays for the memory of node 2?", "pages --by memcg --node 2 --top 4"),
        Example("Which slab caches have most pages?", "pages --by cache --top 4"),
    ),
    "usage": (
        Example("What does memory.current consist of?", "usage /files/web"),
        Example("The same in bytes:", "usage /pages/all --exact"),
        Example(
            "For a script, the largest parts first:",
            "usage /files/web --scripted --fields what,bytes --sort bytes",
        ),
    ),
    "stat": (
        Example("What is in memory.stat of the memcg itself?", "stat /files/web"),
        Example("What would the kernel's file show after a flush?", "stat /files --subtree"),
        Example("What is in memory.numa_stat for node 2?", "stat /files/web --node 2"),
    ),
    "stock": (
        Example("What has each CPU charged in advance?", "stock"),
        Example("For one memcg?", "stock --memcg /files/*"),
        Example(
            "Which are the largest amounts?", "stock --sort charged --fields cpu,memcg,charged"
        ),
    ),
    "tasks": (
        Example("Which memcg is each task in?", "tasks --sort memcg:desc"),
        Example("Which tasks are in one memcg?", "tasks --memcg /files/*"),
        Example(
            "Which obj_cgroups do they charge?", "tasks --memcg /files/* --fields pid,objcg,node"
        ),
    ),
    "dying": (
        Example("What keeps removed memcgs alive?", "dying", _DYING),
        Example("Which memcgs are they?", "dying --each --fields memcg,references,bytes", _DYING),
        Example(
            "What holds one of them, and where is it?", "dying --memcg /dying/family/a", _DYING
        ),
    ),
    "rss": (
        Example("How far off are the counters of processes?", "rss --memcg /rss/hopping-*", _RSS),
        Example("Which error is the largest?", "rss --sort error:asc", _RSS),
        Example(
            "What do the page tables say?",
            "rss --check --memcg /rss/hopping-0 --fields item,exact,mapped,difference,status",
            _RSS,
        ),
    ),
    "drift": (
        Example("Which counters are far off?", "drift --sort error:asc", _BUSY),
        Example("Those of one memcg?", "drift --memcg /churn/group-1", _BUSY),
        Example(
            "Which CPU holds what is missing?",
            "drift --memcg /churn/* --fields memcg,item,error,cpu,cpu_holds",
            _BUSY,
        ),
    ),
    "allocinfo": (
        Example("Which lines of code allocated most?", "allocinfo --top 3", _PROFILED),
        Example(
            "For one memcg?",
            "allocinfo --by memcg,site --memcg /files/web --top 3 --fields bytes,calls,site",
            _PROFILED,
        ),
        Example("What does allocation profiling itself cost?", "allocinfo --overhead", _PROFILED),
    ),
    "who": (
        Example("What is at this address, and who pays for it?", "who {slab}", _DYING),
        Example("Of a percpu pointer?", "who {percpu}", _DYING),
        Example("Of two addresses at once, in a short form?", "who {lru} {zswap}", _DYING),
    ),
}


def examples_of(command: str) -> Callable[[], str]:
    """Return a function that makes the block of a command."""
    return lambda: fenced("\n\n".join(map(_shown, EXAMPLES[command])))


def _shown(example: Example) -> str:
    core = images.image(**{"kernel": "7.3", "nodes": "4", "workload": "mixed", **example.image})
    known = _addresses(core) if "{" in example.words else {}
    words = shlex.split(example.words.format(**known))
    output = _on_terminal(words, core)
    lines = shortened(output, None, most_rows=MOST_ROWS).splitlines()
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = ["[...]"]
    command = f"$ memcg-inspect {example.words.format(**known)} -c vmcore"
    return "\n".join([example.question, command, *lines]).rstrip()


def _on_terminal(words: list[str], core: Path) -> str:
    """Return what a command writes to a terminal of :data:`COLUMNS` columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    # Options that no reader needs stay out of the commands that the program shows.
    command = [sys.executable, "-m", "memcg_inspect", *words, "-c", str(core)]
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        [*command, "--debuginfo", "btf"], cwd=ROOT, stdout=theirs, env=env | {"TERM": "xterm"}
    ) as process:
        os.close(theirs)
        shown = b"".join(_read(ours)).decode().replace("\r\n", "\n")
        status = process.wait()
    os.close(ours)
    if status:
        raise LabError(f"{shlex.join(words)}: exit status {status}")
    return _ESCAPES.sub("", shown).replace(f"-c {core} --debuginfo btf", "-c vmcore")


def _read(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # how a terminal says that nobody is left
            return
        yield data


def _addresses(core: Path) -> dict[str, str]:
    """Return an address of each kind that ``dying`` names as an example."""
    words = ("dying", "--json", "--memcg", "/dying/family/a", "--debuginfo", "btf", "-c", str(core))
    done = subprocess.run(
        [sys.executable, "-m", "memcg_inspect", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    left = json.loads(done.stdout)["tables"][1]["rows"]
    return {row["kind"]: row["examples"].split()[0] for row in left if row["examples"]}
