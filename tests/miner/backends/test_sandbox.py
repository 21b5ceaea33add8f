"""The sandbox's command line and device files. Its isolation: tests/integration/test_backends_hostile.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from miner.backends import sandbox
from miner.backends.base import AttemptSpec, Mount
from miner.backends.sandbox import Interpreter, Sandbox, detect_sandbox, device_files

PYTHON = Interpreter(Path("/env/bin/python"), (Path("/env"),))


def command(uid: int | None = 10002, **fields: object) -> list[str]:
    spec = AttemptSpec("k", ("a",), Path("/d/jobs/1/a"), **fields)  # type: ignore[arg-type]
    box = Sandbox(Path("/usr/bin/bwrap"), PYTHON, Path("/d/hosts"), (Path("/code"),), uid, 99)
    return box.command(spec, ["/env/bin/python", "-m", "x"])


def test_every_namespace_is_its_own_and_it_dies_with_us() -> None:
    words = command()
    for name in ("pid", "net", "ipc", "uts"):
        assert f"--unshare-{name}" in words
    assert "--die-with-parent" in words
    assert "--share-net" not in words


def test_root_becomes_another_user_and_others_get_a_user_namespace() -> None:
    as_root, as_user = command(uid=10002), command(uid=None)
    assert "--unshare-user" not in as_root
    assert as_root[as_root.index("--uid") + 1] == "10002"
    assert "--unshare-user" in as_user
    assert "--cap-add" not in as_user
    assert "--uid" not in as_user


def test_only_runs_with_reward_code_get_what_serves_it_as_another_user_of_each_run() -> None:
    plain, hostile, as_user = command(), command(hostile=True), command(uid=None, hostile=True)
    assert "CAP_SYS_ADMIN" in hostile
    assert hostile[hostile.index("--rewards") + 1] == "/code"
    assert int(hostile[hostile.index("--rewards-uid") + 1]) >= sandbox.REWARD_UIDS
    for words in (plain, as_user):
        assert not {"CAP_SYS_ADMIN", "CAP_KILL", "--rewards"} & set(words)


def test_only_the_run_folder_and_what_is_named_so_can_be_written() -> None:
    words = command(mounts=(Mount(Path("/d/models")), Mount(Path("/d/out"), read_only=False)))
    writable = [words[at + 1] for at, word in enumerate(words) if word == "--bind"]
    read_only = [words[at + 1] for at, word in enumerate(words) if word == "--ro-bind"]
    assert writable == ["/d/jobs/1/a", "/d/out"]
    assert {"/env", "/code", "/d/models", "/usr", "/sys"} <= set(read_only)
    assert not {"/", "/etc", "/root", "/home", "/d", "/var", "/run"} & {*writable, *read_only}


def test_memory_file_systems_have_a_size() -> None:
    words = " ".join(command(shm_bytes=12345))
    assert "--size 12345 --tmpfs /dev/shm" in words
    assert f"--size {sandbox.TMP_BYTES} --tmpfs /tmp" in words


def test_the_command_comes_last_after_everything_was_given_up() -> None:
    words = command()
    last = words[words.index("--") + 1 :]
    assert last[:3] == ["/env/bin/python", "-I", "-S"]
    assert last[3].endswith("sandbox_init.py")
    assert last[-4:] == ["--", "/env/bin/python", "-m", "x"]


def test_without_bubblewrap_the_package_to_install_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt install bubblewrap" in str(
        detect_sandbox(Sandbox(Path("bwrap"), PYTHON, tmp_path / "hosts", (), None, 10))
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'No permissions to create new namespace' >&2; exit 1", "No permissions"),
        ("echo \"['lo', 'eth0']\"", "does not close off the network"),
    ],
)
def test_a_sandbox_that_isolates_nothing_is_not_used(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bwrap"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert reason in str(detect_sandbox(Sandbox(Path("bwrap"), PYTHON, tmp_path / "hosts", (), None, 10)))


#: As /proc/driver/nvidia/gpus/*/information has it; numbers of device files need not follow the bus.
INFORMATION = "Model: \t\t H100\nGPU UUID: \t GPU-{uuid}\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n"


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    driver, devices = tmp_path / "gpus", tmp_path / "dev"
    for bus, uuid, minor in (
        ("0000:18:00.0", "aaaa", 2),
        ("0000:2a:00.0", "bbbb", 0),
        ("0000:3a:00.0", "cccc", 1),
    ):
        (driver / bus).mkdir(parents=True)
        (driver / bus / "information").write_text(INFORMATION.format(uuid=uuid, minor=minor))
    devices.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"):
        (devices / name).touch()
    return driver, devices


def names(gpus: tuple[str, ...], machine: tuple[Path, Path]) -> list[str]:
    return [path.name for path in device_files(gpus, *machine)]


@pytest.mark.parametrize(
    ("gpus", "devices"),
    [
        ((), []),
        (("GPU-aaaa",), ["nvidiactl", "nvidia-uvm", "nvidia2"]),
        (("GPU-cccc", "GPU-bbbb"), ["nvidiactl", "nvidia-uvm", "nvidia1", "nvidia0"]),
        # An index is the order of the bus.
        (("0",), ["nvidiactl", "nvidia-uvm", "nvidia2"]),
    ],
    ids=["no GPU", "one", "two", "by index"],
)
def test_a_gpu_brings_its_own_device_file_and_the_drivers(
    gpus: tuple[str, ...], devices: list[str], machine: tuple[Path, Path]
) -> None:
    assert names(gpus, machine) == devices


def test_all_are_shown_where_the_driver_does_not_say_which(machine: tuple[Path, Path]) -> None:
    everything = ["nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1", "nvidia2", "nvidia-caps"]
    assert names(("MIG-1234-5678",), machine) == everything
    assert [path.name for path in device_files(("0",), Path("/no/such"), machine[1])] == everything
