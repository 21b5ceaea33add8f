"""Random models of a few megabytes in the files that the evaluator of pictures loads with ComfyUI.

COMFYUI_PYTHON comfyui_models.py FAMILY DIRECTORY COMFYUI

COMFYUI is a checkout, COMFYUI_PYTHON has torch and what its requirements.txt names. DIRECTORY gets the base
in `base/` (for z-image with the VAE's folder, as in a task's repository), encoders and VAE by their real
names, and `model.json`, a `PictureModel` of `core.runs.picture_run`. ComfyUI knows some dimensions by heart,
so whatever loads these files runs with `smaller/` beside this script on PYTHONPATH, which makes them small
when they are imported; and with OMP_NUM_THREADS=1, as so little work is slower on several threads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "smaller")]

import sitecustomize as small  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

Weights = dict[str, torch.Tensor]
FP8 = torch.float8_e4m3fn
_WIDTH = 64


def randomise(model: Any, seed: int = 0) -> Any:
    """Every matrix away from zero, as some parts begin there, and every norm as it begins."""
    torch.manual_seed(seed)
    kept_about_one = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if "Norm" in type(module).__name__ and name == "weight"
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) in kept_about_one or name.endswith("gamma"):
                parameter.fill_(1.0)
            elif parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
            else:
                torch.nn.init.normal_(parameter, std=0.02)
    return model.eval().requires_grad_(False)


def weights_of(module: Any, dtype: torch.dtype, /, **renamed: str) -> Weights:
    """The state under the names that files have: `renamed` maps their beginnings."""
    weights = {}
    for name, tensor in module.state_dict().items():
        for begin, other in renamed.items():
            if name.startswith(f"{begin}."):
                name = f"{other}{name.removeprefix(begin)}"
                break
        weights[name] = (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
    return weights


def fp8_scaled(weights: Weights, among: str, old: bool = False) -> Weights:
    """Matrices of layers in fp8 with a scale each, in ComfyUI's file format of today or in its old one."""
    scaled: Weights = {"scaled_fp8": torch.zeros(0, dtype=FP8)} if old else {}
    quantisation = torch.tensor(list(json.dumps({"format": "float8_e4m3fn"}).encode()), dtype=torch.uint8)
    for name, tensor in weights.items():
        layer = name.removesuffix(".weight")
        if among not in name or layer == name or tensor.ndim != 2:
            scaled[name] = tensor
            continue
        scale = tensor.float().abs().max() / torch.finfo(FP8).max
        scaled[name] = (tensor.float() / scale).to(FP8)
        scaled[f"{layer}.scale_weight" if old else f"{layer}.weight_scale"] = scale
        if not old:
            scaled[f"{layer}.comfy_quant"] = quantisation.clone()
    return scaled


def _operations() -> Any:
    import comfy.ops

    return {"operations": comfy.ops.disable_weight_init, "dtype": torch.float32, "device": "cpu"}


def z_image(width: int = 256, layers: int = 2) -> Any:
    """Modulation takes 256 numbers, so that layers cannot be narrower."""
    from comfy.ldm.lumina.model import NextDiT

    return NextDiT(
        in_channels=16, dim=width, n_layers=layers, n_heads=2, n_kv_heads=2, qk_norm=True,
        axes_dims=small.axes(width // 2), cap_feat_dim=small.TEXT_WIDTH, **small.Z_IMAGE, **_operations(),
    )  # fmt: skip


def flux(width: int = _WIDTH, layers: int = 2) -> Any:
    from comfy.ldm.flux.model import Flux

    return Flux(
        in_channels=16, out_channels=16, vec_in_dim=small.TEXT_WIDTH, context_in_dim=small.TEXT_WIDTH,
        hidden_size=width, mlp_ratio=4.0, num_heads=2, depth=layers, depth_single_blocks=layers,
        axes_dim=small.axes(width // 2), theta=10000, patch_size=2,
        qkv_bias=True, guidance_embed=True, txt_ids_dims=[], **_operations(),
    )  # fmt: skip


def qwen_image(width: int = _WIDTH, layers: int = 2) -> Any:
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        num_layers=layers, attention_head_dim=width // 2, num_attention_heads=2,
        joint_attention_dim=small.TEXT_WIDTH, axes_dims_rope=small.axes(width // 2), **_operations(),
    )  # fmt: skip


def krea2(width: int = _WIDTH, layers: int = 2) -> Any:
    from comfy.ldm.krea2.model import SingleStreamDiT

    return SingleStreamDiT(
        features=width,
        txtdim=small.TEXT_WIDTH,
        heads=2,
        kvheads=1,
        layers=layers,
        txtheads=2,
        txtkvheads=2,
        **_operations(),
    )


def ideogram4(width: int = _WIDTH, layers: int = 2) -> Any:
    from comfy.ldm.ideogram4.model import Ideogram4Transformer2DModel

    return Ideogram4Transformer2DModel(
        num_layers=layers, num_attention_heads=2, attention_head_dim=width // 2, intermediate_size=2 * width,
        adaln_dim=width // 2, llm_features_dim=13 * small.TEXT_WIDTH_8B,
        mrope_section=small.mrope(width // 2), **_operations(),
    )  # fmt: skip


def base_file(family: str, model: Any) -> Weights:
    """A base in the file format of its family."""
    weights = weights_of(model, torch.bfloat16)
    if family == "flux":
        names = {name: name.replace("_norm.weight", "_norm.scale") for name in weights}
        return {names[name]: tensor for name, tensor in weights.items()}
    if family == "ideogram4":
        return fp8_scaled(weights, "layers.")
    if family == "qwen-image":
        return {name: tensor.to(FP8) if tensor.ndim == 2 else tensor for name, tensor in weights.items()}
    return weights


BASES: dict[str, Callable[..., Any]] = {
    "z-image": z_image,
    "flux": flux,
    "qwen-image": qwen_image,
    "krea2": krea2,
    "ideogram4": ideogram4,
}
FILES = {
    "z-image": "z_image_bf16",
    "flux": "flux1-dev",
    "qwen-image": "qwen_image_fp8_e4m3fn",
    "krea2": "raw",
    "ideogram4": "ideogram4_fp8_scaled",
}


def _language_model(kind: str) -> Any:
    from comfy.text_encoders import llama, qwen3vl

    visual = kind.startswith("qwen3vl")
    make = qwen3vl._make_qwen3vl_model(kind) if visual else getattr(llama, kind)
    made = _operations()
    return randomise(make({}, made["dtype"], made["device"], made["operations"]))


def encoders(family: str) -> dict[str, Weights]:
    """Weights by name of the file, in the order in which the evaluator names them."""
    visual = {"model": "model.language_model", "visual": "model.visual"}
    if family == "z-image":
        return {"qwen_3_4b": weights_of(_language_model("Qwen3_4B"), torch.bfloat16)}
    if family == "flux":
        return _flux_encoders()
    if family == "qwen-image":
        weights = weights_of(_language_model("Qwen25_7BVLI"), torch.bfloat16)
        return {"qwen_2.5_vl_7b_fp8_scaled": fp8_scaled(weights, "model.layers.", old=True)}
    size = "4b" if family == "krea2" else "8b"
    weights = weights_of(_language_model(f"qwen3vl_{size}"), torch.bfloat16, **visual)
    if "model.language_model.lm_head.weight" in weights:
        weights["lm_head.weight"] = weights.pop("model.language_model.lm_head.weight")
    return {f"qwen3vl_{size}_fp8_scaled": fp8_scaled(weights, "language_model.layers.")}


def _flux_encoders() -> dict[str, Weights]:
    import comfy.sd1_clip
    from comfy.clip_model import CLIPTextModel
    from comfy.text_encoders import t5

    made = _operations()
    rest = made["dtype"], made["device"], made["operations"]
    sizes = json.loads((Path(t5.__file__).parent / "t5_config_xxl.json").read_text())
    clip_sizes = json.loads((Path(comfy.sd1_clip.__file__).parent / "sd1_clip_config.json").read_text())
    return {
        "t5xxl_fp16": weights_of(randomise(t5.T5(sizes, *rest)), torch.float16),
        "clip_l": weights_of(randomise(CLIPTextModel(clip_sizes, *rest)), torch.float16),
    }


def _picture() -> torch.Tensor:
    """Soft blotches in -1..1."""
    generator = torch.Generator().manual_seed(1)
    coarse = torch.rand(1, 3, 16, 16, generator=generator) * 2 - 1
    return torch.nn.functional.interpolate(coarse, 128, mode="bilinear")


def _settle(last: Any, encode: Callable[[torch.Tensor], torch.Tensor], deviation: float) -> None:
    """Scale the encoder's last layer so that its latents spread as those of a trained one."""
    with torch.no_grad():
        for _ in range(2):
            latents = encode(_picture())
            spread = latents.std() / deviation
            if 2 * latents.shape[1] == len(last.bias):
                last.bias[: latents.shape[1]] -= latents.mean(dim=[0, *range(2, latents.ndim)])
            last.weight /= spread
            last.bias /= spread


def vae(family: str) -> tuple[str, Any]:
    """Name of the VAE and its model; its folder for z-image."""
    if family == "z-image":
        import toolkit_models

        model = randomise(toolkit_models._vae())
        _settle(model.encoder.conv_out, lambda picture: model.encode(picture).latent_dist.mean, 2.8)
        return "vae", model
    if family in ("qwen-image", "krea2"):
        from comfy.ldm.wan.vae import WanVAE

        model = randomise(WanVAE(dim=8, z_dim=16, temperal_downsample=[False, True, True]))
        _settle(model.conv1, lambda picture: model.encode(picture[:, :, None]), 1.0)
        return "qwen_image_vae", model
    from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine

    sizes: dict[str, Any] = {
        "double_z": True,
        "z_channels": 16,
        "resolution": 256,
        "in_channels": 3,
        "out_ch": 3,
    }
    sizes |= {
        "ch": small.VAE_WIDTH,
        "ch_mult": [1, 2, 4, 4],
        "num_res_blocks": 2,
        "attn_resolutions": [],
        "dropout": 0.0,
    }
    if family == "ideogram4":
        model = AutoencoderKL(ddconfig=sizes | {"z_channels": 32, "batch_norm_latent": True}, embed_dim=32)
        _settle(randomise(model).quant_conv, model.encode, 1.0)
        return "flux2-vae", model
    parts = (
        "comfy.ldm.modules.diffusionmodules.model.Encoder",
        "comfy.ldm.modules.diffusionmodules.model.Decoder",
    )
    model = AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": parts[0], "params": sizes},
        decoder_config={"target": parts[1], "params": sizes},
    )
    _settle(randomise(model).encoder.conv_out, model.encode, 2.8)
    return "ae", model


def save(family: str, directory: Path, checkout: Path, base: Any) -> None:
    """Write a base, and encoders and a VAE to go with it, with the record that names them."""
    (directory / "base").mkdir(parents=True, exist_ok=True)
    base_path = directory / "base" / f"{FILES[family]}.safetensors"
    save_file(base_file(family, base), base_path)
    encoder_paths = []
    for name, weights in encoders(family).items():
        encoder_paths.append(str(directory / f"{name}.safetensors"))
        save_file(weights, encoder_paths[-1])
    name, model = vae(family)
    if family == "z-image":
        vae_path = directory / "base" / name
        model.save_pretrained(vae_path)
    else:
        vae_path = directory / f"{name}.safetensors"
        save_file(weights_of(model, torch.float32), vae_path)
    record = {"family": family, "base_path": str(base_path), "text_encoder_paths": encoder_paths}
    record |= {"vae_path": str(vae_path), "comfy_dir": str(checkout)}
    (directory / "model.json").write_text(json.dumps(record, indent=2), encoding="utf-8")


def load_comfyui(checkout: Path) -> None:
    """Import ComfyUI for a CPU."""
    sys.path.insert(0, str(checkout))
    import comfy.cli_args

    comfy.cli_args.args.cpu = True


def main(family: str, directory: str, checkout: str) -> None:
    place = Path(checkout).resolve()
    load_comfyui(place)
    save(family, Path(directory).resolve(), place, randomise(BASES[family]()))


if __name__ == "__main__":
    main(*sys.argv[1:])
