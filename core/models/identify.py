"""Derive `ModelFacts` from a config.json, or from a name and a parameter count.

Never fails; every fact carries its confidence. A stated count beats a name: names lie, and tournament
models come under made-up ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from core.domain.records import Confidence
from core.domain.tasks import ImageModelType
from core.models.facts import DECIDING, Family, MixerFacts, ModelFacts, MoeFacts
from core.models.image_families import IMAGE_FAMILIES
from core.models.names import architecture_from_name, family_from_name, params_from_name, usable_count
from core.models.shapes import STATE_SPACE, ParamCount, count_params, shape_params
from core.models.table import MODEL_ROWS, ModelRow

#: Assumed when the size of a text model is unknown: the middle of what validators send.
TYPICAL_PARAMS = 8_000_000_000


class NameFacts(NamedTuple):
    """Everything that a text model's name reveals: its facts depend on this and a stated count."""

    family: Family
    #: Within the family, where the name states it.
    architecture: str | None
    params: int | None


@lru_cache(maxsize=1024)
def facts_in_name(model_id: str) -> NameFacts:
    return NameFacts(family_from_name(model_id), architecture_from_name(model_id), params_from_name(model_id))


def facts_from_name(
    model_id: str, params_count: int | None = None, image_type: ImageModelType | None = None
) -> ModelFacts:
    """Derive facts from a name and perhaps a count; nothing is downloaded."""
    if image_type is not None:
        return image_model_facts(model_id, image_type)
    return facts_from_name_facts(facts_in_name(model_id), params_count).model_copy(
        update={"model_id": model_id}
    )


@lru_cache(maxsize=512)
def facts_from_name_facts(named: NameFacts, params_count: int | None = None) -> ModelFacts:
    """A text model's facts without its name: many names share them, so the cache is small."""
    stated = usable_count(params_count)
    params = stated or named.params or TYPICAL_PARAMS
    confidence = Confidence.GIVEN if stated else Confidence.NAME if named.params else Confidence.GUESS
    row = _nearest(named.family, named.architecture, params)
    known = named.family is not Family.UNKNOWN and abs(math.log(params / row.params)) < 0.12
    if known:
        params = stated or row.params
    else:
        row = _scaled(row, params)
    of_shape = Confidence.TABLE if known else Confidence.GUESS
    sources = dict.fromkeys(("layers", "hidden", "intermediate", "vocab", "heads"), of_shape)
    sources["family"] = Confidence.GUESS if named.family is Family.UNKNOWN else Confidence.NAME
    sources["params_total"] = confidence
    return facts_from_row(row, "", named.family, params, sources)


@lru_cache(maxsize=64)
def image_model_facts(model_id: str, image_type: ImageModelType) -> ModelFacts:
    """Diffusion models have one shape per type, so the table is more reliable than any count."""
    record = IMAGE_FAMILIES[image_type]
    layers, hidden, intermediate, heads = record.shape
    return ModelFacts(
        model_id=model_id,
        family=record.family,
        architecture=image_type.value,
        params_total=record.facts.backbone_params,
        params_active=record.facts.backbone_params,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=1,
        max_position=record.facts.tokens_at_1024,
        tied_embeddings=True,
        image=record.facts,
        sources=dict.fromkeys(DECIDING, Confidence.TABLE),
    )


def _by_size(rows: Iterable[ModelRow]) -> list[tuple[float, ModelRow]]:
    return [(math.log(row.params), row) for row in rows]


_OF_FAMILY: Mapping[Family, list[tuple[float, ModelRow]]] = {
    family: _by_size(row for row in MODEL_ROWS if row.family is family) for family in Family
}
_PLAIN = _by_size(row for row in MODEL_ROWS if row.family in (Family.LLAMA, Family.QWEN) and row.moe is None)


def _nearest(family: Family, variant: str | None, params: int) -> ModelRow:
    """The published model nearest in size: of the variant, else of the family, else like Llama."""
    size = math.log(params)
    rows = [(abs(log - size), row) for log, row in _OF_FAMILY[family] or _PLAIN]
    exact = [(distance, row) for distance, row in rows if distance < 0.12 and row.architecture == variant]
    return min(exact or rows, key=itemgetter(0))[1]


def facts_from_row(
    row: ModelRow, model_id: str, family: Family, params: int, sources: Mapping[str, Confidence] | None = None
) -> ModelFacts:
    return ModelFacts(
        model_id=model_id,
        family=family,
        architecture=row.architecture,
        params_total=params,
        params_active=_active(_counted_row(row), params),
        layers=row.layers,
        hidden=row.hidden,
        intermediate=row.intermediate,
        heads=row.heads,
        kv_heads=row.kv_heads,
        head_dim=row.head_dim,
        vocab=row.vocab,
        max_position=row.max_position,
        tied_embeddings=row.tied,
        gated_mlp=row.gated,
        q_lora_rank=row.latent[0] or None if row.latent else None,
        kv_lora_rank=row.latent[1] if row.latent else None,
        moe=row.moe,
        mixer=row.mixer,
        sources=dict(sources or {}),
    )


def _counted_row(row: ModelRow, steps: _ShapeSteps | None = None) -> ParamCount:
    """The parameters of the row's shape, as it is or at another size."""
    layers, hidden, intermediate, heads, kv_heads, moe = (
        (row.layers, row.hidden, row.intermediate, row.heads, row.kv_heads, row.moe)
        if steps is None
        else _shape(row, steps)
    )
    return count_params(
        layers,
        hidden,
        intermediate,
        (heads, kv_heads, row.head_dim),
        row.vocab,
        tied=row.tied,
        gated=row.gated,
        ranks=row.latent or (None, None),
        moe=moe,
    )


def _active(counted: ParamCount, params: int) -> int:
    """Return those of `params` parameters that a token passes through."""
    return max(min(round(params * (counted.total - counted.idle) / counted.total), params), 0)


def _scaled(row: ModelRow, params: int) -> ModelRow:
    """The same proportions at another size: depth and width grow alike, as they do in published series."""
    low, high = 1e-3, 1e3
    smaller, larger = _ShapeSteps(0, 0, 0, 0), _shape_steps(row, high)
    guess = _proportion(row, params)
    near = [guess * 1.03, guess / 1.03]
    for _ in range(26):
        if _adjacent(row, smaller, larger):
            break
        middle = near.pop() if near else math.sqrt(low * high)
        steps = _shape_steps(row, middle)
        if _counted_row(row, steps).total < params:
            low, smaller = middle, steps
        else:
            high, larger = middle, steps
    total = _counted_row(row, larger).total
    layers, hidden, intermediate, heads, kv_heads, moe = _shape(row, larger)
    vocab = row.vocab
    if total > 1.05 * params:  # a toy model: no published vocabulary fits into it
        per_token = hidden * (1 if row.tied else 2)
        vocab = min(max((params - (total - vocab * per_token)) // per_token, 256), vocab)
    return row._replace(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        vocab=vocab,
        moe=moe,
        mixer=None,
    )


def _proportion(row: ModelRow, params: int) -> float:
    """The factor on depth and width, by Newton's method: layers grow with its cube, tables with the width."""
    tables = row.vocab * row.hidden * (1 if row.tied else 2)
    layers, by = max(row.params - tables, 1), math.cbrt(params / row.params)
    for _ in range(3):
        by -= (layers * by**3 + tables * by - params) / (3 * layers * by**2 + tables)
    return by


class _ShapeSteps(NamedTuple):
    """The numbers that change between neighbouring sizes; the width counts in steps of 64."""

    layers: int
    width: int
    heads: int
    expert: int


def _shape_steps(row: ModelRow, by: float) -> _ShapeSteps:
    expert = (round(row.moe.expert_intermediate * by) or 1) if row.moe else 0
    return _ShapeSteps(
        round(row.layers * by) or 1, round(row.hidden * by / 64) or 1, round(row.heads * by) or 1, expert
    )


def _adjacent(row: ModelRow, smaller: _ShapeSteps, larger: _ShapeSteps) -> bool:
    """Return whether no other shape lies between the two: all differences are one step at the same factor."""
    whole = (row.layers, row.hidden / 64, row.heads, row.moe.expert_intermediate if row.moe else 1)
    points = []
    for low, high, of in zip(smaller, larger, whole, strict=True):
        if high - low > 1:
            return False
        if high > low:
            points.append((low + 0.5) / of)
    return not points or max(points) - min(points) < 1e-12 * points[0]


def _shape(row: ModelRow, steps: _ShapeSteps) -> tuple[int, int, int, int, int, MoeFacts | None]:
    """Layers, hidden, intermediate, heads, heads of keys, experts."""
    layers, hidden, heads = steps.layers, 64 * steps.width, steps.heads
    intermediate = max(round(row.intermediate * hidden / row.hidden), 1)
    kv_heads = max(round(row.kv_heads * heads / row.heads), 1)
    moe = row.moe and row.moe.model_copy(update={"expert_intermediate": steps.expert})
    return layers, hidden, intermediate, heads, kv_heads, moe


#: config.json has several names for one thing; the first key present counts.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "qk_nope_head_dim", "kv_channels"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "max_position": ("max_position_embeddings", "n_positions", "seq_length", "max_sequence_length"),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "sliding_window": ("sliding_window",),
}
_FAMILY_OF: Mapping[str, Family] = {
    **{row.architecture: row.family for row in MODEL_ROWS},
    "llama": Family.LLAMA,
    "llama4_text": Family.LLAMA,
    "mistral3": Family.MISTRAL,
    "gemma3n": Family.GEMMA,
    "phimoe": Family.PHI,
    "gptj": Family.PYTHIA,
    "gpt_bigcode": Family.STARCODER,
    "granitemoe": Family.GRANITE,
    "chatglm": Family.GLM,
}
#: Architectures whose configs leave the key out when embeddings are tied.
_TIED_BY_DEFAULT = (
    "gemma",
    "gpt2",
    "gpt_neo",
    "opt",
    "falcon",
    "bloom",
    "starcoder2",
    "cohere",
    "gpt_bigcode",
    "mamba",
    "lfm2",
)
_UNGATED = (
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "opt",
    "bloom",
    "falcon",
    "phi",
    "starcoder2",
    "gptj",
    "gpt_bigcode",
)
_MOST = 10**9


def facts_from_config(
    config: Mapping[str, Any], model_id: str = "", params_count: int | None = None
) -> ModelFacts:
    """From the model's own config.json. Missing or invalid fields fall back to name and count."""
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, Mapping) else config
    architecture = str(config.get("model_type") or "")[:64]
    guessed = facts_from_name(f"{model_id or architecture}"[:300], usable_count(params_count))
    numbers = {field: value for field, keys in _KEYS.items() if (value := _number(config, keys)) is not None}
    if "hidden" not in numbers or "layers" not in numbers:
        return guessed
    family = _family(architecture, model_id)
    facts = guessed.model_copy(
        update={
            **_completed(numbers, config, architecture),
            "model_id": model_id,
            "family": family,
            "architecture": architecture or guessed.architecture,
            "moe": _experts(config, numbers),
            "mixer": _mixer(config, numbers, architecture),
            "dtype": _dtype(config),
            "sources": {**guessed.sources, **dict.fromkeys([*numbers, "family"], Confidence.CONFIG)},
        }
    )
    return _counted(facts, usable_count(params_count))


def _family(architecture: str, model_id: str) -> Family:
    """CodeLlama and SmolLM have "llama" in their configs: a name that agrees with it is more exact."""
    exact = family_from_name(model_id)
    by_config = _FAMILY_OF.get(architecture) or _FAMILY_OF.get(architecture.removesuffix("_text"))
    if by_config is None:
        return family_from_name(architecture) if exact is Family.UNKNOWN else exact
    alike = any(row.family is exact and row.architecture == architecture for row in MODEL_ROWS)
    return exact if alike else by_config


def _number(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST:
            return value
    return None


def _completed(numbers: Mapping[str, int], config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Add what configs leave out because it follows from the rest."""
    hidden, heads = numbers["hidden"], numbers.get("heads", max(numbers["hidden"] // 128, 1))
    one_key = architecture == "falcon" and config.get("multi_query") is True
    tied = config.get("tie_word_embeddings", config.get("tie_embedding"))
    numbers = {**numbers, **_adjusted_width(config, numbers, architecture)}
    state_space = architecture in STATE_SPACE

    def named(beginnings: tuple[str, ...]) -> bool:
        return architecture.startswith(beginnings) and architecture != "falcon_h1"  # Falcon's in name only

    return {
        "heads": heads,
        "kv_heads": 1 if one_key and "kv_heads" not in numbers else heads,
        "head_dim": max(hidden // heads, 1),
        "intermediate": (2 if state_space else 4) * hidden,
        "gated_mlp": not named(_UNGATED) or architecture.startswith("phi3"),
        "tied_embeddings": tied if isinstance(tied, bool) else named(_TIED_BY_DEFAULT),
        "q_lora_rank": None,
        "kv_lora_rank": None,
        "sliding_window": None,
        **numbers,
    }


def _experts(config: Mapping[str, Any], numbers: Mapping[str, int]) -> MoeFacts | None:
    experts = _number(config, ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"))
    chosen = _number(config, ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts"))
    if experts is None or experts < 2:
        return None
    width = _number(config, ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size"))
    return MoeFacts(
        experts=experts,
        experts_per_token=min(chosen or 2, experts),
        expert_intermediate=width or numbers.get("intermediate", 4 * numbers["hidden"]),
        shared_experts=_number(config, ("n_shared_experts", "num_shared_experts")) or 0,
        dense_layers=_number(config, ("first_k_dense_replace",)) or 0,
    )


def _adjusted_width(
    config: Mapping[str, Any], numbers: Mapping[str, int], architecture: str
) -> dict[str, int]:
    """LFM2's config names the width before two thirds of it are taken and rounded up."""
    named = _number(config, ("block_ff_dim",)) or numbers.get("intermediate", 12_288)
    if architecture != "lfm2":
        return {}
    if config.get("block_auto_adjust_ff_dim") is False:
        return {"intermediate": named}
    width, factor = 2 * named // 3, config.get("block_ffn_dim_multiplier", 1.0)
    if isinstance(factor, (int, float)) and 0 < factor < 100:
        step = _number(config, ("block_multiple_of",)) or 256
        width = math.ceil(int(factor * width) / step) * step
    return {"intermediate": max(width, 1)}


def _mixer(config: Mapping[str, Any], numbers: Mapping[str, int], architecture: str) -> MixerFacts | None:
    """Short convolutions or Mamba-2, with what transformers takes for a missing key."""
    layers, hidden = numbers["layers"], numbers["hidden"]
    if architecture == "lfm2":
        kinds, indexes = config.get("layer_types"), config.get("full_attn_idxs")
        with_attention = layers
        if isinstance(kinds, list):
            with_attention = kinds.count("full_attention")
        elif isinstance(indexes, list):
            with_attention = len(indexes)
        with_attention = min(with_attention, layers)
        if with_attention == layers:
            return None
        return MixerFacts(layers=layers - with_attention, attention_layers=with_attention, inner=hidden)
    if architecture == "falcon_h1":
        expanded = (_number(config, ("mamba_expand",)) or 2) * hidden
        given = "mamba_d_ssm" in config
        return MixerFacts(
            layers=layers,
            attention_layers=layers,
            inner=_number(config, ("mamba_d_ssm",)) or (expanded if given else 1024),
            heads=_number(config, ("mamba_n_heads",)) or 128,
            state=_number(config, ("mamba_d_state",)) or 256,
            groups=_number(config, ("mamba_n_groups",)) or 1,
            chunk=_number(config, ("mamba_chunk_size",)) or 256,
        )
    return None


def _dtype(config: Mapping[str, Any]) -> str:
    named = config.get("torch_dtype", config.get("dtype"))
    return named if named in ("float16", "float32", "bfloat16") else "bfloat16"


def _counted(facts: ModelFacts, stated: int | None) -> ModelFacts:
    """A stated count wins where it can be true: it includes vision towers and parts that we do not model.
    Half of the shape's count or less comes from a quantised file; a hundred times as much is nonsense."""
    counted = shape_params(facts)
    by_shape = counted.total
    believed = stated is not None and 0.6 * by_shape <= stated <= 100 * by_shape
    params = stated if stated is not None and believed else by_shape
    sources = {**facts.sources, "params_total": Confidence.GIVEN if believed else Confidence.CONFIG}
    update = {"params_total": params, "params_active": _active(counted, params), "sources": sources}
    return facts.model_copy(update=update)
