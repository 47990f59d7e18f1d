# SPDX-License-Identifier: LGPL-2.1-or-later
"""Where all shapes and words of small pictures are, to a tenth of a point."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from memcg_inspect.render.pictures import Bar, Tile, _Box, _squares, bars, heat_map, tree_map

_PLACE = ("x", "y", "width", "height", "fill-opacity")


def drawn(svg: str) -> list[str]:
    """Return the size of a picture, and then class, place and words of all that is drawn."""
    whole = ElementTree.fromstring(svg)
    found = [whole.attrib["viewBox"]]
    for part in whole:
        place = " ".join(part.attrib[name] for name in _PLACE if name in part.attrib)
        words = f": {part.text}" if part.tag.endswith("}text") else ""
        found.append(f"{part.attrib['class']} at {place}{words}")
    return found


def test_parts_of_bars() -> None:
    """Parts of one sign follow each other, away from the line of 0."""
    some = [
        Bar("/a", {"one": 300, "two": 100}),
        Bar("/b", {"one": -100, "two": -60}),
        Bar("/c", {"three": 1, "four": 0, "five": 1}),
    ]
    assert drawn(bars(some)) == [
        "0 0 960 110",
        "label at 0.0 15.0: /a",
        "kind-0 at 460.0 3 300.0 16",
        "kind-1 at 760.0 3 100.0 16",
        "value at 864.0 15.0: 400 bytes",
        "label at 0.0 37.0: /b",
        "kind-0 at 360.0 25 100.0 16",
        "kind-1 at 300.0 25 60.0 16",
        "value at 464.0 37.0: -160 bytes",
        "label at 0.0 59.0: /c",
        "kind-2 at 460.0 47 1.0 16",
        "kind-3 at 460.0 47 0.0 16",
        "kind-4 at 461.0 47 1.0 16",
        "value at 466.0 59.0: 2 bytes",
        "kind-0 at 0.0 72.0 10 10",
        "legend at 14.0 82.0: one",
        "kind-1 at 240.0 72.0 10 10",
        "legend at 254.0 82.0: two",
        "kind-2 at 480.0 72.0 10 10",
        "legend at 494.0 82.0: three",
        "kind-3 at 720.0 72.0 10 10",
        "legend at 734.0 82.0: four",
        "kind-4 at 0.0 90.0 10 10",
        "legend at 14.0 100.0: five",
    ]


def test_bars_of_nothing() -> None:
    assert drawn(bars([])) == ["0 0 960 8"]
    assert drawn(bars([Bar("/a", {"one": 0})])) == [
        "0 0 960 48",
        "label at 0.0 15.0: /a",
        "kind-0 at 300.0 3 0.0 16",
        "value at 304.0 15.0: 0 bytes",
        "kind-0 at 0.0 28.0 10 10",
        "legend at 14.0 38.0: one",
    ]


def test_cells_of_a_heat_map() -> None:
    """The larger an amount, the darker its cell; words on the darkest ones have another colour."""
    amounts = {("/a", "node 0"): 100, ("/b", "node 1"): -400}
    amounts |= {("/b", "node 3"): 300, ("/b", "node 4"): 312}
    assert drawn(heat_map(["/a", "/b"], [f"node {n}" for n in range(5)], amounts)) == [
        "0 0 960 66",
        *(f"heading at {304 + 132 * n}.0 14.0: node {n}" for n in range(5)),
        "label at 0.0 37.0: /a",
        "heat at 300.0 22 130.0 20 0.500",
        "value at 304.0 37.0: 100 bytes",
        *(f"heat at {300 + 132 * n}.0 22 130.0 20 0.000" for n in range(1, 5)),
        "label at 0.0 59.0: /b",
        "heat at 300.0 44 130.0 20 0.000",
        "heat at 432.0 44 130.0 20 1.000",
        "value strong at 436.0 59.0: -400 bytes",
        "heat at 564.0 44 130.0 20 0.000",
        "heat at 696.0 44 130.0 20 0.866",
        "value at 700.0 59.0: 300 bytes",
        "heat at 828.0 44 130.0 20 0.883",
        "value strong at 832.0 59.0: 312 bytes",
    ]


def test_heat_maps_of_nothing() -> None:
    """A column is no wider than it needs to be."""
    assert drawn(heat_map([], [], {})) == ["0 0 960 22"]
    assert drawn(heat_map(["/a"], ["node 0"], {("/a", "node 0"): 1}))[-2:] == [
        "heat at 300.0 22 138.0 20 1.000",
        "value strong at 304.0 37.0: 1 byte",
    ]
    assert drawn(heat_map(["/a"], ["node 0"], {})) == [
        "0 0 960 44",
        "heading at 304.0 14.0: node 0",
        "label at 0.0 37.0: /a",
        "heat at 300.0 22 138.0 20 0.000",
    ]


def test_tiles_of_a_tree_map() -> None:
    """Groups are below their headings. A tile that is too low has no words."""
    tiles = [
        Tile("node 0", "/a", "slab", 600),
        Tile("node 0", "/b", "slab", 200),
        Tile("node 0", "/c", "", 200),
        Tile("node 1", "/d", "lru", 500),
        Tile("node 1", "/e", "lru", 0),
        Tile("node 1", "/f", "lru", 3),
    ]
    assert drawn(tree_map(tiles)) == [
        "0 0 960 446",
        "heading at 3.0 13.0: node 0: 1,000 bytes",
        "kind-0 at 0.0 18.0 381.2 400.0",
        "label at 3.0 31.0: /a",
        "kind-0 at 383.2 18.0 253.5 199.0",
        "label at 386.2 31.0: /b",
        "kind-2 at 383.2 219.0 253.5 199.0",
        "label at 386.2 232.0: /c",
        "heading at 641.7 13.0: node 1: 503 bytes",
        "kind-1 at 638.7 18.0 319.3 397.6",
        "label at 641.7 31.0: /d",
        "kind-1 at 638.7 417.6 319.3 0.4",
        "kind-0 at 0.0 426.0 10 10",
        "legend at 14.0 436.0: slab",
        "kind-1 at 240.0 426.0 10 10",
        "legend at 254.0 436.0: lru",
        "kind-2 at 480.0 426.0 10 10",
        "legend at 494.0 436.0: -",
    ]


def test_a_group_that_is_too_low_has_no_heading() -> None:
    """Its tiles take all of its room, and can be seen, however small they are."""
    tiles = [
        Tile("a", "/a", "slab", 10_000_000),
        Tile("b", "/b", "slab", 3_000_000),
        Tile("c", "/c", "lru", 100_000),
        Tile("c", "/d", "lru", 100),
    ]
    assert drawn(tree_map(tiles)) == [
        "0 0 960 446",
        "heading at 3.0 13.0: a: 9.5 MiB",
        "kind-0 at 0.0 18.0 730.8 400.0",
        "label at 3.0 31.0: /a",
        "heading at 735.8 13.0: b: 2.9 MiB",
        "kind-0 at 732.8 18.0 225.2 386.4",
        "label at 735.8 31.0: /b",
        "kind-1 at 732.8 406.4 225.0 11.6",
        "kind-1 at 959.8 406.4 0.2 11.6",
        "kind-0 at 0.0 426.0 10 10",
        "legend at 14.0 436.0: slab",
        "kind-1 at 240.0 426.0 10 10",
        "legend at 254.0 436.0: lru",
    ]


def test_the_least_height_with_words() -> None:
    """It is 1 point below the heading of a group, and 18 points of a tile."""
    groups = [Tile("a", "/a", "", 319_200), Tile("b", "/b", "", 80_200), Tile("c", "/c", "", 3_800)]
    assert drawn(tree_map(groups))[5:-2] == [
        "kind-0 at 760.0 18.0 198.0 381.0",
        "label at 763.0 31.0: /b",
        "heading at 763.0 414.0: c: 3,800 bytes",
        "kind-0 at 760.0 419.0 198.0 0.2",
    ]
    tiles = [Tile("a", "/d", "", 289_440), Tile("a", "/e", "", 91_680), Tile("a", "/f", "", 4_800)]
    assert drawn(tree_map(tiles))[4:-2] == [
        "kind-0 at 720.0 18.0 238.0 380.0",
        "label at 723.0 31.0: /e",
        "kind-0 at 720.0 400.0 238.0 18.0",
        "label at 723.0 413.0: /f",
    ]


def test_squares_of_the_paper() -> None:
    """Its example is 6, 6, 4, 3, 2, 2 and 1, in a box of 6 by 4."""
    found = _squares([6, 6, 4, 3, 2, 2, 1], _Box(0, 0, 6, 4))
    wanted = [
        (0, 0, 3, 2),
        (0, 2, 3, 2),
        (3, 0, 12 / 7, 7 / 3),
        (3 + 12 / 7, 0, 9 / 7, 7 / 3),
        (3, 7 / 3, 6 / 5, 5 / 3),
        (21 / 5, 7 / 3, 6 / 5, 5 / 3),
        (27 / 5, 7 / 3, 3 / 5, 5 / 3),
    ]
    assert [pytest.approx(one) for one in wanted] == found
    # Of two ways that are as good, the one with more in a row.
    assert _squares([1, 1], _Box(0, 0, 2, 2)) == [(0, 0, 2, 1), (0, 1, 2, 1)]


def test_amounts_that_are_too_small_for_an_area() -> None:
    """They have a place all the same: at the end of what the others take."""
    whole = _Box(0, 0, 960, 420)
    assert _squares([1 << 60, 1, 1], whole) == [whole, (960, 0, 0, 0), (960, 0, 0, 0)]
    tiles = [Tile("a", "/a", "", 1 << 60), Tile("b", "/b", "", 1), Tile("b", "/c", "", 1)]
    assert [line for line in drawn(tree_map(tiles)) if line.startswith("kind")][:3] == [
        "kind-0 at 0.0 18.0 958.0 400.0",
        *["kind-0 at 960.0 0.0 0.2 0.2"] * 2,
    ]


def test_as_many_kinds_as_colours() -> None:
    """With one more, the least two kinds share the last colour."""
    for kinds, named in ((8, "kind 7"), (9, "(other kinds)")):
        tiles = [Tile("a", f"/{n}", f"kind {n}", 1000 - n) for n in range(kinds)]
        *_, square, name = drawn(tree_map(tiles))
        assert (square, name) == ("kind-7 at 720.0 444.0 10 10", f"legend at 734.0 454.0: {named}")


def test_pictures_say_what_they_are() -> None:
    for svg, name in (
        (tree_map([]), "tree-map"),
        (heat_map([], [], {}), "heat-map"),
        (bars([]), "bars"),
    ):
        given = ElementTree.fromstring(svg).attrib
        told = (given["class"], given["role"], given["aria-label"])
        assert told == (name, "group", name.replace("-", " "))


def test_a_tile_below_zero_has_no_area() -> None:
    """It takes nothing from the others of its group either, and its kind is in no legend."""
    tiles = [Tile("a", "b", "c", -5), Tile("a", "d", "e", 5), Tile("f", "g", "h", -5)]
    assert drawn(tree_map(tiles)) == [
        "0 0 960 446",
        "heading at 3.0 13.0: a: 5 bytes",
        "kind-0 at 0.0 18.0 958.0 400.0",
        "label at 3.0 31.0: d",
        "kind-0 at 0.0 426.0 10 10",
        "legend at 14.0 436.0: e",
    ]


def test_names_take_the_room_of_their_column() -> None:
    """A character takes 7 points; what is left out is at the beginning."""
    name = "".join(chr(ord("a") + n % 26) for n in range(200))

    def shown(svg: str, what: str) -> list[int]:
        """Return how much of the name is left in the texts of a class."""
        lines = [line.partition(": ")[2] for line in drawn(svg) if line.startswith(what)]
        assert all(line == f"…{name[1 - len(line) :]}" for line in lines)
        return [len(line) for line in lines]

    chart = bars([Bar(name, {name: 1})])
    assert (shown(chart, "label"), shown(chart, "legend")) == ([292 // 7], [220 // 7])
    heat = heat_map([name], [name, name], {})
    assert (shown(heat, "label"), shown(heat, "heading")) == ([292 // 7], [136 // 7] * 2)
    tree = tree_map([Tile("", name, name, 1)])
    assert shown(tree, "label") == [952 // 7]


def test_columns_that_are_too_narrow_for_a_name() -> None:
    """What fits of its end is shown: of three characters, no ellipsis takes one."""
    for columns, left in ((20, "… 10"), (22, "10"), (60, "0"), (66, None)):
        names = ["menu 10"] * columns
        words = [line.partition(": ")[2] for line in drawn(heat_map([], names, {}))[1:]]
        assert words == ([left] * columns if left else []), columns
