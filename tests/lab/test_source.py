# SPDX-License-Identifier: LGPL-2.1-or-later
"""Patched copies of a source, which must never harm the source they share files with."""

import os
from pathlib import Path

import pytest
from labkit import build, source
from labkit.errors import LabError

PATCH = """\
--- a/mm/{name}.c
+++ b/mm/{name}.c
@@ -1 +1 @@
-{name}
+{new}
"""


@pytest.fixture
def tree(own_cache: Path) -> Path:
    folder = source.folder("9.9")
    (folder / "mm").mkdir(parents=True)
    for name in ("a", "b", "c"):
        (folder / "mm" / f"{name}.c").write_text(f"{name}\n")
        os.utime(folder / "mm" / f"{name}.c", (1000, 1000))
    return folder


def patch(folder: Path, name: str, new: str) -> Path:
    path = folder / f"{name}-{new}.patch"
    path.write_text(PATCH.format(name=name, new=new))
    return path


def texts(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text().strip() for path in (folder / "mm").glob("*.c")}


def test_the_shared_source_stays_as_it_is(tree: Path, tmp_path: Path) -> None:
    made = source.patched("9.9-x", tree, "1", [patch(tmp_path, "a", "A")])
    assert texts(made) == {"a": "A", "b": "b", "c": "c"}
    assert texts(tree) == {"a": "a", "b": "b", "c": "c"}
    assert (made / "mm/b.c").stat().st_ino == (tree / "mm/b.c").stat().st_ino
    assert (made / "mm/a.c").stat().st_mtime > 1000


def test_only_what_changed_looks_new(tree: Path, tmp_path: Path) -> None:
    first = [patch(tmp_path, "a", "A"), patch(tmp_path, "b", "B")]
    made = source.patched("9.9-x", tree, "1", first)
    for name in ("a", "b"):
        os.utime(made / f"mm/{name}.c", (2000, 2000))
    # a as before, b no longer patched, c newly
    made = source.patched("9.9-x", tree, "1", [first[0], patch(tmp_path, "c", "C")])
    assert texts(made) == {"a": "A", "b": "b", "c": "C"}
    times = {name: (made / f"mm/{name}.c").stat().st_mtime for name in "abc"}
    assert times["a"] == 2000
    assert times["b"] > 2000 and times["c"] > 2000
    assert (tree / "mm/b.c").stat().st_mtime == 1000


def test_a_patch_that_does_not_apply_changes_nothing(tree: Path, tmp_path: Path) -> None:
    good = [patch(tmp_path, "a", "A")]
    made = source.patched("9.9-x", tree, "1", good)
    bad = patch(tmp_path, "b", "B")
    bad.write_text(bad.read_text().replace("-b", "-other"))
    with pytest.raises(LabError, match=r"applying b-B\.patch"):
        source.patched("9.9-x", tree, "1", [*good, bad])
    assert texts(made) == {"a": "A", "b": "b", "c": "c"}
    assert texts(tree) == {"a": "a", "b": "b", "c": "c"}


def test_a_patched_kernel_is_built_where_its_base_was(own_cache: Path) -> None:
    plain = build.kernel_command("9.9-lab", "9.9", None)
    patched = build.kernel_command("9.9-x", "9.9", "9.9-lab")
    # the same make, word for word, behind the mounts
    assert patched[-len(plain) :] == plain
    assert patched[0] == "unshare"
    mounts = patched[patched.index("-c") + 1]
    assert f"{own_cache}/src/9.9-x {own_cache}/src/linux-source-9.9" in mounts
    assert f"{own_cache}/build/9.9-x {own_cache}/build/9.9-lab" in mounts
