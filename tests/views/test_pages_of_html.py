# SPDX-License-Identifier: LGPL-2.1-or-later
"""
``--html``: the numbers of the page are those of the JSON document, and names are harmless.

Chromium shows the page with --all: nothing leaves it, and its tables sort and filter.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.guests import Lab

from memcg_inspect.image.image import image_of
from memcg_inspect.model_pages import KINDS
from memcg_inspect.render.page import answer_page
from memcg_inspect.tables import Answer, Table, columns_of
from memcg_inspect.views.pages import PagesRow, pages

pytestmark = pytest.mark.image


class Page(HTMLParser):
    """
    What a page has.

    :ivar tags: opening tags, with their attributes
    :ivar tables: rows of each table: value, or text of each cell
    :ivar amounts: what shapes show, by title
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.amounts: list[tuple[int, str]] = []
        self._in: list[str] = []
        self._amount: int | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag == "tbody":
            self.tables.append([])
        elif tag == "tr" and "tbody" in self._in:
            self.tables[-1].append([])
        elif tag == "td" and "tbody" in self._in:
            self.tables[-1][-1].append(found.get("data-value") or "")
        if tag == "rect":
            self._amount = int(found["data-amount"] or 0) if "data-amount" in found else None
        if tag not in ("meta", "input", "rect") or tag == "rect" and "data-amount" in found:
            self._in.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._in:
            while self._in.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if self._in[-1:] == ["title"] and self._amount is not None:
            self.amounts.append((self._amount, data))
        elif self._in[-1:] == ["td"] and "tbody" in self._in and not self.tables[-1][-1][-1]:
            self.tables[-1][-1][-1] = data


def run(*words: str) -> str:
    command = [sys.executable, "-m", "memcg_inspect", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def check_closed(page: Page, text: str) -> None:
    """Check that a page needs nothing else, and allows nothing else."""
    assert len(text) < 1 << 20
    policies = [a["content"] for tag, a in page.tags if a.get("http-equiv")]
    assert len(policies) == 1
    assert (policies[0] or "").startswith("default-src 'none'; style-src 'sha256-")
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "base", "form", "a")
        assert not any(
            name in ("src", "href", "style") or name.startswith("on") for name in attributes
        )


def test_an_audit(lab: Lab, tmp_path: Path) -> None:
    core, file = str(lab.image("7.3", "4", "mixed").core), tmp_path / "a.html"
    document = json.loads(run("audit", "-c", core, "--json", "--html", str(file)))
    text = file.read_text()
    page = Page(text)
    check_closed(page, text)
    assert '<span class="verdict exact">exact</span>' in text
    paths = {memcg["address"]: memcg["path"] for memcg in document["memcgs"]}
    # The tree map has all charges, by node and kind.
    shown: Counter[tuple[str, str]] = Counter()
    for amount, title in page.amounts:
        match = re.fullmatch(r"/\S*, (\w+), (node \d+|no node): [\d,]+ bytes?", title)
        if match:
            shown[match[2], match[1]] += amount
    charged: Counter[tuple[str, str]] = Counter()
    for skew in document["skew"]:
        node = "no node" if skew["backing_nid"] is None else f"node {skew['backing_nid']}"
        charged[node, skew["kind"]] += skew["bytes"]
    assert shown == +charged
    # The heat maps have the nodes.
    of_memcgs = {title: amount for amount, title in page.amounts}
    expected: Counter[tuple[str, int]] = Counter()
    crossed: Counter[tuple[int, int]] = Counter()
    for skew in document["skew"]:
        if skew["backing_nid"] is not None:
            expected[paths[skew["memcg"]], skew["backing_nid"]] += skew["bytes"]
            if skew["charged_nid"] is not None:
                crossed[skew["charged_nid"], skew["backing_nid"]] += skew["bytes"]
    (path, nid), most = expected.most_common(1)[0]
    assert of_memcgs[f"{path}, node {nid}: {most:,} bytes"] == most
    for (charged_nid, nid), amount in crossed.items():
        title = f"charged on node {charged_nid}, node {nid}: {amount:,} bytes"
        assert of_memcgs[title] == amount
    identities = next(t for t in page.tables if t[0][0] == document["identities"][0]["name"])
    assert [row[0] for row in identities] == [i["name"] for i in document["identities"]]


@pytest.mark.parametrize(
    "words",
    [
        ("pages",),
        ("slabinfo", "--by", "cache,node"),
        ("percpu",),
        ("overview",),
        ("dying",),
        ("stat", "/"),
    ],
)
def test_a_view(lab: Lab, tmp_path: Path, words: tuple[str, ...]) -> None:
    core, file = str(lab.image("7.3", "4", "mixed").core), tmp_path / "a.html"
    document = json.loads(run(*words, "-c", core, "--json", "--html", str(file)))
    text = file.read_text()
    page = Page(text)
    check_closed(page, text)
    tables = [table for table in document["tables"] if table["rows"]]
    assert len(page.tables) == len(tables)
    for found, table in zip(page.tables, tables, strict=True):
        assert 0 < len(found) <= len(table["rows"])
        for cells, row in zip(found, table["rows"], strict=False):
            for cell, column in zip(cells, table["columns"], strict=True):
                value = row[column["name"]]
                if type(value) is int and column["kind"] != "address":
                    assert cell == str(value), column


def test_a_difference(lab: Lab, tmp_path: Path) -> None:
    one, two = (str(lab.image("7.3", "4", load).core) for load in ("files", "mixed"))
    file = tmp_path / "a.html"
    document = json.loads(run("diff", one, two, "--json", "--html", str(file)))
    page = Page(file.read_text())
    check_closed(page, file.read_text())
    growth = Counter(row["growth"] for row in document["tables"][0]["rows"])
    shown = Counter(amount for amount, _ in page.amounts)
    assert shown <= growth
    # Which one is left out does not matter, if one grew by as much as another one shrank.
    assert sorted(map(abs, shown.elements())) == sorted(map(abs, growth.elements()))[-25:]


def hostile(lab: Lab) -> Answer:
    """Return an answer with names as no friend makes them."""
    name = "/<img src=x onerror=alert(1)>\x1b[31m\u202e</td></script><script>alert(2)</script>"
    row = PagesRow(
        memcg=name, memcg_address=1, node=0, zone=name, kind=name, order=None, cache=name,
        caller=name, lru=None, pages=1, bytes=4096, paid=4096, unpaid=0, never=0, unused=0,
    )  # fmt: skip
    whole = pages(image_of(lab.image("7.3", "2", "files").program()))
    table = Table("pages", name, columns_of(PagesRow), [row] * 12)
    return Answer(name, whole.image, (table,), {}, (name,))


def test_names_are_harmless(lab: Lab) -> None:
    text = answer_page(hostile(lab))
    page = Page(text)
    check_closed(page, text)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert [tag for tag, _ in page.tags if tag == "script"] == ["script"]
    assert all("<img src=x onerror=alert(1)>" in row[0] for row in page.tables[0])


def test_a_picture(lab: Lab, tmp_path: Path) -> None:
    core, file = str(lab.image("7.3", "2", "files").core), tmp_path / "a.svg"
    document = json.loads(run("pages", "-c", core, "--json", "--svg", str(file)))
    text = file.read_text()
    assert text.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    shown = sum(map(int, re.findall(r'data-amount="(\d+)"', text)))
    assert shown == sum(row["bytes"] for row in document["tables"][0]["rows"])
    assert all(kind in KINDS for kind in {row["kind"] for row in document["tables"][0]["rows"]})
    words = ("tasks", "-c", core, "--svg", str(file))
    done = subprocess.run(
        [sys.executable, "-m", "memcg_inspect", *words], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "memcg-inspect: --svg: there is nothing to draw\n")


def test_a_file_that_cannot_be_written(lab: Lab) -> None:
    core = str(lab.image("7.3", "2", "files").core)
    command = [sys.executable, "-m", "memcg_inspect", "tasks", "-c", core, "--html", "/no/a.html"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "memcg-inspect: /no/a.html: No such file or directory\n"


@pytest.mark.long
def test_in_a_browser(lab: Lab, tmp_path: Path) -> None:
    """No error, no request, nothing wider than a phone; tables sort and filter."""
    from playwright.sync_api import sync_playwright

    if shutil.which("chromium") is None:
        subprocess.run(
            ["apt-get", "install", "-q", "-y", "--no-install-recommends", "chromium"],
            check=True,
            capture_output=True,
        )
    core = str(lab.image("7.3", "4", "mixed").core)
    for words in (("audit",), ("pages",), ("slabinfo",)):
        run(*words, "-c", core, "--html", str(tmp_path / f"{words[0]}.html"))
    (tmp_path / "hostile.html").write_text(answer_page(hostile(lab)))
    with sync_playwright() as tool:
        path = shutil.which("chromium")
        browser = tool.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for width in (1200, 400):
            for file in sorted(tmp_path.glob("*.html")):
                said: list[str] = []
                asked: list[str] = []
                tab: Any = browser.new_page(viewport={"width": width, "height": 800})
                tab.on("console", lambda message, said=said: said.append(message.text))
                tab.on("pageerror", lambda error, said=said: said.append(str(error)))
                tab.on("dialog", lambda dialog, said=said: said.append(dialog.message))
                tab.on("request", lambda request, asked=asked: asked.append(request.url))
                tab.goto(file.as_uri())
                assert (said, asked) == ([], [file.as_uri()])
                assert tab.evaluate("document.documentElement.scrollWidth") <= width
                tab.close()
        tab = browser.new_page()
        tab.goto((tmp_path / "pages.html").as_uri())
        rows = "[...document.querySelectorAll('tbody')[0].rows]"
        column = f"{rows}.map((row) => Number(row.cells[4].dataset.value))"
        before = tab.evaluate(column)
        head = tab.locator("th").nth(4).locator("button")
        head.click()
        assert tab.evaluate(column) == sorted(before, reverse=True)
        head.click()
        assert tab.evaluate(column) == sorted(before)
        head.click()
        assert tab.evaluate(column) == before
        tab.locator("input").first.fill("slab")
        shown = f"{rows}.filter((row) => row.offsetParent !== null)"
        assert set(tab.evaluate(f"{shown}.map((row) => row.cells[2].textContent)")) == {"slab"}
        browser.close()


def test_a_page_of_very_many_rows(lab: Lab) -> None:
    """It stays small, and says what it leaves out. No picture loses an amount."""
    image = image_of(lab.image("7.3", "2", "files").program())
    whole = pages(image)
    row = whole.tables[0].rows[0]
    rows = [
        replace(row, node=n % 70, zone=f"ä{n % 8}" * 20, kind=f"kind-{n}", bytes=4096 + n)
        for n in range(30_000)
    ]
    table = replace(whole.tables[0], rows=rows)
    text = answer_page(replace(whole, tables=(table,)))
    assert len(text.encode()) < 1 << 20
    assert "more rows: --json has all of them." in text
    shown = [amount for amount, title in Page(text).amounts if "memcg" not in title]
    assert sum(shown) == sum(row.bytes for row in rows)


def test_rows_that_include_others_are_not_drawn(lab: Lab, tmp_path: Path) -> None:
    """A memcg of overview has the memory of those below it, too."""
    core, file = str(lab.image("7.3", "4", "mixed").core), tmp_path / "a.html"
    run("overview", "-c", core, "--html", str(file))
    assert Page(file.read_text()).amounts == []


def test_a_file_keeps_its_permissions(lab: Lab, tmp_path: Path) -> None:
    core, file = str(lab.image("7.3", "2", "files").core), tmp_path / "a.html"
    file.write_text("")
    file.chmod(0o600)
    run("tasks", "-c", core, "--html", str(file))
    assert file.stat().st_mode & 0o777 == 0o600
    assert "<h1>memcg-inspect tasks" in run("tasks", "-c", core, "--html", "/dev/stdout")
