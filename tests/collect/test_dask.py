# SPDX-License-Identifier: LGPL-2.1-or-later
"""Workers of dask read the pages, and the report is the same."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.dask_cluster import Cluster, cluster
from support.guests import GuestImage, Lab

from memcg_inspect.cli import main
from memcg_inspect.collect import audit
from memcg_inspect.image import dask
from memcg_inspect.image.dask import dask_pool
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.image.place import place_of
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.model import ImageError
from memcg_inspect.render.documents import report_document


def source_of(core: Path) -> ImageSource:
    return ImageSource(core=str(core), debuginfo="btf")


def opened(core: Path) -> Image:
    return image_of(open_program(source_of(core)))


def document(image: Image) -> str:
    """Return the JSON document of an audit without times."""
    found: dict[str, Any] = report_document(audit(image), True)
    del found["timings"]
    return json.dumps(found)


@pytest.fixture
def image(lab: Lab) -> GuestImage:
    return lab.image("7.3", "4", "mixed")


@pytest.mark.image
def test_a_worker_that_is_killed_changes_nothing(image: GuestImage, tmp_path: Path) -> None:
    """It is killed in the middle of the walk. Others read its parts, none of them twice."""
    alone = document(opened(image.core))
    with cluster(tmp_path, 2) as made, dask_pool(made.address, source_of(image.core)) as pool:
        assert pool.workers == 2
        whole = opened(image.core)
        whole.pool = pool
        assert document(whole) == alone
        halved = opened(image.core)
        halved.pool = pool
        halved.progress.report = Killer(made)
        assert document(halved) == alone
        assert len(made.workers) == 1


class Killer:
    """Kills a worker when a part of the pages was read."""

    def __init__(self, made: Cluster) -> None:
        self.made = made

    def __call__(self, what: str, share: float) -> None:
        if what == "pages" and share < 1 and len(self.made.workers) > 1:
            self.made.kill_one()


@pytest.mark.image
def test_the_command(image: GuestImage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["audit", "--json", "--debuginfo", "btf", "-c", str(image.core)]
    assert main(command) == 0
    alone = json.loads(capsys.readouterr().out)
    with cluster(tmp_path, 1) as made:
        assert main([*command, "--dask", made.address]) == 0
        found = json.loads(capsys.readouterr().out)
        del alone["timings"], found["timings"]
        assert found == alone
        made.kill_one()
        with ExitStack() as stack, pytest.raises(ImageError, match="has no worker|cannot run"):
            while True:  # until the scheduler has seen that it is gone
                stack.enter_context(dask_pool(made.address, source_of(image.core)))


@pytest.mark.image
def test_a_worker_that_has_another_file(image: GuestImage, tmp_path: Path) -> None:
    """The same path may be another dump there, and another version of the program."""
    copy = tmp_path / "vmcore"
    shutil.copyfile(image.core, copy)
    place = place_of(source_of(copy))
    assert place.opened()
    with copy.open("r+b") as file:
        file.seek(1000)
        file.write(b"other")
    with pytest.raises(ImageError, match="is another file there"):
        place.opened()
    copy.unlink()
    with pytest.raises(ImageError, match="No such file"):
        place.opened()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["audit", "--dask", "tcp://127.0.0.1:1"], "needs audit -c"),
        (["stock", "-c", "x", "--dask", "tcp://127.0.0.1:1"], "needs audit -c"),
        (["audit", "-c", "x", "--jobs", "2", "--dask", "y"], "cannot be used with --jobs"),
        (["audit", "-c", "x", "--nice", "--dask", "y"], "cannot be used with --jobs or --nice"),
    ],
)
def test_arguments(arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert what in line


@pytest.mark.image
@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense", "tcp://[", ""])
def test_no_scheduler(
    image: GuestImage,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(dask, "_TIMEOUT", 1)
    core = str(image.core)
    assert main(["audit", "--debuginfo", "btf", "-c", core, "--dask", address]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "no dask scheduler at" in line
