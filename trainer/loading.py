"""How a base model is loaded: without the code that its folder names, with an attention it can take."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from core.choices import Attention

log = logging.getLogger(__name__)
Loaded = TypeVar("Loaded")

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
_NEXT = {
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


def leave_out(*packages: str) -> None:
    """Packages that others import wherever they are installed, and that nothing here needs: from now on they
    are not. Those imported already stay."""
    for package in packages:
        cast(dict[str, Any], sys.modules).setdefault(package, None)


def without_code(config: Any, quantized: bool = False) -> Any:
    """The configuration without what names code, at every level. Settings of a quantization stay, names of
    repositories among them do not."""
    if isinstance(config, list):
        return [without_code(one, quantized) for one in config]
    if not isinstance(config, Mapping):
        return config
    return {
        key: without_code(value, quantized or key == _QUANTIZED)
        for key, value in config.items()
        if key not in _CODE and not (quantized and isinstance(value, str) and "/" in value)
    }


def forbid_code() -> None:
    """For this process: every configuration that transformers reads is read so. Offline mode and
    `trust_remote_code` stand in the way as well; this does not depend on them."""
    base: Any = importlib.import_module("transformers").PretrainedConfig
    read = base._get_config_dict.__func__
    if getattr(read, "without_code", False):
        return

    def harmless(cls: Any, *arguments: Any, **named: Any) -> Any:
        config, rest = read(cls, *arguments, **named)
        return without_code(config), rest

    harmless.without_code = True  # type: ignore[attr-defined]
    base._get_config_dict = classmethod(harmless)


def with_attention(load: Callable[[Attention], Loaded], wanted: Attention) -> tuple[Loaded, Attention]:
    """The model with the first kernel, from the wanted one down, that neither it nor the machine refuses.
    Refusals come before any weight is read."""
    attention = wanted
    while True:
        try:
            return load(attention), attention
        except (ValueError, ImportError, OSError, RuntimeError) as error:
            following = _NEXT.get(attention)
            if following is None or not _REFUSED.search(str(error)):
                raise
            log.warning("%s cannot be used, %s is tried: %s", attention, following, str(error)[:200])
            attention = following
