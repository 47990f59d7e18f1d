# SPDX-License-Identifier: LGPL-2.1-or-later
"""What pictures show: areas, lengths and shades are as the amounts, and nothing is lost."""

from __future__ import annotations

import random
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from memcg_inspect.render.pictures import WIDTH, Bar, Tile, bars, heat_map, tree_map

SVG = "{http://www.w3.org/2000/svg}"


def shapes(svg: str) -> list[dict[str, str]]:
    """Return the shapes that show amounts."""
    found = [dict(e.attrib) for e in ElementTree.fromstring(svg).iter(f"{SVG}rect")]
    return [shape for shape in found if "data-amount" in shape]


def titles(svg: str) -> list[str]:
    return [e.text or "" for e in ElementTree.fromstring(svg).iter(f"{SVG}title")]


def box(shape: dict[str, str]) -> tuple[float, float, float, float]:
    x, y, width, height = (float(shape[name]) for name in ("x", "y", "width", "height"))
    return x, y, width, height


def test_areas_of_a_tree_map_are_as_the_amounts() -> None:
    chance = random.Random(3)
    tiles = [Tile("all", f"/{n}", "slab", chance.randrange(1 << 20, 1 << 24)) for n in range(40)]
    svg = tree_map(tiles)
    found = shapes(svg)
    assert sorted(int(shape["data-amount"]) for shape in found) == sorted(t.amount for t in tiles)
    # With the gap between tiles added.
    areas = {int(s["data-amount"]): (box(s)[2] + 2) * (box(s)[3] + 2) for s in found}
    ratios = [area / amount for amount, area in areas.items()]
    assert max(ratios) < 1.05 * min(ratios)


def test_tiles_are_inside_and_do_not_overlap() -> None:
    chance = random.Random(4)
    tiles = [
        Tile(f"node {n % 3}", f"/{n}", "lru", chance.choice((1, 100, 4096, 1 << 30)))
        for n in range(60)
    ]
    boxes = [box(shape) for shape in shapes(tree_map(tiles))]
    assert len(boxes) == 60
    for x, y, width, height in boxes:
        assert x >= 0 and y >= 0 and x + width <= WIDTH + 1 and y + height <= 421
    large = [b for b in boxes if b[2] > 2 and b[3] > 2]
    for n, (x, y, width, height) in enumerate(large):
        for u, v, wide, high in large[n + 1 :]:
            beside = x + width <= u + 0.2 or u + wide <= x + 0.2
            assert beside or y + height <= v + 0.2 or v + high <= y + 0.2


@pytest.mark.parametrize("tiles", [[], [Tile("a", "b", "c", 0)], [Tile("a", "b", "c", 1)]])
def test_few_tiles(tiles: list[Tile]) -> None:
    assert len(shapes(tree_map(tiles))) == sum(tile.amount > 0 for tile in tiles)


def test_names_are_harmless() -> None:
    name = "/<script>alert(1)</script>\"'\x1b[31m&amp;\n"
    for svg in (
        tree_map([Tile(name, name, name, 5)]),
        heat_map([name], [name], {(name, name): 5}),
        bars([Bar(name, {name: 5})]),
    ):
        assert "<script" not in svg
        assert "\x1b" not in svg
        (title,) = titles(svg)
        assert "<script>alert(1)</script>" in title
        assert title.endswith("5 bytes")


def test_a_heat_map_has_each_amount() -> None:
    amounts = {("/a", "node 0"): 100, ("/b", "node 1"): 400}
    svg = heat_map(["/a", "/b"], ["node 0", "node 1"], amounts)
    found = [(int(s["data-amount"]), float(s["fill-opacity"])) for s in shapes(svg)]
    assert found == [(100, 0.5), (0, 0), (0, 0), (400, 1)]
    assert titles(svg)[0] == "/a, node 0: 100 bytes"


def test_bars_begin_at_zero_and_end_at_the_amount() -> None:
    svg = bars([Bar("/a", {"one": 300, "two": 100}), Bar("/b", {"one": -200})])
    one, two, below = shapes(svg)
    x, _, width, _ = box(one)
    assert box(two)[0] == pytest.approx(x + width, abs=0.2)
    assert box(two)[2] == pytest.approx(width / 3, abs=0.2)
    assert box(below)[0] + box(below)[2] == pytest.approx(x, abs=0.2)
    assert box(below)[2] == pytest.approx(width * 2 / 3, abs=0.2)
    assert one["class"] == below["class"] != two["class"]


def test_many_kinds_share_a_colour() -> None:
    tiles = [Tile("a", f"/{n}", f"kind {n}", 1000 - n) for n in range(20)]
    svg = tree_map(tiles)
    classes = [shape["class"] for shape in shapes(svg)]
    assert len(set(classes)) == 8
    assert classes.count("kind-7") == 13
    assert ">(other kinds)<" in svg


def texts(svg: str, name: str) -> list[tuple[float, float, str]]:
    """Return the places and the words of texts of one class."""
    found = [e for e in ElementTree.fromstring(svg).iter(f"{SVG}text") if e.get("class") == name]
    return [(float(e.attrib["x"]), float(e.attrib["y"]), e.text or "") for e in found]


def test_a_heat_map_has_heads_above_its_columns() -> None:
    columns = ["node 0", "node 1", "node 2"]
    svg = heat_map(["/a"], columns, {("/a", "node 0"): 5, ("/a", "node 2"): 5 << 20})
    lefts = [box(shape)[0] for shape in shapes(svg)]
    assert [(x - 4, y, word) for x, y, word in texts(svg, "heading")] == [
        (left, 14, name) for left, name in zip(lefts, columns, strict=True)
    ]
    # Nothing is written where nothing is.
    assert [(x - 4, word) for x, _, word in texts(svg, "value")] == [(lefts[0], "5 bytes")]
    assert [(x - 4, word) for x, _, word in texts(svg, "value strong")] == [(lefts[2], "5.0 MiB")]


def test_a_legend_is_below_the_bars() -> None:
    svg = bars([Bar("/a", {"one": 300, "two": 100}), Bar("/b", {"one": 200})])
    lowest = max(y + height for _, y, _, height in map(box, shapes(svg)))
    legend = texts(svg, "legend")
    assert [word for _, _, word in legend] == ["one", "two"]
    view = ElementTree.fromstring(svg).attrib["viewBox"]
    assert all(lowest < y < float(view.split()[3]) for _, y, _ in legend)


def test_sums_are_at_the_ends_of_bars() -> None:
    svg = bars([Bar("/a", {"one": 3 << 20, "two": 1 << 20}), Bar("/b", {"one": -(2 << 20)})])
    one, two, below = map(box, shapes(svg))
    ends = texts(svg, "value")
    assert [word for _, _, word in ends] == ["4.0 MiB", "-2.0 MiB"]
    assert ends[0][0] == pytest.approx(two[0] + two[2] + 4, abs=0.2)
    assert ends[1][0] == pytest.approx(below[0] + below[2] + 4, abs=0.2)
    assert one[1] == two[1] < below[1]
    # They are in the picture, and the longest bar takes most of it.
    assert all(x + 10 * len(word) <= WIDTH for x, _, word in ends)
    assert two[0] + two[2] >= 0.85 * WIDTH


def test_a_tile_of_nothing_is_not_drawn() -> None:
    svg = tree_map([Tile("a", "/one", "slab", 100), Tile("a", "/two", "stack", 0)])
    assert titles(svg) == ["/one, slab, a: 100 bytes"]
    assert [word for _, _, word in texts(svg, "legend")] == ["slab"]


def test_long_names_in_a_legend_do_not_overlap() -> None:
    svg = bars([Bar("/a", {f"{n} {'x' * 100}": 300 for n in range(5)})])
    legend = texts(svg, "legend")
    assert len({y for _, y, _ in legend}) == 2
    for (x, y, word), (following, below, _) in pairwise(legend):
        assert y < below or x + 6 * len(word) <= following


def test_long_names_of_tiles_end_in_their_tile() -> None:
    """The end of a path tells more than its beginning."""
    svg = tree_map([Tile("a", f"/{'x' * 200}{n}", "slab", 100 + n) for n in range(5)])
    labels, found = texts(svg, "label"), []
    for left, top, width, height in map(box, shapes(svg)):
        right, bottom = left + width, top + height
        here = [(x, w) for x, y, w in labels if left <= x < right and top <= y < bottom]
        assert all(x + 6.5 * len(word) <= right for x, word in here)
        found += [word[-1] for _, word in here]
    assert sorted(found) == list("01234")


def test_values_of_narrow_columns_end_in_their_column() -> None:
    columns = [f"node {n}" for n in range(16)]
    svg = heat_map(["/a"], columns, {("/a", name): 1023 << 20 for name in columns})
    values = [
        e.text or ""
        for e in ElementTree.fromstring(svg).iter(f"{SVG}text")
        if "value" in e.attrib["class"]
    ]
    # As wide as the column, less a margin on both sides, with 7 pixels for a character.
    assert len(values) == 16
    assert all(7 * len(value) <= (WIDTH - 300) / 16 - 6 for value in values), values
