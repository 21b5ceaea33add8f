"""The weight matrices of a text model, derived from its facts: for adapters and parameter counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from core.models.facts import ModelFacts, MoeFacts

#: The prefix of routed experts' matrices.
EXPERT_PREFIX = "expert_"


class LinearShape(NamedTuple):
    """A kind of linear layer: `copies` matrices of d_in × d_out in the model."""

    name: str
    d_in: int
    d_out: int
    copies: int
    #: Experts that a router picks from. Not `nn.Linear` in today's transformers, so "all linear" skips them.
    routed: bool = False

    @property
    def params(self) -> int:
        return self.d_in * self.d_out * self.copies


@lru_cache(maxsize=512)
def _shapes(
    layers: int,
    hidden: int,
    intermediate: int,
    heads: tuple[int, int, int],
    gated: bool,
    ranks: tuple[int | None, int | None],
    moe: tuple[int, int, int, int] | None,
) -> tuple[LinearShape, ...]:
    attention = (
        _latent_attention(layers, hidden, heads, ranks) if ranks[1] else _attention(layers, hidden, heads)
    )
    dense = layers if moe is None else min(moe[3], layers)
    shapes = [*attention, *_mlp("", hidden, intermediate, dense, gated)]
    if moe is not None:
        experts, width, shared, _ = moe
        shapes += _mlp("shared_", hidden, width * shared, layers - dense, gated)
        shapes += _mlp(EXPERT_PREFIX, hidden, width, (layers - dense) * experts, gated, routed=True)
        shapes.append(LinearShape("router", hidden, experts, layers - dense, routed=True))
    return tuple(shape for shape in shapes if shape.copies and shape.d_in and shape.d_out)


def _attention(layers: int, hidden: int, heads: tuple[int, int, int]) -> Iterator[LinearShape]:
    queries, keys, width = heads
    yield LinearShape("q_proj", hidden, queries * width, layers)
    yield LinearShape("k_proj", hidden, keys * width, layers)
    yield LinearShape("v_proj", hidden, keys * width, layers)
    yield LinearShape("o_proj", queries * width, hidden, layers)


def _latent_attention(
    layers: int, hidden: int, heads: tuple[int, int, int], ranks: tuple[int | None, int | None]
) -> Iterator[LinearShape]:
    """DeepSeek's: keys and values pass through a low rank; 64 rotary dimensions beside `head_dim`."""
    queries, _, width = heads
    q_rank, kv_rank = ranks[0], ranks[1] or 1
    if q_rank:
        yield LinearShape("q_a_proj", hidden, q_rank, layers)
        yield LinearShape("q_b_proj", q_rank, queries * (width + 64), layers)
    else:
        yield LinearShape("q_proj", hidden, queries * (width + 64), layers)
    yield LinearShape("kv_a_proj_with_mqa", hidden, kv_rank + 64, layers)
    yield LinearShape("kv_b_proj", kv_rank, queries * 2 * width, layers)
    yield LinearShape("o_proj", queries * width, hidden, layers)


def _mlp(
    prefix: str, hidden: int, width: int, count: int, gated: bool, routed: bool = False
) -> Iterator[LinearShape]:
    if gated:
        yield LinearShape(f"{prefix}gate_proj", hidden, width, count, routed)
    yield LinearShape(f"{prefix}up_proj", hidden, width, count, routed)
    yield LinearShape(f"{prefix}down_proj", width, hidden, count, routed)


#: State-space models: no attention, and no MLP beside it.
STATE_SPACE = ("mamba", "mamba2", "falcon_mamba")


def _state_space(model: ModelFacts) -> Iterator[LinearShape]:
    """Mamba's, with the sizes that published configs leave at their defaults."""
    layers, hidden, inner = model.layers, model.hidden, model.intermediate
    if model.architecture == "mamba2":  # the states of 128 and the steps come from the one projection
        yield LinearShape("in_proj", hidden, 2 * inner + 2 * 128 + model.heads, layers)
    else:
        steps = -(-hidden // 16)
        yield LinearShape("in_proj", hidden, 2 * inner, layers)
        yield LinearShape("x_proj", inner, steps + 2 * 16, layers)
        yield LinearShape("dt_proj", steps, inner, layers)
    yield LinearShape("out_proj", inner, hidden, layers)


def linear_shapes(model: ModelFacts) -> tuple[LinearShape, ...]:
    """All linear layers of the decoder, without embeddings and head. Empty for image models."""
    if model.is_image:
        return ()
    if model.architecture in STATE_SPACE:
        return tuple(_state_space(model))
    return _shapes(
        model.layers,
        model.hidden,
        model.intermediate,
        (model.heads, model.kv_heads, model.head_dim),
        model.gated_mlp,
        (model.q_lora_rank, model.kv_lora_rank),
        _moe_key(model.moe),
    )


def _moe_key(moe: MoeFacts | None) -> tuple[int, int, int, int] | None:
    if moe is None:
        return None
    return moe.experts, moe.expert_intermediate, moe.shared_experts, moe.dense_layers


class ParamCount(NamedTuple):
    """Parameters of a whole model, and of the experts that a token does not visit."""

    total: int
    idle: int


def count_params(
    layers: int,
    hidden: int,
    intermediate: int,
    heads: tuple[int, int, int],
    vocab: int,
    *,
    tied: bool,
    gated: bool,
    ranks: tuple[int | None, int | None] = (None, None),
    moe: MoeFacts | None = None,
) -> ParamCount:
    """The sum over `linear_shapes` with embeddings and norms, without building the list: for a size between
    two published ones an offer needs two dozen counts."""
    queries, keys, width = heads
    q_rank, kv_rank = ranks
    if kv_rank:
        rotary = queries * (width + 64)
        query = hidden * q_rank + q_rank * rotary if q_rank else hidden * rotary
        key_value = hidden * (kv_rank + 64) + kv_rank * queries * 2 * width
        attention = query + key_value + queries * width * hidden
    else:
        attention = 2 * hidden * width * (queries + keys)
    matrices = (3 if gated else 2) * hidden
    tables = vocab * hidden * (1 if tied else 2)
    total = layers * attention + tables + (2 * layers + 1) * hidden
    if moe is None:
        return ParamCount(total + layers * matrices * intermediate, 0)
    dense = min(moe.dense_layers, layers)
    per_expert = (layers - dense) * matrices * moe.expert_intermediate
    idle = max(moe.experts - moe.experts_per_token, 0) / moe.experts
    total += dense * matrices * intermediate + per_expert * (moe.shared_experts + moe.experts)
    return ParamCount(total + (layers - dense) * hidden * moe.experts, round(per_expert * moe.experts * idle))


def shape_params(model: ModelFacts) -> ParamCount:
    """The parameters of a text model of this shape."""
    if model.architecture in STATE_SPACE:
        matrices = sum(shape.params for shape in _state_space(model))
        return ParamCount(matrices + model.embedding_params + (2 * model.layers + 1) * model.hidden, 0)
    return count_params(
        model.layers,
        model.hidden,
        model.intermediate,
        (model.heads, model.kv_heads, model.head_dim),
        0 if model.is_image else model.vocab,
        tied=model.tied_embeddings,
        gated=model.gated_mlp,
        ranks=(model.q_lora_rank, model.kv_lora_rank),
        moe=model.moe,
    )


def adapter_params_per_rank(
    model: ModelFacts, modules: Sequence[str] = (), text_encoder: bool = False
) -> int:
    """LoRA parameters per unit of rank: d_in + d_out of every layer that carries one."""
    if model.image is not None:
        extra = model.image.text_adapter_params_per_rank if text_encoder else 0
        return model.image.adapter_params_per_rank + extra
    return sum(
        (shape.d_in + shape.d_out) * shape.copies
        for shape in linear_shapes(model)
        if not shape.routed and (not modules or shape.name in modules)
    )
