# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Text formats of metrics
-----------------------

The text format of Prometheus (version 0.0.4), which the textfile collector of the node exporter
reads, and OpenMetrics 1.0.0. All metrics are gauges: an audit counts what is there, not what has
happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from memcg_inspect.escape import printable

__all__ = ("OPENMETRICS", "PROMETHEUS", "Family", "exposition")

#: The content types.
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@dataclass
class Family:
    """
    One metric.

    :ivar name: its name; with a unit at its end, if it has one
    :ivar help: what it means
    :ivar unit: the unit: ``bytes`` or ``seconds``; empty if it has none
    :ivar samples: values by labels
    """

    name: str
    help: str
    unit: str = ""
    samples: dict[tuple[tuple[str, str], ...], float] = field(default_factory=dict)

    def add(self, value: float, **labels: str) -> None:
        """Add to the sample with these labels. Labels that are empty are left out."""
        key = tuple((name, text) for name, text in labels.items() if text)
        self.samples[key] = self.samples.get(key, 0) + value


def exposition(families: Iterable[Family], content_type: str = PROMETHEUS) -> str:
    """Return metrics as text, in one of the two formats."""
    is_open = content_type == OPENMETRICS
    lines = [line for family in families for line in _lines(family, is_open)]
    return "".join(f"{line}\n" for line in [*lines, *(["# EOF"] if is_open else [])])


def _lines(family: Family, is_open: bool) -> Iterator[str]:
    help = family.help.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {family.name} {help}"
    yield f"# TYPE {family.name} gauge"
    if is_open and family.unit:
        yield f"# UNIT {family.name} {family.unit}"
    for labels, value in family.samples.items():
        yield f"{family.name}{_labels(dict(labels))} {_number(value)}"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    parts = (f'{name}="{_escaped(text)}"' for name, text in labels.items())
    return f"{{{','.join(parts)}}}"


def _escaped(text: str) -> str:
    return printable(text).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))
