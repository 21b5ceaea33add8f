"""The small files that describe a model: adapter configuration, config.json, README.

What evaluators or the hub would reject, and how it is mended. The hub checks the front matter of a README
and refuses the whole commit if it is wrong, and engines write their local folders into it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from core.submission.faults import Fault, FaultKind, printable
from core.submission.folder import ADAPTER_CONFIG, CARD, CONFIG, SubmissionItem, SubmissionKind, read_item

_BASE_KEY = "base_model_name_or_path"
#: True only where the adapter was trained.
_LOCAL = ("revision",)


def mended_adapter_config(config: Mapping[str, Any], model_id: str) -> dict[str, Any]:
    """Name the real base model: engines write the local folder that they trained from."""
    return {**config, _BASE_KEY: model_id, **{key: None for key in _LOCAL if key in config}}


def adapter_faults(config: Mapping[str, Any], model_id: str | None) -> Iterator[Fault]:
    kind = config.get("peft_type")
    if not isinstance(kind, str) or not kind:
        rule = "names the kind of adapter, such as LORA; save it again with peft"
        yield Fault(FaultKind.BAD_JSON, f"{ADAPTER_CONFIG}: peft_type", printable(kind), rule)
    base = config.get(_BASE_KEY)
    if not isinstance(base, str) or not base:
        rule = f"must name the base model, {model_id or 'by its name on the hub'}"
        yield Fault(FaultKind.WRONG_BASE, f"{ADAPTER_CONFIG}: {_BASE_KEY}", printable(base), rule)
    elif model_id is not None and base != model_id:
        rule = f"must be {model_id}: evaluators load the adapter onto the model named here"
        yield Fault(FaultKind.WRONG_BASE, f"{ADAPTER_CONFIG}: {_BASE_KEY}", printable(base), rule)


#: Compared unless the base's is null (docs/protocol.md, "Validity").
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
#: Keys under which a multimodal model has the configuration of its language model.
_INNER = ("text_config", "llm_config", "language_config")
#: Only true of the base's own file, and useless to a loader.
_NOT_RESTORED = frozenset({"transformers_version", "_name_or_path", "auto_map", "quantization_config"})

ModelConfig = Mapping[str, Any]


def config_faults(ours: ModelConfig, base: ModelConfig) -> Iterator[Fault]:
    """Yield what an evaluator would reject in this configuration."""
    for field in COMPARED:
        wanted, have = base.get(field), ours.get(field)
        if wanted is not None and have != wanted:
            rule = f"must be the base model's {printable(wanted)}, or the model does not count as a fine-tune"
            yield Fault(FaultKind.CONFIG_CHANGED, f"{CONFIG}: {field}", printable(have), rule)
    for name, mine, theirs in _levels(ours, base):
        yield from _sizes(name, mine, theirs)


def _sizes(name: str, ours: ModelConfig, base: ModelConfig) -> Iterator[Fault]:
    wanted, have = base.get(_VOCABULARY), ours.get(_VOCABULARY)
    if wanted is not None and have != wanted:
        rule = f"must be the base model's {printable(wanted)}: add no tokens and do not resize the embeddings"
        yield Fault(FaultKind.VOCABULARY, f"{name}{_VOCABULARY}", printable(have), rule)
    wanted, have = base.get(_CONTEXT), ours.get(_CONTEXT)
    if _is_number(wanted) and (not _is_number(have) or have < wanted):
        rule = f"must not be smaller than the base model's {printable(wanted)}: a shortened one scores 0"
        yield Fault(FaultKind.CONTEXT, f"{name}{_CONTEXT}", printable(have), rule)


def restored_config(ours: ModelConfig, base: ModelConfig) -> dict[str, Any]:
    """Add to `ours` the keys that only the base's file has. Nothing in `ours` is changed."""
    restored = {**{key: value for key, value in base.items() if key not in _NOT_RESTORED}, **ours}
    rope = ours.get("rope_parameters")
    if isinstance(rope, Mapping) and "rope_theta" in rope:
        # Ours may stretch the context, so the keys for older readers are taken from it, not from the base.
        restored["rope_theta"] = rope["rope_theta"]
        kind = rope.get("rope_type", "default")
        rest = {key: value for key, value in rope.items() if key != "rope_theta"}
        restored["rope_scaling"] = None if kind == "default" else rest
    for key in _INNER:
        mine, theirs = ours.get(key), base.get(key)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            restored[key] = restored_config(mine, theirs)
    return restored


def vocabulary_rows(config: ModelConfig) -> int | None:
    """The rows of its embeddings; None if the configuration does not name them."""
    for level in (config, *(config.get(key) for key in _INNER)):
        if isinstance(level, Mapping) and _is_number(size := level.get(_VOCABULARY)):
            return size
    return None


def _levels(ours: ModelConfig, base: ModelConfig) -> Iterator[tuple[str, ModelConfig, ModelConfig]]:
    yield f"{CONFIG}: ", ours, base
    for key in _INNER:
        mine, theirs = ours.get(key), base.get(key)
        if isinstance(theirs, Mapping):
            yield f"{CONFIG}: {key}.", mine if isinstance(mine, Mapping) else {}, theirs


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


_FRONT = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_MODEL_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(?:/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,60}")
_MAX_CARD = 1_000_000
_MAX_FRONT = 20_000
_LIBRARY = {
    SubmissionKind.ADAPTER: "peft",
    SubmissionKind.FULL: "transformers",
    SubmissionKind.IMAGE: "diffusers",
}


class _FrontMatterLoader(yaml.SafeLoader):
    """Without aliases: a few of them turn a few lines into gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed here")
        return super().compose_node(parent, index)


def model_card(kind: SubmissionKind, model_id: str, licence: Mapping[str, str] | None = None) -> bytes:
    """A minimal README: nothing about this machine, the data or the settings."""
    front: dict[str, Any] = {}
    if _MODEL_ID.fullmatch(model_id):
        front["base_model"] = model_id
    front["library_name"] = _LIBRARY[kind]
    front.update(licence or {})
    front["tags"] = ["lora"] if kind is not SubmissionKind.FULL else ["fine-tuned"]
    kind_text = "A LoRA adapter for" if kind is not SubmissionKind.FULL else "A fine-tune of"
    head = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
    return f"---\n{head}---\n\n{kind_text} `{model_id}`.\n".encode()


def licence_of(base: Path) -> dict[str, str]:
    """The licence keys of the base model's own README, as far as they are valid."""
    try:
        front = _front_matter(read_item(base / CARD, _MAX_CARD))
    except (OSError, ValueError):
        return {}
    licence = front.get("license")
    if not isinstance(licence, str) or not _LICENSE.fullmatch(licence):
        return {}
    keys = {"license": licence}
    name, link = front.get("license_name"), front.get("license_link")
    if isinstance(name, str) and _LICENSE.fullmatch(name):
        keys["license_name"] = name
    if isinstance(link, str) and re.fullmatch(r"https://[^\s\"'<>]{1,300}", link):
        keys["license_link"] = link
    return keys


def card_fault(item: SubmissionItem, model_id: str | None) -> Fault | None:
    """Name what the hub would reject in a README, or a base model that is not `model_id`."""
    try:
        front = _front_matter(read_item(item, _MAX_CARD))
    except OSError as error:
        return Fault(FaultKind.UNREADABLE, CARD, "", f"cannot be read: {error.strerror or error}")
    except ValueError as error:
        return Fault(FaultKind.BAD_CARD, CARD, "", f"has a front matter that is not valid YAML: {error}")
    bases = front.get("base_model")
    for base in bases if isinstance(bases, list) else [bases]:
        if base is None and model_id is not None:
            return Fault(FaultKind.BAD_CARD, f"{CARD}: base_model", "", f"must be {model_id}")
        if base is not None and not (isinstance(base, str) and _MODEL_ID.fullmatch(base)):
            rule = f"must be the hub's name of the base model{f', {model_id}' if model_id else ''}"
            return Fault(FaultKind.BAD_CARD, f"{CARD}: base_model", printable(base), rule)
        if base is not None and model_id is not None and base != model_id:
            return Fault(FaultKind.BAD_CARD, f"{CARD}: base_model", printable(base), f"must be {model_id}")
    licence = front.get("license")
    if licence is not None and not (isinstance(licence, str) and _LICENSE.fullmatch(licence)):
        rule = "must be one of the hub's short names, such as apache-2.0 or llama3.1"
        return Fault(FaultKind.BAD_CARD, f"{CARD}: license", printable(licence), rule)
    return None


def _front_matter(data: bytes) -> dict[str, Any]:
    """The front matter of a card; empty if it has none. `ValueError` with one line if it is not a mapping."""
    match = _FRONT.match(data.decode("utf-8", errors="replace"))
    if not match:
        return {}
    if len(match[1]) > _MAX_FRONT:
        raise ValueError(f"longer than {_MAX_FRONT:,} characters")
    try:
        value = yaml.load(match[1], _FrontMatterLoader)  # noqa: S506 - a SafeLoader without aliases
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(printable((str(error).splitlines() or ["unreadable"])[0], 100)) from None
    except (AttributeError, LookupError, TypeError, ArithmeticError):
        # The library fails where a tag and its value do not match, as in `!!bool perhaps`.
        raise ValueError("a tag and its value do not match") from None
    if not isinstance(value, dict):
        raise ValueError("it must be a mapping of keys and values")
    return value
