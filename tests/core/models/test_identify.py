from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from core.domain.records import Confidence
from core.domain.tasks import ImageModelType
from core.models.facts import Family, ModelFacts
from core.models.identify import (
    TYPICAL_PARAMS,
    _counted_row,
    _scaled,
    _shape,
    _shape_steps,
    facts_from_config,
    facts_from_name,
    facts_from_name_facts,
)
from core.models.shapes import shape_params
from core.models.table import MODEL_ROWS, ModelRow
from tests.doubles.each import each

CONFIGS: dict[str, dict[str, Any]] = yaml.safe_load("""
qwen: {model_type: qwen2, hidden_size: 3584, num_hidden_layers: 28, intermediate_size: 18944,
  num_attention_heads: 28, num_key_value_heads: 4, vocab_size: 152064, max_position_embeddings: 131072,
  tie_word_embeddings: false, torch_dtype: bfloat16}
experts: {model_type: qwen3_moe, hidden_size: 2048, num_hidden_layers: 48, intermediate_size: 6144,
  num_attention_heads: 32, num_key_value_heads: 4, head_dim: 128, vocab_size: 151936,
  max_position_embeddings: 40960, num_experts: 128, num_experts_per_tok: 8, moe_intermediate_size: 768,
  tie_word_embeddings: false}
gpt2: {model_type: gpt2, n_embd: 768, n_layer: 12, n_head: 12, n_positions: 1024, vocab_size: 50257}
gemma: {model_type: gemma3, vision_config: {hidden_size: 1152}, text_config: {model_type: gemma3_text,
  hidden_size: 2560, num_hidden_layers: 34, intermediate_size: 10240, num_attention_heads: 8,
  num_key_value_heads: 4, head_dim: 256, vocab_size: 262208, sliding_window: 1024}}
""")
QWEN_7B, QWEN3_MOE, GPT2, GEMMA3 = CONFIGS.values()


def test_a_config_gives_the_exact_count() -> None:
    facts = facts_from_config(QWEN_7B, "Qwen/Qwen2.5-7B")
    assert facts.params_total == pytest.approx(7_615_616_512, rel=1e-4)
    assert (facts.family, facts.layers, facts.kv_heads, facts.head_dim) == (Family.QWEN, 28, 4, 128)
    assert facts.confidence is Confidence.CONFIG


def test_total_and_active_parameters_of_experts_differ() -> None:
    facts = facts_from_config(QWEN3_MOE)
    assert facts.params_total == pytest.approx(30.53e9, rel=0.001)
    assert facts.params_active == pytest.approx(3.35e9, rel=0.02)
    assert facts.moe is not None
    assert facts.moe.experts_per_token == 8


def test_old_spellings_and_defaults_that_configs_leave_out() -> None:
    facts = facts_from_config(GPT2)
    assert (facts.hidden, facts.intermediate, facts.kv_heads) == (768, 3072, 12)
    assert facts.tied_embeddings
    assert not facts.gated_mlp
    assert facts.params_total == pytest.approx(124.4e6, rel=0.01)


def test_the_text_part_of_a_multimodal_model() -> None:
    facts = facts_from_config(GEMMA3, "google/gemma-3-4b-it", 4_300_079_472)
    assert (facts.hidden, facts.layers, facts.sliding_window) == (2560, 34, 1024)
    assert facts.params_total == 4_300_079_472, "the tower that sees is counted too"
    assert facts.family is Family.GEMMA


@pytest.mark.parametrize(
    ("architecture", "name", "family"),
    [
        ("llama", "codellama/CodeLlama-7b", Family.CODELLAMA),
        ("llama", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", Family.LLAMA),
        ("qwen2", "somebody/llama-killer", Family.QWEN),
    ],
)
def test_a_config_keeps_the_more_exact_family_of_a_name_that_agrees(
    architecture: str, name: str, family: Family
) -> None:
    assert facts_from_config({**QWEN_7B, "model_type": architecture}, name).family is family


@pytest.mark.parametrize("lie", [0, 1, 10**15, 3_000_000_000])
def test_a_count_that_contradicts_the_config_is_not_believed(lie: int) -> None:
    assert facts_from_config(QWEN_7B, "m", lie).params_total == pytest.approx(7.6e9, rel=0.01)


@each(
    "broken",
    [
        {},
        {"hidden_size": "big", "num_hidden_layers": 3},
        {**QWEN_7B, "hidden_size": -1},
        {**QWEN_7B, "num_hidden_layers": True},
        {**QWEN_7B, "num_attention_heads": 0, "vocab_size": 10**300},
        {"text_config": [1, 2]},
        {**QWEN_7B, "num_local_experts": 10**400},
    ],
)
def test_a_broken_config_falls_back_to_the_name(broken: dict[str, Any]) -> None:
    facts = facts_from_config(broken, "Qwen/Qwen2.5-7B")
    assert facts.params_total == pytest.approx(7.6e9, rel=0.1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted({*QWEN_7B, *QWEN3_MOE, *GPT2, "text_config", "q_lora_rank", "kv_lora_rank", "n_shared_experts"})


@given(st.dictionaries(st.sampled_from(KEYS), JSON | st.integers(1, 10**6)), st.text(max_size=30))
def test_any_config_yields_facts(config: dict[str, Any], name: str) -> None:
    facts = facts_from_config(config, name)
    assert facts.params_total > 0
    assert 0 <= facts.params_active <= facts.params_total


def test_a_known_name_takes_the_published_shape() -> None:
    facts = facts_from_name("unsloth/Llama-3.2-1B-Instruct")
    assert (facts.layers, facts.hidden, facts.vocab) == (16, 2048, 128256)
    assert facts.sources["layers"] is Confidence.TABLE
    assert facts.sources["params_total"] is Confidence.NAME


def test_a_stated_count_beats_the_name() -> None:
    facts = facts_from_name("someone/nice-7b", 70_553_706_496)
    assert facts.params_total == 70_553_706_496
    assert facts.layers == 80
    assert facts.sources["params_total"] is Confidence.GIVEN


@pytest.mark.parametrize("count", [None, 0, 10**15])
def test_an_unknown_model_counts_as_a_typical_one_by_guess(count: int | None) -> None:
    facts = facts_from_name("gradients/3fa85f64", count)
    assert facts.params_total == TYPICAL_PARAMS
    assert facts.confidence is Confidence.GUESS
    assert facts.sources["params_total"] is Confidence.GUESS


@given(st.integers(10**6, 5 * 10**12), st.sampled_from(["x", "Qwen", "gpt2", "Mixtral", "bloom", "deepseek"]))
def test_shapes_between_the_published_ones_add_up(params: int, name: str) -> None:
    facts = facts_from_name(name, params)
    assert facts.params_total == params
    # Below some ten million parameters the 64-wide steps of the width are coarse.
    assert shape_params(facts).total == pytest.approx(params, rel=0.25 if params > 2 * 10**7 else 2.0)


@given(st.integers(10**8, 10**12))
def test_a_larger_model_never_has_less_width_and_depth(params: int) -> None:
    """Of one family, or the planner would fit the larger where the smaller is refused."""
    small, large = facts_from_name("unknown", params), facts_from_name("unknown", params * 4)
    assert large.layers * large.hidden >= small.layers * small.hidden


def test_image_models_are_known_by_type_alone() -> None:
    facts = facts_from_name("anyone/anything-7b", 12, ImageModelType.FLUX)
    assert facts.is_image
    assert facts.family is Family.FLUX
    assert facts.params_total == 11_900_000_000
    assert facts.embedding_params == 0
    assert facts.stored_bytes == pytest.approx(33.7e9, rel=0.01)


def test_facts_are_cached_by_what_a_name_says_and_not_by_the_name() -> None:
    facts_from_name("someone/llama-8b-first", 8_123_456_789)
    before = facts_from_name_facts.cache_info().currsize
    for number in range(100):
        name = f"someone{number}/my-llama-8b"
        assert facts_from_name(name, 8_123_456_789).model_id == name
    assert facts_from_name_facts.cache_info().currsize == before


def test_facts_survive_json() -> None:
    for facts in (facts_from_config(QWEN3_MOE), facts_from_name("a", None, ImageModelType.SDXL)):
        assert ModelFacts.model_validate_json(facts.model_dump_json()) == facts


@pytest.mark.parametrize(
    ("architecture", "hidden", "layers", "more", "counted"),
    [
        ("mamba", 768, 24, {}, 129_135_360),
        ("mamba", 2560, 64, {}, 2_768_345_600),
        ("mamba2", 2560, 64, {"num_heads": 80}, 2_702_599_680),
        ("falcon_mamba", 4096, 64, {"vocab_size": 65_024}, 7_006_326_784),
    ],
)
def test_state_space_models_have_neither_attention_nor_an_mlp(
    architecture: str, hidden: int, layers: int, more: dict[str, int], counted: int
) -> None:
    """Against the parameters that transformers counts for these configurations."""
    config = {"model_type": architecture, "hidden_size": hidden, "num_hidden_layers": layers}
    facts = facts_from_config({"vocab_size": 50_280, **config, **more}, "someone/model")
    assert facts.params_total == pytest.approx(counted, rel=0.01)


@given(st.sampled_from(MODEL_ROWS), st.floats(6, 12.6))
def test_a_shape_in_between_is_the_one_that_two_dozen_halvings_find(row: ModelRow, digits: float) -> None:
    params, low, high = round(10**digits), 1e-3, 1e3
    for _ in range(24):
        middle = math.sqrt(low * high)
        small = _counted_row(row, _shape_steps(row, middle)).total < params
        low, high = (middle, high) if small else (low, middle)
    scaled = _scaled(row, params)
    shape = scaled.layers, scaled.hidden, scaled.intermediate, scaled.heads, scaled.kv_heads, scaled.moe
    assert shape == _shape(row, _shape_steps(row, high))
