"""Random models of a few megabytes in the layouts that ai-toolkit loads, as a validator's cache has them.

TOOLKIT_PYTHON toolkit_models.py FAMILY CACHE AI_TOOLKIT
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

#: Rank of the adapters that come beside a model.
RANK = 4
_QWEN = {"vocab_size": 320, "hidden_size": small.TEXT_WIDTH, "intermediate_size": 64, "head_dim": 16}
_QWEN |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 4096}
_ROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True, "rope_theta": 1e6}
_MARKS = {
    "image_token_id": 262,
    "video_token_id": 263,
    "vision_start_token_id": 259,
    "vision_end_token_id": 260,
}


def _randomise(model: Any) -> Any:
    """Every weight away from zero: some parts begin at zero, and nothing would flow through them."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model.to(torch.bfloat16)


def _adapter(path: Path, model: Any, prefix: str, among: str = "") -> None:
    """An adapter for every linear layer, that changes hardly anything."""
    torch.manual_seed(1)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith(among):
            tensors[f"{prefix}{name}.lora_A.weight"] = torch.randn(RANK, module.in_features) * 1e-2
            tensors[f"{prefix}{name}.lora_B.weight"] = torch.randn(module.out_features, RANK) * 1e-3
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, path)


def _vae(channels: int = 16) -> Any:
    from diffusers import AutoencoderKL

    blocks = ["DownEncoderBlock2D"] * 4, ["UpDecoderBlock2D"] * 4
    return AutoencoderKL(
        down_block_types=blocks[0],
        up_block_types=blocks[1],
        block_out_channels=[8, 8, 16, 16],
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
    )


def _qwen_vae() -> Any:
    from diffusers import AutoencoderKLQwenImage

    return AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1)


def _qwen3_vl(layers: int) -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 16}
    vision |= {"out_hidden_size": small.TEXT_WIDTH, "deepstack_visual_indexes": [0, 1]}
    text = _QWEN | {"num_hidden_layers": layers, "rope_parameters": _ROPE, "rope_scaling": _ROPE}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **_MARKS))


def z_image(models: Path, hub: Path) -> None:
    from diffusers import ZImageTransformer2DModel
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = models / "tiny--z-image"
    transformer = ZImageTransformer2DModel(
        dim=64, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=small.TEXT_WIDTH,
        axes_dims=[8, 12, 12],
    )  # fmt: skip
    _randomise(transformer).save_pretrained(folder / "transformer")
    encoder = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=3, **_QWEN))
    _randomise(encoder).save_pretrained(folder / "text_encoder")
    small_tokenizers.save_qwen(folder / "tokenizer")
    _randomise(_vae()).save_pretrained(folder / "vae")
    _adapter(hub / "zimage_turbo_training_adapter_v2.safetensors", transformer, "diffusion_model.", "layers.")


def qwen_image(models: Path, hub: Path) -> None:
    from diffusers import QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    folder = models / "tiny--qwen-image"
    transformer = QwenImageTransformer2DModel(
        num_layers=2, attention_head_dim=32, num_attention_heads=2, joint_attention_dim=small.TEXT_WIDTH,
        axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    _randomise(transformer).save_pretrained(folder / "transformer")
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    vision |= {"out_hidden_size": small.TEXT_WIDTH, "fullatt_block_indexes": [1]}
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e6}
    text = {key: value for key, value in _QWEN.items() if key != "head_dim"}
    text |= {"num_hidden_layers": 2, "rope_parameters": rope, "rope_scaling": rope}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_MARKS)
    _randomise(Qwen2_5_VLForConditionalGeneration(config)).save_pretrained(folder / "text_encoder")
    small_tokenizers.save_qwen(folder / "tokenizer")
    _randomise(_qwen_vae()).save_pretrained(folder / "vae")


def krea2(models: Path, hub: Path) -> None:
    from extensions_built_in.diffusion_models.krea2.krea2 import KREA2_MMDIT_CONFIG, SELECT_LAYERS
    from extensions_built_in.diffusion_models.krea2.src.mmdit import SingleMMDiTConfig, SingleStreamDiT

    folder = models / "tiny--krea2"
    folder.mkdir(parents=True, exist_ok=True)
    transformer = _randomise(SingleStreamDiT(SingleMMDiTConfig(**KREA2_MMDIT_CONFIG)))
    save_file(transformer.state_dict(), folder / "raw.safetensors")
    encoder = hub / "Qwen--Qwen3-VL-4B-Instruct"
    _randomise(_qwen3_vl(SELECT_LAYERS[-1] + 1)).save_pretrained(encoder)
    small_tokenizers.save_qwen(encoder)
    _randomise(_qwen_vae()).save_pretrained(folder / "vae")


def ideogram4(models: Path, hub: Path) -> None:
    from diffusers import AutoencoderKLFlux2
    from extensions_built_in.diffusion_models.ideogram4 import ideogram4 as real
    from extensions_built_in.diffusion_models.ideogram4.src.transformer import QWEN3_VL_ACTIVATION_LAYERS

    folder = models / "tiny--ideogram4"
    transformer = _randomise(real.Ideogram4Transformer2DModel(real.Ideogram4Config()))
    for name, model in (
        ("transformer", transformer),
        ("vae", _randomise(AutoencoderKLFlux2(block_out_channels=(32, 64, 128, 128)))),
    ):
        (folder / name).mkdir(parents=True, exist_ok=True)
        weights = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
        save_file(weights, folder / name / "diffusion_pytorch_model.safetensors")
    encoder = hub / "Qwen--Qwen3-VL-8B-Instruct"
    _randomise(_qwen3_vl(QWEN3_VL_ACTIVATION_LAYERS[-1] + 1)).save_pretrained(encoder)
    small_tokenizers.save_qwen(encoder)
    _adapter(hub / "ideogram_4_unconditional_lora_r16.safetensors", transformer, "diffusion_model.")


def flux(models: Path, hub: Path) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    folder = models / "tiny--flux"
    width = small.TEXT_WIDTH
    transformer = FluxTransformer2DModel(
        num_layers=2, num_single_layers=2, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=width, pooled_projection_dim=width, guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    _randomise(transformer).save_pretrained(folder / "transformer")
    clip = CLIPTextConfig(**small.clip_sizes(width), eos_token_id=513, bos_token_id=512, pad_token_id=513)
    _randomise(CLIPTextModel(clip)).save_pretrained(folder / "text_encoder")
    t5 = T5Config(d_model=width, d_ff=64, d_kv=16, num_heads=2, num_layers=2, vocab_size=small.T5_TOKENS)
    _randomise(T5EncoderModel(t5)).save_pretrained(folder / "text_encoder_2")
    small_tokenizers.save_clip(folder / "tokenizer")
    small_tokenizers.save_t5(folder / "tokenizer_2")
    _randomise(_vae()).save_pretrained(folder / "vae")
    FlowMatchEulerDiscreteScheduler(
        shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15,
        base_image_seq_len=256, max_image_seq_len=4096,
    ).save_pretrained(folder / "scheduler")  # fmt: skip


MAKERS: dict[str, Callable[[Path, Path], None]] = {
    "z-image": z_image,
    "qwen-image": qwen_image,
    "krea2": krea2,
    "ideogram4": ideogram4,
    "flux": flux,
}


def main(family: str, cache: str, toolkit: str) -> None:
    sys.path.insert(0, toolkit)
    for name in ("models", "hf_cache", "datasets"):
        (Path(cache) / name).mkdir(parents=True, exist_ok=True)
    MAKERS[family](Path(cache) / "models", Path(cache) / "hf_cache")


if __name__ == "__main__":
    main(*sys.argv[1:])
