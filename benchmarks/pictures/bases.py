"""Train a small base in ComfyUI's own model on plain drawings, so that there is structure to adapt.

Imported where ComfyUI is. The files are those of `scripts/real_image_engines/comfyui_models.py`, with weights
that have learned something.
"""

from __future__ import annotations

import math
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.pictures.drawings import PLAIN, picture
from trainer.pictures.stack import make_trainable

ENGINES = Path(__file__).parents[2] / "scripts" / "real_image_engines"
sys.path[:0] = [str(ENGINES), str(ENGINES / "smaller")]

import comfyui_models  # noqa: E402

WIDTHS = {"z-image": 256, "flux": 96, "krea2": 128, "qwen-image": 96, "ideogram4": 96}
LAYERS = 3
PICTURES, BATCH, RATE = 160, 8, 2e-3
#: Of batches, those that are trained with the empty text.
EMPTY = 0.25


class Conditioned:
    """A model of ComfyUI with encoded pictures and texts, predicting batches with gradients."""

    def __init__(self, model: Any, clip: Any, guidance: float | None) -> None:
        self.model, self.clip, self.guidance = model, clip, guidance
        self.texts: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {}

    def flow_loss(self, latents: torch.Tensor, texts: list[str], sigmas: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(latents)
        scale = sigmas.view(-1, *[1] * (latents.ndim - 1))
        noisy = (1 - scale) * latents + scale * noise
        contexts = [self.encoded(text) for text in texts]
        named: dict[str, Any] = {"cross_attn": torch.cat([context for context, _ in contexts])}
        for name in ("pooled_output", "attention_mask"):
            if contexts[0][1].get(name) is not None:
                named[name] = torch.cat([more[name] for _, more in contexts])
        if self.guidance is not None:
            named["guidance"] = self.guidance
        conditions = self.model.extra_conds(noise=noisy, device=noisy.device, **named)
        inputs = {name: part.process_cond(len(latents), area=None).cond for name, part in conditions.items()}
        clean = self.model.apply_model(noisy, sigmas, **inputs)
        return ((noisy - clean) / scale - (noise - latents)).square().mean()

    def encoded(self, text: str) -> tuple[torch.Tensor, dict[str, Any]]:
        if text not in self.texts:
            with torch.no_grad():
                [[context, more]] = self.clip.encode_from_tokens_scheduled(self.clip.tokenize(text))
            self.texts[text] = context, more
        return self.texts[text]


def make_base(family: str, folder: Path, checkout: Path, seconds: float, side: int) -> dict[str, float]:
    """Write a base that was trained for so many CPU seconds; return its losses, first and last."""
    import comfy.sd
    import comfyui_evaluation
    import numpy as np

    network = comfyui_models.randomise(comfyui_models.BASES[family](WIDTHS[family], LAYERS))
    comfyui_models.save(family, folder, checkout, network)
    record = comfyui_evaluation.read_record(folder / "model.json")
    loader = comfyui_evaluation.Evaluator(record, None, 1, side)
    weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    patcher = comfy.sd.load_diffusion_model_state_dict(weights, {"dtype": torch.float32})
    model = patcher.model
    encode, drawn = loader.encode, random.Random("base")
    latents: list[torch.Tensor] = []
    by_length: dict[int, list[tuple[int, str]]] = {}
    conditioned = Conditioned(model, loader.clip, 3.5 if family == "flux" else None)
    for at in range(PICTURES):
        image, caption = picture(drawn, PLAIN, side)
        latents.append(model.process_latent_in(encode(np.array(image, dtype=np.float32))).float())
        length = conditioned.encoded(caption)[0].shape[1]
        by_length.setdefault(length, []).append((at, caption))
    losses = _train(conditioned, torch.cat(latents), list(by_length.values()), seconds)
    trained = {name: tensor.detach() for name, tensor in model.diffusion_model.state_dict().items()}
    network.load_state_dict(trained)
    save_file(comfyui_models.base_file(family, network), record["base_path"])
    return losses


def _train(
    conditioned: Conditioned, latents: torch.Tensor, groups: list[list[tuple[int, str]]], seconds: float
) -> dict[str, float]:
    import comfy.model_management

    network = conditioned.model.diffusion_model.requires_grad_(True)
    make_trainable(network)
    comfy.model_management.in_training = True
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.01)
    drawn, began, seen, step = random.Random(1), time.process_time(), [], 0
    weights = [len(group) for group in groups]
    while (share := (time.process_time() - began) / seconds) < 1:
        [group] = drawn.choices(groups, weights)
        chosen = [drawn.choice(group) for _ in range(BATCH)]
        empty = drawn.random() < EMPTY
        texts = ["" if empty else caption for _, caption in chosen]
        sigmas = torch.rand(BATCH) * 0.98 + 0.01
        loss = conditioned.flow_loss(latents[[at for at, _ in chosen]], texts, sigmas)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        step += 1
        for rates in optimizer.param_groups:
            rates["lr"] = RATE * min(step / 50, 1.0) * 0.5 * (1 + math.cos(math.pi * share))
        optimizer.step()
        seen.append(loss.item())
    comfy.model_management.in_training = False
    return {"steps": step, "first": sum(seen[:20]) / 20, "last": sum(seen[-50:]) / 50}
