"""The operator's own native trainings: make or resume the folder of a run, start the program in the
training environment, follow it until it ends.

A run's folder has run.json, profile.yaml (the operator's options as a profile of its own, to look at
and to change), and what the trainer leaves: progress.jsonl, log, result.json, work/ and the model.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from core.data.facts import ANSWER_COLUMNS, ASSISTANT_ROLES, MESSAGE_COLUMNS
from core.data.rows import sample_rows
from core.domain.choices import EvalMetric
from core.domain.errors import ConfigError, Problem
from core.domain.tasks import ChatDataset, DatasetType, DpoDataset, InstructDataset, TaskType
from core.profile.resolve import load_profile
from core.recipes.launch import NO_PROGRESS_BARS
from core.runs.progress import ProgressEvent, parse_events
from core.runs.run_files import LOG_FILE, PROGRESS_FILE, RESULT_FILE, RUN_FILE, STOP_FILE, RunResult, RunSpec

PROFILE_FILE = "profile.yaml"
#: The last save ends this long before the deadline, or this share of a short run.
RESERVE_S, RESERVE_SHARE = 60.0, 0.05
_INSTRUCTIONS = ("instruct", "instruction", "prompt", "question")


class NativeMode(StrEnum):
    SFT = "sft"
    DPO = "dpo"
    PRETRAIN = "pretrain"


@dataclass(frozen=True)
class NativeRunOptions:
    """Options from the command line."""

    mode: NativeMode
    model: Path
    data: Path
    hours: float
    profile: str
    #: Targets of the profile, from `--set key=value`.
    targets: Mapping[str, Any] = field(default_factory=dict)
    #: The native trainer's own settings, from `--native key=value`.
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: Columns by the dataset's own keys: "instruction=question".
    columns: Mapping[str, str] = field(default_factory=dict)
    plan: Path | None = None
    kl: float | None = None


def make_run(folder: Path, options: NativeRunOptions) -> RunSpec:
    """Write a new run; raise `ConfigError` for options that cannot be."""
    _require_file(options.model / "config.json", "--model", "a model's folder has a config.json")
    dataset = dataset_of(options.mode, options.data, options.columns)
    folder.mkdir(parents=True, exist_ok=True)
    _write_profile(folder, options)
    run = RunSpec(
        task_id=folder.name,
        task_type=_task_type(options.mode, dataset),
        model_id=options.model.name,
        model_path=str(options.model.resolve()),
        data_path=str(options.data.resolve()),
        dataset=dataset,
        kl_coefficient=options.kl,
        plan_path=str(options.plan.resolve()) if options.plan else None,
        work_dir=str(folder / "work"),
        submission_dir=str(folder / "model"),
        progress_path=str(folder / PROGRESS_FILE),
        result_path=str(folder / RESULT_FILE),
        stop_path=str(folder / STOP_FILE),
        **_deadlines(options.hours * 3600),
    )
    (folder / RUN_FILE).write_text(run.to_json(), encoding="utf-8")
    return run


def resume_run(folder: Path) -> RunSpec:
    """Resume the run in this directory from its newest checkpoint, with as much time as it had."""
    path = folder / RUN_FILE
    try:
        before = RunSpec.from_json(path.read_bytes())
    except (OSError, ValueError) as error:
        rule = (
            f"cannot be read as a run ({str(error).splitlines()[0]}); name --model and --data for a new one"
        )
        raise ConfigError("train native", [Problem(str(path), "", rule)]) from None
    state = newest_state(Path(before.work_dir) / "output")
    changed = {
        **_deadlines(before.deadline_at - before.began_at),
        "resume_from": str(state) if state else None,
    }
    run = before.model_copy(update=changed)
    path.write_text(run.to_json(), encoding="utf-8")
    Path(run.stop_path).unlink(missing_ok=True)
    return run


def newest_state(output: Path) -> Path | None:
    """Return the newest checkpoint; only complete ones have their final name."""
    states = [path for path in output.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    return max(states, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def dataset_of(mode: NativeMode, data: Path, columns: Mapping[str, str]) -> DatasetType | None:
    """Guess the dataset type from the columns of the first rows; None means plain text."""
    if not data.exists():
        raise ConfigError("train native", [Problem("--data", str(data), "is neither a file nor a directory")])
    if mode is NativeMode.PRETRAIN:
        return None
    rows, _ = sample_rows(data)
    seen = dict.fromkeys(key for row in rows[:20] for key in row)
    if mode is NativeMode.DPO:
        said = _columns(
            {"prompt": ("prompt", *_INSTRUCTIONS), "chosen": ("chosen",), "rejected": ("rejected",)},
            seen,
            columns,
        )
        return DpoDataset(**{f"field_{key}": value for key, value in said.items()})
    if (
        talk := columns.get("messages") or next((name for name in MESSAGE_COLUMNS if name in seen), None)
    ) is not None:
        return _chat(talk, rows)
    said = _columns({"instruction": _INSTRUCTIONS, "output": ANSWER_COLUMNS}, seen, columns)
    more = {key: columns.get(key, key) for key in ("input", "system") if columns.get(key, key) in seen}
    return InstructDataset(**{f"field_{key}": value for key, value in {**said, **more}.items()})


def _columns(
    wanted: Mapping[str, Sequence[str]], seen: Mapping[str, None], columns: Mapping[str, str]
) -> dict[str, str]:
    chosen, problems = {}, []
    for key, usual in wanted.items():
        named = columns.get(key) or next((name for name in usual if name in seen), None)
        if named is None or named not in seen:
            rule = f"the data's columns are {', '.join(seen) or 'none'}; say which with --column {key}=NAME"
            problems.append(Problem(f"--column {key}", named or "", rule))
        else:
            chosen[key] = named
    if problems:
        raise ConfigError("train native", problems)
    return chosen


def _chat(column: str, rows: Sequence[Mapping[str, Any]]) -> ChatDataset:
    """Guess the message keys (`role`/`content` or `from`/`value`) and the names of the two sides."""
    messages = [message for row in rows for message in row.get(column) or [] if isinstance(message, dict)]
    has_roles = any("role" in message for message in messages)
    role, content = ("role", "content") if has_roles else ("from", "value")
    speakers = dict.fromkeys(str(message.get(role)) for message in messages)
    assistant = next((name for name in speakers if name in ASSISTANT_ROLES), "assistant")
    user = next((name for name in speakers if name not in (assistant, "system")), "user")
    return ChatDataset(
        # The model's own template if it has one; validators name theirs.
        chat_template="tokenizer_default_fallback_chatml",
        chat_column=column,
        chat_role_field=role,
        chat_content_field=content,
        chat_user_reference=user,
        chat_assistant_reference=assistant,
    )


def _task_type(mode: NativeMode, dataset: DatasetType | None) -> TaskType:
    if mode is NativeMode.DPO:
        return TaskType.DPO
    return TaskType.CHAT if isinstance(dataset, ChatDataset) else TaskType.INSTRUCT


def _write_profile(folder: Path, options: NativeRunOptions) -> None:
    """Write the profile and check it, so that a mistake is reported before anything starts."""
    profile = options.profile
    if profile.endswith(".yaml") or "/" in profile:
        _require_file(Path(profile), "--profile", "is neither a profile's name nor a file")
        profile = str(Path(profile).resolve())
    targets: dict[str, object] = {"engine": "native"}
    settings = dict(options.settings)
    if options.mode is NativeMode.PRETRAIN:
        # No validator scores pretraining: the held-out loss decides, and held-out documents are never trained
        # on.
        packs = options.data.suffix != ".bin"
        targets |= {"method": "full", "sample_packing": packs, "eval_metric": EvalMetric.LOSS.value}
        settings = {"objective": "tokens", **settings}
    # A section of its own, which comes last: those of the profile would win over general targets.
    section: dict[str, object] = {"targets": {**targets, **options.targets}}
    if settings:
        section["engine_config"] = {"native": settings}
    content = {"extends": profile, "sections": {"this-run": section}}
    path = folder / PROFILE_FILE
    path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    load_profile(str(path))


def _deadlines(seconds: float) -> dict[str, float]:
    now = time.time()
    end = now + seconds
    return {
        "began_at": now,
        "end_by": end - min(RESERVE_S, RESERVE_SHARE * seconds),
        "deadline_at": end,
    }


def _require_file(path: Path, option: str, rule: str) -> None:
    if not path.is_file():
        raise ConfigError("train native", [Problem(option, str(path), rule)])


def parse_pairs(pairs: Sequence[str], option: str) -> dict[str, object]:
    """Parse `key=value` pairs; values are YAML."""
    values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError("train native", [Problem(option, pair, "is written key=value")])
        values[key.strip()] = yaml.safe_load(value)
    return values


#: The part of our environment that the child needs; not the wallet's, nor the hub's.
PASSED_VARIABLES = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
)
FIXED_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
    **NO_PROGRESS_BARS,
}
_POLL_S = 0.2


def child_environment(profile: Path | None = None) -> dict[str, str]:
    import core

    passed = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    source = str(Path(core.__file__).resolve().parents[1])
    chosen = {"GOD_MINER_PROFILE": str(profile)} if profile is not None else {}
    return {**passed, **FIXED_VARIABLES, **chosen, "PYTHONPATH": source}


def run_training(python: Path, folder: Path, run: RunSpec, on_event: Callable[[ProgressEvent], None]) -> int:
    """Run to the end and return the exit code. One interrupt saves and ends it, a second kills it. If events
    can no longer be printed, the error is raised once the training has saved and ended."""
    progress = Path(run.progress_path)
    start = progress.stat().st_size if progress.exists() else 0
    with (folder / LOG_FILE).open("ab") as log:
        child = subprocess.Popen(
            [python, "-m", "trainer.text", "--run", str(folder / "run.json")],
            env=child_environment(folder / PROFILE_FILE),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            with _stopped_by_interrupt(child):
                for event in _events_until_end(child, progress, start):
                    try:
                        on_event(event)
                    except OSError:  # as when the same interrupt has ended a `tee` that reads them
                        child.terminate()
                        child.wait()
                        raise
        finally:
            if child.poll() is None:
                child.kill()
        return child.wait()


@contextlib.contextmanager
def _stopped_by_interrupt(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Handle interrupts here: a `KeyboardInterrupt` could come up anywhere, and would end the training
    unsaved. If interrupts are ignored, as in a script's background, they stay so."""
    before, asked = signal.getsignal(signal.SIGINT), False
    if before is signal.SIG_IGN:
        yield
        return

    def on_interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        child.send_signal(signal.SIGTERM)
        with contextlib.suppress(OSError):  # not by `sys.stderr`, which may be at work while this comes
            os.write(2, b"asked to stop: what it has is saved; once more to end it at once\n")

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _events_until_end(child: subprocess.Popen[bytes], progress: Path, at: int) -> Iterator[ProgressEvent]:
    while True:
        ended = child.poll() is not None
        for line in parse_events(_read_from(progress, at), at):
            at = line.offset
            if line.event is not None:
                yield line.event
        if ended:
            return
        time.sleep(_POLL_S)


def _read_from(path: Path, at: int) -> bytes:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(at)
        return file.read()
    return b""


def program_lines(python: Path, arguments: Sequence[str], profile: Path | None = None) -> Iterator[str]:
    """Yield a training program's output line by line; its stderr goes to ours."""
    command = [str(python), "-m", *arguments]
    with subprocess.Popen(
        command, env=child_environment(profile), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        yield from child.stdout
    if child.returncode:
        raise SystemExit(child.returncode)


def load_result(run: RunSpec) -> RunResult | None:
    try:
        return RunResult.model_validate_json(Path(run.result_path).read_bytes())
    except (OSError, ValueError):
        return None
