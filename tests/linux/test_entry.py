# SPDX-License-Identifier: LGPL-2.1-or-later
"""Functions in which the stacks of the kernel begin and end, on each architecture."""

from __future__ import annotations

import pytest
from drgn import Architecture, Platform, Program

from memcg_inspect.linux.arch.entry import has_exact_pc, is_idle, is_outermost

X86, ARM64 = Program(Platform(Architecture.X86_64)), Program(Platform(Architecture.AARCH64))


def test_a_panic_does_not_save_the_program_counter_of_its_stack_pointer() -> None:
    assert not has_exact_pc("__crash_kexec")
    assert has_exact_pc("crash_kexec")
    assert has_exact_pc("native_halt")


@pytest.mark.parametrize(
    "innermost",
    [
        "default_idle",
        "native_safe_halt",
        "pv_native_safe_halt",
        "mwait_idle_with_hints",
        "acpi_safe_halt",
        "cpu_do_idle",
        "psw_idle",
        "check_and_cede_processor_cede_loop",
    ],
)
def test_idle_cpus_wait_in_the_innermost_function(innermost: str) -> None:
    assert is_idle([innermost, "do_idle"])
    assert not is_idle(["schedule", innermost])
    # By a call of the hypervisor of powerpc.
    assert is_idle(["plpar_hcall_norets_notrace", innermost])
    assert not is_idle(["plpar_hcall_norets", "schedule", innermost])


def test_stacks_that_are_not_idle() -> None:
    assert not is_idle([])
    assert not is_idle(["plpar_hcall_norets"])
    assert not is_idle(["__schedule", "schedule"])
    assert not is_idle(["my_plpar_hcall_norets", "do_idle"])


@pytest.mark.parametrize(
    "function",
    [
        "entry_SYSCALL_64_after_hwframe",
        "ret_from_fork_asm",
        "secondary_startup_64_no_verify",
        "common_startup_64",
        "start_secondary",
        "cpu_startup_entry",
        "el0t_64_sync",
        "el0_svc",
        "system_call",
        "restart_int_handler",
        "start_here_common",
    ],
)
def test_what_no_function_of_the_kernel_called(function: str) -> None:
    assert is_outermost(X86, function, 0)
    assert is_outermost(ARM64, function, 0)
    assert not is_outermost(X86, f"x_{function}", 0)


def test_the_kernel_is_interrupted_as_well_as_user_space() -> None:
    user, kernel = 0x7F0012345678, 0xFFFFFFFF81234567
    assert is_outermost(X86, "asm_exc_page_fault", user)
    assert is_outermost(X86, "asm_exc_page_fault", 1)
    assert not is_outermost(X86, "asm_exc_page_fault", kernel)
    assert not is_outermost(X86, "asm_exc_page_fault", 0)
    assert not is_outermost(X86, "exc_page_fault", user)
    assert not is_outermost(ARM64, "el1h_64_irq", kernel)
