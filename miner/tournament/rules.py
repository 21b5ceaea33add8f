"""The validators' rules of tournaments: admission, the container, the paths and the clock.

As their public code had it in August and September 2026. Admission checks their present files, so a rule may
have changed since: whatever depends on one of these values names `AS_OF`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from core.domain.choices import Engine
from core.domain.tasks import ImageModelType
from core.domain.wire import TournamentType
from core.models.image_families import IMAGE_FAMILIES, ImageFamily

AS_OF = "2026-09-17"
UPSTREAM = "https://github.com/gradients-ai/G.O.D"

# — admission
FEES_TAO: Mapping[TournamentType, float] = {
    TournamentType.TEXT: 0.7,
    TournamentType.IMAGE: 0.4,
    TournamentType.ENVIRONMENT: 0.6,
}
#: Mondays, UTC: tournaments of a kind begin within this hour, if none of the kind runs.
START_HOURS: Mapping[TournamentType, int] = {
    TournamentType.ENVIRONMENT: 9,
    TournamentType.TEXT: 11,
    TournamentType.IMAGE: 13,
}
#: An entry must have been registered for so long before the start.
REGISTERED_FOR = timedelta(hours=1)
LICENSE_NAMES = ("LICENSE.md", "LICENSE", "license.md", "license", "License.md", "License")
NOTICE_NAMES = ("NOTICE", "NOTICE.txt", "notice.txt", "Notice.txt", "notice", "Notice")
#: sha256 of upstream's files after their own normalisation, read on `LICENSE_READ`.
LICENSE_DIGEST = "af05747c3872fb8aabca8338ee6a0d999bd3d8a8a89121c01d8ae549d503b34d"
NOTICE_DIGEST = "556b66fee4670b95bf6f1eaedbdbdaeb21d9e7249bfa64d4ff5fa59ee1d1cf24"
LICENSE_READ = "2026-07-15"
CLONE_LIMIT_S = 60.0
OBFUSCATION_LIMIT_S = 60.0
#: Above this a clone within the limit is doubtful.
LARGE_REPOSITORY_BYTES = 200_000_000
#: Of `requested_datasets` the first two of these are given, the others are left out silently. Not for images.
DATASETS = (
    "SoelMgd/Poker_Dataset",
    "RZ412/PokerBench",
    "albarji/ballmatro",
    "Mahesh111000/Hanabi_dataset",
    "hkust-nlp/agentboard",
    "tasksource/Boardgame-QA",
    "GoodStartLabs/gin-rummy-trajectories-32k",
    "the-acorn-ai/textarena-player-game-traces",
    "gradients-io-tournaments/ArkadiumGinrummy",
    "gradients-io-tournaments/env_training_gradients",
    "gradients-io-tournaments/intercode_bigcode_combined_12k",
    "gradients-io-tournaments/pvp-tool-calling-sft",
    "gradients-io-tournaments/SWE-ZERO-12M-trajectories-filtered",
)
MOST_DATASETS = 2
#: Where the container finds them, each in a directory `org--name`.
DATASETS_FOLDER = "miner_datasets"


def next_start(kind: TournamentType, now: datetime) -> datetime:
    """The next Monday at which a tournament of this kind may begin."""
    now = now.astimezone(UTC)
    start = now.replace(hour=START_HOURS[kind], minute=0, second=0, microsecond=0)
    start += timedelta(days=-now.weekday() % 7)
    return start if start > now else start + timedelta(days=7)


def training_pictures(pictures: int) -> int:
    """Pictures that the container gets."""
    return pictures - hidden_pictures(pictures)


def hidden_pictures(pictures: int) -> int:
    """Pictures that validators keep for the test: a tenth, rounded up."""
    return math.ceil(pictures / 10)


# — build
#: Where a Dockerfile may be; the first directory that has it counts.
DOCKERFILE_DIRECTORIES = ("ops/docker", "dockerfiles")
TEXT_DOCKERFILE = "standalone-text-trainer.dockerfile"
IMAGE_DOCKERFILE = "standalone-image-trainer.dockerfile"
TOOLKIT_DOCKERFILE = "standalone-image-toolkit-trainer.dockerfile"
BUILD_LIMIT_S = 1800.0

# — run
MEMORY_PER_GPU, CPUS_PER_GPU = 110 * 1024**3, 24
CACHE, CHECKPOINTS = "/cache", "/app/checkpoints"
#: After an exit code other than zero a fresh container finds what the first one left.
MAX_TRAINING_ATTEMPTS = 2
WANDB_VARIABLES = ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_ARTIFACT_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR")


# — upload
#: Matched with the path in the repository.
NOT_UPLOADED = (
    "trainer_state.json",
    "training_args.bin",
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*.pth",
)
#: A folder with no larger file and no subfolder counts as empty.
EMPTY_BYTES = 1024
#: Where pictures' files are put in the repository; the evaluator looks at paths that begin like this.
IMAGE_SUBFOLDER, IMAGE_PREFIX = "checkpoints", "checkpoint"


# — the boss round
#: Of the boss's score in GRPO and on pictures: by so much a challenger's must be better.
LEAST_GAIN = 0.01


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
    gpus: int = 1
    #: Usual hours of such a task.
    hours: float = 1.0
    environment: Mapping[str, str] = field(default_factory=dict)

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


#: Every kind that tournaments have, in the order of their types.
TASKS: Mapping[str, TournamentTask] = {
    task.name: task
    for task in (
        _text("instruct", "InstructTextTask", _INSTRUCT),
        _text(
            "instruct-kl",
            "InstructTextTask",
            _INSTRUCT,
            gpus=2,
            environment={"USE_KL": "1", "KL_COEF": "0.5"},
        ),
        _text("chat", "ChatTask", _CHAT),
        _text("dpo", "DpoTask", _DPO, hours=1.5),
        _text("grpo", "GrpoTask", _GRPO, hours=1.5),
        _text("continuous", "ChatTask", _CHAT, gpus=4, hours=4.0),
        _text(
            "environment",
            "EnvTask",
            _ENVIRONMENT,
            tournament=TournamentType.ENVIRONMENT,
            gpus=4,
            hours=1.5,
        ),
        *(
            _image(image_type, IMAGE_FAMILIES[image_type])
            for image_type in ImageModelType
            if IMAGE_FAMILIES[image_type].tournament_hours is not None
        ),
    )
}
