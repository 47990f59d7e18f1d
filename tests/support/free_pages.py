# SPDX-License-Identifier: LGPL-2.1-or-later
"""Free pages."""

from __future__ import annotations

import drgn
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.mmzone import for_each_online_pgdat

from support.planting import NoVictim


def free_page(prog: drgn.Program, other_than: int) -> int:
    """
    Return a ``struct page *`` on the free lists of another node.

    :raises NoVictim: if there is none: the machine may have one node only
    """
    for pgdat in for_each_online_pgdat(prog):
        if pgdat.node_id.value_() == other_than:
            continue
        for zone in pgdat.node_zones:
            if not zone.present_pages:
                continue  # its lists were never made
            for area in zone.free_area:
                for head in area.free_list:
                    for page in list_for_each_entry("struct page", head.address_of_(), "lru"):
                        return page.value_()
    raise NoVictim("no free page on another node")
