"""Generate offers like those of validators: for planning, benchmarks and backtests.

Task types, sizes, hours and dataset sizes follow the validators' scheduler. How common each family is is
a guess from the Hub; how often offers come is up to the caller. The same seed gives the same
offers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from core.domain.tasks import TaskType
from core.domain.wire import MinerTaskOffer
from miner.offers.past_offers import HistoricalOffer

#: (task type, how common): half of the instruct share is chat.
TASK_MIX: tuple[tuple[TaskType, float], ...] = (
    (TaskType.INSTRUCT, 0.20),
    (TaskType.CHAT, 0.20),
    (TaskType.IMAGE, 0.20),
    (TaskType.DPO, 0.15),
    (TaskType.GRPO, 0.25),
)
#: Rows of a dataset and the whole hours that go with them, both drawn evenly (rows by their logarithm).
DATASET_BINS: tuple[tuple[int, int, int, int], ...] = (
    (1_000, 10_000, 1, 3),
    (10_000, 25_000, 2, 4),
    (25_000, 50_000, 3, 5),
    (50_000, 100_000, 3, 6),
    (100_000, 500_000, 4, 6),
)
IMAGE_HOURS, IMAGE_PAIRS = (1, 2), (10, 50)
#: Models from 12B on, and how often one of them is drawn.
BIG_FROM, BIG_SHARE = 12e9, 0.05
MIN_GRPO_PARAMS = 1e9
#: Size that every text offer states for its dataset since 2025-05.
STATED_ROWS = 100_000
#: Offers without a parameter count: the validator's lookup failed.
SHARE_WITHOUT_PARAMS = 0.05


#: (name, parameters, how common within its size).
_MODELS: tuple[tuple[str, int, float], ...] = (
    ("HuggingFaceTB/SmolLM2-135M", 134_515_008, 1),
    ("EleutherAI/pythia-160m", 162_322_944, 1),
    ("openai-community/gpt2", 124_439_808, 1),
    ("facebook/opt-350m", 331_196_416, 1),
    ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768, 4),
    ("bigscience/bloom-560m", 559_214_592, 1),
    ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1_100_048_384, 3),
    ("unsloth/Llama-3.2-1B", 1_235_814_400, 4),
    ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304, 4),
    ("EleutherAI/pythia-1.4b", 1_414_647_808, 1),
    ("HuggingFaceTB/SmolLM2-1.7B", 1_711_376_384, 1),
    ("unsloth/gemma-2-2b-it", 2_614_341_888, 2),
    ("microsoft/phi-2", 2_779_683_840, 1),
    ("unsloth/Llama-3.2-3B-Instruct", 3_212_749_824, 3),
    ("Qwen/Qwen2.5-3B-Instruct", 3_085_938_688, 3),
    ("microsoft/Phi-3-mini-4k-instruct", 3_821_079_552, 2),
    ("mistralai/Mistral-7B-Instruct-v0.3", 7_248_023_552, 3),
    ("tiiuae/falcon-7b", 6_921_720_704, 1),
    ("codellama/CodeLlama-7b-hf", 6_738_546_688, 1),
    ("lmsys/vicuna-7b-v1.5", 6_738_415_616, 1),
    ("NousResearch/Llama-2-7b-chat-hf", 6_738_415_616, 2),
    ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512, 4),
    ("NousResearch/Meta-Llama-3-8B-Instruct", 8_030_261_248, 3),
    ("unsloth/Llama-3.1-8B-Instruct", 8_030_261_248, 3),
    ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 8_030_261_248, 1),
    ("unsloth/gemma-2-9b-it", 9_241_705_984, 2),
    ("upstage/SOLAR-10.7B-Instruct-v1.0", 10_731_524_096, 1),
    ("NousResearch/Llama-2-13b-hf", 13_015_864_320, 2),
    ("Qwen/Qwen2.5-14B-Instruct", 14_770_033_664, 3),
    ("microsoft/phi-4", 14_659_507_200, 2),
    ("mistralai/Mistral-Small-24B-Instruct-2501", 23_572_403_200, 2),
    ("Qwen/Qwen2.5-32B-Instruct", 32_763_876_352, 2),
    ("codellama/CodeLlama-34b-hf", 33_743_970_304, 1),
    ("unsloth/Llama-3.3-70B-Instruct", 70_553_706_496, 2),
)
_IMAGE_MODELS: tuple[tuple[str, float], ...] = (
    ("stabilityai/stable-diffusion-xl-base-1.0", 2),
    ("John6666/nova-anime-xl-sdxl", 2),
    ("RunDiffusion/Juggernaut-XL-v9", 2),
    ("dataautogpt3/FLUX-MonochromeManga", 2),
    ("rayonlabs/FLUX.1-dev", 4),
)


def synthetic_offers(
    seed: int, *, days: float, per_day: float, start: float = 0.0
) -> Iterator[HistoricalOffer]:
    """Arrivals are independent of each other (a Poisson process)."""
    draw = random.Random(seed)  # noqa: S311 - synthetic offers, no secret
    at, number, end = start, 0, start + days * 86_400
    while (at := at + draw.expovariate(per_day / 86_400)) < end:
        yield _synthetic_offer(draw, at, f"synthetic-{seed}-{number}")
        number += 1


def _synthetic_offer(draw: random.Random, at: float, task_id: str) -> HistoricalOffer:
    task_type = draw.choices([kind for kind, _ in TASK_MIX], [share for _, share in TASK_MIX])[0]
    params: int | None = None
    if not task_type.is_text:
        name = draw.choices([name for name, _ in _IMAGE_MODELS], [common for _, common in _IMAGE_MODELS])[0]
        rows = stated = draw.randint(*IMAGE_PAIRS)
        hours = draw.randint(*IMAGE_HOURS)
    else:
        name, params = _model(draw, task_type)
        fewest, most, shortest, longest = draw.choice(DATASET_BINS)
        rows, stated = round(math.exp(draw.uniform(math.log(fewest), math.log(most)))), STATED_ROWS
        hours = draw.randint(shortest, longest)
        params = None if draw.random() < SHARE_WITHOUT_PARAMS else params
    offer = MinerTaskOffer(
        model=name,
        hours_to_complete=float(hours),
        task_id=task_id,
        task_type=task_type,
        ds_size=stated,
        model_params_count=params,
    )
    return HistoricalOffer(at, offer, rows)


def _model(draw: random.Random, task_type: TaskType) -> tuple[str, int]:
    least = MIN_GRPO_PARAMS if task_type.generates else 0
    is_big = draw.random() < BIG_SHARE
    models = [model for model in _MODELS if (model[1] >= BIG_FROM) is is_big and model[1] >= least]
    name, params, _ = draw.choices(models, [common for *_, common in models])[0]
    return name, params
