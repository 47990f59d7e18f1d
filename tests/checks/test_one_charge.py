# SPDX-License-Identifier: LGPL-2.1-or-later
"""A half-done charge is one event: the rows of all identities must show the same."""

from __future__ import annotations

from dataclasses import replace

from support.made import OBJCG_A, OBJCG_B, ROOT, UNRECLAIMABLE, A, B, snapshot

from memcg_inspect.checks.inflight import mark_in_flight
from memcg_inspect.checks.one_charge import judge_together
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.model import Held, Running
from memcg_inspect.model_freeing import Transient
from memcg_inspect.report import Row

PAGE = 4096
#: Another child of ``/a``.
C = 0x3100
FUNCTIONS = ("__memcg_slab_post_alloc_hook", "kmem_cache_alloc_noprof", "alloc_inode")
PAYER_A, PAYER_B = Held("objcg", OBJCG_A, OBJCG_A), Held("objcg", OBJCG_B, OBJCG_B)


def an_object(size: int, address: int = 0x5000) -> Held:
    return Held("object", address, 0, 1, size, "unreclaimable")


def cpu(*held: Held, number: int = 0, functions: tuple[str, ...] = FUNCTIONS) -> Running:
    return Running(number, 7, "sh", functions, True, held)


def slab(difference: int, memcg: int = A) -> Row:
    key = RowKey("slab", UNRECLAIMABLE, "bytes", memcg, 1)
    return make_row(key, {"slab": 0}, {"folded": difference})


def whole_pages(difference: int, objcg: int = OBJCG_A, memcg: int = A) -> Row:
    key = RowKey("objcg_bytes", "bytes of whole pages", "bytes", memcg, 0, objcg)
    return make_row(key, {"slab": 0}, {"whole_pages": difference})


def kmem(pages: int, memcg: int = A) -> Row:
    key = RowKey("kmem", "MEMCG_KMEM", "pages", memcg)
    return make_row(key, {"objects": 0}, {"folded": pages})


def subtree(difference: int, memcg: int = ROOT) -> Row:
    key = RowKey("hierarchy", UNRECLAIMABLE, "bytes", memcg, 1)
    return make_row(key, {"subtree": 0}, {"folded": difference})


def judged(*rows: Row, running: tuple[Running, ...], **more: object) -> list[Row]:
    made = snapshot(running=running, **more)
    return judge_together(made, mark_in_flight(made, rows))


def statuses(*rows: Row, running: tuple[Running, ...]) -> list[str]:
    return [row.status for row in judged(*rows, running=running)]


def test_one_object_in_several_identities() -> None:
    busy = (cpu(an_object(104, 0x6000), an_object(200), PAYER_A),)
    rows = judged(slab(200), whole_pages(-200), subtree(200), running=busy)
    assert [row.status for row in rows] == ["in-flight"] * 3
    assert [row.allowance and row.allowance.held for row in rows] == [an_object(200)] * 3


def test_different_objects_in_different_identities() -> None:
    """Each row alone may be in flight. Not more than one of the charges can be half done."""
    busy = (cpu(an_object(104, 0x6000), an_object(200), PAYER_A),)
    assert statuses(slab(200), subtree(200), whole_pages(104), running=busy) == (
        ["in-flight", "in-flight", "unverifiable"]
    )
    [_, _, other] = judged(slab(200), subtree(200), whole_pages(104), running=busy)
    assert other.reason is not None
    assert other.allowance is None
    assert "CPU 0 (sh, 7), in __memcg_slab_post_alloc_hook made one charge" in other.reason


def test_objects_of_one_size_are_the_same_to_a_row() -> None:
    """Two identities that name different objects of one size agree, and name one of them."""
    one, other = an_object(200), an_object(200, 0x6000)
    rows = judged(slab(200), whole_pages(200), running=(cpu(one, other, PAYER_A),))
    assert [row.status for row in rows] == ["in-flight"] * 2
    assert len({row.allowance.held for row in rows if row.allowance}) == 1


def test_whole_pages_are_charged_for_an_object() -> None:
    busy = (cpu(an_object(200), PAYER_A),)
    assert statuses(slab(200), kmem(1), running=busy) == ["in-flight"] * 2
    page = Held("kmem", 0xE000, OBJCG_A, 1, PAGE, "unreclaimable")
    assert statuses(slab(200), kmem(1), running=(cpu(an_object(200), page, PAYER_A),)) == (
        ["in-flight"] * 2
    )
    large = Held("kmem", 0xE000, OBJCG_A, 1, 4 * PAGE, "unreclaimable")
    assert statuses(
        slab(200), whole_pages(200), kmem(4), running=(cpu(an_object(200), large),)
    ) == (["in-flight", "in-flight", "unverifiable"])


def test_memcgs_beside_each_other() -> None:
    """A charge shows in the rows of its memcg and of the ancestors, in all identities."""
    busy = (cpu(an_object(200), PAYER_A, PAYER_B),)
    assert statuses(slab(200, B), whole_pages(200, OBJCG_B, B), subtree(200, A), running=busy) == (
        ["in-flight"] * 3
    )


def test_memcgs_that_are_not_above_each_other() -> None:
    """The CPU points to both, and charges one of them."""
    other = replace(snapshot().memcgs[B], address=C, path="/a/c", payer=C)
    memcgs = {**snapshot().memcgs, C: other}
    busy = (cpu(an_object(200), PAYER_B, Held("memcg", C, C)),)
    rows = (slab(200, B), whole_pages(200, OBJCG_B, B), subtree(200, C))
    [alone] = judged(rows[-1], running=busy, memcgs=memcgs)
    assert alone.status == "in-flight"
    together = judged(*rows, running=busy, memcgs=memcgs)
    assert [row.status for row in together] == ["in-flight", "in-flight", "unverifiable"]


def test_another_cpu_explains_what_the_first_one_does_not() -> None:
    first = cpu(an_object(200), an_object(104, 0x6000), PAYER_A)
    second = cpu(an_object(104, 0x7000), PAYER_A, number=1)
    rows = judged(slab(200), subtree(200), whole_pages(104), running=(first, second))
    assert [row.status for row in rows] == ["in-flight"] * 3
    assert [row.allowance and row.allowance.cpu for row in rows] == [0, 0, 1]


def test_another_cpu_that_shows_nothing_explains_nothing() -> None:
    first = cpu(an_object(200), an_object(104, 0x6000), PAYER_A)
    for second in (cpu(PAYER_A, number=1), cpu(an_object(96), PAYER_A, number=1)):
        rows = judged(slab(200), subtree(200), whole_pages(104), running=(first, second))
        assert [row.status for row in rows] == ["in-flight", "in-flight", "unverifiable"]


def test_another_cpu_whose_charge_is_known_explains_a_row_of_it() -> None:
    first = cpu(an_object(200), an_object(104, 0x6000), PAYER_A)
    second = cpu(an_object(104, 0x7000), PAYER_A, PAYER_B, number=1)
    of_second = (slab(104, B), whole_pages(104, OBJCG_B, B))
    rows = judged(slab(200), subtree(200), *of_second, whole_pages(104), running=(first, second))
    assert [row.status for row in rows] == ["in-flight"] * 5
    assert [row.allowance and row.allowance.cpu for row in rows] == [0, 0, 1, 1, 1]
    [*_, last] = rows
    assert last.allowance is not None
    assert last.allowance.held == an_object(104, 0x7000)
    # It made one charge, and not of another size.
    rows = judged(
        slab(200),
        subtree(200),
        slab(96, B),
        whole_pages(104),
        running=(first, cpu(an_object(104, 0x7000), an_object(96), PAYER_A, PAYER_B, number=1)),
    )
    assert [row.status for row in rows] == [*["in-flight"] * 3, "unverifiable"]


def usage(memcg: int, pages: int) -> Row:
    key = RowKey("usage", "memory.usage", "pages", memcg)
    return make_row(key, {"lru": 0}, {"page_counter": pages})


def test_an_ancestor_of_charges_that_are_not_all_shown() -> None:
    """Two CPUs have charged pages to a child each, and not yet to their parent."""
    freeing = ("lru_gen_add_folio", "folio_batch_move_lru", "exit_mmap")
    other = replace(snapshot().memcgs[B], address=C, path="/a/c", payer=C)
    memcgs = {**snapshot().memcgs, C: other}
    of_b = (Held("folio", 0xE000, 0, 0, 3 * PAGE), Held("memcg", B, B))
    of_c = (Held("folio", 0xF000, 0, 0, 64 * PAGE), Held("memcg", C, C))
    two = (cpu(*of_b, functions=freeing), cpu(*of_c, number=1, functions=freeing))
    rows = (usage(B, 3), usage(C, 64), usage(A, -67))
    whole = judged(*rows, running=two, memcgs=memcgs)
    assert [row.status for row in whole] == ["in-flight"] * 3
    assert [row.allowance and row.allowance.amount for row in whole] == [3, 64, -67]
    # One of them has left an object half done, and so not these pages.
    both = (cpu(*of_b, an_object(200), PAYER_B, functions=(*freeing, *FUNCTIONS)), two[1])
    others = (slab(200, B), subtree(200, B), whole_pages(200, OBJCG_B, B))
    [*objects, three, sixty_four, above] = judged(*others, *rows, running=both, memcgs=memcgs)
    assert [row.status for row in objects] == ["in-flight"] * 3
    assert [three.status, sixty_four.status] == ["unverifiable", "in-flight"]
    assert (above.status, above.allowance) == ("unverifiable", None)
    assert above.reason == (
        "charges below this memcg may be half done, and not all are shown by stacks"
    )


def test_one_more_charge_in_an_interrupt() -> None:
    held = (an_object(104, 0x6000), an_object(200), PAYER_A)
    interrupted = (cpu(*held, functions=("kmem_cache_free", "handle_softirqs", *FUNCTIONS)),)
    assert statuses(slab(200), subtree(200), whole_pages(104), running=interrupted) == (
        ["in-flight"] * 3
    )


def test_what_is_in_a_stock_is_another_event() -> None:
    """Charging one memcg drains what the CPU holds for another one."""
    key = RowKey("usage", "memory.usage", "pages", A)
    in_advance = make_row(key, {"stock": 64}, {"page_counter": 0})
    busy = (cpu(an_object(200), PAYER_A),)
    assert statuses(slab(200), in_advance, running=busy) == ["in-flight"] * 2


def test_rows_that_no_cpu_explains_are_left_in_flight() -> None:
    """Objects that are being freed hold these references, whatever CPUs do."""
    key = RowKey("references", "refcnt", "references", A, 0, OBJCG_A)
    references = make_row(key, {"slab": 5}, {"refcnt": 6})
    freed = {OBJCG_A: [Transient("memcg", 0x10, freed_by="its work item is queued")]}
    busy = (cpu(an_object(200), PAYER_A),)
    rows = judged(slab(200), references, running=busy, transients=freed)
    assert [row.status for row in rows] == ["in-flight"] * 2
    assert rows[1].allowance is None
    assert rows[1].reason is not None
    assert "its work item is queued" in rows[1].reason


def test_rows_that_are_not_in_flight_are_left_as_they_are() -> None:
    sound, other = slab(0), slab(200, B)
    assert statuses(sound, other, running=(cpu(an_object(200), PAYER_A),)) == ["exact", "differs"]
    busy = (cpu(an_object(200), PAYER_A),)
    assert statuses(slab(201), running=busy) == ["unverifiable"]


def test_rows_name_the_object_that_all_of_them_can_mean() -> None:
    """A counter of a node shows which of two objects of one size it was."""
    elsewhere, other = an_object(200)._replace(nid=0), an_object(200, 0x6000)
    rows = judged(slab(200), whole_pages(200), running=(cpu(elsewhere, other, PAYER_A),))
    assert [row.allowance and row.allowance.held for row in rows] == [other] * 2


def test_a_reference_does_not_show_what_was_charged() -> None:
    """The stack has an old pointer to an object, which holds a reference, too."""
    entry = Held("zswap", 0x7000, 0, -1, 900, "compressed")
    key = RowKey("zswap", "MEMCG_ZSWAP_B", "bytes", A)
    stored = make_row(key, {"zswap": 0}, {"folded": 900})
    key = RowKey("references", "refcnt", "references", A, 0, OBJCG_A)
    references = make_row(key, {"zswap": 5}, {"refcnt": 6})
    storing = ("obj_cgroup_charge_zswap", "zswap_store", "swap_writeout")
    busy = (cpu(an_object(200), entry, PAYER_A, functions=storing),)
    rows = judged(stored, references, running=busy)
    assert [row.status for row in rows] == ["in-flight"] * 2


def test_a_cpu_that_flushes_makes_no_single_charge() -> None:
    """It changes many counters, each by an amount of its own."""
    key = RowKey("percpu", "MEMCG_PERCPU_B", "bytes", A)
    percpu = make_row(key, {"data": 0}, {"folded": 1000})
    held = (an_object(200), Held("percpu", 250, bytes=1000), PAYER_A)
    functions = ("pcpu_alloc_noprof", *FUNCTIONS)
    one = cpu(*held, functions=functions)
    assert statuses(slab(200), percpu, running=(one,)) == ["in-flight", "unverifiable"]
    flushing = cpu(*held, functions=(*functions, "mem_cgroup_css_rstat_flush"))
    assert statuses(slab(200), percpu, running=(flushing,)) == ["in-flight"] * 2
