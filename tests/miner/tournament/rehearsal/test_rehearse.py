"""Rehearsals by a real Docker Engine, of small entries: how they are run, how they end, what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from miner.backends.docker.client import DockerClient
from miner.tournament.rehearsal.cache_layout import BadInput
from miner.tournament.rehearsal.container import run_helper
from miner.tournament.rehearsal.inputs import RehearsalInputs, RehearsalOptions
from miner.tournament.rehearsal.rehearse import rehearse
from miner.tournament.rehearsal.report import Rehearsal, TaskRehearsal, report_lines
from miner.tournament.rules import TASKS
from tests.doubles import base_image
from tests.doubles.dockerd import Dockerd
from tests.miner.tournament.rehearsed_entries import make_entry

pytestmark = [
    pytest.mark.docker,
    pytest.mark.usefixtures("unread_replies_collected"),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "flux.safetensors").write_bytes(b"weights")
    return folder


def rehearsed(
    docker_host: Dockerd, tmp_path: Path, model: Path, word: str, hours: float = 1.0, **more: Any
) -> Rehearsal:
    entry = make_entry(tmp_path / "entry")
    options = RehearsalOptions(
        output=tmp_path / "out",
        tasks=[TASKS["flux"]],
        inputs={"flux": RehearsalInputs(model, "org/flux")},
        hours=hours,
        trigger_word=word,
        build_network="none",
        **more,
    )
    with closing(DockerClient(docker_host.host)) as client:
        return rehearse(client, str(entry), options)


def only(report: Rehearsal) -> TaskRehearsal:
    (task,) = report.tasks
    return task


def log_of(tmp_path: Path, number: int = 1) -> str:
    return (tmp_path / f"out/flux/log-{number}.txt").read_text()


def held(docker_host: Dockerd) -> set[str]:
    """The ids and names of what a rehearsal may forget in Docker, which other tests use too."""
    with docker_host.client() as client:
        api = client.api
        volumes = {one["Name"] for one in api.volumes()["Volumes"] or []}
        found = (*api.images(all=True), *api.networks(), *api.containers(all=True))
        return {one["Id"] for one in found} | volumes


def test_a_container_has_what_validators_give_and_nothing_else(
    docker_host: Dockerd, tmp_path: Path, model: Path
) -> None:
    before = held(docker_host)
    report = rehearsed(docker_host, tmp_path, model, "look")
    line = next(line for line in log_of(tmp_path).splitlines() if line.startswith("found "))
    found = json.loads(line.removeprefix("found "))
    assert (found["capabilities"], found["no_new_privileges"]) == (0, 1)
    assert not found["cache_writable"]
    # None, or the bridge that leads nowhere.
    assert set(found["interfaces"]) <= {"lo", "eth0"}
    assert found["shared_memory"] == 8 * 2**30
    assert found["environment"] == [
        "HF_HOME",
        "HUGGINGFACE_TOKEN",
        "HUGGINGFACE_USERNAME",
        "TRANSFORMERS_CACHE",
    ]
    task_id = found["arguments"][1]
    assert found["arguments"][2:4] == ["--model", "org/flux"]
    assert "/cache/models/org--flux/flux.safetensors" in found["cache"]
    assert f"/cache/datasets/{task_id}_tourn.zip" in found["cache"]
    task = only(report)
    assert task.attempts[0].exit_code == 0
    assert task.uploaded == ["checkpoints/last.safetensors"]
    assert task.score is None
    assert any("the image has no scorer of ours" in text for text in task.deviations)
    assert any("no GPU" in text for text in task.deviations)
    assert any("base images were here already" in text for text in task.deviations)
    assert held(docker_host) <= before
    assert not (tmp_path / "out/flux/cache").exists()


def test_a_training_is_killed_at_its_limit_and_what_is_there_is_uploaded(
    docker_host: Dockerd, tmp_path: Path, model: Path
) -> None:
    task = only(rehearsed(docker_host, tmp_path, model, "forever", hours=5 / 3600))
    (end,) = task.attempts
    assert end.timed_out
    assert end.exit_code == 128 + signal.SIGKILL
    assert end.seconds >= 4.9
    assert task.uploaded


def test_a_good_model_with_an_exit_code_is_a_failure_after_two_attempts(
    docker_host: Dockerd, tmp_path: Path, model: Path
) -> None:
    report = rehearsed(docker_host, tmp_path, model, "crash")
    task = only(report)
    assert [end.exit_code for end in task.attempts] == [3, 3]
    assert not task.passed
    assert not report.passed
    assert "exit code 3: nothing is uploaded although something is there" in task.problems[0]
    assert not task.uploaded
    assert "FAILED" in "\n".join(report_lines(report))


def test_a_second_attempt_finds_what_the_first_one_left(
    docker_host: Dockerd, tmp_path: Path, model: Path
) -> None:
    task = only(rehearsed(docker_host, tmp_path, model, "second"))
    assert [end.exit_code for end in task.attempts] == [3, 0]
    assert task.uploaded
    assert "attempt 1 ended with exit code 3" in task.warnings[0]


def test_a_secret_in_the_public_log_is_a_failure_and_the_plan_a_warning(
    docker_host: Dockerd, tmp_path: Path, model: Path
) -> None:
    task = only(rehearsed(docker_host, tmp_path, model, "leak"))
    assert any("the public log shows a secret" in text for text in task.problems)
    assert any("shows competitors how it is trained" in text and "lora_r" in text for text in task.warnings)
    assert not any("hf_" in text for text in (*task.problems, *task.warnings))


def test_one_more_training_is_killed_after_its_first_submission(
    docker_host: Dockerd, tmp_path: Path, model: Path
) -> None:
    task = only(rehearsed(docker_host, tmp_path, model, "forever", hours=5 / 3600, kill=True))
    assert task.kill.problem is None
    assert task.passed
    assert not (tmp_path / "out/flux/killed").exists()


def test_a_training_that_ends_before_its_kill_proves_nothing(
    docker_host: Dockerd, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kill comes long after the end, however slowly the container ends.
    monkeypatch.setattr("miner.tournament.rehearsal.rehearse.random.uniform", lambda _low, _high: 600.0)
    task = only(rehearsed(docker_host, tmp_path, model, "submit", kill=True))
    assert task.kill.problem == "the training had ended before its kill: give it more time"
    assert not task.passed
    assert not (tmp_path / "out/flux/killed").exists()


def test_a_helper_has_no_rights_but_to_the_files_that_it_is_given(
    docker_host: Dockerd, tmp_path: Path
) -> None:
    code = "import re; print(re.findall(r'(CapEff|NoNewPrivs):\\s*(\\w+)', open('/proc/self/status').read()))"
    with closing(DockerClient(docker_host.host)) as client:
        ended, said = run_helper(client, base_image.NAME, ["python", "-c", code], tmp_path, as_root=True)
    assert ended == 0
    # Another owner's files: CHOWN and DAC_OVERRIDE.
    assert said.strip() == "[('CapEff', '0000000000000003'), ('NoNewPrivs', '1')]"


def test_an_image_that_is_not_built_fails_its_task_and_is_cleared_away(
    docker_host: Dockerd, tmp_path: Path, model: Path
) -> None:
    make_entry(
        tmp_path / "entry",
        {
            f"dockerfiles/{TASKS['flux'].dockerfile}": f"FROM {base_image.NAME}\nENV A=1\nRUN false\n",
        },
    )
    options = RehearsalOptions(
        output=tmp_path / "out",
        tasks=[TASKS["flux"]],
        inputs={"flux": RehearsalInputs(model, "org/flux")},
        build_network="none",
    )
    before = held(docker_host)
    with closing(DockerClient(docker_host.host)) as client:
        report = rehearse(client, str(tmp_path / "entry"), options)
    assert "the image is not built" in only(report).problems[0]
    assert not only(report).attempts
    assert held(docker_host) <= before


def test_pictures_need_a_model(docker_host: Dockerd, tmp_path: Path) -> None:
    options = RehearsalOptions(output=tmp_path / "out", tasks=[TASKS["krea2"]])
    with closing(DockerClient(docker_host.host)) as client, pytest.raises(BadInput, match="--model krea2="):
        rehearse(client, str(tmp_path), options)


def test_a_refused_entry_leaves_no_directory(docker_host: Dockerd, tmp_path: Path, model: Path) -> None:
    options = RehearsalOptions(output=tmp_path / "outputs/one", tasks=[TASKS["chat"]])
    entry = make_entry(tmp_path / "entry")
    with closing(DockerClient(docker_host.host)) as client, pytest.raises(BadInput, match="no Dockerfile"):
        rehearse(client, str(entry), options)
    assert list((tmp_path / "outputs").iterdir()) == []


@pytest.mark.kept("2")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_rehearsal_leaves_nothing_behind(
    docker_host: Dockerd, tmp_path: Path, model: Path, sent: signal.Signals
) -> None:
    before = held(docker_host)
    entry = make_entry(tmp_path / "entry")
    command = [sys.executable, "-m", "miner", "tournament", "rehearse", str(entry), "--task", "flux"]
    command += ["--model", str(model), "--trigger-word", "forever", "--build-network", "none"]
    command += ["--gpu", "none", "--output", str(tmp_path / "out")]
    environment = {**os.environ, "DOCKER_HOST": docker_host.host, "DATA_DIR": str(tmp_path / "data")}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process.stderr as said:
        for line in said:
            if "stage: train" in line:
                process.send_signal(sent)
                break
        rest = said.read()
    assert process.wait() != 0, rest
    assert held(docker_host) <= before
