"""`god-miner plan` from the outside."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from click.testing import Result
from typer.testing import CliRunner

from core.domain.errors import ConfigError
from core.domain.hardware import UnknownGpu, parse_gpus
from core.planning.plan import TrainingPlan
from miner.cli.plan import plan
from miner.fleet.sources import FixedGpuSource
from tests.doubles.each import each

pytestmark = pytest.mark.process


app = typer.Typer(pretty_exceptions_enable=False)
app.command()(plan)

LLAMA = ("--model", "meta-llama/Llama-3.1-8B")
HERE = (*LLAMA, "--task-type", "instruct", "--hours", "3", "--rows", "20000")
TASK = ("--gpus", "4xH100", *HERE)


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where NVML finds no GPU, without a process that looks."""
    look = FixedGpuSource(parse_gpus("cpu"), "no NVIDIA driver")
    monkeypatch.setattr("miner.backends.build_fleet.build_gpu_source", lambda _gpus, _nvml: look)


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


def test_memory_timeline_concessions_and_configuration_are_shown() -> None:
    found = _run(*TASK, "--gpus", "4xH100")
    assert found.exit_code == 0
    for line in (
        "feasible: 4xH100-SXM of 4xH100-SXM",
        "On fewer GPUs",
        "Memory of one GPU, at its worst",
        "activations",
        "budget",
        "Timeline",
        "deadline",
        "micro_batch_size 32 → 2: ",
        "axolotl configuration, against the template",
        "lora_r",
    ):
        assert line in found.output
    table = found.output.partition("On fewer GPUs")[2].split("Memory of one GPU")[0].splitlines()
    assert [line.split()[0] for line in table if line[:1].isdigit()] == ["4", "2", "1"]
    assert "█" in found.output


def test_the_plan_is_for_the_host_and_by_the_profile_of_the_daemon_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rule: what FLEET_FILE and `.env` say of the host and of profiles counts here too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.yaml").write_text("gpus: 4xH100\nhost: {cpu_cores: 64, memory: 384GB}\n")
    (tmp_path / "own").mkdir()
    (tmp_path / ".env").write_text(f"FLEET_FILE={tmp_path}/fleet.yaml\nPROFILE_DIR={tmp_path}/own\n")
    found = _run(*HERE).output
    assert "host: 4xH100-SXM, 64 cores, 384.0 GB (this host)" in found
    assert "profile h100x4 is in force, because policy h100x4 names it and PROFILE is auto" in found
    assert "dataloader_num_workers 64 → 16: 16 cores and 96.0 GB of the host for each process" in found
    assert "container.memory 400.0 GB → 364.8 GB" in found
    assert "loss below 0.064, 15 % better than the base" in found
    more = _run(*TASK, "--cpu-cores", "256", "--memory", "2TB").output
    assert "host: 4xH100-SXM, 256 cores, 2000.0 GB" in more
    assert "profile h100x4 would be in force there, because" in more
    (tmp_path / "own" / "h100x4.yaml").write_text("extends: h100x4\ntargets: {lora_r: 48}\n")
    assert TrainingPlan.from_json(_run(*HERE, "--json").stdout).adapter.rank == 48  # type: ignore[union-attr]
    other = _run(*HERE, "--profile", "steady").output
    assert "profile steady is not in force; h100x4 is, because" in other
    assert "PROFILE=steady chooses it" in other


def test_written_files_are_what_an_attempt_would_get(tmp_path: Path) -> None:
    found = _run(*TASK, "--write", str(tmp_path / "out"))
    assert found.exit_code == 0
    config = yaml.safe_load((tmp_path / "out" / "config.yml").read_text(encoding="utf-8"))
    written = TrainingPlan.from_json((tmp_path / "out" / "plan.json").read_text(encoding="utf-8"))
    assert config["micro_batch_size"] == written.batch.micro
    assert config["max_steps"] == written.steps.total
    script = (tmp_path / "out" / "run.sh").read_text(encoding="utf-8")
    assert "accelerate launch --multi_gpu --num_processes 4" in script


def test_a_refusal_says_why_and_exits_with_one(tmp_path: Path) -> None:
    found = _run("--model", "x-405b", "--task-type", "dpo", "--hours", "1", "--write", str(tmp_path))
    assert found.exit_code == 1
    assert "refused (no_memory)" in found.output
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


@each(
    ("arguments", "said"),
    [
        (("--model", "who/knows", "--task-type", "instruct", "--hours", "3"), "unknown_size"),
        (("--model", "x", "--params", "1000T", "--task-type", "chat", "--hours", "3"), "absurd_size"),
        ((*LLAMA, "--task-type", "chat", "--hours", "0"), "no_time"),
        ((*LLAMA, "--task-type", "grpo", "--hours", "-1"), "no_time"),
        ((*LLAMA, "--task-type", "dpo", "--hours", "nan"), "no_time"),
        ((*LLAMA, "--task-type", "InstructTextTask", "--hours", "3", "--rows", "0"), "empty_dataset"),
    ],
)
def test_bad_numbers_are_refusals_and_no_tracebacks(arguments: tuple[str, ...], said: str) -> None:
    found = _run(*arguments)
    assert found.exit_code == 1
    assert said in found.output


@each(
    ("arguments", "error", "said"),
    [
        ((*LLAMA, "--task-type", "essay", "--hours", "3"), ConfigError, "instruct, chat"),
        ((*LLAMA, "--task-type", "chat", "--hours", "3", "--gpus", "4xFridge"), UnknownGpu, "Fridge"),
        ((*LLAMA, "--task-type", "chat", "--hours", "3", "--params", "many"), ConfigError, "13B"),
        ((*LLAMA, "--task-type", "chat", "--hours", "3", "--profile", "nosuch"), ConfigError, "nosuch"),
        (
            ("--model", "x", "--task-type", "image", "--hours", "1", "--image-type", "vga"),
            ConfigError,
            "sdxl",
        ),
    ],
)
def test_slips_are_shown_with_the_way_out(
    arguments: tuple[str, ...], error: type[Exception], said: str
) -> None:
    found = _run(*arguments)
    assert isinstance(found.exception, error)
    assert said in str(found.exception)


@pytest.mark.parametrize("kind", ["sdxl", "flux", "z-image"])
def test_pictures_are_planned_too(kind: str) -> None:
    found = _run("--model", f"some/{kind}", "--task-type", "image", "--hours", "1", "--rows", "20")
    assert found.exit_code == 0
    assert "configuration, against the template" in found.output


def test_a_tournaments_plan_of_pictures_fits_a_narrow_terminal() -> None:
    task = ["--model", "org/krea2", "--task-type", "image", "--hours", "1", "--rows", "20", "--tournament"]
    found = CliRunner().invoke(app, task, env={"COLUMNS": "80"})
    lines = [line.rstrip() for line in found.output.splitlines()]
    table = lines[lines.index("Timeline") :]
    reserve, deadline = (next(line for line in table if word in line) for word in ("reserve", "deadline"))
    assert reserve.split() == ["reserve", "59", "min", "30", "s", "30", "s", "kept", "free"]
    assert "pictures/s" in deadline
    bars = [line for line in lines if "█" in line]
    assert all(line.strip(" █") for line in bars)  # none goes on in a second line
    assert "precision.gradient_checkpointing  off" in found.output
    assert "engine                            pictures" in found.output


def _file(folder: Path, text: str) -> str:
    path = folder / "rows.json"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_dataset_file_is_counted_and_measured(tmp_path: Path) -> None:
    rows = [{"instruct": "word " * (n % 400 + 20), "output": "answer " * 30} for n in range(3000)]
    found = _run(*TASK[:-2], "--dataset", _file(tmp_path, json.dumps(rows)), "--json")
    data = TrainingPlan.from_json(found.stdout).data
    assert data.rows == 3000
    assert 1000 <= data.sampled_rows <= 3000
    assert 400 < data.prompt.max < 700
    lines = '{"instruct": "a", "output": "b"}\n\n{"instruct": "c", "output": "d"}\n'
    found = _run(*TASK[:-2], "--dataset", _file(tmp_path, lines), "--json")
    assert TrainingPlan.from_json(found.stdout).data.rows == 2
    assert "empty_dataset" in _run(*TASK[:-2], "--dataset", _file(tmp_path, "[]")).output


@each("text", ["[1, 2]", "{broken", '["unclosed', "nonsense", "[" * 100_000])
def test_a_file_that_is_no_dataset_is_distinguished(tmp_path: Path, text: str) -> None:
    found = _run(*TASK[:-2], "--dataset", _file(tmp_path, text))
    assert isinstance(found.exception, ConfigError)


def test_a_model_folder_is_read_from_its_config(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen2",
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    arguments = ("--model", str(tmp_path), "--task-type", "chat", "--hours", "1", "--json")
    found = TrainingPlan.from_json(_run(*arguments).stdout)
    assert found.model.params_total == pytest.approx(494e6, rel=0.01)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    assert isinstance(_run(*arguments).exception, ConfigError)


def test_the_command_starts_without_loading_the_planner() -> None:
    heavy = "{'core.planning.planner', 'rich.table'} & set(sys.modules)"
    code = f"import sys, miner.cli.plan; sys.exit(bool({heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_against_another_profile_only_what_differs_is_shown(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: h100x4\ntargets: {lora_r: 64, ema_decay: 0.9}\n")
    mine = (*TASK, "--dir", str(tmp_path), "--profile", "mine")
    assert "mine.yaml:2" in _run(*mine).output
    shown = _run(*mine, "--against", "h100x4").output
    for words in (
        r"configuration\s+lora_r\s+512\s+64",
        r"memory\s+optimizer",
        r"memory\s+total",
        r"time\s+train",
    ):
        assert re.search(words, shown), words
    assert "learning_rate" not in shown
    assert "B GB" not in shown
    changed = json.loads(_run(*mine, "--against", "h100x4", "--json").stdout)
    memory = {one["what"]: one for one in changed if one["part"] == "memory"}
    assert list(memory)[-2:] == ["average", "total"]
    assert memory["optimizer"]["before"] > 4 * memory["optimizer"]["after"]
    assert {"part": "configuration", "what": "lora_r", "before": 512, "after": 64} in changed
    assert {one["part"] for one in changed} == {"configuration", "memory", "time"}


def test_against_an_earlier_plan_an_edited_profile_shows_its_effect(tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    mine = (*TASK, "--profile", str(profile))
    profile.write_text("extends: h100x4\n", encoding="utf-8")
    _run(*mine, "--write", str(tmp_path / "before"))
    same = _run(*mine, "--against", str(tmp_path / "before" / "plan.json"))
    assert "nothing changes" in same.output
    profile.write_text("extends: h100x4\ntargets: {num_epochs: 2}\n", encoding="utf-8")
    shown = _run(*mine, "--against", str(tmp_path / "before" / "plan.json")).output
    assert re.search(r"configuration\s+num_epochs\s+[\d.]+\s+2.0", shown)
    assert re.search(r"time\s+train", shown)


@pytest.mark.parametrize("content", [None, "{}", "nonsense"])
def test_against_a_file_that_is_no_plan_is_reported(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    found = _run(*TASK, "--against", str(path))
    assert isinstance(found.exception, ConfigError)
    assert "--against" in str(found.exception)


@pytest.mark.parametrize(
    ("word", "model", "host"),
    [
        ("instruct", "meta-llama/Llama-3.2-3B", "1xH100-SXM, 24 cores, 118.1 GB"),
        ("instruct-kl", "meta-llama/Llama-3.2-3B", "2xH100-SXM, 48 cores, 236.2 GB"),
        ("instruct-large", "Qwen/Qwen2.5-72B", "8xH100-SXM, 192 cores, 944.9 GB"),
        ("dpo", "meta-llama/Llama-3.2-3B", "2xH100-SXM, 48 cores, 236.2 GB"),
        ("DpoTask", "meta-llama/Llama-3.1-8B", "4xH100-SXM, 96 cores, 472.4 GB"),
        ("continuous", "Qwen/Qwen3-14B", "4xH100-SXM, 96 cores, 472.4 GB"),
        ("krea2", "some/krea2", "1xH100-SXM, 24 cores, 118.1 GB"),
    ],
)
def test_a_tournaments_task_is_planned_for_the_gpus_that_validators_give(
    word: str, model: str, host: str
) -> None:
    found = _run("--tournament", "--model", model, "--task-type", word, "--hours", "4")
    assert found.exit_code == 0
    assert f"host: {host}\n" in found.stdout


def test_kinds_that_tournaments_do_not_have_are_refused_with_those_that_they_have() -> None:
    found = _run("--tournament", "--model", "some/sdxl", "--task-type", "image", "--hours", "1")
    assert isinstance(found.exception, ConfigError)
    assert "instruct-large" in found.exception.problems[0].rule
