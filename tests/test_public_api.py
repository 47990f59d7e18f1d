# SPDX-License-Identifier: LGPL-2.1-or-later
"""The public API: every name of ``memcg_inspect``, used by scripts and by drgn sessions."""

from __future__ import annotations

import inspect
import pkgutil
import pydoc
import random
import subprocess
import sys

import pytest
from support.guests import DEBIAN_KERNELS, GuestImage, Lab
from support.sessions import converse

import memcg_inspect

NEWEST = DEBIAN_KERNELS[-1]

#: What each function is called with, in the names of ``PRELUDE``.
CALLS = {
    "audit": "memcg_inspect.audit(prog)",
    "find_memcg": "memcg_inspect.find_memcg(prog, '/files')",
    "for_each_charged_slab_object": (
        "next(memcg_inspect.for_each_charged_slab_object(prog, memcg=memcg))"
    ),
    "for_each_memcg": "next(memcg_inspect.for_each_memcg(prog))",
    "for_each_pcpu_alloc": "next(memcg_inspect.for_each_pcpu_alloc(prog))",
    "memcg_counter": "memcg_inspect.memcg_counter(memcg, 'NR_SLAB_RECLAIMABLE_B', 0)",
    "memcg_path": "memcg_inspect.memcg_path(memcg)",
    "objcg_memcg": "memcg_inspect.objcg_memcg(slab_object.objcg)",
    "objcg_nid": "memcg_inspect.objcg_nid(slab_object.objcg)",
    "page_to_nid": "memcg_inspect.page_to_nid(slab_object.slab)",
    "slab_objcg": "memcg_inspect.slab_objcg(slab_object.slab, 0)",
}
#: What each call returns.
RETURNS = {
    "audit": "Report",
    "find_memcg": "struct mem_cgroup *",
    "for_each_charged_slab_object": "ChargedSlabObject",
    "for_each_memcg": "struct mem_cgroup *",
    "for_each_pcpu_alloc": "PcpuAllocation",
    "memcg_counter": "CounterValue",
    "memcg_path": "bytes",
    "objcg_memcg": "struct mem_cgroup *",
    "objcg_nid": "int",
    "page_to_nid": "int",
    "slab_objcg": "struct obj_cgroup *",
}
TYPES = {"ChargedSlabObject", "CounterValue", "PcpuAllocation"}

PRELUDE = """
from drgn import Object
import memcg_inspect

def kind(value):
    return value.type_.type_name() if isinstance(value, Object) else type(value).__name__

# Its first use, before any other name.
memcg = Object(prog, "struct mem_cgroup *", {memcg:#x})
slab = Object(prog, "struct slab *", {slab:#x})
objcg = Object(prog, "struct obj_cgroup *", {objcg:#x})
slab_object = memcg_inspect.ChargedSlabObject(0, None, 0, 0, 0, slab, objcg)
"""


def things(image: GuestImage) -> dict[str, int]:
    prog = image.program()
    memcg = memcg_inspect.find_memcg(prog, "/files")
    found = next(memcg_inspect.for_each_charged_slab_object(prog, memcg=memcg))
    return {
        "memcg": memcg.value_(),
        "slab": found.slab.value_(),
        "objcg": found.objcg.value_(),
    }


def script(image: GuestImage, seed: int) -> str:
    """Calls every function twice, in a random order, and prints what each returned."""
    names = 2 * list(CALLS)
    random.Random(seed).shuffle(names)
    lines = [f"print({name!r}, kind({CALLS[name]}))" for name in names]
    return "\n".join([PRELUDE.format(**things(image)), *lines])


def test_every_name_is_tried() -> None:
    assert set(CALLS) | TYPES == set(memcg_inspect.__all__)
    assert set(CALLS) == set(RETURNS)
    assert all(f"memcg_inspect.{name}(" in call for name, call in CALLS.items())


def check(printed: str) -> None:
    lines = [tuple(line.split(" ", 1)) for line in printed.splitlines()]
    assert sorted(lines) == sorted(2 * [*RETURNS.items()])


OPEN = """
import sys
from memcg_inspect.image.program import ImageSource, open_program
prog = open_program(ImageSource(core=sys.argv[1], debuginfo="btf"))
"""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.image
def test_twice_in_any_order(lab: Lab, seed: int) -> None:
    image = lab.image(NEWEST)
    done = subprocess.run(
        [sys.executable, "-c", OPEN + script(image, seed), str(image.core)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check(done.stdout)


@pytest.mark.image
def test_twice_in_drgn(lab: Lab) -> None:
    """drgn imports the package through its entry points before the script does."""
    image = lab.image(NEWEST)
    code = "import sys\nassert 'memcg_inspect.btf' in sys.modules\n" + script(image, 3)
    done = subprocess.run(
        [sys.executable, "-m", "drgn", "-c", str(image.core), "--no-default-symbols", "-q",
         "-e", code],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check(done.stdout)


@pytest.mark.image
def test_twice_in_a_session(lab: Lab) -> None:
    said = converse(
        lab.image(NEWEST),
        "import memcg_inspect",
        "memcg_inspect.audit().verdict",
        "memcg_inspect.memcg_path(memcg_inspect.find_memcg('/files'))",
        "memcg_inspect.audit().verdict",
        "%memcg audit --json | grep -c verdict",
        "memcg_inspect.audit(prog).verdict",
        "len(repr(memcg_inspect.audit())) < 2000",
        "help(memcg_inspect.objcg_nid)",
    )
    assert said[1:-1] == ["'exact'", "b'/files'", "'exact'", "1", "'exact'", "True"]
    assert "Get the NUMA node that an ``obj_cgroup`` is for." in said[-1]
    assert ":param objcg: ``struct obj_cgroup *``" in said[-1]


@pytest.mark.parametrize("nodes", ["1", "4"])
@pytest.mark.image
def test_the_repr_of_a_report_is_short(lab: Lab, nodes: str) -> None:
    report = lab.image(NEWEST, nodes, "mixed").report()
    assert len(report.memcgs) > 20
    assert repr(report).startswith(f"<Report {report.verdict.upper()} of Linux 7.3")
    assert len(repr(report)) < 2000


@pytest.mark.parametrize("name", memcg_inspect.__all__)
def test_every_name_is_documented(name: str) -> None:
    thing = getattr(memcg_inspect, name)
    assert callable(thing)
    assert not inspect.ismodule(thing)
    told = inspect.getdoc(thing)
    assert told
    assert told.splitlines()[0].endswith(".")
    if inspect.isclass(thing):
        assert all(f"{field}" in vars(thing) for field in thing._fields)
        assert not told.startswith(f"{name}(")  # namedtuple's own
        return
    function = inspect.unwrap(thing)
    for parameter in inspect.signature(function).parameters:
        # drgn's docs do not tell of prog, which every helper takes.
        assert parameter == "prog" or f":param {parameter}: " in told
    if function.__annotations__["return"] == "Object":
        assert ":return: ``struct " in told


def test_help_shows_every_name() -> None:
    shown = pydoc.render_doc(memcg_inspect, renderer=pydoc.plaintext)
    for name in memcg_inspect.__all__:
        first = (inspect.getdoc(getattr(memcg_inspect, name)) or "").splitlines()[0]
        assert name in shown
        assert first in shown


def test_no_module_has_a_public_name() -> None:
    """Importing a submodule binds its name in the package, over what is there."""
    modules = {module.name for module in pkgutil.iter_modules(memcg_inspect.__path__)}
    assert {"checks", "helpers", "linux"} <= modules
    assert not modules & set(memcg_inspect.__all__)


def test_dir_lists_every_name() -> None:
    assert set(memcg_inspect.__all__) <= set(dir(memcg_inspect))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        memcg_inspect.nothing  # noqa: B018


def test_the_plugin_imports_little() -> None:
    """Every drgn session imports the plugins: they import nothing that takes long."""
    code = (
        "import sys, drgn, drgn.commands.linux\nbefore = set(sys.modules)\n"
        "import memcg_inspect.commands\n"
        "new = set(sys.modules) - before\n"
        "print(*sorted(m for m in new if 'memcg_inspect' in m or m == 'rich'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["memcg_inspect", "memcg_inspect.commands"]
