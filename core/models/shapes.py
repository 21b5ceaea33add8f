"""The weight matrices of a text model, derived from its facts: for adapters and parameter counts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from core.models.facts import MixerFacts, ModelFacts, MoeFacts

#: The prefix of routed experts' matrices.
EXPERT_PREFIX = "expert_"
SHARED_PREFIX = "shared_"
#: The names of attention's layers; the others are the MLP's.
ATTENTION = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
)


class LinearShape(NamedTuple):
    """A kind of linear layer: `copies` matrices of d_in × d_out in the model."""

    name: str
    d_in: int
    d_out: int
    copies: int
    #: Experts that a router picks from. Not `nn.Linear` in transformers 5, so "all linear" skips them.
    routed: bool = False
    #: The module that it is a part of, where that is neither "self_attn" nor "mlp".
    part: str = ""

    @property
    def params(self) -> int:
        return self.d_in * self.d_out * self.copies


def _attention(model: ModelFacts) -> Iterator[LinearShape]:
    hidden, width = model.hidden, model.head_dim
    layers = model.mixer.attention_layers if model.mixer else model.layers
    yield LinearShape("q_proj", hidden, model.heads * width, layers)
    yield LinearShape("k_proj", hidden, model.kv_heads * width, layers)
    yield LinearShape("v_proj", hidden, model.kv_heads * width, layers)
    yield LinearShape("o_proj", model.heads * width, hidden, layers)


def _mixer(model: ModelFacts, mixer: MixerFacts) -> Iterator[LinearShape]:
    part = "mamba" if mixer.heads else "conv"
    yield LinearShape("in_proj", model.hidden, mixer.projected, mixer.layers, part=part)
    yield LinearShape("out_proj", mixer.inner, model.hidden, mixer.layers, part=part)


#: Other names of the same layers, and of the part that they are in: LFM2's, and Falcon-H1's.
_OTHER_NAMES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "lfm2": {
        "o_proj": ("out_proj", "self_attn"),
        "gate_proj": ("w1", "feed_forward"),
        "up_proj": ("w3", "feed_forward"),
        "down_proj": ("w2", "feed_forward"),
    },
    "falcon_h1": {name: (name, "feed_forward") for name in ("gate_proj", "up_proj", "down_proj")},
}


def _latent_attention(model: ModelFacts, kv_rank: int) -> Iterator[LinearShape]:
    """DeepSeek's: keys and values pass through a low rank; 64 rotary dimensions beside `head_dim`."""
    layers, hidden, heads, width = model.layers, model.hidden, model.heads, model.head_dim
    if q_rank := model.q_lora_rank:
        yield LinearShape("q_a_proj", hidden, q_rank, layers)
        yield LinearShape("q_b_proj", q_rank, heads * (width + 64), layers)
    else:
        yield LinearShape("q_proj", hidden, heads * (width + 64), layers)
    yield LinearShape("kv_a_proj_with_mqa", hidden, kv_rank + 64, layers)
    yield LinearShape("kv_b_proj", kv_rank, heads * 2 * width, layers)
    yield LinearShape("o_proj", heads * width, hidden, layers)


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
    layers, hidden, gated, moe = model.layers, model.hidden, model.gated_mlp, model.moe
    dense = layers if moe is None else min(moe.dense_layers, layers)
    kv_rank = model.kv_lora_rank
    attention = _latent_attention(model, kv_rank) if kv_rank else _attention(model)
    shapes = [*attention, *_mlp("", hidden, model.intermediate, dense, gated)]
    names = _OTHER_NAMES.get(model.architecture, {})
    shapes = [
        shape._replace(name=names[shape.name][0], part=names[shape.name][1]) if shape.name in names else shape
        for shape in shapes
    ]
    if model.mixer is not None:
        shapes += _mixer(model, model.mixer)
    if moe is not None:
        width, sparse = moe.expert_intermediate, layers - dense
        shapes += _mlp(SHARED_PREFIX, hidden, width * moe.shared_experts, sparse, gated)
        shapes += _mlp(EXPERT_PREFIX, hidden, width, sparse * moe.experts, gated, routed=True)
        shapes.append(LinearShape("router", hidden, moe.experts, sparse, routed=True))
    return tuple(shape for shape in shapes if shape.copies and shape.d_in and shape.d_out)


def expert_shapes(model: ModelFacts) -> list[LinearShape]:
    """The matrices of the experts that a router picks from."""
    if model.moe is None:
        return []
    return [shape for shape in linear_shapes(model) if shape.name.startswith(EXPERT_PREFIX)]


#: Patterns, and the factor on the LoRA rank of the layers whose names one matches; the first counts.
RankFactors = tuple[tuple[str, float], ...]


def module_names(model: ModelFacts, linear: LinearShape) -> Iterator[str]:
    """The names of its matrices in the decoder, as most architectures have them."""
    group = "self_attn" if linear.name in ATTENTION else "mlp"
    group = linear.part or ("mixer" if model.architecture in STATE_SPACE else group)
    shared = linear.name.startswith(SHARED_PREFIX)
    first = model.layers - linear.copies if shared else 0  # the first layers have no experts
    for layer in range(first, first + linear.copies):
        yield f"model.layers.{layer}.{group}.{linear.name.removeprefix(SHARED_PREFIX)}"


def rank_factor(model: ModelFacts, linear: LinearShape, factors: RankFactors) -> float:
    """The mean factor on the rank over this kind's matrices."""
    names = list(module_names(model, linear))
    total = 0.0
    for name in names:
        found = [factor for pattern, factor in factors if matches(pattern, name)]
        total += found[0] if found else 1.0
    return total / len(names)


def matches(pattern: str, name: str) -> bool:
    """Match as peft does for `rank_pattern`: the whole name, or its end from a dot on."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


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
    if model.architecture in STATE_SPACE or model.mixer is not None:
        matrices = sum(shape.params for shape in linear_shapes(model))
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
