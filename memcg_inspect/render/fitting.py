# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Tables that fit on a terminal
-----------------------------

Text is folded, paths lose their beginning, and columns are left out, until a table fits. Numbers
are never cut.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from memcg_inspect.tables import CHOSEN, Column

__all__ = ("Fit", "fitted", "short_paths")

#: Spaces between columns, and fewer if there is not enough room.
_GAPS = (3, 2)
#: The least width of a column of paths, and of one of text. A longer word makes the latter wider.
_NARROWEST_PATH, _NARROWEST_TEXT, _LONGEST_WORD = 30, 12, 24
#: The identifier of a container in its name: 12 digits are mostly enough, or else 5.
_IDENTIFIERS = tuple(
    re.compile(f"([0-9a-f]{{{digits}}})[0-9a-f]{{{32 - digits},}}") for digits in (12, 5)
)


class Fit(NamedTuple):
    """
    How a table is laid out.

    :ivar shown: indexes of the columns that are shown
    :ivar widths: their widths
    :ivar gap: spaces between them
    """

    shown: Sequence[int]
    widths: Sequence[int]
    gap: int


def fitted(
    columns: Sequence[Column],
    lines: Sequence[Sequence[str]],
    room: int | None,
    keep: Iterable[int] = (0,),
) -> Fit:
    """
    Lay a table out.

    :param lines: cells of all lines, the headings among them
    :param room: columns of the terminal; ``None`` if it is not a terminal
    :param keep: indexes of the columns that are never left out
    """
    cells = list(zip(*lines, strict=True))
    widths = [max(map(cell_len, column)) for column in cells]
    shown, keep = list(range(len(columns))), set(keep)
    if room is None:
        return Fit(shown, widths, _GAPS[0])
    least = [
        min(width, _least_width(column, found))
        for column, width, found in zip(columns, widths, cells, strict=True)
    ]
    while True:
        for gap in _GAPS:
            # A space is at the beginning of each line.
            left = room - 1 - gap * (len(shown) - 1)
            if sum(widths[i] for i in shown) <= left:
                return Fit(shown, [widths[i] for i in shown], gap)
        if sum(least[i] for i in shown) <= left:
            return Fit(shown, _narrowed(shown, widths, least, left), gap)
        others = [i for i in shown if i not in keep and columns[i].priority < CHOSEN]
        if not others:
            return Fit(shown, [widths[i] for i in shown], gap)
        # Among equal ones the last, and those of all keys of a field together.
        last = columns[min(others, key=lambda i: (columns[i].priority, -i))]
        is_one = last.key is None
        shown = [
            i for i in shown if columns[i] != last and (is_one or columns[i].field != last.field)
        ]


def _least_width(column: Column, cells: Iterable[str]) -> int:
    if column.type == "memcg":
        return _NARROWEST_PATH
    if column.type != "text":
        return max(map(cell_len, cells))
    longest = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
    return max(_NARROWEST_TEXT, min(longest, _LONGEST_WORD))


def _narrowed(
    shown: Sequence[int], widths: Sequence[int], least: Sequence[int], left: int
) -> list[int]:
    """Return widths that together are *left*, the widest column made narrower first."""
    made = {i: widths[i] for i in shown}
    for _ in range(sum(made.values()) - left):
        widest = max((i for i in shown if made[i] > least[i]), key=lambda i: made[i])
        made[widest] -= 1
    return [made[i] for i in shown]


def short_paths(paths: Sequence[str], width: int, ellipsis: str) -> list[str]:
    """
    Return paths that fit into a column, with an ellipsis in place of their beginning.

    Paths that would look alike are returned whole, to be folded.
    """
    short = [_short_path(path, width, ellipsis) for path in paths]
    whole: defaultdict[str, set[str]] = defaultdict(set)
    for path, made in zip(paths, short, strict=True):
        whole[made].add(path)
    return [
        made if len(whole[made]) == 1 else path for path, made in zip(paths, short, strict=True)
    ]


def _short_path(path: str, width: int, ellipsis: str) -> str:
    if cell_len(path) <= width:
        return path
    *above, name = path.split("/")
    tail, room = f"/{name}", width - cell_len(ellipsis)
    for identifier in _IDENTIFIERS:
        if cell_len(tail) > room:
            tail = "/" + identifier.sub(rf"\1{ellipsis}", name)
    if cell_len(tail) > room:
        return ellipsis + set_cell_size(tail[::-1], room).rstrip()[::-1]
    while above and above != [""]:
        if cell_len(f"/{above[-1]}{tail}") > room:
            return ellipsis + tail
        tail = f"/{above.pop()}{tail}"
    # Only the identifier was too long.
    return tail if above else ellipsis + tail
