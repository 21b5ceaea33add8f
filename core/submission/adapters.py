"""An adapter's configuration: what evaluators load it onto is written in it, so it has to be right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from core.submission.faults import Fault, FaultKind, shown
from core.submission.selection import ADAPTER_CONFIG

_BASE = "base_model_name_or_path"
#: Of the place where it was trained, and no longer true elsewhere.
_LOCAL = ("revision",)


def mended(config: Mapping[str, Any], model_id: str) -> dict[str, Any]:
    """The same, loaded onto the real model: engines write the local folder that they trained from."""
    return {**config, _BASE: model_id, **{key: None for key in _LOCAL if key in config}}


def faults(config: Mapping[str, Any], model_id: str | None) -> Iterator[Fault]:
    kind = config.get("peft_type")
    if not isinstance(kind, str) or not kind:
        rule = "names the kind of adapter, such as LORA; save it again with peft"
        yield Fault(FaultKind.BAD_JSON, f"{ADAPTER_CONFIG}: peft_type", shown(kind), rule)
    found = config.get(_BASE)
    if not isinstance(found, str) or not found:
        rule = f"must name the base model, {model_id or 'as the hub calls it'}"
        yield Fault(FaultKind.WRONG_BASE, f"{ADAPTER_CONFIG}: {_BASE}", shown(found), rule)
    elif model_id is not None and found != model_id:
        rule = f"must be {model_id}: evaluators load the adapter onto what is named here"
        yield Fault(FaultKind.WRONG_BASE, f"{ADAPTER_CONFIG}: {_BASE}", shown(found), rule)
