"""Random models of a few megabytes in the files that sd-scripts loads, as a validator's cache has them.

    KOHYA_PYTHON kohya_models.py FAMILY CACHE SD_SCRIPTS

Made by sd-scripts' own classes, so the layout is its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "smaller")]

import sitecustomize as small  # noqa: E402
import small_tokenizers  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

CLIP_L, CLIP_G, T5 = (
    "openai/clip-vit-large-patch14",
    "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k",
    "google/t5-v1_1-xxl",
)


def _randomise(model: Any) -> Any:
    """Every weight away from zero: some parts begin at zero, and nothing would flow through them."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model


def _snapshot(hub: Path, repository: str) -> Path:
    """A repository as the hub's own cache has it: found by its name without a network."""
    folder = hub / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text("1" * 40, encoding="ascii")
    return folder / "snapshots" / ("1" * 40)


def _save(model: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}, path)


def sdxl(models: Path, hub: Path) -> None:
    from diffusers import AutoencoderKL
    from library import model_util, sdxl_model_util, sdxl_original_unet
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    encoder = sdxl_model_util.CLIPTextConfig(hidden_act="quick_gelu", max_position_embeddings=77)
    parts = (
        CLIPTextModel(encoder),
        CLIPTextModelWithProjection(encoder),
        sdxl_original_unet.SdxlUNet2DConditionModel(),
        AutoencoderKL(**model_util.create_vae_diffusers_config()),
    )
    one, two, unet, vae = map(_randomise, parts)
    path = models / "tiny--sdxl" / "tiny.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    sdxl_model_util.save_stable_diffusion_checkpoint(
        str(path), one, two, unet, 0, 0, None, vae, torch.tensor(4.6), {}, torch.float16
    )
    small_tokenizers.save_clip(_snapshot(hub, CLIP_L))
    small_tokenizers.save_clip(_snapshot(hub, CLIP_G))


def flux(models: Path, hub: Path) -> None:
    from library import flux_models, flux_utils
    from transformers import CLIPTextConfig, CLIPTextModel, T5EncoderModel

    folder, spec = models / "tiny--flux", flux_models.configs["dev"]
    # Validators leave exactly this file of Flux; its parts come with the engine's image.
    parts = models.parent / "flux_parts"
    _save(_randomise(flux_models.Flux(spec.params)).to(torch.bfloat16), folder / "flux1-dev.safetensors")
    _save(_randomise(flux_models.AutoEncoder(spec.ae_params)).to(torch.bfloat16), parts / "ae.safetensors")
    clip = CLIPTextModel(CLIPTextConfig(**small.clip_sizes(small.TEXT_WIDTH)))
    _save(_randomise(clip).to(torch.bfloat16), parts / "clip_l.safetensors")
    t5 = flux_utils.T5Config(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    _save(_randomise(T5EncoderModel(t5)).to(torch.bfloat16), parts / "t5xxl_fp16.safetensors")
    small_tokenizers.save_clip(_snapshot(hub, CLIP_L))
    small_tokenizers.save_t5(_snapshot(hub, T5))


MAKERS: dict[str, Callable[[Path, Path], None]] = {"sdxl": sdxl, "flux": flux}


def main(family: str, cache: str, kohya: str) -> None:
    sys.path.insert(0, kohya)
    for name in ("models", "hf_cache", "datasets"):
        (Path(cache) / name).mkdir(parents=True, exist_ok=True)
    MAKERS[family](Path(cache) / "models", Path(cache) / "hf_cache")


if __name__ == "__main__":
    main(*sys.argv[1:])
