"""What local processes cannot start here; the command line and the environment of those that start."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from miner.backends.base import AttemptSpec
from miner.backends.environment import TrainingEnvironment
from miner.backends.process import backend as module
from miner.backends.process.backend import ProcessBackend, cores_of, process_environment, wrapper_command
from miner.backends.process.run_registry import RunRegistry
from miner.backends.sandbox import Interpreter, Sandbox
from tests.doubles.backend_bench import context_in

PYTHON = Interpreter(Path(sys.executable), ())


def backend(
    tmp_path: Path, interpreter: Interpreter = PYTHON, sandbox: Sandbox | None = None
) -> ProcessBackend:
    environment = TrainingEnvironment(interpreter, tmp_path, sandbox)
    return ProcessBackend(context_in(tmp_path), environment, RunRegistry(tmp_path), None)


def sandbox(*shown: Path) -> Sandbox:
    return Sandbox(Path("/bwrap"), PYTHON, Path("/hosts"), shown, None, 100)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "app/sd-scripts"
    monkeypatch.setattr(module, "TOOLS", {"image": place})
    return place


async def test_pictures_need_their_own_programs_also_in_the_sandbox(tmp_path: Path, tools: Path) -> None:
    assert str(tools) in (await backend(tmp_path).missing_images())["image"]
    tools.mkdir(parents=True)
    assert await backend(tmp_path).missing_images() == {}
    assert "sandbox" in (await backend(tmp_path, sandbox=sandbox()).missing_images())["image"]
    assert await backend(tmp_path, sandbox=sandbox(tools.parent)).missing_images() == {}


async def test_an_interpreter_that_is_gone_starts_nothing(tmp_path: Path, tools: Path) -> None:
    gone = replace(PYTHON, path=tmp_path / "gone")
    assert set(await backend(tmp_path, gone).missing_images()) == {"text", "image"}


async def test_an_upgrade_of_our_own_code_is_another_identity(tmp_path: Path) -> None:
    source = tmp_path / "checkout" / "trainer"
    (source / "inner").mkdir(parents=True)
    (source / "inner" / "one.py").touch()
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "trainer").symlink_to(source)
    before = await backend(tmp_path / "code").identity("text")
    assert await backend(tmp_path / "code").identity("text") == before
    (source / "inner" / "two.py").touch()
    assert await backend(tmp_path / "code").identity("text") != before


SPEC = AttemptSpec("gm-1-1", ("python", "-m", "trainer.text"), Path("/data/jobs/1/attempt_1"))


def environment(spec: AttemptSpec = SPEC) -> dict[str, str]:
    return process_environment(spec, Path("/env/bin/python"), Path("/code"), "id/gm-1-1", "/home")


def test_the_environment_has_nothing_of_ours_but_what_is_named_and_no_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64")
    variables = environment()
    assert "HF_TOKEN" not in variables
    assert variables["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"
    assert variables["PATH"].startswith("/env/bin:")
    assert variables["CUDA_VISIBLE_DEVICES"] == ""


def test_a_run_cannot_choose_its_gpus_or_its_mark() -> None:
    wanted = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "GOD_MINER_RUN": "x", "HOME": "/mine"}
    spec = AttemptSpec("k", ("a",), Path("/r"), env=wanted, gpus=("GPU-1", "GPU-2"))
    variables = environment(spec)
    assert variables["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert variables["GOD_MINER_RUN"] == "id/gm-1-1"
    assert variables["HOME"] == "/mine"
    assert environment(replace(spec, gpus=("cpu",)))["CUDA_VISIBLE_DEVICES"] == ""


def test_the_wrapper_gets_all_limits() -> None:
    core = min(os.sched_getaffinity(0))
    spec = AttemptSpec("k", ("a", "--dir"), Path("/r"), cpus=f"{core},99999", timeout_s=60)
    words = wrapper_command(
        spec,
        spec.argv,
        ulimits={"core": 0},
        cgroups=(Path("/c/m"), Path("/c/p")),
        oom_files=(Path("/c/m/o"),),
    )
    before, _, after = " ".join(words).partition(" -- ")
    assert after == "a --dir"
    options = ("--dir /r", "--lock-fd 3", "--cgroup /c/m --cgroup /c/p", "--oom-file /c/m/o")
    for option in (*options, "--rlimit core=0", f"--cpus {core}", "--limit-s 60"):
        assert f"{option} " in f"{before} "


def test_cores_that_we_lack_are_left_out() -> None:
    ours = sorted(os.sched_getaffinity(0))
    assert cores_of(None) == []
    assert cores_of("90000-90001") == []
    assert cores_of(f"{ours[0]}-{ours[-1]},90000") == ours
