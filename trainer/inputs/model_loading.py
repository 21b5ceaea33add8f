"""Load a base model without the code in its directory, with an attention kernel it supports."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from core.domain.choices import Attention

log = logging.getLogger(__name__)
LoadedModel = TypeVar("LoadedModel")

#: What in a configuration names code: of the folder, or of a repository of kernels (`evil/kernels`).
_CODE = frozenset(
    {
        "auto_map",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_internal",
        "experts_implementation",
        "_experts_implementation",
        "_experts_implementation_internal",
        "kernel_config",
        "use_kernels",
        "custom_generate",
        "custom_pipelines",
        "trust_remote_code",
    }
)
_QUANTIZED = "quantization_config"
#: What is tried next where a model, or the machine, lacks a kernel.
NEXT_ATTENTION = {
    Attention.FLASH_3: Attention.FLASH_2,
    Attention.FLASH_2: Attention.SDPA,
    Attention.FLEX: Attention.SDPA,
    Attention.SDPA: Attention.EAGER,
}
#: How transformers, flash-attn's own libraries and the kernels' hub refuse one.
_REFUSED = re.compile(
    r"flash[ _-]?att|scaled_dot_product_attention|flex[ _]attention|attn_implementation|kernels-community/",
    re.IGNORECASE,
)


def block_imports(*packages: str) -> None:
    """Make packages unimportable that others import wherever they are installed and that nothing here needs.
    Those already imported stay."""
    for package in packages:
        cast(dict[str, Any], sys.modules).setdefault(package, None)


def block_gpu_kernels(wanted: bool = True) -> None:
    """Without a GPU, or where they failed: transformers prefers kernels of these packages wherever they are
    installed, also where Triton finds nothing to run them on. Its own code takes their place."""
    if not wanted or not importlib.import_module("torch").cuda.is_available():
        block_imports("fla", "causal_conv1d", "mamba_ssm")


def without_remote_code(config: Any, quantized: bool = False) -> Any:
    """The configuration without what names code, at every level. Settings of a quantization stay, names of
    repositories among them do not."""
    if isinstance(config, list):
        return [without_remote_code(item, quantized) for item in config]
    if not isinstance(config, Mapping):
        return config
    return {
        key: without_remote_code(value, quantized or key == _QUANTIZED)
        for key, value in config.items()
        if key not in _CODE and not (quantized and isinstance(value, str) and "/" in value)
    }


def forbid_remote_code() -> None:
    """From now on transformers reads every configuration without remote code. Offline mode and
    `trust_remote_code` stand in the way as well; this does not depend on them."""
    base: Any = importlib.import_module("transformers").PretrainedConfig
    read = base._get_config_dict.__func__
    if getattr(read, "without_code", False):
        return

    def harmless(cls: Any, *arguments: Any, **named: Any) -> Any:
        config, rest = read(cls, *arguments, **named)
        return without_remote_code(config), rest

    harmless.without_code = True  # type: ignore[attr-defined]
    base._get_config_dict = classmethod(harmless)


def with_attention(
    load: Callable[[Attention], LoadedModel], wanted: Attention
) -> tuple[LoadedModel, Attention]:
    """Load with the first attention kernel, from the wanted one down, that model and machine accept.
    Refusals come before any weight is read."""
    attention = wanted
    while True:
        try:
            return load(attention), attention
        except (ValueError, ImportError, OSError, RuntimeError) as error:
            following = NEXT_ATTENTION.get(attention)
            if following is None or not _REFUSED.search(str(error)):
                raise
            log.warning("%s cannot be used, %s is tried: %s", attention, following, str(error)[:200])
            attention = following
