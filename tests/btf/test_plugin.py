# SPDX-License-Identifier: LGPL-2.1-or-later
"""The plugin: what it registers, when it reads, and that it does not disturb debug info."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from drgn import Architecture, Platform, Program
from support.guests import DEBIAN_KERNELS, GuestImage, Lab

from memcg_inspect.btf import debug_info_source
from memcg_inspect.btf.plugin import drgn_prog_set
from memcg_inspect.btf.session import session_of


def test_other_programs_are_left_alone() -> None:
    prog = Program(Platform(Architecture.X86_64))
    drgn_prog_set(prog)
    assert session_of(prog) is None
    assert "btf" not in prog.registered_type_finders()


@pytest.mark.image
def test_nothing_is_read_until_asked(lab: Lab) -> None:
    prog = Program()
    prog.set_core_dump(lab.image(DEBIAN_KERNELS[-1]).core)
    drgn_prog_set(prog)
    assert "_makers=[]" in f"_makers={vars(session_of(prog))['_makers']}"
    assert prog.type("struct page").size > 0
    assert debug_info_source(prog) == "BTF of the image"


@pytest.mark.image
def test_a_kernel_without_btf_gives_one_warning(
    lab: Lab, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memcg_inspect.btf import session
    from memcg_inspect.btf.parse import BtfError

    def nothing(*_: object) -> None:
        raise BtfError("this kernel has no BTF")

    monkeypatch.setattr(session, "from_image", nothing)
    # Another test may have changed the level through the command line.
    caplog.set_level("WARNING", logger="memcg_inspect")
    prog = Program()
    prog.set_core_dump(lab.image(DEBIAN_KERNELS[-1]).core)
    drgn_prog_set(prog)
    for _ in range(2):
        with pytest.raises(LookupError):
            prog.type("struct page")
    assert [r.getMessage() for r in caplog.records] == ["this kernel has no BTF"]
    assert debug_info_source(prog) == "none"


@pytest.mark.image
def test_in_drgn_itself(lab: Lab) -> None:
    image = lab.image(DEBIAN_KERNELS[-1])
    environment = os.environ | {
        "DRGN_PLUGINS": "btf=memcg_inspect.btf.plugin",
        "DRGN_DISABLE_PLUGINS": "*",
    }
    done = subprocess.run(
        [sys.executable, "-m", "drgn", "-c", image.core, "--no-default-symbols", "-q", "-e",
         "print(prog['init_task'].comm.string_().decode())"],
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.stdout == "swapper/0\n", done.stderr


#: What a session asks, and prints as JSON. Some names exist, some do not.
QUESTIONS = """
import json
from drgn import FindObjectFlags
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.module import for_each_module
from drgn.helpers.linux.pid import find_task, for_each_task
from drgn.helpers.linux.slab import find_slab_cache, slab_cache_usage

def answer(question):
    try:
        return str(question())
    except Exception as error:
        return f"{type(error).__name__}: {error}"

every = prog.symbols()
some = sorted(every, key=lambda symbol: (symbol.name, symbol.address))[::1000]
names = sorted({symbol.name for symbol in some}) + ["no_such_name", "jiffies", "PAGE_SHIFT"]
types = ["struct task_struct", "struct mem_cgroup", "struct list_head", "struct hlist_node",
    "struct page", "union thread_union", "enum zone_type", "pid_t", "gfp_t", "unsigned long",
    "char", "void *", "struct no_such_struct", "union no_such_union", "enum no_such_enum",
    "no_such_typedef", "int (*)(int)"]
types += [f"struct {name}" for name in names]
members = prog.type("struct task_struct").members
types += [m.type.type_name() for m in members if not m.type.type_name().startswith("<")]
files = [None, "kernel/sched/core.c", "no_such_file.c"]

found = {}
for name in types:
    for file in files:
        found[f"type {name} {file}"] = answer(lambda: prog.type(name, file))
for name in names:
    for file in files:
        for flag in FindObjectFlags:
            key = f"object {name} {flag} {file}"
            found[key] = answer(lambda: prog.object(name, flag, file).type_)
            found[key + " address"] = answer(lambda: prog.object(name, flag, file).address_)
    found[f"item {name}"] = answer(lambda: prog[name].type_)
    found[f"symbol {name}"] = answer(lambda: prog.symbol(name))
    found[f"symbols {name}"] = answer(lambda: sorted(map(str, prog.symbols(name))))
for symbol in some:
    for address in (symbol.address, symbol.address + 1, symbol.address - 1):
        found[f"at {address:#x}"] = answer(lambda: prog.symbol(address))
        found[f"all at {address:#x}"] = answer(lambda: sorted(map(str, prog.symbols(address))))
found["number of symbols"] = len(every)
found["modules"] = answer(lambda: [(m.name, str(m.debug_file_status)) for m in prog.modules()])
found["kernel modules"] = answer(lambda: [m.name.string_() for m in for_each_module(prog)])
found["tasks"] = answer(lambda: [t.comm.string_() for t in for_each_task(prog)])
found["trace"] = answer(lambda: prog.stack_trace(find_task(prog, 1)))
found["usage"] = answer(lambda: slab_cache_usage(find_slab_cache(prog, "dentry")))
found["member"] = answer(lambda: prog["init_task"].no_such_member)
print(json.dumps(found))
"""


def ask(image: GuestImage, before: str = "", symbols: bool = True, **environ: str) -> Any:
    """Run a drgn session in its own process; return what it printed."""
    given = ["-s", str(image.vmlinux)] if symbols else []
    done = subprocess.run(
        [sys.executable, "-m", "drgn", "-c", str(image.core), "--no-default-symbols", *given,
         "-q", "-e", before + QUESTIONS],
        # With several threads, which of several definitions drgn finds is left to chance.
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environ,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@cache
def without_plugins(core: Path) -> Any:
    before = "import sys\nassert 'memcg_inspect' not in sys.modules\n"
    return ask(GuestImage(core), before, DRGN_DISABLE_PLUGINS="*")


@pytest.mark.image
def test_sessions_with_debug_info_are_not_changed(lab: Lab) -> None:
    """With debug info, drgn answers the same whether this package is installed or not."""
    image = lab.image(DEBIAN_KERNELS[-1])
    without = without_plugins(image.core)
    assert ask(image, "assert 'btf' in prog.registered_type_finders()\n") == without
    assert len(without) > 5000
    assert without["type struct task_struct None"].startswith("struct task_struct {")
    no_such = "could not find 'struct no_such_struct'"
    assert without["type struct no_such_struct None"] == f"LookupError: {no_such}"
    assert "jiffies" in without["symbol jiffies"]
    assert "b'init'" in without["tasks"]


@pytest.mark.image
def test_debug_info_that_is_loaded_late(lab: Lab) -> None:
    """BTF is used until debug info is loaded, and not after that."""
    image = lab.image(DEBIAN_KERNELS[-1])
    before = (
        "assert prog.type('struct page').size and prog.symbol('jiffies')\n"
        "assert prog['init_task'].pid == 0\n"
        f"prog.load_debug_info([{str(image.vmlinux)!r}])\n"
    )
    assert ask(image, before, symbols=False) == without_plugins(image.core)
