"""Filters of system calls, run here as the kernel runs them."""

from __future__ import annotations

import errno
import stat
import struct

import pytest

from core.system.seccomp import (
    ARCHITECTURES,
    BREAKOUTS,
    CLONE,
    CLONE3,
    NAMESPACES,
    SyscallRule,
    filter_program,
)

ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
RULES = (*BREAKOUTS, *NAMESPACES)


def judged(
    machine: str,
    number: int,
    *arguments: int,
    architecture: int | None = None,
    rules: tuple[SyscallRule, ...] = RULES,
) -> int:
    """What the program returns for a call."""
    arch = ARCHITECTURES[machine] if architecture is None else architecture
    data = struct.pack("IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    lines = list(filter_program(rules, machine))
    value, at = 0, 0
    while True:
        code, if_true, if_false, operand = lines[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("I", data, operand)
        elif code == 0x54:
            value &= operand
        elif code == 0x06:
            return operand
        else:
            true = {0x15: value == operand, 0x35: value >= operand}[code]
            at += if_true if true else if_false


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_forbidden_calls_are_denied_and_all_others_allowed(machine: str, column: int) -> None:
    always = [rule.numbers[column] for rule in BREAKOUTS if rule.where is None]
    forbidden = {number for number in always if number is not None}
    assert len(forbidden) == len(always) - always.count(None)
    for number in range(500):
        expected = EPERM if number in forbidden else ENOSYS if number == CLONE3[column] else ALLOW
        assert judged(machine, number) == expected, number


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_processes_and_threads_are_allowed_and_namespaces_denied(machine: str, column: int) -> None:
    clone = CLONE[column]
    thread = 0x3D0F00
    for flags in (17, thread, 0x01200011):
        assert judged(machine, clone, flags) == ALLOW
    for namespace in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert judged(machine, clone, namespace | 17) == EPERM
        assert judged(machine, clone, namespace | thread) == EPERM


@pytest.mark.parametrize(
    ("machine", "number", "before"), [("x86_64", 133, (7,)), ("x86_64", 259, (3, 7)), ("aarch64", 33, (3, 7))]
)
def test_device_files_are_denied_and_fifos_sockets_and_files_allowed(
    machine: str, number: int, before: tuple[int, ...]
) -> None:
    device = 0x103
    for kind in (stat.S_IFCHR, stat.S_IFBLK):
        for mode in (kind, kind | 0o666, kind | 1 << 20):
            assert judged(machine, number, *before, mode, device) == EPERM
    for kind in (0, stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK):
        assert judged(machine, number, *before, kind | 0o666, device) == ALLOW


def test_calls_of_another_architecture_are_denied() -> None:
    i386 = 0x40000003
    assert judged("x86_64", 1, architecture=i386) == EPERM
    assert judged("x86_64", 0x40000000 + 1) == ENOSYS


def test_a_call_is_denied_by_an_argument_and_later_rules_still_apply() -> None:
    rules = (
        SyscallRule("others", (302, None), where=(0, 0xFFFFFFFF, 0), unless=True),
        SyscallRule("flag", (302, None), where=(1, 0b110, 0b100)),
        SyscallRule("last", (7, None)),
    )
    cases = [
        ((302, 0, 0), ALLOW),
        ((302, 5, 0), EPERM),
        ((302, 1 << 40, 0), ALLOW),  # only the lower half is the process's number
        ((302, 0, 0b101), EPERM),
        ((302, 0, 0b111), ALLOW),
        ((7,), EPERM),
        ((8,), ALLOW),
    ]
    assert [judged("x86_64", *call, rules=rules) for call, _ in cases] == [expected for _, expected in cases]
    assert judged("aarch64", 302, 5, rules=rules) == ALLOW, "a call that this machine does not have"
