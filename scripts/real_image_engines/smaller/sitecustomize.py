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
#: ComfyUI's own: it keeps the real tokenizers, and as many layers as are tapped.
TEXT_WIDTH_8B = 48
_SMALL_TEXT = {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
COMFY_TEXT = {
    "Qwen3_4BConfig": _SMALL_TEXT | {"hidden_size": TEXT_WIDTH, "num_hidden_layers": 4},
    "Qwen25_7BVLI_Config": _SMALL_TEXT | {"hidden_size": TEXT_WIDTH, "num_hidden_layers": 4},
    "Qwen3VL_4BConfig": _SMALL_TEXT | {"hidden_size": TEXT_WIDTH},
    "Qwen3VL_8BConfig": _SMALL_TEXT | {"hidden_size": TEXT_WIDTH_8B},
}
#: ComfyUI knows these of z-image by the width of its layers.
Z_IMAGE: dict[str, Any] = {
    "axes_lens": [1536, 512, 512],
    "rope_theta": 256.0,
    "ffn_dim_multiplier": 8.0 / 3.0,
}
Z_IMAGE |= {"z_image_modulation": True, "time_scale": 1000.0, "pad_tokens_multiple": 32}
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


def axes(head: int) -> list[int]:
    """Parts of a head for positions: the third is the width, as everywhere; all are even."""
    side = head * 3 // 16 * 2
    return [head - 2 * side, side, side]


def mrope(head: int) -> list[int]:
    """The same for the interleaved positions of Qwen's."""
    return [head // 4, head // 8, head // 8]


def _comfy_detection(module: Any) -> None:
    """ComfyUI reads most dimensions from the weights, and knows the rest by heart: always two heads here."""
    real = module.detect_unet_config

    def detect(weights: Any, prefix: str, metadata: Any = None) -> Any:
        sizes = real(weights, prefix, metadata=metadata)
        kind = (sizes or {}).get("image_model")
        if kind == "lumina2":
            sizes |= {"n_heads": 2, "n_kv_heads": 2, "axes_dims": axes(sizes["dim"] // 2)} | Z_IMAGE
        elif kind == "flux":
            sizes |= {"num_heads": 2, "axes_dim": axes(sizes["hidden_size"] // 2)}
        elif kind == "qwen_image":
            head = weights[f"{prefix}img_in.weight"].shape[0] // 2
            sizes |= {"num_attention_heads": 2, "attention_head_dim": head, "axes_dims_rope": axes(head)}
            sizes["joint_attention_dim"] = TEXT_WIDTH
        elif kind == "krea2":
            sizes |= {"heads": 2, "kvheads": 1, "txtheads": 2, "txtkvheads": 2}
        elif kind == "ideogram4":
            emb, hidden = weights[f"{prefix}layers.0.feed_forward.w2.weight"].shape
            adaln = weights[f"{prefix}adaln_proj.weight"].shape[0]
            sizes |= {"num_attention_heads": 2, "attention_head_dim": emb // 2, "intermediate_size": hidden}
            sizes |= {"adaln_dim": adaln, "llm_features_dim": 13 * TEXT_WIDTH_8B}
            sizes["mrope_section"] = mrope(emb // 2)
        return sizes

    module.detect_unet_config = detect


def _comfy_models(module: Any) -> None:
    # Told by what it has instead of its 3840 columns.
    module.ZImage.unet_config = {"image_model": "lumina2", "z_image_modulation": True}
    module.Ideogram4.unet_extra_config = {"rope_theta": 5000000, "norm_eps": 1e-5}


def _comfy_loading(module: Any) -> None:
    """Encoders are told apart by their widths; VAEs have 128 channels."""
    real, kinds = module.detect_te_model, module.TEModel

    def detect(weights: Any) -> Any:
        if "encoder.block.23.layer.1.DenseReluDense.wi_1.weight" in weights:
            return kinds.T5_XXL
        if "model.visual.merger.linear_fc2.weight" in weights:
            width = weights["model.visual.merger.linear_fc2.weight"].shape[0]
            return kinds.QWEN3VL_4B if width == TEXT_WIDTH else kinds.QWEN3VL_8B
        if "model.layers.0.self_attn.k_proj.bias" in weights:
            return kinds.QWEN25_7B
        return kinds.QWEN3_4B if "model.layers.0.self_attn.q_norm.weight" in weights else real(weights)

    module.detect_te_model = detect
    for name in ("AutoencoderKL", "AutoencodingEngine"):
        setattr(module, name, functools.partial(_narrow, getattr(module, name)))


def _narrow(kind: Any, **given: Any) -> Any:
    for part in ("ddconfig", "decoder_ddconfig"):
        if part in given:
            given[part] = given[part] | {"ch": VAE_WIDTH}
    for part in ("encoder_config", "decoder_config"):
        if part in given:
            given[part] = given[part] | {"params": given[part]["params"] | {"ch": VAE_WIDTH}}
    return kind(**given)


def _comfy_llama(module: Any) -> None:
    for name, sizes in COMFY_TEXT.items():
        small = type(name, (getattr(module, name),), {"head_dim": 16})
        setattr(module, name, functools.partial(small, **sizes))


def _comfy_qwen3vl(module: Any) -> None:
    for sizes in module.QWEN3VL_VISION.values():
        sizes |= {"hidden_size": 32, "intermediate_size": 64, "depth": 2, "deepstack_visual_indexes": [0, 1]}
    module.QWEN3VL_VISION_COMMON |= {"num_heads": 2, "num_position_embeddings": 16}


def _comfy_qwen_vl(module: Any) -> None:
    sizes = {"intermediate_size": 64, "num_heads": 2, "num_layers": 2}
    _smaller_begin(
        module.Qwen2VLVisionTransformer, sizes | {"output_hidden_size": TEXT_WIDTH, "hidden_size": 32}
    )


def _smaller_begin(kind: Any, sizes: dict[str, int]) -> None:
    begin = kind.__init__
    kind.__init__ = lambda self, *given, **named: begin(self, *given, **{**named, **sizes})


def _comfy_configured(kind: Any, sizes: dict[str, int]) -> None:
    begin = kind.__init__
    kind.__init__ = lambda self, sizes_read, *given, **named: begin(self, sizes_read | sizes, *given, **named)


def _comfy_clip(module: Any) -> None:
    sizes = {"hidden_size": TEXT_WIDTH, "intermediate_size": 64, "num_attention_heads": 2}
    _comfy_configured(module.CLIPTextModel, sizes)


def _comfy_t5(module: Any) -> None:
    _comfy_configured(module.T5, {"d_model": TEXT_WIDTH, "d_ff": 64, "d_kv": 16, "num_heads": 2})


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
    "comfy.model_detection": _comfy_detection,
    "comfy.supported_models": _comfy_models,
    "comfy.sd": _comfy_loading,
    "comfy.text_encoders.llama": _comfy_llama,
    "comfy.text_encoders.qwen3vl": _comfy_qwen3vl,
    "comfy.text_encoders.qwen_vl": _comfy_qwen_vl,
    "comfy.clip_model": _comfy_clip,
    "comfy.text_encoders.t5": _comfy_t5,
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
