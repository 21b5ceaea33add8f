"""What isolated code can reach, by whichever of the means there are. Each is tried in a fork of its own."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.rewards import isolation

ROOT = os.geteuid() == 0
NO_LANDLOCK, FIRST_ABI, NEWEST = 0, 1, 99


def in_a_fork(what: Callable[[], object]) -> object:
    """Its result, from a process that is not trusted with anything of ours afterwards."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, json.dumps(what()).encode())
        except BaseException as error:
            os.write(write, json.dumps(f"{type(error).__name__}: {error}").encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        found = json.loads(said.read())
    os.waitpid(pid, 0)
    return found


def attacks(file: Path, victim: int) -> dict[str, Callable[[], object]]:
    folder, name = file.parent, str(file)
    return {
        "write": lambda: open(file, "w"),
        "append": lambda: open(file, "a"),
        "empty while reading": lambda: os.open(file, os.O_RDONLY | os.O_TRUNC),
        "truncate": lambda: os.truncate(name, 0),
        "mode": lambda: os.chmod(name, 0),
        "folder's mode": lambda: os.chmod(folder, 0),
        "times": lambda: os.utime(name, (1, 1)),
        "rename": lambda: os.rename(name, folder / "other"),
        "replace": lambda: os.rename(_made("new"), name),
        "remove": lambda: os.unlink(name),
        "new file": lambda: open(folder / "new", "w"),
        "new folder": lambda: os.mkdir(folder / "new"),
        "link": lambda: os.symlink("/", folder / "new"),
        "signal": lambda: os.kill(victim, 0),
        "signal by descriptor": lambda: signal.pidfd_send_signal(os.pidfd_open(victim), 0),
        "memory": lambda: open(f"/proc/{victim}/mem", "wb"),
        "descriptors": lambda: os.open(f"/proc/{victim}/fd/0", os.O_WRONLY),
        "limits": lambda: resource.prlimit(victim, resource.RLIMIT_CORE, (0, 0)),
        "priority": lambda: os.setpriority(os.PRIO_PROCESS, victim, 19),
        "cores": lambda: os.sched_setaffinity(victim, {0}),
        "network": lambda: socket.socket(),
        "device in its own folder": lambda: os.mknod("null", stat.S_IFCHR | 0o600, os.makedev(1, 3)),
    }


def _made(name: str) -> str:
    with open(name, "w") as file:
        file.write("forged")
    return name


def tried(file: Path, folder: Path, *, own_user: bool, abi: int, monkeypatch: pytest.MonkeyPatch) -> object:
    known = isolation._abi()
    monkeypatch.setattr(isolation, "_abi", lambda: min(abi, known))
    # Not this process: an attack that gets through takes its priority and its cores.
    bystander = subprocess.Popen(["sleep", "600"])
    victim = bystander.pid

    def inside() -> object:
        if own_user:
            isolation.become_user(isolation.FIRST_UID)
        os.mkdir(folder, 0o700)
        os.chdir(folder)
        held = isolation.isolate_process(
            str(folder), own_user=own_user, forbidden_file=str(file), supervisor=victim
        )
        went = []
        for name, attack in attacks(file, victim).items():
            try:
                attack()
            except OSError:
                continue
            went.append(name)
        try:
            _made("mine")
            own_folder = True
        except OSError:
            own_folder = False
        return [list(held.exposed), went, own_folder, held.means]

    try:
        return in_a_fork(inside)
    finally:
        bystander.kill()
        bystander.wait()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that another user gets to; pytest's own are closed."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    place = tmp_path / "scratch"
    place.mkdir()
    place.chmod(0o1777)
    return place


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
@pytest.mark.parametrize("abi", [NO_LANDLOCK, FIRST_ABI, 3, NEWEST])
@pytest.mark.parametrize("own_user", [False, True])
def test_the_trainers_files_and_processes_are_out_of_reach(
    own_user: bool, abi: int, tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if own_user and not ROOT:
        pytest.skip("only root becomes another user")
    ours = tmp_path / "ours"
    ours.mkdir()
    file = ours / "submission"
    file.write_text("ours")
    before = (file.stat(), ours.stat())
    found = tried(file, shared / "reward", own_user=own_user, abi=abi, monkeypatch=monkeypatch)
    assert isinstance(found, list), found
    exposed, went, own_folder, means = found
    # Without Landlock or another user only capabilities of its owner hide what is in memory; it can be read,
    # and not changed.
    readable = ["its memory (reading)"] if abi == NO_LANDLOCK and not own_user and not ROOT else []
    assert (exposed, went) == (readable, []), means
    assert own_folder == (own_user or abi != NO_LANDLOCK)
    assert file.read_text() == "ours"
    assert (file.stat().st_mode, ours.stat().st_mode) == (before[0].st_mode, before[1].st_mode)


@pytest.mark.skipif(not ROOT, reason="only root makes device files")
def test_landlock_alone_allows_no_device_file_in_the_folder(tmp_path: Path) -> None:
    def inside() -> object:
        if not isolation._landlock(str(tmp_path)):
            return "no Landlock"
        os.mkfifo(tmp_path / "fifo")
        os.mknod(tmp_path / "null", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        return "made"

    said = in_a_fork(inside)
    if said == "no Landlock":
        pytest.skip("this kernel has no Landlock")
    assert "PermissionError" in str(said)
    assert [path.name for path in tmp_path.iterdir()] == ["fifo"]


def test_what_does_not_hold_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose kernel has none of it."""

    def refused(rules: object) -> None:
        raise OSError(38, "not here")

    monkeypatch.setattr(isolation, "set_filter", refused)
    file = tmp_path / "ours"
    file.write_text("ours")
    found = tried(file, tmp_path / "reward", own_user=False, abi=NO_LANDLOCK, monkeypatch=monkeypatch)
    assert isinstance(found, list), found
    assert {"its files (writing)", "its processes (signals)", "the network"} <= set(found[0])
    # The capabilities are gone all the same, so that the kernel makes no device file.
    assert not {"devices (making them)"} & set(found[0])
    assert "no seccomp" in found[3]
