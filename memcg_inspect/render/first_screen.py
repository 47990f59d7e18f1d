# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The first screen of an audit
----------------------------

The verdict, what was checked, and the causes of the findings with the commands that show more. It
has at most :data:`MOST_LINES` lines on any machine. What does not fit is counted.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from memcg_inspect.escape import printable
from memcg_inspect.model import Memcg, Unit, counted, first_of
from memcg_inspect.render.report import evidence_text, head_lines
from memcg_inspect.render.text import Output, rounded, size
from memcg_inspect.render.typed import Typed
from memcg_inspect.report import Diagnosis, Finding, Report, Row
from memcg_inspect.report_tables import effects_answer
from memcg_inspect.tables import Choice, choose

__all__ = ("MOST_LINES", "diagnosis_lines", "explained_lines", "first_screen")

#: The most lines of the first screen, on a terminal with at least 60 columns.
MOST_LINES = 40
#: The most lines of one item of a section, of a sentence and of the evidence of a diagnosis, and
#: of a note.
_MOST_OF_ITEM = 2
_MOST_OF_SENTENCE = 3
_MOST_OF_EVIDENCE = 4
_MOST_OF_NOTE = 8
#: The widest path of a memcg on a terminal.
_WIDEST_PATH = 56


#: A memcg in a sentence, and with it its obj_cgroup.
_MEMCG = re.compile(r"\bmemcg (0x[0-9a-f]+)")
_OBJCG_OF_MEMCG = re.compile(r"(?:\bobj_cgroup 0x[0-9a-f]+ of )?\bmemcg (0x[0-9a-f]+)")


_SINGULAR = {
    "causes": "cause",
    "diagnoses": "diagnosis",
    "identities": "identity",
    "notes": "note",
    "subjects": "subject",
}
#: The fewest diagnoses of one cause of which the first one stands for all.
_MANY_ALIKE = 4


def _part(some: int, every: int, what: str) -> str:
    """Return how many of all there are: ``2 of 5 rows``, ``5 rows``, ``1 identity``."""
    named = f"{every:,} {_SINGULAR[what]}" if every == 1 and what in _SINGULAR else None
    text = named or counted(every, what)
    return text if some == every else f"{some:,} of {text}"


class _Line(NamedTuple):
    text: str
    style: str = ""
    rest: str = ""


class _Section(NamedTuple):
    """
    A part of the screen.

    :ivar title: its first line
    :ivar items: lines of each item
    :ivar left_out: returns the line that counts the items after the first so many
    """

    title: _Line
    items: Sequence[Sequence[_Line]]
    left_out: Callable[[int], str]

    def lines(self, shown: int) -> list[_Line]:
        """Return its lines, with so many items."""
        lines = [_Line(""), self.title, *(line for item in self.items[:shown] for line in item)]
        if shown < len(self.items):
            lines.append(_Line(self.left_out(shown)))
        return lines


def first_screen(report: Report, output: Output, typed: Typed, exact: bool = False) -> None:
    """
    Write the first screen.

    :param typed: how the user types commands
    :param exact: whether to write sizes in bytes
    """
    screen = _Screen(report, output, typed, exact)
    head = list(screen.head())
    sections = [section for section in screen.sections() if section.items]
    tail = [_Line(""), *screen.tail()]
    room = MOST_LINES - screen.height(head) - screen.height(tail)
    for line in [*head, *screen.fitted(sections, room), *tail]:
        output.line(*line)


def diagnosis_lines(report: Report, output: Output, typed: Typed, exact: bool = False) -> None:
    """Write all diagnoses, as the first screen has them."""
    screen = _Screen(report, output, typed, exact)
    if not report.causes:
        output.line("no diagnoses")
    for number, diagnosis in enumerate(report.causes, 1):
        for line in screen.diagnosis(number, diagnosis):
            output.line(*line)


def explained_lines(
    report: Report, number: int, output: Output, typed: Typed, exact: bool = False
) -> None:
    """
    Write all about one diagnosis: what it does to each row, objects, other causes, and functions.

    :param number: number of the diagnosis, from 1
    :raises UsageError: if there is no such diagnosis
    """
    [table] = choose(effects_answer(report, number), Choice()).tables
    screen, diagnosis = _Screen(report, output, typed, exact), report.causes[number - 1]
    for line in screen.diagnosis(number, diagnosis):
        output.line(*line)
    output.line()
    output.table(table)
    parts = (
        (
            "Objects that may be the cause",
            [evidence_text(e, screen.names) for e in diagnosis.evidence],
        ),
        ("Other causes that fit", [screen.named(other) for other in diagnosis.others]),
        ("Functions of the kernel that could do it", [f"{name}()" for name in diagnosis.functions]),
    )
    for title, items in parts:
        if items:
            output.line(title, "bold")
        for item in items:
            output.item(item, "  ")
        if items:
            output.line()


class _Screen:
    """Makes the lines of the first screen of one report."""

    def __init__(self, report: Report, output: Output, typed: Typed, exact: bool) -> None:
        self.report, self.output, self.typed, self.exact = report, output, typed, exact
        self.names = _short_names(report.memcgs, output)

    def height(self, lines: Sequence[_Line]) -> int:
        """Return the number of lines on the terminal, which folds lines that are too wide."""
        return sum(self.output.height(line.text + line.rest) for line in lines)

    def fitted(self, sections: Sequence[_Section], room: int) -> Iterator[_Line]:
        """Return sections with as many items as there is room for, the first sections first."""
        shown = [1] * len(sections)

        def used() -> int:
            parts = zip(sections, shown, strict=True)
            return sum(self.height(section.lines(number)) for section, number in parts)

        for i in reversed(range(len(sections))):
            # Not even one item of each fits, as on a narrow terminal.
            if used() > room:
                shown[i] = 0
        for i, section in enumerate(sections):
            while shown[i] < len(section.items):
                shown[i] += 1
                if used() > room:
                    shown[i] -= 1
                    break
        for section, number in zip(sections, shown, strict=True):
            yield from section.lines(number)

    def wrapped(self, text: str, indent: str, most: int = _MOST_OF_ITEM) -> list[_Line]:
        """Return the lines of an item."""
        return [_Line(line) for line in self.output.wrapped(text, indent, most)]

    def head(self) -> Iterator[_Line]:
        """Return the lines about the verdict, the machine, and what was checked."""
        verdict, *machine = head_lines(self.report, self.names)
        for style, word, rest in (verdict, ("", f"Checked: {self._checked()}", ""), *machine):
            first, *more = self.output.wrapped(word + rest, "", _MOST_OF_SENTENCE)
            is_whole = first.startswith(word)
            yield _Line(word, style, first[len(word) :]) if is_whole else _Line(first, style)
            yield from map(_Line, more)
        # The line of an EXACT verdict says so of kernel memory.
        said = {"kernel memory"} if self.report.verdict == "exact" else set()
        what = [name for name in self.report.not_accounted if name not in said]
        if what:
            yield from self.wrapped(f"Not accounted on this machine: {', '.join(what)}", "")

    def _checked(self) -> str:
        kept = [i for i in self.report.identities if i.status != "not-kept"]
        unknown = Counter(r.identity for r in self.report.rows if r.status == "unverifiable")
        known = [i for i in kept if not i.rows or unknown[i.name] < i.rows]
        rows = sum(identity.rows for identity in kept)
        charges = self.report.charges
        total, count = sum(c.bytes for c in charges), sum(c.count for c in charges)
        found = f"{size(total, self.exact)} of charges: {rounded(count)} objects and pages"
        return ", ".join(
            [
                _part(len(known), len(kept), "identities"),
                _part(rows - unknown.total(), rows, "rows"),
                found if count else "nothing is charged",
            ]
        )

    def sections(self) -> Iterator[_Section]:
        """Return the sections, the most important ones first."""
        report = self.report
        yield self._diagnoses()
        yield self._unexplained()
        # What a note advises is worth more than all that follows from it.
        notes = [self.wrapped(f"  {note}", "  ", _MOST_OF_NOTE) for note in report.notes]
        yield _Section(
            _Line("Notes", "bold yellow"), notes, _left_out("notes", len(notes), "--all")
        )
        yield self._with_status("unverifiable", "Could not be verified", self._why)
        yield self._with_status("moving", "Were changing", self._who)
        yield self._in_flight()
        yield self._not_read()

    def tail(self) -> Iterator[_Line]:
        """Return the line that names the options that show more."""
        text = "More: --findings, --identities, --rows, --skew; --all prints everything"
        yield from self.wrapped(text, "")

    def _diagnoses(self) -> _Section:
        """Return the section of the diagnoses; of many that are alike, the first one is shown."""
        alike: defaultdict[tuple[str, str], list[Diagnosis]] = defaultdict(list)
        for diagnosis in self.report.diagnoses:
            alike[diagnosis.cause, diagnosis.confidence].append(diagnosis)
        items, counts = [], []
        for number, diagnosis in enumerate(self.report.diagnoses, 1):
            same = alike[diagnosis.cause, diagnosis.confidence]
            if len(same) < _MANY_ALIKE:
                items.append(self.diagnosis(number, diagnosis))
                counts.append(1)
            elif same[0] is diagnosis:
                items.append([*self.diagnosis(number, diagnosis), *self._like_it(same[1:])])
                counts.append(len(same))

        def left_out(shown: int) -> str:
            return _more("diagnoses", sum(counts[shown:]), "--diagnoses")

        return _Section(_Line("Diagnoses", "bold red"), items, left_out)

    def _like_it(self, others: Sequence[Diagnosis]) -> list[_Line]:
        """Return the line that counts the diagnoses of the same cause as the one above it."""
        memcgs = dict.fromkeys(memcg for d in others for memcg in d.memcgs[:1])
        about = f", of {_some([self._name(memcg) for memcg in memcgs])}" if memcgs else ""
        text = f"   and {len(others):,} more like it: {others[0].cause}{about} (--diagnoses)"
        return self.wrapped(text, "   ")

    def diagnosis(self, number: int, diagnosis: Diagnosis) -> list[_Line]:
        """Return the lines of a diagnosis."""
        indent = " " * len(f"{number}. ")
        facts: list[str] = [diagnosis.confidence]
        if diagnosis.amount is not None:
            facts.append(self.amount(abs(diagnosis.amount), diagnosis.unit))
        if diagnosis.nid is not None:
            facts.append(f"node {diagnosis.nid}")
        sentence = f"{number}. {', '.join(facts)}: {self.named(diagnosis.what)}"
        lines = self.wrapped(sentence, indent, _MOST_OF_SENTENCE)
        said = {int(found[1], 16) for found in _MEMCG.finditer(diagnosis.what)}
        if not said.issuperset(diagnosis.memcgs):
            memcgs = [self._name(address) for address in diagnosis.memcgs]
            lines += self.wrapped(indent + _some(memcgs), indent)
        # What was overwritten is not enough: the object before it is a suspect.
        for evidence in diagnosis.evidence[: 2 if diagnosis.cause == "overwritten" else 1]:
            where = f"{indent}at {evidence_text(evidence, self.names)}{_fits(diagnosis)}"
            lines += self.wrapped(where, indent, _MOST_OF_EVIDENCE)
        others = self._others(diagnosis)
        for other in others[:1]:
            and_more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
            lines += self.wrapped(f"{indent}or: {other}{and_more}", indent, _MOST_OF_SENTENCE)
        return [*lines, _Line(f"{indent}$ {self._next(number, diagnosis)}")]

    def _others(self, diagnosis: Diagnosis) -> list[str]:
        """Return other causes, one of those that differ by the obj_cgroup of a memcg alone."""
        said = dict.fromkeys(map(self.named, diagnosis.others))
        return [other for other in said if other != self.named(diagnosis.what)]

    def named(self, sentence: str) -> str:
        """Return a sentence with the paths of memcgs in place of their addresses."""
        found = [match[1] for match in _MEMCG.finditer(sentence)]
        # Where two obj_cgroups are of one memcg, the path alone does not tell them apart.
        pattern = _OBJCG_OF_MEMCG if len(set(found)) == len(found) else _MEMCG
        return pattern.sub(lambda match: self._name(int(match[1], 16)), sentence)

    def _next(self, number: int, diagnosis: Diagnosis) -> str:
        """Return the command that shows more of a diagnosis."""
        # Of a counter, the rows that compare it tell more.
        if diagnosis.evidence and diagnosis.evidence[0].kind != "counter":
            return self.typed.command("who", f"{diagnosis.evidence[0].address:#x}")
        if diagnosis.signature:
            return self.typed.command("audit", "--explain", str(number))
        if diagnosis.memcgs:
            memcg = f"{diagnosis.memcgs[0]:#x}"
            return self.typed.command("audit", "--rows", "--memcg", memcg, "--sort", "difference")
        return self.typed.command("audit", "--findings")

    def _unexplained(self) -> _Section:
        by_identity: defaultdict[str, list[Finding]] = defaultdict(list)
        for index in self.report.unexplained:
            finding = self.report.findings[index]
            by_identity[finding.identity].append(finding)
        groups = sorted(by_identity.items(), key=lambda group: -max(map(self._bytes, group[1])))
        items = [self.wrapped(f"  {self._findings(*group)}", "    ") for group in groups]
        number = counted(len(self.report.unexplained), "findings")
        title = f"Unexplained: {number} ({self.typed.command('audit', '--findings')})"
        left_out = _left_out("identities", len(items), "--findings")
        return _Section(_Line(title, "bold red"), items, left_out)

    def _findings(self, identity: str, findings: Sequence[Finding]) -> str:
        largest, *others = sorted(findings, key=self._bytes, reverse=True)
        memcgs = dict.fromkeys(f.memcg for f in (largest, *others) if f.memcg is not None)
        where = [_some([self._name(memcg) for memcg in memcgs])] if memcgs else []
        nodes = {finding.nid for finding in findings}
        if len(nodes) == 1 and (largest.nid or 0) >= 0 and largest.nid is not None:
            where.append(f"node {largest.nid}")
        about = f": {', '.join(where)}" if where else ""
        number = counted(len(findings), "findings")
        if largest.difference is None:
            return f"{identity}: {number}{about}"
        amount = self.amount(largest.difference, largest.unit, signed=True)
        most = "largest " if len(findings) > 1 else ""
        return f"{identity}: {number}, {most}{amount}{about}"

    def _bytes(self, finding: Finding) -> int:
        scale = {"pages": self.report.image.page_size, "KiB": 1024}.get(finding.unit, 1)
        return abs(finding.off) * scale

    def amount(self, value: int, unit: Unit, signed: bool = False) -> str:
        """Return an amount with its unit."""
        sign = ("+" if value > 0 else "-") if signed and value else ""
        if unit == "bytes":
            return sign + size(abs(value), self.exact)
        if unit == "KiB" and not self.exact:
            return sign + size(abs(value) * 1024)
        return sign + counted(abs(value), unit)

    def _with_status(
        self,
        status: str,
        title: str,
        about: Callable[[Sequence[Row]], str],
        wanted: Callable[[Row], bool] = lambda row: True,
    ) -> _Section:
        """Return the section of the rows that have a status, by identity."""
        rows: defaultdict[str, list[Row]] = defaultdict(list)
        for row in self.report.rows:
            if row.status == status and wanted(row):
                rows[row.identity].append(row)
        total = {identity.name: identity.rows for identity in self.report.identities}
        items = [
            self.wrapped(
                f"  {name}: {len(some):,} of {counted(total.get(name, len(some)), 'rows')}: "
                f"{about(some)}",
                "    ",
            )
            for name, some in sorted(rows.items(), key=lambda item: -len(item[1]))
        ]
        left_out = _left_out("identities", len(items), "--findings")
        return _Section(_Line(title, "bold yellow"), items, left_out)

    def _in_flight(self) -> _Section:
        """Return the section of what is half done, then of the rows whose charge no stack shows."""
        numbered = enumerate(self.report.half_done, 1 + len(self.report.diagnoses))
        made = [self.diagnosis(number, diagnosis) for number, diagnosis in numbered]
        shown = {
            (e.identity, e.memcg, e.objcg, e.nid, e.item, e.unit)
            for diagnosis in self.report.half_done
            for e in diagnosis.signature
        }
        rest = self._with_status(
            "in-flight",
            "In flight, half done on a stopped CPU",
            self._why,
            lambda r: (r.identity, r.memcg, r.objcg, r.nid, r.item, r.unit) not in shown,
        )
        if not made:
            return rest
        items = [*made, *rest.items]
        return _Section(rest.title, items, _left_out("causes", len(items), "--diagnoses"))

    def _why(self, rows: Sequence[Row]) -> str:
        reasons = Counter(row.reason or "the reason is not known" for row in rows)
        [(reason, _)] = reasons.most_common(1)
        more = len(reasons) - 1
        return reason + (f" (and {counted(more, 'other reasons')})" if more else "")

    def _who(self, rows: Sequence[Row]) -> str:
        memcgs = dict.fromkeys(row.memcg for row in rows if row.memcg is not None)
        if not memcgs:
            return _some(
                [f"node {nid}" for nid in sorted({r.nid for r in rows if r.nid is not None})]
            )
        return _some([self._name(address) for address in memcgs])

    def _name(self, memcg: int) -> str:
        return self.names.get(memcg, f"{memcg:#x}")

    def _not_read(self) -> _Section:
        items = []
        for name, part in self.report.coverage.items():
            if part.unreadable:
                text = f"  {name}: {part.unreadable:,} of {part.read + part.unreadable:,}"
                for one in part.examples[:1]:
                    text += f", for example {one.what} at {one.address:#x}: {one.reason}"
                items.append(self.wrapped(text, "    "))
        left_out = _left_out("subjects", len(items), "--all")
        return _Section(_Line("Not read", "bold yellow"), items, left_out)


def _left_out(what: str, total: int, option: str) -> Callable[[int], str]:
    return lambda shown: _more(what, total - shown, option)


def _more(what: str, number: int, option: str) -> str:
    """Return the line that counts what is left out, and names the option that shows it."""
    return f"  and {number:,} more {_SINGULAR[what] if number == 1 else what} ({option})"


def _some(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are; a dash for none."""
    return first_of(names) if names else "-"


def _fits(diagnosis: Diagnosis) -> str:
    """Return how many objects may be the cause."""
    total = diagnosis.evidence_total
    number, or_more = (len(diagnosis.evidence), " or more") if total is None else (total, "")
    if diagnosis.confidence == "proved" or diagnosis.cause == "overwritten" or number < 2:
        return ""
    if diagnosis.evidence[0].kind == "counter":
        return f" (or one of {counted(number - 1, 'other words')})"
    return f" (the likeliest of {number:,}{or_more})"


def _short_names(memcgs: Sequence[Memcg], output: Output) -> Mapping[int, str]:
    """Return paths that fit on the terminal, by address. Alike ones have the address beside it."""
    names = {m.address: output.elided(printable(m.path), _WIDEST_PATH) for m in memcgs}
    alike = Counter(names.values())
    return {
        address: name if alike[name] == 1 else f"{name} ({address:#x})"
        for address, name in names.items()
    }
