# SPDX-License-Identifier: LGPL-2.1-or-later
"""The commands of docs/postmortem.md work as the document shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docscene
import pytest
from support.guests import BUILT_KERNELS, ROOT, GuestImage
from support.schemas import checked

from memcg_inspect.checks.evidence_query import EvidenceQuery
from memcg_inspect.checks.ledger import ChargeKind
from memcg_inspect.cli import main
from memcg_inspect.collect import collect
from memcg_inspect.collect.evidence import find_evidence
from memcg_inspect.image.image import image_of

pytestmark = [
    pytest.mark.image,
    pytest.mark.parametrize("kernel", {docscene.KERNEL} & set(BUILT_KERNELS)),
]

#: An object of the driver, and the pointer beside it.
CHARGE = 200 + 8


@pytest.fixture
def dump(kernel: str, tmp_path: Path) -> Iterator[tuple[GuestImage, docscene.Scene]]:
    out = tmp_path / "vmcore"
    scene = docscene.broken(out)
    yield GuestImage(out), scene
    out.unlink()


def run(capsys: pytest.CaptureFixture[str], image: GuestImage, *words: str) -> tuple[int, Any]:
    status = main([*words, "--json", "-c", str(image.core), "--debuginfo", "btf"])
    return status, checked(json.loads(capsys.readouterr().out))


def line_of(call: str) -> int:
    source = (ROOT / "fixtures/modules/charge/charge.c").read_text().splitlines()
    (line,) = [n for n, text in enumerate(source, 1) if call in text]
    return line


def test_from_the_dump_to_the_line(
    dump: tuple[GuestImage, docscene.Scene], capsys: pytest.CaptureFixture[str]
) -> None:
    image, scene = dump
    status, audit = run(capsys, image, "audit")
    assert (status, audit["verdict"]) == (1, "findings")
    paths = {memcg["address"]: memcg["path"] for memcg in audit["memcgs"]}
    found = {(f["identity"], paths[f["memcg"]]): f for f in audit["findings"]}
    assert {key: finding["difference"] for key, finding in found.items()} == {
        ("slab", "/shop/web"): -CHARGE,
        ("slab", "/shop/batch"): CHARGE,
        ("objcg_bytes", "/shop/web"): -CHARGE,
        ("objcg_bytes", "/shop/batch"): CHARGE,
        ("references", "/shop/web"): -1,
        ("references", "/shop/batch"): 1,
    }
    for (identity, _), finding in found.items():
        if identity != "references":
            assert finding["evidence"][0]["address"] == f"{scene.victim:#x}"
            assert f"{scene.element:#x}" in finding["evidence"][0]["note"]
    line = line_of("kmem_cache_alloc_node(cache")
    (diagnosis,) = audit["diagnoses"]
    assert diagnosis["evidence"][0]["address"] == f"{scene.victim:#x}"
    assert diagnosis["evidence"][0]["site"].endswith(f"charge.c:{line} [charge] allocate()")

    status, answer = run(capsys, image, "who", *(f"{address:x}" for address in scene))
    assert status == 0
    victim, neighbour, pointer = (
        {row["layer"]: row for row in table["rows"]} for table in answer["tables"]
    )
    assert victim["slab"] == neighbour["slab"] | {
        "address": f"{scene.victim:#x}",
        "offset": victim["slab"]["offset"],
    }
    assert [thing["object"]["memcg"] for thing in (victim, neighbour)] == [
        "/shop/web",
        "/shop/batch",
    ]
    for thing in (victim, neighbour):
        assert thing["object"]["charged"] == CHARGE
        where = f"charge.c:{line} [charge] allocate()"
        assert thing["allocated at"]["what"].endswith(where)
    assert re.search(r"mm/slub.c:\d+ alloc_slab_obj_exts", pointer["allocated at"]["what"])

    status, answer = run(capsys, image, "allocinfo", "--by", "memcg,site", "--memcg", "/shop/*")
    calls = {
        row["memcg"]: row["calls"]
        for row in answer["tables"][0]["rows"]
        if row["site"].endswith(f"charge.c:{line}")
    }
    assert calls == {"/shop/web": 61, "/shop/batch": 20}


@pytest.mark.parametrize(
    ("kind", "call"), [("percpu", "__alloc_percpu_gfp("), ("kmem", "__vmalloc(")]
)
def test_evidence_names_the_line_of_other_charges(kernel: str, kind: ChargeKind, call: str) -> None:
    image = image_of(GuestImage(docscene.whole()).program())
    snapshot = collect(image)
    paths = {a: snapshot.memcgs[m].path for a in snapshot.objcgs if (m := snapshot.payer(a))}
    payers = frozenset(a for a, path in paths.items() if path.startswith("/shop/"))
    (found,) = find_evidence(image, snapshot, [EvidenceQuery(kind, payers)]).values()
    wanted = f"charge.c:{line_of(call)} [charge] allocate()"
    assert any((one.site or "").endswith(wanted) for one in found.listed)


def test_before_that_nothing_is_wrong(kernel: str) -> None:
    assert GuestImage(docscene.whole()).report().verdict == "exact"
