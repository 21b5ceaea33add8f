"""The memory model against published measurements, against fake-mode peaks, and against common sense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from core.domain.choices import Attention, CompileMode, Engine, Method, Optimizer, Parallelism
from core.domain.hardware import CPU
from core.domain.tasks import ImageModelType, TaskType
from core.models.identify import facts_from_name
from core.planning.candidate import NCCL_BUFFER, ImageCandidate, LossKind, RunCandidate, nccl_buffer, shape_of
from core.planning.memory.peak import evaluation_fits, fits_memory, memory_of, moments, peak_bytes
from core.planning.memory.persistent import CONTEXT_BYTES, UPDATE_BLOCK, VLLM_ASLEEP_BYTES
from tests.core.planning.candidates import GIB, a_candidate, active_gib
from tests.doubles.each import each

LLAMA_3B, LLAMA_70B = "meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.1-70B"
FULL: dict[str, Any] = {"method": Method.FULL, "rank": 0}


@each(
    ("candidate", "measured"),
    [
        (a_candidate(LLAMA_3B, **FULL, micro=2, length=4096, checkpointing=False), 60.0),
        (a_candidate(LLAMA_3B, **FULL, micro=2, length=4096, loss=LossKind.FUSED), 24.9),
        (a_candidate(LLAMA_3B, **FULL, micro=2, length=4096, loss=LossKind.CHUNKED), 24.9),
        (a_candidate(LLAMA_3B, rank=8, micro=2, length=4096, loss=LossKind.FUSED), 8.5),
        (a_candidate(rank=8, micro=2, length=2048, loss=LossKind.FUSED), 16.2),
    ],
)
def test_torchtunes_published_peaks_are_met_within_ten_percent(
    candidate: RunCandidate, measured: float
) -> None:
    assert active_gib(candidate) == pytest.approx(measured, rel=0.10)


def test_the_published_sharded_8b_lies_between_no_and_full_checkpointing() -> None:
    sharded: dict[str, Any] = {"world": 8, "parallelism": Parallelism.FSDP, "length": 8192, "width": 4}
    low = active_gib(a_candidate(**FULL, **{**sharded, "width": 2}))
    high = active_gib(a_candidate(**FULL, **sharded, checkpointing=False))
    assert low < 47.7 < high


#: Peaks of Llama 3.1 8B in GiB on fake tensors, all layers or extrapolated: tokens per pass, then per rank
#: (16, 128, 512) with plain and fused loss, checkpointed and not.
FAKE_8B: dict[int, tuple[tuple[float, float, float] | None, ...]] = {
    512: ((16.3, 21.2, 40.0), (15.7, 21.2, 40.0), (19.6, 23.4, 40.0), (18.9, 22.7, 40.0)),
    1024: ((17.2, 21.2, 40.0), (16.0, 21.2, 40.0), (23.6, 27.5, 40.8), (22.3, 26.1, 40.0)),
    2048: ((18.9, 22.2, 40.0), (16.6, 21.2, 40.0), (31.7, 35.6, 49.1), (29.0, 32.9, 46.4)),
    4096: ((22.4, 25.7, 40.0), (17.7, 21.3, 40.0), (47.9, 51.9, 65.7), (42.5, 46.6, 60.3)),
    8192: ((29.3, 32.6, 44.4), (20.1, 23.4, 40.0), (80.3, 84.6, 99.0), (69.6, 73.8, 88.2)),
    16384: ((43.2, 46.4, 57.7), (24.7, 28.0, 40.4), (145, 150, 165), (124, 128, 144)),
    32768: ((70.9, 74.2, 85.4), (33.9, 37.3, 48.8), None, None),
    65536: ((126, 130, 141), (52.5, 55.9, 67.5), None, None),
}
WAYS = ((LossKind.FULL, True), (LossKind.FUSED, True), (LossKind.FULL, False), (LossKind.FUSED, False))


@each("tokens", FAKE_8B)
def test_every_cell_of_the_8b_sweep_is_met_within_five_percent(tokens: int) -> None:
    for (loss, checkpointing), cells in zip(WAYS, FAKE_8B[tokens], strict=True):
        for rank, measured in zip((16, 128, 512), cells or (), strict=False):
            candidate = a_candidate(
                rank=rank,
                length=tokens,
                loss=loss,
                checkpointing=checkpointing,
                optimizer=Optimizer.ADAMW_TORCH,
            )
            assert active_gib(candidate) == pytest.approx(measured, rel=0.05), (loss, checkpointing, rank)


#: GiB on fake tensors of 4 × 1,024 tokens with the fused loss: a full fine-tune and rank 64 with dropout,
#: each checkpointed and not. Half of LFM2's layers are convolutions, as they can be measured.
FAKE_MIXERS = {
    "tiiuae/Falcon-H1-1.5B-Base": ((12.45, 35.50), (5.43, 31.86)),
    "LiquidAI/LFM2.5-1.2B-Base": ((9.16, 14.60), (3.87, 11.77)),
}


@each("name", FAKE_MIXERS)
def test_convolutions_and_state_spaces_are_met_within_eight_percent(name: str) -> None:
    facts = facts_from_name(name)
    assert facts.mixer is not None
    if not facts.mixer.heads:
        halves = dict.fromkeys(("layers", "attention_layers"), facts.layers // 2)
        facts = facts.model_copy(update={"mixer": facts.mixer.model_copy(update=halves)})
    for method, cells in zip((Method.FULL, Method.LORA), FAKE_MIXERS[name], strict=True):
        for checkpointing, measured in zip((True, False), cells, strict=True):
            candidate = a_candidate(
                facts,
                method=method,
                rank=64 if method is Method.LORA else 0,
                dropout=method is Method.LORA,
                micro=4,
                length=1024,
                loss=LossKind.FUSED,
                checkpointing=checkpointing,
            )
            assert active_gib(candidate) == pytest.approx(measured, rel=0.08), (method, checkpointing)


@each(
    ("gpus", "tokens", "loss", "rank", "measured"),
    [
        (8, 2048, LossKind.FULL, 16, 27.8),
        (8, 8192, LossKind.FULL, 16, 44.2),
        (8, 8192, LossKind.FUSED, 16, 37.5),
        (8, 8192, LossKind.FUSED, 128, 39.8),
        # Adapters in shard groups of their own, as Axolotl wraps them.
        (8, 8192, LossKind.FUSED, 512, 46.7),
        (8, 32768, LossKind.FUSED, 16, 79.0),
        (4, 2048, LossKind.FULL, 16, 44.5),
        (4, 16384, LossKind.FUSED, 16, 68.1),
        (4, 4096, LossKind.FULL, 128, 54.0),
    ],
)
def test_a_sharded_70b_is_met_within_eight_percent_and_never_from_below(
    gpus: int, tokens: int, loss: LossKind, rank: int, measured: float
) -> None:
    candidate = a_candidate(
        LLAMA_70B, world=gpus, parallelism=Parallelism.FSDP, length=tokens, loss=loss, rank=rank
    )
    assert measured <= active_gib(candidate) * 1.001
    assert active_gib(candidate) == pytest.approx(measured, rel=0.08)


def test_only_the_tokens_of_a_pass_matter_and_not_how_they_are_cut() -> None:
    cuts = [active_gib(a_candidate(micro=micro, length=16_384 // micro)) for micro in (8, 16, 32)]
    assert max(cuts) == pytest.approx(min(cuts), rel=1e-6)


def _variants() -> list[RunCandidate]:
    base = a_candidate(micro=4, length=2048)
    return [
        base,
        replace(base, method=Method.QLORA),
        replace(base, method=Method.FULL, rank=0),
        replace(base, task=TaskType.DPO),
        replace(base, task=TaskType.GRPO, completion=256, accumulation=4),
        replace(base, world=4, parallelism=Parallelism.DDP),
        replace(base, world=4, parallelism=Parallelism.FSDP),
        replace(base, attention=Attention.EAGER),
        replace(base, compile_mode=CompileMode.MAX_AUTOTUNE),
        _images(),
    ]


def _images(**changes: Any) -> RunCandidate:
    model = facts_from_name("flux", None, ImageModelType.FLUX)
    assert model.image is not None
    image = ImageCandidate(model.image, (1024,), 4, True, False, False)
    return a_candidate(model, task=TaskType.IMAGE, engine=Engine.KOHYA, image=image, **changes)


@each("candidate", _variants())
def test_more_of_anything_never_takes_less_memory(candidate: RunCandidate) -> None:
    peak = peak_bytes(candidate)
    assert peak_bytes(replace(candidate, micro=candidate.micro * 2)) >= peak
    assert peak_bytes(replace(candidate, checkpointing=False)) >= peak
    assert peak_bytes(replace(candidate, fp32_master=True)) >= peak
    if candidate.image is None:
        assert peak_bytes(replace(candidate, length=candidate.length * 2)) > peak
        assert peak_bytes(replace(candidate, eval_micro=8)) >= peak
    if not candidate.full:
        assert peak_bytes(replace(candidate, rank=512)) > peak


def bytes_of(candidate: RunCandidate) -> dict[str, dict[str, float]]:
    return {moment.phase: {term.name: term.bytes for term in moment.terms} for moment in moments(candidate)}


@each("candidate", _variants())
def test_the_breakdown_the_peak_and_the_search_agree(candidate: RunCandidate) -> None:
    breakdown, peak = memory_of(candidate, 80 * 10**9), peak_bytes(candidate)
    assert breakdown.total_bytes == pytest.approx(peak, rel=1e-6)
    assert fits_memory(candidate, peak + 1)
    assert not fits_memory(candidate, peak - 1)
    assert all(other.bytes <= breakdown.total_bytes + 16 for other in breakdown.other_peaks)
    assert bytes_of(candidate).keys() == {breakdown.phase, *(other.phase for other in breakdown.other_peaks)}


def test_sharding_splits_states_and_data_parallelism_copies_gradients() -> None:
    single = memory_of(a_candidate(rank=512), 0)
    ddp = memory_of(a_candidate(rank=512, world=4, parallelism=Parallelism.DDP), 0)
    fsdp = memory_of(a_candidate(rank=512, world=4, parallelism=Parallelism.FSDP), 0)
    assert fsdp["weights"] * 4 == pytest.approx(single["weights"], abs=4)
    assert fsdp["optimizer"] * 4 == pytest.approx(single["optimizer"], abs=4)
    assert ddp["weights"] == single["weights"]
    assert ddp["ddp buckets"] == ddp["gradients"] > 0


@pytest.mark.parametrize(("fp32_master", "per_param"), [(False, 8), (True, 16)])
def test_a_full_fine_tune_takes_so_many_bytes_per_parameter(fp32_master: bool, per_param: int) -> None:
    candidate = a_candidate(**FULL, length=16, fp32_master=fp32_master)
    assert active_gib(candidate) * GIB / candidate.shape.params == pytest.approx(per_param, rel=0.02)


NATIVE: dict[str, Any] = {"engine": Engine.NATIVE, **FULL}


def test_the_native_trainer_has_bf16_embeddings_and_splits_the_base_that_a_kl_needs() -> None:
    sdpa = a_candidate(**NATIVE, attention=Attention.SDPA)
    assert memory_of(sdpa, 0)["fp32 embeddings"] == 0
    split = a_candidate(**NATIVE, world=4, parallelism=Parallelism.FSDP, kl=True)
    assert memory_of(split, 0)["reference"] * 4 == pytest.approx(2 * split.shape.params, abs=4)


@each(
    ("optimizer", "master", "per_number"),
    [
        (Optimizer.ADAMW_TORCH, True, 4),
        (Optimizer.ADAMW_TORCH, False, 24),
        (Optimizer.ADAMW_TORCH_8BIT, False, 24),
    ],
)
def test_the_native_trainer_updates_no_more_than_a_block_at_a_time(
    optimizer: Optimizer, master: bool, per_number: int
) -> None:
    candidate = a_candidate(**NATIVE, optimizer=optimizer, fp32_master=master)
    assert bytes_of(candidate)["optimizer step"]["optimizer work"] == per_number * UPDATE_BLOCK
    fp32 = replace(candidate, width=4, fp32_master=False)
    assert bytes_of(fp32)["optimizer step"]["optimizer work"] == 0


def test_muons_embeddings_have_both_states_of_adamw() -> None:
    """The embeddings' states are twice a matrix's, for each engine."""
    candidate = a_candidate(**FULL, optimizer=Optimizer.MUON)
    numbers = candidate.shape.params + candidate.shape.embedding_params
    assert memory_of(candidate, 0)["optimizer"] == 2 * numbers


def test_a_moving_average_is_one_more_copy_of_what_is_trained() -> None:
    plain, averaged = a_candidate(rank=256), a_candidate(rank=256, ema=True)
    assert memory_of(averaged, 0)["average"] == 4 * plain.adapter_params
    assert peak_bytes(averaged) == pytest.approx(peak_bytes(plain) + 4 * plain.adapter_params)


def test_sdpa_keeps_embeddings_of_a_full_fine_tune_in_fp32() -> None:
    flash, sdpa = a_candidate(**FULL), a_candidate(**FULL, attention=Attention.SDPA)
    assert memory_of(sdpa, 0)["fp32 embeddings"] > 0
    assert peak_bytes(sdpa) > peak_bytes(flash)


def test_eager_attention_grows_with_the_square_of_the_length() -> None:
    eager = a_candidate(attention=Attention.EAGER, length=1024, checkpointing=False)
    longer = replace(eager, length=4096)
    assert memory_of(longer, 0)["activations"] > 5 * memory_of(eager, 0)["activations"]


def test_only_a_full_fine_tune_needs_a_copy_of_the_reference() -> None:
    full = a_candidate(**FULL, task=TaskType.DPO)
    assert memory_of(full, 0)["reference"] == pytest.approx(2 * full.shape.params)
    assert memory_of(replace(full, reference_ready=True), 0)["reference"] == 0
    assert memory_of(a_candidate(task=TaskType.DPO), 0)["reference"] == 0


def test_generation_holds_the_cache_of_every_completion_of_the_step() -> None:
    candidate = a_candidate(task=TaskType.GRPO, micro=8, accumulation=8, length=768, completion=256)
    cache = bytes_of(candidate)["generation"]["kv cache"]
    assert cache == 64 * 768 * 128 * 1024  # 128 KiB per token for Llama 3.1 8B


GENERATING = a_candidate(
    task=TaskType.GRPO, world=4, parallelism=Parallelism.FSDP, length=768, completion=256
)


def test_all_weights_lie_on_every_gpu_while_they_generate_and_only_then() -> None:
    moments_of = [bytes_of(replace(GENERATING, gathered_layers=layers)) for layers in (0, 16, 29, 31, 32)]
    none, half, *nearly, every = (each.pop("generation")["gathered"] for each in moments_of)
    assert every == pytest.approx(2 * (GENERATING.shape.params + GENERATING.adapter_params), rel=0.01)
    assert none < every / 3
    # Those that come and go are three at a time at most.
    layer = 2 * (GENERATING.shape.layer_params + GENERATING.adapter_params / 32)
    assert half == pytest.approx(none + (16 + 3 - 2) * layer)
    assert nearly == [every, every]
    assert all(others == moments_of[0] for others in moments_of)


def test_without_resharding_all_layers_are_gathered_to_generate() -> None:
    kept = replace(GENERATING, reshard=False)
    assert len({peak_bytes(replace(kept, gathered_layers=layers)) for layers in (0, 8, 32)}) == 1


def test_vllm_always_takes_its_share() -> None:
    candidate = a_candidate(task=TaskType.GRPO, vllm_share=0.3, length=768, completion=256)
    assert memory_of(candidate, 0)["vllm"] == pytest.approx(0.3 * candidate.kind.memory_bytes)
    assert "generation" not in bytes_of(candidate)


def test_a_vllm_that_sleeps_takes_its_share_only_while_it_generates() -> None:
    candidate = a_candidate(
        task=TaskType.GRPO, vllm_share=0.5, vllm_sleep=True, micro=8, length=768, completion=256
    )
    moments_of = bytes_of(candidate)
    asleep = {name: parts["vllm"] for name, parts in moments_of.items()}
    assert set(asleep.values()) == {VLLM_ASLEEP_BYTES}
    awake = moments_of["generation"]["vllm awake"]
    assert awake + VLLM_ASLEEP_BYTES == pytest.approx(0.5 * candidate.kind.memory_bytes)
    assert all("vllm awake" not in parts for name, parts in moments_of.items() if name != "generation")
    assert peak_bytes(candidate) < peak_bytes(replace(candidate, vllm_sleep=False))


def test_completions_that_wait_need_no_memory() -> None:
    candidate = a_candidate(
        task=TaskType.GRPO, generations=4, micro=8, accumulation=8, length=768, completion=256
    )
    some = bytes_of(replace(candidate, together=16))["generation"]
    assert some["kv cache"] == bytes_of(candidate)["generation"]["kv cache"] / 4
    assert some["generation"] < bytes_of(candidate)["generation"]["generation"]


def test_evaluation_needs_full_logits_even_if_training_does_not() -> None:
    candidate = a_candidate(loss=LossKind.FUSED, length=8192, eval_micro=16)
    assert memory_of(candidate, 0).phase == "evaluation"
    assert not evaluation_fits(candidate, 80e9)
    assert evaluation_fits(replace(candidate, eval_micro=1), 80e9)


@each(
    ("env", "world", "parallelism", "more"),
    [
        ({}, 4, Parallelism.DDP, 0),
        ({"NCCL_BUFFSIZE": "4194304"}, 4, Parallelism.DDP, 0),
        ({"NCCL_BUFFSIZE": "1048576"}, 4, Parallelism.DDP, 0),
        ({"NCCL_BUFFSIZE": "8M"}, 4, Parallelism.DDP, 0),  # no number: NCCL's default
        ({"NCCL_BUFFSIZE": "8388608"}, 1, Parallelism.SINGLE, 0),
        ({"NCCL_BUFFSIZE": "8388608"}, 4, Parallelism.DDP, 4 * 2**20 * 32 * 3),
        ({"NCCL_BUFFSIZE": "8388608"}, 8, Parallelism.DDP, 4 * 2**20 * 32 * 5),
        ({"NCCL_BUFFSIZE": "8388608"}, 8, Parallelism.FSDP, 4 * 2**20 * 32 * 5 * 2),
    ],
)
def test_larger_buffers_of_nccl_are_counted_for_each_channel_and_peer(
    env: dict[str, str], world: int, parallelism: Parallelism, more: int
) -> None:
    def links(buffer: int) -> int:
        candidate = a_candidate(world=world, parallelism=parallelism, nccl_buffer=buffer)
        return memory_of(candidate, 0)["cuda"]

    assert links(nccl_buffer(env)) - links(NCCL_BUFFER) == more


def test_a_cpu_has_no_cuda_context() -> None:
    assert memory_of(a_candidate(kind=CPU), 0)["cuda"] == 0
    assert memory_of(a_candidate(), 0)["cuda"] == CONTEXT_BYTES


def test_flux_with_checkpointing_takes_what_is_published_for_it() -> None:
    candidate = _images(rank=16)
    assert 24 < peak_bytes(candidate) / 1e9 < 32  # "LoRA ~26 GB"


def test_images_cost_by_their_area_and_a_large_latent_batch_is_a_moment_of_its_own() -> None:
    large = _images(checkpointing=False)
    assert large.image is not None
    small = replace(large, image=replace(large.image, resolutions=(512,)))
    shrinks = memory_of(large, 0)["activations"] / memory_of(small, 0)["activations"]
    assert shrinks == pytest.approx(4, rel=0.01)
    assert memory_of(replace(large, image=replace(large.image, vae_batch=64)), 0).phase == "latents"


def test_a_mixture_of_experts_keeps_all_weights_and_only_visited_activations() -> None:
    mixtral = facts_from_name("mistralai/Mixtral-8x7B-v0.1")
    shape = shape_of(mixtral)
    assert shape.mlp == 2 * 14336
    assert memory_of(a_candidate(mixtral), 0)["weights"] == pytest.approx(2 * mixtral.params_total)
