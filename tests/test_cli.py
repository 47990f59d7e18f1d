# SPDX-License-Identifier: LGPL-2.1-or-later
"""The command line, run as a process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support.guests import KERNELS, ROOT, Lab
from support.schemas import checked

from memcg_inspect.cli import main, make_parser
from memcg_inspect.names import COMMANDS, MORE_HELP

CLI = [sys.executable, "-m", "memcg_inspect"]


def run(*args: object, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *map(str, args)], capture_output=True, text=True, check=False, **more
    )


def refused(*args: object) -> str:
    """Run a command that must fail; return its message of one line."""
    done = run(*args)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("memcg-inspect: ")
    return lines[0]


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stderr) == (0, "")
    installed, drgn = metadata.version("memcg-inspect"), metadata.version("drgn")
    assert done.stdout == f"memcg-inspect {installed} (drgn {drgn})\n"


def test_processes_and_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, why in (
        (["--jobs", "0"], "'0' is not a number from 1 to 9,999"),
        (["--jobs", "two"], "'two' is not a number from 1 to 9,999"),
        (["--jobs", "2", "--qemu", "/nowhere"], "--jobs needs -c: what is running is read by one"),
        (["--jobs", "2"], "--jobs needs -c: what is running is read by one process"),
        (["--jobs", "2", "--nice", "-c", "/nowhere"], "--nice uses one core: it cannot be used"),
    ):
        assert why in refused("audit", *words)
    asked = list[tuple[int, int]]()
    monkeypatch.setattr(os, "sched_setscheduler", lambda pid, how, _: asked.append((pid, how)))
    assert main(["audit", "--nice", "-c", "/nowhere"]) == 2
    assert asked == [(0, os.SCHED_IDLE)]


def test_without_arguments_it_lists_the_commands() -> None:
    """This is no error. Each command has its line, which fits on the terminal."""
    for columns in ("80", "120", "200"):
        done = run(env=os.environ | {"COLUMNS": columns})
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert max(map(len, lines)) < int(columns)
        assert [line for line in lines if line != line.rstrip()] == []
        listed = re.findall(r"^  (\w+) +\w", done.stdout, re.MULTILINE)
        assert listed == [*COMMANDS, *MORE_HELP]
        assert "memcg-inspect audit -c VMCORE" in done.stdout
        assert len(lines) < 30


def test_a_bug_is_status_70_and_says_where_to_report_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This holds for any exception, so that a bug is not reported as an unsupported kernel."""

    def deep(frames: int, error: Exception) -> None:
        if frames:
            deep(frames - 1, error)
        raise error

    for error in (KeyError("slab"), IndexError("7"), TypeError("x"), AssertionError()):
        monkeypatch.setattr("memcg_inspect.running.open_program", lambda _, e=error: deep(50, e))
        assert main(["audit", "-c", "/vmcore"]) == 70
        out, said = capsys.readouterr()
        lines = said.splitlines()
        assert out == ""
        assert type(error).__name__ in lines[-2]
        assert "report" in lines[-1]
        assert "maintainers" in lines[-1]
        assert metadata.version("memcg-inspect") in lines[-1]
        assert len(lines) < 40


@pytest.mark.parametrize("to", ["2>/dev/full", "2>&-"])
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("main(['audit', '-c', '/no/such/vmcore'])", 2),
        ("cli.make_parser = lambda: {}['bug']; main(['audit'])", 70),
        ("cli.make_parser = ctrl_c; main(['audit'])", 130),
    ],
)
def test_standard_error_that_cannot_be_written(to: str, code: str, status: int) -> None:
    """The status is not 1, which means findings, and nothing is on stdout."""
    code = f"""
import sys
from memcg_inspect import cli
from memcg_inspect.cli import main
def ctrl_c():
    raise KeyboardInterrupt
{code.replace("main(", "sys.exit(main(")})"""
    for unbuffered in ({}, {"PYTHONUNBUFFERED": "1"}):
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {to}', "sh", sys.executable, "-c", code],
            env=environment | unbuffered, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


#: What the script that pip installs does, without the modules that an editable installation imports
#: when Python starts. Raises KeyboardInterrupt at one import, or prints the names of all.
IMPORTS = """
import sys
sys.path[:0] = {path!r}
class Finder:
    def find_spec(self, name, *more):
        if name == {at!r}:
            raise KeyboardInterrupt
        if not {at!r}:
            print(name)
sys.meta_path.insert(0, Finder())
from memcg_inspect.__main__ import entry
sys.argv = ["memcg-inspect", "audit", "-c", "/no/such/vmcore"]
sys.exit(entry())
"""


def run_interrupted_at(name: str) -> subprocess.CompletedProcess[str]:
    """Run the program, with a Ctrl-C while it imports a module."""
    code = IMPORTS.format(path=[str(ROOT), *sys.path], at=name)
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )


def test_an_interrupt_during_imports() -> None:
    names = run_interrupted_at("").stdout.split()
    # Nothing that takes time is imported before the program handles Ctrl-C.
    assert names[:3] == ["memcg_inspect", "__future__", "memcg_inspect.__main__"]
    assert {"typing", "drgn", "argparse"} < set(names)
    for name in [*names[3:6], *names[6::50], "drgn", "typing"]:
        done = run_interrupted_at(name)
        assert (done.returncode, done.stdout) == (130, ""), name
        assert done.stderr in ("", "memcg-inspect: interrupted\n"), name


def test_an_interrupt_at_exit() -> None:
    """Python runs what is registered, and flushes files, after the program is done."""
    code = """
import atexit, signal, sys
atexit.register(signal.raise_signal, signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
from memcg_inspect.__main__ import entry
sys.argv = ["memcg-inspect", "--version"]
entry()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


def test_an_interrupt_while_a_program_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """drgn ignores what a plugin raises."""

    def open_program(_: object) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("memcg_inspect.running.open_program", open_program)
    monkeypatch.setattr("memcg_inspect.running.image_of", lambda prog: prog)
    # A shell that runs the tests in the background makes them ignore the signal.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["audit", "-c", "/vmcore"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, inherited)


def test_an_interrupt_that_drgn_ignores_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints what a plugin raises as Python prints what a destructor raises."""

    class Plugin:
        def __init__(self, error: type[BaseException] | None) -> None:
            self.error = error

        def __del__(self) -> None:
            if self.error is not None:
                raise self.error
            signal.raise_signal(signal.SIGINT)

    def open_program(_: object) -> None:
        Plugin(None)
        Plugin(KeyError)

    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    monkeypatch.setattr("memcg_inspect.running.open_program", open_program)
    monkeypatch.setattr("memcg_inspect.running.image_of", lambda prog: prog)
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["audit", "-c", "/vmcore"]) == 130
    finally:
        signal.signal(signal.SIGINT, inherited)
    said = capsys.readouterr().err
    assert "KeyboardInterrupt" not in said
    assert said.count("Traceback") == said.count("KeyError") == 1
    assert sys.unraisablehook is sys.__unraisablehook__


@pytest.mark.parametrize("args", ["schema", "completion bash"])
def test_text_that_cannot_be_written(args: str) -> None:
    full, closed = "No space left on device", "standard output is closed"
    for to, why in ((">/dev/full", full), (">&-", closed)):
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {to}', "sh", *CLI, *args.split()],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"memcg-inspect: output cannot be written: {why}\n"


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ("-c vmcore", "the following arguments are required: COMMAND"),
        ("nope", "argument COMMAND: invalid choice: 'nope'"),
        ("audit extra", "unrecognized arguments: extra"),
        ("audit --rows --skew", "audit: argument --skew: not allowed with argument --rows"),
        ("stat", "stat: the following arguments are required: MEMCG"),
        ("stat / --node x", "stat: argument --node: invalid int value: 'x'"),
        ("drift --json --scripted", "drift: argument --scripted: not allowed with argument --json"),
        ("slabinfo --top 2 --top 3", "slabinfo: argument --top: given more than once"),
        ("stock --fields cpu --sort cpu --fields all", "stock: argument --fields: given more than"),
        ("overview --qemu a --qemu b", "overview: argument --qemu: given more than once"),
        ("--qemu a --qemu b overview", "argument --qemu: given more than once"),
        ("--qemu a overview --qemu b", "argument --qemu: given more than once"),
        ("schema nope", "schema: argument COMMAND: invalid choice: 'nope'"),
        ("completion ksh", "completion: argument shell: invalid choice: 'ksh'"),
    ],
)
def test_wrong_arguments(args: str, why: str) -> None:
    """The message is one line, as docs/json.md says, without the usage."""
    line = refused(*args.split())
    assert line.startswith(f"memcg-inspect: {why}")
    assert line.endswith(" --help shows the usage)")


def test_options_that_need_a_table() -> None:
    for words in (
        ["--sort", "name"],
        ["--scripted"],
        ["--csv"],
        ["--memcg", "/"],
        ["--fields", "all"],
    ):
        said = "need one of --diagnoses, --findings, --identities, --rows, --skew"
        assert said in refused("audit", *words)


def test_a_header_of_nothing() -> None:
    assert refused("stock", "--header") == "memcg-inspect: --header needs --scripted"
    assert "not allowed with" in refused("stock", "--csv", "--json")
    assert "not allowed with" in refused("stock", "--csv", "--scripted")
    assert "they list all" in refused("slabinfo", "--csv", "--top", "3")


def test_memcgs_below_none() -> None:
    for command in ("slabinfo", "audit", "stock"):
        assert refused(command, "--subtree") == "memcg-inspect: --subtree needs --memcg"


def test_what_is_added_up_before_and_after_the_command() -> None:
    words = [
        "-s",
        "a",
        "--core",
        "x",
        "overview",
        "-s",
        "b",
        "--memcg",
        "c",
        "--memcg",
        "d",
        "-s",
        "e",
    ]
    for _ in range(2):
        args = make_parser().parse_args(words)
        assert (args.symbols, args.core, args.memcg) == (["a", "b", "e"], ["x"], ["/c", "/d"])
        assert not any("given" in name for name in vars(args))


def test_no_such_file() -> None:
    assert "No such file" in refused("audit", "-c", "/no/such/vmcore")


def test_folder() -> None:
    assert "directory" in refused("audit", "-c", "/")


def test_not_a_vmcore(tmp_path: Path) -> None:
    for content in (b"", b"\x7fELF", b"KDUMP   " + bytes(5000), os.urandom(100_000)):
        (tmp_path / "file").write_bytes(content)
        assert str(tmp_path / "file") in refused("audit", "-c", tmp_path / "file")


def test_program_instead_of_vmcore() -> None:
    assert "core" in refused("audit", "-c", sys.executable)


def test_no_qemu_there() -> None:
    assert "No such file" in refused("audit", "--qemu", "/no/such/socket")


@pytest.mark.parametrize(
    ("content", "what", "do"),
    [
        (b"PK\x03\x04" + bytes(99), "is a zip archive", "unpack it first (unzip)"),
        (b"x.core".ljust(257, b"\0") + b"ustar", "is a tar archive", "unpack it first (tar -x)"),
        (b"", "is empty", "copy it again"),
        (b"KDUMP   ", "is truncated", "copy it again"),
        (b"KDUMP   " + bytes(300), "is truncated", "copy it again"),
        (b"a text\n", "is neither an ELF core nor a dump of makedumpfile", "vmcore"),
    ],
    ids=("zip", "tar", "empty", "short", "zeros", "text"),
)
def test_file_that_is_no_dump(tmp_path: Path, content: bytes, what: str, do: str) -> None:
    """The message says what the file is, and what to do, in no library's words."""
    (tmp_path / "file").write_bytes(content)
    line = refused("audit", "-c", tmp_path / "file")
    assert f"file {what}" in line
    assert do in line


@pytest.mark.image
def test_truncated_vmcore(lab: Lab, tmp_path: Path) -> None:
    image = lab.image("7.3", "1")
    whole = image.core.stat().st_size
    for size in (70, 4096, 100_000, 5_000_000):
        with image.core.open("rb") as file:
            (tmp_path / "short").write_bytes(file.read(size))
        for kind in ("auto", "btf"):
            line = refused("audit", "-c", tmp_path / "short", "--debuginfo", kind)
            assert "the file is truncated" in line
            if size >= 4096:  # its program headers are not truncated
                said = re.search(r"the file is truncated: it has ([\d,]+) bytes of ([\d,]+)", line)
                assert said is not None, line
                assert int(said[1].replace(",", "")) == size
                assert whole - 4096 <= int(said[2].replace(",", "")) <= whole


@pytest.mark.image
def test_vmlinux_of_another_kernel(lab: Lab) -> None:
    image, other = lab.image("7.3", "1"), lab.image("6.1", "1")
    line = refused("audit", "-c", image.core, "-s", other.vmlinux)
    assert "another kernel" in line
    assert "build ID" in line


@pytest.mark.image
def test_vmlinux_that_is_none(lab: Lab) -> None:
    image = lab.image("7.3", "1")
    assert "not an ELF file" in refused("audit", "-c", image.core, "-s", __file__)
    assert "No such file" in refused("audit", "-c", image.core, "-s", "/no/such/vmlinux")


@pytest.mark.image
def test_kernel_without_memcg(lab: Lab) -> None:
    image = lab.image("7.3", "1", "idle", append="cgroup_disable=memory")
    line = refused("audit", "-c", image.core)
    assert "memory controller is disabled" in line


@pytest.mark.image
@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("stock", "--memcg", "/no/such"), "no memcg /no/such; there are, for example: /, "),
        (("drift", "--memcg", "0x10"), "no memcg 0x10; there are"),
        (("dying", "--memcg", "/nope*"), "no memcg /nope*; there are"),
        (("slabinfo", "--node", "99"), "no node 99; there are: 0, 1, 2, 3"),
        (("percpu", "--sort", "size:up"), ":asc or :desc"),
        (("slabinfo", "--by", "memcg,site"), "'site' is not one of memcg, cache, node "),
        (("percpu", "--by", "cache"), "'cache' is not one of memcg, node, site "),
        (("percpu", "--by", ""), "'' is not one of memcg, node, site "),
        (("percpu", "--by", "site"), "without CONFIG_MEM_ALLOC_PROFILING"),
        (("percpu", "--by", "node", "--each"), "--each cannot be combined with --by"),
        (("slabinfo", "--by", "node", "--fields", "memcg"), "no field memcg; there are: node, "),
        (("slabinfo", "--top", "-1"), "'-1' is not a number of rows"),
        (("overview", "--top", "-1"), "'-1' is not a number of rows"),
        (("overview", "--node", "4"), "no node 4; there are: 0, 1, 2, 3"),
        (("overview", "--memcg", "/nope"), "no memcg /nope; there are, for example: /"),
        (("overview", "--by-node", "--sort", "current"), "no field current; there are: memcg, "),
        (("slabinfo", "--top", "five"), "'five' is not a number of rows"),
        (("slabinfo", "--top", "5", "--json"), "--top cannot be combined with --json"),
        (("percpu", "--top", "5", "--scripted"), "--top cannot be combined with --json, --sc"),
        (("tasks", "--fields", "pid,name"), "no field name; there are: pid, "),
        (("tasks", "--fields", ""), "--fields takes names of fields"),
        (("tasks", "--fields", " ,"), "--fields takes names of fields"),
        (("tasks", "--sort", ""), "no field ''; there are: pid, "),
        (("tasks", "--memcg", ""), "no memcg ''; there are, for example: /, "),
        (("dying", "--files", "-1"), "--files -1: the number of files must not be negative"),
        (("drift", "--memcg", "/files/wbe"), "for example: /files/web, "),
        (("stat", "files/dbs/"), "no memcg /files/dbs; there are, for example: /files/db, "),
        (("who", "-1"), "-1 is not an address"),
        (("who", "ff", "10000000000000000"), "10000000000000000 is not an address"),
    ],
)
def test_what_is_not_there_is_refused(lab: Lab, args: tuple[str, ...], why: str) -> None:
    assert why in refused(*args, "-c", lab.image("7.3", "4").core)


@pytest.mark.image
def test_tables_of_the_audit(lab: Lab) -> None:
    """The same values are in the document."""
    image = lab.image("7.3", "4")
    whole = audit_of(image.core)
    paths = {memcg["address"]: memcg["path"] for memcg in whole["memcgs"]}

    def table(name: str, fields: str, *words: str) -> list[list[str]]:
        done = run("audit", f"--{name}", "--scripted", "--fields", fields, *words,
                   "-c", image.core)  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        return [line.split("\t") for line in done.stdout.splitlines()]

    assert table("identities", "name,status,rows") == [
        [made["name"], made["status"], str(made["rows"])] for made in whole["identities"]
    ]
    rows = [row for row in whole["rows"] if row["nid"] == 2 and row["memcg"] is not None
            and paths[row["memcg"]].startswith("/files/")]  # fmt: skip
    assert len(rows) > 4
    wanted = ("--node", "2", "--memcg", "/files/*", "--sort", "item:asc")
    assert sorted(table("rows", "identity,item,found,difference", *wanted)) == sorted(
        [r["identity"], r["item"], str(sum(r["found"].values())), "0"] for r in rows
    )
    assert sum(int(size) for (size,) in table("skew", "bytes")) == sum(
        cell["bytes"] for cell in whole["skew"]
    )
    assert "no field nope; there are: identity, memcg, " in refused(
        "audit", "--rows", "--fields", "nope", "-c", image.core
    )
    assert "no memcg /nope; there are" in refused(
        "audit", "--skew", "--memcg", "/nope", "-c", image.core
    )


@pytest.mark.image
def test_a_table_of_the_report_as_json(lab: Lab) -> None:
    """Its document is that of a view, with the table alone and all its fields."""
    core = lab.image("7.3", "4").core
    whole = audit_of(core)
    for name in ("identities", "rows", "skew"):
        document = json.loads(run("audit", f"--{name}", "--json", "-c", core).stdout)
        assert (document["schema"], document["command"]) == (1, "audit")
        [table] = document["tables"]
        assert (table["name"], len(table["rows"])) == (name, len(whole[name]))
    chosen = ("--rows", "--node", "2", "--fields", "identity,reason", "--json")
    [table] = json.loads(run("audit", *chosen, "-c", core).stdout)["tables"]
    assert len(table["rows"]) == sum(row["nid"] == 2 for row in whole["rows"])
    assert all(row.keys() == {"identity", "reason"} for row in table["rows"])


@pytest.mark.image
def test_all_rows_as_json(lab: Lab) -> None:
    core = lab.image("7.3", "4").core
    some = audit_of(core)
    everything = checked(json.loads(run("audit", "--all", "--json", "-c", core).stdout))
    assert len(everything["rows"]) == sum(found["rows"] for found in everything["identities"])
    assert [r for r in everything["rows"] if any(r["found"].values())] == [
        r for r in some["rows"] if any(r["found"].values())
    ]
    assert len(everything["rows"]) > len(some["rows"])


@pytest.mark.image
def test_known_fields_are_named_once(lab: Lab) -> None:
    line = refused("slabinfo", "--fields", "nope", "-c", lab.image("7.3", "4").core)
    names = line.partition("there are: ")[2].split(", ")
    assert {"node", "slab_bytes"} <= set(names)
    assert len(names) == len(set(names))


@pytest.mark.image
def test_paths_as_people_write_them(lab: Lab) -> None:
    core = lab.image("7.3", "4").core
    slabinfo = ("slabinfo", "--scripted", "--fields", "memcg,bytes", "-c", core, "--memcg")
    stat = ("stat", "--scripted", "-c", core)
    for command, pattern in ((slabinfo, "*web"), (stat, None)):
        plain = run(*command, "/files/web").stdout
        assert plain
        for path in ("/files/web/", "files/web", "files//web//", pattern or "/files/web"):
            assert run(*command, path).stdout == plain


@pytest.mark.image
def test_comma_behind_the_last_field(lab: Lab) -> None:
    core = lab.image("7.3", "4").core
    lines = run("tasks", "--fields", "pid,memcg,", "--scripted", "-c", core).stdout.splitlines()
    assert len(lines) > 10
    assert {line.count("\t") for line in lines} == {1}


@pytest.mark.image
def test_addresses_of_nothing_leave_the_others_their_answers(lab: Lab) -> None:
    """``who`` gets the address of a memcg between two unknown addresses."""
    core = lab.image("7.3", "4").core
    memcg = next(m["address"] for m in audit_of(core)["memcgs"] if m["path"] == "/files/web")
    done = run("who", "0x10", memcg, "0x20", "--json", "-c", core)
    assert (done.returncode, done.stderr) == (3, "")
    found = json.loads(done.stdout)
    assert [bool(table["rows"]) for table in found["tables"]] == [False, True, False]
    assert found["whole"] is False
    assert found["notes"] == ["Unknown addresses: 0x10, 0x20."]
    done = run("who", "0x10", memcg, "-c", core)
    assert done.returncode == 3
    assert "0x10: unknown address" in done.stdout
    assert "/files/web, in use" in done.stdout
    assert "unknown addresses: 0x10, 0x20" in refused("who", "0x10", "0x20", "-c", core)


def audit_of(core: Path) -> dict[str, Any]:
    return checked(json.loads(run("audit", "-c", core, "--json").stdout))


@pytest.mark.image
def test_memcgs_without_rows_are_no_mistake(lab: Lab) -> None:
    done = run("dying", "--memcg", "/files/web", "-c", lab.image("7.3", "4").core)
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing of memcg /files/web" in done.stdout


@pytest.mark.image
def test_json_is_one_document_by_the_contract(lab: Lab) -> None:
    image = lab.image("7.3", "4")
    done = run("audit", "-c", image.core, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    document = checked(json.loads(done.stdout))
    assert document["schema"] == 1
    assert document["verdict"] == "exact"
    assert document["image"]["source"] == "vmcore"
    assert document["image"]["nodes"] == [0, 1, 2, 3]
    assert document["image"]["cpus"] == 4
    assert document["image"]["accounting"] == "objcg-per-node"
    memcgs = {memcg["address"]: memcg for memcg in document["memcgs"]}
    assert all(address.startswith("0xff") for address in memcgs)
    assert [m["path"] for m in memcgs.values() if m["parent"] is None] == ["/"]
    assert {m["state"] for m in memcgs.values()} == {"online", "dying"}
    assert all(m["parent"] in memcgs for m in memcgs.values() if m["parent"] is not None)
    for row in document["rows"]:
        of_nodes = row["identity"].startswith(("node_", "zone_"))
        # Nodes, zones, slabs, cached stacks and CPUs have rows without a memcg.
        of_machine = row["identity"] in ("placement", "cached_stacks", "active_memcg")
        assert row["memcg"] in memcgs or (row["memcg"] is None and (of_nodes or of_machine))
        assert row["difference"] == sum(row["claimed"].values()) - sum(row["found"].values()) == 0
        if row["identity"] == "slab":
            assert {"folded", "pending_cpu", "stock"} <= set(row["claimed"])
    for cell in document["skew"]:
        assert cell["bytes"] > 0 <= cell["count"]
        assert cell["backing_nid"] in (0, 1, 2, 3)
    assert document["findings"] == []
    assert all(c["unreadable"] == 0 < c["read"] for c in document["coverage"].values() if c["read"])


@pytest.mark.image
def test_cgroup_ids_and_paths_are_the_guests(lab: Lab) -> None:
    image = lab.image("7.3", "4")
    document = json.loads(run("audit", "-c", image.core, "--json").stdout)
    folders = {
        "/" + str(file.parent.relative_to(image.guest / "2/cgroup")).removeprefix(".")
        for file in (image.guest / "2/cgroup").rglob("memory.stat")
    }
    online = {m["path"] for m in document["memcgs"] if m["state"] == "online"}
    assert online == folders


@pytest.mark.image
def test_text_says_the_verdict_first(lab: Lab) -> None:
    image = lab.image("7.3", "4")
    done = run("audit", "-c", image.core)
    assert done.returncode == 0
    assert done.stdout.startswith("EXACT")
    assert "\x1b" not in done.stdout  # no colours in a pipe
    assert len(done.stdout.splitlines()) < 10
    for option, shown in (("--all", "/files/web"), ("--findings", done.stdout.splitlines()[0])):
        more = run("audit", option, "-c", image.core)
        assert more.returncode == 0
        assert shown in more.stdout


@pytest.mark.image
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_closed_pipe_is_no_fault(lab: Lab, more: tuple[str, ...]) -> None:
    command = [*CLI, "audit", "-c", str(lab.image("7.3", "4").core), "--all", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.image
@pytest.mark.parametrize("args", [("audit",), ("audit", "--json"), ("tasks",), ("who", "0x10")])
def test_output_that_cannot_be_written(lab: Lab, args: tuple[str, ...]) -> None:
    core = lab.image("7.3", "4").core
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*CLI, *args, "-c", str(core)], stdout=full, stderr=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
    expected = "memcg-inspect: output cannot be written: No space left on device\n"
    if args[0] == "who":  # refused before there is anything to write
        expected = "memcg-inspect: unknown address: 0x10\n"
    assert (done.returncode, done.stderr) == (2, expected)
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *CLI, *args, "-c", str(core)]
    done = subprocess.run(closed, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "memcg-inspect: output cannot be written: standard output is closed\n"


@pytest.mark.image
def test_choice_of_debug_info(lab: Lab, tmp_path: Path) -> None:
    image = lab.image("7.3", "4")
    nowhere = ("audit", "-c", image.core, "--no-default-symbols")
    for args, used in (
        ((), "BTF of the image"),
        (("--debuginfo", "btf"), "BTF of the image"),
        (("-s", image.vmlinux), f"DWARF: {image.vmlinux}"),
        (("-s", image.vmlinux, "--debuginfo", "dwarf"), f"DWARF: {image.vmlinux}"),
    ):
        done = run(*nowhere, *args)
        assert done.returncode == 0, done.stderr
        assert f"Types and symbols: {used}" in done.stdout.splitlines()
    assert "no debug info" in refused(*nowhere, "--debuginfo", "dwarf")
    assert "exclude each other" in refused(*nowhere, "--debuginfo", "btf", "-s", image.vmlinux)


def document(*args: object) -> dict[str, Any]:
    """The JSON document of an audit, without what differs from run to run."""
    done = run("audit", *args, "--json")
    assert done.returncode in (0, 1, 3), done.stderr
    made = checked(json.loads(done.stdout))
    del made["timings"]
    return made


#: Format and level of an image.
FORMATS = [("elf", 0), ("kdump", 23)]


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("format", "level"), FORMATS)
def test_btf_and_dwarf_say_the_same(lab: Lab, kernel: str, format: str, level: int) -> None:
    image = lab.image(kernel, "4", "mixed", format=format, level=level)
    btf = document("-c", image.core, "--debuginfo", "btf")
    dwarf = document("-c", image.core, "-s", image.vmlinux)
    assert btf["image"].pop("debug_info") == "BTF of the image"
    assert dwarf["image"].pop("debug_info") == f"DWARF: {image.vmlinux}"
    assert len(btf["rows"]) > 100
    assert btf == dwarf
