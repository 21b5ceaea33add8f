"""The command line and the environment of a local run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from miner.engines.base import EngineSpec
from miner.engines.process import launch

SPEC = EngineSpec("gm-1-1", ("python", "-m", "trainer.text"), Path("/data/jobs/1/attempt_1"))


def environment(spec: EngineSpec = SPEC) -> dict[str, str]:
    return launch.process_environment(spec, Path("/env/bin/python"), Path("/code"), "id/gm-1-1", "/home")


def test_nothing_of_ours_is_passed_on_but_what_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64")
    found = environment()
    assert "HF_TOKEN" not in found
    assert found["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"


def test_programs_of_the_training_environment_come_first() -> None:
    assert environment()["PATH"].startswith("/env/bin:")


def test_a_run_cannot_choose_its_gpus_or_its_mark() -> None:
    wanted = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "GOD_MINER_RUN": "x", "HOME": "/mine"}
    spec = EngineSpec("k", ("a",), Path("/r"), env=wanted, gpus=("GPU-1", "GPU-2"))
    found = environment(spec)
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert found["GOD_MINER_RUN"] == "id/gm-1-1"
    assert found["HOME"] == "/mine"


def test_a_run_on_the_cpu_sees_no_gpu() -> None:
    assert environment()["CUDA_VISIBLE_DEVICES"] == ""
    assert environment(EngineSpec("k", ("a",), Path("/r"), gpus=("cpu",)))["CUDA_VISIBLE_DEVICES"] == ""


def test_the_wrapper_gets_all_limits() -> None:
    core = min(os.sched_getaffinity(0))
    spec = EngineSpec("k", ("a", "--dir"), Path("/r"), cpus=f"{core},99999", timeout_s=60)
    words = launch.wrapper_command(
        spec,
        spec.argv,
        ulimits={"core": 0},
        cgroups=(Path("/c/m"), Path("/c/p")),
        oom_files=(Path("/c/m/o"),),
    )
    before, _, after = " ".join(words).partition(" -- ")
    assert after == "a --dir"
    for option in (
        "--dir /r",
        "--lock-fd 3",
        "--cgroup /c/m --cgroup /c/p",
        "--oom-file /c/m/o",
        "--rlimit core=0",
    ):
        assert option in before
    assert f"--cpus {core} " in f"{before} "
    assert "--limit-s 60" in before


def test_cores_that_we_lack_are_left_out() -> None:
    ours = sorted(os.sched_getaffinity(0))
    assert launch.cores_of(None) == []
    assert launch.cores_of("90000-90001") == []
    assert launch.cores_of(f"{ours[0]}-{ours[-1]},90000") == ours
