"""Flux through sd-scripts' own modules: its base, its LoRA network. The validators score no SDXL any more.

As ComfyUI reads it, not as the training did where these differ: the text is padded to 256 tokens without a
mask, nothing is in fp8, and adapters of the text encoders are left out.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainer.scoring.pictures_pixels import as_input, pixel_loss, read_picture, seeded_noise
from trainer.scoring.pictures_rules import NotScored

if TYPE_CHECKING:
    from trainer.scoring.pictures import PictureJob

Tensor = Any
T5_TOKENS = 256
_MODEL_PREFIX = "lora_unet_"
_TEXT_PREFIX = "lora_te"


def load(job: PictureJob) -> KohyaModel:
    if job.family != "flux":
        raise NotScored(f"{job.family}: of sd-scripts' models only flux can be scored")
    sys.path.insert(0, job.engine_dir)
    with open(job.config, encoding="utf-8") as file:
        config = importlib.import_module("toml").load(file)
    missing = [name for name in ("clip_l", "t5xxl", "ae") if not config.get(name)]
    if missing:
        raise NotScored(f"{job.config} names no {', '.join(missing)}")
    return KohyaModel(config, job)


class KohyaModel:
    """The protocol of `pictures.PictureModel`."""

    def __init__(self, config: dict[str, Any], job: PictureJob) -> None:
        self.torch = importlib.import_module("torch")
        self.utils = importlib.import_module("library.flux_utils")
        self.config, self.job = config, job
        self.dtype = self.torch.bfloat16
        self.texts: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        base = str(config["pretrained_model_name_or_path"])
        _, self.flux = self.utils.load_flow_model(base, self.dtype, "cpu")
        self.flux.to(job.device).eval().requires_grad_(False)
        self.autoencoder = self.utils.load_ae(str(config["ae"]), self.dtype, "cpu")
        self.autoencoder.to(job.device).eval().requires_grad_(False)
        self.autoencoder.reg.sample = False
        #: Each replaced module with the forward that it came with.
        self.replaced: list[tuple[Any, Any]] = []
        self.network: Any = None

    def encode_texts(self, texts: list[str]) -> None:
        strategy = importlib.import_module("library.strategy_flux")
        device = self.job.device
        tokenize = strategy.FluxTokenizeStrategy(T5_TOKENS, self.config.get("tokenizer_cache_dir"))
        encode = strategy.FluxTextEncodingStrategy(False)
        encoders = [
            self.utils.load_clip_l(str(self.config["clip_l"]), self.dtype, "cpu").to(device).eval(),
            self.utils.load_t5xxl(str(self.config["t5xxl"]), self.dtype, "cpu").to(device).eval(),
        ]
        with self._inference():
            for text in texts:
                pooled, tokens, places, _ = encode.encode_tokens(tokenize, encoders, tokenize.tokenize(text))
                self.texts[text] = pooled, tokens, places
        del encoders
        if device != "cpu":
            self.torch.cuda.empty_cache()

    def use(self, adapter: str) -> None:
        for module, forward in self.replaced:
            module.forward = forward
        self.replaced, self.network = [], None
        if not adapter:
            return
        weights = importlib.import_module("safetensors.torch").load_file(adapter)
        weights = {name: value for name, value in weights.items() if not name.startswith(_TEXT_PREFIX)}
        if not any(name.startswith(_MODEL_PREFIX) for name in weights):
            raise NotScored(f"{adapter} has no tensor whose name begins with {_MODEL_PREFIX}")
        lora = importlib.import_module("networks.lora_flux")
        network, _ = lora.create_network_from_weights(
            1.0, adapter, None, [None, None], self.flux, weights_sd=weights
        )
        self.replaced = [(each.org_module, each.org_module.forward) for each in network.unet_loras]
        network.apply_to([None, None], self.flux, apply_text_encoder=False, apply_unet=True)
        unknown = network.load_state_dict(weights, strict=False).unexpected_keys
        if unknown:
            raise NotScored(f"{adapter}: {len(unknown)} tensors fit no layer, such as {unknown[0]}")
        self.network = network.to(self.job.device).eval().requires_grad_(False)

    def read(self, image: str) -> Tensor:
        return read_picture(image)

    def encode(self, picture: Tensor) -> tuple[Tensor, int, int]:
        with self._inference():
            latent = self.autoencoder.encode(as_input(picture, self.job.device, self.dtype).unsqueeze(0))
        return latent.float(), picture.shape[2], picture.shape[1]

    def noise(self, latent: Tensor, seed: int) -> Tensor:
        return seeded_noise(latent, seed)

    def velocity(self, latent: Tensor, sigma: float, text: str | None) -> Tensor:
        pooled, tokens, places = self.texts[text or ""]
        device, down, across = latent.device, latent.shape[2] // 2, latent.shape[3] // 2
        with self._inference():
            predicted = self.flux(
                img=self.utils.pack_latents(latent.to(self.dtype)),
                img_ids=self.utils.prepare_img_ids(1, down, across).to(device),
                txt=tokens,
                txt_ids=places,
                y=pooled,
                timesteps=self.torch.full((1,), sigma, device=device),
                guidance=self.torch.full((1,), self.job.rules.guidance, device=device),
            )
        return self.utils.unpack_latents(predicted.float(), down, across)

    def loss(self, latent: Tensor, picture: Tensor) -> float:
        with self._inference():
            decoded = self.autoencoder.decode(latent.to(self.dtype))
        return pixel_loss(decoded[0], picture)

    @contextmanager
    def _inference(self) -> Iterator[None]:
        with self.torch.no_grad(), self.torch.autocast(device_type=self.job.device, dtype=self.dtype):
            yield
