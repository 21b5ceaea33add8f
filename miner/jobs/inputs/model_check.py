"""Whether a folder is a model that can be loaded, and what is known of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from core.model_facts import facts_from_config, image_facts
from core.models import ModelFacts
from core.submission.safetensors import BadHeader, read_header
from core.tasks import ImageModelType
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason

MAX_CONFIG = 10 * 1024**2


def checked_facts(path: Path, model: str, image_type: ImageModelType | None) -> ModelFacts:
    """From the model's own config.json and the headers of all its weights. `StepFailed` (BAD_MODEL)."""
    weights = [path] if path.is_file() else sorted(path.rglob("*.safetensors"))
    if not weights:
        raise _bad(f"{path.name} has no safetensors weights")
    count = parameters(weights)
    if image_type is not None:
        return image_facts(model, image_type)
    return facts_from_config(read_config(path), model, count)


def parameters(weights: Iterable[Path]) -> int:
    """Counted from the headers, each of which must fit its file."""
    total = 0
    for file in weights:
        try:
            with file.open("rb") as opened:
                total += sum(tensor.count for tensor in read_header(opened).tensors.values())
        except BadHeader as error:
            raise _bad(f"{file.name} {error}") from None
    return total


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        if path.stat().st_size > MAX_CONFIG:
            raise _bad("config.json is too large to be one")
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _bad("there is no config.json") from None
    except (ValueError, RecursionError):
        raise _bad("config.json is no JSON") from None
    if not isinstance(found, dict):
        raise _bad("config.json is no JSON object")
    return found


def _bad(why: str) -> StepFailed:
    return StepFailed(EndReason.BAD_MODEL, why)
