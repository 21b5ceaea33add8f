"""Generated commands run in a copy, see the evaluator's paths, and change nothing else."""

from __future__ import annotations

import errno
import os
import platform
import shlex
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from hashlib import md5
from pathlib import Path
from random import Random

import pytest

from core.system.seccomp import ARCHITECTURES, BREAKOUTS
from tests.doubles.each import each
from trainer.environments.intercode.commands import FIRST_COMMANDS_UID
from trainer.environments.intercode.filesystems import FileEntry, FileSystem, file_system
from trainer.environments.intercode.machine import (
    MALFORMED,
    TIMED_OUT,
    Shell,
    ShellMachine,
    ShellUnavailable,
    remove_open_folders,
)
from trainer.environments.intercode.tasks import ShellTask, Template

pytestmark = pytest.mark.process


ROOT = os.geteuid() == 0
FILES = FileSystem(
    1,
    (
        FileEntry("/testbed", mode=0o755),
        FileEntry("/testbed/dir1", mode=0o755),
        FileEntry("/testbed/dir1/notes.txt", b"one\ntwo\nthree\n"),
        FileEntry("/testbed/a b.txt", b"system\n", 0o600),
    ),
)


@pytest.fixture(scope="module")
def machine() -> Iterator[ShellMachine]:
    with ShellMachine() as machine:
        yield machine


@pytest.fixture(autouse=True)
def _restored(machine: ShellMachine) -> None:
    machine.restore(FILES)


def shell(machine: ShellMachine, gold: str = "true", seconds: float = 20.0) -> Shell:
    return Shell(machine, ShellTask("?", gold, (), FILES, Template(gold, ("?",))), command_s=seconds)


@each(
    ("command", "output"),
    [
        ("cat /testbed/dir1/notes.txt | wc -l", "3\n"),
        ("find /testbed -name '*.txt' | sort", "/testbed/a b.txt\n/testbed/dir1/notes.txt\n"),
        ("cd /testbed/dir1 && pwd -P", "/testbed/dir1\n"),
        ("pwd", "/\n"),
        ("ls testbed", "a b.txt\ndir1\n"),
        ("D=/testbed/dir1; echo $D \"$D\" '/testbed'", "/testbed/dir1 /testbed/dir1 /testbed\n"),
        ("echo hi >/tmp/x; cat /tmp/x", "hi\n"),
        ("sed -n '/system/p' '/testbed/a b.txt'", "system\n"),
        ("echo /testbed2 a/testbed ./testbed", "/testbed2 a/testbed ./testbed\n"),
        ("readlink -f /testbed/dir1/..", "/testbed\n"),
        ("echo -e 'wrong \\xff'", "wrong \N{REPLACEMENT CHARACTER}\n"),
    ],
)
def test_paths_are_the_evaluators_in_commands_and_outputs(
    machine: ShellMachine, command: str, output: str
) -> None:
    assert machine.run(command).stdout == output


def test_an_error_names_the_evaluators_path(machine: ShellMachine) -> None:
    output = machine.run("cat /testbed/none.txt; nosuchtool")
    assert output.stderr == (
        "cat: /testbed/none.txt: No such file or directory\n"
        "/bin/bash: line 1: nosuchtool: command not found\n"
    )
    assert output.code == 127


def test_a_command_reaches_no_file_but_the_copys(machine: ShellMachine, tmp_path: Path) -> None:
    ours = tmp_path / "ours.txt"
    ours.write_text("kept")
    ours.chmod(0o600)
    for attempt in (
        "echo x >",
        "rm -f",
        "mv -f /testbed/dir1/notes.txt",
        "chmod 777",
        "touch -d 2001-01-01",
        "ln -sf /x",
    ):
        machine.run(f"{attempt} {ours}")
    machine.run(f"ln -s {ours} /testbed/link; echo x > /testbed/link; echo x > {tmp_path}/new")
    assert ours.read_text() == "kept"
    assert ours.stat().st_mode & 0o777 == 0o600
    assert ours.stat().st_mtime > time.time() - 3_600
    assert [path.name for path in tmp_path.iterdir()] == ["ours.txt"]


@pytest.mark.parametrize("made", ["c 1 3", "b 240 0"])
def test_a_command_makes_no_device_file(machine: ShellMachine, made: str) -> None:
    output = machine.run(f"cd /testbed && mkfifo fifo && mknod device {made}")
    assert "not permitted" in output.stderr or "denied" in output.stderr
    assert output.code != 0
    assert not Path(machine.root, "testbed/device").exists()
    assert stat.S_ISFIFO(Path(machine.root, "testbed/fifo").stat().st_mode)


#: Every argument is wrong, so that a call which gets through does nothing; vhangup has none.
CALLS = "for (@ARGV) { syscall($_, (-1) x 6); print $_, ' ', $!+0, qq(\\n) }"


@pytest.mark.skipif(shutil.which("perl", path="/usr/bin:/bin") is None, reason="perl makes the calls")
@pytest.mark.skipif(platform.machine() not in ARCHITECTURES, reason="its system calls are not known")
def test_a_command_changes_nothing_outside_its_copy_of_the_machine(machine: ShellMachine) -> None:
    """Clock, name, swap, modules, mounts and accounting stay as they are, and nothing restarts."""
    column = list(ARCHITECTURES).index(platform.machine())
    refused = {
        rule.name: rule.numbers[column]
        for rule in BREAKOUTS
        if rule.where is None and rule.name != "vhangup" and rule.numbers[column] is not None
    }
    assert {"reboot", "sethostname", "swapoff", "mount", "settimeofday", "init_module"} <= set(refused)
    output = machine.run(f"perl -e {shlex.quote(CALLS)} {' '.join(map(str, refused.values()))}")
    assert output.code == 0, output.stderr
    answers = dict(line.split() for line in output.stdout.splitlines())
    expected = dict.fromkeys(refused, str(errno.EPERM))
    assert {name: answers[str(number)] for name, number in refused.items()} == expected


def test_a_command_has_no_capability_and_gets_none(machine: ShellMachine) -> None:
    output = machine.run("grep -E '^(Cap|NoNewPrivs)' /proc/self/status")
    held = dict(line.split(":\t") for line in output.stdout.splitlines())
    assert held.pop("NoNewPrivs") == "1"
    bounding = held.pop("CapBnd")  # can only be lessened with a capability
    assert not ROOT or int(bounding, 16) == 0
    assert len(held) == 4
    assert all(int(value, 16) == 0 for value in held.values())


@pytest.mark.skipif(not ROOT, reason="only root becomes another user")
def test_commands_run_as_root_get_a_user_of_their_own(machine: ShellMachine) -> None:
    with ShellMachine() as other:
        users = [each.run("id -u; id -g; id -G").stdout.split() for each in (machine, other)]
    assert all(len(set(ids)) == 1 and int(ids[0]) > FIRST_COMMANDS_UID for ids in users)
    assert users[0] != users[1], "copies side by side cannot end each other's commands"
    output = machine.run(
        "cat /etc/shadow; stat -c %u /testbed /testbed/dir1/notes.txt; echo seen >/dev/stderr"
    )
    assert "Permission denied" in output.stderr
    assert "seen" in output.stderr
    assert output.stdout.split() == [users[0][0]] * 2


@pytest.mark.skipif(not ROOT, reason="only root becomes another user")
def test_where_another_user_cannot_pass_commands_stay_root_without_capabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ShellMachine() as closed:
        closed.restore(FILES)
        output = closed.run("id -u; grep CapEff /proc/self/status; echo x >/testbed/new && cat /testbed/new")
        device = closed.run("mknod /testbed/device c 1 3")
    assert output.stdout.split() == ["0", "CapEff:", "0" * 16, "x"]
    assert device.code != 0


def test_a_command_reaches_no_process_and_no_network(machine: ShellMachine) -> None:
    output = machine.run(f"kill -TERM {os.getpid()}; exec 3<>/dev/tcp/127.0.0.1/9 || echo none")
    assert "none" in output.stdout
    assert "not permitted" in output.stderr


def test_a_process_that_ends_without_its_threads_leaves_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.environments.intercode.machine._open_folders", set())
    opened, closed = ShellMachine(), ShellMachine()
    closed.close()
    remove_open_folders()
    assert not Path(opened.root).parent.exists()
    opened.close()


def test_a_command_that_takes_too_long_is_ended_with_all_that_it_started(machine: ShellMachine) -> None:
    output = machine.run("setsid sleep 864 & echo $!; sleep 864", seconds=5)
    assert output.late
    assert not runs(output.stdout.strip())


def runs(pid: str) -> bool:
    """One that was killed may be listed until its exit code is collected."""
    try:
        stat = Path("/proc", pid, "stat").read_text("ascii", "replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("command", ["yes", "head -c 3000000 /dev/zero; sleep 60"])
def test_output_without_end_is_cut_off(machine: ShellMachine, command: str) -> None:
    output = machine.run(command, seconds=20)
    assert output.late
    assert len(output.stdout) < 5 << 20


def test_common_commands_that_set_modes_and_times_work(machine: ShellMachine) -> None:
    command = (
        "touch /testbed/new && sed -i s/one/1/ /testbed/dir1/notes.txt && cp -p /testbed/new /testbed/n2"
    )
    output = machine.run(
        f"{command} && chmod +x /testbed/new && gzip /testbed/dir1/notes.txt && mkdir -m 700 /testbed/d"
    )
    assert (output.code, output.stderr) == (0, "")
    assert set(machine.state(["/testbed"])) == {
        "/testbed/a b.txt",
        "/testbed/d",
        "/testbed/dir1",
        "/testbed/dir1/notes.txt.gz",
        "/testbed/n2",
        "/testbed/new",
    }


def test_a_restored_copy_has_nothing_of_before(machine: ShellMachine) -> None:
    before = machine.state(["/testbed"])
    machine.run("rm -r /testbed/dir1; mkfifo /testbed/f; echo x > '/testbed/a b.txt'; echo y > stray")
    assert machine.state(["/testbed"]) != before
    machine.restore(FILES)
    assert machine.state(["/testbed"]) == before
    assert machine.run("ls").stdout == "testbed\ntmp\n"


def test_state_has_modes_of_folders_targets_of_links_and_digests(machine: ShellMachine) -> None:
    machine.run("ln -s /testbed/dir1/notes.txt /testbed/link")
    state = machine.state(["/testbed"])
    assert state["/testbed/dir1"] == ("<DIR>", 0o40755)
    assert state["/testbed/link"] == ("<LINK>", "/testbed/dir1/notes.txt")
    assert state["/testbed/a b.txt"] == (md5(b"system\n").hexdigest(), 7)


def test_cd_keeps_its_folder_for_the_next_turn(machine: ShellMachine) -> None:
    its = shell(machine)
    assert its.step("cd /testbed") == ""
    assert its.step("ls") == "a b.txt\ndir1\n"
    its.step("cd dir1")
    assert its.step("pwd") == "/testbed/dir1\n"
    its.step("cd ..")
    assert its.workdir == "/testbed"
    assert "No such file or directory" in its.step("cd nowhere")
    assert its.workdir == "/testbed"


def test_after_a_compound_cd_every_command_fails_until_the_folder_is_left(machine: ShellMachine) -> None:
    its = shell(machine)
    assert its.step("cd /testbed && ls") == "a b.txt\ndir1\n"
    assert its.step("ls /testbed") == MALFORMED
    assert its.step("cd /") == ""
    assert its.step("ls /testbed") == "a b.txt\ndir1\n"


def test_what_no_shell_takes_is_malformed_and_what_runs_on_times_out(machine: ShellMachine) -> None:
    assert shell(machine).step("echo \0") == MALFORMED
    assert shell(machine, seconds=0.3).step("sleep 60") == TIMED_OUT


@pytest.mark.parametrize(
    ("commands", "reward"),
    [
        (["wc -l < /testbed/dir1/notes.txt"], 1.0),
        (["wc -w /testbed/dir1/notes.txt"], 0.67),
        (["ls /testbed", "cat /testbed/dir1/notes.txt | wc -l"], 1.0),
        ([], 0.67),
        (["rm /testbed/dir1/notes.txt; echo 3"], 0.72),
    ],
)
def test_a_submission_earns_what_its_last_output_and_changes_are_worth(
    machine: ShellMachine, commands: list[str], reward: float
) -> None:
    its = shell(machine, gold="wc -l < /testbed/dir1/notes.txt")
    for command in commands:
        its.step(command)
    assert its.reward().total == pytest.approx(reward)


@each("kind", [1, 2, 3, 4])
def test_a_seed_gives_one_file_system(machine: ShellMachine, kind: int) -> None:
    files = file_system(kind, Random(3))
    assert files == file_system(kind, Random(3))
    assert (files != file_system(kind, Random(4))) == (kind != 4)
    machine.restore(files)
    below = [entry.path for entry in files.entries if entry.path not in files.roots]
    assert sorted(machine.state(files.roots)) == sorted(below)


def test_a_system_without_the_commands_of_its_tasks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.environments.intercode.machine._NEEDED", "sed nosuchtool")
    with pytest.raises(ShellUnavailable, match="nosuchtool: not found"):
        ShellMachine()
