"""Operations per token as counted, seconds per step as published and as physics allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from core.domain.choices import CompileMode, Method, Parallelism
from core.domain.hardware import GPU_KINDS
from core.domain.tasks import TaskType
from core.planning.candidate import RunCandidate
from core.planning.time.speed import (
    PassWork,
    evaluation_seconds,
    forward_flops,
    generate_seconds,
    matmul_params,
    step_time,
    training_flops,
)
from tests.core.planning.candidates import a_candidate
from tests.doubles.each import each

N = 8_030_261_248
FULL: dict[str, Any] = {"method": Method.FULL, "rank": 0}


@each(
    ("candidate", "counted"),
    [
        (a_candidate(**FULL, checkpointing=False), 5.84),
        (a_candidate(**FULL), 7.18),
        (a_candidate(checkpointing=False), 4.00),
        (a_candidate(), 5.82),
        (a_candidate(rank=128), 6.11),
        (a_candidate(rank=512), 7.10),
    ],
)
def test_operations_per_token_are_those_that_were_counted(candidate: RunCandidate, counted: float) -> None:
    """Over all GEMMs of Llama 3.1 8B at 2048 tokens, attention's own products left out of the count."""
    without_attention = training_flops(candidate, 0.0)
    assert without_attention / N == pytest.approx(counted, rel=0.08)


def test_a_preference_step_adds_the_references_pass_unless_it_is_ready() -> None:
    dpo = a_candidate(task=TaskType.DPO)
    ready = replace(dpo, reference_ready=True)
    extra = training_flops(dpo, 0.0) - training_flops(ready, 0.0)
    assert extra == pytest.approx(forward_flops(dpo, 0.0))
    assert training_flops(dpo, 0.0) / N == pytest.approx(7.76, rel=0.03)


def test_attention_grows_with_the_row_and_is_a_few_percent_at_2k() -> None:
    candidate = a_candidate(**FULL, checkpointing=False)
    share = training_flops(candidate, 2048) / training_flops(candidate, 0) - 1
    assert 0.02 < share < 0.05


def test_an_untied_embedding_table_is_looked_up_and_not_multiplied() -> None:
    candidate = a_candidate()
    assert matmul_params(candidate) == candidate.shape.params - 128_256 * 4096


def _tokens_per_second(candidate: RunCandidate) -> float:
    tokens = candidate.micro * candidate.length
    return tokens / step_time(candidate, PassWork(tokens, 512)).seconds


@pytest.mark.parametrize(
    ("candidate", "published", "best"),
    [
        # NVIDIA's tuned fp8 stack; ours is eager Hugging Face.
        (a_candidate(micro=4, length=2048, checkpointing=False), 16_900, 24_824),
        (a_candidate(**FULL, micro=4, length=2048, checkpointing=False), 10_643, 16_891),
        (a_candidate("meta-llama/Llama-3.1-70B", micro=2, length=4096), 1_050, 2_643),
    ],
    ids=["8B LoRA", "8B full", "70B LoRA"],
)
def test_the_prior_is_a_little_below_the_best_published(
    candidate: RunCandidate, published: float, best: float
) -> None:
    predicted = _tokens_per_second(candidate)
    assert predicted < best
    assert 0.4 * published < predicted < 1.1 * published


def test_utilisation_stays_in_the_range_seen_on_h100() -> None:
    for candidate in (a_candidate(micro=4, length=2048), a_candidate(**FULL, micro=4, length=2048)):
        step = step_time(candidate, PassWork(8192, 1024))
        assert 0.22 < step.flops / step.seconds / candidate.kind.bf16_flops < 0.45


def test_an_a100_is_predicted_below_what_was_measured_on_it() -> None:
    candidate = a_candidate(
        "meta-llama/Llama-3.2-3B",
        **FULL,
        kind=GPU_KINDS["A100-SXM-80GB"],
        micro=2,
        length=4096,
        checkpointing=False,
    )
    assert 0.7 * 7_075 < _tokens_per_second(candidate) < 7_075


def test_small_passes_wait_for_kernels_to_be_launched() -> None:
    small, large = a_candidate(micro=1, length=512), a_candidate(micro=8, length=1024)
    assert _tokens_per_second(small) < 0.7 * _tokens_per_second(large)


def _throughput(candidate: RunCandidate) -> float:
    return candidate.world * _tokens_per_second(candidate)


@pytest.mark.parametrize("parallelism", [Parallelism.DDP, Parallelism.FSDP])
def test_more_gpus_on_nvlink_train_more(parallelism: Parallelism) -> None:
    single = a_candidate(micro=4, length=2048)
    several = [replace(single, world=n, parallelism=parallelism) for n in (2, 4, 8)]
    rates = [_throughput(single), *map(_throughput, several)]
    assert rates == sorted(rates)
    assert rates[-1] > 5 * rates[0]


def test_bridged_pairs_pay_for_the_third_gpu() -> None:
    shard: dict[str, Any] = {"parallelism": Parallelism.FSDP, "kind": GPU_KINDS["H100-PCIE"], **FULL}
    two, four = (a_candidate(**shard, world=n, micro=1, length=2048) for n in (2, 4))
    assert _throughput(four) < 2 * _throughput(two) * 0.7


def test_compiling_and_fp8_help_full_fine_tunes() -> None:
    plain = a_candidate(**FULL, micro=4, length=2048, checkpointing=False)
    compiled = replace(plain, compile_mode=CompileMode.DEFAULT)
    fp8 = replace(compiled, fp8=True)
    rates = list(map(_tokens_per_second, (plain, compiled, fp8)))
    assert rates == sorted(rates)
    assert rates[2] / rates[1] < 1.5
    lora = a_candidate(micro=4, length=2048, compile_mode=CompileMode.DEFAULT)
    assert _tokens_per_second(replace(lora, fp8=True)) == _tokens_per_second(lora)


def test_generation_dominates_a_grpo_step_and_vllm_shortens_it() -> None:
    grpo = a_candidate(task=TaskType.GRPO, micro=8, accumulation=4, length=768, completion=256)
    step = step_time(grpo, PassWork(8 * 600, 600))
    assert 0.5 < step.generate_s / step.seconds < 0.95
    assert step_time(replace(grpo, vllm_share=0.3), PassWork(8 * 600, 600)).generate_s < step.generate_s / 3


def test_sharded_generation_gathers_the_model_for_every_token_or_once_or_most_of_it_once() -> None:
    grpo = a_candidate(task=TaskType.GRPO, world=4, parallelism=Parallelism.DDP, length=768, completion=256)
    sharded = replace(grpo, parallelism=Parallelism.FSDP)
    ways = (grpo, sharded, *(replace(sharded, gathered_layers=layers) for layers in (24, 32)))
    alone, every, most, once = (step_time(way, PassWork(600, 600)).generate_s for way in ways)
    assert every > 1.5 * alone
    assert alone < once < 1.1 * alone
    # What the engine's own generation reads several times is little beside.
    assert most == pytest.approx(once + (every - once) / 4, rel=0.01)


def test_evaluation_costs_a_third_of_training_at_most_and_nothing_without_rows() -> None:
    candidate = a_candidate(micro=8, length=1024, eval_micro=8)
    work = PassWork(8192, 512)
    seconds = evaluation_seconds(candidate, 800, work, 512)
    assert evaluation_seconds(candidate, 0, work, 512) == 0
    assert seconds - 2 < step_time(candidate, work).seconds * 100 / 2


def test_a_generation_of_a_few_waits_for_the_weights_and_one_of_many_for_products() -> None:
    def token_s(completions: int) -> float:
        """Return the seconds of a token, without the prompts' part."""
        grpo = a_candidate(task=TaskType.GRPO, micro=8, accumulation=completions // 8, length=512)
        short, long = (replace(grpo, vllm_share=0.5, completion=tokens) for tokens in (128, 256))
        return (generate_seconds(long) - generate_seconds(short)) / 128

    assert token_s(64) < 1.2 * token_s(16)
    assert token_s(4096) > 1.8 * token_s(2048)
    products = 4096 * forward_flops(a_candidate(), 256.0) / (GPU_KINDS["H100-SXM"].bf16_flops)
    assert token_s(4096) > products, "no faster than the GPU's peak"
