# SPDX-License-Identifier: LGPL-2.1-or-later
"""How an image is described."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from drgn import FaultError, ProgramFlags
from support.made_memory import MadeMemory

from memcg_inspect.collect import image_info as module
from memcg_inspect.collect.image_info import image_info
from memcg_inspect.image.image import Image
from memcg_inspect.model import ImageInfo

NONE = ProgramFlags(0)


def text(value: bytes) -> Any:
    return SimpleNamespace(string_=lambda: value)


class Described(Image):
    """An image with nothing but names."""

    def __init__(self, host: bytes | None = b"one", flags: ProgramFlags = NONE) -> None:
        super().__init__(MadeMemory().prog)
        self.host = host
        self.prog: Any = SimpleNamespace(flags=flags)

    def object(self, name: str, filename: str | None = None) -> Any:
        if name == "UTS_RELEASE":
            return text(b"6.1.0\xff")
        assert name == "init_uts_ns"
        if self.host is None:
            raise FaultError("not in the image", 0x1230)
        return SimpleNamespace(name=SimpleNamespace(nodename=text(self.host)))


@pytest.fixture(autouse=True)
def readers(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {
        "accounting": "memcg",
        "mem_map": SimpleNamespace(page_size=4096),
        "online_nodes": (0, 2),
        "possible_cpus": (0, 1, 5),
        "debug_info_source": "BTF of the image",
    }
    for name, value in found.items():
        monkeypatch.setattr(module, name, lambda _, value=value: value)


def test_a_vmcore() -> None:
    """Bytes that are not UTF-8 are escaped."""
    assert image_info(Described(b"one\xfe")) == ImageInfo(
        release="6.1.0\\xff",
        source="vmcore",
        nodes=(0, 2),
        cpus=3,
        page_size=4096,
        accounting="memcg",
        debug_info="BTF of the image",
        host="one\\xfe",
    )


@pytest.mark.parametrize(
    ("flags", "source"),
    [
        (ProgramFlags.IS_LINUX_KERNEL, "vmcore"),
        (ProgramFlags.IS_LOCAL, "vmcore"),
        (ProgramFlags.IS_LIVE, "qemu"),
        (ProgramFlags.IS_LIVE | ProgramFlags.IS_LOCAL, "live"),
    ],
)
def test_a_running_kernel_is_this_machine_or_a_guest(flags: ProgramFlags, source: str) -> None:
    assert image_info(Described(flags=flags)).source == source


def test_the_name_of_the_machine_may_be_missing() -> None:
    assert image_info(Described(None)).host == ""
