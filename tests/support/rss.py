# SPDX-License-Identifier: LGPL-2.1-or-later
"""Images of the workload ``rss``, what ``rss`` says of them, and what the guest says."""

from __future__ import annotations

import re
from functools import lru_cache

from memcg_inspect.image.image import image_of
from memcg_inspect.tables import Answer, Value
from memcg_inspect.views.rss import rss
from support.guests import GuestImage, Lab

__all__ = (
    "PROCESSES",
    "STATUS",
    "Rows",
    "by_status",
    "checked",
    "guest_image",
    "number",
    "rows_of",
    "said",
)

PROCESSES = 12
#: What /proc/PID/status calls the items.
STATUS = {"file": "RssFile", "anon": "RssAnon", "swapents": "VmSwap", "shmem": "RssShmem"}

Rows = dict[tuple[int, str], dict[str, Value]]


def guest_image(lab: Lab, kernel: str) -> GuestImage:
    return lab.image(kernel, "4", "rss", cpus=8)


def rows_of(answer: Answer) -> Rows:
    (table,) = answer.tables
    found: Rows = {}
    for row in table.rows:
        values = table.values(row)
        pid, item = values["pid"], values["item"]
        assert isinstance(pid, int)
        assert isinstance(item, str)
        found[pid, item] = values
    return found


@lru_cache(maxsize=4)
def checked(image: GuestImage) -> Rows:
    return rows_of(rss(image_of(image.program()), check=True))


def said(image: GuestImage) -> dict[int, dict[str, int]]:
    """Return the pages that the kernel found in page tables, by process."""
    console = (image.guest / "console").read_text(errors="replace")
    lines = re.findall(r"^rss (\d+) (.*)$", console, re.MULTILINE)
    found = {
        int(pid): {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", rest)}
        for pid, rest in lines
    }
    assert len(found) == PROCESSES
    return found


def number(values: dict[str, Value], *names: str) -> int:
    found = [values[name] for name in names]
    assert all(isinstance(value, int) for value in found), found
    return sum(value for value in found if isinstance(value, int))


def by_status(image: GuestImage, page: int = 4096) -> dict[int, dict[str, int]]:
    """
    Return the pages that /proc/PID/status shows, by process and item.

    :param page: bytes of a page
    """
    found = {}
    for record in (image.guest / "2/proc/tasks").read_text().split("\n\n"):
        told = dict(re.findall(r"^(\w+):\s+(\d+)", record, re.MULTILINE))
        if told and int(told["Pid"]) in said(image):
            found[int(told["Pid"])] = {
                item: int(told[name]) * 1024 // page for item, name in STATUS.items()
            }
    return found
