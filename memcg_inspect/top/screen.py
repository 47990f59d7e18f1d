# SPDX-License-Identifier: LGPL-2.1-or-later
"""What top shows on a terminal of some size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from memcg_inspect.escape import printable
from memcg_inspect.render.fitting import short_paths
from memcg_inspect.top.lines import FAULT, Line

__all__ = (
    "HELP",
    "Page",
    "Shown",
    "compact",
    "help_lines",
    "natural_size",
    "page_lines",
    "room_for_lines",
    "room_for_nodes",
)

#: Columns for an amount, a rate, and marks, with the space before them.
_AMOUNT, _RATE, _MARKS = 8, 10, 3
#: The least width of labels, and of a path in the state.
_LABEL = 12
_GAP = "  "
#: Lines that are not lines of the table: title, state, heads, keys.
_OTHERS = 4

HELP = (
    "up, down, PgUp, PgDn, Home, End   choose a line",
    "Enter         show what this memcg is charged for: kinds, caches, call sites",
    "Tab           show the next of these",
    "Esc           cancel what is being read; go back to all memcgs",
    "i, I          show the next, the previous item of memory.stat",
    "<, >          sort by the column to the left, to the right",
    "R             sort the other way round",
    "left, right   show other nodes, if there are more than fit",
    "/             show only lines with this text; Ctrl-U erases it",
    "r             hide removed memcgs, or show them",
    "a             audit now, and mark memcgs with findings with !",
    "Space         read now",
    "q             quit",
    "",
    "Amounts include descendants. They are what memory.stat shows after a flush.",
    "K, M, G and T are powers of 1,024 bytes. D: removed, but not freed yet.",
    "The pause after a read is at least nine times as long as its CPU time.",
)


class Shown(NamedTuple):
    """
    What is shown, and how.

    :ivar sort: as in :func:`~memcg_inspect.top.lines.sorted_lines`
    :ivar chosen: index of the line that is chosen; ``None`` for none
    :ivar first: index of the first line
    :ivar first_node: index of the first node
    """

    sort: str
    chosen: int | None = None
    first: int = 0
    first_node: int = 0


class Page(NamedTuple):
    """
    One page.

    :ivar title: parts of the first line, which has as many of them as fit
    :ivar state: parts of the second line, likewise: what is not as usual comes first
    :ivar path: at the end of the second line; its beginning is cut off
    :ivar label: head of the labels
    :ivar nodes: nodes of the amounts of lines
    :ivar lines: in order
    :ivar keys: last line
    :ivar is_alarm: whether the state is bad news
    """

    title: tuple[str, ...]
    state: tuple[str, ...]
    path: str
    label: str
    nodes: tuple[int, ...]
    lines: Sequence[Line]
    keys: str = ""
    is_alarm: bool = False


def compact(value: float | None, is_signed: bool = False) -> str:
    """Format bytes in at most seven columns: ``1.2G``; ``-`` if they are not known."""
    if value is None:
        return "-"
    sign = "+" if is_signed and value > 0 else ""
    amount = float(value)
    for unit in ("", "K", "M", "G"):
        # 1,023.96 would be shown as 1,024.0.
        if abs(amount) < 1023.95:
            return f"{sign}{amount:.0f}{unit}" if not unit else f"{sign}{amount:.1f}{unit}"
        amount /= 1024
    return f"{sign}{amount:.1f}T" if abs(amount) < 1e4 else f"{sign}{amount:.1e}T"


def room_for_lines(height: int) -> int:
    """Return how many lines of a table there is room for."""
    return max(1, height - _OTHERS)


def room_for_nodes(width: int) -> int:
    """Return how many nodes there is room for."""
    return max(0, (width - _MARKS - _LABEL - _AMOUNT - _RATE) // _AMOUNT)


def help_lines(part: int, height: int) -> list[Text]:
    """Return a part of the help that fits; nothing after the last one."""
    room = max(1, height - 1)
    lines = HELP[part * room :][:room]
    if not lines:
        return []
    return [Text(line, no_wrap=True, overflow="ellipsis") for line in (*lines, "Press any key.")]


def page_lines(page: Page, shown: Shown, width: int, height: int) -> list[Text]:
    """Return the lines of a terminal, at most *height*, none wider than *width*."""
    heads, nodes = _heads(page, shown, width)
    label_width = max(1, width - sum(_width(head) for head in heads) - _MARKS)
    lines = page.lines[shown.first : shown.first + room_for_lines(height)]
    # Names come from the image.
    names = short_paths([printable(line.label) for line in lines], label_width, "…")
    labels = [_cut(name, label_width) for name in names]
    found = [
        _plain(_joined(page.title, _GAP, width), width, "bold"),
        _plain(_state(page, width), width, "bold red" if page.is_alarm else ""),
        _head_line(page.label, heads, shown.sort, label_width),
    ]
    for number, (line, label) in enumerate(zip(lines, labels, strict=True)):
        is_chosen = shown.first + number == shown.chosen
        found.append(_table_line(line, label, nodes, label_width, is_chosen))
    if height - len(found) > 1:
        found += [Text("")] * (height - len(found) - 1)
    return [*found, _plain(page.keys, width, "dim")][:height]


def natural_size(page: Page) -> tuple[int, int]:
    """Return the columns and lines that a page needs to be shown whole."""
    labels = [cell_len(printable(line.label)) for line in page.lines]
    label = max([_LABEL, len(page.label), *labels])
    width = label + _MARKS + _AMOUNT + _RATE + _AMOUNT * len(page.nodes)
    title = cell_len(printable(_GAP.join(page.title)))
    state = cell_len(printable("; ".join((*page.state, page.path))))
    return max(width, title, state), len(page.lines) + _OTHERS


def _joined(parts: Sequence[str], between: str, width: int) -> str:
    """Return as many parts as fit, at least one."""
    shown = [printable(part) for part in parts if part]
    while len(shown) > 1 and cell_len(between.join(shown)) > width:
        shown.pop()
    return between.join(shown)


def _state(page: Page, width: int) -> str:
    if not page.path:
        return _joined(page.state, "; ", width)
    text = f"{_joined(page.state, '; ', width - _LABEL)}; "
    path = printable(page.path)
    return text + _cut(path, max(_LABEL, width - cell_len(text)))


def _cut(name: str, width: int) -> str:
    """Return a name that fits: of a path, the end tells most."""
    if cell_len(name) <= width:
        return name
    first = next(n for n in range(1, len(name) + 1) if cell_len(name[n:]) < width)
    return f"…{name[first:]}"


def _heads(page: Page, shown: Shown, width: int) -> tuple[list[str], list[int]]:
    """Return the heads of columns that fit, and the indexes of the nodes among them."""
    most = room_for_nodes(width)
    first = max(0, min(shown.first_node, len(page.nodes) - most))
    nodes = list(range(len(page.nodes)))[first:][:most]
    return ["total", "rate/s", *(f"node {page.nodes[n]}" for n in nodes)], nodes


def _width(head: str) -> int:
    return _RATE if head == "rate/s" else _AMOUNT


def _plain(text: str, width: int, style: str) -> Text:
    return Text(set_cell_size(printable(text), width).rstrip(), style=style, no_wrap=True)


def _head_line(label: str, heads: Sequence[str], sort: str, width: int) -> Text:
    sort = {"rate": "rate/s", "name": label}.get(sort, sort)
    text = Text(no_wrap=True)
    text.append(set_cell_size(label, width), "bold underline" if sort == label else "bold")
    text.append(" " * _MARKS)
    for head in heads:
        room = _width(head) - len(head)
        text.append(" " * room)
        text.append(head, "bold underline" if head == sort else "bold")
    return text


def _table_line(line: Line, label: str, nodes: Sequence[int], width: int, is_chosen: bool) -> Text:
    style = "bold red" if FAULT in line.marks else "dim" if line.marks else ""
    text = Text(no_wrap=True, style="reverse" if is_chosen else "")
    text.append(label + " " * max(0, width - cell_len(label)), style)
    text.append(f" {line.marks:<{_MARKS - 1}}", style)
    text.append(f"{compact(line.total):>{_AMOUNT}}")
    grows = line.rate is not None and line.rate > 0
    text.append(f"{_rate(line.rate):>{_RATE}}", "yellow" if grows else "")
    for number in nodes:
        text.append(f"{compact(line.nodes[number]):>{_AMOUNT}}")
    return text


def _rate(value: float | None) -> str:
    return "0" if value is not None and round(value) == 0 else compact(value, is_signed=True)
