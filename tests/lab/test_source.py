# SPDX-License-Identifier: LGPL-2.1-or-later
"""Patched copies of a source, which share files with it and must not change them."""

import os
from pathlib import Path

import pytest
from labkit import build, kernels, source
from labkit.errors import LabError
from labkit.paths import FIXTURES

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
    with pytest.raises(LabError, match=r"apply b-B\.patch"):
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


def test_a_kernel_on_a_patched_one_starts_from_it(own_cache: Path) -> None:
    plain = build.kernel_command("9.9-lab", "9.9", None)
    broken = build.kernel_command("9.9-broken", "9.9", "9.9-lab")
    assert broken[-len(plain) :] == plain
    assert f"{own_cache}/src/9.9-broken {own_cache}/src/linux-source-9.9" in " ".join(broken)


def test_a_kernel_of_another_architecture_is_built_with_its_compiler(own_cache: Path) -> None:
    assert build.kernel_command("9.9-lab", "9.9", None)[-1] == "ARCH=x86_64"
    command = build.kernel_command("9.9-arm64-64k", "9.9", None, "arm64")
    assert command[-2:] == ["ARCH=arm64", "CROSS_COMPILE=aarch64-linux-gnu-"]
    assert f"O={own_cache}/build/9.9-arm64-64k" in command


def test_a_build_starts_anew_when_its_base_is_another(own_cache: Path) -> None:
    base, output = own_cache / "build" / "base", own_cache / "build" / "x"
    base.mkdir(parents=True)
    (base / "a.o").write_text("1")
    start = build.Base("base", "base", "first")
    build._start_from(start, output, "x")
    source.patched_folder("x").mkdir(parents=True)
    (output / "a.o").write_text("made since")
    build._start_from(start, output, "x")
    assert (output / "a.o").read_text() == "made since"
    # with the source, so that what is patched looks new
    build._start_from(build.Base("base", "base", "second"), output, "x")
    assert (output / "a.o").read_text() == "1"
    assert not source.patched_folder("x").exists()


def test_each_patch_of_the_project_says_why() -> None:
    folder = FIXTURES / "patches"
    patches = sorted([*folder.rglob("*.patch"), *(FIXTURES / "museum").rglob("*.patch")])
    assert len([path for path in patches if path.parent.name == "7.3-pernode"]) == 10
    assert len(kernels.BROKEN) >= 8
    for path in patches:
        text = path.read_text()
        message = text.split("\n---\n")[0].splitlines()
        assert message[0] == "SPDX-License-Identifier: GPL-2.0-only", path.name
        assert message[1].startswith("Subject: ") and len("\n".join(message[2:])) > 100, path.name
    for name in kernels.BROKEN:
        recipe = kernels.RECIPES[f"7.3-pernode-broken-{name}"]
        assert kernels._all_patches(recipe)[-1] == folder / "7.3-pernode-broken" / f"{name}.patch"
        assert len(kernels._all_patches(recipe)) == 11
