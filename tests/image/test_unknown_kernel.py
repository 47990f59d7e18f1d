# SPDX-License-Identifier: LGPL-2.1-or-later
"""An unsupported kernel gives one line. A bug in the program is not reported as one."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
from drgn import (
    FaultError,
    Object,
    Program,
    TypeKindSet,
    container_of,
    offsetof,
    sizeof,
)
from support.guests import DEBIAN_KERNELS, Lab
from support.missing_pages import opened, without_bytes
from support.views import ask

from memcg_inspect import collect
from memcg_inspect.checks.judge import Judgement
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.cli import main
from memcg_inspect.image.image import image_of
from memcg_inspect.image.layout import bit_field, member_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.missing import as_image_errors
from memcg_inspect.model import ImageError

NEWEST = DEBIAN_KERNELS[-1]


def raising(error: Exception) -> Callable[..., None]:
    def view(*_: object, **__: object) -> None:
        raise error

    return view


@pytest.mark.parametrize(
    "error",
    [
        KeyError("of a dict"),
        IndexError("of a list"),
        AttributeError("'Page' object has no attribute 'x'"),
    ],
    ids=repr,
)
def test_mistakes_are_raised_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, as_image_errors():
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    "error", [KeyError("of a dict"), IndexError("list index out of range")], ids=repr
)
@pytest.mark.parametrize(
    ("command", "reader"),
    [
        ("stock", "memcg_inspect.views.stock.read_obj_stocks"),
        ("audit", "memcg_inspect.collect.owners.read_memcgs"),
    ],
)
@pytest.mark.image
def test_a_mistake_ends_with_status_70(
    lab: Lab,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    command: str,
    reader: str,
) -> None:
    monkeypatch.setattr(reader, raising(error))
    status = main([command, "-c", str(lab.image(NEWEST).core), "--debuginfo", "btf"])
    said = capsys.readouterr()
    assert (status, said.out) == (70, "")
    assert f"{type(error).__name__}: {error}" in said.err.splitlines()
    assert "in view" in said.err
    assert "report" in said.err.splitlines()[-1]


@pytest.mark.image
def test_memory_that_is_missing_after_the_pass(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks and evidence are read after the pass, and only if a row differs."""
    judged = collect.judge

    def judge(snapshot: Snapshot) -> Judgement:
        found = judged(snapshot)
        return found._replace(rows=[replace(row, status="differs") for row in found.rows])

    monkeypatch.setattr(collect, "judge", judge)
    for error, why in (
        (FaultError("Excluded page", 0x1000), "the image lacks memory"),
        (LookupError("could not find 'struct x'"), "this kernel is not supported"),
    ):
        monkeypatch.setattr("memcg_inspect.collect.stopped.read_running", raising(error))
        with pytest.raises(ImageError, match=why):
            collect.audit(image_of(lab.image(NEWEST).program()))


def lookups(prog: Program) -> dict[str, Callable[[], object]]:
    """Every way to look up a name that drgn or an Image offers."""
    task, image = prog["init_task"].address_of_(), image_of(prog)
    return {
        "struct unknown_a": lambda: prog.type("struct unknown_a"),
        "unknown_b": lambda: prog["unknown_b"],
        "unknown_c": lambda: prog.symbol("unknown_c"),
        "unknown_d": lambda: task.unknown_d,
        "unknown_e": lambda: task.member_("unknown_e"),
        "unknown_f": lambda: offsetof(prog.type("struct page"), "unknown_f"),
        "unknown_g": lambda: container_of(task, "struct page", "unknown_g"),
        "unknown_h": lambda: prog.constant("unknown_h"),
        "struct unknown_i": lambda: Object(prog, "struct unknown_i", address=1),
        "struct unknown_j": lambda: image.type("struct unknown_j"),
        "unknown_k": lambda: image.object("unknown_k"),
        "unknown_l": lambda: image.symbol("unknown_l"),
        "unknown_m": lambda: bit_field(image, "struct page", "unknown_m"),
        "unknown_n": lambda: member_type(prog.type("struct page"), "unknown_n"),
    }


@pytest.mark.image
def test_names_that_drgn_does_not_find(lab: Lab) -> None:
    for name, look_up in lookups(lab.image(NEWEST).program()).items():
        with pytest.raises(UnknownKernelError) as raised, as_image_errors():
            look_up()
        said = str(raised.value)
        assert said.startswith("this kernel is not supported, or its debug info is incomplete: ")
        assert f"{name}'" in said
        assert "\n" not in said


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("audit", "struct memcg_vmstats"),
        ("stat /", "struct lruvec_stats"),
        ("percpu", "struct page"),
        ("slabinfo", "struct page"),
    ],
)
@pytest.mark.image
def test_a_missing_type_ends_with_status_2(
    lab: Lab,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    missing: str,
) -> None:
    from memcg_inspect.btf.session import Session

    found = Session.type

    def find(self: Session, kinds: TypeKindSet, name: str) -> object:
        return None if f"struct {name}" == missing else found(self, kinds, name)

    monkeypatch.setattr(Session, "type", find)
    status = main([*command.split(), "-c", str(lab.image(NEWEST).core), "--debuginfo", "btf"])
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    assert len(said.err.splitlines()) == 1
    assert missing in said.err


@pytest.mark.parametrize("table", ["memory_stats", "memcg_vm_event_stat"])
@pytest.mark.image
def test_a_damaged_table_is_no_mistake(lab: Lab, table: str) -> None:
    """The image has an item that its types do not know: the image is damaged, not the program."""
    image = lab.image(NEWEST)
    start = image.program()[table].address_
    prog = opened(image.core)
    prog.add_memory_segment(start, 16, lambda address, count, *_: b"\x7f" * count)
    with pytest.raises(ImageError, match=f"{table} (is damaged: it )?has"):
        ask(prog, "stat", "/")


@pytest.mark.parametrize(
    ("table", "command"),
    [
        ("memory_stats", "stat / --all"),
        ("memcg_vm_event_stat", "stat / --all"),
        ("mem_cgroup_stats_index", "overview"),
    ],
)
@pytest.mark.image
def test_a_missing_table_is_no_other_kernel(lab: Lab, table: str, command: str) -> None:
    """The types of these tables depend on what they contain."""
    image = lab.image(NEWEST)
    found = image.program()[table]
    prog = without_bytes(image, found.address_, sizeof(found))
    with pytest.raises(ImageError) as raised, as_image_errors():
        ask(prog, *command.split())
    assert not isinstance(raised.value, UnknownKernelError)
    assert str(raised.value).startswith("the image lacks memory that is needed to read anything (")


@pytest.mark.image
def test_an_audit_without_the_names_of_events_is_not_exact(lab: Lab) -> None:
    """No identity needs them, and an event that a flush missed would have no name."""
    image = lab.image(NEWEST)
    table = image.program()["memcg_vm_event_stat"]
    report = collect.audit(image_of(without_bytes(image, table.address_, sizeof(table))))
    assert (report.verdict, list(report.findings)) == ("incomplete", [])
    assert [missed.what for missed in report.coverage["updated"].examples] == ["names of events"]


def test_missing_memory_has_a_message_of_its_own() -> None:
    with pytest.raises(ImageError, match="the image lacks memory") as raised, as_image_errors():
        raise FaultError("Excluded page", 0x1000)
    assert not isinstance(raised.value, UnknownKernelError)
    assert "makedumpfile" in str(raised.value)


def test_an_error_of_another_process_says_the_same() -> None:
    error = UnknownKernelError(LookupError("could not find 'memcg_vm_event_stat'"))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is UnknownKernelError
    assert str(again) == str(error)
    assert str(error).endswith(": could not find 'memcg_vm_event_stat'")
