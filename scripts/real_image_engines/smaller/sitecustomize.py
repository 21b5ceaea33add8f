"""Make the dimensions small that the image engines have written into their code.

Read by the engine's Python when this directory is on its path. Nothing else of the engines is changed: their
own scripts parse, load, train and save. A module is changed right after it was imported.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

#: Width of every text encoder.
TEXT_WIDTH = 32
#: Tokens of CLIP's and T5's vocabularies: those of the small tokenizers fit.
CLIP_TOKENS, T5_TOKENS = 600, 320
KREA2 = {"features": 64, "tdim": 32, "txtdim": TEXT_WIDTH, "heads": 2, "kvheads": 1, "layers": 2}
KREA2 |= {"txtheads": 2, "txtkvheads": 2}
IDEOGRAM4 = {"emb_dim": 64, "num_layers": 2, "num_heads": 2, "intermediate_size": 128, "adanln_dim": 32}
IDEOGRAM4 |= {"llm_features_dim": 13 * TEXT_WIDTH, "mrope_section": (8, 4, 4)}
FLUX = {"vec_in_dim": TEXT_WIDTH, "context_in_dim": TEXT_WIDTH, "hidden_size": 64, "num_heads": 2}
FLUX |= {"depth": 2, "depth_single_blocks": 2, "axes_dim": [8, 12, 12]}
#: Groups of 32 channels are normalised together.
VAE_WIDTH = 32
SDXL_WIDTH = 32


def _krea2(module: Any) -> None:
    module.KREA2_MMDIT_CONFIG.update(KREA2)


def _ideogram4(module: Any) -> None:
    module.Ideogram4Config = functools.partial(module.Ideogram4Config, **IDEOGRAM4)
    module.AutoEncoderParams = functools.partial(module.AutoEncoderParams, ch=VAE_WIDTH)


def _flux(module: Any) -> None:
    for spec in module.configs.values():
        spec.params = replace(spec.params, **FLUX)
        spec.ae_params = replace(spec.ae_params, ch=VAE_WIDTH)


def _flux_encoders(module: Any) -> None:
    """Their configurations are written in the middle of the functions that load them."""
    make_clip, make_t5 = module.CLIPConfig, module.T5Config
    t5 = {"d_model": TEXT_WIDTH, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 2}
    module.CLIPConfig = lambda **given: make_clip(**{**given, **clip_sizes(TEXT_WIDTH)})
    module.T5Config = lambda **given: make_t5(**{**given, **t5, "vocab_size": T5_TOKENS})


def clip_sizes(width: int) -> dict[str, int]:
    """All the twelve layers: SDXL is given the output of the eleventh."""
    small = {"hidden_size": width, "intermediate_size": 2 * width, "projection_dim": width}
    return small | {"num_hidden_layers": 12, "num_attention_heads": 2, "vocab_size": CLIP_TOKENS}


def _sdxl(module: Any) -> None:
    module.MODEL_CHANNELS, module.TIME_EMBED_DIM = SDXL_WIDTH, 4 * SDXL_WIDTH
    module.CONTEXT_DIM = 2 * TEXT_WIDTH
    # The pooled text and six sizes of 256 each.
    module.ADM_IN_CHANNELS = TEXT_WIDTH + 6 * 256
    # In place: adapters find their layers by this class's name.
    begin = module.Transformer2DModel.__init__

    def small(self: Any, **given: Any) -> None:
        width = given["in_channels"]
        given |= {"num_attention_heads": 2, "attention_head_dim": width // 2, "num_transformer_layers": 1}
        begin(self, **{**given, "cross_attention_dim": module.CONTEXT_DIM})

    module.Transformer2DModel.__init__ = small


def _sdxl_loading(module: Any) -> None:
    make = module.CLIPTextConfig
    module.CLIPTextConfig = lambda **given: make(**{**given, **clip_sizes(TEXT_WIDTH)})


def _sdxl_vae(module: Any) -> None:
    module.VAE_PARAMS_CH = VAE_WIDTH


SMALLER: dict[str, Callable[[Any], None]] = {
    "extensions_built_in.diffusion_models.krea2.krea2": _krea2,
    "extensions_built_in.diffusion_models.ideogram4.ideogram4": _ideogram4,
    "library.flux_models": _flux,
    "library.flux_utils": _flux_encoders,
    "library.sdxl_original_unet": _sdxl,
    "library.sdxl_model_util": _sdxl_loading,
    "library.model_util": _sdxl_vae,
}


class _Loader(importlib.abc.Loader):
    def __init__(self, real: importlib.abc.Loader, change: Callable[[Any], None]) -> None:
        self.real, self.change = real, change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.real.exec_module(module)
        self.change(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in SMALLER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, SMALLER[name])
        return spec


sys.meta_path.insert(0, _Finder())
