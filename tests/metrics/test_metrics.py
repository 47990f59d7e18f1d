# SPDX-License-Identifier: LGPL-2.1-or-later
"""The figures of real images: those of the audit's JSON document, added up in another way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse
from support.guests import DEBIAN_KERNELS, KERNELS, Lab
from support.live_guest import kept
from support.signals import with_interrupts

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def run(*words: str, status: int = 0) -> str:
    command = [sys.executable, "-m", "memcg_inspect", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == status, done.stderr
    return done.stdout


def samples_of(text: str, parser: Any = parse) -> Samples:
    return {
        family.name: {tuple(sorted(s.labels.items())): s.value for s in family.samples}
        for family in parser(text)
    }


def total(samples: Samples, name: str, *labels: str) -> Counter[tuple[str, ...]]:
    """Return sums by some labels."""
    found: Counter[tuple[str, ...]] = Counter()
    for key, value in samples[name].items():
        found[tuple(dict(key).get(label, "") for label in labels)] += int(value)
    return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_figures_are_those_of_the_audit(lab: Lab, kernel: str) -> None:
    core = str(lab.image(kernel, "4", "mixed").core)
    samples = samples_of(run("metrics", "-c", core, "--top", "10000", "--pages"))
    report = json.loads(run("audit", "-c", core, "--json", "--all"))
    paths = {memcg["address"]: memcg["path"] for memcg in report["memcgs"]}
    charged: Counter[tuple[str, ...]] = Counter()
    for skew in report["skew"]:
        node = "" if skew["backing_nid"] is None else str(skew["backing_nid"])
        charged[paths[skew["memcg"]], node, skew["kind"]] += skew["bytes"]
    assert total(samples, "memcg_inspect_charged_bytes", "memcg", "node", "kind") == charged
    assert sum(charged.values()) > 1 << 20
    skewed: Counter[tuple[str, ...]] = Counter()
    for skew in report["skew"]:
        pair = (skew["charged_nid"], skew["backing_nid"])
        if None not in pair and pair[0] != pair[1]:
            skewed[str(pair[0]), str(pair[1])] += skew["bytes"]
    assert total(samples, "memcg_inspect_skewed_bytes", "charged_node", "node") == skewed
    states = Counter((memcg["state"],) for memcg in report["memcgs"])
    assert total(samples, "memcg_inspect_memcgs", "state") == states
    verdicts = total(samples, "memcg_inspect_verdict", "verdict")
    assert +verdicts == {(report["verdict"],): 1}
    assert len(verdicts) == 4
    assert not +total(samples, "memcg_inspect_findings", "identity")
    assert samples["memcg_inspect_unread"] == {}
    assert set(total(samples, "memcg_inspect_kernel_unpaid_bytes", "node")) == {
        (str(node),) for node in report["image"]["nodes"]
    }
    (info,) = samples["memcg_inspect_info"]
    assert dict(info)["release"] == report["image"]["release"]


def test_cardinality_is_bounded(lab: Lab) -> None:
    """Nothing is lost: what has no figures of its own is in the others'."""
    core = str(lab.image("7.3", "4", "mixed").core)
    whole = samples_of(run("metrics", "-c", core, "--top", "10000"))
    few = samples_of(run("metrics", "-c", core, "--top", "3"))
    name = "memcg_inspect_charged_bytes"
    sizes = total(whole, name, "memcg")
    shown = total(few, name, "memcg")
    assert set(shown) == {*(path for path, _ in sizes.most_common(3)), ("other",)}
    assert sum(shown.values()) == sum(sizes.values())
    for path, size in sizes.most_common(3):
        assert shown[path] == size
    flat = samples_of(run("metrics", "-c", core, "--depth", "1"))
    expected: Counter[tuple[str, ...]] = Counter()
    for (path,), size in sizes.items():
        expected[("/" + path.split("/")[1],)] += size
    assert total(flat, name, "memcg") == expected
    nothing = samples_of(run("metrics", "-c", core, "--depth", "0"))
    assert set(total(nothing, name, "memcg")) == {("/",)}


def test_a_file_is_replaced_as_a_whole(lab: Lab, tmp_path: Path) -> None:
    core = str(lab.image("7.3", "2", "files").core)
    file = tmp_path / "memcg.prom"
    file.write_text("old")
    assert run("metrics", "-c", core, "--out", str(file)) == ""
    assert samples_of(file.read_text())["memcg_inspect_memcgs"]
    assert file.stat().st_mode & 0o777 == 0o644
    assert [some.name for some in tmp_path.iterdir()] == ["memcg.prom"]
    run("metrics", "-c", core, "--out", str(tmp_path / "none" / "a.prom"), status=2)


def ask(url: str, accept: str = "*/*") -> tuple[str, str]:
    """Return the content type, and the text."""
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_it_serves_a_running_guest(tmp_path: Path) -> None:
    """Both formats, again and again, until Ctrl-C."""
    guest = ("--nodes", "2", "--workload", "idle", "--freeze", "none")
    with kept(tmp_path, DEBIAN_KERNELS[-1], *guest) as qmp:
        words = ["--qemu", str(qmp), "metrics", "--listen", "127.0.0.1:0", "--every", "1"]
        process = subprocess.Popen(
            [sys.executable, "-m", "memcg_inspect", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            preexec_fn=with_interrupts,
        )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:")
            times = {scraped(url) for _ in range(2)}
            assert len(times) == 2
            open_type, text = ask(url, "application/openmetrics-text; version=1.0.0")
            assert open_type.startswith("application/openmetrics-text; version=1.0.0")
            assert text.endswith("# EOF\n")
            assert samples_of(text, parse_open)["memcg_inspect_charged_bytes"]
            assert "/metrics" in ask(url.removesuffix("metrics"))[1]
            with pytest.raises(urllib.error.HTTPError, match="404"):
                ask(url + "x")
        finally:
            process.send_signal(2)
            _, error = process.communicate(timeout=300)
        assert (process.returncode, error) == (0, "")


_seen: set[float] = set()


def scraped(url: str) -> float:
    """Wait for an audit that was not seen yet; return its time."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        try:
            kind, text = ask(url)
        except urllib.error.HTTPError as error:
            assert error.code == 503  # there was no audit yet
        else:
            assert kind.startswith("text/plain; version=0.0.4")
            samples = samples_of(text)
            (ended,) = samples["memcg_inspect_audit_timestamp_seconds"].values()
            if ended not in _seen:
                _seen.add(ended)
                assert abs(ended - time.time()) < 120
                assert sum(samples["memcg_inspect_verdict"].values()) == 1
                return ended
        time.sleep(0.25)
    raise AssertionError("there was no new audit")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["-c", "x", "--listen", "127.0.0.1:0"], "--listen needs a running kernel"),
        (["--listen", "127.0.0.1"], "'127.0.0.1' is no ADDRESS:PORT"),
        (["--listen", "127.0.0.1:99999"], "is no ADDRESS:PORT"),
        (["--listen", ":80"], "':80' is no ADDRESS:PORT"),
        (["--listen", "[]:80"], "'[]:80' is no ADDRESS:PORT"),
        (["--listen", "[::1:80"], "'[::1:80' is no ADDRESS:PORT"),
        (["--out", "a", "--listen", "127.0.0.1:0"], "not allowed with argument"),
        (["-c", "none"], "none"),
        (["--top", "0"], "'0' is not a number from 1 to 1,000,000"),
        (["--qemu", "x", "--pause", "--listen", "127.0.0.1:0"], "--pause would stop the guest"),
    ],
)
def test_wrong_arguments(words: list[str], why: str) -> None:
    command = [sys.executable, "-m", "memcg_inspect", "metrics", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert why in done.stderr
