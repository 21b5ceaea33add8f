from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.domain.tasks import ImageModelType
from core.models.facts import Family
from core.models.image_families import image_type_from_name
from core.models.names import family_from_name, params_from_name, usable_count
from tests.doubles.each import each


@each(
    ("name", "family"),
    [
        ("unsloth/Meta-Llama-3.1-8B-Instruct", Family.LLAMA),
        ("codellama/CodeLlama-7b-hf", Family.CODELLAMA),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", Family.QWEN),
        ("deepseek-ai/deepseek-coder-6.7b-base", Family.DEEPSEEK),
        ("mistralai/Mixtral-8x7B-v0.1", Family.MIXTRAL),
        ("HuggingFaceH4/zephyr-7b-beta", Family.MISTRAL),
        ("microsoft/phi_2", Family.PHI),
        ("cognitivecomputations/dolphin-x", Family.UNKNOWN),
        ("facebook/opt-125m", Family.OPT),
        ("01-ai/Yi-6B", Family.YI),
        ("Qwen/some-llama-8b", Family.LLAMA),
        ("qwen-fans/tuned", Family.QWEN),
        ("gradients/a8f3e2c91b", Family.UNKNOWN),
        ("LiquidAI/LFM2.5-1.2B-Base", Family.LFM),
        ("openbmb/MiniCPM5-1B", Family.LLAMA),
    ],
)
def test_families_are_read_from_the_repository_s_name_before_its_owner_s(name: str, family: Family) -> None:
    assert family_from_name(name) is family


@each(
    ("name", "params"),
    [
        ("Qwen/Qwen1.5-7B", 7e9),
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.5e9),
        ("Qwen/Qwen3-30B-A3B", 30e9),
        ("Qwen/Qwen2.5-7B-Instruct-1M", 7e9),
        ("meta-llama/Llama-3.2-1B", 1.236e9),
        ("meta-llama/Llama-2-70b-chat-hf", 70e9),
        ("big/72B-distilled-to-7B", 72e9),
        ("google/gemma-2-2b-it", 2.614e9),
        ("google/gemma-7b", 8.538e9),
        ("bigscience/bloom-1b7", 1.7e9),
        ("stabilityai/stablelm-2-1_6b", 1.6e9),
        ("mistralai/Mixtral-8x7B-v0.1", 8 * 7e9 * 0.83),
        ("unsloth/llama-3-8b-bnb-4bit", 8e9),
        ("HuggingFaceTB/SmolLM-135M", 135e6),
        ("openai-community/gpt2-xl", 1.558e9),
        ("openai-community/gpt2", 0.124e9),
        ("a/gpt2-70b", 70e9),
        ("microsoft/phi-1_5", 1.418e9),
        ("deepseek-ai/DeepSeek-R1", 671e9),
        ("NousResearch/Yarn-Llama-2-7b-128k", 7e9),
    ],
)
def test_sizes_are_read_from_names(name: str, params: float) -> None:
    assert params_from_name(name) == round(params)


@each("name", ["a/model", "a/v0.1", "a/4bit", "a/x-0b", "a/9999b", "a/a3b", ""])
def test_a_name_without_a_plausible_size_has_none(name: str) -> None:
    assert params_from_name(name) is None


@each("count", [None, 0, 1, 999_999, 10**15, -5])
def test_counts_that_no_model_has_are_not_used(count: int | None) -> None:
    assert usable_count(count) is None


def test_image_types_are_guessed_for_offers_that_name_none() -> None:
    assert image_type_from_name("black-forest-labs/FLUX.1-dev") is ImageModelType.FLUX
    assert image_type_from_name("Tongyi-MAI/Z-Image-Turbo") is ImageModelType.Z_IMAGE
    assert image_type_from_name("Qwen/Qwen-Image") is ImageModelType.QWEN_IMAGE
    assert image_type_from_name("dataautogpt3/ProteusV0.4") is ImageModelType.SDXL


@given(st.text(max_size=200))
def test_any_name_is_accepted(name: str) -> None:
    family_from_name(name)
    params = params_from_name(name)
    assert params is None or 10**6 <= params <= 5 * 10**12
