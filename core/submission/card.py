"""The README of a published model: the hub checks its front matter and refuses the whole commit when it is
wrong, and engines write their local folders into it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from core.submission.documents import Item, read_item
from core.submission.faults import Fault, FaultKind, shown
from core.submission.selection import CARD, SubmissionKind

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


class _Loader(yaml.SafeLoader):
    """Without anchors: a few of them make a few lines into gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not wanted here")
        return super().compose_node(parent, index)


def card(kind: SubmissionKind, model_id: str, licence: Mapping[str, str] | None = None) -> bytes:
    """A README that says what it is and no more: nothing of this machine, the data or the settings."""
    front: dict[str, Any] = {}
    if _MODEL_ID.fullmatch(model_id):
        front["base_model"] = model_id
    front["library_name"] = _LIBRARY[kind]
    front.update(licence or {})
    front["tags"] = ["lora"] if kind is not SubmissionKind.FULL else ["fine-tuned"]
    what = "A LoRA adapter for" if kind is not SubmissionKind.FULL else "A fine-tune of"
    head = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
    return f"---\n{head}---\n\n{what} `{model_id}`.\n".encode()


def licence_of(base: Path) -> dict[str, str]:
    """What the base model's own README says of its licence, as far as it may be passed on."""
    try:
        found = _front_matter(read_item(base / CARD, _MAX_CARD))
    except (OSError, ValueError):
        return {}
    named = found.get("license")
    if not isinstance(named, str) or not _LICENSE.fullmatch(named):
        return {}
    passed = {"license": named}
    name, link = found.get("license_name"), found.get("license_link")
    if isinstance(name, str) and _LICENSE.fullmatch(name):
        passed["license_name"] = name
    if isinstance(link, str) and re.fullmatch(r"https://[^\s\"'<>]{1,300}", link):
        passed["license_link"] = link
    return passed


def fault_of(item: Item, model_id: str | None) -> Fault | None:
    """What the hub, or a reader, would have against a README."""
    try:
        found = _front_matter(read_item(item, _MAX_CARD))
    except OSError as error:
        return Fault(FaultKind.UNREADABLE, CARD, "", f"can't be read: {error.strerror or error}")
    except ValueError as error:
        return Fault(FaultKind.BAD_CARD, CARD, "", f"has a front matter that is no YAML: {error}")
    named = found.get("base_model")
    for base in named if isinstance(named, list) else [named]:
        if base is None and model_id is not None:
            return Fault(FaultKind.BAD_CARD, f"{CARD}: base_model", "", f"must be {model_id}")
        if base is not None and not (isinstance(base, str) and _MODEL_ID.fullmatch(base)):
            rule = f"must be the hub's name of the base model{f', {model_id}' if model_id else ''}"
            return Fault(FaultKind.BAD_CARD, f"{CARD}: base_model", shown(base), rule)
        if base is not None and model_id is not None and base != model_id:
            return Fault(FaultKind.BAD_CARD, f"{CARD}: base_model", shown(base), f"must be {model_id}")
    licence = found.get("license")
    if licence is not None and not (isinstance(licence, str) and _LICENSE.fullmatch(licence)):
        rule = "must be one of the hub's short names, such as apache-2.0 or llama3.1"
        return Fault(FaultKind.BAD_CARD, f"{CARD}: license", shown(licence), rule)
    return None


def _front_matter(data: bytes) -> dict[str, Any]:
    """Of a card; empty where there is none. `ValueError` with one line for what is no YAML object."""
    found = _FRONT.match(data.decode("utf-8", errors="replace"))
    if not found:
        return {}
    if len(found[1]) > _MAX_FRONT:
        raise ValueError(f"longer than {_MAX_FRONT:,} letters")
    try:
        value = yaml.load(found[1], _Loader)  # noqa: S506 - a SafeLoader without aliases
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(shown((str(error).splitlines() or ["odd"])[0], 100)) from None
    except (AttributeError, LookupError, TypeError, ArithmeticError):
        # What the library stumbles over where a tag and its value do not fit, as in `!!bool perhaps`.
        raise ValueError("a tag and its value do not fit") from None
    if not isinstance(value, dict):
        raise ValueError("a list of keys and values is needed")
    return value
