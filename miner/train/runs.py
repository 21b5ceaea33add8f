"""The folder of a run: what the trainer is told, made from a few words or read again.

FOLDER/run.json, profile.yaml (the operator's wishes as a profile of its own, to look at and to change), and
what the trainer leaves: progress.jsonl, log, result.json, work/ and the model.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from core.errors import ConfigError, Problem
from core.profile.load import load_profile
from core.row_facts import ANSWERS, ASSISTANT, MESSAGES
from core.run_files import PROGRESS_FILE, RESULT_FILE, RUN_FILE, STOP_FILE, RunSpec
from core.tasks import ChatDataset, DatasetType, DpoDataset, InstructDataset, TaskType
from miner.rows import read_rows

PROFILE_FILE = "profile.yaml"
#: The last save is over this long before the end, or this part of a short run.
RESERVE_S, RESERVE_SHARE = 60.0, 0.05
_INSTRUCTIONS = ("instruct", "instruction", "prompt", "question")


class Mode(StrEnum):
    SFT = "sft"
    DPO = "dpo"
    PRETRAIN = "pretrain"


@dataclass(frozen=True)
class Wishes:
    """What the operator said on the command line."""

    mode: Mode
    model: Path
    data: Path
    hours: float
    profile: str
    #: Targets of the profile, as `--set key=value` has them.
    targets: Mapping[str, Any] = field(default_factory=dict)
    #: The native trainer's own settings, likewise.
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: Columns by the dataset's own keys: "instruction=question".
    columns: Mapping[str, str] = field(default_factory=dict)
    plan: Path | None = None
    kl: float | None = None


def make_run(folder: Path, wishes: Wishes) -> RunSpec:
    """Writes the run; `ConfigError` for wishes that cannot be."""
    _need(wishes.model / "config.json", "--model", "a model's folder has a config.json")
    dataset = dataset_of(wishes.mode, wishes.data, wishes.columns)
    folder.mkdir(parents=True, exist_ok=True)
    _write_profile(folder, wishes)
    run = RunSpec(
        task_id=folder.name,
        task_type=_task_type(wishes.mode, dataset),
        model_id=wishes.model.name,
        model_path=str(wishes.model.resolve()),
        data_path=str(wishes.data.resolve()),
        dataset=dataset,
        kl_coefficient=wishes.kl,
        plan_path=str(wishes.plan.resolve()) if wishes.plan else None,
        work_dir=str(folder / "work"),
        submission_dir=str(folder / "model"),
        progress_path=str(folder / PROGRESS_FILE),
        result_path=str(folder / RESULT_FILE),
        stop_path=str(folder / STOP_FILE),
        **_times(wishes.hours * 3600),
    )
    (folder / RUN_FILE).write_text(run.to_json(), encoding="utf-8")
    return run


def again(folder: Path) -> RunSpec:
    """The run that lies there, with as much time as it had, going on from its newest state."""
    path = folder / RUN_FILE
    try:
        before = RunSpec.from_json(path.read_bytes())
    except (OSError, ValueError) as error:
        rule = (
            f"cannot be read as a run ({str(error).splitlines()[0]}); name --model and --data for a new one"
        )
        raise ConfigError("train native", [Problem(str(path), "", rule)]) from None
    state = newest_state(Path(before.work_dir) / "output")
    changed = {**_times(before.deadline_at - before.began_at), "resume_from": str(state) if state else None}
    run = before.model_copy(update=changed)
    path.write_text(run.to_json(), encoding="utf-8")
    Path(run.stop_path).unlink(missing_ok=True)
    return run


def newest_state(output: Path) -> Path | None:
    """States get their name when they are whole."""
    found = [path for path in output.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def dataset_of(mode: Mode, data: Path, columns: Mapping[str, str]) -> DatasetType | None:
    """By the columns of the first rows; None: plain text."""
    if not data.exists():
        raise ConfigError("train native", [Problem("--data", str(data), "is no file and no folder")])
    if mode is Mode.PRETRAIN:
        return None
    rows, _ = read_rows(data)
    seen = dict.fromkeys(key for row in rows[:20] for key in row)
    if mode is Mode.DPO:
        said = _columns(
            {"prompt": ("prompt", *_INSTRUCTIONS), "chosen": ("chosen",), "rejected": ("rejected",)},
            seen,
            columns,
        )
        return DpoDataset(**{f"field_{key}": value for key, value in said.items()})
    if (
        talk := columns.get("messages") or next((name for name in MESSAGES if name in seen), None)
    ) is not None:
        return _chat(talk, rows)
    said = _columns({"instruction": _INSTRUCTIONS, "output": ANSWERS}, seen, columns)
    more = {key: columns.get(key, key) for key in ("input", "system") if columns.get(key, key) in seen}
    return InstructDataset(**{f"field_{key}": value for key, value in {**said, **more}.items()})


def _columns(
    wanted: Mapping[str, Sequence[str]], seen: Mapping[str, None], columns: Mapping[str, str]
) -> dict[str, str]:
    found, problems = {}, []
    for key, usual in wanted.items():
        named = columns.get(key) or next((name for name in usual if name in seen), None)
        if named is None or named not in seen:
            rule = f"the data's columns are {', '.join(seen) or 'none'}; say which with --column {key}=NAME"
            problems.append(Problem(f"--column {key}", named or "", rule))
        else:
            found[key] = named
    if problems:
        raise ConfigError("train native", problems)
    return found


def _chat(column: str, rows: Sequence[Mapping[str, Any]]) -> ChatDataset:
    """How messages say who speaks: `role`/`content` or `from`/`value`, and the words for the two sides."""
    messages = [one for row in rows for one in row.get(column) or [] if isinstance(one, dict)]
    role, content = ("role", "content") if any("role" in one for one in messages) else ("from", "value")
    speakers = dict.fromkeys(str(one.get(role)) for one in messages)
    assistant = next((one for one in speakers if one in ASSISTANT), "assistant")
    user = next((one for one in speakers if one not in (assistant, "system")), "user")
    return ChatDataset(
        # The model's own, where it has one; validators name theirs.
        chat_template="tokenizer_default_fallback_chatml",
        chat_column=column,
        chat_role_field=role,
        chat_content_field=content,
        chat_user_reference=user,
        chat_assistant_reference=assistant,
    )


def _task_type(mode: Mode, dataset: DatasetType | None) -> TaskType:
    if mode is Mode.DPO:
        return TaskType.DPO
    return TaskType.CHAT if isinstance(dataset, ChatDataset) else TaskType.INSTRUCT


def _write_profile(folder: Path, wishes: Wishes) -> None:
    """Checked here: a mistake is told before anything starts."""
    profile = wishes.profile
    if profile.endswith(".yaml") or "/" in profile:
        _need(Path(profile), "--profile", "is no profile's name and no file")
        profile = str(Path(profile).resolve())
    targets: dict[str, Any] = {"engine": "native"}
    settings = dict(wishes.settings)
    if wishes.mode is Mode.PRETRAIN:
        targets |= {"method": "full", "sample_packing": wishes.data.suffix != ".bin"}
        settings = {"objective": "tokens", **settings}
    content: dict[str, Any] = {"extends": profile, "targets": {**targets, **wishes.targets}}
    if settings:
        content["engine_config"] = {"native": settings}
    path = folder / PROFILE_FILE
    path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    load_profile(str(path))


def _times(seconds: float) -> dict[str, float]:
    now = time.time()
    end = now + seconds
    return {
        "began_at": now,
        "end_by": end - min(RESERVE_S, RESERVE_SHARE * seconds),
        "deadline_at": end,
    }


def _need(path: Path, option: str, rule: str) -> None:
    if not path.is_file():
        raise ConfigError("train native", [Problem(option, str(path), rule)])


def parsed(pairs: Sequence[str], option: str) -> dict[str, Any]:
    """`key=value`, the value as YAML reads it."""
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError("train native", [Problem(option, pair, "is written key=value")])
        found[key.strip()] = yaml.safe_load(value)
    return found
