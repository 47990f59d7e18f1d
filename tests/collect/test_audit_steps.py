# SPDX-License-Identifier: LGPL-2.1-or-later
"""How often an audit reads a machine, what it reads only if rows differ, and what may fail."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from drgn import FaultError
from support.layouts import MadeImage
from support.made import ROOT, A, B, snapshot

import memcg_inspect.collect as module
from memcg_inspect.checks.findings import PendingFinding
from memcg_inspect.checks.judge import Judgement
from memcg_inspect.collect import own
from memcg_inspect.collect.clock import Clock
from memcg_inspect.collect.ticks import STANDS_STILL
from memcg_inspect.image.progress import interrupted_reason
from memcg_inspect.model import Coverage
from memcg_inspect.model_tasks import TaskCharge
from memcg_inspect.report import Finding, Identity, Report, Row

FINDING = Finding("slab", "counter-above-objects", A, None, 0, "ITEM", "bytes", 8, "", "proof")


def row(status: Any = "exact", reason: str | None = None) -> Row:
    return Row("slab", A, None, 0, "ITEM", "bytes", status, {"slab": 8}, {"folded": 8}, reason)


def judgement(*statuses: str) -> Judgement:
    return Judgement([], [row(status) for status in statuses], [], [], None)


class Machine:
    """
    A machine whose snapshots are written here.

    :ivar errors: what goes wrong when it is read, the first time first
    :ivar states: states of the rows of each snapshot that is judged
    :ivar steps: what was done
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: list[Exception | None] = []
        self.states: list[tuple[str, ...]] = []
        self.steps: list[str] = []
        self.given = monkeypatch
        self.snapshot = snapshot()
        self.image: Any = SimpleNamespace(
            is_moving=False,
            progress=SimpleNamespace(stop=False, report=lambda *_: None),
            memory=SimpleNamespace(reads=0, bytes_read=0),
        )
        self.put("collect", self._collect)
        self.put("judge", self._judge)
        for name in ("with_unlisted", "with_pending", "with_running", "with_waiting"):
            self.put(name, self._step(name))
        for name in ("with_css_stacks", "with_map_makers"):
            self.put(name, self._step(name))
        self.put("_with_proofs", self._with_proofs)

    def put(self, name: str, value: Any) -> None:
        self.given.setattr(module, name, value)

    def _collect(self, image: Any, clock: Any) -> Any:
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return self.snapshot

    def _judge(self, found: Any) -> Judgement:
        self.steps.append("judge")
        return judgement(*(self.states.pop(0) if self.states else ()))

    def _step(self, name: str) -> Any:
        def step(image: Any, found: Any, *rows: Any) -> Any:
            self.steps.append(name)
            return found

        return step

    def _with_proofs(self, image: Any, found: Any, judged: Judgement) -> Judgement:
        self.steps.append("proofs")
        return judged

    def take(self, frozen: bool = True, is_decisive: bool = False) -> Any:
        return module._take_sample(self.image, Clock(self.image), frozen, is_decisive)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_nothing_more_is_read_if_no_row_differs(machine: Machine) -> None:
    machine.states = [("exact", "unverifiable")]
    found, sample = machine.take()
    assert found is machine.snapshot
    assert sample.coverage is found.coverage
    assert machine.steps == ["with_unlisted", "with_pending", "judge"]


def test_stacks_are_read_if_a_row_differs(machine: Machine) -> None:
    """Then the snapshot is judged again."""
    machine.states = [("exact", "differs"), ("in-flight",)]
    _, sample = machine.take()
    assert machine.steps[3:] == ["with_running", "with_css_stacks", "with_map_makers", "judge"]
    assert [found.status for found in sample.judged.rows] == ["in-flight"]


def test_stacks_of_cpus_are_read_once(machine: Machine) -> None:
    machine.snapshot = replace(machine.snapshot, running=("cpu",))  # type: ignore[arg-type]
    machine.states = [("differs",)]
    machine.take()
    assert "with_running" not in machine.steps


def test_the_time_of_each_part_of_a_sample(machine: Machine) -> None:
    """The first samples of a running kernel are not decisive."""
    clock = Clock(machine.image)
    machine.states = [("differs",)]
    module._take_sample(machine.image, clock, False)
    assert list(clock.seconds) == ["judge", "running", "evidence"]
    assert "with_waiting" not in machine.steps
    clock = Clock(machine.image)
    module._take_sample(machine.image, clock, True)
    assert list(clock.seconds) == ["judge"]


@pytest.mark.parametrize("is_decisive", [False, True])
def test_tasks_of_a_running_kernel(machine: Machine, is_decisive: bool) -> None:
    """What they wait for counts only in a sample that may turn differences into findings."""
    machine.states = [("differs",)]
    machine.take(frozen=False, is_decisive=is_decisive)
    assert ("with_waiting" in machine.steps) == is_decisive
    assert "with_running" not in machine.steps
    assert machine.steps[-1] == "proofs"


def test_a_sample_that_could_not_read_the_tasks_is_not_decisive(machine: Machine) -> None:
    for frozen, wanted, is_read, is_decisive in (
        (True, False, True, True),
        (False, False, True, False),
        (False, True, True, True),
        (False, True, False, False),
    ):
        machine.states = [("differs",)]
        machine.put("with_waiting", lambda _, found, is_read=is_read: found if is_read else None)
        found, sample = machine.take(frozen, wanted)
        assert found is machine.snapshot
        assert sample.judged.is_decisive == is_decisive


def test_a_running_kernel_is_read_again_after_an_error(machine: Machine) -> None:
    """Three times at most. An image does not change."""
    error = ValueError("odd")
    machine.errors = [error, error]
    machine.take(frozen=False)
    assert machine.errors == []
    machine.errors = [error, error, error, None]
    with pytest.raises(ValueError, match="odd"):
        machine.take(frozen=False)
    assert machine.errors == [None]
    machine.errors = [error, None]
    with pytest.raises(ValueError, match="odd"):
        machine.take()
    assert machine.errors == [None]


def test_evidence_that_cannot_be_found(machine: Machine) -> None:
    """On a running kernel it may have changed. A finding is true without it."""
    tries: list[int] = []

    def find_evidence(image: Any, found: Any, queries: Any) -> Any:
        tries.append(len(tries))
        if len(tries) < 3:
            raise FaultError("not in the image", 0x10)
        return {"query": "found"}

    machine.put("find_evidence", find_evidence)
    queries: Any = {"query"}
    assert module._find_evidence(machine.image, machine.snapshot, set()) == {}
    assert tries == []
    with pytest.raises(FaultError):
        module._find_evidence(machine.image, machine.snapshot, queries)
    machine.image.is_moving = True
    found: Any = module._find_evidence(machine.image, machine.snapshot, queries)
    assert found == {"query": "found"}
    tries.clear()

    def never(*_: object) -> Any:
        tries.append(0)
        raise ValueError

    machine.put("find_evidence", never)
    assert module._find_evidence(machine.image, machine.snapshot, queries) == {}
    assert len(tries) == 3


def test_proofs_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings that belong to no row are proved at once, others at the end."""
    alone: Any = PendingFinding(FINDING, ("a query",))  # type: ignore[arg-type]
    of_row: Any = PendingFinding(replace(FINDING, nid=1), ("another",))  # type: ignore[arg-type]
    judged = judgement()._replace(findings=[of_row, alone])
    asked: list[Any] = []

    def find(image: Any, found: Any, queries: Any) -> Any:
        asked.append(queries)
        return "evidence"

    proved = replace(FINDING, nid=2)
    monkeypatch.setattr(module, "without_rows", lambda _: [alone])
    monkeypatch.setattr(module, "_find_evidence", find)
    monkeypatch.setattr(module, "attach", lambda pending, evidence: (pending, evidence) and proved)
    found = module._with_proofs(None, snapshot(), judged)  # type: ignore[arg-type]
    assert found.findings == [of_row, PendingFinding(proved, ())]
    assert asked == [{"a query"}]


def sample(missed: int) -> Any:
    coverage = Coverage()
    for address in range(missed):
        coverage.miss("something", address, "not in the image")
    return module._Sample({"slab": coverage, "pages": Coverage(3)}, judgement())


@pytest.mark.parametrize(
    ("settled", "missed", "is_enough"),
    [
        (False, [0], False),
        (True, [0], True),
        (True, [1], False),
        (True, [1, 1], False),
        (True, [1, 0], True),
        (True, [0, 1], True),
        (True, [1, 1, 1], True),
        (False, [1, 1, 1], False),
    ],
)
def test_when_samples_are_enough(
    monkeypatch: pytest.MonkeyPatch, settled: bool, missed: list[int], is_enough: bool
) -> None:
    """One of them must be whole, unless none of three is."""
    monkeypatch.setattr(module, "is_settled", lambda _: settled)
    assert module._is_enough([sample(number) for number in missed]) is is_enough


@pytest.mark.parametrize(
    ("passed", "wait", "number", "may_wait"),
    [(6.0, 9.0, 2, True), (6.0, 8.9, 2, False), (6.0, 8.0, 3, True), (6.0, 7.9, 3, False)],
)
def test_how_long_a_machine_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, passed: float, wait: float, number: int, may_wait: bool
) -> None:
    """As long as there is time for one more sample, if it may come to rest."""
    resting = [True]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 100.0 + passed))
    monkeypatch.setattr(module, "is_coming_to_rest", lambda judged, own: resting[0])
    samples, image = [sample(0)] * number, Any
    assert module._is_worth_waiting(image, samples, snapshot(), 100.0, wait) is may_wait
    resting[0] = False
    assert module._is_worth_waiting(image, samples, snapshot(), 100.0, wait) is False


def test_the_memcgs_that_this_program_runs_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine only."""
    asked = list[Any]()

    def find(image: Any, pid: int, namespace: int) -> int:
        asked.append((pid, namespace))
        return 0x20

    monkeypatch.setattr(own, "task_in_namespace", find)
    image = MadeImage()
    tasks = [TaskCharge(0x10, os.getpid(), "a", A, (), False, True)]
    tasks.append(TaskCharge(0x20, 7, "b", B, (), False, True))
    taken = snapshot(tasks=tasks)
    assert own.own_memcgs(image, taken) == []
    assert asked == []
    live = replace(taken, image=replace(taken.image, source="live"))
    assert own.own_memcgs(image, live) == [B, A, ROOT]
    assert asked == [(os.getpid(), os.stat("/proc/self/ns/pid").st_ino)]
    assert own.own_memcgs(image, replace(live, tasks=tasks[:1])) == []
    lost = [task._replace(memcg=0x9999) for task in tasks]
    assert own.own_memcgs(image, replace(live, tasks=lost)) == []


def test_an_audit_that_was_interrupted() -> None:
    """What is missing may be in the image: nobody looked."""
    reason = "slab memory is not all in the image"
    taken = snapshot()
    rows = (row("unverifiable", reason), row())
    identities = [Identity("slab", "unverifiable", 1, 0, why) for why in (reason, None)]
    report = Report(
        image=taken.image,
        verdict="incomplete",
        memcgs=(),
        identities=tuple(identities),
        rows=rows,
        skew=(),
        findings=(),
        coverage={},
        timings={},
        reads={},
        slab_usage=(),
        percpu_usage=(),
        follows=None,
    )
    found = module._interrupted(report)
    assert interrupted_reason(reason) != reason
    assert [one.reason for one in found.rows] == [interrupted_reason(reason), None]
    assert [one.reason for one in found.identities] == [interrupted_reason(reason), None]


@pytest.mark.parametrize("was_enabled", [True, False])
def test_circles_of_objects_are_not_looked_for(was_enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if was_enabled else gc.disable)()
    try:
        with module._no_garbage():
            assert not gc.isenabled()
        assert gc.isenabled() == was_enabled
        with pytest.raises(ValueError, match="why"), module._no_garbage():
            raise ValueError("why")
        assert gc.isenabled() == was_enabled
    finally:
        (gc.enable if before else gc.disable)()


class Run:
    """
    The samples of an audit.

    :ivar enough: number of samples that are enough
    :ivar worth: number of samples after which it is not worth to wait
    :ivar decisive: whether each sample was
    """

    def __init__(self, machine: Machine) -> None:
        self.image = machine.image
        self.enough = self.worth = 1
        self.decisive: list[bool] = []
        self.slept: list[float] = []
        machine.put("_take_sample", self._take)
        machine.put("_is_enough", lambda samples: len(samples) >= self.enough)
        machine.put("_is_worth_waiting", lambda _, samples, *__: len(samples) < self.worth)
        machine.put("_report", lambda image, clock, snapshot, samples: (snapshot, len(samples)))
        clock = SimpleNamespace(monotonic=lambda: 100.0, sleep=self.slept.append)
        machine.put("time", clock)
        self.has_run = True
        ticks = SimpleNamespace(come=lambda: self.has_run, have_come=True)
        machine.put("Ticks", lambda _: ticks)
        self.ticks = ticks

    def _take(self, image: Any, clock: Any, frozen: bool, is_decisive: bool = False) -> Any:
        assert frozen == (not image.is_moving)
        self.decisive.append(is_decisive)
        return f"snapshot {len(self.decisive)}", "sample"

    def audit(self) -> Any:
        self.decisive.clear()
        self.slept.clear()
        return module._audit(self.image, 60.0)


def test_samples_of_an_audit(machine: Machine) -> None:
    """The newest snapshot is reported. The last two of those that settle rows are decisive."""
    run = Run(machine)
    run.enough = 9
    assert run.audit() == ("snapshot 1", 1)
    run.image.is_moving = True
    run.enough = run.worth = 1
    assert run.audit() == ("snapshot 1", 1)
    run.enough = module.SAMPLES + 1
    assert run.audit() == (f"snapshot {module.SAMPLES + 1}", module.SAMPLES + 1)
    number = module.SAMPLES
    assert run.decisive == [False] * (number - 2) + [True] * 3
    assert len(run.slept) == number
    assert all(0.02 <= seconds <= 0.2 for seconds in run.slept)
    run.enough, run.worth = 2, 4
    assert run.audit() == ("snapshot 4", 4)
    run.image.progress.stop = True
    assert run.audit() == ("snapshot 1", 1)


@dataclass(frozen=True)
class Noted:
    """What is used of a report."""

    notes: tuple[str, ...]


def test_a_machine_that_stands_still_proves_nothing(machine: Machine) -> None:
    """No sample is decisive before it runs, and what to do is said if it never does."""
    run = Run(machine)
    machine.put("_report", lambda *_: Noted(("first",)))
    run.image.is_moving, run.has_run, run.enough = True, False, module.SAMPLES + 1
    assert run.audit() == Noted(("first",))
    assert run.decisive == [False] * run.enough
    run.ticks.have_come = False
    assert run.audit() == Noted(("first", STANDS_STILL))
    run.enough = 1
    assert run.audit() == Noted(("first",))
    run.image.is_moving = False
    assert run.audit() == Noted(("first",))


class Said:
    """
    What is made of samples in a report.

    :ivar asked: queries for evidence
    :ivar settled: samples and coverage of rows that were settled
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self.asked = machine, list[Any]()
        self.settled: list[tuple[int, bool, Any]] = []
        machine.image.prog = None
        machine.snapshot = snapshot(coverage={"slab": Coverage(1), "pages": Coverage(2)})
        for name, value in {
            "settle": self._settle,
            "_find_evidence": self._find_evidence,
            "attach": lambda pending, evidence: (pending, evidence),
            "find_words": lambda image, findings: ("words", findings),
            "candidate_sizes": lambda pending, evidence: ("sizes", pending, evidence),
            "diagnose": lambda *args: args[1:],
            "with_neighbours": lambda image, diagnoses: ("neighbours", diagnoses),
            "half_done_charges": lambda taken, rows: ("half done", tuple(rows)),
            "verdict": lambda identities, findings, coverage: ("verdict", identities, coverage),
            "why_missing": lambda image, coverage: ("notes", len(list(coverage))),
            "not_covered": lambda taken: ("not covered",),
            "uncharged": lambda taken: ("uncharged",),
            "charged": lambda taken: ("charged",),
        }.items():
            machine.put(name, value)

    def _settle(self, every: Any, is_whole: bool, own: Any) -> Any:
        self.settled.append((len(every), is_whole, own))
        return every[-1]._replace(rows=[row("moving")])

    def _find_evidence(self, image: Any, taken: Any, queries: Any) -> Any:
        self.asked.append(queries)
        return "evidence"

    def report(self, *samples: Any) -> Any:
        clock = Clock(self.machine.image)
        return module._report(self.machine.image, clock, self.machine.snapshot, samples)


def test_a_report_of_one_sample(machine: Machine) -> None:
    """Evidence is looked for once, for all findings together."""
    said = Said(machine)
    findings: Any = [PendingFinding(FINDING, ("b", "a")), PendingFinding(FINDING, ("b",))]  # type: ignore[arg-type]
    judged = judgement("exact")._replace(findings=findings, follows={"percpu": "both"})
    found = said.report(module._Sample(machine.snapshot.coverage, judged))
    assert (said.settled, said.asked) == ([], [{"a", "b"}])
    proved = tuple((pending, "evidence") for pending in findings)
    sizes = [("sizes", pending, "evidence") for pending in findings]
    assert found.findings == proved
    assert found.diagnoses == (
        "neighbours",
        (judged.rows, proved, ("words", proved), sizes),
    )
    assert found.half_done == ("half done", (row(),))
    assert found.verdict == ("verdict", [], found.coverage)
    assert found.coverage == {"slab": Coverage(1), "pages": Coverage(2)}
    assert (found.rows, found.looks, found.interrupted) == ((row(),), 1, False)
    assert (found.notes, found.not_covered) == (("notes", 2), ("not covered",))
    assert (found.uncharged, found.charges) == (("uncharged",), ("charged",))
    assert found.memcgs == tuple(machine.snapshot.memcgs.values())
    assert found.follows == {"percpu": "both"}
    assert found.image is machine.snapshot.image
    assert set(found.timings) == set(found.reads) == {"evidence", "diagnosis"}


@pytest.mark.parametrize("missed", [0, 1])
def test_a_report_of_several_samples(machine: Machine, missed: int) -> None:
    """What no sample has read is missing. A sample may lack a subject."""
    said = Said(machine)
    coverage = Coverage(1)
    if missed:
        coverage.miss("slab", 0x10, "not in the image")
    samples = [
        module._Sample({"slab": coverage}, judgement("exact")),
        module._Sample({"slab": coverage, "pages": Coverage(2)}, judgement("exact")),
    ]
    found = said.report(*samples)
    assert said.settled == [(2, not missed, [])]
    assert [one.status for one in found.rows] == ["moving"]
    assert found.looks == 2
    assert found.coverage["slab"].unreadable == missed


def test_a_report_of_what_was_interrupted(machine: Machine) -> None:
    said, reason = Said(machine), "slab memory is not all in the image"
    judged = judgement()._replace(rows=[row("unverifiable", reason)])
    sample = module._Sample({}, judged)
    assert said.report(sample).rows[0].reason == reason
    machine.image.progress.stop = True
    found = said.report(sample)
    assert found.interrupted
    assert said.settled == []
    # On a running kernel, it may be that other samples are missing.
    machine.image.is_moving = True
    assert [one.status for one in said.report(sample).rows] == ["moving"]
    machine.image.is_moving = False
    assert found.rows[0].reason == interrupted_reason(reason)
