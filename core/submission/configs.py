"""A full model's config.json against the base model's: what evaluators compare, and what must not get lost.

Evaluators score a model whose configuration differs in one of `COMPARED` as "not a fine-tune" of its base,
and one with a smaller context as worthless. And they load with an older transformers than trains here:
version 5 writes the base of the position embedding as `rope_parameters` only, which version 4 does not read
and silently replaces by 10,000. `restored` therefore puts back what the base's file says
and the trained one left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from core.submission.faults import Fault, FaultKind, shown
from core.submission.selection import CONFIG

#: Compared where the base's is not null (docs/protocol.md, "Validity").
COMPARED = (
    "architectures",
    "hidden_size",
    "n_layer",
    "intermediate_size",
    "head_dim",
    "hidden_act",
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_CONTEXT = "max_position_embeddings"
_VOCABULARY = "vocab_size"
#: A multimodal model keeps its language model's facts one level down.
_INNER = ("text_config", "llm_config", "language_config")
#: Of no use to who loads it, and only true of the file it was in.
_NOT_RESTORED = frozenset({"transformers_version", "_name_or_path", "auto_map", "quantization_config"})

Config = Mapping[str, Any]


def differences(ours: Config, base: Config) -> Iterator[Fault]:
    """What an evaluator would hold against this configuration."""
    for field in COMPARED:
        wanted, have = base.get(field), ours.get(field)
        if wanted is not None and have != wanted:
            rule = f"must be the base model's {shown(wanted)}, or the model does not count as a fine-tune"
            yield Fault(FaultKind.CONFIG_CHANGED, f"{CONFIG}: {field}", shown(have), rule)
    for name, mine, theirs in _levels(ours, base):
        yield from _sizes(name, mine, theirs)


def _sizes(name: str, ours: Config, base: Config) -> Iterator[Fault]:
    wanted, have = base.get(_VOCABULARY), ours.get(_VOCABULARY)
    if wanted is not None and have != wanted:
        rule = f"must be the base model's {shown(wanted)}: add no tokens and do not resize the embeddings"
        yield Fault(FaultKind.VOCABULARY, f"{name}{_VOCABULARY}", shown(have), rule)
    wanted, have = base.get(_CONTEXT), ours.get(_CONTEXT)
    if _is_number(wanted) and (not _is_number(have) or have < wanted):
        rule = f"must not be smaller than the base model's {shown(wanted)}: a shortened one scores 0"
        yield Fault(FaultKind.CONTEXT, f"{name}{_CONTEXT}", shown(have), rule)


def restored(ours: Config, base: Config) -> dict[str, Any]:
    """`ours` with what the base's file says and ours does not. Nothing that ours says is changed."""
    found = {**{key: value for key, value in base.items() if key not in _NOT_RESTORED}, **ours}
    rope = ours.get("rope_parameters")
    if isinstance(rope, Mapping) and "rope_theta" in rope:
        # Ours may stretch the context: what older readers see is taken from it and not from the base.
        found["rope_theta"] = rope["rope_theta"]
        kind = rope.get("rope_type", "default")
        rest = {key: value for key, value in rope.items() if key != "rope_theta"}
        found["rope_scaling"] = None if kind == "default" else rest
    for key in _INNER:
        mine, theirs = ours.get(key), base.get(key)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            found[key] = restored(mine, theirs)
    return found


def vocabulary(config: Config) -> int | None:
    """How many rows its embeddings have."""
    for level in (config, *(config.get(key) for key in _INNER)):
        if isinstance(level, Mapping) and _is_number(size := level.get(_VOCABULARY)):
            return size
    return None


def _levels(ours: Config, base: Config) -> Iterator[tuple[str, Config, Config]]:
    yield f"{CONFIG}: ", ours, base
    for key in _INNER:
        mine, theirs = ours.get(key), base.get(key)
        if isinstance(theirs, Mapping):
            yield f"{CONFIG}: {key}.", mine if isinstance(mine, Mapping) else {}, theirs


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
