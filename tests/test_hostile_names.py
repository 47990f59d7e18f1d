# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Names from an image that would control the terminal, in all places names come from.

The names are laid over those of a real image. They are hostile in ways that no kernel allows, too:
a vmcore says what whoever wrote it wants.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Iterator
from itertools import cycle

import drgn
import pytest
from drgn import Object, Program
from drgn.commands import CommandError, run_command
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.pid import for_each_task
from support.guests import DEBIAN_KERNELS, Lab
from support.missing_pages import opened
from support.sampling import Sampled

from memcg_inspect.cli import main
from memcg_inspect.collect import collect
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.slab import SlabReader
from memcg_inspect.names import COMMANDS

#: The title of a window, clearing of the screen, line breaks, C1 control characters as UTF-8 and
#: as a byte that is not UTF-8, marks that turn the direction of text, and an invisible character.
HOSTILE = (
    *(b"\x1b]0;owned\x07", b"\x1b[2J\x1b[1;31m", b"a\nb\r\tc", b"\xc2\x9b31m", b"\x9b\xff\xfe"),
    *(b"\xe2\x80\xaeab", b"\xe2\x81\xa6b", b"\x7f\x08\x08", b"\xf3\xa0\x81\x81"),
)
#: Caches whose objects the program knows by the cache's name.
KNOWN_CACHES = (b"task_struct", b"dentry", b"filp")
PAGE = 4096

#: Arguments that commands need.
ARGUMENTS = {"stat": ["/"], "audit": ["--all"]}


class Overlay:
    """Names to lay over those of an image."""

    def __init__(self, prog: Program) -> None:
        self.prog = prog
        self.pages: dict[int, bytearray] = {}
        self.names = cycle(HOSTILE)

    def write(self, address: int, size: int) -> None:
        """Write a name of this many bytes."""
        name = (next(self.names) * (1 + size // 3))[:size]
        for at, byte in enumerate(name, address):
            self._page(at - at % PAGE)[at % PAGE] = byte

    def write_over(self, name: Object) -> None:
        """Replace a name by one of its length; *name* is a ``char *`` or ``char []``."""
        self.write(name.value_() if name.address_ is None else name.address_, len(name.string_()))

    def _page(self, address: int) -> bytearray:
        if address not in self.pages:
            self.pages[address] = bytearray(self.prog.read(address, PAGE))
        return self.pages[address]

    def lay(self) -> None:
        for address, content in self.pages.items():
            self.prog.add_memory_segment(address, PAGE, reader(bytes(content)), False)


def reader(content: bytes) -> Callable[[int, int, int, bool], bytes]:
    return lambda address, count, offset, physical: content[offset : offset + count]


def dentries(prog: Program) -> Iterator[Object]:
    slabs = SlabReader(image_of(prog))
    for piece in scan_pages(image_of(prog)):
        for page in piece.slabs:
            slab = slabs.slab(page)
            if slab is not None and slab.cache.name == "dentry":
                for found in slabs.charged_objects(slab):
                    yield Object(prog, "struct dentry *", found.address)


@pytest.fixture(scope="module")
def hostile(lab: Lab) -> Program:
    core = lab.image(DEBIAN_KERNELS[-1], workload="mixed").core
    prog = opened(core)
    overlay = Overlay(prog)
    for address, memcg in collect(image_of(prog)).memcgs.items():
        if memcg.parent is not None:
            css = Object(prog, "struct mem_cgroup *", address).css
            overlay.write_over(css.cgroup.kn.name.read_())
    for task in for_each_task(prog):
        overlay.write(task.comm.address_, len(task.comm.string_()))
    head = prog["slab_caches"].address_of_()
    for cache in list_for_each_entry("struct kmem_cache", head, "list"):
        if cache.name.string_() not in KNOWN_CACHES:
            overlay.write_over(cache.name.read_())
    for module in list_for_each_entry("struct module", prog["modules"].address_of_(), "list"):
        overlay.write_over(module.name)
    for dentry in dentries(prog):
        overlay.write_over(dentry.d_name.name.read_())
    fresh = opened(core)
    overlay.prog = fresh
    overlay.lay()
    return fresh


@pytest.fixture
def said(
    hostile: Program, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Return a function that runs a command on the image, and returns all that it prints."""
    monkeypatch.setattr("memcg_inspect.running.open_program", lambda source: hostile)

    def run(*words: str) -> str:
        status = main([*words, "-c", "/vmcore"])
        assert status != 70, capsys.readouterr().err
        return "".join(capsys.readouterr())

    return run


def harmless(text: str, *more: str) -> bool:
    """Return whether a text has no character that is not printable, except for line breaks."""
    odd = {char for char in text if not (char.isprintable() or char in ("\n", *more))}
    assert not odd, text[:2000]
    return bool(text)


@pytest.mark.image
@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "who"])
def test_every_command(said: Callable[..., str], command: str) -> None:
    words = [command, *ARGUMENTS.get(command, [])]
    assert harmless(said(*words))
    assert harmless(said(*words, "--json"))
    table = ["--rows"] if command == "audit" else []
    assert harmless(said(*words, *table, "--scripted", "--header"), "\t")
    text = said(*words, *table, "--csv")
    assert harmless(text)
    for block in text.split("\n\n"):
        header, *lines = csv.reader(block.splitlines())
        assert {len(line) for line in lines} <= {len(header)}


@pytest.mark.image
def test_addresses(said: Callable[..., str], hostile: Program) -> None:
    """A task with its obj_cgroups, open files and dentries, and a memcg."""
    # One that exits has no directories any more.
    *_, task = (task for task in for_each_task(hostile) if task.mm and task.fs)
    words = [f"{task.value_():#x}", f"{task.fs.pwd.dentry.value_():#x}"]
    words.append(f"{task.cgroups.subsys[hostile.constant('memory_cgrp_id')].value_():#x}")
    words.append(f"{next(dentries(hostile)).value_():#x}")
    text = said("who", *words)
    assert harmless(text)
    assert r"\x" in text
    assert harmless(said("who", *words, "--json"))
    assert harmless(said("who", *words, "--scripted"), "\t")


@pytest.mark.image
@pytest.mark.parametrize("command", ["stock", "audit --rows", "stat"])
def test_a_message_that_lists_names(said: Callable[..., str], command: str) -> None:
    words = [*command.split(), *([] if command == "stat" else ["--memcg"]), "/no/such"]
    message = said(*words)
    assert message.startswith("memcg-inspect: ")
    assert "no memcg /no/such; there are" in message
    assert harmless(message)
    assert r"\x" in message
    assert message.count("\n") == 1


@pytest.mark.image
def test_names_can_be_given_as_they_are_shown(said: Callable[..., str], sampled: Sampled) -> None:
    shown = said("overview", "--scripted", "--fields", "memcg,memcg_address").splitlines()
    rows = [line.split("\t") for line in shown]
    tried = [(path, address) for path, address in rows if "\\" in path][:20]
    assert tried
    for path, address in sampled(tried, 4):
        found = said("overview", "--scripted", "--fields", "memcg_address", "--memcg", path)
        assert address in found.split()
        assert said("usage", path, "--scripted")


@pytest.mark.image
def test_a_message_in_a_drgn_session(hostile: Program) -> None:
    with pytest.raises(CommandError) as error:
        run_command(hostile, "memcg stock --memcg /no/such")
    assert harmless(str(error.value))
    assert r"\x" in str(error.value)


@pytest.mark.parametrize("name", HOSTILE)
def test_bugs_and_the_log(
    name: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names in an exception that nobody expected, and in messages of the log."""
    text = name.decode(errors="backslashreplace")

    def fail(source: object) -> drgn.Program:
        logging.getLogger("memcg_inspect.btf").error("module %s", text)
        raise KeyError(f"one\n{text}")

    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr("memcg_inspect.running.open_program", fail)
    assert main(["audit", "-c", "/vmcore"]) == 70
    printed = capsys.readouterr().err
    assert harmless(printed)
    assert "memcg_inspect.btf: module " in printed
