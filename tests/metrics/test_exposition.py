# SPDX-License-Identifier: LGPL-2.1-or-later
"""Both text formats are read by the parsers of Prometheus's own library."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse

from memcg_inspect.escape import printable
from memcg_inspect.metrics.exposition import OPENMETRICS, PROMETHEUS, Family, exposition

HOSTILE = [
    '/a"b',
    "/a\\b",
    "/a\nb",
    "/a\\nb",
    "/<script>",
    "/ä\u2028 }",
    "/\x1b[31m",
    '/{a="b"} 1\n# EOF',
]


def family() -> Family:
    made = Family("a_bytes", 'what "it" is\n\\', "bytes")
    for number, name in enumerate(HOSTILE):
        made.add(number + 1, memcg=name, node="0", container="")
    made.add(0.5)
    made.add(-3, memcg="/a", node="1")
    made.add(4, memcg="/a", node="1")
    return made


@pytest.mark.parametrize("form", [PROMETHEUS, OPENMETRICS])
def test_what_is_written_is_read(form: str) -> None:
    text = exposition([family(), Family("b", "none")], form)
    (found, *_) = (parse if form == PROMETHEUS else parse_open)(text)
    assert (found.name, found.type) == ("a_bytes", "gauge")
    samples = {tuple(sample.labels.items()): sample.value for sample in found.samples}
    expected = {
        (("memcg", printable(name)), ("node", "0")): number + 1.0
        for number, name in enumerate(HOSTILE)
    }
    assert "\x1b" not in text
    assert samples == {**expected, (): 0.5, (("memcg", "/a"), ("node", "1")): 1.0}
    assert (found.unit == "bytes") == (form == OPENMETRICS)
    assert all(sample.timestamp is None for sample in found.samples)


def test_the_end_is_marked_where_it_must_be() -> None:
    assert exposition([], PROMETHEUS) == ""
    assert exposition([], OPENMETRICS) == "# EOF\n"
    assert exposition([family()], OPENMETRICS).endswith("\n# EOF\n")


def test_large_numbers_are_not_rounded() -> None:
    large = Family("a_bytes", "", "bytes")
    large.add((1 << 60) + 1)
    assert "a_bytes 1152921504606846977\n" in exposition([large])


def test_a_name_that_no_encoding_has() -> None:
    strange = Family("a", "")
    strange.add(1, memcg="/\udcff")
    assert exposition([strange]).encode()
