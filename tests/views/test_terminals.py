# SPDX-License-Identifier: LGPL-2.1-or-later
"""What commands print on terminals of several widths, and in a pipe, of images of real kernels."""

from __future__ import annotations

import re

import pytest
from rich.cells import cell_len
from support.guests import KERNELS, Lab
from support.screens import WIDTHS, numbers, run, tables

from memcg_inspect.views import NAMES

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]

ARGUMENTS = {
    "drift": ["--all"],
    "stat": ["/files/web"],
    "usage": ["/files/web"],
    "who": ["{memcg}"],
}
#: One that needs another kernel.
COMMANDS = [[name, *ARGUMENTS.get(name, [])] for name in NAMES if name != "allocinfo"]
COMMANDS += [
    ["overview", "--by-node", "--top", "0"],
    ["slabinfo", "--by", "memcg,cache,node"],
    ["percpu", "--each", "--top", "7"],
    ["dying", "--each"],
    ["audit", "--rows"],
    ["audit", "--all"],
]


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_line_is_too_wide_and_no_number_is_cut(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "4", "mixed")
    core, memcg = str(image.core), image.report().memcgs[-1].address
    asked = [[word.format(memcg=f"{memcg:#x}") for word in words] for words in COMMANDS]
    ways = [(width, option) for width in WIDTHS for option in ([], ["--exact"])]
    left_out = shares = 0
    for words, [piped], shown in zip(asked, run(core, asked), run(core, asked, *ways), strict=True):
        whole = tables(piped)
        assert whole, words
        assert "not shown" not in piped
        assert not re.search(r"\d [KMGT]iB\b", "".join("".join(lines) for _, lines in whole))
        for (width, option), text in zip(ways, shown, strict=True):
            assert "\x1b" not in text
            wide = [line for line in text.splitlines() if cell_len(line) > width]
            assert wide == [], words
            assert [line for line in text.splitlines() if line != line.rstrip()] == []
            assert not option or numbers(text) <= numbers(piped), (words, width)
            for (columns, lines), (there, _) in zip(tables(text), whole, strict=True):
                if "share" in columns:
                    assert "share" not in there and not option
                    shares += 1
                    columns.remove("share")
                    assert all(re.search(r"\d %|[-?] ", line) for line in lines)
                gone = [name for name in there if name not in columns]
                assert all(name in text for name in gone)
                assert columns == [name for name in there if name not in gone]
                left_out += len(gone)
    assert left_out
    assert shares > 10
