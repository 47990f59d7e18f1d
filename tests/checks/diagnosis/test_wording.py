# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a reader is told of each kind of fault: a sentence, and functions of the kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from memcg_inspect.checks.diagnosis import at_once, half_done, mistakes, uncounted
from memcg_inspect.checks.diagnosis.cause import Hypothesis
from memcg_inspect.checks.diagnosis.differences import Signature
from memcg_inspect.checks.diagnosis.effects import Charge
from memcg_inspect.checks.diagnosis.proofs import PROVED
from memcg_inspect.checks.diagnosis.registry import CAUSES, cause_of

OUTPUT = Path(__file__).resolve().parents[3] / "docs/output.md"
#: ``struct mem_cgroup *`` and ``struct obj_cgroup *``
A, B, OA, OB = 0xA000, 0xB000, 0xA100, 0xB100


def fault(cause: str, **known: Any) -> Hypothesis:
    first = {"memcgs": (A,), "objcgs": (), "nid": None, "item": "", "amount": 1, "unit": "bytes"}
    return Hypothesis(cause, **{**first, "signature": Signature({}), **known})


def said(cause: str, **known: Any) -> str:
    return cause_of(cause).sentence(fault(cause, **known))


def charged(cause: str, what: Charge, **known: Any) -> str:
    first = {"objcgs": (OA,), "nid": what.nid, "item": what.kind, "amount": what.bytes}
    return said(cause, charge=what, **{**first, **known})


OBJECT = Charge("slab", "reclaimable", 1, 1234)


def test_causes_are_those_that_the_documentation_lists() -> None:
    listed = OUTPUT.read_text().split("\n| cause | meaning |\n")[1].split("\n\n")[0]
    table = dict(re.findall(r"^\| `([a-z-]+)` \| (.+) \|$", listed, re.MULTILINE))
    known = {cause.name: cause.meaning for cause in CAUSES if cause.meaning}
    known |= {proved.cause: proved.meaning for proved in PROVED.values()}
    known |= at_once.CAUSES | uncounted.CAUSES | mistakes.CAUSES | half_done.MEANINGS
    assert known == table
    assert {cause.name for cause in CAUSES} <= known.keys()


@pytest.mark.parametrize(
    ("kind", "detail", "nid", "name"),
    [
        ("slab", "unreclaimable", 1, "a slab object of 8,192 bytes on node 1"),
        ("slab", "reclaimable", 0, "a slab object of 8,192 bytes on node 0"),
        ("percpu", "data", None, "a percpu allocation of 8,192 bytes"),
        ("zswap", "compressed", None, "a zswap entry of 8,192 bytes"),
        ("sock", "", None, "socket memory of 8,192 bytes"),
        ("lru", "LRU_INACTIVE_FILE", 0, "user memory or page cache of 8,192 bytes on node 0"),
        ("kmem", "stack", 1, "memory of a kernel stack of 8,192 bytes on node 1"),
        ("kmem", "table", 1, "memory of page tables of 8,192 bytes on node 1"),
        ("kmem", "vmalloc", None, "memory of a vmalloc area of 8,192 bytes"),
        ("kmem", "large_kmalloc", 1, "a large kmalloc of 8,192 bytes on node 1"),
        ("kmem", "other", None, "a block of kernel memory of 8,192 bytes"),
    ],
)
def test_what_was_charged_has_a_name(kind: Any, detail: str, nid: int | None, name: str) -> None:
    what = Charge(kind, detail, nid, 8192)
    assert charged("not-counted", what) == (
        f"{name} refers to obj_cgroup 0xa100 of memcg 0xa000, and was not charged"
    )


@pytest.mark.parametrize(
    ("kind", "detail", "name"),
    [
        ("slab", "unreclaimable", "5 slab objects"),
        ("percpu", "data", "5 percpu allocations"),
        ("zswap", "compressed", "5 zswap entries"),
        ("sock", "", "5 pieces of socket memory"),
        ("lru", "", "5 folios of user memory or page cache"),
        ("kmem", "stack", "5 blocks of kernel stacks"),
        ("kmem", "table", "5 blocks of page tables"),
        ("kmem", "vmalloc", "5 blocks of vmalloc areas"),
        ("kmem", "large_kmalloc", "5 large kmallocs"),
        ("kmem", "other", "5 blocks of kernel memory"),
    ],
)
def test_several_charges_have_a_name(kind: Any, detail: str, name: str) -> None:
    several = Charge(kind, detail, 1, 20480, references=5, number=5, together=True)
    of = f"{name} of 20,480 bytes together on node 1"
    whose = "obj_cgroup 0xa100 of memcg 0xa000"
    assert charged("not-counted", several) == f"{of} refer to {whose}, and were not charged"
    assert charged("still-charged", several) == (
        f"{of} are charged to {whose}, and nothing refers to them: freed, or their owners lost"
    )
    moved = charged("object-owner", several, memcgs=(A, B), objcgs=(OA, OB))
    assert moved == (
        f"{of} were charged to {whose}, and now refer to obj_cgroup 0xb100 of memcg 0xb000"
    )


def test_an_allocation_of_several_nodes_has_a_number_of_nodes() -> None:
    parts = Charge("percpu", "data", None, 12288, parts=((0, 4096), (2, 8192)))
    assert charged("not-counted", parts, objcgs=(None,)) == (
        "a percpu allocation of 12,288 bytes on 2 nodes refers to memcg 0xa000, and was not charged"
    )


def test_charges() -> None:
    assert charged("still-charged", OBJECT) == (
        "a slab object of 1,234 bytes on node 1 is charged to obj_cgroup 0xa100 of memcg 0xa000, "
        "and nothing refers to it: freed, or its owner lost"
    )
    assert charged("charged-twice", OBJECT, objcgs=()) == (
        "a slab object of 1,234 bytes on node 1 was charged twice to memcg 0xa000, or was freed "
        "without being uncharged"
    )
    assert charged("wrong-node", OBJECT, place="node 0") == (
        "a slab object of 1,234 bytes on node 1 was counted on node 0"
    )
    assert charged("wrong-item", OBJECT, place="NR_A", item="NR_B") == (
        "a slab object of 1,234 bytes on node 1 was counted as NR_A, and is NR_B"
    )
    assert said("object-owner", memcgs=(A, B), objcgs=(None, None), amount=1) == (
        "a charge was charged to memcg 0xa000, and now refers to memcg 0xb000"
    )


def test_an_owner_that_is_no_obj_cgroup_is_named_if_it_is_known() -> None:
    first = "a slab object of 1,234 bytes on node 1 was charged to obj_cgroup 0xa100 of memcg "
    for owner, now in ((0xBAD, "0xbad, which is no obj_cgroup"), (None, "what is no obj_cgroup")):
        assert charged("object-owner", OBJECT, objcgs=(OA, owner)) == (
            f"{first}0xa000, and now refers to {now}"
        )


@pytest.mark.parametrize(("amount", "more"), [(1, "1 byte longer"), (-1, "1 byte shorter")])
def test_length_of_a_zswap_entry(amount: int, more: str) -> None:
    assert said("zswap-length", objcgs=(OA,), amount=amount) == (
        f"a zswap entry was {more} when it was charged to obj_cgroup 0xa100 of memcg 0xa000 than "
        "its length says"
    )


def test_sockets() -> None:
    assert said("socket-bytes", amount=2) == (
        "2 sockets of memcg 0xa000 charged no whole number of pages"
    )


@pytest.mark.parametrize(
    ("place", "where"),
    [
        ("cpu", "in a CPU's part, or in a flush of it"),
        ("folded", "in the folded value"),
        ("handed up", "in what children handed up, or in a flush of it"),
        ("folded, handed up", "in the folded value; or in what children handed up, or in a flush "
         "of it"),
    ],
)  # fmt: skip
def test_a_counter_and_its_places(place: str, where: str) -> None:
    known = {"item": "NR_X", "amount": 12, "place": place}
    assert said("counter", **known, nid=1) == (
        f"NR_X on node 1 of memcg 0xa000 is 12 bytes too high, {where}"
    )
    assert said("counter", **{**known, "amount": -1}, memcgs=()) == (
        f"NR_X is 1 byte too low, {where}"
    )


def test_a_counter_of_a_node_that_no_row_shows() -> None:
    assert said("counter", item="NR_X", amount=3, unit="pages", place="cpu of a node") == (
        "NR_X of memcg 0xa000 on one of its nodes is 3 pages too high, in a CPU's part, or in a "
        "flush of it"
    )


@pytest.mark.parametrize(
    ("cause", "known", "sentence"),
    [
        (
            "counted-wrong",
            {"item": "NR_X", "nid": 1, "amount": 8},
            "NR_X on node 1 of memcg 0xa000, and that of the whole memcg with it, counted 8 bytes "
            "too much",
        ),
        (
            "counted-wrong",
            {"item": "NR_X", "nid": 1, "amount": -8, "memcgs": ()},
            "NR_X on node 1 of some memcg, and that of the whole memcg with it, counted 8 bytes "
            "too little",
        ),
        (
            "counted-wrong",
            {"item": "NR_X", "amount": 1},
            "NR_X of memcg 0xa000, and that of the whole memcg with it, counted 1 byte too much",
        ),
        (
            "node-counter",
            {"item": "NR_X", "nid": 1, "amount": -8, "memcgs": (), "place": "one, another"},
            "NR_X of node 1 is 8 bytes too low, in one, or in another",
        ),
        (
            "node-counter",
            {"item": "NR_X", "amount": 8, "memcgs": (), "place": "the total of all nodes"},
            "NR_X is 8 bytes too high, in the total of all nodes",
        ),
        (
            "local-counter",
            {"item": "NR_X", "nid": 0},
            "the local counter (state_local) of NR_X on node 0 of memcg 0xa000 is 1 byte too high",
        ),
        (
            "page-counter",
            {"item": "memory.usage", "amount": 2, "unit": "pages"},
            "the page counter memory.usage of memcg 0xa000 is 2 pages too high",
        ),
        (
            "page-counter",
            {"item": "memory.usage", "amount": -1, "unit": "pages", "place": "and of all"},
            "the page counter memory.usage of memcg 0xa000 and of all is 1 page too low",
        ),
        (
            "charge-stock",
            {"item": "nr_pages", "amount": 4, "unit": "pages"},
            "the pages that CPUs have charged in advance of memcg 0xa000 are 4 pages too high",
        ),
        (
            "stock-bytes",
            {"objcgs": (OA,), "amount": -9},
            "the unused bytes of obj_cgroup 0xa100, in nr_charged_bytes or in the stock of a CPU, "
            "are 9 bytes too low",
        ),
        (
            "stock-slab-bytes",
            {"item": "NR_X", "nid": 2, "amount": 9},
            "NR_X on node 2 of memcg 0xa000 in the object stock of a CPU is 9 bytes too high",
        ),
        (
            "lru-size",
            {"item": "LIST", "nid": 2, "amount": -9, "unit": "pages"},
            "the size of the LRU list LIST on node 2 of memcg 0xa000 is 9 pages too low",
        ),
        (
            "cached-stack",
            {"nid": 2, "amount": 1},
            "1 page of cached kernel stacks on node 2 is charged",
        ),
        (
            "cached-stack",
            {"nid": 0, "amount": 4},
            "4 pages of cached kernel stacks on node 0 are charged",
        ),
        (
            "call-site",
            {"item": "fs/inode.c:1 f", "amount": 4},
            "the counter of the call site fs/inode.c:1 f is 4 bytes too high",
        ),
        (
            "reference-leaked",
            {"item": "refcnt", "objcgs": (OA,), "amount": 2},
            "refcnt of obj_cgroup 0xa100 has 2 references that nothing holds: a leak",
        ),
        (
            "reference-leaked",
            {"item": "css.refcnt", "amount": 1},
            "css.refcnt of memcg 0xa000 has 1 reference that nothing holds: a leak",
        ),
        (
            "reference-lost",
            {"item": "id.ref", "amount": -3, "memcgs": ()},
            "id.ref of id.ref lacks 3 references that are held: put too often, or not taken",
        ),
    ],
)
def test_counters_and_references(cause: str, known: dict[str, Any], sentence: str) -> None:
    assert said(cause, **known) == sentence


def test_obj_cgroups() -> None:
    assert said("task-objcg", memcgs=(A, B), objcgs=(OA, OB)) == (
        "a task of memcg 0xa000 had cached obj_cgroup 0xa100, and has 0xb100 of memcg 0xb000 in "
        "its place"
    )
    assert said("objcg-owner", item="objcg->nid", objcgs=(OA,), nid=2, place="node 1") == (
        "obj_cgroup 0xa100 is the one of memcg 0xa000 for node 2, and says that it is of node 1"
    )
    assert said("objcg-owner", item="objcg->memcg", objcgs=(OA,), place="0x77") == (
        "obj_cgroup 0xa100 is one of memcg 0xa000, and refers to 0x77, which is no memcg: nothing "
        "pays for its charges"
    )
    assert said("objcg-owner", item="objcg->memcg", memcgs=(A, B), objcgs=(OA,)) == (
        "obj_cgroup 0xa100 is one of memcg 0xa000, and refers to memcg 0xb000, to which all its "
        "charges went"
    )
    assert said("not-reparented", amount=-1) == (
        "memcg 0xa000 is offline, but 1 obj_cgroup still belongs to it and not to its parent"
    )
    assert said("not-reparented", amount=-2, nid=3) == (
        "memcg 0xa000 is offline, but 2 obj_cgroups of node 3 still belong to it and not to its "
        "parent"
    )


def test_released_memcgs() -> None:
    nothing = "no work item and no RCU callback is queued"
    assert said("memcg-leaked", amount=1, place=" below memcg 0xb000") == (
        f"1 released memcg below memcg 0xb000 was not freed, and nothing will free it: {nothing}"
    )
    assert said("memcg-leaked", amount=2) == (
        f"2 released memcgs were not freed, and nothing will free them: {nothing}"
    )


STAT = ("__mod_memcg_state", "__mod_memcg_lruvec_state")
FLUSH = ("mem_cgroup_css_rstat_flush", "mem_cgroup_stat_aggregate")
HOOK, FREE_HOOK = "__memcg_slab_post_alloc_hook", "__memcg_slab_free_hook"
PERCPU = ("pcpu_memcg_post_alloc_hook", "pcpu_memcg_free_hook")
KMEM = ("__memcg_kmem_charge_page", "__memcg_kmem_uncharge_page")


@pytest.mark.parametrize(
    ("cause", "item", "functions"),
    [
        ("object-owner", "slab", (HOOK,)),
        ("object-owner", "percpu", PERCPU[:1]),
        ("object-owner", "zswap", ("zswap_store", "zswap_store_page")),
        ("object-owner", "kmem", (KMEM[0], "split_page_memcg")),
        ("object-owner", "lru", ("charge_memcg", "mem_cgroup_migrate")),
        ("object-owner", "sock", ("mem_cgroup_sk_alloc",)),
        ("still-charged", "slab", (FREE_HOOK,)),
        ("still-charged", "percpu", PERCPU[1:]),
        ("still-charged", "zswap", ("zswap_entry_free", "obj_cgroup_uncharge_zswap")),
        ("still-charged", "kmem", KMEM[1:]),
        ("still-charged", "lru", ("uncharge_folio",)),
        ("still-charged", "sock", ("__sk_mem_reduce_allocated",)),
        ("not-counted", "slab", (HOOK,)),
        ("not-counted", "percpu", PERCPU[:1]),
        ("not-counted", "zswap", ("obj_cgroup_charge_zswap",)),
        ("not-counted", "kmem", KMEM[:1]),
        ("not-counted", "lru", ("charge_memcg",)),
        ("not-counted", "sock", ("__sk_mem_raise_allocated",)),
        ("charged-twice", "slab", (HOOK, FREE_HOOK)),
        ("charged-twice", "kmem", KMEM),
        ("zswap-length", "", ("zswap_store_page", "zswap_entry_free")),
        ("wrong-node", "", ("account_slab", "mod_objcg_mlstate", "__account_obj_stock")),
        ("wrong-item", "", ("cache_vmstat_idx", "mod_objcg_mlstate")),
        ("counter", "NR_PAGETABLE", (*STAT, *FLUSH)),
        ("counted-wrong", "NR_PAGETABLE", ("mod_objcg_mlstate", *STAT)),
        ("counted-wrong", "NR_SLAB_RECLAIMABLE_B",
         ("refill_obj_stock", "mod_objcg_mlstate", *STAT)),
        ("stock-slab-bytes", "", ("__account_obj_stock", "drain_obj_stock")),
        ("stock-bytes", "", ("consume_obj_stock", "refill_obj_stock", "drain_obj_stock")),
        ("reference-leaked", "", ("obj_cgroup_put", "css_put", "mem_cgroup_id_put")),
        ("reference-lost", "",
         ("obj_cgroup_get", "obj_cgroup_put", "css_get", "css_put", "mem_cgroup_id_put")),
        ("page-counter", "",
         ("page_counter_charge", "page_counter_try_charge", "page_counter_uncharge")),
        ("charge-stock", "", ("refill_stock", "consume_stock", "drain_stock")),
        ("local-counter", "", (*FLUSH, "reparent_state_local")),
        ("lru-size", "", ("update_lru_size", "lru_gen_update_size")),
        ("node-counter", "", ("mod_node_state", "refresh_cpu_vm_stats", "node_page_state_add")),
        ("zone-counter", "",
         ("__mod_zone_page_state", "refresh_cpu_vm_stats", "zone_page_state_add")),
        ("call-site", "", ("alloc_tag_add", "alloc_tag_sub")),
        ("socket-bytes", "", ("__sk_mem_schedule", "__sk_mem_reclaim")),
        ("not-reparented", "", ("memcg_reparent_objcgs", "mem_cgroup_css_offline")),
        ("memcg-leaked", "", ("css_release", "css_release_work_fn")),
        ("objcg-owner", "", ("memcg_reparent_objcgs", "obj_cgroup_alloc")),
        ("task-objcg", "", ("current_obj_cgroup", "__mem_cgroup_attach")),
        ("cached-stack", "", ("free_thread_stack", "try_release_thread_stack_to_cache")),
    ],
)  # fmt: skip
def test_functions_that_can_make_a_fault(cause: str, item: str, functions: tuple[str, ...]) -> None:
    known = cause_of(cause)
    assert known.functions_by_item.get(item, known.functions) == functions


@pytest.mark.parametrize(
    ("kind", "cause", "functions"),
    [
        ("unknown-objcg", "unknown-owner", (HOOK, "obj_cgroup_release")),
        ("objcg-set", "objcg-set", ("obj_cgroup_alloc",)),
        ("dangling-vector", "vector-freed", ("alloc_slab_obj_exts", "free_slab_obj_exts")),
        ("never-folded", "never-folded", ("css_rstat_updated", "cgroup_rstat_updated")),
        ("stale-active-memcg", "active-memcg", ("set_active_memcg",)),
        ("freed-active-memcg", "active-memcg", ("set_active_memcg",)),
        ("skew", "charged-to-node", ("obj_cgroup_from_current_nid",)),
        ("rule", "rule", (PERCPU[0], "zswap_store_page")),
    ],
)
def test_functions_of_what_an_address_proves(
    kind: str, cause: str, functions: tuple[str, ...]
) -> None:
    assert (PROVED[kind].cause, PROVED[kind].functions) == (cause, functions)


CHARGES = "object-owner still-charged not-counted charged-twice"
COUNTED = f"{CHARGES} counter"
REFERENCES = "reference-leaked reference-lost"


@pytest.mark.parametrize(
    ("identity", "causes"),
    [
        ("slab", f"{COUNTED} wrong-node wrong-item counted-wrong stock-slab-bytes"),
        *((name, f"{COUNTED} counted-wrong") for name in ("kernel_stack", "pagetable", "vmalloc")),
        *((name, COUNTED) for name in ("percpu", "kmem")),
        ("zswap", f"{COUNTED} zswap-length"),
        ("sock", f"{COUNTED} socket-bytes"),
        ("lru", f"{CHARGES} lru-size"),
        ("objcg_bytes", f"{CHARGES} stock-bytes"),
        ("usage", f"{CHARGES} page-counter charge-stock"),
        ("tcpmem", "page-counter socket-bytes"),
        *((name, "page-counter") for name in ("kmem_usage", "swap_usage")),
        *((name, "counter") for name in ("swap", "levels", "page_levels")),
        ("hierarchy", "counter counted-wrong"),
        ("node_levels", "counter counted-wrong node-counter"),
        ("local", "counter local-counter"),
        ("local_fold", "local-counter"),
        *((name, REFERENCES) for name in ("references", "css_refs", "id_refs")),
        *((f"node_{name}", "node-counter") for name in ("slab", "stack", "pagetable", "vmalloc")),
        ("node_totals", "node-counter"),
        *((f"zone_{name}", "zone-counter") for name in ("free", "zspages", "mlock", "lru")),
        *((f"zone_{name}", "zone-counter") for name in ("free_area", "totals")),
        ("objcg_lists", "objcg-owner"),
        ("reparenting", "not-reparented"),
        ("task_objcg", "task-objcg"),
        ("released", "memcg-leaked"),
        ("cached_stacks", "cached-stack"),
        ("alloc_tags", "call-site"),
        # An address proves what is wrong here, and it changes nothing else.
        *((name, "") for name in ("sock_bytes", "objcg_sets", "updated", "placement")),
    ],
)
def test_what_can_be_wrong_if_an_identity_does_not_hold(identity: str, causes: str) -> None:
    assert {cause.name for cause in CAUSES if identity in cause.rows} == set(causes.split())
