"""A specification as the request that creates a container, and the status of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from miner.backends.base import START_FILE, AttemptSpec, EndCause, Mount, RunPhase
from miner.backends.docker.container import (
    ContainerDefaults,
    adapt_defaults,
    container_body,
    container_status,
    never_started,
    parse_docker_time,
    start_was_interrupted,
)
from tests.doubles.each import each

DEFAULTS = ContainerDefaults(
    "0123456789abcdef", Path("/data/backends/wrapper-1.py"), "10002:10002", {"core": 0, "memlock": -1}
)
GPUS = ("GPU-1111", "GPU-2222")


def body(**fields: Any) -> dict[str, Any]:
    given = {
        "key": "gm-7-1",
        "argv": ("python", "-m", "trainer.text"),
        "run_dir": Path("/data/jobs/7/attempt_1"),
    }
    return container_body(AttemptSpec(**{**given, **fields}), "sha256:abc", DEFAULTS)


def test_the_wrapper_stands_before_the_command() -> None:
    container = body(timeout_s=60.0)
    assert container["Image"] == "sha256:abc"
    assert container["Entrypoint"][:4] == ["python3", "-I", "-S", "/data/backends/wrapper-1.py"]
    assert container["Entrypoint"][-3:] == ["--limit-s", "60", "--"]
    assert container["Cmd"] == ["python", "-m", "trainer.text"]
    assert container["WorkingDir"] == "/data/jobs/7/attempt_1"


def test_it_is_closed_off() -> None:
    host = body()["HostConfig"]
    assert host["NetworkMode"] == "none"
    assert (host["CapDrop"], host.get("CapAdd")) == (["ALL"], None)
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["ReadonlyRootfs"]
    assert not host["Privileged"]
    assert host["PidMode"] == ""
    assert host["IpcMode"] == "private"
    assert host["PidsLimit"] == 16384
    assert "Binds" not in host


def test_gpus_are_requested_by_id() -> None:
    container = body(gpus=GPUS)
    (request,) = container["HostConfig"]["DeviceRequests"]
    assert request["DeviceIDs"] == list(GPUS)
    assert "Count" not in request
    assert "NVIDIA_VISIBLE_DEVICES=GPU-1111,GPU-2222" in container["Env"]


@pytest.mark.parametrize("gpus", [(), ("cpu",)])
def test_without_gpus_there_is_no_device_request_and_never_all(gpus: tuple[str, ...]) -> None:
    """An empty list of ids would be: whatever the image says."""
    container = body(gpus=gpus, env={"NVIDIA_VISIBLE_DEVICES": "all"})
    assert container["HostConfig"]["DeviceRequests"] == []
    assert [line for line in container["Env"] if line.startswith("NVIDIA_VISIBLE")] == [
        "NVIDIA_VISIBLE_DEVICES=void"
    ]


def test_mounts_are_at_the_same_path_and_made_by_nobody() -> None:
    container = body(mounts=(Mount(Path("/data/models")), Mount(Path("/data/out"), read_only=False)))
    mounts = {mount["Source"]: mount for mount in container["HostConfig"]["Mounts"]}
    assert all(mount["Target"] == source and mount["Type"] == "bind" for source, mount in mounts.items())
    assert {source for source, mount in mounts.items() if not mount["ReadOnly"]} == {
        "/data/jobs/7/attempt_1",
        "/data/out",
    }
    assert mounts["/data/backends/wrapper-1.py"]["ReadOnly"]


def test_limits_are_those_of_the_plan() -> None:
    host = body(memory_bytes=1 << 36, shm_bytes=1 << 34, cpus="0-31")["HostConfig"]
    assert host["Memory"] == host["MemorySwap"] == 1 << 36
    assert (host["ShmSize"], host["CpusetCpus"]) == (1 << 34, "0-31")
    assert {"Name": "memlock", "Soft": -1, "Hard": -1} in host["Ulimits"]
    bare = body()["HostConfig"]
    assert not {"Memory", "ShmSize", "CpusetCpus"} & set(bare)


def test_labels_name_the_owner_and_cannot_be_overridden() -> None:
    container = body(labels={"job": "7", "key": "another", "data": "another", "run-dir": "/etc"})
    assert container["Labels"] == {
        "god-miner.job": "7",
        "god-miner.key": "gm-7-1",
        "god-miner.data": "0123456789abcdef",
        "god-miner.run-dir": "/data/jobs/7/attempt_1",
    }


def test_the_run_s_variables_win_except_gpus_and_mark() -> None:
    lines = body(env={"HOME": "/data/home", "GOD_MINER_RUN": "x", "A": "b=c"})["Env"]
    env = dict(line.split("=", 1) for line in lines)
    assert (env["HOME"], env["A"]) == ("/data/home", "b=c")
    assert env["GOD_MINER_RUN"] == "0123456789abcdef/gm-7-1"


def test_the_defaults_are_adapted_to_docker() -> None:
    rootless = adapt_defaults(
        DEFAULTS, {"SecurityOptions": ["name=seccomp,profile=default", "name=rootless"]}
    )
    assert rootless.user == "0:0"
    plain = adapt_defaults(DEFAULTS, {"SecurityOptions": None, "MemTotal": 1000})
    assert (plain.user, plain.memory_bytes) == ("10002:10002", 900)
    assert adapt_defaults(DEFAULTS, {}) == DEFAULTS
    remapped = adapt_defaults(DEFAULTS, {"SecurityOptions": ["name=userns", "name=selinux"]})
    host = container_body(AttemptSpec("k", ("a",), Path("/r")), "i", remapped)["HostConfig"]
    assert host["UsernsMode"] == "host"
    assert host["SecurityOpt"] == ["no-new-privileges:true", "label=disable"]


NEVER = "0001-01-01T00:00:00Z"
AT = "2026-01-02T03:04:05.123456789Z"


def inspected(status: str, **state: Any) -> dict[str, Any]:
    return {
        "State": {"Status": status, "StartedAt": AT, "FinishedAt": NEVER, "ExitCode": 0, "Error": "", **state}
    }


@pytest.mark.parametrize(
    ("name", "detail"),
    [("running", ""), ("paused", "docker unpause"), ("restarting", "starts the container")],
)
def test_what_goes_on_runs(name: str, detail: str, tmp_path: Path) -> None:
    status = container_status(inspected(name), tmp_path)
    assert status.phase is RunPhase.RUNNING
    assert status.started_at == pytest.approx(1767323045.123456)
    assert detail in status.detail
    assert bool(status.detail) is (name != "running")


ENDED, FAILED = RunPhase.ENDED, EndCause.FAILED


@each(
    ("state", "phase", "why", "code", "detail"),
    [
        *(
            (inspected(name, ExitCode=7, FinishedAt=AT), ENDED, FAILED, 7, "exit code 7")
            for name in ("exited", "dead", "removing")
        ),
        (
            inspected("exited", ExitCode=137, OOMKilled=True),
            ENDED,
            EndCause.OOM_KILLED,
            137,
            "memory ran out",
        ),
        # A part of it was killed, and it came to a good end all the same.
        (inspected("exited", ExitCode=0, OOMKilled=True), ENDED, EndCause.OK, 0, ""),
        (inspected("created", StartedAt=NEVER), RunPhase.QUEUED, None, None, "not started yet"),
        (inspected("created", StartedAt=NEVER, ExitCode=128, Error="no GPU"), ENDED, FAILED, 128, "no GPU"),
        ({}, ENDED, EndCause.OK, 0, ""),
    ],
)
def test_a_container_that_does_not_run_has_a_reason(
    state: dict[str, Any],
    phase: RunPhase,
    why: EndCause | None,
    code: int | None,
    detail: str,
    tmp_path: Path,
) -> None:
    status = container_status(state, tmp_path)
    assert (status.phase, status.why, status.code) == (phase, why, code)
    assert detail in status.detail
    finished = state.get("State", {}).get("FinishedAt") == AT
    assert status.ended_at == (pytest.approx(1767323045.123456) if finished else None)
    assert phase is not RunPhase.QUEUED or never_started(state)


def test_what_started_without_docker_s_knowledge_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / START_FILE).write_text(json.dumps({"at": 1.0}))
    created = inspected("created", StartedAt=NEVER)
    assert start_was_interrupted(created, tmp_path)
    status = container_status(created, tmp_path)
    assert status.phase is RunPhase.LOST
    assert "Docker died" in status.detail


@each(
    ("text", "seconds"),
    [
        (AT, 1767323045.123456),
        ("2026-01-02T03:04:05Z", 1767323045.0),
        ("2026-01-02T04:04:05.1+01:00", 1767323045.1),
        (NEVER, None),
        ("", None),
        ("soon", None),
        (None, None),
    ],
)
def test_docker_times_are_read(text: object, seconds: float | None) -> None:
    assert parse_docker_time(text) == (None if seconds is None else pytest.approx(seconds))
