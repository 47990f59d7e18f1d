# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``lru`` must name."""

from __future__ import annotations

import re

import drgn
from drgn import Object

from memcg_inspect.checks.identities.lru import lru_rows
from support.planting import Fault, NoVictim, Planter, Subject


def _enumerators(prog: drgn.Program, name: str) -> dict[str, int]:
    return {e.name: e.value for e in prog.type(name).enumerators}


def list_size(subject: Subject, size: int) -> Fault:
    """Change the size of the longest list of a victim, which has the name of the row."""
    victims = {subject.paths[path] for path in subject.victims()}
    rows = [row for row in lru_rows(subject.snapshot) if row.memcg in victims]
    row = max(rows, key=lambda row: row.found["lru"], default=None)
    if row is None or not row.found["lru"]:
        raise NoVictim("no memcg has pages on a list")
    path = subject.path(row.memcg or 0)
    place = _place(subject.memcg(path).nodeinfo[row.nid], row.item)
    return Fault((subject.add(place, size),), (path,), {(path, row.nid, row.item, size)})


def _place(node: Object, item: str) -> Object:
    """Return the element of ``lru_zone_size`` or ``lrugen.nr_pages`` that a row is named after."""
    prog = node.prog_
    lists, zones = _enumerators(prog, "enum lru_list"), _enumerators(prog, "enum zone_type")
    indices = re.findall(r"\[(\w+)\]", item)
    if item.startswith("lrugen."):
        array, lengths = node.lruvec.lrugen.nr_pages, (2, zones["__MAX_NR_ZONES"])
    else:
        array, lengths = node.lru_zone_size, (lists["NR_LRU_LISTS"],)
    constants = {"LRU_GEN_ANON": 0, "LRU_GEN_FILE": 1, **lists, **zones}
    numbers = [constants[i] if i in constants else int(i) for i in indices]
    # BTF has one dimension where the kernel has several.
    index = numbers[0]
    for number, length in zip(numbers[1:], lengths, strict=True):
        index = index * length + number
    return Object(prog, "long", address=array.address_ + index * drgn.sizeof(prog.type("long")))


PLANTERS = (Planter("the size of a list", list_size, (3, 1, -1, 4_000)),)
