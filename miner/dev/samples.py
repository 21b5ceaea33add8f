"""Example tasks of every type, as a validator would send them: same keys, same spellings, likely values.

Seeded, so that a test or a bug report can name the very task it means. Requests carry all keys, the empty
ones as null, because the validators' models are dumped whole.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from random import Random

from core.domain.tasks import OFFERED_TASKS, ImageModelType, TaskType

OFFER_PATH = dict.fromkeys(OFFERED_TASKS, "/task_offer/") | {TaskType.IMAGE: "/task_offer_image/"}
START_PATH = dict.fromkeys(OFFERED_TASKS, "/start_training/") | {
    TaskType.GRPO: "/start_training_grpo/",
    TaskType.IMAGE: "/start_training_image/",
}

#: Popular base models of all sizes that tasks have, with their parameter counts.
TEXT_MODELS: tuple[tuple[str, int], ...] = (
    ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
    ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
    ("unsloth/Llama-3.2-1B-Instruct", 1_235_814_400),
    ("unsloth/Llama-3.2-3B-Instruct", 3_212_749_824),
    ("microsoft/Phi-3-mini-4k-instruct", 3_821_079_552),
    ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
    ("NousResearch/Meta-Llama-3-8B-Instruct", 8_030_261_248),
    ("unsloth/mistral-7b-instruct-v0.3", 7_248_023_552),
    ("NousResearch/Nous-Hermes-Llama2-13b", 13_015_864_320),
    ("unsloth/Meta-Llama-3.1-70B-Instruct", 70_553_706_496),
)
IMAGE_MODELS: dict[ImageModelType, tuple[str, ...]] = {
    ImageModelType.SDXL: ("stabilityai/stable-diffusion-xl-base-1.0", "Lykon/dreamshaper-xl-1-0"),
    ImageModelType.FLUX: ("black-forest-labs/FLUX.1-dev",),
}
#: GRPO tasks draw from models of 1 to 12 billion parameters.
GRPO_PARAMS = (10**9, 12 * 10**9)
#: Text offers have had this value since May 2025, whatever the dataset's size.
TEXT_DS_SIZE = 100_000
#: Hours seen in offers: (lowest, highest) by the size of the dataset.
TEXT_HOURS = ((1, 3), (2, 4), (3, 5), (3, 6), (4, 6))

#: Reward functions of the kinds seen, written for this file: one per line of thought.
REWARD_FUNCTIONS: tuple[str, ...] = (
    "def reward_long_completions(completions, **kwargs):\n"
    '    """Longer answers score higher."""\n'
    "    return [float(len(completion)) for completion in completions]\n",
    "def reward_low_punctuation(completions, **kwargs):\n"
    "    import string\n"
    "    marks = set(string.punctuation)\n"
    "    return [-float(sum(c in marks for c in text)) for text in completions]\n",
    "def reward_varied_words(completions, **kwargs):\n"
    "    scores = []\n"
    "    for text in completions:\n"
    "        words = text.lower().split()\n"
    "        scores.append(len(set(words)) / len(words) if words else 0.0)\n"
    "    return scores\n",
    "def reward_matches_extra(completions, extra_data=None, **kwargs):\n"
    "    import json\n"
    "    extras = extra_data or [None] * len(completions)\n"
    "    wanted = [json.loads(extra).get('answer', '') if extra else '' for extra in extras]\n"
    "    return [float(bool(want) and want in text) for text, want in zip(completions, wanted)]\n",
)


@dataclass(frozen=True)
class SampleTask:
    """One task: its offer and its start. `start` may be sent again under another name."""

    task_type: TaskType
    task_id: str
    model: str
    params: int | None
    hours: float
    ds_size: int | None
    expected_repo_name: str
    data_url: str
    #: The dataset_type object of a text task, empty for images.
    dataset_type: dict[str, object]
    image_family: ImageModelType | None = None

    @property
    def offer_path(self) -> str:
        return OFFER_PATH[self.task_type]

    @property
    def start_path(self) -> str:
        return START_PATH[self.task_type]

    def offer(self) -> dict[str, object]:
        return {
            "ds_size": self.ds_size,
            "model": self.model,
            "hours_to_complete": self.hours,
            "task_id": self.task_id,
            "task_type": self.task_type.value,
            "model_params_count": self.params,
        }

    def start(self) -> dict[str, object]:
        common = {
            "model": self.model,
            "task_id": self.task_id,
            "hours_to_complete": self.hours,
            "expected_repo_name": self.expected_repo_name,
        }
        if self.image_family is not None:
            return {**common, "dataset_zip": self.data_url, "model_type": self.image_family.value}
        return {**common, "dataset": self.data_url, "dataset_type": self.dataset_type, "file_format": "s3"}

    def restarted(self, random: Random) -> SampleTask:
        """Return the same task as a second start names it: only the repository is new."""
        return replace(self, expected_repo_name=_uuid(random))


def example_task(task_name: str, seed: int) -> SampleTask:
    """Return the example with this short name and seed."""
    return sample_task(TaskType[task_name.upper()], Random(f"{task_name} {seed}"))  # noqa: S311


def sample_task(task_type: TaskType, random: Random) -> SampleTask:
    return _image_task(random) if not task_type.is_text else _text_task(task_type, random)


def unknown_task(random: Random, shapes: int | None = None) -> SampleTask:
    """Return a task on an unknown model, with a size, hours, rows and type of its own, or one of `shapes`."""
    shape = Random(random.randrange(shapes)) if shapes else random  # noqa: S311
    task_type = shape.choice(OFFERED_TASKS)
    params = round(10 ** shape.uniform(8.5, 10.9))
    family = shape.choice(("Qwen2.5", "Llama-3.1", "Mistral", "gemma-2", "phi-3", "other"))
    if not task_type.is_text:
        family = shape.choice(("FLUX.1", "xl"))
    owner, name = random.getrandbits(32), random.getrandbits(32)
    return replace(
        sample_task(task_type, shape),
        task_id=_uuid(random),
        model=f"u{owner:08x}/{family}-{params / 1e9:.1f}B-{name:08x}",
        params=None if not task_type.is_text else params,
        hours=round(shape.uniform(1, 10), 2),
        ds_size=(shape if not task_type.is_text else random).randint(10, 60),
    )


def _text_task(task_type: TaskType, random: Random) -> SampleTask:
    low, high = GRPO_PARAMS if task_type.generates else (0, 10**18)
    model, params = random.choice([known for known in TEXT_MODELS if low <= known[1] <= high])
    return SampleTask(
        task_type=task_type,
        task_id=_uuid(random),
        model=model,
        params=params,
        hours=float(random.randint(*random.choice(TEXT_HOURS))),
        ds_size=TEXT_DS_SIZE,
        expected_repo_name=_uuid(random),
        data_url=_presigned(random, "train_data.json"),
        dataset_type=_DATASETS[task_type](random),
    )


def _image_task(random: Random) -> SampleTask:
    family = random.choice(sorted(IMAGE_MODELS))
    return SampleTask(
        task_type=TaskType.IMAGE,
        task_id=_uuid(random),
        model=random.choice(IMAGE_MODELS[family]),
        params=None,
        hours=float(random.randint(1, 2)),
        ds_size=random.randint(10, 50),
        expected_repo_name=_uuid(random),
        data_url=_presigned(random, "train_data.zip"),
        dataset_type={},
        image_family=family,
    )


def _instruct(random: Random) -> dict[str, object]:
    return {
        "system_prompt": "",
        "system_format": "{system}",
        "field_system": random.choice((None, "system")),
        "field_instruction": "instruct",
        "field_input": random.choice((None, "input")),
        "field_output": "output",
        "format": None,
        "no_input_format": None,
        "field": None,
    }


def _chat(_random: Random) -> dict[str, object]:
    return {
        "chat_template": "chatml",
        "chat_column": "conversations",
        "chat_role_field": "from",
        "chat_content_field": "value",
        "chat_user_reference": "human",
        "chat_assistant_reference": "gpt",
    }


def _dpo(random: Random) -> dict[str, object]:
    return {
        "field_prompt": "prompt",
        "field_system": random.choice((None, "system")),
        "field_chosen": "chosen",
        "field_rejected": "rejected",
        "prompt_format": "{prompt}",
        "chosen_format": "{chosen}",
        "rejected_format": "{rejected}",
    }


def _grpo(random: Random) -> dict[str, object]:
    sources = random.sample(REWARD_FUNCTIONS, random.randint(1, len(REWARD_FUNCTIONS)))
    raw = [random.uniform(0.1, 10) for _ in sources]
    rewards = [
        {
            "reward_id": None,
            "reward_func": source,
            "reward_weight": weight / sum(raw),
            "func_hash": None,
            "is_generic": True,
            "is_manual": False,
        }
        for source, weight in zip(sources, raw, strict=True)
    ]
    reads_extra = any("extra_data" in source for source in sources)
    return {
        "field_prompt": "prompt",
        "reward_functions": rewards,
        "extra_column": "extra" if reads_extra else None,
    }


_DATASETS = {
    TaskType.INSTRUCT: _instruct,
    TaskType.CHAT: _chat,
    TaskType.DPO: _dpo,
    TaskType.GRPO: _grpo,
}


def _uuid(random: Random) -> str:
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


def _presigned(random: Random, file_name: str) -> str:
    """Return an address like a storage link of seven days. The host is reserved for examples."""
    digest = f"{random.getrandbits(256):064x}"
    return (
        f"https://storage.example.com/tuning/{random.getrandbits(64):016x}_{file_name}"
        "?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=example%2F20250601%2Fus-east-1%2Fs3%2Faws4_request"
        "&X-Amz-Date=20250601T000000Z&X-Amz-Expires=604800&X-Amz-SignedHeaders=host"
        f"&X-Amz-Signature={digest}"
    )
