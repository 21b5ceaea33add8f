"""The folder of a run, out of a few words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.domain.choices import Engine, Method
from core.domain.errors import ConfigError
from core.domain.tasks import ChatDataset, DpoDataset, InstructDataset, TaskType
from core.models.identify import facts_from_name
from core.profile.resolve import load_profile, resolve_profile
from core.runs.progress import ProgressEvent
from core.runs.run_files import RunSpec
from miner.jobs import native_runs
from miner.jobs.native_runs import NativeMode, NativeRunOptions, dataset_of, make_run, parse_pairs, resume_run


def rows(folder: Path, *found: dict[str, Any]) -> Path:
    path = folder / "rows.json"
    path.write_text(json.dumps(list(found)))
    return path


def wishes(folder: Path, **changes: Any) -> NativeRunOptions:
    model = folder / "base"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    data = rows(folder, {"instruction": "a", "output": "b"})
    whole = {"mode": NativeMode.SFT, "model": model, "data": data, "hours": 2.0, "profile": "cpu-demo"}
    return NativeRunOptions(**{**whole, **changes})


def test_a_run_says_all_that_the_trainer_needs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", wishes(tmp_path, kl=0.5))
    assert RunSpec.from_json((tmp_path / "run/run.json").read_bytes()) == run
    assert (run.task_type, run.kl_coefficient) == (TaskType.INSTRUCT, 0.5)
    assert run.deadline_at - run.began_at == pytest.approx(7200)
    assert run.deadline_at - run.end_by == pytest.approx(60)
    assert Path(run.submission_dir).parent == Path(run.work_dir).parent == tmp_path / "run"


def test_wishes_become_a_profile_that_extends_the_named_one(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text("extends: cpu-demo\ntargets: {lora_r: 4}\n")
    changes = {"targets": {"learning_rate": 3e-4}, "settings": {"tensorboard": True}}
    make_run(tmp_path / "run", wishes(tmp_path, profile=str(own), **changes))
    layers = load_profile(str(tmp_path / "run/profile.yaml")).layers
    assert [layer.name for layer in layers][-3:] == ["cpu-demo", "mine", "profile"]
    section = layers[-1].content.sections["this-run"]
    assert (section.targets.engine, section.targets.learning_rate) == (Engine.NATIVE, 3e-4)
    assert section.engine_config.native == {"tensorboard": True}


def test_wishes_win_over_sections_of_the_profile(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    section = "{when: {task: instruct}, targets: {learning_rate: 1e-4, engine: axolotl}}"
    own.write_text(f"extends: cpu-demo\nsections: {{texts: {section}}}\n")
    make_run(tmp_path / "run", wishes(tmp_path, profile=str(own), targets={"learning_rate": 3e-4}))
    loaded = load_profile(str(tmp_path / "run/profile.yaml"))
    targets = resolve_profile(loaded, TaskType.INSTRUCT, facts_from_name("org/llama-8b")).targets
    assert (targets.learning_rate, targets.engine) == (3e-4, Engine.NATIVE)


def test_pretraining_trains_every_weight_on_every_token(tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("words")
    run = make_run(tmp_path / "run", wishes(tmp_path, mode=NativeMode.PRETRAIN, data=text))
    assert run.dataset is None
    section = load_profile(str(tmp_path / "run/profile.yaml")).layers[-1].content.sections["this-run"]
    assert (section.targets.method, section.targets.sample_packing) == (Method.FULL, True)
    assert section.engine_config.native == {"objective": "tokens"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"targets": {"learning_rat": 1}}, "learning_rat"),
        ({"profile": "no-such"}, "no such profile"),
        ({"profile": "./no/such.yaml"}, "neither a profile's name nor a file"),
        ({"model": Path("/nowhere")}, "config.json"),
        ({"data": Path("/nowhere.json")}, "neither a file nor a directory"),
    ],
)
def test_a_mistake_is_reported_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        make_run(tmp_path / "run", wishes(tmp_path, **changes))


def test_columns_are_known_by_their_usual_names_or_by_what_is_said(tmp_path: Path) -> None:
    found = dataset_of(NativeMode.SFT, rows(tmp_path, {"question": "q", "answer": "a", "system": "s"}), {})
    assert isinstance(found, InstructDataset)
    assert (found.field_instruction, found.field_output, found.field_system) == (
        "question",
        "answer",
        "system",
    )
    odd = rows(tmp_path, {"q": "q", "reply": "a"})
    with pytest.raises(ConfigError, match="columns are q, reply; say which with --column instruction=NAME"):
        dataset_of(NativeMode.SFT, odd, {"output": "reply"})
    said = dataset_of(NativeMode.SFT, odd, {"output": "reply", "instruction": "q"})
    assert isinstance(said, InstructDataset)
    assert said.field_output == "reply"
    pair = rows(tmp_path, {"prompt": "p", "chosen": "c", "worse": "r"})
    found = dataset_of(NativeMode.DPO, pair, {"rejected": "worse"})
    assert isinstance(found, DpoDataset)
    assert (found.field_prompt, found.field_rejected) == ("prompt", "worse")


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            ("role", "content", "user", "assistant"),
        ),
        (
            [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "a"},
                {"from": "gpt", "value": "b"},
            ],
            ("from", "value", "human", "gpt"),
        ),
    ],
)
def test_conversations_are_read_as_they_are_written(
    tmp_path: Path, messages: list[dict[str, str]], wanted: tuple[str, ...]
) -> None:
    found = dataset_of(NativeMode.SFT, rows(tmp_path, {"messages": messages}), {})
    assert isinstance(found, ChatDataset)
    assert found.chat_column == "messages"
    said = (
        found.chat_role_field,
        found.chat_content_field,
        found.chat_user_reference,
        found.chat_assistant_reference,
    )
    assert said == wanted


def test_a_run_is_continued_from_its_newest_state_with_as_much_time_as_it_had(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    before = make_run(folder, wishes(tmp_path))
    Path(before.stop_path).touch()
    for step in (90, 100, 20):
        (folder / f"work/output/checkpoint-{step}").mkdir(parents=True)
    (folder / "work/output/.checkpoint-120.tmp").mkdir()
    asked_at = time.time()
    run = resume_run(folder)
    assert run.resume_from == str(folder / "work/output/checkpoint-100")
    assert asked_at + 7200 <= run.deadline_at + 1e-3
    assert run.deadline_at - run.end_by == pytest.approx(60)
    assert not Path(run.stop_path).exists()
    with pytest.raises(ConfigError, match="name --model and --data"):
        resume_run(tmp_path / "other")


def test_pairs_are_read_as_yaml_reads_values() -> None:
    assert parse_pairs(["a=1e-3", "b=true", "c=x=y"], "--set") == {"a": "1e-3", "b": True, "c": "x=y"}
    with pytest.raises(ConfigError, match="key=value"):
        parse_pairs(["a"], "--set")


#: Stands in for the training environment's python: says a little and ends as it is asked.
FAKE = """#!{python}
import signal, sys, time
from pathlib import Path
run = Path(sys.argv[-1]).parent
progress = run / "progress.jsonl"
def say(line):
    with progress.open("a") as file: file.write(line + "\\n")
def asked(*_):
    say('{{"t": 2, "event": "note", "kind": "stop", "text": "saved"}}')
    sys.exit(0)
signal.signal(signal.SIGTERM, asked)
say('{{"t": 1, "event": "stage", "stage": "load", "text": "the model"}}')
print("a line for the log")
if {waits}: time.sleep(600)
sys.exit(34)
"""


def python(folder: Path, *, waits: bool = False) -> Path:
    path = folder / "python"
    path.write_text(FAKE.format(python=sys.executable, waits=waits))
    path.chmod(0o755)
    return path


@pytest.mark.process
def test_every_event_is_reported_and_the_rest_is_in_the_log(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", wishes(tmp_path))
    Path(run.progress_path).write_text('{"t": 0, "event": "stage", "stage": "of an earlier try"}\n')
    reported: list[ProgressEvent] = []
    assert native_runs.run_training(python(tmp_path), tmp_path / "run", run, reported.append) == 34
    assert [event.event for event in reported] == ["stage"]
    assert (tmp_path / "run/log").read_text() == "a line for the log\n"
    assert native_runs.load_result(run) is None


@pytest.fixture
def unread_stderr(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As behind `2>&1 | tee`, which an interrupt ends as well."""
    reader, writer = os.pipe()
    os.close(reader)
    before = os.dup(2)
    os.dup2(writer, 2)
    os.close(writer)
    monkeypatch.setattr(sys, "stderr", os.fdopen(2, "wb", buffering=0, closefd=False))
    yield
    os.dup2(before, 2)
    os.close(before)


@pytest.mark.process
@pytest.mark.usefixtures("unread_stderr")
def test_an_interruption_asks_the_training_to_save_and_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", wishes(tmp_path))
    reported: list[ProgressEvent] = []

    def interrupt() -> None:
        until = time.monotonic() + 120
        while not reported and time.monotonic() < until:
            time.sleep(0.02)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert native_runs.run_training(python(tmp_path, waits=True), tmp_path / "run", run, reported.append) == 0
    assert [event.event for event in reported] == ["stage", "note"]


@pytest.mark.process
def test_a_training_that_nobody_reads_any_more_is_saved(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", wishes(tmp_path))

    def tell(_event: ProgressEvent) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        native_runs.run_training(python(tmp_path, waits=True), tmp_path / "run", run, tell)
    assert "saved" in Path(run.progress_path).read_text()


@pytest.mark.process
def test_an_interrupt_that_is_ignored_stays_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", wishes(tmp_path))
    found: list[object] = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        native_runs.run_training(
            python(tmp_path), tmp_path / "run", run, lambda _: found.append(signal.getsignal(signal.SIGINT))
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == [signal.SIG_IGN]


@pytest.mark.process
def test_the_child_gets_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    made = native_runs.child_environment(Path("/p.yaml"))
    assert "HF_TOKEN" not in made
    assert made["GOD_MINER_PROFILE"] == "/p.yaml"
    assert (Path(made["PYTHONPATH"]) / "trainer").is_dir()


@pytest.mark.process
def test_a_program_that_fails_ends_us_with_its_code(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\necho one\nexit 3\n")
    path.chmod(0o755)
    found = native_runs.program_lines(path, ["x"])
    assert next(found) == "one\n"
    with pytest.raises(SystemExit) as ended:
        next(found)
    assert ended.value.code == 3
    assert subprocess.run([path], capture_output=True).returncode == 3
