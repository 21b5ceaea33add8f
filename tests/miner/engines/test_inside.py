"""The filter of system calls, run here as the kernel runs it."""

from __future__ import annotations

import struct

import pytest

from miner.engines import inside

ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026


def judged(machine: str, number: int, architecture: int | None = None, first: int = 0) -> int:
    """What the program returns for a call; `first` is its first argument."""
    arch = inside.ARCHITECTURES[machine] if architecture is None else architecture
    data = struct.pack("IIQ6Q", number, arch, 0, first, *[0] * 5)
    program = list(inside.filter_lines(machine))
    value, at = 0, 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("I", data, operand)
        elif code == 0x06:
            return operand
        else:
            true = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            at += if_true if true else if_false


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_what_is_forbidden_is_refused_and_all_else_allowed(machine: str, column: int) -> None:
    forbidden = {numbers[column] for numbers in inside.FORBIDDEN.values()}
    assert len(forbidden) == len(inside.FORBIDDEN)
    for number in range(500):
        expected = EPERM if number in forbidden else ENOSYS if number == inside.CLONE3[column] else ALLOW
        assert judged(machine, number) == expected, number


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_processes_and_threads_are_made_and_namespaces_are_not(machine: str, column: int) -> None:
    clone = inside.CLONE[column]
    thread = 0x3D0F00
    for flags in (17, thread, 0x01200011):
        assert judged(machine, clone, first=flags) == ALLOW
    for namespace in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert judged(machine, clone, first=namespace | 17) == EPERM
        assert judged(machine, clone, first=namespace | thread) == EPERM


def test_the_calls_of_another_architecture_are_refused() -> None:
    i386 = 0x40000003
    assert judged("x86_64", 1, architecture=i386) == EPERM
    assert judged("x86_64", 0x40000000 + 1) == ENOSYS
