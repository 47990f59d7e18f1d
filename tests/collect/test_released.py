# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Memcgs that are on no list, and what will free them.

A memcg of the image is taken off the list of those that are known, and its words are changed to
what the functions of kernel/cgroup/cgroup.c make of them: ``css_release()`` queues a work item,
``css_release_work_fn()`` sets ``CSS_RELEASED`` and queues ``css_free_rwork_fn()`` for after a grace
period, and ``percpu_ref_exit()`` clears ``refcnt.data``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from drgn import FaultError, Object, Program, container_of, sizeof
from drgn.helpers.linux.cgroup import css_for_each_child
from drgn.helpers.linux.idr import idr_for_each
from drgn.helpers.linux.list import list_empty
from drgn.helpers.linux.percpu import per_cpu
from support.guests import Lab
from support.planting import Overlay, change

from memcg_inspect.collect import collect, released
from memcg_inspect.collect.released import RELEASED, Pending, ReleasedReader
from memcg_inspect.collect.stopped import with_pending
from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.memcontrol import read_memcgs
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.slab import Slab, SlabReader
from memcg_inspect.model import Coverage
from memcg_inspect.model_freeing import Transient

pytestmark = pytest.mark.image

#: Flags of include/linux/cgroup-defs.h, and ``WORK_STRUCT_PENDING``.
CSS_ONLINE, CSS_RELEASED, PENDING = 1 << 1, 1 << 2, 1


class Lost(NamedTuple):
    """An image, a memcg that is taken for one that is on no list, and the slab that it is in."""

    prog: Program
    memcg: Object
    known: set[int]
    slab: Slab
    overlay: Overlay

    def put(self, *changes: tuple[Object, int]) -> None:
        """Change integers and pointers of the image."""
        self.overlay.write(tuple(change(thing, value) for thing, value in changes))

    def reader(self) -> ReleasedReader:
        """Return a reader that knows all other memcgs."""
        image = Image(self.prog)
        return ReleasedReader(image, SlabReader(image), self.known - {self.memcg.value_()})

    def found(self) -> list[tuple[int, Transient]]:
        return list(self.reader().read(self.slab))

    def parents(self) -> list[int]:
        return list(self.reader().children(self.slab))

    def what_frees(self) -> Transient:
        return Pending(Image(self.prog)).of(Transient(RELEASED, self.memcg.value_()))


@pytest.fixture(params=["7.3", "6.1"])
def lost(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Lost]:
    prog = lab.image(request.param, "4", "mixed").program()
    image = Image(prog)
    known = set(read_memcgs(image, Coverage()))
    slabs = SlabReader(image)
    # One in use, with an ID, and without children. Its parent is no root.
    memcg = next(
        found
        for at in sorted(known)
        if (found := Object(prog, "struct mem_cgroup *", at)).css.flags & CSS_ONLINE
        and found.css.parent
        and found.css.parent.parent
        and not list(css_for_each_child(found.css.address_of_()))
    )
    slab = next(
        slab
        for piece in scan_pages(image)
        for slab in filter(None, map(slabs.slab, piece.slabs))
        if slab.cache.name.startswith(("mem_cgroup", "kmalloc"))
        and memcg.value_() in set(slabs.objects(slab))
    )
    overlay = Overlay(prog)
    yield Lost(prog, memcg, known, slab, overlay)
    overlay.clear()


def holders(memcg: Object) -> list[Object]:
    """Return what has the obj_cgroups that ``mem_cgroup_css_free()`` puts, by node since 7.1."""
    if hasattr(memcg.nodeinfo[0], "orig_objcg"):
        return [memcg.nodeinfo[nid] for nid in range(4)]
    return [memcg] if hasattr(memcg, "orig_objcg") else []  # since 6.2


def orig_objcgs(memcg: Object) -> list[int]:
    return [holder.orig_objcg.value_() for holder in holders(memcg)]


def test_a_memcg_on_a_list_was_not_released(lost: Lost) -> None:
    reader = ReleasedReader(Image(lost.prog), SlabReader(Image(lost.prog)), lost.known)
    assert list(reader.read(lost.slab)) == []
    assert list(reader.children(lost.slab)) == []
    assert reader.coverage.unreadable == 0
    assert reader.faults == []


def test_one_that_is_on_no_list_holds_its_obj_cgroups(lost: Lost) -> None:
    """Without the flag, it has not been released: it is being made, or its slab is used again."""
    objcgs, transient = orig_objcgs(lost.memcg), Transient(RELEASED, lost.memcg.value_())
    assert lost.found() == [(objcg, transient) for objcg in objcgs]
    assert lost.parents() == []
    flags = lost.memcg.css.flags
    lost.put((flags, flags.value_() | CSS_RELEASED))
    assert lost.found() == [(objcg, transient) for objcg in (0, *objcgs)]
    assert lost.parents() == [
        container_of(lost.memcg.css.parent, "struct mem_cgroup", "css").value_()
    ]


def test_an_obj_cgroup_that_it_has_put_is_none(lost: Lost) -> None:
    objcgs = orig_objcgs(lost.memcg)
    lost.put(*((holder.orig_objcg, 0) for holder in holders(lost.memcg)[:1]))
    assert [objcg for objcg, _ in lost.found()] == objcgs[1:]


def test_other_flags_are_not_taken_for_that(lost: Lost) -> None:
    lost.put((lost.memcg.css.flags, 0xFF & ~CSS_RELEASED))
    assert 0 not in dict(lost.found())
    assert lost.parents() == []


def test_one_that_is_freed_has_no_reference_counter(lost: Lost) -> None:
    css = lost.memcg.css
    lost.put((css.flags, css.flags.value_() | CSS_RELEASED), (css.refcnt.data, 0))
    assert 0 not in dict(lost.found())
    assert lost.parents() == []
    queue(lost, css.destroy_rwork.work, "css_free_rwork_fn")
    assert lost.parents() == [container_of(css.parent, "struct mem_cgroup", "css").value_()]


def test_one_whose_work_item_is_pending_holds_its_parent(lost: Lost) -> None:
    css = lost.memcg.css
    data = css.destroy_rwork.work.data.counter
    lost.put((css.flags, 0), (css.refcnt.data, 0), (data, data.value_() % 2**64 | PENDING))
    assert lost.parents() == [container_of(css.parent, "struct mem_cgroup", "css").value_()]


def test_objects_of_other_controllers_are_no_memcgs(lost: Lost) -> None:
    css = lost.memcg.css
    lost.put((css.flags, CSS_RELEASED), (css.ss, css.ss.value_() + 8))
    assert lost.found() == []
    assert lost.parents() == []


def test_caches_that_may_have_memcgs(lost: Lost) -> None:
    """Up to 6.15 memcgs come from kmalloc(), with a pointer for each node at their end."""
    reader, cache = lost.reader(), lost.slab.cache
    assert reader.may_read(cache)
    size = sizeof(lost.prog.type("struct mem_cgroup"))
    least = size + 8 * sum(1 for nid in range(64) if possible(lost.prog, nid))
    for name, bytes_, expected in (
        ("mem_cgroup", 1, True),
        ("kmalloc-4k", least, True),
        ("kmalloc-4k", least - 1, False),
        ("kmalloc-4k", 2 * least - 1, True),
        ("kmalloc-cg-4k", 2 * least, False),
        ("dentry", least, False),
    ):
        assert reader.may_read(cache._replace(name=name, object_size=bytes_)) == expected


def possible(prog: Program, nid: int) -> bool:
    """Return whether a node is in ``node_states[N_POSSIBLE]``, which is the first one."""
    return bool(prog["node_states"][0].bits[0].value_() >> nid & 1)


def queue(lost: Lost, work: Object, function: str) -> None:
    """Put a work item into the list of a pool without any, as ``insert_work()`` does."""
    pools = (
        Object(lost.prog, "struct worker_pool *", pool.value_())
        for _, pool in idr_for_each(lost.prog["worker_pool_idr"].address_of_())
    )
    head = next(pool for pool in pools if list_empty(pool.worklist.address_of_())).worklist
    entry = work.entry
    lost.put(
        (head.next, entry.address_ or 0),
        (head.prev, entry.address_ or 0),
        (entry.next, head.address_ or 0),
        (entry.prev, head.address_ or 0),
        (work.func, lost.prog.symbol(function).address),
    )


def test_nothing_frees_a_memcg_in_use(lost: Lost) -> None:
    """What nothing frees is a leak: the rows of its parent need its ID, and its sockets."""
    memcg, found = lost.memcg, lost.what_frees()
    assert (found.what, found.address) == (RELEASED, memcg.value_())
    assert (found.freed_by, found.unsure) == (None, False)
    assert found.parent == container_of(memcg.css.parent, "struct mem_cgroup", "css").value_()
    assert found.swap_id == memcg.id.id.value_() > 0


@pytest.mark.parametrize("function", ["css_release_work_fn", "css_free_rwork_fn"])
def test_a_work_item_that_is_queued_frees_it(lost: Lost, function: str) -> None:
    css = lost.memcg.css
    work = css.destroy_work if function == "css_release_work_fn" else css.destroy_rwork.work
    queue(lost, work, function)
    found = lost.what_frees()
    assert found.freed_by == "its work item is queued or running"
    assert not found.unsure
    assert (found.parent, found.swap_id) == (None, 0)


def test_a_work_item_of_another_function_frees_nothing(lost: Lost) -> None:
    queue(lost, lost.memcg.css.destroy_work, "vmstat_update")
    assert lost.what_frees().freed_by is None


@pytest.mark.parametrize("member", ["destroy_work", "destroy_rwork"])
def test_a_work_item_that_is_pending_and_in_no_list_may_free_it(lost: Lost, member: str) -> None:
    """rcu_do_batch() takes callbacks off all lists before it calls them."""
    work = lost.memcg.css.member_(member)
    data = (work if member == "destroy_work" else work.work).data.counter
    lost.put((data, data.value_() % 2**64 | PENDING))
    found = lost.what_frees()
    assert (found.freed_by, found.unsure) == (None, True)


def test_a_callback_that_is_queued_frees_it(lost: Lost) -> None:
    """queue_rcu_work() queues the callback, and that queues the work item."""
    callback = lost.memcg.css.destroy_rwork.rcu
    cpu = 1
    head = per_cpu(lost.prog["rcu_data"], cpu).cblist.head
    lost.put((callback.next, head.value_()), (head, callback.address_ or 0))
    found = lost.what_frees()
    assert found.freed_by == f"its RCU callback is queued on CPU {cpu}"
    assert not found.unsure


def test_a_list_of_callbacks_that_is_broken_makes_it_unsure(lost: Lost) -> None:
    callback = lost.memcg.css.destroy_rwork.rcu
    head = per_cpu(lost.prog["rcu_data"], 0).cblist.head
    lost.put((callback.next, callback.address_ or 0), (head, callback.address_ or 0))
    found = lost.what_frees()
    assert (found.freed_by, found.unsure) == (None, True)


def test_a_memcg_that_is_not_in_the_image_is_unsure(lost: Lost) -> None:
    found = Pending(Image(lost.prog)).of(Transient(RELEASED, 0x1000))
    assert found == Transient(RELEASED, 0x1000, unsure=True)


@pytest.mark.parametrize("lost", ["7.3"], indirect=True)
def test_what_frees_a_bpf_map(lost: Lost) -> None:
    """A map waits for its work item, for RCU, or for a grace period of RCU tasks, of no list."""
    prog = lost.prog
    # Any memory of the slab will do: only the callback and the work item of a map are read.
    bpf_map = Object(prog, "struct bpf_map *", lost.memcg.value_())
    pending = Pending(Image(prog))
    transient = Transient("BPF map", bpf_map.value_())
    lost.put((bpf_map.rcu.func, 0))
    assert pending.of(transient) == transient
    for name, waits in (("bpf_map_free_rcu_gp", True), ("css_free_rwork_fn", False)):
        lost.put((bpf_map.rcu.func, prog.symbol(name).address))
        assert pending.of(transient) == transient._replace(unsure=waits)
    queue(lost, bpf_map.work, "bpf_map_free_deferred")
    found = Pending(Image(prog)).of(transient)
    assert found.freed_by == "its work item is queued or running"


def missing(*_: object) -> Iterator[Object]:
    """Take the place of a reader that meets memory that is not in the image."""
    raise FaultError("not in the image", 0x1230)


def test_objects_that_are_not_in_the_image(lost: Lost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may be a memcg. On a running kernel, it has been freed meanwhile."""
    reader = lost.reader()
    reader.slabs = SimpleNamespace(objects=lambda _: [0x1000])  # type: ignore[assignment]
    assert list(reader.read(lost.slab)) == list(reader.children(lost.slab)) == []
    (missed,) = reader.coverage.examples
    assert (missed.what, missed.address) == ("possible memcg", 0x1000)
    monkeypatch.setattr(Image, "is_moving", True)
    assert list(reader.read(lost.slab)) == []
    assert reader.coverage.unreadable == 1


@pytest.mark.parametrize("is_free", [lambda *_: True, missing])
def test_a_free_object_is_no_memcg(lost: Lost, is_free: Callable[..., bool]) -> None:
    """One in a slab with a free list that is broken may hold references: a CPU may change it."""
    flags, reader = lost.memcg.css.flags, lost.reader()
    lost.put((flags, flags.value_() | CSS_RELEASED))
    before = dict(reader.read(lost.slab))
    assert 0 in before
    reader._free = SimpleNamespace(is_free=is_free)  # type: ignore[assignment]
    held = {} if is_free is not missing else {objcg: t for objcg, t in before.items() if objcg}
    assert dict(reader.read(lost.slab)) == {
        objcg: transient._replace(unsure=True) for objcg, transient in held.items()
    }
    assert reader.coverage.unreadable == 0
    transient = Transient(RELEASED, lost.memcg.value_(), unsure=True)
    assert Pending(reader.image).of(transient).unsure


@pytest.mark.parametrize("pages", [0, 5])
def test_a_memcg_that_nothing_frees_may_have_charged_sockets(lost: Lost, pages: int) -> None:
    slot = StatReader(Image(lost.prog), ["MEMCG_SOCK"]).slots["MEMCG_SOCK"]
    lost.put((lost.memcg.vmstats.state[slot], pages))
    assert lost.what_frees().sock_pages == pages


def test_a_work_item_that_is_pending_on_a_running_kernel(
    lost: Lost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, lists change while they are read, so the bit is all that tells."""
    data = lost.memcg.css.destroy_work.data.counter
    lost.put((data, data.value_() % 2**64 | PENDING))
    monkeypatch.setattr(Image, "is_moving", True)
    assert lost.what_frees().freed_by == "its work item is pending"
    lost.put((data, data.value_() % 2**64 & ~PENDING))
    assert lost.what_frees().freed_by is None


@pytest.mark.parametrize("error", [FaultError("not in the image", 0x1230), UnknownKernelError("")])
def test_callbacks_that_cannot_be_read_make_it_unsure(
    lost: Lost, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def queued_callbacks(image: Image) -> dict[int, int]:
        raise error

    monkeypatch.setattr(released, "queued_callbacks", queued_callbacks)
    found = lost.what_frees()
    assert (found.freed_by, found.unsure) == (None, True)


def test_work_items_that_cannot_be_read(lost: Lost, monkeypatch: pytest.MonkeyPatch) -> None:
    """A memcg may then hold a reference to its parent that is not found."""
    assert lost.reader().faults == []
    monkeypatch.setattr(released, "works_of", missing)
    assert [fault.address for fault in lost.reader().faults] == [0x1230]

    def broken(image: Image, function: int, on_fault: Callable[[FaultError], None]) -> list[Object]:
        on_fault(FaultError("the list does not lead back", 0x1240))
        return []

    monkeypatch.setattr(released, "works_of", broken)
    assert [fault.address for fault in lost.reader().faults] == [0x1240]
    found = lost.what_frees()
    assert (found.freed_by, found.unsure) == (None, True)


def test_memcgs_without_references_are_about_to_be_freed(lost: Lost) -> None:
    """Only those that were removed: one that is being made has no references yet, either."""
    image = Image(lost.prog)
    snapshot = collect(image)
    first, second, *_ = (a for a, m in snapshot.memcgs.items() if m.parent is not None)
    memcgs = {
        first: replace(snapshot.memcgs[first], state="dying"),
        second: replace(snapshot.memcgs[second], state="online"),
    }
    css = {a: snapshot.css[a]._replace(refs=0) for a in memcgs}
    other = Transient("BPF map", 0x1000)
    made = replace(snapshot, memcgs=memcgs, css=css, transients={0: [other], 0x5000: [other]})
    found = with_pending(image, made).transients
    assert found.keys() == {0, 0x5000}
    assert [(t.what, t.address, t.unsure) for t in found[0][1:]] == [(RELEASED, first, True)]
    assert found[0][:1] == found[0x5000] == [Pending(image).of(other)]
    nothing = replace(made, css=snapshot.css, transients={})
    assert with_pending(image, nothing) is nothing
