# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Several looks at what moves
---------------------------

A running kernel changes while it is read: charges are walked after the counters were read, and
a difference may be a change in between. So one look at it proves that rows are exact, but not
that they differ. What is exact in one look is exact. What differs is a finding only if it is
there again, with both its sides the same, in :data:`LOOKS` looks; else it is ``moving``. So many,
because a busy machine has the same thing half done many times, and because there are many rows:
a coincidence in one of a thousand would be one in every audit.

What the program allocates while it reads is charged to the memcg that it runs in, look after
look the same: what differs there proves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from memcg_inspect.checks.findings import Lead
from memcg_inspect.checks.judge import Judgement
from memcg_inspect.checks.rows import summarize
from memcg_inspect.model import Coverage, Finding, Moved, Row

__all__ = ("LOOKS", "common_coverage", "is_settled", "settle", "without_rows")

#: Looks that a finding must have stood through.
LOOKS = 6
#: In some looks a row cannot be verified, as what is read just goes; others take their place.
_MOST_LOOKS = 2 * LOOKS

#: What makes two rows the same one.
Key = tuple[str, int | None, int | None, int | None, str, str]


class _History(NamedTuple):
    """The same row in those looks that have it."""

    rows: list[Row]
    looks: int


def is_settled(looks: Sequence[Judgement]) -> bool:
    """Return whether another look cannot turn a row that differs into one that does not."""
    if len(looks) >= _MOST_LOOKS:
        return True
    histories = _histories(looks)
    if any(_is_stubborn(h) and len(_verified(h)) < LOOKS for h in histories.values()):
        return False
    # Those of rows go with their rows.
    leads = [x for x in _common_leads(looks) if _finding_key(x.finding) not in histories]
    return len(looks) >= LOOKS or not leads


def settle(looks: Sequence[Judgement], is_whole: bool, around: Sequence[int] = ()) -> Judgement:
    """
    Make one judgement of several.

    :param looks: at least one, the last of which shows what was found last
    :param is_whole: whether everything could be read, in one look or another
    :param around: the memcg that this program itself runs in, and its ancestors
    """
    last = looks[-1]
    rows = [_settled(history, is_whole) for history in _histories(looks).values()]
    rows = [_by_ourselves(row) if _is_around(row, around) else row for row in rows]
    identities = []
    for identity in last.identities:
        if identity.status == "not-kept":
            identities.append(identity)
        else:
            some = [row for row in rows if row.identity == identity.name]
            identities.append(summarize(identity.name, some))
    differing = {_key(row) for row in rows if row.status == "differs"}
    known = {_key(row) for row in rows}
    leads = [
        lead
        for lead in _common_leads(looks)
        if _finding_key(lead.finding) in differing or _finding_key(lead.finding) not in known
    ]
    return last._replace(identities=identities, rows=rows, leads=leads)


def without_rows(judged: Judgement) -> list[Lead]:
    """Return the findings that no row says: their evidence alone proves them."""
    known = {_key(row) for row in judged.rows}
    return [lead for lead in judged.leads if _finding_key(lead.finding) not in known]


def common_coverage(looks: Sequence[Coverage]) -> Coverage:
    """
    Return what no look could read.

    What only some could not read was gone at that moment, and so was what every look missed
    elsewhere.
    """
    least = min(looks, key=lambda coverage: coverage.unreadable)
    if not least.unreadable or any(c.unreadable > len(c.examples) for c in looks):
        return least
    missed = [{(e.what, e.address) for e in coverage.examples} for coverage in looks]
    examples = [e for e in least.examples if all((e.what, e.address) in m for m in missed)]
    return Coverage(least.read, len(examples), examples)


def _histories(looks: Sequence[Judgement]) -> dict[Key, _History]:
    # The last look says which rows there are: what has gone needs no judgement.
    histories = {_key(row): _History([], len(looks)) for row in looks[-1].rows}
    for look in looks:
        for row in look.rows:
            if _key(row) in histories:
                histories[_key(row)].rows.append(row)
    return histories


def _key(row: Row) -> Key:
    return row.identity, row.memcg, row.objcg, row.nid, row.item, row.unit


def _finding_key(finding: Finding) -> Key:
    f = finding
    return f.identity, f.memcg, f.objcg, f.nid, f.item, f.unit


def _is_stubborn(history: _History) -> bool:
    """Whether every look had it, and all that could verify it the same difference."""
    rows = _verified(history)
    if not rows or len(history.rows) != history.looks:
        return False
    first = rows[0]
    return all(
        row.status == "differs"
        and _parts(row) == _parts(first)
        # Folding moves a counter's parts about, and not their sum.
        and row.difference == first.difference
        for row in rows
    )


def _verified(history: _History) -> list[Row]:
    return [row for row in history.rows if row.status != "unverifiable"]


def _parts(row: Row) -> Counter[str]:
    """What was found, by where it is. Draining a stock moves bytes about, and not their sum."""
    parts: Counter[str] = Counter()
    for name, value in row.found.items():
        parts["stock" if name == "nr_charged_bytes" else name] += value
    return parts


def _settled(history: _History, is_whole: bool) -> Row:
    rows = history.rows
    for row in reversed(rows):
        if row.status in ("exact", "in-flight"):
            return row
    last = rows[-1]
    if all(row.status == "unverifiable" for row in rows):
        if not is_whole:
            return last
        reason = f"something else was gone in {len(rows)} of {history.looks} looks"
        return replace(last, status="moving", reason=reason)
    if _is_stubborn(history) and len(_verified(history)) >= LOOKS:
        return _verified(history)[-1]
    reason = f"did not stand still in {history.looks} looks"
    return replace(last, status="moving", reason=reason, moved=_how_far(history))


#: Identities whose rows are about a whole subtree.
_OF_SUBTREES = ("hierarchy", "usage")


def _is_around(row: Row, around: Sequence[int]) -> bool:
    concerned = around if row.identity in _OF_SUBTREES else around[:1]
    return row.status == "differs" and row.memcg in concerned


def _by_ourselves(row: Row) -> Row:
    reason = "this program runs in this memcg, or below it, and changes it while it reads"
    return replace(row, status="moving", reason=reason)


def _how_far(history: _History) -> Moved:
    rows = history.rows
    found = [sum(row.found.values()) for row in rows]
    claimed = [sum(row.claimed.values()) for row in rows if row.claimed is not None]
    off = [row.difference for row in rows if row.difference is not None]
    return Moved(
        looks=len(rows),
        found=max(found) - min(found),
        claimed=max(claimed, default=0) - min(claimed, default=0),
        least=min(off, default=0),
        most=max(off, default=0),
    )


def _common_leads(looks: Sequence[Judgement]) -> list[Lead]:
    """
    Leads that every look has, with the evidence that all of them have; but for those looks that
    could not verify the row that it is of.
    """
    known = {_key(row) for row in looks[-1].rows}
    unverified = [{_key(r) for r in look.rows if r.status == "unverifiable"} for look in looks]
    newest: dict[tuple[Key, str], Lead] = {}
    for look in reversed(looks):
        for lead in look.leads:
            newest.setdefault((_finding_key(lead.finding), lead.finding.kind), lead)
    common: list[Lead] = []
    for (key, _), lead in newest.items():
        others = [
            _same(lead, look)
            for look, missing in zip(looks, unverified, strict=True)
            if key not in missing
        ]
        if any(other is None for other in others):
            continue
        evidence = lead.finding.evidence
        for other in others:
            seen = set() if other is None else {e.address for e in other.finding.evidence}
            evidence = tuple(e for e in evidence if e.address in seen)
        if not evidence and (lead.finding.evidence or key not in known):
            continue  # always something, but never the same thing
        common.append(lead._replace(finding=replace(lead.finding, evidence=evidence)))
    return common


def _same(lead: Lead, look: Judgement) -> Lead | None:
    wanted = (_finding_key(lead.finding), lead.finding.kind)
    for other in look.leads:
        if (_finding_key(other.finding), other.finding.kind) == wanted:
            return other
    return None
