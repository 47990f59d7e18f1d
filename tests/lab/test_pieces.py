# SPDX-License-Identifier: LGPL-2.1-or-later
"""Parts of the lab that need no guest."""

import io
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from labkit import (
    build,
    elf,
    guest,
    images,
    kdump,
    kernels,
    kmodules,
    progress,
    run,
    store,
    topology,
)
from labkit.cpio import Cpio
from labkit.errors import GuestError, LabError, StaleCodeError
from support.guests import ROOT

MIB = 1 << 20


# topologies


@pytest.mark.parametrize(
    ("spec", "cpus", "by_node"),
    [
        ("1", None, [2]),
        ("2", None, [1, 1]),
        ("4", None, [1, 1, 1, 1]),
        ("2cpu+6mem", None, [1, 1, 0, 0, 0, 0, 0, 0]),
        ("2cpu", 4, [2, 2]),
        ("2", 3, [2, 1]),
    ],
)
def test_cpus_are_spread_over_nodes(spec: str, cpus: int | None, by_node: list[int]) -> None:
    found = topology.parse(spec, cpus)
    assert [len(cpus) for cpus, _ in found.nodes] == by_node
    numbers = [cpu for cpus, _ in found.nodes for cpu in cpus]
    assert numbers == list(range(found.cpus))


def test_no_node_splits_a_package() -> None:
    args = topology.parse("2", 4).qemu_args()
    assert "4,sockets=2,cores=2,threads=1" in args
    assert "3,sockets=3,cores=1,threads=1" in topology.parse("2", 3).qemu_args()


def test_memory_only_nodes_have_no_cpus_and_all_memory_is_given_out() -> None:
    args = topology.parse("2cpu+6mem").qemu_args()
    numa = [args[i + 1] for i, word in enumerate(args) if word == "-numa"]
    assert [("cpus=" in one) for one in numa] == [True, True] + [False] * 6
    backends = [args[i + 1] for i, word in enumerate(args) if word == "-object"]
    total = sum(int(one.split("size=")[1][:-1]) for one in backends)
    assert args[args.index("-m") + 1] == f"{total}M"


@pytest.mark.parametrize("spec", ["0", "", "x", "2cpu6mem", "2mem", "-1", "4cpu+"])
def test_bad_topologies(spec: str) -> None:
    with pytest.raises(LabError, match="not a topology"):
        topology.parse(spec)


def test_the_memory_of_a_node_is_a_multiple_of_a_unit() -> None:
    unit = 256 * MIB
    assert {size for _, size in topology.parse("2cpu+6mem", unit=unit).nodes} == {unit}
    assert {size for _, size in topology.parse("3", memory=1024 * MIB, unit=unit).nodes} == {unit}
    with pytest.raises(LabError, match="less than 256M"):
        topology.parse("8", 8, 1024 * MIB, unit)


def test_too_few_cpus_and_too_little_memory() -> None:
    with pytest.raises(LabError, match="at least 4 CPUs"):
        topology.parse("4", 2)
    with pytest.raises(LabError, match="128M"):
        topology.parse("4", memory=256 * MIB)
    with pytest.raises(LabError, match="memory size"):
        topology.parse_size("2T")
    assert topology.parse_size("2g") == 2048 * MIB


# the store


def test_a_stamp_tells_of_every_change(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_text("content")
    assert store.read_stamp(tmp_path) is None
    store.write_stamp(tmp_path, {"a": 1})
    assert store.read_stamp(tmp_path) == {"a": 1}
    (tmp_path / "sub" / "file").write_text("CONTENT")
    assert store.read_stamp(tmp_path) is None
    (tmp_path / "sub" / "file").unlink()
    assert store.read_stamp(tmp_path) is None
    (tmp_path / store.STAMP).write_text("{")
    assert store.read_stamp(tmp_path) is None


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    with store.fresh_folder(target) as made:
        (made / "one").write_text("1")
    with pytest.raises(RuntimeError), store.fresh_folder(target) as made:
        (made / "two").write_text("2")
        raise RuntimeError
    assert [path.name for path in target.iterdir()] == ["one"]
    with store.fresh_folder(target) as made:
        (made / "two").write_text("2")
    assert [path.name for path in target.iterdir()] == ["two"]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_lock_keeps_others_out(own_cache: Path) -> None:
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from labkit.store import locked\nwith locked('x'): print('in', flush=True)"
    )
    with store.locked("x"):
        other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        time.sleep(0.5)
        assert other.poll() is None
    assert other.communicate(timeout=20)[0] == b"in\n"


# files for the guest


def test_cpio_is_what_busybox_unpacks(tmp_path: Path) -> None:
    run.need("busybox")
    archive = Cpio()
    archive.file("a/b/c", b"x" * 5, 0o755)
    archive.file("a/d", b"")
    archive.link("a/link", "b/c")
    archive.folder("a/b")
    data = archive.finish()
    command = [run.tool("busybox"), "cpio", "-id"]
    subprocess.run(command, input=data, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "a/b/c").read_bytes() == b"xxxxx"
    assert (tmp_path / "a/b/c").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "a/link").read_bytes() == b"xxxxx"


def test_a_modules_dependencies() -> None:
    assert kmodules.depends(b"\x7fELF..\0license=GPL\0depends=virtio-ring,virtio\0name=x\0") == [
        "virtio_ring",
        "virtio",
    ]
    assert kmodules.depends(b"\0depends=\0") == []
    assert kmodules.plain_name("kernel/drivers/virtio/virtio-pci.ko.xz") == "virtio_pci"


def test_missing_tools_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "find", lambda tool: None)
    with pytest.raises(LabError) as error:
        run.need("qemu-system-x86_64", "gcc", "/usr/include/gelf.h")
    assert "apt-get install -y gcc libelf-dev qemu-system-x86" in str(error.value)


def test_a_failed_program_shows_its_last_lines() -> None:
    with pytest.raises(LabError, match=r"(?s)a test: sh failed with status 3.*oh no"):
        run.run(["sh", "-c", "echo oh no >&2; exit 3"], what="a test")


def test_lines_of_the_config_that_were_refused() -> None:
    wanted = "# c\nCONFIG_A=y\nCONFIG_B=n\nCONFIG_C=n\nCONFIG_D=4\nCONFIG_E=y\n"
    got = "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_D=5\n"
    assert build.check_config(wanted, got) == ["CONFIG_D=4", "CONFIG_E=y"]
    assert build.check_config(wanted, got, frozenset({"CONFIG_D"})) == ["CONFIG_E=y"]
    # A later fragment changes what an earlier one says.
    assert build.check_config(wanted + "CONFIG_D=5\n", got) == ["CONFIG_E=y"]


# formats


def _qemu_like_image(path: Path) -> None:
    """Write section headers, then program headers, as QEMU 7.2 does (dump/dump.c)."""
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    # QEMU writes 8 into e_ehsize.
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", ident, 4, 62, 1, 0, 64 + 128, 64, 0, 8, 56, 2, 64, 2, 1
    )
    strtab = struct.pack("<IIQQQQIIQQ", 1, 3, 0, 0, 328, 11, 0, 0, 0, 0)
    sections = bytes(64) + strtab
    note = struct.pack("<IIQQQQQQ", 4, 0, 304, 0, 0, 8, 8, 0)
    load = struct.pack("<IIQQQQQQ", 1, 0, 312, 0, 0x1000, 16, 16, 0)
    strings = b"\0.shstrtab\0"
    path.write_bytes(header + sections + note + load + b"N" * 8 + bytes(range(16)) + strings)


def test_physical_addresses_in_an_image(tmp_path: Path) -> None:
    path = tmp_path / "image"
    _qemu_like_image(path)
    table = elf.segments(path)
    assert elf.file_offset(table, 0x1004, 8) == 316
    for outside in (0xFFF, 0x1010, 0x100C):
        with pytest.raises(LabError, match="does not hold"):
            elf.file_offset(table, outside, 8)


def test_program_headers_move_to_the_front(tmp_path: Path) -> None:
    path = tmp_path / "image"
    _qemu_like_image(path)
    before, table = path.read_bytes(), elf.segments(path)
    elf.program_headers_first(path)
    after = path.read_bytes()
    assert struct.unpack_from("<QQ", after, 32) == (64, 64 + 112)
    assert struct.unpack_from("<H", after, 52) == (64,)
    assert after[64:176] == before[192:304] and after[176:304] == before[64:192]
    assert elf.segments(path) == table
    assert after[304:] == before[304:]
    elf.program_headers_first(path)
    assert path.read_bytes() == after


def _made_image(own_cache: Path, age: int) -> Path:
    """Make an image of 64 KiB that was used a while ago."""
    folder = own_cache / "images" / f"image-{age}"
    folder.mkdir(parents=True)
    (folder / "vmcore").write_bytes(b"x" * 65536)
    store.write_stamp(folder, {})
    os.utime(folder, (1000 - age, 1000 - age))
    return folder


def _there(folders: list[Path]) -> list[bool]:
    return [folder.exists() for folder in folders]


def test_images_used_longest_ago_go_first(own_cache: Path) -> None:
    folders = [_made_image(own_cache, age) for age in range(4)]
    images.trim(most=2 * 65536 + 20000)
    assert _there(folders) == [True, True, False, False]


def test_images_that_are_held_stay(own_cache: Path) -> None:
    """A test still has the path of an image when another process makes more of them."""
    folders = [_made_image(own_cache, age) for age in range(4)]
    assert images.hold(folders[3])
    assert images.hold(folders[3])
    with images.scratch() as scratch:
        (scratch / "vmcore").write_bytes(b"x" * 65536)
        os.utime(scratch, (1, 1))
        code = f"from labkit import images; images.trim(most={3 * 65536 + 30000})"
        path = {"PYTHONPATH": str(ROOT / "scripts"), "MEMCG_INSPECT_CACHE": str(own_cache)}
        subprocess.run([sys.executable, "-c", code], env=os.environ | path, check=True)
        assert _there([*folders, scratch]) == [True, False, False, True, True]
    assert not scratch.exists()


def test_the_last_images_that_were_asked_for_are_held(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "_MOST_HELD", 2)
    folders = [_made_image(own_cache, age) for age in range(3)]
    for folder in (*folders, folders[1]):
        assert images.hold(folder)
    images.trim(most=0)
    assert _there(folders) == [False, True, True]


def test_an_image_that_is_not_complete_is_not_held(own_cache: Path) -> None:
    folder = _made_image(own_cache, 0)
    assert not images.hold(folder.with_name("other"))
    (folder / "vmcore").write_bytes(b"x")
    assert not images.hold(folder)
    images.trim(most=0)
    assert not folder.exists()


def test_not_an_elf_image(tmp_path: Path) -> None:
    for start in (b"KDUMP   ", b"\x7fELF\x01\x01\x01", b""):
        (tmp_path / "x").write_bytes(start.ljust(64, b"\0"))
        with pytest.raises(LabError, match="not a 64-bit ELF"):
            elf.segments(tmp_path / "x")


@pytest.mark.parametrize("piece", [1, 7, 4096, 1 << 20])
def test_a_flattened_stream_is_put_in_place(piece: int) -> None:
    stream = b"makedumpfile".ljust(4096, b"\0")
    for offset, data in ((4, b"efgh"), (0, b"abcd"), (10, b"z")):
        stream += struct.pack(">qq", offset, len(data)) + data
    stream += struct.pack(">qq", -1, -1)
    file = io.BytesIO()
    sink = kdump.Flattened(file)
    for at in range(0, len(stream), piece):
        sink.feed(stream[at : at + piece])
    sink.finish()
    assert file.getvalue() == b"abcdefgh\0\0z"


def test_a_flattened_stream_that_ends_early() -> None:
    sink = kdump.Flattened(io.BytesIO())
    sink.feed(b"makedumpfile".ljust(4096, b"\0"))
    with pytest.raises(LabError, match="ended early"):
        sink.finish()


def test_a_plain_stream_keeps_zeros_as_holes(tmp_path: Path) -> None:
    data = b"a" * 70000 + bytes(1 << 20) + b"b" * 100 + bytes(1 << 18)
    with open(tmp_path / "x", "wb") as file:
        sink = kdump.Plain(file)
        for at in range(0, len(data), 33333):
            sink.feed(data[at : at + 33333])
        sink.finish()
    assert (tmp_path / "x").read_bytes() == data


# what people see


def test_progress_is_silent_when_it_is_quick(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.Progress("something"):
        pass
    assert capsys.readouterr().err == ""


def test_progress_tells_in_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_FIRST_AFTER", 0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 7.0))
    with progress.Progress("something") as shown:
        while not shown._shown:  # a busy machine may start the thread late
            time.sleep(0.01)
    said = capsys.readouterr().err.splitlines()
    assert said == ["lab: something (0s)", "lab: something: done (0s)"]


def test_the_console_is_shown_from_the_first_sign_of_trouble() -> None:
    text = "\n".join(["boot"] * 50 + ["BUG: kernel NULL pointer"] + ["after"] * 100)
    shown = guest.console_tail(text).splitlines()
    assert shown[5].strip() == "BUG: kernel NULL pointer"
    assert len(guest.console_tail("\n".join(["x"] * 100)).splitlines()) == 30


class Console:
    """What QEMU shows of a guest, and that is all."""

    def __init__(self, text: str) -> None:
        self.ports = dict[str, object]()
        self._text = text

    def console(self) -> str:
        return self._text


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("Oops: int3: 0000 [#1] SMP NOPTI", StaleCodeError),
        ("int3: 0000 [#1] PREEMPT SMP NOPTI", StaleCodeError),
        ("Oops: Oops: 0002 [#1] SMP NOPTI", GuestError),
        ("Kernel panic - not syncing: Fatal exception", GuestError),
    ],
)
def test_what_is_the_fault_of_qemu(line: str, error: type[GuestError]) -> None:
    made = guest.Guest.__new__(guest.Guest)
    made.qemu = Console(f"[    4.3] {line}\n")  # type: ignore[assignment]
    assert type(made.fail("boot")) is error


@pytest.mark.parametrize(
    ("errors", "left"),
    [
        ([StaleCodeError("1")], None),
        ([StaleCodeError("1"), StaleCodeError("2")], "2"),
        ([GuestError("1")], "1"),
    ],
)
def test_an_image_is_made_again_if_qemu_ran_stale_code(
    tmp_path: Path, errors: list[GuestError], left: str | None
) -> None:
    def make(out: Path) -> None:
        if errors:
            raise errors.pop(0)
        out.write_text("image")

    kernel = kernels.Kernel("7.3", tmp_path, {})
    try:
        images.write(make, tmp_path / "made", kernel)
    except GuestError as error:
        assert str(error) == left
        assert not (tmp_path / "made").exists()
    else:
        assert left is None
        assert (tmp_path / "made" / images.NAME).read_text() == "image"
