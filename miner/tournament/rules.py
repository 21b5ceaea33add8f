"""The tasks of tournaments as their containers see them, and the times and counts that follow from the rules.

The rules themselves are in `core/domain/tournament_rules.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from core.domain.choices import Engine
from core.domain.tasks import ImageModelType, TaskType
from core.domain.tournament_rules import (
    CACHE,
    CHECKPOINTS,
    CONTINUOUS_HOURS,
    ENVIRONMENT_HOURS,
    IMAGE_DOCKERFILE,
    START_WEEKDAY,
    TEST_SHARE,
    TEXT_DOCKERFILE,
    TOOLKIT_DOCKERFILE,
    TOURNAMENTS,
    WANDB_VARIABLES,
    Round,
    gpus_for,
)
from core.domain.wire import TournamentType
from core.models.image_families import IMAGE_FAMILIES, ImageFamily


def next_start(kind: TournamentType, now: datetime) -> datetime:
    """The next Monday at which a tournament of this kind may begin."""
    now = now.astimezone(UTC)
    start = now.replace(hour=TOURNAMENTS[kind].start_hour, minute=0, second=0, microsecond=0)
    start += timedelta(days=(START_WEEKDAY - now.weekday()) % 7)
    return start if start > now else start + timedelta(days=7)


def training_pictures(pictures: int) -> int:
    """Pictures that the container gets."""
    return pictures - hidden_pictures(pictures)


def hidden_pictures(pictures: int) -> int:
    """Pictures that validators keep for the test: a tenth, rounded up."""
    return math.ceil(round(pictures * TEST_SHARE, 6))


def shared_memory(gpus: int) -> str:
    return "16g" if gpus >= 4 else "8g"


def anonymous_model(model_id: str) -> str:
    """A name as validators give it to models with statistics: 16 hexadecimal digits. Theirs has a salt."""
    return hashlib.sha256(f"god-miner:{model_id}".encode()).hexdigest()[:16]


def repository_name(tournament: str, task: str, hotkey: str) -> str:
    return f"tournament-{tournament}-{task}-{hotkey[:8]}"


@dataclass(frozen=True)
class TournamentTask:
    """One kind of task as its container sees it."""

    #: The operator's word for it, as in `rehearse --task`.
    name: str
    tournament: TournamentType
    dockerfile: str
    #: `--task-type` of a text; None for pictures.
    task_type: str | None = None
    image_type: ImageModelType | None = None
    #: Every field of the dataset's type, nulls included, as validators send it.
    dataset: Mapping[str, Any] = field(default_factory=dict)
    #: Whether the model's directory has a name of 16 hexadecimal digits, and statistics are beside the data.
    anonymous: bool = True
    #: Billions of parameters of a usual model; None for pictures.
    billions: float | None = None
    #: Usual hours of such a task.
    hours: float = 1.0
    environment: Mapping[str, str] = field(default_factory=dict)
    #: It goes on from a model of the last winner's.
    continues: bool = False
    #: `model_type` of a model that is made up for it.
    stand_in: str = "qwen2"

    @property
    def gpus(self) -> int:
        """H100s that validators give it."""
        return gpus_of(self, self.billions or 0)

    @property
    def kl_coefficient(self) -> float | None:
        """The coefficient of its KL term, if it has one."""
        return float(self.environment["KL_COEF"]) if "USE_KL" in self.environment else None

    @property
    def kind(self) -> TaskType:
        return TaskType(self.task_type) if self.task_type else TaskType.IMAGE

    def model_argument(self, model_id: str) -> str:
        return anonymous_model(model_id) if self.anonymous else model_id

    def arguments(
        self, *, task_id: str, model_id: str, repository: str, hours: float, trigger_word: str | None = None
    ) -> list[str]:
        """The container's command line, in the validator's order."""
        common = ["--task-id", task_id, "--model", self.model_argument(model_id)]
        end = ["--expected-repo-name", repository, "--hours-to-complete", str(float(hours))]
        if self.image_type is not None:
            zipped = [
                "--dataset-zip",
                "https://example.com/dataset.zip",
                "--model-type",
                str(self.image_type),
            ]
            return [*common, *zipped, *end, *(["--trigger-word", trigger_word] if trigger_word else [])]
        rows = [
            "--dataset",
            "https://example.com/rows.json",
            "--dataset-type",
            json.dumps(dict(self.dataset)),
        ]
        return [*common, *rows, "--task-type", str(self.task_type), "--file-format", "s3", *end]

    def variables(self, *, task_id: str, hotkey: str) -> dict[str, str]:
        """The container's environment, without the validator's hub token, which image tasks get too."""
        if self.image_type is not None:
            return {"TRANSFORMERS_CACHE": f"{CACHE}/hf_cache", "HF_HOME": f"{CACHE}/hf_cache"}
        place = f"{CHECKPOINTS}/wandb_logs/{task_id}_{hotkey}"
        stats = f"{CACHE}/baseline_stats_{task_id}_{hotkey[:8]}.json"
        found = {"WANDB_MODE": "offline", **dict.fromkeys(WANDB_VARIABLES, place)}
        return {**found, "BASELINE_STATS_PATH": stats, **self.environment}


def gpus_of(task: TournamentTask, billions: float) -> int:
    """H100s for a task with a model of this size."""
    kl = task.kl_coefficient is not None
    return gpus_for(task.kind, billions * 1e9, kl=kl, continuous=task.continues)


_INSTRUCT: Mapping[str, Any] = {
    "system_prompt": "",
    "system_format": "{system}",
    "field_system": None,
    "field_instruction": "instruct",
    "field_input": "input",
    "field_output": "output",
    "format": None,
    "no_input_format": None,
    "field": None,
}
_CHAT: Mapping[str, Any] = {
    "chat_template": "chatml",
    "chat_column": "conversations",
    "chat_role_field": "from",
    "chat_content_field": "value",
    "chat_user_reference": "user",
    "chat_assistant_reference": "assistant",
}
_DPO: Mapping[str, Any] = {
    "field_prompt": "prompt",
    "field_system": None,
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "prompt_format": "{prompt}",
    "chosen_format": "{chosen}",
    "rejected_format": "{rejected}",
}
_REWARD = (
    "def short_answers(completions, **kwargs):\n    return [-len(text) / 1000.0 for text in completions]\n"
)
_GRPO: Mapping[str, Any] = {
    "field_prompt": "prompt",
    "reward_functions": [
        {
            "reward_func": _REWARD,
            "reward_weight": 1.0,
            "func_hash": hashlib.sha256(_REWARD.encode()).hexdigest(),
            "is_generic": True,
        }
    ],
    "extra_column": None,
}
_ENVIRONMENT: Mapping[str, Any] = {"environment_names": ["intercode", "othello"]}


def _text(name: str, task_type: str, dataset: Mapping[str, Any], **more: Any) -> TournamentTask:
    kind = more.pop("tournament", TournamentType.TEXT)
    return TournamentTask(name, kind, TEXT_DOCKERFILE, task_type, None, dataset, **more)


def _image(image_type: ImageModelType, family: ImageFamily) -> TournamentTask:
    """Return the task of a family. Flux goes to the image without ai-toolkit: validators' code says so, their
    guide says otherwise."""
    dockerfile = IMAGE_DOCKERFILE if family.engines[0] is Engine.KOHYA else TOOLKIT_DOCKERFILE
    return TournamentTask(
        str(image_type),
        TournamentType.IMAGE,
        dockerfile,
        image_type=image_type,
        anonymous=False,
        hours=family.tournament_hours or 0.0,
    )


_KL: Mapping[str, str] = {"USE_KL": "1", "KL_COEF": "0.5"}
#: Every kind that tournaments have, in the order of their types. Sizes are those of usual models.
TASKS: Mapping[str, TournamentTask] = {
    task.name: task
    for task in (
        _text("instruct", "InstructTextTask", _INSTRUCT, billions=4.0),
        _text("instruct-pool", "InstructTextTask", _INSTRUCT, billions=3.0, stand_in="lfm2"),
        _text("instruct-kl", "InstructTextTask", _INSTRUCT, billions=4.0, environment=_KL),
        _text("instruct-large", "InstructTextTask", _INSTRUCT, billions=32.0, environment=_KL, hours=6.0),
        _text("chat", "ChatTask", _CHAT, billions=4.0),
        _text("dpo", "DpoTask", _DPO, billions=4.0, hours=1.5),
        _text("grpo", "GrpoTask", _GRPO, billions=4.0, hours=1.5),
        _text(
            "continuous",
            "ChatTask",
            _CHAT,
            billions=14.8,
            hours=CONTINUOUS_HOURS,
            continues=True,
            stand_in="qwen3",
        ),
        _text(
            "environment",
            "EnvTask",
            _ENVIRONMENT,
            tournament=TournamentType.ENVIRONMENT,
            billions=4.0,
            hours=ENVIRONMENT_HOURS,
        ),
        *(
            _image(image_type, IMAGE_FAMILIES[image_type])
            for image_type in ImageModelType
            if IMAGE_FAMILIES[image_type].tournament_hours is not None
        ),
    )
}


#: Rounds by the operator's words: of texts, and of pictures whose families are known.
ROUNDS: Mapping[str, Round] = {
    one.name if kind is TournamentType.TEXT else f"{kind}-{one.name}": one
    for kind in (TournamentType.TEXT, TournamentType.IMAGE)
    for one in TOURNAMENTS[kind].rounds
    if all(played.task in TASKS for played in one.tasks)
}


def tasks_of_round(name: str) -> list[TournamentTask]:
    """Every task that a round may have; equal ones are numbered."""
    tasks: list[TournamentTask] = []
    for played in ROUNDS[name].tasks:
        task = TASKS[played.task]
        names = [task.name, *(f"{task.name}-{number}" for number in range(2, played.count + 1))]
        tasks += [replace(task, name=one) for one in names]
    return tasks


def task_kind(name: str) -> str:
    """Return the kind of a task of a round: `dpo` of `dpo-2`."""
    kind, _, number = name.rpartition("-")
    return kind if name not in TASKS and number.isdigit() and kind in TASKS else name
