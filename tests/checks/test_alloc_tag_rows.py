# SPDX-License-Identifier: LGPL-2.1-or-later
"""The identity ``alloc_tags`` on snapshots made by hand."""

from __future__ import annotations

from typing import Any

from support.made import OBJCG_A, snapshot

from memcg_inspect.checks.identities.alloc_tags import alloc_tag_rows, counts_one_cpu
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.profile import Profile, Use
from memcg_inspect.checks.samples import settle
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import CallSite, Held, Running
from memcg_inspect.report import Row

KMALLOC, PERCPU, IDLE, MODULE = 0x100, 0x200, 0x300, 0x400


def site(tag: int, size: int | None, calls: int | None, **more: Any) -> CallSite:
    given = {"file": "mm/a.c", "line": tag, "module": None, "function": "f", **more}
    return CallSite(
        address=tag,
        accurate=True,
        counters=given.pop("counters", tag + 8),
        bytes=size,
        calls=calls,
        **given,
    )


def profile(*sites: CallSite, missing: str | None = None) -> Profile:
    """Three objects of 64 bytes on two nodes, one of them charged; percpu memory of two CPUs."""
    made = Profile(None, {s.address: s for s in sites}, missing=missing)
    made.add(Use(KMALLOC, "slab", 0, 0), 128, 2)
    made.add(Use(KMALLOC, "slab", OBJCG_A, 1), 64, 1)
    made.add(Use(PERCPU, "percpu", 0, 0), 8, 1)
    made.add(Use(PERCPU, "percpu", 0, 1), 8 + 16, 0)
    made.one_cpu[PERCPU] = 8
    return made


def whole() -> tuple[CallSite, ...]:
    return site(KMALLOC, 192, 3), site(PERCPU, 32, 1), site(IDLE, 0, 0)


def rows(made: Profile) -> dict[tuple[str, str], Row]:
    return {(r.item, r.unit): r for r in alloc_tag_rows(snapshot(profile=made))}


def test_sites_are_what_refers_to_them() -> None:
    found = rows(profile(*whole()))
    # Where nothing was allocated there is no row.
    assert set(found) == {
        (f"mm/a.c:{tag} func:f", unit)
        for tag in (KMALLOC, PERCPU)
        for unit in ("bytes", "references")
    }
    assert {row.status for row in found.values()} == {"exact"}
    assert [*found.values()][0].claimed == {"counter": 192}
    assert all([*(row.claimed or {})] == ["counter"] for row in found.values())
    assert found["mm/a.c:256 func:f", "bytes"].found == {"slab": 192}
    assert found["mm/a.c:512 func:f", "references"].found == {"percpu": 1}


def test_some_kernels_count_one_cpu() -> None:
    made = profile(site(KMALLOC, 192, 3), site(PERCPU, 8, 1))
    assert counts_one_cpu(made)
    assert not counts_one_cpu(profile(*whole()))
    assert {row.status for row in rows(made).values()} == {"exact"}


def test_neither_rule_fits() -> None:
    found = rows(profile(site(KMALLOC, 192, 3), site(PERCPU, 9, 1)))
    row = found["mm/a.c:512 func:f", "bytes"]
    assert (row.status, row.difference) == ("differs", 9 - 32)


def test_a_wrong_counter_is_named() -> None:
    made = profile(site(KMALLOC, 256, 4, module="mod"), site(PERCPU, 32, 1), site(IDLE, 0, 1))
    found = {key: row.difference for key, row in rows(made).items() if row.status == "differs"}
    assert found == {
        ("mm/a.c:256 [mod] func:f", "bytes"): 64,
        ("mm/a.c:256 [mod] func:f", "references"): 1,
        ("mm/a.c:768 func:f", "references"): 1,
    }
    findings = [pending.finding for pending in judge(snapshot(profile=made)).findings]
    said = {f.what for f in findings}
    assert "mm/a.c:256 [mod] func:f claims 64 bytes more than was found" in said
    assert {(f.identity, f.item, f.difference) for f in findings if f.identity == "alloc_tags"} == {
        ("alloc_tags", item, difference) for (item, _), difference in found.items()
    }


def test_a_reference_to_no_call_site() -> None:
    made = profile(*whole())
    made.add(Use(0xBAD, "page", 0, 0), 4096, 1)
    row = rows(made)["no call site at 0xbad", "references"]
    assert (row.status, row.difference) == ("differs", -1)
    row = rows(made)["no call site at 0xbad", "bytes"]
    assert (row.status, row.difference) == ("differs", -4096)
    made.missing = "call sites are missing"  # that may be one of them
    row = rows(made)["no call site at 0xbad", "references"]
    assert (row.status, row.claimed) == ("unverifiable", None)


def test_many_references_to_no_call_site_are_one_row() -> None:
    """Damaged memory can have any number of them."""

    def unknown(number: int) -> dict[tuple[str, str], Row]:
        made = profile(*whole())
        for n in range(number):
            made.add(Use(0xBAD000 + n, "page" if n else "slab", 0, 0), 64, 1)
        return {key: row for key, row in rows(made).items() if key[0].startswith("no call site")}

    assert len(unknown(64)) == 2 * 64
    found, item = unknown(65), "no call site at any of 65 addresses"
    assert {key: row.found for key, row in found.items()} == {
        (item, "bytes"): {"slab": 64, "page": 64 * 64},
        (item, "references"): {"slab": 1, "page": 64},
    }


def test_percpu_memory_of_no_call_site_tells_no_rule() -> None:
    made = profile(*whole())
    made.one_cpu[0xBAD] = 8
    made.add(Use(0xBAD, "percpu", 0, 0), 32, 1)
    assert not counts_one_cpu(made)


def test_what_could_not_be_read() -> None:
    made = profile(site(KMALLOC, None, None), site(PERCPU, 32, 1))
    unread = rows(made)["mm/a.c:256 func:f", "bytes"]
    assert (unread.status, unread.claimed) == ("unverifiable", None)
    assert unread.reason == "the counters of the call site are not in the image"
    # A reference that is missing can only make found too small.
    made = profile(site(KMALLOC, 128, 3), site(PERCPU, 40, 1), missing="pages are missing")
    found = {key: row.status for key, row in rows(made).items()}
    assert found == {
        ("mm/a.c:256 func:f", "bytes"): "differs",
        ("mm/a.c:256 func:f", "references"): "unverifiable",
        ("mm/a.c:512 func:f", "bytes"): "unverifiable",
        ("mm/a.c:512 func:f", "references"): "unverifiable",
    }


def test_a_counter_of_several_sites_cannot_be_divided() -> None:
    shared = {"counters": 0x8}
    for counted in (224, 20):
        some = (site(tag, counted, 4, **shared) for tag in (KMALLOC, PERCPU))
        assert {(row.status, row.reason) for row in rows(profile(*some)).values()} == {
            ("unverifiable", "several call sites share one counter")
        }
    # Those whose counters are nowhere share none.
    none = {"counters": 0}
    made = profile(site(KMALLOC, 192, 3, **none), site(PERCPU, 32, 1, **none))
    assert {row.status for row in rows(made).values()} == {"exact"}


def test_sites_of_one_line_are_told_apart() -> None:
    made = profile(site(KMALLOC, 192, 3, line=1), site(PERCPU, 32, 1, line=1))
    assert {item for item, _ in rows(made)} == {"mm/a.c:1 func:f", "mm/a.c:1 func:f (2)"}


def test_an_allocation_half_done() -> None:
    """It is in flight if the stack points to the call site and to the object."""
    made = profile(site(KMALLOC, 256, 4), site(PERCPU, 32, 1))

    def statuses(*held: Held) -> list[str]:
        cpu = Running(0, 7, "sh", ("kmalloc", "do_fork", "entry"), True, held)
        image = snapshot(profile=made, running=[cpu])
        return [row.status for row in judge(image).rows if row.identity == "alloc_tags"]

    block = Held("object", 0x5000, 0, 0, 64)
    assert statuses() == ["unverifiable", "unverifiable", "exact", "exact"]
    assert statuses(Held("call site", KMALLOC), block) == ["in-flight"] * 2 + ["exact"] * 2
    assert statuses(Held("call site", PERCPU), block) == ["differs"] * 2 + ["exact"] * 2
    # It is the call site of the row.
    made = profile(site(KMALLOC, 192, 3), site(PERCPU, 96, 2))
    assert statuses(Held("call site", PERCPU), block) == ["exact"] * 2 + ["in-flight"] * 2


def test_bytes_and_calls_of_a_site_are_not_taken_for_each_other() -> None:
    """Over several samples of a running kernel, calls become exact and wrong bytes stay."""
    samples = [
        judge(snapshot(profile=profile(site(KMALLOC, 256, calls), site(PERCPU, 32, 1))))
        for calls in (3, 4, 3, 5, 3, 4) * 2
    ]
    settled = settle(samples, True)
    statuses = {row.unit: row.status for row in settled.rows if row.item == "mm/a.c:256 func:f"}
    assert statuses == {"bytes": "differs", "references": "exact"}
    found = [
        pending.finding for pending in settled.findings if pending.finding.identity == "alloc_tags"
    ]
    assert [(f.unit, f.difference) for f in found] == [("bytes", 64)]


def test_not_kept_without_profiling() -> None:
    def reason(image: Snapshot) -> str | None:
        (identity,) = (i for i in judge(image).identities if i.name == "alloc_tags")
        assert identity.status == "not-kept"
        return identity.reason

    assert reason(snapshot(profile=Profile("built without it"))) == "built without it"
    assert reason(snapshot()) == "call sites were not read"
    assert alloc_tag_rows(snapshot()) == []
