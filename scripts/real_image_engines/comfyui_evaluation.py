"""Score adapters as the evaluator of pictures does, in ComfyUI's own nodes, without any code of the trainer.

COMFYUI_PYTHON comfyui_evaluation.py MODEL_JSON PICTURES REPORT [--noises N] [--side PIXELS] [ADAPTER ...]

MODEL_JSON is a `PictureModel`, PICTURES a folder of pictures with captions. Without an adapter, and for an
adapter called "base", the base alone is scored. REPORT gets the two vectors and the score of each. Everything
here follows the written rules of the measure and nothing else, so that the trainer's own figures can be
compared with it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

BANDS = 16
#: Predicted together.
BATCH = 2
BASE = "base"
LOADERS = {
    "z-image": "lumina2",
    "flux": "flux",
    "qwen-image": "qwen_image",
    "krea2": "krea2",
    "ideogram4": "ideogram4",
}


class NoiseCase:
    """One band of one picture: all its noises."""

    def __init__(self, latent: torch.Tensor, digest: str, band: int, noises: int) -> None:
        self.sigma = (band + 0.5) / BANDS
        self.seeds = [seed_of(digest, band, noise) for noise in range(noises)]
        drawn = [
            torch.randn(latent.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
            for seed in self.seeds
        ]
        noise = torch.cat(drawn)
        self.noisy = (1 - self.sigma) * latent + self.sigma * noise
        self.target = noise - latent


def seed_of(digest: str, band: int, noise: int) -> int:
    text = hashlib.sha256(f"42:{digest}:{band}:{noise}".encode()).digest()
    return int.from_bytes(text[:8], "little") % (2**63 - 1)


def prepared(path: Path, side: int) -> tuple[Image.Image, str]:
    """The picture that is encoded, and the hash that its seeds come from."""
    picture = Image.open(path)
    width, height = picture.size
    size = (side, int(height / width * side)) if width > height else (int(width / height * side), side)
    picture = picture.resize(size, Image.Resampling.LANCZOS)
    kept = size[0] // 16 * 16, size[1] // 16 * 16
    left, top = (size[0] - kept[0]) // 2, (size[1] - kept[1]) // 2
    picture = picture.crop((left, top, left + kept[0], top + kept[1])).convert("RGB")
    return picture, hashlib.sha256(picture.tobytes() + str(picture.size).encode()).hexdigest()


class Losses:
    """A sampler in the eyes of ComfyUI: it predicts every case once and draws nothing."""

    def __init__(self, cases: list[NoiseCase]) -> None:
        self.cases = cases
        self.values: list[float] = []

    @torch.inference_mode()
    def sample(self, wrapped: Any, sigmas: Any, extra_args: Any, *_: Any, **__: Any) -> torch.Tensor:
        for case in self.cases:
            for start in range(0, len(case.seeds), BATCH):
                noisy, target = case.noisy[start : start + BATCH], case.target[start : start + BATCH]
                times = torch.full((len(noisy),), case.sigma, dtype=torch.float32)
                clean = wrapped(noisy, times, **extra_args)
                velocity = (noisy - clean.float()) / case.sigma
                self.values += (velocity - target).square().flatten(1).mean(1).tolist()
        return self.cases[0].noisy[:1]


class Evaluator:
    """A base with its encoders, loaded by ComfyUI's nodes, and a folder of pictures as cases."""

    def __init__(self, record: dict[str, Any], pictures: Path | None, noises: int, side: int) -> None:
        import folder_paths
        import nodes

        self.family = record["family"]
        base = Path(record["base_path"])
        encoders = [Path(path) for path in record["text_encoder_paths"]]
        folder_paths.add_model_folder_path("diffusion_models", str(base.parent))
        for path in encoders:
            folder_paths.add_model_folder_path("text_encoders", str(path.parent))
        self.model = self._configured(nodes.UNETLoader().load_unet(base.name, "default")[0])
        loader = nodes.DualCLIPLoader() if len(encoders) == 2 else nodes.CLIPLoader()
        self.clip = loader.load_clip(*(path.name for path in encoders), LOADERS[self.family])[0]
        self.pictures: list[tuple[str, torch.Tensor, list[NoiseCase]]] = []
        self.encode = self._encoder(record["vae_path"])
        if pictures is not None:
            self.read(pictures, noises, side)

    def read(self, pictures: Path, noises: int, side: int) -> None:
        """Make cases of a folder's pictures, instead of those before."""
        self.pictures = []
        for path in sorted(path for path in pictures.iterdir() if path.suffix in (".png", ".jpg", ".webp")):
            picture, digest = prepared(path, side)
            latent = self.encode(np.array(picture, dtype=np.float32))
            scaled = self.model.model.process_latent_in(latent.clone()).float()
            cases = [NoiseCase(scaled, digest, band, noises) for band in range(BANDS)]
            self.pictures.append((path.with_suffix(".txt").read_text("utf-8"), latent, cases))

    def _configured(self, model: Any) -> Any:
        if self.family != "qwen-image":
            return model
        from comfy_extras.nodes_model_advanced import ModelSamplingAuraFlow

        return ModelSamplingAuraFlow().patch_aura(model, 3.0)[0]

    def _encoder(self, path: str) -> Any:
        if Path(path).is_dir():
            from diffusers import AutoencoderKL

            kl = AutoencoderKL.from_pretrained(path, torch_dtype=torch.float32).eval()

            def encode(pixels: np.ndarray[Any, Any]) -> torch.Tensor:
                picture = torch.from_numpy(pixels / np.float32(255.0)).permute(2, 0, 1)[None] * 2 - 1
                with torch.inference_mode():
                    return kl.encode(picture).latent_dist.mean

            return encode
        import comfy.sd
        import comfy.utils

        vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(path), dtype=torch.float32)
        vae.first_stage_model.eval().requires_grad_(False)
        return lambda pixels: vae.encode(torch.from_numpy(pixels / np.float32(255.0))[None]).float().cpu()

    def score(self, adapter: str) -> dict[str, Any]:
        began = time.process_time()
        model, clip, missing = self.patched(adapter)
        if missing:
            raise ValueError(f"{len(missing)} keys are not loaded, the first: {missing[0]}")
        vectors: dict[str, list[float]] = {"text": [], "no_text": []}
        for caption, latent, cases in self.pictures:
            for name, prompt in (("text", caption), ("no_text", "")):
                values = self._losses(model, clip, prompt, latent, cases)
                vectors[name].append(float(np.mean(values)))
        caption, latent, cases = self.pictures[0]
        again = float(np.mean(self._losses(model, clip, caption, latent, cases)))
        if not np.isclose(again, vectors["text"][0], rtol=1e-5, atol=1e-7):
            raise ValueError(f"predictions do not repeat: {again} after {vectors['text'][0]}")
        score = 0.5 * float(np.mean(vectors["text"])) + 0.5 * float(np.mean(vectors["no_text"]))
        return {"adapter": adapter, "score": score, **vectors, "cpu_s": time.process_time() - began}

    def _losses(
        self, model: Any, clip: Any, prompt: str, latent: torch.Tensor, cases: list[NoiseCase]
    ) -> list[float]:
        import comfy.samplers
        import node_helpers
        import nodes

        conditioning = nodes.CLIPTextEncode().encode(clip, prompt)[0]
        if self.family == "flux":
            conditioning = node_helpers.conditioning_set_values(conditioning, {"guidance": 3.5})
        guider = comfy.samplers.CFGGuider(model)
        guider.set_conds(conditioning, [])
        guider.set_cfg(1.0)
        sampler = Losses(cases)
        times = torch.tensor([case.sigma for case in reversed(cases)] + [0.0])
        guider.sample(torch.zeros_like(latent), latent, sampler, times, disable_pbar=True, seed=42)
        return sampler.values

    def patched(self, adapter: str) -> tuple[Any, Any, list[str]]:
        """The model and encoders with the adapter, and its keys that ComfyUI has no place for."""
        import folder_paths
        import nodes

        if adapter == BASE:
            return self.model, self.clip, []
        complaints = _Complaints()
        logging.getLogger().addHandler(complaints)
        folder_paths.add_model_folder_path("loras", str(Path(adapter).parent), is_default=True)
        try:
            model, clip = nodes.LoraLoader().load_lora(self.model, self.clip, Path(adapter).name, 1.0, 1.0)
        finally:
            logging.getLogger().removeHandler(complaints)
        if not model.patches:
            raise ValueError(f"{adapter} changes nothing")
        return model, clip, complaints.messages


class _Complaints(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(("lora key not loaded", "NOT LOADED")):
            self.messages.append(record.getMessage())


def read_record(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_bytes())
    return record


def load_comfyui(checkout: str) -> None:
    """Import ComfyUI for a CPU."""
    sys.path.insert(0, checkout)
    import comfy.cli_args

    comfy.cli_args.args.cpu = True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--noises", type=int, default=16)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("adapters", nargs="*", default=[BASE])
    asked = parser.parse_intermixed_args()
    record = read_record(asked.model)
    load_comfyui(record["comfy_dir"])
    evaluator = Evaluator(record, asked.pictures, asked.noises, asked.side)
    scores = []
    for adapter in asked.adapters:
        try:
            scores.append(evaluator.score(adapter if adapter == BASE else str(Path(adapter).resolve())))
        except ValueError as error:
            scores.append({"adapter": adapter, "error": str(error)})
        asked.report.write_text(json.dumps(scores, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
