# SPDX-License-Identifier: LGPL-2.1-or-later
"""What is at an address, to the last layer, and who pays for it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

from memcg_inspect.collect.image_info import image_info
from memcg_inspect.image.image import Image
from memcg_inspect.tables import Answer, Column, NotRead, Table, UsageError, Value
from memcg_inspect.views.layers import Layers
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.things import Layer
from memcg_inspect.views.view import Argument, View

__all__ = ("VIEW", "parse_address", "who")

COLUMNS = (
    Column("address", "address", "what was asked for", shown=False),
    Column("layer", "text", "what sort of thing it is in, the outermost first"),
    Column("what", "text", "which one"),
    Column("start", "address", "where that begins"),
    Column("offset", "number", "bytes into it"),
    Column("size", "bytes", "of it"),
    Column("node", "node", "node that backs it"),
    Column("memcg", "memcg", "memcg that pays for it, or that it belongs to"),
    Column("memcg_address", "address", "struct mem_cgroup *", shown=False),
    Column("removed", "flag", "whether that memcg was removed", shown=False),
    Column("objcg", "address", "struct obj_cgroup * that is charged"),
    Column("charged_node", "node", "node of that, where there is one for each node"),
    Column("charged", "bytes", "bytes that are charged for it; 0: nobody pays"),
    Column("left_by", "memcg", "the removed memcg that it was charged for, if one still tells"),
)

_UNKNOWN = "nothing that is known"


def who(image: Image, addresses: Sequence[int]) -> Answer:
    """
    Return what is at each address, or a note that there is nothing.

    :raises UsageError: if none is of anything that is known, in an image that lacks nothing
    """
    payers = Payers(image)
    layers = Layers(image, payers)
    tables = tuple(_table(layers, address) for address in addresses)
    coverage = dict(payers.coverage)
    unknown: list[str] = []
    # Where something could not be read, it may be there.
    if not any(c.unreadable for c in coverage.values()):
        unknown = [table.title for table in tables if not table.rows]
    if not unknown:
        return Answer("who", image_info(image), tables, coverage)
    is_one = len(unknown) == 1
    note = (
        f"{', '.join(unknown)} {'is no address' if is_one else 'are no addresses'} of anything "
        "that is known"
    )
    if len(unknown) == len(tables):
        raise UsageError(note)
    tables = tuple(table if table.rows else replace(table, empty=_UNKNOWN) for table in tables)
    return Answer("who", image_info(image), tables, coverage, (f"{note}.",), unanswered=True)


def _table(layers: Layers, address: int) -> Table:
    rows = [_row(layers, address, layer) for layer in layers.of(address)]
    return Table("who", f"{address:#x}", COLUMNS, rows, empty="nothing that could be read")


def _row(layers: Layers, address: int, layer: Layer) -> tuple[Value, ...]:
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
    left_by = layers.things.made_for.get(objcg) if objcg else None
    return (
        address, layer.layer, layer.what, layer.start, layer.offset, layer.size, layer.nid,
        path, memcg, removed, objcg, nid, layer.charged,
        payers.path(left_by if left_by != memcg else None),
    )  # fmt: skip


def parse_address(word: str) -> int:
    """
    Read an address, hexadecimal with 0x or without.

    :raises UsageError: if it is none
    """
    try:
        address = int(word, 16)
    except ValueError:
        address = -1
    if not 0 <= address < 1 << 64:
        raise UsageError(f"{word} is no address: it takes a hexadecimal number")
    return address


def _run(image: Image, args: Namespace) -> Answer:
    return who(image, [parse_address(word) for word in args.address])


VIEW = View(
    name="who",
    help="what is at an address, and who pays for it",
    description="Tells what each address is in: page, area, object, and what that is for; the "
    "obj_cgroup and the memcg that pay; and, with allocation profiling, where in the code it "
    "was allocated.",
    run=_run,
    arguments=(
        Argument(
            ("address",),
            {
                "metavar": "ADDRESS",
                "nargs": "+",
                "help": "hexadecimal, with 0x or without: a virtual address, a __percpu pointer, "
                "or the address of a struct page, an obj_cgroup, a mem_cgroup",
            },
        ),
    ),
    choices=("fields",),
)
