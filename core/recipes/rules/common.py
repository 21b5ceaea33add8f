"""Rules that hold for every engine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from core.errors import Problem
from core.recipes.schema import nearest, shown

Config = Mapping[str, Any]

_SECRET_KEY = re.compile(r"(^|_)(api_key|token|password|secret)$")
_SECRET_VALUE = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|wandb_v1_[A-Za-z0-9]{20,})\b")


def secrets(config: Config, where: str = "") -> Iterator[Problem]:
    """A rendered file is logged, kept with the attempt and uploaded by validators: no secret may be in it."""
    for key, value in config.items():
        path = f"{where}{key}"
        if isinstance(value, Mapping):
            yield from secrets(value, f"{path}.")
        for text in [value] if isinstance(value, str) else value if isinstance(value, list) else []:
            if isinstance(text, Mapping):
                yield from secrets(text, f"{path}.")
            elif isinstance(text, str) and text and _looks_secret(path, text):
                yield Problem(path, "", "a secret must not stand in a file; give it in the environment")


def _looks_secret(path: str, text: str) -> bool:
    """`special_tokens.pad_token` and its like are of the tokenizer's vocabulary."""
    section, _, key = path.rpartition(".")
    by_name = _SECRET_KEY.search(key) and section != "special_tokens"
    return bool(by_name or _SECRET_VALUE.search(text))


def missing(config: Config, keys: Iterable[str], why: str) -> Iterator[Problem]:
    for key in keys:
        if config.get(key) in (None, ""):
            yield Problem(key, "", f"is missing: {why}")


def one_of(config: Config, key: str, known: Iterable[str]) -> Iterator[Problem]:
    """A name that the engine's schema takes as any text and looks up only when the model is loaded."""
    value, names = config.get(key), list(known)
    if value is None or (isinstance(value, str) and value in names):
        return
    close = nearest(str(value), names)
    rule = f"is none of {', '.join(names)}"
    yield Problem(key, shown(value), f"{rule}; the nearest is {close}" if close else rule)


def in_range(
    config: Config,
    key: str,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
) -> Iterator[Problem]:
    """Numbers that no engine range-checks. Wrong types are the schema's to tell."""
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if above is not None and not value > above:
        yield Problem(key, shown(value), f"must be over {above:g}")
    if least is not None and not value >= least:
        yield Problem(key, shown(value), f"must be at least {least:g}")
    if below is not None and not value < below:
        yield Problem(key, shown(value), f"must be under {below:g}")
