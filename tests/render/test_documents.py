# SPDX-License-Identifier: LGPL-2.1-or-later
"""Reports as JSON: one valid document, addresses as strings, null for what is unknown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.documents import strictly
from support.reports import GONE, OBJCG, ROOT, WEB, clean, diagnosed, more, report

from memcg_inspect.model import NUMA_NO_NODE
from memcg_inspect.render.documents import (
    answer_document,
    record_document,
    report_document,
    to_json,
)
from memcg_inspect.report import Evidence, Report, Uncharged, UnchargedSite
from memcg_inspect.tables import SCHEMA, Answer, Column, NotRead, Table

#: Fields that hold an address wherever they are.
ADDRESSES = {"address", "memcg", "objcg", "parent", "page"}


def document(made: Report) -> dict[str, Any]:
    return strictly(to_json(report_document(made)))


def fields(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every (name, value) of a document, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from fields(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from fields(inner, name)
    else:
        yield name, value


def test_top_level_is_the_contract() -> None:
    assert SCHEMA == 1
    made = document(report())
    assert made["schema"] == 1
    assert {
        "schema",
        "image",
        "verdict",
        "memcgs",
        "identities",
        "rows",
        "skew",
        "findings",
        "diagnoses",
        "coverage",
        "timings",
    } <= set(made)


def test_addresses_are_hex_strings() -> None:
    seen = set()
    for name, value in fields(document(report())):
        if name in ADDRESSES and value is not None:
            seen.add(name)
            assert re.fullmatch(r"0x[0-9a-f]+", value), (name, value)
    assert seen == ADDRESSES


def test_no_integer_loses_precision_elsewhere() -> None:
    # what a reader with 64-bit floats still tells apart
    for name, value in fields(document(report())):
        if isinstance(value, int):
            assert abs(value) < 2**53, name


def test_amounts_are_integers() -> None:
    for made in document(report())["rows"]:
        amounts = [*made["found"].values(), *(made["claimed"] or {}).values()]
        assert all(type(value) is int for value in amounts)


def test_what_could_not_be_read_is_null_with_a_reason() -> None:
    [unread] = [r for r in document(report())["rows"] if r["status"] == "unverifiable"]
    assert unread["claimed"] is None
    assert unread["difference"] is None
    assert unread["hierarchy"] is None
    assert unread["reason"] == "the counter could not be read"
    # what was found is there all the same
    assert unread["found"] == {"slab": 700}


def test_difference_is_claimed_less_found() -> None:
    [row] = [r for r in document(report())["rows"] if r["status"] == "differs"]
    assert row["found"] == {"slab": 4000}
    assert row["claimed"] == {"folded": 5064, "pending_cpu": 0, "stock": 0}
    assert row["difference"] == 1064


def test_rows_that_are_all_zero_are_left_out_and_counted() -> None:
    made = document(clean())
    assert made["rows"] == []
    assert made["identities"][0]["rows"] == 1


def test_removed_memcgs_share_paths_and_not_addresses() -> None:
    memcgs = {memcg["address"]: memcg for memcg in document(report())["memcgs"]}
    assert memcgs[f"{WEB:#x}"]["path"] == memcgs[f"{GONE:#x}"]["path"] == "/web"
    assert memcgs[f"{WEB:#x}"]["state"] == "online"
    assert memcgs[f"{GONE:#x}"]["state"] == "dying"
    assert memcgs[f"{ROOT:#x}"]["parent"] is None
    assert memcgs[f"{WEB:#x}"]["parent"] == f"{ROOT:#x}"


def test_paths_are_beside_addresses_of_memcgs() -> None:
    made = document(diagnosed())
    paths = {memcg["address"]: memcg["path"] for memcg in made["memcgs"]}
    seen = 0
    for record in (*made["findings"], *made["diagnoses"]):
        for one in (record, *record["evidence"]):
            if "memcgs" in one:
                assert one["memcg_paths"] == [paths[memcg] for memcg in one["memcgs"]]
            assert ("memcg" in one) == ("memcg_path" in one)
            if "memcg" in one:
                assert one["memcg_path"] == paths.get(one["memcg"])
            seen += "memcg" in one or "memcgs" in one
    assert seen >= 3


def test_a_memcg_that_is_not_there_has_no_path() -> None:
    made = report()
    [finding] = made.findings
    for memcg in (None, 0x1000):
        changed = replace(made, findings=(replace(finding, memcg=memcg),))
        assert document(changed)["findings"][0]["memcg_path"] is None


def test_finding() -> None:
    [finding] = document(report())["findings"]
    assert finding["memcg"] == f"{WEB:#x}"
    assert finding["objcg"] == f"{OBJCG:#x}"
    assert finding["difference"] == 1064
    assert finding["evidence_is"] == "candidates"
    first, second = finding["evidence"]
    assert first["cache"] == "dentry"
    assert first["address"] == "0xffff888000f00000"
    # Unknown fields of evidence are left out.
    assert second == {"address": "0xfffffffffffffff8", "kind": "slab"}
    # What is not known of a finding is null.
    assert (finding["evidence_total"], finding["evidence_tied"]) == (None, None)


def test_candidates_have_a_rank_and_a_total() -> None:
    made = report()
    first = replace(made.findings[0].evidence[0], rank=1)
    finding = replace(made.findings[0], evidence=(first,), evidence_total=50, evidence_tied=49)
    [shown] = document(replace(made, findings=(finding,)))["findings"]
    assert shown["evidence"][0]["rank"] == 1
    assert (shown["evidence_total"], shown["evidence_tied"]) == (50, 49)


def test_diagnosis() -> None:
    made = document(diagnosed())
    [shown] = made["diagnoses"]
    assert (shown["cause"], shown["confidence"]) == ("counter", "likely")
    assert shown["memcgs"] == [f"{WEB:#x}", f"{ROOT:#x}"]
    assert (shown["nid"], shown["amount"], shown["unit"]) == (0, 1064, "bytes")
    assert (shown["findings"], made["unexplained"]) == ([0], [1])
    assert shown["evidence"] == made["findings"][0]["evidence"]
    assert shown["signature"][0]["memcg"] == f"{WEB:#x}"


def test_a_finding_without_a_diagnosis_is_unexplained() -> None:
    made = document(report())
    assert (made["diagnoses"], made["unexplained"]) == ([], [0])


def test_no_node_is_null_with_a_reason() -> None:
    made = document(more())
    assert [cell["backing_nid"] for cell in made["skew"]] == [0, 1, None]
    assert [bool(cell["reason"]) for cell in made["skew"]] == [False, False, True]
    [finding] = made["findings"]
    assert finding["nid"] is None
    [evidence] = finding["evidence"]
    assert evidence["nid"] is None
    assert evidence["reason"]


def test_image_says_where_types_come_from() -> None:
    assert document(more())["image"]["debug_info"] == "BTF of the image"


def test_times_are_rounded() -> None:
    assert document(report())["timings"] == {"pages": 0.031235}


def test_coverage() -> None:
    coverage = document(report())["coverage"]
    assert coverage["pages"]["read"] == 262144
    assert coverage["pages"]["unreadable"] == 0
    assert coverage["slab"]["unreadable"] == 1
    assert coverage["slab"]["examples"][0]["address"] == "0xffff888000e00000"


def test_report_is_one_document() -> None:
    written = to_json(report_document(report()))
    decoded, end = json.JSONDecoder().raw_decode(written)
    assert decoded["schema"] == 1
    assert written[end:].strip() == ""


@pytest.mark.parametrize(
    "name", ['"', "\\", "\n", "\x00", "\x1b[31m", "\u202e", "\u2028", "\udcff"]
)
def test_hostile_names_stay_inside_their_strings(name: str) -> None:
    written = to_json(report_document(report(path="/" + name, name=name)))
    # plain ASCII: no terminal that shows it can be told anything
    assert written.isascii()
    assert all(char.isprintable() or char == "\n" for char in written)
    made = json.loads(written)
    assert made["memcgs"][1]["path"] == "/" + name
    assert made["findings"][0]["evidence"][0]["cache"] == name


@settings(deadline=None)
@given(st.text(st.characters()))
def test_any_name_comes_back_as_it_was(name: str) -> None:
    assert json.loads(to_json(report_document(report(path=name))))["memcgs"][1]["path"] == name


def test_flags_are_booleans() -> None:
    """They may be words of an image."""
    rows = [SimpleNamespace(flag=flag) for flag in (1, 0, None)]
    table = Table("t", "t", (Column("flag", "flag", ""),), rows)
    document = answer_document(Answer("test", report().image, (table,)))
    found = [row["flag"] for row in document["tables"][0]["rows"]]
    assert [(value, type(value)) for value in found[:2]] == [(True, bool), (False, bool)]
    assert found[2] is None


def test_a_record_that_is_a_document() -> None:
    """Such as the result of one of many dumps."""
    evidence = Evidence(0xABC, "slab", nid=NUMA_NO_NODE, bytes=7)
    made = strictly(to_json(record_document("test", evidence)))
    assert (made["schema"], made["command"], made["address"]) == (1, "test", "0xabc")
    assert (made["kind"], made["bytes"]) == ("slab", 7)


def test_each_value_is_on_a_line_of_its_own() -> None:
    assert to_json({"a": [1, "b"]}) == '{\n "a": [\n  1,\n  "b"\n ]\n}\n'


def test_totals_are_null_where_a_part_could_not_be_read() -> None:
    totals = {"bytes": 5, "objects": NotRead("gone")}
    made = answer_document(Answer("test", report().image, (Table("t", "t", (), [], totals),)))
    assert made["tables"][0]["totals"] == {"bytes": 5, "objects": None}
    without = answer_document(Answer("test", report().image, (Table("t", "t", (), []),)))
    assert without["tables"][0]["totals"] is None


def test_a_list_that_is_not_known_is_null() -> None:
    """Not an empty one."""
    shown = [
        record_document("test", Uncharged("c", 0xABC, 2, 64, sites))["sites"]
        for sites in (None, (), (UnchargedSite("f:1", 2),))
    ]
    assert shown == [None, [], [{"site": "f:1", "objects": 2}]]
