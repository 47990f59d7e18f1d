# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Pictures
--------

Amounts as SVG: tree maps, heat maps and bars. Each shape has a title with what it shows and the
exact amount, and the amount as an attribute, ``data-amount``. Colours come from classes, so that
the page that has the picture decides on them. Names are untrusted input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from memcg_inspect.escape import printable
from memcg_inspect.model import counted
from memcg_inspect.render.text import size

__all__ = ("Bar", "Tile", "bars", "heat_map", "tree_map")

WIDTH = 960
_TREE_HEIGHT = 420
_GAP = 2
#: Height of the heading of a group in a tree map, and of a row of the others.
_HEADING, _ROW = 18, 22
#: Width of the column of names.
_NAMES = 300
#: About the width of a character.
_CHARACTER = 7.0
#: Colours of kinds, by class: ``kind-0`` and so on.
_COLOURS = 8
_OTHERS = "(other kinds)"
#: Names of colours in a line.
_IN_LINE = 4


class Tile(NamedTuple):
    """
    One part of a tree map.

    :ivar group: the part of the whole that it is in
    :ivar name: its name
    :ivar kind: decides on its colour
    :ivar amount: bytes
    """

    group: str
    name: str
    kind: str
    amount: int


class Bar(NamedTuple):
    """
    One bar.

    :ivar name: its name
    :ivar parts: bytes by the name of the part; those below 0 grow to the left
    """

    name: str
    parts: Mapping[str, int]


class _Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float


def tree_map(tiles: Sequence[Tile]) -> str:
    """Return a tree map: areas are as the amounts, first by group, and then within each group."""
    tiles = sorted((tile for tile in tiles if tile.amount > 0), key=_largest)
    groups: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for tile in tiles:
        groups[tile.group] += tile.amount
        kinds[tile.kind] += tile.amount
    colours = _colours([kind for kind, _ in kinds.most_common()])
    parts, ranked = list[str](), groups.most_common()
    whole = _Box(0, 0, WIDTH, _TREE_HEIGHT)
    for (group, total), box in zip(ranked, _squares([n for _, n in ranked], whole), strict=True):
        inner = _Box(box.x, box.y + _HEADING, box.width, box.height - _HEADING)
        heading = _fitting(f"{group}: {size(total)}", box.width)
        if inner.height < 1:
            inner, heading = box, ""
        parts.append(_text(box.x + 3, box.y + 13, heading, "heading"))
        some = [tile for tile in tiles if tile.group == group]
        for tile, place in zip(some, _squares([t.amount for t in some], inner), strict=True):
            parts += _tile(tile, place, colours.get(tile.kind, _COLOURS - 1))
    legend = _legend(colours, _TREE_HEIGHT + 16)
    return _svg(_TREE_HEIGHT + _legend_height(colours), "tree-map", [*parts, *legend])


def _colours(names: Sequence[str]) -> dict[str, int]:
    """Return a colour for each of the first names, and the last one for all others."""
    if len(names) <= _COLOURS:
        return {name: n for n, name in enumerate(names)}
    first = {name: n for n, name in enumerate(names[: _COLOURS - 1])}
    return {**first, _OTHERS: _COLOURS - 1}


def _largest(tile: Tile) -> tuple[int, str]:
    return -tile.amount, tile.name


def _tile(tile: Tile, box: _Box, colour: int) -> Iterator[str]:
    width, height = max(box.width - _GAP, 0.2), max(box.height - _GAP, 0.2)
    names = ", ".join(filter(None, (tile.name, tile.kind, tile.group)))
    title = f"{names}: {counted(tile.amount, 'bytes')}"
    yield (
        f'<rect class="kind-{colour}" x="{box.x:.1f}" y="{box.y:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" data-amount="{tile.amount}"><title>{_safe(title)}</title></rect>'
    )
    if height >= _HEADING:
        yield _text(box.x + 3, box.y + 13, _fitting(tile.name, width - 6), "label")


def _squares(amounts: Sequence[int], box: _Box) -> list[_Box]:
    """
    Divide a box into parts with areas as the amounts, and sides as equal as can be.

    Squarified: M. Bruls, K. Huizing, J. van Wijk, "Squarified Treemaps", 2000.

    :param amounts: in descending order, all above 0
    """
    found = list[_Box]()
    scale = box.width * box.height / (sum(amounts) or 1)
    areas = [amount * scale for amount in amounts]
    while areas:
        side = min(box.width, box.height)
        row = 1
        while row < len(areas) and _worst(areas[: row + 1], side) <= _worst(areas[:row], side):
            row += 1
        depth = sum(areas[:row]) / side if side > 0 else 0
        at = 0.0
        for area in areas[:row]:
            length = area / depth if depth > 0 else 0
            if box.width >= box.height:
                found.append(_Box(box.x, box.y + at, depth, length))
            else:
                found.append(_Box(box.x + at, box.y, length, depth))
            at += length
        if box.width >= box.height:
            box = _Box(box.x + depth, box.y, max(box.width - depth, 0), box.height)
        else:
            box = _Box(box.x, box.y + depth, box.width, max(box.height - depth, 0))
        areas = areas[row:]
    return found


def _worst(areas: Sequence[float], side: float) -> float:
    """Return the worst ratio of the sides of the parts of a row."""
    total = sum(areas)
    if not side or not total or not min(areas):
        return float("inf")
    return max(side**2 * max(areas) / total**2, total**2 / (side**2 * min(areas)))


def heat_map(
    rows: Sequence[str], columns: Sequence[str], amounts: Mapping[tuple[str, str], int]
) -> str:
    """
    Return a table of amounts whose cells are the darker, the larger the amount is.

    :param amounts: bytes by row and column
    """
    most = max((abs(amount) for amount in amounts.values()), default=0) or 1
    width = min(140.0, (WIDTH - _NAMES) / max(len(columns), 1))
    parts = [
        _text(_NAMES + n * width + 4, 14, _fitting(name, width - 4), "heading")
        for n, name in enumerate(columns)
    ]
    for line, row in enumerate(rows):
        y = _ROW * (line + 1)
        parts.append(_text(0, y + 15, _fitting(row, _NAMES - 8), "label"))
        for n, column in enumerate(columns):
            amount = amounts.get((row, column), 0)
            x, share = _NAMES + n * width, (abs(amount) / most) ** 0.5
            title = f"{row}, {column}: {counted(amount, 'bytes')}"
            parts.append(
                f'<rect class="heat" x="{x:.1f}" y="{y}" width="{width - _GAP:.1f}" '
                f'height="{_ROW - _GAP}" fill-opacity="{share:.3f}" data-amount="{amount}">'
                f"<title>{_safe(title)}</title></rect>"
            )
            shown = _fitting(size(amount), width - 6) if amount else ""
            strong = " strong" if share > 0.88 else ""
            parts.append(_text(x + 4, y + 15, shown, f"value{strong}"))
    return _svg(_ROW * (len(rows) + 1), "heat-map", parts)


def bars(some: Sequence[Bar]) -> str:
    """Return bars of several parts. Parts below 0 are to the left of the line of 0."""
    colours = _colours(list(dict.fromkeys(name for bar in some for name in bar.parts)))
    left = max((-sum(v for v in bar.parts.values() if v < 0) for bar in some), default=0)
    right = max((sum(v for v in bar.parts.values() if v > 0) for bar in some), default=0)
    scale = (WIDTH - _NAMES - 100) / ((left + right) or 1)
    zero = _NAMES + left * scale
    parts = list[str]()
    for line, bar in enumerate(some):
        y, ends = line * _ROW, {True: zero, False: zero}
        parts.append(_text(0, y + 15, _fitting(bar.name, _NAMES - 8), "label"))
        for name, amount in bar.parts.items():
            length = abs(amount) * scale
            x = ends[True] if amount > 0 else ends[False] - length
            ends[amount > 0] += length if amount > 0 else -length
            title = f"{bar.name}, {name}: {counted(amount, 'bytes')}"
            parts.append(
                f'<rect class="kind-{colours.get(name, _COLOURS - 1)}" x="{x:.1f}" y="{y + 3}" '
                f'width="{length:.1f}" height="{_ROW - 6}" data-amount="{amount}">'
                f"<title>{_safe(title)}</title></rect>"
            )
        parts.append(_text(ends[True] + 4, y + 15, size(sum(bar.parts.values())), "value"))
    height = _ROW * len(some)
    height_of_all = height + _legend_height(colours)
    return _svg(height_of_all, "bars", [*parts, *_legend(colours, height + 16)])


def _legend(colours: Mapping[str, int], y: float) -> Iterator[str]:
    """Return names of colours, four in a line."""
    width = WIDTH / _IN_LINE
    for number, (name, colour) in enumerate(colours.items()):
        x, at = number % _IN_LINE * width, y + number // _IN_LINE * _HEADING
        yield f'<rect class="kind-{colour}" x="{x:.1f}" y="{at - 10:.1f}" width="10" height="10"/>'
        yield _text(x + 14, at, _fitting(name or "-", width - 20), "legend")


def _legend_height(colours: Mapping[str, int]) -> int:
    return 8 + _HEADING * -(-len(colours) // _IN_LINE)


def _svg(height: float, name: str, parts: Sequence[str]) -> str:
    body = "\n".join(filter(None, parts))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{name}" role="group" '
        f'aria-label="{name.replace("-", " ")}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}">\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, name: str) -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}">{_safe(text)}</text>' if text else ""


def _fitting(text: str, width: float) -> str:
    """Return a text as far as it fits: the end of a path tells more than its beginning."""
    most = int(width / _CHARACTER)
    text = printable(text)
    if len(text) <= most:
        return text
    if most > 3:
        return f"…{text[-(most - 1) :]}"
    return text[-most:].strip() if most else ""


def _safe(text: str) -> str:
    return escape(printable(text))
