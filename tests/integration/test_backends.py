"""What every backend must do: one suite for all, also for a new one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from miner.backends.base import BackendRejected, EndCause, Mount, RunPhase
from tests.doubles.backend_bench import BackendBench, Run
from tests.doubles.backend_fixtures import bench, kind

__all__ = ["bench", "kind"]


SLEEPER = "import time; open('up', 'w').write('1'); time.sleep(100)"
#: Saves when it is asked to end, as the trainer does. `with`: an exit inside a file's own closing would be
#: swallowed.
POLITE = """
import signal, sys, time
def end(*_):
    open('saved', 'w').write('all of it')
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
with open('up', 'w') as file:
    file.write('1')
time.sleep(100)
"""
DEAF = """
import signal, time
signal.signal(15, signal.SIG_IGN)
while True:
    open('beat', 'a').write('.')
    time.sleep(0.02)
"""
#: A child in a session of its own, whose parent is gone, that writes as long as it lives.
RUNAWAY = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            open('beat', 'a').write('.')
            time.sleep(0.02)
    os._exit(0)
while not os.path.exists('beat'):
    time.sleep(0.01)
"""


async def still(run: Run) -> bool:
    """Whether nobody writes any more."""
    before = len(run.file("beat"))
    await asyncio.sleep(0.2)
    return len(run.file("beat")) == before


@pytest.mark.every_backend
async def test_what_is_submitted_again_also_at_the_same_time_runs_once(bench: BackendBench) -> None:
    spec = bench.code("open('ran', 'a').write('x'); import time; time.sleep(0.3)")
    run = await bench.submit(spec)
    again = await asyncio.gather(*(bench.backend.submit(spec) for _ in range(4)))
    assert set(again) == {run.ref}
    assert (await bench.end_of(run)).why is EndCause.OK
    assert await bench.backend.submit(spec) == run.ref
    await asyncio.sleep(0.2)
    assert run.file("ran") == "x"


@pytest.mark.every_backend("slurm-raise")
@pytest.mark.parametrize(
    ("text", "why", "code"),
    [
        ("pass", EndCause.OK, 0),
        ("raise SystemExit(7)", EndCause.FAILED, 7),
        ("import os; os.kill(os.getpid(), 11)", EndCause.FAILED, 139),
        ("import os; os.kill(os.getpid(), 9)", EndCause.KILLED, 137),
    ],
)
async def test_an_end_has_its_code_and_cause(
    text: str, why: EndCause, code: int, bench: BackendBench
) -> None:
    before = time.time()
    _, status = await bench.play(text)
    assert (status.phase, status.why, status.code) == (RunPhase.ENDED, why, code)
    assert status.started_at is not None
    assert status.ended_at is not None
    assert before - 1 <= status.started_at <= status.ended_at <= time.time() + 1


async def test_a_command_that_is_not_there_ends_with_the_reason_in_its_log(bench: BackendBench) -> None:
    run = await bench.submit(bench.spec("/no/such/program"))
    status = await bench.end_of(run)
    assert (status.why, status.code) == (EndCause.FAILED, 127)
    assert "/no/such/program" in run.log


async def test_all_output_is_in_the_log_and_the_start_is_on_disk_before_it(bench: BackendBench) -> None:
    text = "import sys; print(open('start.json').read(), flush=True); sys.stderr.write('two\\n')"
    run, _ = await bench.play(text)
    start, second = run.log.splitlines()
    assert json.loads(start)["at"] <= time.time()
    assert second == "two"


async def test_a_running_one_is_found_and_says_since_when(bench: BackendBench) -> None:
    spec = bench.code(SLEEPER)
    assert await bench.backend.find(spec.key) is None
    run = await bench.submit(spec)
    await bench.said(run, "up")
    assert await bench.backend.find(spec.key) == run.ref
    status = await bench.status(run)
    assert status.phase is RunPhase.RUNNING
    assert status.started_at is not None
    assert abs(status.started_at - time.time()) < 60


@pytest.mark.every_backend
async def test_stop_lets_the_trainer_save(bench: BackendBench) -> None:
    run = await bench.submit(bench.code(POLITE))
    await bench.said(run, "up")
    await bench.backend.stop(run.ref)
    status = await bench.end_of(run)
    assert (status.why, status.code) == (EndCause.STOPPED, 0)
    assert run.file("saved") == "all of it"


async def test_stop_right_after_the_start_ends_it_too(bench: BackendBench) -> None:
    run = await bench.submit(bench.code(SLEEPER))
    await bench.backend.stop(run.ref)
    assert (await bench.end_of(run)).why is EndCause.STOPPED


@pytest.mark.every_backend
async def test_force_kills_a_trainer_that_ignores_sigterm(bench: BackendBench) -> None:
    run = await bench.submit(bench.code(DEAF))
    await bench.said(run, "beat")
    await bench.backend.stop(run.ref)
    await asyncio.sleep(0.2)
    assert (await bench.status(run)).phase is RunPhase.RUNNING
    await bench.backend.stop(run.ref, force=True)
    status = await bench.end_of(run)
    assert status.why is EndCause.STOPPED
    # Slurm's cancellation sends SIGTERM to the sandbox too, which may end before the wrapper kills it.
    assert status.code in ((137, 143) if bench.kind == "slurm" else (137,))
    assert await still(run)
    await bench.backend.stop(run.ref, force=True)
    await bench.backend.stop(run.ref)
    assert (await bench.status(run)).why is EndCause.STOPPED


async def test_nothing_outlives_the_command(bench: BackendBench) -> None:
    run, status = await bench.play(RUNAWAY)
    assert status.why is EndCause.OK
    assert await still(run)


async def test_force_reaches_what_left_the_session(bench: BackendBench) -> None:
    run = await bench.submit(bench.code(f"{RUNAWAY}\ntime.sleep(100)"))
    await bench.said(run, "beat")
    await bench.backend.stop(run.ref, force=True)
    await bench.end_of(run)
    assert await still(run)


async def test_processes_with_a_handler_dump_stacks_and_the_others_live_on(bench: BackendBench) -> None:
    text = """
import faulthandler, os, signal, subprocess, time
other = subprocess.Popen(['sleep', '100'])
faulthandler.register(signal.SIGUSR1, all_threads=True)
def inner_of_the_child():
    open('child', 'w').write('1')
    while True: time.sleep(0.05)
def inner_of_the_parent():
    open('up', 'w').write('1')
    while True:
        time.sleep(0.05)
        open('others', 'w').write(str(other.poll()))
if os.fork() == 0: inner_of_the_child()
inner_of_the_parent()
"""
    run = await bench.submit(bench.code(text))
    await bench.said(run, "child")
    await bench.said(run, "up")
    await bench.backend.dump_stacks(run.ref)
    ends = time.monotonic() + 60
    while "inner_of_the_child" not in run.log or "inner_of_the_parent" not in run.log:
        assert time.monotonic() < ends, run.log
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.2)
    assert await bench.said(run, "others") == "None"
    assert (await bench.status(run)).phase is RunPhase.RUNNING


@pytest.mark.every_backend
async def test_a_restarted_daemon_finds_and_stops_runs(bench: BackendBench) -> None:
    run = await bench.submit(bench.code(POLITE))
    await bench.said(run, "up")
    again = bench.again()
    (listed,) = await again.list_runs()
    assert (listed.key, listed.ref, listed.run_dir) == (run.spec.key, run.ref, run.dir)
    assert await again.find(run.spec.key) == run.ref
    assert (await again.poll(run.ref, run.dir)).phase is RunPhase.RUNNING
    assert await again.submit(run.spec) == run.ref
    await again.stop(run.ref)
    assert (await bench.end_of(run)).why is EndCause.STOPPED


async def test_removing_forgets_what_ended_and_nothing_else(bench: BackendBench) -> None:
    run = await bench.submit(bench.code(SLEEPER))
    await bench.said(run, "up")
    await bench.backend.remove(run.ref)
    assert (await bench.status(run)).phase is RunPhase.RUNNING
    await bench.backend.stop(run.ref, force=True)
    await bench.end_of(run)
    for _ in range(2):
        await bench.backend.remove(run.ref)
        assert await bench.backend.list_runs() == []
        assert await bench.backend.find(run.spec.key) is None
    assert run.file("up") == "1"


@pytest.mark.every_backend
async def test_an_end_is_known_after_the_backend_forgot_it(bench: BackendBench) -> None:
    run, _ = await bench.play("raise SystemExit(7)")
    await bench.backend.remove(run.ref)
    status = await bench.status(run)
    assert (status.phase, status.why, status.code) == (RunPhase.ENDED, EndCause.FAILED, 7)


async def test_an_unknown_run_is_lost(bench: BackendBench) -> None:
    spec = bench.code("pass")
    status = await bench.backend.poll("f" * 64, spec.run_dir)
    assert (status.phase, status.why, status.code) == (RunPhase.LOST, EndCause.LOST, None)


async def test_the_timeout_ends_a_run(bench: BackendBench) -> None:
    # Counted from before Python starts: one that comes before it listens shows nothing.
    for timeout_s in (1.5, 6.0, 24.0):
        run = await bench.submit(bench.code(POLITE, timeout_s=timeout_s))
        status = await bench.end_of(run)
        assert status.why is EndCause.TIMEOUT
        if run.file("up"):
            assert status.code == 0
            assert run.file("saved")
            return
    pytest.fail("a trainer took half a minute to start")


async def test_memory_is_limited_and_named_as_the_cause(bench: BackendBench) -> None:
    bench.require_limits()
    # A part of it is killed, as a rank of several is; its parent then ends with a code of its own.
    text = """
import subprocess, sys
greedy = subprocess.run([sys.executable, '-c', 'len(bytes([7]) * (1 << 29))'])
sys.exit(9 if greedy.returncode == -9 else 0)
"""
    run, status = await bench.play(text, memory_bytes=96 << 20)
    assert (status.why, status.code) == (EndCause.OOM_KILLED, 9), run.log


async def test_a_kill_from_outside_is_not_a_stop(bench: BackendBench) -> None:
    run = await bench.submit(bench.code(SLEEPER))
    await bench.said(run, "up")
    os.kill(host_pid(run, "python"), signal.SIGKILL)
    status = await bench.end_of(run)
    assert (status.why, status.code) == (EndCause.KILLED, 137)


@pytest.mark.every_backend
async def test_a_killed_wrapper_takes_everything_with_it(bench: BackendBench) -> None:
    run = await bench.submit(bench.code(f"{RUNAWAY}\ntime.sleep(100)"))
    await bench.said(run, "beat")
    os.kill(host_pid(run, "wrapper"), signal.SIGKILL)
    status = await bench.end_of(run)
    assert status.why in (EndCause.KILLED, EndCause.LOST)
    assert await still(run)


@pytest.mark.every_backend
async def test_the_run_gets_its_own_environment_and_nothing_of_ours(
    bench: BackendBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_operator")
    bench.again()
    run, _ = await bench.play(
        "import json, os; print(json.dumps(dict(os.environ)))", env={"SAID": "a b=c\n'd'", "EMPTY": ""}
    )
    seen = json.loads(run.log)
    assert seen["SAID"] == "a b=c\n'd'"
    assert seen["EMPTY"] == ""
    # A login would set MAIL, and commands of Slurm have the other.
    assert not {"HF_TOKEN", "MAIL", "SLURM_TIME_FORMAT"} & set(seen)
    assert {"HOME", "PATH", "USER"} <= set(seen)


async def test_mounts_are_at_their_own_paths_and_may_be_read_only(
    bench: BackendBench, tmp_path: Path
) -> None:
    inputs, models = tmp_path / "inputs", tmp_path / "models"
    for folder in (inputs, models):
        folder.mkdir()
        (folder / "file").write_text("theirs")
        folder.chmod(0o755)
    text = f"""
import os
print(open('{inputs}/file').read())
try:
    open('{inputs}/new', 'w'); print('written')
except OSError as error:
    print('refused')
open('{models}/new', 'w').write('mine')
print(os.getcwd())
"""
    run, status = await bench.play(text, mounts=(Mount(inputs), Mount(models, read_only=False)))
    read, refused, where = run.log.splitlines()
    assert status.why is EndCause.OK
    assert (read, where) == ("theirs", str(run.dir))
    assert refused == ("refused" if bench.closed else "written")
    assert (models / "new").read_text() == "mine"


async def test_a_folder_can_be_renamed_from_the_run_folder_to_the_one_around_it(bench: BackendBench) -> None:
    """As submissions are: the two must not be mounts of their own."""
    spec = bench.code("pass")
    inputs = spec.run_dir.parent / "inputs"
    inputs.mkdir()
    text = "import os; os.mkdir('new'); os.rename('new', '../submission')"
    mounts = (Mount(spec.run_dir.parent, read_only=False), Mount(inputs))
    run = await bench.submit(replace(spec, argv=("python", "-c", text), mounts=mounts))
    status = await bench.end_of(run)
    assert status.why is EndCause.OK, run.log
    assert (spec.run_dir.parent / "submission").is_dir()


async def test_processes_of_a_run_find_each_other_by_their_host_name(bench: BackendBench) -> None:
    """What torchrun needs, where there is no network."""
    text = """
import socket, threading
server = socket.create_server((socket.gethostname(), 0))
threading.Thread(target=lambda: server.accept()[0].sendall(b'hello')).start()
print(socket.create_connection((socket.gethostname(), server.getsockname()[1]), 30).recv(9))
"""
    run, _ = await bench.play(text)
    assert run.log == "b'hello'\n"


@pytest.mark.every_backend
async def test_the_run_gets_its_gpus_by_variable(bench: BackendBench) -> None:
    gpus: tuple[str, ...] = tuple(f"GPU-fa4e0000-0000-4000-8000-00000000000{number}" for number in (1, 3))
    # Slurm chooses among the node's.
    given = ("0", "1") if bench.kind == "slurm" else gpus
    name = "NVIDIA_VISIBLE_DEVICES" if bench.kind == "docker" else "CUDA_VISIBLE_DEVICES"
    run, _ = await bench.play(f"import os; print(os.environ['{name}'])", gpus=gpus)
    assert run.log.strip() == ",".join(given)
    none, _ = await bench.play(f"import os; print(os.environ['{name}'])", gpus=("cpu",))
    assert none.log.strip() in ("", "void")


async def test_cores_are_kept_to(bench: BackendBench) -> None:
    if bench.kind == "slurm":
        pytest.skip("Slurm chooses the cores of its nodes")
    core = min(os.sched_getaffinity(0))
    run, _ = await bench.play("import os; print(os.sched_getaffinity(0))", cpus=str(core))
    assert run.log.strip() == str({core})


async def test_a_bad_specification_is_rejected_before_anything_starts(bench: BackendBench) -> None:
    """What else is rejected: tests/miner/backends/test_preflight.py."""
    good = bench.code("pass")
    link = good.run_dir.parent / "link"
    link.symlink_to("/etc")
    # It would stand in `inspect`, in labels or in the list of processes for all to read.
    token = "hf_" + "A1b2C3d4" * 4
    for wrong in ({"gpus": ("all",)}, {"mounts": (Mount(link),)}, {"env": {"TOKEN": token}}):
        with pytest.raises(BackendRejected) as caught:
            await bench.backend.submit(replace(good, **wrong))
        assert token not in str(caught.value)
    assert await bench.backend.list_runs() == []


def host_pid(run: Run, which: str) -> int:
    """The wrapper of a run, or the trainer below it, as this machine numbers them."""
    wrappers, trainers = [], []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                where = os.readlink(entry / "cwd")
            except OSError:
                continue
            if where != str(run.dir):
                continue
            if any("wrapper" in word and word.endswith(".py") for word in words) and "--dir" in words:
                wrappers.append(int(entry.name))
            elif words[1:2] == ["-c"]:
                trainers.append(int(entry.name))
    return min(wrappers if which == "wrapper" else trainers)
