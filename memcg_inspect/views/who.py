# SPDX-License-Identifier: LGPL-2.1-or-later
"""What is at an address, layer by layer, and who pays for it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from memcg_inspect.collect.image_info import image_info
from memcg_inspect.image.image import Image
from memcg_inspect.tables import (
    Answer,
    Field,
    MemcgAddress,
    NotRead,
    Table,
    UsageError,
    Value,
    columns_of,
)
from memcg_inspect.views.layers import AddressLayers
from memcg_inspect.views.object_uses import Layer
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.view import Argument, View

__all__ = ("VIEW", "WhoRow", "parse_address", "who")


@dataclass(frozen=True)
class WhoRow:
    """One layer of what is at an address; the outermost comes first."""

    address: Annotated[int, Field("address", "the address asked for", shown=False)]
    layer: Annotated[str, Field("text", "kind of layer, e.g. page, memory area, slab, object")]
    what: Annotated[Value, Field("text", "description of the layer", priority=9)]
    start: Annotated[int | None, Field("address", "start of the layer", priority=8)]
    offset: Annotated[
        int | None, Field("number", "offset of the address in the layer, in bytes", priority=6)
    ]
    size: Annotated[int | None, Field("bytes", "size of the layer", priority=7)]
    node: Annotated[int | None, Field("node", "node of its memory", priority=6)]
    memcg: Annotated[
        Value, Field("memcg", "memcg that pays for it, or that it belongs to", priority=8)
    ]
    memcg_address: MemcgAddress
    removed: Annotated[Value, Field("flag", "whether that memcg was removed", shown=False)]
    objcg: Annotated[
        int | None, Field("address", "struct obj_cgroup * that is charged", priority=4)
    ]
    charged_node: Annotated[
        int | None,
        Field("node", "node of that obj_cgroup, on kernels that have one per node", priority=3),
    ]
    charged: Annotated[
        int | None, Field("bytes", "bytes charged for it; 0 if no memcg pays", priority=6)
    ]
    left_by: Annotated[
        Value,
        Field("memcg", "removed memcg that it was charged to, if that is still known", priority=6),
    ]


_UNKNOWN = "unknown address"


def who(image: Image, addresses: Sequence[int]) -> Answer:
    """
    Return the layers of each address, and a note about unknown addresses.

    :raises UsageError: if all addresses are unknown, although everything needed could be read
    """
    payers = Payers(image)
    layers = AddressLayers(image, payers)
    tables = tuple(_table(layers, address) for address in addresses)
    coverage = dict(payers.coverage)
    unknown: list[str] = []
    # An address may belong to something that could not be read.
    if not any(c.unreadable for c in coverage.values()):
        unknown = [table.title for table in tables if not table.rows]
    if not unknown:
        return Answer("who", image_info(image), tables, coverage)
    plural = "" if len(unknown) == 1 else "es"
    note = f"unknown address{plural}: {', '.join(unknown)}"
    if len(unknown) == len(tables):
        raise UsageError(note)
    tables = tuple(table if table.rows else replace(table, empty=_UNKNOWN) for table in tables)
    return Answer(
        "who", image_info(image), tables, coverage, (f"{note.capitalize()}.",), unanswered=True
    )


def _table(layers: AddressLayers, address: int) -> Table:
    rows = [_row(layers, address, layer) for layer in layers.of(address)]
    title, empty = f"{address:#x}", "nothing could be read"
    return Table("who", title, columns_of(WhoRow), rows, empty=empty)


def _row(layers: AddressLayers, address: int, layer: Layer) -> WhoRow:
    payers, memcg, objcg, nid = layers.payers, None, None, None
    path: Value = None
    removed: Value = None
    if layer.payer:
        memcg = layer.payer if layer.payer in payers.memcgs else None
        if memcg is None:
            objcg = layer.payer
            found = payers.objcg(objcg)
            memcg, nid = (None, None) if found is None else (found.memcg, found.nid)
        if memcg is not None and memcg in payers.memcgs:
            path, removed = payers.memcgs[memcg].path, payers.memcgs[memcg].state == "dying"
        else:
            path = NotRead(f"there is no obj_cgroup or memcg at {layer.payer:#x}")
    left_by = layers.uses.original_memcg.get(objcg) if objcg else None
    return WhoRow(
        address=address,
        layer=layer.layer,
        what=layer.what,
        start=layer.start,
        offset=layer.offset,
        size=layer.size,
        node=layer.nid,
        memcg=path,
        memcg_address=memcg,
        removed=removed,
        objcg=objcg,
        charged_node=nid,
        charged=layer.charged,
        left_by=payers.path(left_by if left_by != memcg else None),
    )


def parse_address(word: str) -> int:
    """
    Parse a hexadecimal address, with or without ``0x``.

    :raises UsageError: if it is not a hexadecimal number of 64 bits
    """
    try:
        address = int(word, 16)
    except ValueError:
        address = -1
    if not 0 <= address < 1 << 64:
        raise UsageError(f"{word} is not an address: an address is a hexadecimal number")
    return address


def _run(image: Image, args: Namespace) -> Answer:
    return who(image, [parse_address(word) for word in args.address])


VIEW = View(
    name="who",
    description="Shows for each address the page or memory area, the object in it and its use, and "
    "the obj_cgroup and memcg that pay. With allocation profiling, also shows the line of code "
    "that allocated it.",
    run=_run,
    records=(WhoRow,),
    arguments=(
        Argument(
            ("address",),
            {
                "metavar": "ADDRESS",
                "nargs": "+",
                "help": "a hexadecimal number, with or without 0x: a virtual address, a __percpu "
                "pointer, or the address of a struct page, obj_cgroup or mem_cgroup",
            },
        ),
    ),
    choices=("fields",),
    incomplete="something could not be read, or nothing is known at some addresses",
)
