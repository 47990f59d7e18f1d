# SPDX-License-Identifier: LGPL-2.1-or-later
"""What the lab knows of architectures."""

import pytest
from labkit import kernels
from labkit.arch import ARCHES, arch
from labkit.errors import LabError
from labkit.run import PACKAGES

X86 = "RIP=ffffffff81000010 RFL=00000246 CPL=0 II=0 A20=1 SMM=0 HLT={}\n"
ARM = " PC={:016x} X00=0000000000000000 X01=0000000000000001\n"
#: A CPU with enabled wait, and one that runs.
S390 = ("0706c00180000000", "0704c00180000000")
IDLE = [range(0xFFFF800080010000, 0xFFFF800080010020)]


@pytest.mark.parametrize(("states", "idle"), [("11", True), ("10", False), ("", False)])
def test_idle_cpus_that_tell_whether_they_are_halted(states: str, idle: bool) -> None:
    text = "".join(f"\nCPU#{n}\n" + X86.format(state) for n, state in enumerate(states))
    assert arch("amd64").halted(text, []) == idle


@pytest.mark.parametrize(
    ("counters", "idle"),
    [
        ([IDLE[0].start + 8, IDLE[0].stop - 4], True),
        ([IDLE[0].start, IDLE[0].stop], False),
        ([], False),
    ],
)
def test_idle_cpus_by_their_program_counters(counters: list[int], idle: bool) -> None:
    text = "".join(f"\nCPU#{n}\n" + ARM.format(pc) for n, pc in enumerate(counters))
    assert arch("arm64").halted(text, IDLE) == idle
    assert arch("arm64").counters(text) == counters


def test_idle_cpus_of_s390() -> None:
    line = "\nCPU#{}\nPSW=mask {} addr 00000000001cbe52 cc 00\n"
    waits, runs = S390
    for states, idle in (((waits, waits), True), ((waits, runs), False), ((), False)):
        text = "".join(line.format(n, state) for n, state in enumerate(states))
        assert arch("s390x").halted(text, []) == idle
        assert arch("s390x").counters(text) == [0x1CBE52] * len(states)


def test_program_counters_of_ppc64el() -> None:
    text = "NIP c00000000010fe8c   LR c00000000115c0b8 CTR c00000000115c090 XER 0000000020040000\n"
    assert arch("ppc64el").counters(text) == [0xC00000000010FE8C]


def test_every_kernel_has_an_architecture() -> None:
    of_kernels = {kernels.kernel_arch(name).name for name in kernels.RECIPES}
    assert of_kernels == set(ARCHES)
    assert kernels.kernel_arch("7.3/arm64-16k") is arch("arm64")
    assert kernels.kernel_arch("7.3") is arch("amd64")


@pytest.mark.parametrize("name", ARCHES)
def test_what_is_missing_can_be_installed(name: str) -> None:
    assert set(arch(name).tools) <= set(PACKAGES)


def test_an_architecture_that_nobody_added() -> None:
    with pytest.raises(LabError, match="no architecture 'alpha'; there are: amd64, arm64, "):
        arch("alpha")
