"""What hostile code in a training cannot do: the same attacks in Docker and in the sandbox, on a node too."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from miner.backends import ownership
from miner.backends.base import BackendRejected, EndCause, Mount, RunPhase
from miner.backends.run_folder import log_tail
from miner.support.data_id import data_id
from miner.support.untrusted_files import read_untrusted
from tests.doubles import hostile
from tests.doubles.backend_bench import BackendBench, Run, process_bench
from tests.doubles.backend_fixtures import bench_of


@pytest_asyncio.fixture(params=["sandboxed process", "docker", "slurm"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[BackendBench]:
    bench = bench_of(request.param, request, tmp_path)
    assert bench.closed
    yield bench
    await bench.clear()


@pytest_asyncio.fixture
async def open_bench(tmp_path: Path) -> AsyncIterator[BackendBench]:
    """Local processes as they are without a sandbox."""
    bench = process_bench(tmp_path / "data", sandbox=False)
    yield bench
    await bench.clear()


@pytest.fixture
def needle(monkeypatch: pytest.MonkeyPatch) -> str:
    """A token of the operator, where real ones are: in the daemon's environment, wallet and settings file."""
    token = f"hf_{secrets.token_hex(20)}"
    monkeypatch.setenv("HF_TOKEN", token)
    return token


async def tried(bench: BackendBench, text: str, **more: Any) -> dict[str, Any]:
    run, status = await bench.play(text, hostile=True, **more)
    assert status.why is EndCause.OK, run.log
    results: dict[str, Any] = json.loads(run.log)
    return results


def succeeded(results: dict[str, Any], *but: str) -> dict[str, Any]:
    return {name: result for name, result in results.items() if result is not None and name not in but}


@pytest.fixture
def listeners() -> Iterator[tuple[int, str, str]]:
    """What of the machine could be talked to: a port, an abstract socket, and one in the file system."""
    name = f"god-miner-{secrets.token_hex(8)}"
    path = f"/tmp/{name}.sock"
    with (
        socket.create_server(("0.0.0.0", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as file,
    ):
        abstract.bind(f"\0{name}")
        file.bind(path)
        for listener in (abstract, file):
            listener.listen()
        os.chmod(path, 0o777)
        yield tcp.getsockname()[1], name, path
    os.unlink(path)


async def test_there_is_no_network(bench: BackendBench, listeners: tuple[int, str, str]) -> None:
    port, abstract, path = listeners
    own = socket.gethostbyname_ex(socket.gethostname())[2]
    addresses: list[list[object]] = [[host, port] for host in ("127.0.0.1", "0.0.0.0", *own)]
    addresses += [["169.254.169.254", 80], ["1.1.1.1", 53], ["172.17.0.1", port]]
    sockets = [path, bench.settings.docker_host.removeprefix("unix://"), "/run/docker.sock"]
    results = await tried(bench, hostile.network(addresses, abstract, sockets))
    assert succeeded(results, "interfaces") == {}
    assert results["interfaces"] == ["lo"]


@pytest.mark.every_backend
async def test_it_sees_its_own_files_and_no_others(bench: BackendBench, tmp_path: Path, needle: str) -> None:
    wallet, dot_env = tmp_path / "wallet", bench.data_dir / ".env"
    other = bench.spec("true").run_dir / "plan.json"
    inputs = tmp_path / "inputs"
    inputs.mkdir(mode=0o755)
    for path in (wallet, dot_env, other):
        path.write_text(needle)
    (inputs / "rows").write_text("[]")
    ours = (bench.data_dir, bench.data_dir / "backends", inputs, Path("/usr/bin"), Path("/etc"), Path("/"))
    results = await tried(
        bench,
        hostile.files(
            [
                *map(str, (wallet, dot_env, other)),
                "/etc/shadow",
                "/root/.bashrc",
                "/proc/1/environ",
                "/proc/1/maps",
            ],
            [*map(str, ours), "/sys", "/dev", "/proc/sys/kernel"],
            needle,
        ),
        mounts=(Mount(inputs),),
    )
    # PID 1 in there is its own, and so is the memory at /tmp, below which these tests have their folders.
    own = {"read /proc/1/environ", "read /proc/1/maps", *(f"write {path}" for path in ours[:2])}
    assert succeeded(results, "needle", *own) == {}
    assert not any((path / "left-here").exists() for path in ours)
    assert results["needle"] == []
    assert needle not in json.dumps(results)


async def test_it_sees_no_process_but_its_own(bench: BackendBench, needle: str) -> None:
    daemon = os.getpid()
    parents = [os.getppid(), daemon]
    results = await tried(bench, hostile.processes(parents, needle))
    assert succeeded(results, "needle", "others") == {}
    assert results["needle"] == []
    assert results["others"] < 10


async def test_it_may_nothing_that_only_root_may(bench: BackendBench) -> None:
    results = await tried(bench, hostile.privileges())
    facts = ("capabilities", "no new privileges", "uid", "suid")
    assert succeeded(results, *facts) == {}
    assert results["capabilities"] == ["", ""]
    assert results["no new privileges"] is True
    assert results["uid"] != 0
    assert results["suid"].strip() == str(results["uid"])


async def test_the_attempts_are_real(
    open_bench: BackendBench, tmp_path: Path, listeners: tuple[int, str, str], needle: str
) -> None:
    """Where nothing holds them they get through: what is shown above is the sandbox, and not a slip."""
    port, abstract, path = listeners
    wallet, daemon = tmp_path / "wallet", os.getpid()
    wallet.write_text(needle)
    results: dict[str, Any] = {}
    for text in (
        hostile.network([["127.0.0.1", port]], abstract, [path]),
        hostile.files([str(wallet)], [str(open_bench.data_dir)], needle, top=str(tmp_path)),
        hostile.processes([daemon], needle),
    ):
        run, status = await open_bench.play(text)
        assert status.why is EndCause.OK, run.log
        results |= json.loads(run.log)
        if "left-here" not in text:
            continue
        assert results["needle"] == [str(wallet)]
    through = set(succeeded(results))
    assert {f"tcp ['127.0.0.1', {port}]", "abstract", f"unix {path}"} <= through
    assert {f"read {wallet}", f"write {open_bench.data_dir}"} <= through
    assert {f"environment {daemon}", f"kill {daemon}", f"root {daemon}"} <= through
    assert results["others"] > 1


async def test_a_fork_bomb_stays_in_its_bounds_and_is_ended_whole(bench: BackendBench) -> None:
    run = await bench.submit(bench.code(hostile.FORK_BOMB, hostile=True))
    await bench.said(run, "refused")
    own = marked(bench, run)
    assert 10 < len(own) <= bench.processes + 5
    # The machine goes on: others can still start something.
    assert os.spawnlp(os.P_WAIT, "true", "true") == 0
    await bench.backend.stop(run.ref, force=True)
    assert (await bench.end_of(run)).why is EndCause.STOPPED
    assert not marked(bench, run)


def marked(bench: BackendBench, run: Run) -> set[int]:
    return ownership.marked_processes(ownership.run_mark(data_id(bench.data_dir), run.spec.key))


@pytest.mark.parametrize("text", [hostile.MEMORY_BOMB, hostile.MEMORY_FILES], ids=["memory", "/tmp"])
async def test_memory_ends_it_and_not_the_machine(text: str, bench: BackendBench) -> None:
    bench.require_limits()
    run = await bench.submit(bench.code(text, hostile=True, memory_bytes=96 << 20))
    assert (await bench.end_of(run)).why is EndCause.OOM_KILLED


async def test_a_flood_of_output_does_not_fill_the_disk(bench: BackendBench) -> None:
    text = "import os\nline = b'x' * 65535 + b'\\n'\nfor _ in range(6000): os.write(1, line)"
    run = await bench.submit(bench.code(text, hostile=True))
    status = await bench.end_of(run, 300)
    assert status.why is EndCause.OK
    kept = sum(path.stat().st_size for path in run.dir.glob("log*"))
    assert kept <= 3 * (64 << 20) + (1 << 20) < 6000 * 65536
    assert {path.name for path in run.dir.glob("log*")} == {"log", "log.first", "log.before"}


async def test_links_that_it_leaves_lead_nobody_anywhere(bench: BackendBench, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text('{"at": 1, "code": 0, "secret": "of the operator"}')
    before = victim.read_bytes()
    spec = bench.code("pass", hostile=True)
    job = spec.run_dir.parent
    spec = replace(
        spec,
        argv=("python", "-c", hostile.LINKS, str(victim), str(job)),
        mounts=(Mount(job, read_only=False),),
    )
    run = await bench.submit(spec)
    status = await bench.end_of(run)
    assert status.phase is RunPhase.ENDED
    assert "secret" not in log_tail(run.dir)
    for name in ("progress.jsonl", "result.json", "plan.json"):
        assert read_untrusted(run.dir / name) is None
    # The wrapper's own record took the link's place, and did not follow it.
    assert stat.S_ISREG((run.dir / "exit.json").lstat().st_mode)
    await bench.backend.stop(run.ref)
    assert victim.read_bytes() == before
    with pytest.raises(BackendRejected, match="is a link"):
        await bench.backend.submit(
            replace(
                spec, key=f"{spec.key}-2", run_dir=job / "attempt_2", mounts=(Mount(job, read_only=False),)
            )
        )


async def test_it_can_kill_its_supervisor_and_gains_nothing(bench: BackendBench) -> None:
    text = """
import os, signal, time
open('up', 'w').write('1')
for pid in sorted(int(name) for name in os.listdir('/proc') if name.isdigit()):
    if pid not in (1, os.getpid()):
        try: os.kill(pid, signal.SIGKILL)
        except OSError: pass
time.sleep(1)
"""
    run = await bench.submit(bench.code(text, hostile=True))
    assert (await bench.end_of(run)).phase is RunPhase.ENDED
    assert not marked(bench, run)


async def test_without_a_sandbox_it_does_not_start(open_bench: BackendBench) -> None:
    assert not open_bench.backend.can_sandbox
    spec = open_bench.code("open('ran', 'w').write('x')", hostile=True)
    with pytest.raises(BackendRejected, match="no sandbox: TRAINER_SANDBOX=off"):
        await open_bench.submit(spec)
    await asyncio.sleep(0.1)
    assert not (spec.run_dir / "ran").exists()


async def test_command_lines_on_this_machine_show_no_secret(bench: BackendBench, needle: str) -> None:
    run = await bench.submit(bench.code("import time; open('up', 'w').write('1'); time.sleep(100)"))
    await bench.said(run, "up")
    seen = b""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
                if run.spec.key.encode() in words or str(run.dir).encode() in words:
                    seen += words + (entry / "environ").read_bytes()
            except OSError:
                continue
    assert seen
    assert needle.encode() not in seen
    for path in (*run.dir.rglob("*"), *(bench.data_dir / "backends").rglob("*")):
        with suppress(FileNotFoundError):  # gone meanwhile
            if path.is_file():
                assert needle.encode() not in path.read_bytes(), path
