"""Raw keys of old guides, brought up to today's engines."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.domain.choices import Engine
from core.recipes.keys import (
    DROPPED_AXOLOTL,
    DROPPED_KOHYA,
    RENAMED_AXOLOTL,
    translated_axolotl,
    translated_kohya,
)
from core.recipes.schema import engine_table
from tests.doubles.each import each


@each(
    ("raw", "config"),
    [
        ({"flash_attention": True}, {"attn_implementation": "flash_attention_2"}),
        ({"sdp_attention": True}, {"attn_implementation": "sdpa"}),
        ({"flash_attention": False}, {}),
        ({"flash_attention": True, "xformers_attention": True}, {"attn_implementation": "flash_attention_2"}),
        ({"flash_attention": True, "sdp_attention": True}, {"attn_implementation": "flash_attention_2"}),
        ({"sdp_attention": True, "flash_attention": True}, {"attn_implementation": "flash_attention_2"}),
        ({"flash_attention": True, "attn_implementation": "sdpa"}, {"attn_implementation": "sdpa"}),
        ({"max_memory_MB": 75000}, {}),
        ({"fsdp": "full_shard auto_wrap"}, {}),
        ({"fsdp_config": {"fsdp_forward_prefetch": True, "fsdp_backward_prefetch": "BACKWARD_PRE"}}, {}),
        ({"fsdp_config": {"fsdp_offload_params": True}}, {"fsdp_config": {"offload_params": True}}),
        ({"noisy_embedding_alpha": 5}, {"neftune_noise_alpha": 5}),
        ({"dpo_beta": 0.1}, {"rl_beta": 0.1}),
        ({"optimizer": "adamw_hf"}, {"optimizer": "adamw_torch"}),
        ({"gradient_checkpointing": "unsloth"}, {"gradient_checkpointing": True}),
        ({"bf16": "full"}, {"bf16": True}),
    ],
)
def test_an_old_key_is_translated(raw: dict[str, Any], config: dict[str, Any]) -> None:
    translated, notes = translated_axolotl(raw)
    assert translated == config
    assert notes != []


@pytest.mark.parametrize(
    "raw", [{"lora_r": 8}, {"optimizer": "muon"}, {"bf16": True}, {"logging_steps": None}]
)
def test_a_current_key_is_passed_on_without_a_note(raw: dict[str, Any]) -> None:
    assert translated_axolotl(raw) == (raw, [])
    assert translated_kohya(raw) == (raw, [])


@given(
    st.dictionaries(
        st.sampled_from(
            sorted(DROPPED_AXOLOTL)
            + sorted(RENAMED_AXOLOTL)
            + ["fsdp", "fsdp_config", "flash_attention", "lora_r"]
        ),
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    )
)
def test_no_key_vanishes_without_a_note(raw: dict[str, Any]) -> None:
    translated, notes = translated_axolotl(raw)
    for key in raw:
        assert key in translated or any(note.startswith(f"{key}:") for note in notes)


def test_no_dropped_or_renamed_key_has_another_meaning_today() -> None:
    keys = engine_table(Engine.AXOLOTL).objects["AxolotlInputConfig"]
    liger = engine_table(Engine.AXOLOTL).objects["LigerArgs"]
    assert set(RENAMED_AXOLOTL.values()) <= keys.keys() | liger.keys()
    kohya = engine_table(Engine.KOHYA).objects["flux_train_network"]
    not_keys = {"epoch", "ema", "use_ema", "ema_decay", "noise_offset_type", "mem_eff_save"}
    assert set(DROPPED_KOHYA) - kohya.keys() == not_keys
