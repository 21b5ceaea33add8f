"""Weight files."""

from typing import Any

from safetensors.torch import load_file


def load_torch_file(path: str, safe_load: bool = False, return_metadata: bool = False) -> Any:
    weights = load_file(path)
    return (weights, {}) if return_metadata else weights


def convert_old_quants(weights: Any, model_prefix: str, metadata: Any) -> tuple[Any, Any]:
    return weights, metadata
