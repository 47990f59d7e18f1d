# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Pages
-----

A report or an answer as one HTML page: pictures, and tables that sort and filter. The page has all
that it needs in itself, and its Content-Security-Policy allows nothing else: neither requests nor
scripts or styles other than its own, whose hashes it has. Names are untrusted input.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files

from memcg_inspect.escape import printable
from memcg_inspect.model import NUMA_NO_NODE, Coverage, ImageInfo, counted
from memcg_inspect.render.pictures import Bar, Tile, bars, heat_map, tree_map
from memcg_inspect.render.text import exact_cell
from memcg_inspect.report import Report
from memcg_inspect.report_tables import TABLES
from memcg_inspect.tables import AMOUNTS, Answer, Column, NotRead, Table, Value

__all__ = ("answer_page", "first_picture", "report_page")

#: The most that all rows of a page take, in characters. The rest of the page takes much less.
_MOST_ROWS = 800_000
#: The most rows of a picture, and tiles of a tree map.
_MOST_LINES, _MOST_TILES, _MOST_GROUPS = 25, 300, 32
#: Tables of more rows have a filter.
_MOST_WITHOUT_FILTER = 8
#: Identities whose counters are in parts that memory.stat does not show.
_FOLDED = ("slab", "percpu")
_PARTS = {"folded": "folded", "pending_cpu": "pending on CPUs", "stock": "in stocks"}
#: What rows of an answer are told apart by, the first ones first.
_LABELS = ("memcg", "cache", "site", "caller", "kind", "what", "item", "zone", "state", "size")
_OTHER = "(others)"
#: Columns of numbers.
_RIGHT = AMOUNTS | {"number", "node"}


def report_page(report: Report, screen: str) -> str:
    """
    Return the page of an audit.

    :param screen: its first screen, as text
    """
    verdict = f'<span class="verdict {report.verdict}">{_safe(report.verdict)}</span>'
    tables = [make(report, False) for name, (_, make) in TABLES.items() if name != "timings"]
    parts = [
        f"<p>{verdict}</p>",
        f"<pre>{_safe_lines(screen)}</pre>",
        *_report_pictures(report),
        *_tables([table for table in tables if table.rows]),
        *_coverage(report.coverage.items()),
    ]
    return _page("audit", report.image, parts)


def answer_page(answer: Answer) -> str:
    """Return the page of a view."""
    parts = [] if answer.text is None else [f"<pre>{_safe_lines(answer.text)}</pre>"]
    if answer.interrupted:
        parts.append('<p class="incomplete">Interrupted: the results are incomplete.</p>')
    parts += [f"<p>{_safe(note)}</p>" for note in answer.notes]
    if answer.tables and answer.text is None:
        parts += _answer_pictures(answer.tables[0])
    if answer.text is None:
        parts += _tables(answer.tables)
    return _page(answer.command, answer.image, [*parts, *_coverage(answer.coverage.items())])


def first_picture(result: Report | Answer) -> str | None:
    """Return the first picture of a page as a file of SVG; ``None`` if it has none."""
    if isinstance(result, Report):
        sections = _report_pictures(result)
    else:
        sections = _answer_pictures(result.tables[0]) if result.tables else iter(())
    for section in sections:
        begin, end = section.index("<svg"), section.index("</svg>")
        head, rest = section[begin:end].split("\n", 1)
        return f"{head}\n<style>{_resource('page.css')}</style>\n{rest}</svg>\n"
    return None


def _page(command: str, image: ImageInfo | None, parts: Iterable[str]) -> str:
    style, script = (_resource(name) for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    title = f"memcg-inspect {command}"
    facts = "" if image is None else f'<p class="facts">{_safe(_facts(image))}</p>'
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_safe(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<h1>{_safe(title)}</h1>\n{facts}\n"
        + "\n".join(parts)
        + f"\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _facts(image: ImageInfo) -> str:
    nodes = ", ".join(map(str, image.nodes))
    host = f"{image.host}, " if image.host else ""
    return (
        f"{host}Linux {image.release} ({image.source}), nodes {nodes}, "
        f"{counted(image.cpus, 'CPUs')}, {image.accounting}"
    )


def _resource(name: str) -> str:
    return files("memcg_inspect.render").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _safe(text: str) -> str:
    return escape(printable(text))


def _safe_lines(text: str) -> str:
    return "\n".join(map(_safe, text.splitlines()))


# Pictures


def _section(title: str, body: str, note: str = "") -> str:
    if body.startswith("<svg"):
        body = f'<div class="picture">\n{body}</div>\n'
    more = f'<p class="more">{_safe(note)}</p>\n' if note else ""
    return f"<section>\n<h2>{_safe(title)}</h2>\n{more}{body}</section>"


def _report_pictures(report: Report) -> Iterator[str]:
    paths = {memcg.address: memcg.path for memcg in report.memcgs}
    charged: Counter[tuple[str, str, str]] = Counter()
    pairs: Counter[tuple[str, str]] = Counter()
    for skew in report.skew:
        node = _node(skew.backing_nid)
        charged[paths.get(skew.memcg, "unknown"), node, skew.kind] += skew.bytes
        if skew.charged_nid is not None and skew.backing_nid != NUMA_NO_NODE:
            pairs[_node(skew.charged_nid), node] += skew.bytes
    tiles = [Tile(node, path, kind, n) for (path, node, kind), n in charged.items() if n > 0]
    if tiles:
        yield _section("Charges by node, memcg and kind", tree_map(_most_tiles(tiles)))
        cells: Counter[tuple[str, str]] = Counter()
        for (path, node, _), amount in charged.items():
            cells[path, node] += amount
        yield _section("Charges by memcg and node", *_memcgs_by_node(cells))
    if pairs:
        nodes = sorted({node for pair in pairs for node in pair})
        rows = [f"charged on {node}" for node in nodes]
        amounts = {(f"charged on {one}", two): n for (one, two), n in pairs.items()}
        note = "Memory off the diagonal is on another node than the obj_cgroup that pays for it."
        yield _section("Charged node and backing node", heat_map(rows, nodes, amounts), note)
    shown = _folded(report, paths)
    if shown:
        note = "memory.stat shows what is folded. A flush adds what is pending, but not the stocks."
        if len(shown) > _MOST_LINES:
            note += f" {_left_out(len(shown) - _MOST_LINES)}"
        yield _section(
            "Slab objects and percpu memory in counters", bars(shown[:_MOST_LINES]), note
        )


def _node(nid: int) -> str:
    return "no node" if nid == NUMA_NO_NODE else f"node {nid}"


def _most_tiles(tiles: Sequence[Tile]) -> list[Tile]:
    """Return the largest tiles, and the sums of the others."""
    sums: Counter[str] = Counter()
    for tile in tiles:
        sums[tile.group] += tile.amount
    groups = {group for group, _ in sums.most_common(_MOST_GROUPS)}
    known = [t if t.group in groups else t._replace(group=_OTHER) for t in tiles]
    ranked = sorted(known, key=lambda tile: -tile.amount)
    rest: Counter[str] = Counter()
    for tile in ranked[_MOST_TILES:]:
        rest[tile.group] += tile.amount
    others = (Tile(group, _OTHER, _OTHER, amount) for group, amount in rest.items())
    return [*ranked[:_MOST_TILES], *others]


def _memcgs_by_node(cells: Counter[tuple[str, str]]) -> tuple[str, str]:
    """Return a heat map of the memcgs with most, and a note on the others."""
    sums: Counter[str] = Counter()
    for (path, _), amount in cells.items():
        sums[path] += abs(amount)
    rows = [path for path, _ in sums.most_common(_MOST_LINES)]
    nodes = sorted({node for _, node in cells})
    left = len(sums) - len(rows)
    return heat_map(rows, nodes, cells), _left_out(left) if left else ""


def _left_out(memcgs: int) -> str:
    return f"Not shown: {counted(memcgs, 'other memcgs')} with less."


def _folded(report: Report, paths: dict[int, str]) -> list[Bar]:
    """Return the parts of counters of the memcgs with most in them."""
    scale = {"bytes": 1, "KiB": 1024, "pages": report.image.page_size}
    parts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in report.rows:
        if row.identity in _FOLDED and row.claimed is not None and row.unit in scale:
            for part, amount in row.claimed.items():
                name = _PARTS.get(part)
                if name is not None and amount:
                    parts[paths.get(row.memcg or 0, "unknown")][name] += amount * scale[row.unit]
    ranked = sorted(parts.items(), key=lambda pair: -sum(map(abs, pair[1].values())))
    return [Bar(path, some) for path, some in ranked]


def _answer_pictures(table: Table) -> Iterator[str]:
    """Return a picture of a table, if it has amounts that add up."""
    names = {column.name: column for column in table.columns}
    main = _main_column(table)
    # Rows that include the memcgs below would be drawn twice.
    if main is None or not table.rows or table.parents is not None:
        return
    if "growth" in names or main.type == "difference":
        main, label = names.get("growth", main), _label_of(names, True)
        found = ((label(row), main.value(row)) for row in table.rows)
        known = [(name, n) for name, n in found if isinstance(n, int) and n]
        known.sort(key=lambda pair: -abs(pair[1]))
        shown = [Bar(name, {main.name: amount}) for name, amount in known[:_MOST_LINES]]
        if shown:
            yield _section(f"{table.title}: {main.name}", bars(shown))
        return
    label = _label_of(names, False)
    group = names.get("node") or names.get("kind")
    kind = names.get("kind") or names.get("cache") or group
    tiles = []
    cells: Counter[tuple[str, str]] = Counter()
    for row in table.rows:
        amount = main.value(row)
        if isinstance(amount, int) and amount > 0:
            where = _group(group, row)
            tiles.append(Tile(where, label(row), _cell_text(kind, row), amount))
            if "memcg" in names and "node" in names:
                cells[_cell_text(names["memcg"], row), where] += amount
    if tiles:
        yield _section(f"{table.title}: {main.name}", tree_map(_most_tiles(tiles)))
    if cells:
        yield _section(f"{main.name} by memcg and node", *_memcgs_by_node(cells))


def _main_column(table: Table) -> Column | None:
    """Return the amount in bytes that a picture shows; ``None`` if there is none."""
    sums = [c for c in table.columns if c.total and (c.type == "bytes" or c.in_bytes)]
    return next((c for c in sums if c.shares), next(iter(sums), None))


def _label_of(names: Mapping[str, Column], has_node: bool) -> Callable[[object], str]:
    """Return a function from a row to its name: with the node if the picture does not show it."""
    chosen = [names[name] for name in _LABELS if name in names]

    def label(row: object) -> str:
        words = [
            _cell_text(column, row) or ("(no memcg)" if column.type == "memcg" else "")
            for column in chosen
        ]
        if has_node and _cell_text(names.get("node"), row):
            words.append(_group(names["node"], row))
        return ", ".join(filter(None, words)) or "all"

    return label


def _group(column: Column | None, row: object) -> str:
    text = _cell_text(column, row)
    if column is not None and column.type == "node":
        return f"node {text}" if text else "no node"
    return text or "all"


def _cell_text(column: Column | None, row: object) -> str:
    value = None if column is None else column.value(row)
    return "" if value is None or isinstance(value, NotRead) else str(value)


# Tables


def _tables(tables: Sequence[Table]) -> Iterator[str]:
    room = _MOST_ROWS // max(len(tables), 1)
    for table in tables:
        yield _table(table, room)


def _table(table: Table, room: int) -> str:
    """
    Return a table.

    :param room: characters that its rows may take
    """
    if not table.rows:
        return _section(table.title, f"<p>{_safe(table.empty)}</p>\n")
    heads = "".join(_head(column) for column in table.columns)
    rows, used = list[str](), 0
    for row in table.rows:
        line = "".join(_cell(column, column.value(row)) for column in table.columns)
        used += len(line.encode()) + len("<tr></tr>\n")
        if used > room:
            break
        rows.append(f"<tr>{line}</tr>\n")
    left = len(table.rows) - len(rows)
    note = f"{counted(left, 'more rows')}: --json has all of them." if left else ""
    foot = "" if table.totals is None else _foot(table.columns, table.totals)
    search = '<input type="search" placeholder="filter rows" aria-label="filter rows">\n'
    body = (
        f"{search if len(rows) > _MOST_WITHOUT_FILTER else ''}"
        f'<div class="wide"><table>\n<thead><tr>{heads}</tr></thead>\n'
        f"<tbody>\n{''.join(rows)}</tbody>\n{foot}</table></div>\n"
    )
    return _section(table.title, body, note)


def _foot(columns: Sequence[Column], totals: Mapping[str, Value]) -> str:
    """Return the sums over all rows, whether they are filtered or not."""
    cells = [_cell(c, totals[c.name]) if c.name in totals else "<td></td>" for c in columns]
    if "<td></td>" in cells:
        cells[cells.index("<td></td>")] = "<td>all rows</td>"
    return f"<tfoot><tr>{''.join(cells)}</tr></tfoot>\n"


def _head(column: Column) -> str:
    first = "descending" if column.type in AMOUNTS else "ascending"
    right = ' class="number"' if column.type in _RIGHT else ""
    return (
        f'<th{right} scope="col" data-first="{first}" title="{_safe(column.help)}">'
        f"<button>{_safe(column.name)}</button></th>"
    )


def _cell(column: Column, value: Value) -> str:
    if isinstance(value, NotRead):
        return f'<td data-none="" title="{_safe(value.reason)}">?</td>'
    shown = exact_cell(column, value)
    if value is None:
        return f'<td data-none="">{_safe(shown)}</td>'
    if isinstance(value, (int, float)) and column.type in _RIGHT:
        return f'<td class="number" data-value="{value}">{_safe(shown)}</td>'
    is_long = column.type in ("text", "memcg") and len(shown) > 30
    return f'<td class="text">{_safe(shown)}</td>' if is_long else f"<td>{_safe(shown)}</td>"


def _coverage(coverage: Iterable[tuple[str, Coverage]]) -> Iterator[str]:
    """Return what could not be read."""
    missing = [(name, part) for name, part in coverage if part.unreadable]
    if not missing:
        return
    lines = []
    for name, part in missing:
        some = "; ".join(f"{e.what} at {e.address:#x}: {e.reason}" for e in part.examples[:3])
        lines.append(f"<li>{part.unreadable:,} of {_safe(name)}, for example {_safe(some)}</li>\n")
    yield _section("Not read", f"<ul>\n{''.join(lines)}</ul>\n")
