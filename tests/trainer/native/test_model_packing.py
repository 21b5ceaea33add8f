"""Packed rows against each row alone, by loss, for the architectures of the installed transformers.

A tiny random model of each gets rows as Axolotl and as the native trainer pack them, under torch's own
attention and under flash attention, which is imitated: it needs a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_flash_attention_utils import _is_packed_sequence
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from core.domain.choices import Attention
from core.models.identify import facts_from_config
from tests.doubles.each import each
from trainer.inputs.model_loading import block_gpu_kernels
from trainer.inputs.token_file import write_rows
from trainer.native.batches import BatchLayout, collate
from trainer.native.model import LossModel

pytestmark = pytest.mark.small


SHAPE: dict[str, Any] = yaml.safe_load("""
{vocab_size: 96, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4,
  num_key_value_heads: 2, head_dim: 16, max_position_embeddings: 128, sliding_window: 64,
  pad_token_id: 0, bos_token_id: 1, eos_token_id: 2,
  moe_intermediate_size: 16, num_experts: 4, num_local_experts: 4, n_routed_experts: 4,
  num_experts_per_tok: 2, n_shared_experts: 1, n_group: 1, topk_group: 1,
  linear_num_value_heads: 4, linear_num_key_heads: 2, linear_key_head_dim: 8, linear_value_head_dim: 8,
  mamba_n_heads: 4, mamba_d_head: 16, mamba_expand: 2, mamba_d_ssm: 64, mamba_n_groups: 1,
  mamba_d_state: 8, mamba_chunk_size: 16, mamba_num_heads: 4, mamba_head_dim: 16, ssm_state_size: 8,
  n_groups: 1, chunk_size: 16,
  vocab_size_per_layer_input: 96, hidden_size_per_layer_input: 8, global_head_dim: 16,
  ffn_dim: 48, word_embed_proj_dim: 32, n_embd: 32, n_layer: 2, n_head: 4, n_positions: 128}
""")
VOCABULARY: int = SHAPE["vocab_size"]
#: What must be different, by architecture.
OTHERWISE: dict[str, dict[str, Any]] = yaml.safe_load("""
qwen3_5_text: {layer_types: [linear_attention, full_attention]}
qwen3_5_moe_text: {layer_types: [linear_attention, full_attention]}
qwen3_next: {layer_types: [linear_attention, full_attention]}
olmo_hybrid: {layer_types: [linear_attention, full_attention]}
minimax: {layer_types: [linear_attention, full_attention]}
gemma3_text: {layer_types: [sliding_attention, full_attention], sliding_window: 8}
gemma4_text: {layer_types: [sliding_attention, full_attention], sliding_window: 8, num_kv_shared_layers: 0}
lfm2: {layer_types: [conv, full_attention], block_ff_dim: 48}
lfm2_moe: {layer_types: [conv, full_attention], num_dense_layers: 1}
falcon_h1: {lm_head_multiplier: 0.5}
granite: {logits_scaling: 4.0}
granitemoehybrid: {layer_types: [mamba, attention], logits_scaling: 4.0}
deepseek_v3: {num_key_value_heads: 4, first_k_dense_replace: 1, q_lora_rank: 8, kv_lora_rank: 8, head_dim: 8,
  qk_rope_head_dim: 8, qk_nope_head_dim: 8, v_head_dim: 16}
""")
ARCHITECTURES = (
    *("llama", "mistral", "mixtral", "ministral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text"),
    *("gemma4_text", "smollm3", "granite", "cohere", "deepseek_v3", "gpt2", "gpt_neox"),
    # A state is carried on.
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe", "falcon_h1", "granitemoehybrid"),
    *("nemotron_h", "olmo_hybrid", "minimax"),
    # The attention does not see where rows begin.
    *("ministral3", "opt", "falcon", "gpt_bigcode", "afmoe"),
)
LENGTHS = (19, 23, 17)
#: Of the sum over the rows' predictions. Masks round off a hundredth of it.
SAME = 2e-3
IMITATED = "imitated_fa"


def imitated_flash(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **named: Any
) -> Any:
    """As transformers calls flash attention: without a mask, rows are known by positions alone, where the
    model hands them on."""
    positions, length = named.get("position_ids"), query.shape[2]
    rows = torch.zeros(1, length, dtype=torch.long)
    if positions is not None and _is_packed_sequence(positions, query.shape[0]):
        rows = (positions == 0).cumsum(-1)
    place = torch.arange(length)
    seen = (rows[:, :, None] == rows[:, None, :]) & (place[:, None] >= place)
    if window := named.get("sliding_window"):
        seen = seen & (place[:, None] - place < window)
    scale = named.get("scaling") or query.shape[-1] ** -0.5
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * scale
    if cap := named.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    weights = scores.masked_fill(~seen[:, None], -1e30).softmax(-1)
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None


@pytest.fixture(scope="module", autouse=True)
def without_gpu() -> None:
    block_gpu_kernels()
    ALL_ATTENTION_FUNCTIONS.register(IMITATED, imitated_flash)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMITATED, flash_attention_mask)


def tiny_model(architecture: str) -> Any:
    kind: Any = transformers.CONFIG_MAPPING[architecture]
    known = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
    known |= set(inspect.signature(kind.__init__).parameters) | set(kind.attribute_map)
    shape = {name: value for name, value in SHAPE.items() if name in known}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        kind(**{**shape, **OTHERWISE.get(architecture, {})})
    )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)  # as initialised, what is seen hardly changes the loss
    return model.float().eval()


def axolotls(model: Any, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Positions that begin again, no mask: the summed loss together, and of each row alone."""

    def summed(some: Sequence[Tensor]) -> Tensor:
        ids, places = torch.cat(list(some)), torch.cat([torch.arange(len(row)) for row in some])
        logits = model(input_ids=ids[None], position_ids=places[None], use_cache=False).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        return losses[places[1:] > 0].sum()

    return summed(rows), torch.stack([summed([row]) for row in rows]).sum()


def natives(model: Any, rows: Sequence[Tensor], attention: Attention, folder: Path) -> tuple[Tensor, Tensor]:
    """Two packed sequences in a batch, the second one shorter: it is padded."""
    file = write_rows(folder, VOCABULARY, [(row.tolist(), [True] * len(row)) for row in rows])
    net = LossModel(model, attention)
    together = net(collate(file, ((0, 1), (2,)), BatchLayout(packed=True)))
    alone = [net(collate(file, ((row,),), BatchLayout())) for row in range(len(rows))]
    return together, torch.stack(alone).sum()


@each("architecture", ARCHITECTURES)
def test_a_plan_packs_rows_only_where_their_losses_stay(architecture: str, tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(1)
    rows = [torch.randint(5, VOCABULARY, (length,), generator=chance) for length in LENGTHS]
    model, kept = tiny_model(architecture), {}
    for implementation, attention in (("sdpa", Attention.SDPA), (IMITATED, Attention.FLASH_2)):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            losses = axolotls(model, rows), natives(model, rows, attention, tmp_path / "rows")
        kept[implementation] = [bool(abs(together - alone) < SAME) for together, alone in losses]
        assert abs(losses[0][1] - losses[1][1]) < SAME  # the native trainer's loss is the model's own
    facts = facts_from_config({"model_type": architecture, "hidden_size": 4096, "num_hidden_layers": 32})
    assert (not facts.packing_problem) is all(all(same) for same in kept.values()), kept


def test_padded_rows_of_their_own_need_no_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain causal attention has the fastest kernels; what is after a row's end is never looked at."""
    masks: list[Any] = []
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def watched(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **named: Any) -> Any:
        masks.append(mask)
        return plain(module, query, key, value, mask, **named)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", watched)
    file = write_rows(tmp_path / "rows", VOCABULARY, [([5] * length, [True] * length) for length in (9, 30)])
    net = LossModel(tiny_model("llama"), Attention.SDPA)
    net(collate(file, ((0,), (1,)), BatchLayout()))
    assert masks == [None, None]
    net(collate(file, ((0, 1),), BatchLayout(packed=True)))
    assert masks[-1] is not None
