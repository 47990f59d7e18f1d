# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Search for causes
-----------------

Looks for the smallest set of causes whose signatures add up to all rows that differ. Each row that
differs suggests the causes that would explain it by themselves; nothing else is tried.

Causes that share no row are independent of each other, so they are taken one after the other: the
one that explains most rows first. Then those that do share rows are looked at again, up to
:data:`_MOST_TOGETHER` at a time, for a smaller set, and for other sets of the same size. The number
of tries is bounded. What is left over has no explanation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from memcg_inspect.checks.diagnosis.cause import Cause, Hypothesis
from memcg_inspect.checks.diagnosis.differences import Differences, Signature, View, added
from memcg_inspect.checks.rows import RowKey

__all__ = ("Explanation", "each_alone", "explain")

#: Causes of one group that are searched for together.
_MOST_TOGETHER = 3
#: The most hypotheses that are tried for one image.
_MOST_TRIES = 30_000
#: The most rows that are left over to search for causes of all of them together. Each try looks at
#: all of them.
_MOST_LEFT = 256
#: The most rows that differ for which causes are searched that explain rows of several others. Each
#: search looks at all of them.
_MOST_ENTANGLED = 4096
#: The most causes of one image.
_MOST_CAUSES = 64
#: Two causes of the same amount are taken for a coincidence if it is larger than this, in its unit.
_COINCIDENCE = 16
_NOTHING = Signature({})
#: Identities from whose rows most causes are recognized that change other rows, too.
_TELLING = (
    *(
        "objcg_lists",
        "task_objcg",
        "id_refs",
        "slab",
        "percpu",
        "zswap",
        "sock",
        "kernel_stack",
        "pagetable",
        "vmalloc",
    ),
    *("lru", "kmem", "swap", "levels", "page_levels", "usage", "local", "node_levels"),
)


class Explanation(NamedTuple):
    """
    One cause that was found.

    :ivar cause: the cause
    :ivar others: sets of causes that explain the same, among them larger ones
    :ivar sure: whether all other sets were tried, and everything around it is explained
    """

    cause: Hypothesis
    others: tuple[tuple[Hypothesis, ...], ...]
    sure: bool


#: By the key of a cause: others in its place, see :meth:`_Search._entangled`
_Entangled = dict[tuple[object, ...], list[Hypothesis]]


class _GaveUpError(Exception):
    """The bound of tries was reached."""


class _Score(NamedTuple):
    """How well a hypothesis fits. The greater one is better; the first field counts most."""

    value: float
    exact: bool
    prior: int


def explain(
    differences: Differences, causes: Sequence[Cause], ignored: frozenset[RowKey] = frozenset()
) -> list[Explanation]:
    """
    Return causes that add up to the rows that differ.

    :param causes: all that are known, the likelier ones first
    :param ignored: rows that differ for reasons of their own, and that causes may explain, too
    """
    return _Search(differences, causes).run(ignored)


def each_alone(
    differences: Differences, causes: Sequence[Cause], rows: Mapping[RowKey, int]
) -> list[Hypothesis]:
    """
    Return the causes that add exactly these differences to rows, each by itself.

    :param rows: differences by row; all others must stay as they are
    :return: none, if there are too many to try all
    """
    goal = differences.of_goal(Signature(rows))
    try:
        return [h for (h,) in _Search(goal, causes).alone(goal)]
    except _GaveUpError:
        return []


class _Search:
    def __init__(self, differences: Differences, causes: Sequence[Cause]) -> None:
        self.differences = differences
        self.by_row: defaultdict[str, list[Cause]] = defaultdict(list)
        self.prior: dict[str, int] = {}
        for number, cause in enumerate(causes):
            self.prior.setdefault(cause.name, -number)
            for identity in cause.rows:
                self.by_row[identity].append(cause)
        self.tries = 0

    def run(self, ignored: frozenset[RowKey]) -> list[Explanation]:
        residuals = self.differences.differing()
        chosen, left = self._greedy(self.differences, residuals)
        chosen, left = self._mend(chosen, left, residuals, ignored)
        entangled = self._entangled(chosen, residuals)
        groups = _groups(self.differences, chosen, entangled)
        found: list[Explanation] = []
        for group in groups:
            found += self._judge(group, set(left) - ignored, entangled)
        if len(residuals) > _MOST_ENTANGLED:
            return [e._replace(sure=False) for e in found]
        if len(found) == 1 and not ignored:
            return found
        # Faults of the same amount can be others together than each by itself.
        alike = Counter((e.cause.item, abs(e.cause.amount), e.cause.unit) for e in found)
        found = [
            e._replace(sure=False)
            if alike[e.cause.item, abs(e.cause.amount), e.cause.unit] > 1
            else e
            for e in found
        ]
        # Faults of one page each can cancel each other in rows, and leave others.
        return [e._replace(sure=e.sure and not self._is_small(e.cause)) for e in found]

    def alone(self, goal: Differences) -> list[tuple[Hypothesis, ...]]:
        """Return each cause that explains a goal by itself."""
        return self._sets(goal, goal.differing(), 1)

    # Hypotheses

    def _options(self, view: View, keys: Sequence[RowKey]) -> Iterator[Hypothesis]:
        """Yield each fault that explains one of these rows by itself."""
        seen = set()
        for key in keys:
            for cause in self.by_row.get(key.identity, ()):
                for option in cause.options(view, key, view.residuals[key]):
                    if self.tries > _MOST_TRIES:
                        return  # each row may have as many options as there are rows
                    self.tries += 1
                    if option.key not in seen:
                        seen.add(option.key)
                        yield option

    def _after(
        self,
        d: Differences,
        residuals: Mapping[RowKey, int],
        total: Signature,
        option: Hypothesis,
    ) -> tuple[dict[RowKey, int], Signature]:
        """Return what is left of the rows that a fault changes, and the sum of all signatures."""
        total = added(total, option.signature)
        return {key: d.residual(key, total) for key in d.touched(option.signature)}, total

    # One after the other

    def _greedy(
        self, d: Differences, residuals: Mapping[RowKey, int]
    ) -> tuple[list[Hypothesis], dict[RowKey, int]]:
        left, total, chosen = dict(residuals), _NOTHING, list[Hypothesis]()
        while left and len(chosen) < _MOST_CAUSES and self.tries < _MOST_TRIES:
            view, scored = View(d, left), list[tuple[_Score, Hypothesis]]()
            for option in self._options(view, list(left)):
                if option.charge is not None and option.charge.together:
                    continue  # it can take the references of another fault: see _fewer()
                after, then = self._after(d, left, total, option)
                score = self._score(left, after, then, option)
                if score.value > 0:
                    scored.append((score, option))
            if not scored:
                break
            scored.sort(key=lambda pair: pair[0], reverse=True)
            first = True
            for score, option in scored:
                # Those that explain all rows they change do not depend on each other.
                after, then = self._after(d, left, total, option)
                if first or (score.exact and self._score(left, after, then, option) == score):
                    left = {k: r for k, r in (left | after).items() if r}
                    total = then
                    chosen.append(option)
                if not score.exact or len(chosen) == _MOST_CAUSES:
                    break
                first = False
        return chosen, left

    def _score(
        self,
        before: Mapping[RowKey, int],
        after: Mapping[RowKey, int],
        total: Signature,
        option: Hypothesis,
    ) -> _Score:
        rests = [(before.get(key, 0), rest) for key, rest in after.items()]
        explained = sum(1 for was, rest in rests if was and not rest)
        broken = sum(1 for was, rest in rests if rest and not was)
        changed = sum(1 for was, rest in rests if was and rest and was != rest)
        explained += sum(self.differences.speaks_for(key, total) for key in after)
        exact = not broken and not changed
        return _Score(explained - 2 * broken - changed / 2, exact, self.prior[option.cause])

    # All sets

    def _sets(
        self,
        d: Differences,
        residuals: Mapping[RowKey, int],
        size: int,
        total: Signature = _NOTHING,
    ) -> list[tuple[Hypothesis, ...]]:
        """
        Return all sets of so many causes that explain all rows, without those in another order.

        :param total: what other causes add to rows
        :raises _GaveUpError: after too many tries
        """
        found: dict[frozenset[object], tuple[Hypothesis, ...]] = {}
        for some in self._deeper(d, residuals, total, size):
            found.setdefault(frozenset(option.key for option in some), some)
        return list(found.values())

    def _deeper(
        self, d: Differences, residuals: Mapping[RowKey, int], total: Signature, size: int
    ) -> Iterator[tuple[Hypothesis, ...]]:
        if self.tries > _MOST_TRIES:
            raise _GaveUpError
        if not residuals:
            return
        view = View(d, residuals)
        # The last cause explains every row, so one of them is enough to find it.
        keys = list(residuals) if size > 1 else [min(residuals, key=_telling)]
        for option in self._options(view, keys):
            after, now = self._after(d, residuals, total, option)
            left = {key: rest for key, rest in (dict(residuals) | after).items() if rest}
            if not left:
                yield (option,)
            elif size == 2 or (size > 2 and len(left) < len(residuals) + _MOST_TOGETHER):
                yield from ((option, *rest) for rest in self._deeper(d, left, now, size - 1))
        if self.tries > _MOST_TRIES:
            raise _GaveUpError

    # What the first pass left over, or took too many causes for

    def _mend(
        self,
        chosen: list[Hypothesis],
        left: dict[RowKey, int],
        residuals: Mapping[RowKey, int],
        ignored: frozenset[RowKey],
    ) -> tuple[list[Hypothesis], dict[RowKey, int]]:
        """Replace causes that share rows by fewer, and explain what was left over with them."""
        d, kept = self.differences, list[Hypothesis]()
        for group in _groups(d, chosen, self._entangled(chosen, residuals)):
            if 1 < len(group) <= 4 * _MOST_TOGETHER:
                kept += self._fewer(group, [h for h in chosen if h not in group])
            else:
                kept += group
        rest = {key: amount for key, amount in left.items() if key not in ignored}
        memcgs = {key.memcg for key in rest}
        near = [h for h in kept if memcgs.intersection(h.memcgs) or rest.keys() & h.signature.rows]
        if rest and len(near) <= 4 * _MOST_TOGETHER and len(rest) <= _MOST_LEFT:
            others = [h for h in kept if h not in near]
            total = _sum(others)
            # Larger sets of many rows are too many.
            most = _MOST_TOGETHER if len(near) <= _MOST_TOGETHER else _MOST_TOGETHER - 1
            better = self._first(self._left_to(near, total, rest), total, most)
            if better is not None:
                return [*others, *better], {k: v for k, v in left.items() if k in ignored}
        return kept, left

    def _left_to(
        self, some: Iterable[Hypothesis], total: Signature, rest: Iterable[RowKey] = ()
    ) -> dict[RowKey, int]:
        """
        Return the rows that some causes have to explain.

        :param total: what the others add to rows
        :param rest: other rows to explain
        """
        d = self.differences
        keys = {*rest, *(key for h in some for key in d.touched(h.signature))}
        return {key: amount for key in keys if (amount := d.residual(key, total))}

    def _fewer(self, group: list[Hypothesis], others: Sequence[Hypothesis]) -> list[Hypothesis]:
        """
        Return the smallest set of causes that explains the same as a group.

        Of two of the same causes, a counter that is off by less is likelier than one that is off by
        what another one is, too.

        :param others: causes that share no rows with them
        """
        total, causes = _sum(others), sorted(h.cause for h in group)
        residuals = self._left_to(group, total)
        try:
            for size in range(1, _MOST_TOGETHER):
                sets = self._sets(self.differences, residuals, size, total)
                if size == len(group):
                    sets = [some for some in sets if sorted(h.cause for h in some) == causes]
                if sets:
                    best = max(sets, key=lambda one: self._likeliest(one, total))
                    return list(best)
        except _GaveUpError:
            pass
        return group

    def _first(
        self, residuals: Mapping[RowKey, int], total: Signature, most: int
    ) -> tuple[Hypothesis, ...] | None:
        try:
            for size in range(1, most + 1):
                some = [*self._deeper(self.differences, residuals, total, size)]
                if some:
                    return max(some, key=lambda one: self._likeliest(one, total))
        except _GaveUpError:
            pass
        return None

    def _likeliest(self, some: Sequence[Hypothesis], total: Signature) -> tuple[int, ...]:
        """
        Return numbers that are greater for a likelier set of causes.

        :param total: what others add to rows
        """
        total = added(total, _sum(some))
        rows = set(self.differences.touched(total))
        speaking = sum(self.differences.speaks_for(key, total) for key in rows)
        priors, amounts = zip(*((self.prior[h.cause], -abs(h.amount)) for h in some), strict=True)
        return speaking, sum(priors), sum(amounts)

    # How sure

    def _entangled(
        self, chosen: Sequence[Hypothesis], residuals: Mapping[RowKey, int]
    ) -> _Entangled:
        """
        Return the causes that explain all rows of one that was chosen, and change rows of others.

        In their place, the causes of the other rows are others, too.
        """
        found: _Entangled = {}
        if len(residuals) > _MOST_ENTANGLED:
            return found
        for h in chosen if len(chosen) > 1 else ():
            goal = self.differences.of_goal(h.signature)
            own = goal.differing()
            others = residuals.keys() - own.keys()
            view = View(goal, {**residuals, **own})
            found[h.key] = [
                option
                for option in self._options(view, [min(own, key=_telling)] if own else [])
                if option.key != h.key and self._explains_with(goal, own, option, others)
            ]
        return found

    def _explains_with(
        self,
        d: Differences,
        residuals: Mapping[RowKey, int],
        option: Hypothesis,
        others: Collection[RowKey],
    ) -> bool:
        """Return whether a cause explains all rows, and changes only some of others beside them."""
        after, _ = self._after(d, residuals, _NOTHING, option)
        return (
            residuals.keys() <= after.keys()
            and any(key in others for key in after)
            and not any(rest for key, rest in after.items() if key not in others)
        )

    def _judge(
        self, group: list[Hypothesis], left: set[RowKey], entangled: _Entangled
    ) -> Iterator[Explanation]:
        """Yield the causes of a group with what else explains the same rows."""
        d, found, sure = self.differences, dict[int, list[tuple[Hypothesis, ...]]](), True
        if self._is_near(group, left):
            sure = False
        for number, h in enumerate(group):
            sets, whole = self._instead_of(d.of_goal(h.signature), h)
            found[number] = [*sets, *((option,) for option in entangled.get(h.key, ()))]
            sure = sure and whole
        if len(group) > 1:
            # Faults in the same rows or memcgs can be parts of others, which are not all tried.
            sure = False
        if len(group) == 2:
            with suppress(_GaveUpError):
                goal = d.of_goal(_sum(group))
                for some in self._sets(goal, goal.differing(), 2):
                    self._add_others(group, some, found)
        for number, h in enumerate(group):
            places = [h.place]
            others: dict[frozenset[object], tuple[Hypothesis, ...]] = {}
            for some in found[number]:
                if len(some) == 1 and _without_place(h) == _without_place(some[0]):
                    places.append(some[0].place)
                else:
                    others.setdefault(frozenset(map(_without_place, some)), some)
            place = ", ".join(dict.fromkeys(filter(None, places)))
            # Bytes without a reference can be those of two charges, one too many and one too few.
            # Those of several charges can be those of one, and the other references lost.
            partial = h.charge is not None and (
                h.charge.together or not (h.charge.references and _has_owners(h))
            )
            found_others = tuple(others.values())
            yield Explanation(h._replace(place=place), found_others, sure and not partial)

    def _is_near(self, group: Sequence[Hypothesis], left: Collection[RowKey]) -> bool:
        """
        Return whether rows without an explanation are in the same memcgs or nodes.

        What explains them may be a cause that is not known here, and that explains these, too.
        """
        memcgs = {memcg for h in group for memcg in h.memcgs}
        nids = {h.nid for h in group if not h.memcgs and h.nid is not None}
        rows = {k for h in group for k in self.differences.touched(h.signature)}
        return any(
            key in rows or key.memcg in memcgs or (key.memcg is None and key.nid in nids)
            for key in left
        )

    def _add_others(
        self,
        group: Sequence[Hypothesis],
        some: Sequence[Hypothesis],
        found: Mapping[int, list[tuple[Hypothesis, ...]]],
    ) -> None:
        keys = {option.key for option in some}
        missing = [number for number, h in enumerate(group) if h.key not in keys]
        new = tuple(o for o in some if o.key not in {h.key for h in group})
        for number in missing:
            if new not in found[number]:
                found[number].append(new)

    def _is_small(self, h: Hypothesis) -> bool:
        """Return whether another fault may have the same amount by coincidence."""
        if h.unit == "bytes":
            page = self.differences.page
            return h.amount % page == 0 and abs(h.amount) <= _COINCIDENCE * page
        return abs(h.amount) <= _COINCIDENCE

    def _instead_of(
        self, d: Differences, h: Hypothesis
    ) -> tuple[list[tuple[Hypothesis, ...]], bool]:
        """Return what has the same signature, *h* too, and whether everything was tried."""
        residuals = d.differing()
        try:
            sets = self._sets(d, residuals, 1)
            # Charges have few sizes, so two faults may well be of the same one: a charge of one
            # memcg that is lost, and one of another that was not counted, look like one that moved.
            if self._is_small(h) or h.charge is not None:
                sets += self._sets(d, residuals, 2)
        except _GaveUpError:
            return [], False
        return sets, True


def _telling(key: RowKey) -> tuple[int, bool, str]:
    """
    Return a number for a row that is lower if more of the causes that change it start from it.

    A charge changes rows of pages and references, too, but is recognized from its own row.
    """
    place = _TELLING.index(key.identity) if key.identity in _TELLING else len(_TELLING)
    return place, key.unit != "bytes", key.item


def _has_owners(h: Hypothesis) -> bool:
    """Return whether the rows of what holds the references of a charge are known."""
    return None not in h.objcgs or any(key.unit == "references" for key in h.signature.rows)


def _without_place(h: Hypothesis) -> object:
    """Return what is wrong, without the place that no row may tell from others."""
    return h._replace(place="").key


def _sum(some: Sequence[Hypothesis]) -> Signature:
    return added(_NOTHING, *(h.signature for h in some))


def _groups(
    d: Differences, chosen: Sequence[Hypothesis], entangled: _Entangled
) -> list[list[Hypothesis]]:
    """
    Return causes in groups that share rows, or concern the same memcgs, or charges of one size.

    :param entangled: causes that may be in place of some, and that share rows with others
    """
    groups: list[tuple[set[object], list[Hypothesis]]] = []
    for h in chosen:
        some = (h, *entangled.get(h.key, ()))
        keys: set[object] = {
            k for one in some for k in one.signature.rows if d.observed(k) is not None
        }
        keys.update(h.memcgs)
        if h.charge is not None:
            keys.add((h.item, h.nid, abs(h.amount)))  # the owners may be the other way round
        members = [h]
        apart = []
        for others, group in groups:
            if others & keys:
                keys |= others
                members = group + members
            else:
                apart.append((others, group))
        groups = [*apart, (keys, members)]
    return [group for _, group in groups]
