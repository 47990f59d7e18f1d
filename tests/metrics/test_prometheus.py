# SPDX-License-Identifier: LGPL-2.1-or-later
"""
A real Prometheus scrapes the figures, through the node exporter and from ``--listen``.

The programs are those of Debian's packages. If they are not installed, they are fetched.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from labkit.paths import cache_folder
from support.guests import DEBIAN_KERNELS, ROOT, Lab
from support.live_guest import kept

pytestmark = [pytest.mark.image, pytest.mark.long]

DASHBOARD = ROOT / "docs" / "grafana-dashboard.json"


def program(name: str, package: str) -> str:
    """Return the path of a program of a package of Debian."""
    found = shutil.which(name)
    if found is not None:
        return found
    folder = cache_folder("tools", package)
    if not (folder / "usr/bin" / name).exists():
        subprocess.run(["apt-get", "update", "-q"], check=True, capture_output=True)
        subprocess.run(
            ["apt-get", "download", package], check=True, cwd=folder, capture_output=True
        )
        (archive,) = folder.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
    return str(folder / "usr/bin" / name)


def free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])


@contextmanager
def running(*command: str) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def prometheus(folder: Path, *targets: str) -> Iterator[Callable[[str], list[Any]]]:
    """Run Prometheus for the time of a ``with`` block; yield a function that queries it."""
    port, config = free_port(), folder / "prometheus.yml"
    scraped = [{"targets": list(targets)}]
    job = {"job_name": "memcg", "scrape_interval": "1s", "static_configs": scraped}
    config.write_text(json.dumps({"scrape_configs": [job]}))  # JSON is YAML
    words = (f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}")
    listen = f"--web.listen-address=127.0.0.1:{port}"

    def query(text: str) -> list[Any]:
        """Ask until there is an answer."""
        url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': text})}"
        for _ in range(120):
            try:
                with urllib.request.urlopen(url, timeout=10) as answer:
                    result: list[Any] = json.load(answer)["data"]["result"]
            except (urllib.error.URLError, ConnectionError):
                result = []
            if result:
                return result
            time.sleep(0.5)
        raise AssertionError(f"Prometheus has nothing for {text}")

    with running(program("prometheus", "prometheus"), *words, listen):
        yield query


def metrics(*words: str) -> str:
    command = [sys.executable, "-m", "memcg_inspect", "metrics", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_promtool_has_nothing_to_say(lab: Lab, kernel: str) -> None:
    text = metrics("-c", str(lab.image(kernel, "4", "mixed").core), "--pages")
    tool = program("promtool", "prometheus")
    done = subprocess.run([tool, "check", "metrics"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_through_the_node_exporter(lab: Lab, tmp_path: Path) -> None:
    core, port = str(lab.image("7.3", "4", "mixed").core), free_port()
    texts = tmp_path / "texts"
    texts.mkdir()
    metrics("-c", core, "--out", str(texts / "memcg.prom"))
    report = json.loads(
        subprocess.run(
            [sys.executable, "-m", "memcg_inspect", "audit", "-c", core, "--json"],
            check=True,
            capture_output=True,
        ).stdout
    )
    exporter = (
        program("prometheus-node-exporter", "prometheus-node-exporter"),
        *("--collector.disable-defaults", "--collector.textfile"),
        *(f"--collector.textfile.directory={texts}", f"--web.listen-address=127.0.0.1:{port}"),
    )
    with running(*exporter), prometheus(tmp_path, f"127.0.0.1:{port}") as query:
        (sum_of_all,) = query("sum(memcg_inspect_charged_bytes)")
        assert int(sum_of_all["value"][1]) == sum(skew["bytes"] for skew in report["skew"])
        assert query("node_textfile_scrape_error")[0]["value"][1] == "0"
        (verdict,) = query("memcg_inspect_verdict == 1")
        assert verdict["metric"]["verdict"] == report["verdict"] == "exact"


def test_from_a_running_guest(tmp_path: Path) -> None:
    """The dashboard of the documentation asks for nothing that is not there."""
    guest, port = tmp_path / "guest", free_port()
    guest.mkdir()
    words = ("--nodes", "2", "--workload", "churn", "--freeze", "none")
    with kept(guest, DEBIAN_KERNELS[-1], *words) as qmp:
        listen = ("metrics", "--listen", f"127.0.0.1:{port}", "--every", "1", "--pages")
        served = (sys.executable, "-m", "memcg_inspect", "--qemu", str(qmp), *listen)
        with running(*served), prometheus(tmp_path, f"127.0.0.1:{port}") as query:
            assert query("up == 1")
            assert query("sum by (node) (memcg_inspect_charged_bytes{node!=''})")
            names = set(re.findall(r"memcg_inspect_\w+", DASHBOARD.read_text()))
            assert len(names) >= 6
            for name in names - {"memcg_inspect_skewed_bytes"}:
                assert query(name), name


def test_the_dashboard_is_complete() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["title"] == "memcg-inspect"
    for panel in dashboard["panels"]:
        assert panel["targets"]
        for target in panel["targets"]:
            assert "memcg_inspect_" in target["expr"]
            assert target["datasource"]["uid"] == "${datasource}"
