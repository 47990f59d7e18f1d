# SPDX-License-Identifier: LGPL-2.1-or-later
"""Find the words of memory that counters are in, where counters are wrong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.memcontrol import nodeinfo
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader, lruvec_items, memcg_items
from memcg_inspect.linux.mm.mm_inline import LruReader
from memcg_inspect.linux.mm.page_counter import page_counter_words
from memcg_inspect.linux.mm.vmstat import node_stat_words, zone_stat_words
from memcg_inspect.model import Coverage
from memcg_inspect.model_counters import CounterWord
from memcg_inspect.report import Finding

__all__ = ("find_words",)

#: Memcgs whose words are read.
_MOST_MEMCGS = 64


def find_words(image: Image, findings: Sequence[Finding]) -> list[CounterWord]:
    """
    Return the words of the counters of each memcg, and of each node, with findings.

    Those with most findings are read; there may be too many.

    What cannot be read is left out: a diagnosis is true without it, too.
    """
    nids: defaultdict[int | None, set[int | None]] = defaultdict(set)
    items: defaultdict[int | None, set[tuple[str, int | None]]] = defaultdict(set)
    for finding in findings:
        nids[finding.memcg].add(finding.nid)
        items[finding.memcg].add((finding.item, finding.nid))
    most = sorted(items, key=lambda memcg: len(items[memcg]), reverse=True)
    found: list[CounterWord] = []
    for memcg in most[:_MOST_MEMCGS]:
        try:
            found += _words(image, memcg, nids[memcg])
        except FaultError:
            continue
    return found


def _words(image: Image, memcg: int | None, nids: set[int | None]) -> Iterator[CounterWord]:
    if memcg is None:
        for nid in nids:
            if nid is not None and nid >= 0:
                for word in (*node_stat_words(image, nid), *zone_stat_words(image, nid)):
                    yield word._replace(nid=nid)
        return
    reader = StatReader(image, dict.fromkeys((*memcg_items(image), *lruvec_items(image))))
    lists = LruReader(image, Coverage())
    of = image.pointer("struct mem_cgroup *", memcg)
    for word in (*reader.memcg_words(of), *page_counter_words(image, of)):
        yield word._replace(memcg=memcg)
    for nid, pn in nodeinfo(image, of):
        if nid in nids:
            for word in (*reader.lruvec_words(pn), *lists.words(pn)):
                yield word._replace(memcg=memcg, nid=nid)
