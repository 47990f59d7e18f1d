# SPDX-License-Identifier: LGPL-2.1-or-later
"""Reports in a terminal. Names from an image are escaped."""

from __future__ import annotations

import unicodedata
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from support.printed import WIDE, findings_text, text
from support.reports import ITEM, WEB, clean, more, report

from memcg_inspect.escape import printable
from memcg_inspect.model import Follows, counted
from memcg_inspect.render.text import amount, signed
from memcg_inspect.report import Evidence, Moved, NotCovered, Report, RowStatus, Uncharged


def alike(name: str) -> Report:
    """Return a report like this one with harmless names of the same width."""
    harmless = "x" * cell_len(printable(name))
    return report(path=harmless, name=harmless)


def test_verdict_comes_first() -> None:
    assert text(report()).startswith("FINDINGS: ")
    assert text(clean()).startswith("EXACT: ")


def head(made: Report) -> list[str]:
    """Return the lines above the tables."""
    return text(made).split("\n\n")[0].splitlines()


def of_real_size(made: Report, *statuses: RowStatus) -> Report:
    """Return a report with as many rows as machines have, some of which are in these states."""
    rows = tuple(replace(made.rows[0], status=status, reason="why") for status in statuses)
    identity = replace(made.identities[0], rows=1_234_567)
    return replace(made, rows=made.rows + rows, identities=(identity,) * 27)


def test_exact_says_what_it_covers() -> None:
    assert head(clean())[0] == "EXACT: 1 identity holds in 1 row"
    assert head(of_real_size(clean()))[0] == "EXACT: 27 identities hold in 33,333,309 rows"
    gone = replace(clean().identities[0], name="zswap", status="not-kept", rows=0)
    made = replace(clean(), identities=(*clean().identities, gone))
    assert head(made)[0] == head(clean())[0]


def test_what_is_not_covered_is_listed() -> None:
    user = [NotCovered(f"NR_{n}", "no pages are added up") for n in range(5)]
    made = replace(clean(), not_covered=(*user, NotCovered("MEMCG_SWAP", "nothing compares it")))
    assert head(made)[0] == "EXACT: 1 identity holds in 1 row; 6 counters not covered"
    listed = "  NR_0, NR_1, NR_2, NR_3, NR_4: no pages are added up"
    ends = ["Not covered: 6 counters", listed, "  MEMCG_SWAP: nothing compares it"]
    assert text(made).splitlines()[-4:] == ["", *ends]
    assert "ot covered" not in text(clean())


def test_the_verdict_counts_what_was_in_flight() -> None:
    first = head(of_real_size(clean(), "in-flight"))[0]
    assert first == "EXACT: 27 identities hold in 33,333,309 rows (1 in flight)"
    assert "in flight" not in text(clean())


def test_exact_says_that_kernel_memory_is_not_accounted() -> None:
    made = replace(clean(), not_accounted=("kernel memory", "BPF"))
    line = "EXACT: 1 identity holds in 1 row; kernel memory is not accounted on this machine"
    assert head(made)[0] == line
    assert head(replace(clean(), not_accounted=("sockets",)))[0] == head(clean())[0]


def test_other_verdicts_say_how_much_is_behind_them() -> None:
    made = of_real_size(report(), "differs")
    assert head(made)[0] == "FINDINGS: 1 finding; 2 of 33,333,309 rows differ"
    made = replace(of_real_size(clean(), "unverifiable", "unverifiable"), verdict="incomplete")
    nothing = "nothing wrong was found; "
    assert head(made)[0] == f"INCOMPLETE: {nothing}2 of 33,333,309 rows could not be verified"
    # something that no row needs
    made = replace(clean(), verdict="incomplete")
    assert head(made)[0] == f"INCOMPLETE: {nothing}not everything could be read"
    made = replace(of_real_size(clean(), "moving"), verdict="moving")
    assert head(made)[0] == f"MOVING: {nothing}1 of 33,333,309 rows were changing: /"


def test_the_second_line_names_the_accounting() -> None:
    assert head(clean())[1] == "Accounting: one obj_cgroup per memcg and node"
    image = replace(clean().image, accounting="kmem-per-node")
    follows: dict[str, Follows] = {"percpu": "physical", "zswap": "both"}
    assert head(replace(clean(), image=image, follows=follows))[1] == (
        "Accounting: kernel memory counted per memcg and node, "
        "percpu by the physical rule, zswap by either rule"
    )


def test_the_findings_come_without_what_is_exact() -> None:
    short, whole = findings_text(report()), text(report())
    assert head(report()) == short.split("\n\n")[0].splitlines()
    assert "slab: findings (2 of 4 rows)" in short
    assert len([line for line in short.splitlines() if f" {ITEM} " in line]) == 3
    assert len([line for line in whole.splitlines() if f" {ITEM} " in line]) == 5
    assert short.endswith(whole[whole.index("Finding 1") : whole.index("Read ")])
    assert "skew: " not in short


def lines(made: Report, identity: str, shown: str) -> list[list[str]]:
    """Return the printed rows of an identity other than ``slab``."""
    item = made.rows[-1].item
    assert made.rows[-1].identity == identity
    return [line.split() for line in shown.splitlines() if f" {item} " in line]


def test_identities_come_in_one_table() -> None:
    [line] = [line for line in text(more()).splitlines() if line.startswith(" zswap ")]
    *cells, reason = line.strip().split(maxsplit=4)
    assert cells == ["zswap", "not-kept", "0", "0"]
    assert reason == "this kernel has no zswap"


def test_rows_that_are_not_exact_come_with_the_findings() -> None:
    shown = findings_text(more())
    [differing, in_flight] = lines(more(), "kmem", shown)
    assert (differing[0], *differing[-2:]) == ("/web", "-1", "differs")
    assert in_flight[-2:] == ["+1", "in-flight"]
    assert "kmem: findings (2 of 3 rows)" in shown
    assert len(lines(more(), "kmem", text(more()))) == 3


def test_what_has_no_node_has_a_column_of_its_own() -> None:
    [head] = [line for line in text(more()).splitlines() if "charged" in line and "kind" in line]
    assert head.split() == ["memcg", "kind", "charged", "on", "0", "on", "1", "no", "node"]
    assert "0xffff888000f00008, no node" in text(more())
    assert "-1," not in text(more())


def test_types_are_told_of() -> None:
    assert text(more()).splitlines()[3] == "Types and symbols: BTF of the image"


def test_one_thing_is_no_plural() -> None:
    assert "1 node, 2 CPUs, 4.0 MiB of memory, 3 memcgs (1 removed)" in text(clean())
    assert [counted(n, "pages") for n in (0, 1, 2, 1000)] == [
        "0 pages",
        "1 page",
        "2 pages",
        "1,000 pages",
    ]


def test_what_could_not_be_read_is_no_number() -> None:
    [line] = [line for line in text(report()).splitlines() if " unverifiable" in line]
    assert line.split()[:5] == ["/web", "1", "NR_SLAB_RECLAIMABLE_B", "bytes", "700"]
    assert line.split()[5:] == ["?", "?", "?", "?", "unverifiable"]
    assert "the counter could not be read" in text(report())


def test_difference_has_a_sign() -> None:
    assert "+1,064" in text(report())


def test_finding_shows_its_evidence() -> None:
    shown = text(report())
    assert "Finding 1: /web: NR_SLAB_RECLAIMABLE_B on node 0 claims 1,064 bytes more" in shown
    assert "candidates:" in shown
    listed = [line for line in shown.splitlines() if line.startswith("    0x")]
    assert listed == [
        "    0xffff888000f00000, dentry object, 200 bytes, charged to /web (objcg "
        "0xffff88800000a000), page 0xffffea0000001000, node 0, a note",
        "    0xfffffffffffffff8",
    ]


@pytest.mark.parametrize(
    ("ranks", "total", "tied", "head", "last"),
    [
        ((1,), 1, 0, "candidates:", None),
        ((1, 2, 3), 3, 0, "candidates, likeliest first:", None),
        ((1, 1, 3), 3, 0, "candidates, likeliest first, the first 2 equally likely:", None),
        ((1, 1, 1), 3, 0, "candidates, equally likely:", None),
        ((1, 2, 3), 1007, 0, "candidates, likeliest first:", "and 1,004 more"),
        (
            (1, 1, 1),
            1007,
            1000,
            "candidates, equally likely:",
            "and 1,004 more, 1,000 of them as likely as the last one listed",
        ),
        (
            (1, 2, 2),
            10,
            7,
            "candidates, likeliest first:",
            "and 7 more, all of them as likely as the last one listed",
        ),
        # as in several samples of a running kernel
        ((1, 2), None, None, "candidates, likeliest first:", None),
        ((None, None), 12, None, "proof:", "and 10 more"),
    ],
)
def test_evidence_says_how_likely_it_is_and_what_is_left_out(
    ranks: tuple[int | None, ...],
    total: int | None,
    tied: int | None,
    head: str,
    last: str | None,
) -> None:
    made = report()
    [finding] = made.findings
    finding = replace(
        finding,
        evidence_is="proof" if ranks[0] is None else "candidates",
        evidence=tuple(Evidence(0xA00 + n, "slab", rank=rank) for n, rank in enumerate(ranks)),
        evidence_total=total,
        evidence_tied=tied,
    )
    shown = text(replace(made, findings=(finding,)))
    printed = shown[shown.index("Finding 1") :].split("\n\n")[0].splitlines()[1:]
    expected = [f"  {head}", *(f"    {0xA00 + n:#x}" for n in range(len(ranks)))]
    assert printed == [*expected, *([] if last is None else [f"    {last}"])]


def test_a_finding_about_no_memcg() -> None:
    """Nor about one that is known: then it is named by its address."""
    [finding] = report().findings
    for memcg, name in ((None, "-"), (0xBAD, "0xbad"), (WEB, "/web")):
        made = replace(report(), findings=(replace(finding, memcg=memcg),))
        assert f"\nFinding 1: {name}: {ITEM} on node 0" in text(made)


def test_samples_are_told_of_where_there_are_several() -> None:
    line = "Samples: 2, since the kernel was running"
    assert line in text(replace(report(), looks=2)).splitlines()
    assert "Samples" not in text(replace(report(), looks=1))


def skew(made: Report) -> list[list[str]]:
    """Return the cells of the table of skew."""
    shown = text(made)
    if "skew: " not in shown:
        return []
    table = shown[shown.index("skew: ") :].split("\n\n")[1]
    return [line.split() for line in table.splitlines()]


def test_skew_is_shown_where_there_are_several_nodes() -> None:
    made = report()
    head, _, *rows = skew(made)
    assert head == ["memcg", "kind", "charged", "on", "0", "on", "1"]
    assert rows == [
        ["whole", "machine", "slab", "node", "0", "4,000", "B", "700", "B"],
        ["/web", "slab", "node", "0", "4,000", "B", "700", "B"],
    ]
    assert skew(replace(made, image=replace(made.image, nodes=(0,)))) == []
    assert skew(replace(made, skew=())) == []


def test_an_identity_without_rows_is_not_told_of_twice() -> None:
    """The table of identities has it."""
    made = clean()
    none = replace(made.identities[0], rows=0)
    assert "slab: exact" not in text(replace(made, identities=(none,), rows=()))
    other = replace(made.identities[0], name="kmem")
    rows = (replace(made.rows[0], identity="kmem"),)
    assert "kmem: exact" not in findings_text(replace(made, identities=(other,), rows=rows))


def test_what_is_missing_is_counted_and_shown() -> None:
    assert "Not read: 1 of slab" in text(report())
    assert "0xffff888000e00000" in text(report())
    assert "Not read" not in text(clean())


def test_no_colours_unless_it_is_a_terminal() -> None:
    assert "\x1b" not in text(report())
    assert "\x1b[" in text(report(), colour=True)


def test_what_is_not_charged_is_a_paragraph() -> None:
    some = (
        Uncharged("dentry", 1, 3, 576),
        Uncharged("filp", 2, 1, 232),
        Uncharged("pid", 3, None, None),
    )
    shown = text(replace(clean(), uncharged=some))
    assert (
        "\n\nNot charged, of caches that always account: at most 4 objects (808 bytes): dentry 3, "
        "filp 1\n\nRead "
    ) in shown
    assert "Not charged" not in text(replace(clean(), uncharged=some[2:]))


def test_notes_are_coloured() -> None:
    made = replace(report(), notes=("something else",))
    assert "\x1b[1;33msomething else" in text(made, colour=True)


HOSTILE = [
    "/\x1b[2J\x1b[1;1Hfake",
    "/\x1b]0;title\x07",
    "/\x9b31m",
    "/a\nEXACT: every identity holds",
    "/a\r/b",
    "/a\x00b",
    "/a\x08\x08b",
    "/\u202egpj.exe",
    "/\u2066a\u2069",
    "/a\u2028b\u2029c",
    "/\u200b\ufeff",
    "/\udcff\udc80",
    "/\U000e0041",
]


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_hostile_names_are_escaped(name: str) -> None:
    hostile = text(report(path=name, name=name), width=WIDE)
    plain = text(alike(name), width=WIDE)
    # It says the same number of things, none of them a control or an invisible character.
    assert len(hostile.splitlines()) == len(plain.splitlines())
    assert printable(name) in hostile
    for char in hostile:
        assert char == "\n" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
    hostile.encode()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_findings_fit_the_terminal(width: int) -> None:
    made = report(path="/kubepods.slice/" + "long-name-" * 20, note="word " * 50)
    shown, wide = (findings_text(made, w).partition("Finding 1:")[2] for w in (width, None))
    assert max(map(cell_len, shown.splitlines())) <= width
    assert "".join(shown.split()) == "".join(wide.split())
    assert "\n    0xffff888000f00000" in shown
    assert "\n      " in shown


def test_very_long_names_are_shown_in_full() -> None:
    name = "/" + "abcdefghi-" * 200
    shown = text(report(path=name, name=name), width=120)
    table = shown[shown.index("slab: findings") : shown.index("Finding 1")]
    assert max(len(line) for line in table.splitlines()) <= 120
    for made in (shown, text(report(path=name, name=name), width=None)):
        assert made.replace("\n", "").replace(" ", "").count("abcdefghi-") >= 200


@given(st.text(st.characters(), max_size=20))
@settings(deadline=None)
def test_no_name_changes_the_shape(name: str) -> None:
    shown = text(report(path=name, name=name), width=WIDE)
    assert len(shown.splitlines()) == len(text(alike(name), width=WIDE).splitlines())
    assert all(char == "\n" or char.isprintable() for char in shown)


@given(st.text(st.characters()))
def test_printable_is_one_printable_line(name: str) -> None:
    assert printable(name).isprintable()
    assert printable(name).isascii() or not name.isascii()


@given(st.text(st.characters(categories=["L", "N", "P", "S"])))
def test_printable_leaves_ordinary_names_alone(name: str) -> None:
    assert printable(name) == name


def test_numbers() -> None:
    assert [amount(None), amount(0), amount(1234567), amount(-4096)] == [
        "-",
        "0",
        "1,234,567",
        "-4,096",
    ]
    assert [signed(None), signed(0), signed(64), signed(-1234)] == ["-", "0", "+64", "-1,234"]


def test_how_far_rows_moved() -> None:
    made = report()
    moving = replace(
        made.rows[-1],
        status="moving",
        reason="changed between 3 samples",
        moved=Moved(looks=3, found=4096, claimed=12288, least=-5, most=7),
    )
    shown = text(replace(made, rows=(*made.rows[:-1], moving), looks=3), WIDE)
    assert "Samples: 3" in shown
    title = next(line for line in shown.splitlines() if "claimed_moved" in line)
    assert title.split()[-2:] == ["found_moved", "claimed_moved"]
    row = next(line for line in shown.splitlines() if "12,288" in line)
    assert row.split()[-2:] == ["4,096", "12,288"]
    assert "changed between 3 samples" in shown
    assert "claimed_moved" not in text(made)


def test_a_report_that_was_cut_short_says_so() -> None:
    assert "Interrupted: the results are incomplete" in text(replace(report(), interrupted=True))
    assert "Interrupted" not in text(report())
