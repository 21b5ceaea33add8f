"""The memory model against published measurements, against fake-mode peaks, and against common sense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from core.choices import Attention, CompileMode, Engine, Method, Optimizer, Parallelism
from core.hardware import CPU
from core.model_facts import facts_from_name
from core.planning.memory import evaluation_fits, fits, memory_of, moments, peak_bytes
from core.planning.setup import Loss, Picture, Setup
from core.planning.shape import shape_of
from core.planning.states import CONTEXT_BYTES
from core.tasks import ImageModelType, TaskType
from tests.core.planning.setups import GIB, a_setup, active_gib
from tests.doubles.each import each

LLAMA_3B, LLAMA_70B = "meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.1-70B"
FULL: dict[str, Any] = {"method": Method.FULL, "rank": 0}


@each(
    ("setup", "measured"),
    [
        (a_setup(LLAMA_3B, **FULL, micro=2, length=4096, checkpointing=False), 60.0),
        (a_setup(LLAMA_3B, **FULL, micro=2, length=4096, loss=Loss.FUSED), 24.9),
        (a_setup(LLAMA_3B, **FULL, micro=2, length=4096, loss=Loss.CHUNKED), 24.9),
        (a_setup(LLAMA_3B, rank=8, micro=2, length=4096, loss=Loss.FUSED), 8.5),
        (a_setup(rank=8, micro=2, length=2048, loss=Loss.FUSED), 16.2),
    ],
)
def test_torchtunes_published_peaks_are_met_within_ten_percent(setup: Setup, measured: float) -> None:
    assert active_gib(setup) == pytest.approx(measured, rel=0.10)


def test_the_published_sharded_8b_lies_between_no_and_full_checkpointing() -> None:
    sharded: dict[str, Any] = {"world": 8, "parallelism": Parallelism.FSDP, "length": 8192, "width": 4}
    low = active_gib(a_setup(**FULL, **{**sharded, "width": 2}))
    high = active_gib(a_setup(**FULL, **sharded, checkpointing=False))
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
WAYS = ((Loss.FULL, True), (Loss.FUSED, True), (Loss.FULL, False), (Loss.FUSED, False))


@each("tokens", FAKE_8B)
def test_every_cell_of_the_8b_sweep_is_met_within_five_percent(tokens: int) -> None:
    for (loss, checkpointing), cells in zip(WAYS, FAKE_8B[tokens], strict=True):
        for rank, measured in zip((16, 128, 512), cells or (), strict=False):
            setup = a_setup(
                rank=rank,
                length=tokens,
                loss=loss,
                checkpointing=checkpointing,
                optimizer=Optimizer.ADAMW_TORCH,
            )
            assert active_gib(setup) == pytest.approx(measured, rel=0.05), (loss, checkpointing, rank)


@each(
    ("gpus", "tokens", "loss", "rank", "measured"),
    [
        (8, 2048, Loss.FULL, 16, 27.8),
        (8, 8192, Loss.FULL, 16, 44.2),
        (8, 8192, Loss.FUSED, 16, 37.5),
        (8, 8192, Loss.FUSED, 128, 39.8),
        # Adapters in shard groups of their own, as Axolotl wraps them.
        (8, 8192, Loss.FUSED, 512, 46.7),
        (8, 32768, Loss.FUSED, 16, 79.0),
        (4, 2048, Loss.FULL, 16, 44.5),
        (4, 16384, Loss.FUSED, 16, 68.1),
        (4, 4096, Loss.FULL, 128, 54.0),
    ],
)
def test_a_sharded_70b_is_met_within_eight_percent_and_never_from_below(
    gpus: int, tokens: int, loss: Loss, rank: int, measured: float
) -> None:
    setup = a_setup(LLAMA_70B, world=gpus, parallelism=Parallelism.FSDP, length=tokens, loss=loss, rank=rank)
    assert measured <= active_gib(setup) * 1.001
    assert active_gib(setup) == pytest.approx(measured, rel=0.08)


def test_only_the_tokens_of_a_pass_matter_and_not_how_they_are_cut() -> None:
    cuts = [a_setup(micro=32, length=512), a_setup(micro=16, length=1024), a_setup(micro=8, length=2048)]
    assert max(map(active_gib, cuts)) == pytest.approx(min(map(active_gib, cuts)), rel=1e-6)


def _variants() -> list[Setup]:
    base = a_setup(micro=4, length=2048)
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
        _pictures(),
    ]


def _pictures(**changes: Any) -> Setup:
    model = facts_from_name("flux", None, ImageModelType.FLUX)
    assert model.image is not None
    picture = Picture(model.image, 1024, 4, True, False, False)
    return a_setup(model, task=TaskType.IMAGE, engine=Engine.KOHYA, picture=picture, **changes)


@each("setup", _variants())
def test_more_of_anything_never_takes_less_memory(setup: Setup) -> None:
    peak = peak_bytes(setup)
    assert peak_bytes(replace(setup, micro=setup.micro * 2)) >= peak
    assert peak_bytes(replace(setup, checkpointing=False)) >= peak
    assert peak_bytes(replace(setup, fp32_master=True)) >= peak
    if setup.picture is None:
        assert peak_bytes(replace(setup, length=setup.length * 2)) > peak
        assert peak_bytes(replace(setup, eval_micro=8)) >= peak
    if not setup.full:
        assert peak_bytes(replace(setup, rank=512)) > peak


def bytes_of(setup: Setup) -> dict[str, dict[str, float]]:
    return {one.phase: {term.name: term.bytes for term in one.terms} for one in moments(setup)}


@each("setup", _variants())
def test_the_breakdown_the_peak_and_the_search_say_the_same(setup: Setup) -> None:
    found = memory_of(setup, 80 * 10**9)
    assert found.total_bytes == pytest.approx(peak_bytes(setup), rel=1e-6)
    assert fits(setup, peak_bytes(setup) + 1)
    assert not fits(setup, peak_bytes(setup) - 1)
    assert all(peak.bytes <= found.total_bytes + 16 for peak in found.other_peaks)
    assert {one.phase for one in moments(setup)} == {found.phase, *(p.phase for p in found.other_peaks)}


def test_every_term_that_takes_memory_says_how() -> None:
    for setup in _variants():
        for one in moments(setup):
            assert all(term.why for term in one.terms if term.bytes >= 1)


def test_sharding_splits_states_and_data_parallelism_copies_gradients() -> None:
    single = memory_of(a_setup(rank=512), 0)
    ddp = memory_of(a_setup(rank=512, world=4, parallelism=Parallelism.DDP), 0)
    fsdp = memory_of(a_setup(rank=512, world=4, parallelism=Parallelism.FSDP), 0)
    assert fsdp["weights"] * 4 == pytest.approx(single["weights"], abs=4)
    assert fsdp["optimizer"] * 4 == pytest.approx(single["optimizer"], abs=4)
    assert ddp["weights"] == single["weights"]
    assert ddp["ddp buckets"] == ddp["gradients"] > 0


@pytest.mark.parametrize(
    ("optimizer", "per_param"),
    [
        (Optimizer.ADAMW_TORCH_FUSED, 8),
        (Optimizer.ADAMW_BNB_8BIT, 2.1),
        (Optimizer.LION_8BIT, 1.1),
        (Optimizer.PRODIGY, 16),
    ],
)
def test_optimizer_states_go_by_optimizer(optimizer: Optimizer, per_param: float) -> None:
    setup = a_setup(rank=64, optimizer=optimizer)
    assert memory_of(setup, 0)["optimizer"] == pytest.approx(per_param * setup.adapter_params)


def test_a_full_fine_tune_takes_eight_bytes_per_parameter_and_sixteen_with_masters() -> None:
    tiny: dict[str, Any] = {**FULL, "length": 16}
    params = 8_030_261_248
    plain = active_gib(a_setup(**tiny)) * GIB / params
    master = active_gib(a_setup(**tiny, fp32_master=True)) * GIB / params
    assert plain == pytest.approx(8, rel=0.02)
    assert master == pytest.approx(16, rel=0.02)


def test_a_moving_average_is_one_more_copy_of_what_is_trained() -> None:
    plain, averaged = a_setup(rank=256), a_setup(rank=256, ema=True)
    assert memory_of(averaged, 0)["average"] == 4 * plain.adapter_params
    assert peak_bytes(averaged) == pytest.approx(peak_bytes(plain) + 4 * plain.adapter_params)


def test_sdpa_keeps_embeddings_of_a_full_fine_tune_in_fp32() -> None:
    flash, sdpa = a_setup(**FULL), a_setup(**FULL, attention=Attention.SDPA)
    assert memory_of(sdpa, 0)["fp32 embeddings"] > 0
    assert peak_bytes(sdpa) > peak_bytes(flash)


def test_eager_attention_grows_with_the_square_of_the_length() -> None:
    short, long = (a_setup(attention=Attention.EAGER, length=n, checkpointing=False) for n in (1024, 4096))
    assert memory_of(long, 0)["activations"] > 5 * memory_of(short, 0)["activations"]


def test_a_preference_pair_costs_more_than_two_sequences() -> None:
    sft, dpo = a_setup(micro=8), a_setup(micro=4, task=TaskType.DPO)
    assert active_gib(dpo) > active_gib(sft)


def test_a_reference_copy_is_only_there_where_nothing_else_can_be_the_reference() -> None:
    full = a_setup(**FULL, task=TaskType.DPO)
    assert memory_of(full, 0)["reference"] == pytest.approx(2 * full.shape.params)
    assert memory_of(replace(full, reference_ready=True), 0)["reference"] == 0
    assert memory_of(a_setup(task=TaskType.DPO), 0)["reference"] == 0


def test_generation_holds_the_cache_of_every_completion_of_the_step() -> None:
    setup = a_setup(task=TaskType.GRPO, micro=8, accumulation=8, length=768, completion=256)
    cache = bytes_of(setup)["generation"]["kv cache"]
    assert cache == 64 * 768 * 128 * 1024  # 128 KiB per token for Llama 3.1 8B


def test_all_weights_lie_on_every_gpu_while_they_generate_and_only_then() -> None:
    setup = a_setup(task=TaskType.GRPO, world=4, parallelism=Parallelism.FSDP, length=768, completion=256)
    found = [bytes_of(replace(setup, whole=layers)) for layers in (0, 16, 29, 31, 32)]
    none, half, *nearly, whole = (each.pop("generation")["gathered"] for each in found)
    assert whole == pytest.approx(2 * (setup.shape.params + setup.adapter_params), rel=0.01)
    assert none < whole / 3
    # Those that come and go are three at a time at most.
    layer = 2 * (setup.shape.layer_params + setup.adapter_params / 32)
    assert half == pytest.approx(none + (16 + 3 - 2) * layer)
    assert nearly == [whole, whole]
    assert all(each == found[0] for each in found)


def test_layers_that_stay_gathered_anyway_are_all_there_while_it_generates() -> None:
    setup = a_setup(task=TaskType.GRPO, world=4, parallelism=Parallelism.FSDP, length=768, completion=256)
    setup = replace(setup, reshard=False)
    found = {peak_bytes(replace(setup, whole=layers)) for layers in (0, 8, 32)}
    assert len(found) == 1


def test_vllm_takes_its_share_all_the_time() -> None:
    setup = a_setup(task=TaskType.GRPO, vllm_share=0.3, length=768, completion=256)
    assert memory_of(setup, 0)["vllm"] == pytest.approx(0.3 * setup.kind.memory_bytes)
    assert "generation" not in bytes_of(setup)


def test_evaluation_sees_whole_logits_even_where_training_does_not() -> None:
    setup = a_setup(loss=Loss.FUSED, length=8192, eval_micro=16)
    assert memory_of(setup, 0).phase == "evaluation"
    assert not evaluation_fits(setup, 80e9)
    assert evaluation_fits(replace(setup, eval_micro=1), 80e9)


def test_a_cpu_has_no_cuda_context() -> None:
    assert memory_of(a_setup(kind=CPU), 0)["cuda"] == 0
    assert memory_of(a_setup(), 0)["cuda"] == CONTEXT_BYTES


def test_half_of_four_bits_is_what_a_quantised_base_takes() -> None:
    plain, quantised = a_setup(), a_setup(method=Method.QLORA)
    assert memory_of(quantised, 0)["weights"] < 0.42 * memory_of(plain, 0)["weights"]


def test_flux_with_checkpointing_takes_what_is_published_for_it() -> None:
    setup = _pictures(rank=16)
    assert 24 < peak_bytes(setup) / 1e9 < 32  # "LoRA ~26 GB"


def test_pictures_cost_by_their_area() -> None:
    large = _pictures(checkpointing=False)
    assert large.picture is not None
    small = replace(large, picture=replace(large.picture, resolution=512))
    kept = memory_of(large, 0)["activations"] / memory_of(small, 0)["activations"]
    assert kept == pytest.approx(4, rel=0.01)


def test_a_large_latent_batch_is_a_moment_of_its_own() -> None:
    setup = _pictures()
    assert setup.picture is not None
    many = replace(setup, picture=replace(setup.picture, vae_batch=64))
    assert memory_of(many, 0).phase == "latents"


def test_a_mixture_of_experts_keeps_all_weights_and_only_visited_activations() -> None:
    mixtral = facts_from_name("mistralai/Mixtral-8x7B-v0.1")
    shape = shape_of(mixtral)
    assert shape.mlp == 2 * 14336
    assert memory_of(a_setup(mixtral), 0)["weights"] == pytest.approx(2 * mixtral.params_total)
