"""Pictures as the validators' graph reads and writes them, with 8 bits per colour."""

from __future__ import annotations

import importlib
from typing import Any

from trainer.scoring.pictures_rules import crop_box, scaled_size

Tensor = Any


def read_picture(path: str) -> Tensor:
    """Scaled and cut as validators do it: three planes of whole numbers from 0 to 255."""
    image_module, numpy = importlib.import_module("PIL.Image"), importlib.import_module("numpy")
    torch = importlib.import_module("torch")
    with image_module.open(path) as file:
        image = file.convert("RGB")
    image = image.resize(scaled_size(*image.size), image_module.Resampling.LANCZOS)
    image = image.crop(crop_box(*image.size))
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).contiguous()


def as_input(picture: Tensor, device: Any, dtype: Any) -> Tensor:
    """From -1 to 1, as autoencoders read it."""
    return (picture.to(device=device).float() / 127.5 - 1.0).to(dtype)


def pixel_loss(rendered: Tensor, picture: Tensor) -> float:
    """Cut to 8 bits as a saved picture is, then the mean squared difference in [0, 1]."""
    torch = importlib.import_module("torch")
    unit = ((rendered.detach().float().cpu() + 1.0) / 2.0).clamp(0.0, 1.0)
    if not bool(torch.isfinite(unit).all()):
        return float("nan")
    difference = (unit * 255.0).floor().double() - picture.double()
    return float((difference / 255.0).square().mean())


def seeded_noise(latent: Tensor, seed: int) -> Tensor:
    """ComfyUI's: on the CPU, in single precision, whatever the device."""
    torch = importlib.import_module("torch")
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(latent.shape, generator=generator, dtype=torch.float32, device="cpu").to(latent.device)
