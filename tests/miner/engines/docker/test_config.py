"""A specification as a container: what Docker is asked for, word by word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner.engines.base import EngineSpec, Mount
from miner.engines.docker.config import House, container, suited

HOUSE = House(
    "0123456789abcdef", Path("/data/engines/wrapper-1.py"), "10002:10002", {"core": 0, "memlock": -1}
)
GPUS = ("GPU-1111", "GPU-2222")


def body(**fields: Any) -> dict[str, Any]:
    given = {
        "key": "gm-7-1",
        "argv": ("python", "-m", "trainer.text"),
        "run_dir": Path("/data/jobs/7/attempt_1"),
    }
    return container(EngineSpec(**{**given, **fields}), "sha256:abc", HOUSE)


def test_the_wrapper_stands_before_the_command() -> None:
    made = body(limit_s=60.0)
    assert made["Image"] == "sha256:abc"
    assert made["Entrypoint"][:4] == ["python3", "-I", "-S", "/data/engines/wrapper-1.py"]
    assert made["Entrypoint"][-3:] == ["--limit-s", "60", "--"]
    assert made["Cmd"] == ["python", "-m", "trainer.text"]
    assert made["WorkingDir"] == "/data/jobs/7/attempt_1"


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


def test_its_own_host_name_resolves_without_a_network() -> None:
    made = body()
    assert made["HostConfig"]["ExtraHosts"] == [f"{made['Hostname']}:127.0.0.1"]


def test_cards_are_asked_for_by_id() -> None:
    made = body(gpus=GPUS)
    (request,) = made["HostConfig"]["DeviceRequests"]
    assert request["DeviceIDs"] == list(GPUS)
    assert "Count" not in request
    assert "NVIDIA_VISIBLE_DEVICES=GPU-1111,GPU-2222" in made["Env"]


@pytest.mark.parametrize("gpus", [(), ("cpu",)])
def test_no_cards_is_no_request_and_never_all_of_them(gpus: tuple[str, ...]) -> None:
    """An empty list of ids would be: whatever the image says."""
    made = body(gpus=gpus, env={"NVIDIA_VISIBLE_DEVICES": "all"})
    assert made["HostConfig"]["DeviceRequests"] == []
    assert [line for line in made["Env"] if line.startswith("NVIDIA_VISIBLE")] == [
        "NVIDIA_VISIBLE_DEVICES=void"
    ]


@given(gpus=st.lists(st.sampled_from(["0", "1", "cpu", "GPU-3"]), unique=True).map(tuple))
def test_a_request_for_devices_is_never_empty(gpus: tuple[str, ...]) -> None:
    for request in body(gpus=gpus)["HostConfig"]["DeviceRequests"]:
        assert request["DeviceIDs"]
        assert all(request["DeviceIDs"])


def test_mounts_are_at_the_same_path_and_made_by_nobody() -> None:
    made = body(mounts=(Mount(Path("/data/models")), Mount(Path("/data/out"), read_only=False)))
    mounts = {mount["Source"]: mount for mount in made["HostConfig"]["Mounts"]}
    assert all(mount["Target"] == source and mount["Type"] == "bind" for source, mount in mounts.items())
    assert {source for source, mount in mounts.items() if not mount["ReadOnly"]} == {
        "/data/jobs/7/attempt_1",
        "/data/out",
    }
    assert mounts["/data/engines/wrapper-1.py"]["ReadOnly"]


def test_limits_are_those_of_the_plan() -> None:
    host = body(memory_bytes=1 << 36, shm_bytes=1 << 34, cpus="0-31")["HostConfig"]
    assert host["Memory"] == host["MemorySwap"] == 1 << 36
    assert (host["ShmSize"], host["CpusetCpus"]) == (1 << 34, "0-31")
    assert {"Name": "memlock", "Soft": -1, "Hard": -1} in host["Ulimits"]
    bare = body()["HostConfig"]
    assert not {"Memory", "ShmSize", "CpusetCpus"} & set(bare)


def test_labels_say_whose_it_is_and_can_not_be_overridden() -> None:
    made = body(labels={"job": "7", "key": "another", "data": "another", "run-dir": "/etc"})
    assert made["Labels"] == {
        "god-miner.job": "7",
        "god-miner.key": "gm-7-1",
        "god-miner.data": "0123456789abcdef",
        "god-miner.run-dir": "/data/jobs/7/attempt_1",
    }


def test_the_run_s_own_variables_win_over_ours_but_for_cards_and_mark() -> None:
    lines = body(env={"HOME": "/data/home", "GOD_MINER_RUN": "x", "A": "b=c"})["Env"]
    env = dict(line.split("=", 1) for line in lines)
    assert (env["HOME"], env["A"]) == ("/data/home", "b=c")
    assert env["GOD_MINER_RUN"] == "0123456789abcdef/gm-7-1"


def test_it_can_be_sent() -> None:
    assert json.loads(json.dumps(body(gpus=GPUS)))["HostConfig"]["Init"] is True


def test_the_house_suits_the_engine() -> None:
    rootless = suited(HOUSE, {"SecurityOptions": ["name=seccomp,profile=default", "name=rootless"]})
    assert rootless.user == "0:0"
    plain = suited(HOUSE, {"SecurityOptions": None, "MemTotal": 1000})
    assert (plain.user, plain.memory_bytes) == ("10002:10002", 900)
    assert suited(HOUSE, {}) == HOUSE
    remapped = suited(HOUSE, {"SecurityOptions": ["name=userns", "name=selinux"]})
    host = container(EngineSpec("k", ("a",), Path("/r")), "i", remapped)["HostConfig"]
    assert host["UsernsMode"] == "host"
    assert host["SecurityOpt"] == ["no-new-privileges:true", "label=disable"]
