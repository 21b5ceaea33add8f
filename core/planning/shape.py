"""A model's shape as memory and time see it: sums over its layers, worked out once per plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from core.models import ModelFacts
from core.shapes import LinearShape, linear_shapes


class Adapted(NamedTuple):
    """What carries an adapter: sums over one average layer, and over the whole model."""

    #: Input widths of the adapted matrices of a layer, and how many there are.
    inputs: float
    modules: float
    #: d_in + d_out of all adapted matrices of the model: adapter parameters per unit of rank.
    params_per_rank: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Widths in elements per token, per layer; parameters of the whole model."""

    layers: int
    hidden: int
    vocab: int
    heads: int
    #: Width of all query heads, and of the keys (the values' is the same).
    queries: int
    keys: int
    #: Width of the MLP that a token passes through: for experts, of those it visits.
    mlp: float
    gated: bool
    params: int
    active: int
    #: Embedding and head: they stay gathered under FSDP, and make a gradient of their own.
    root: int
    #: One of the two: a vocabulary times the width.
    table: int
    adapted: Adapted

    @property
    def layer_params(self) -> float:
        return max(self.params - self.root, 0) / self.layers


def shape_of(model: ModelFacts, modules: tuple[str, ...] = ()) -> Shape:
    """`modules` limits what carries an adapter; empty means every linear layer."""
    extra = 64 if model.kv_lora_rank else 0  # latent attention: rotary dimensions beside head_dim
    return Shape(
        layers=model.layers,
        hidden=model.hidden,
        vocab=model.vocab,
        heads=model.heads,
        queries=model.heads * (model.head_dim + extra),
        keys=model.kv_heads * (model.head_dim + extra),
        mlp=_mlp_width(model),
        gated=model.gated_mlp and not model.is_image,
        params=model.params_total,
        active=min(model.params_active, model.params_total),
        root=min(model.embedding_params, model.params_total),
        table=0 if model.is_image else model.vocab * model.hidden,
        adapted=_adapted(model, modules),
    )


def _mlp_width(model: ModelFacts) -> float:
    if model.moe is None:
        return float(model.intermediate)
    moe = model.moe
    dense = min(moe.dense_layers, model.layers)
    visited = moe.expert_intermediate * (moe.experts_per_token + moe.shared_experts)
    return (dense * model.intermediate + (model.layers - dense) * visited) / model.layers


def _adapted(model: ModelFacts, modules: tuple[str, ...]) -> Adapted:
    if model.image is not None:
        # A transformer block of a diffusion model: q, k, v, o and two MLP matrices, in and out.
        return Adapted(5.0 * model.hidden + model.intermediate, 6.0, model.image.adapter_params_per_rank)
    inputs = outputs = count = 0
    for one in linear_shapes(model):
        if _carries(one, modules):
            inputs += one.d_in * one.copies
            outputs += one.d_out * one.copies
            count += one.copies
    return Adapted(inputs / model.layers, count / model.layers, inputs + outputs)


def _carries(one: LinearShape, modules: tuple[str, ...]) -> bool:
    return not one.routed and (not modules or one.name in modules)
