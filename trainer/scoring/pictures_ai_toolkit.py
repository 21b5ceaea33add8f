"""Models of ai-toolkit, through its own classes and the configuration that the training ran with.

Base, quantisation, paths and adapters that belong to the base (`assistant_lora_path`,
`unconditional_lora_path`) are therefore those of the training. Only the sampler is ours.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from trainer.scoring.pictures_pixels import as_input, pixel_loss, read_picture, seeded_noise
from trainer.scoring.pictures_rules import NotScored

if TYPE_CHECKING:
    from trainer.scoring.pictures import PictureJob

Tensor = Any
#: What stands for the rank in an adapter's file: the first size of these tensors.
_DOWN = ("lora_A.weight", "lora_down.weight")
#: ideogram4's latent: 2 x 2 patches; ComfyUI counts channels outside, ai-toolkit inside.
_PATCH = 2


def load(job: PictureJob) -> ToolkitModel:
    sys.path.insert(0, job.engine_dir)
    process = importlib.import_module("toolkit.config").get_config(job.config)["config"]["process"][0]
    settings = importlib.import_module("toolkit.config_modules")
    dtype = settings.TrainConfig(**process["train"]).dtype
    model_config = settings.ModelConfig(**{**process["model"], "dtype": dtype})
    chosen = importlib.import_module("toolkit.util.get_model").get_model_class(model_config)
    base = chosen(
        device=job.device, model_config=model_config, dtype=dtype, noise_scheduler=_scheduler(chosen)
    )
    torch = importlib.import_module("torch")
    with torch.no_grad():
        base.load_model()
    base.unet.eval().requires_grad_(False)
    _mode_of(base.vae)
    network_config = settings.NetworkConfig(**process["network"])
    return ToolkitModel(base, network_config, job)


def _scheduler(chosen: Any) -> Any:
    """Return a scheduler as the trainer makes it: loading wants one, rendering does not use it."""
    if hasattr(chosen, "get_train_scheduler"):
        return chosen.get_train_scheduler()
    sampler = importlib.import_module("toolkit.sampler")
    return sampler.get_sampler("flowmatch", {"prediction_type": "epsilon"}, arch="flux")


def _mode_of(vae: Any) -> None:
    """Encode to the middle of the distribution, as ComfyUI does; ai-toolkit draws from it."""
    encode = vae.__dict__.get("encode") or getattr(vae, "encode", None)
    if encode is None:
        return

    def encode_to_mode(*args: Any, **kwargs: Any) -> Any:
        encoded = encode(*args, **kwargs)
        if hasattr(encoded, "latent_dist"):
            encoded.latent_dist.sample = encoded.latent_dist.mode
        return encoded

    vae.encode = encode_to_mode


class ToolkitModel:
    """The protocol of `pictures.PictureModel`."""

    def __init__(self, base: Any, network_config: Any, job: PictureJob) -> None:
        self.torch = importlib.import_module("torch")
        self.base, self.job = base, job
        self.texts: dict[str, Any] = {}
        self.guidance = job.rules.guidance
        self.network = self._network(network_config)
        if base.assistant_lora is not None:  # merged for training only: rendering takes it out again
            base.assistant_lora.is_active = True
            base.assistant_lora.force_to(base.device_torch, base.torch_dtype)

    def _network(self, config: Any) -> Any:
        """One network for all files, of the highest rank: zeros fill up those of a lower one."""
        rank = max([config.linear or 1, *(_rank(file) for file in self.job.files if file)])
        special = importlib.import_module("toolkit.lora_special").LoRASpecialNetwork
        base, options = self.base, dict(config.network_kwargs)
        if hasattr(base, "target_lora_modules"):
            options["target_lin_modules"] = base.target_lora_modules
        network = special(
            text_encoder=None,
            unet=base.get_model_to_train(),
            lora_dim=rank,
            multiplier=1.0,
            alpha=rank,
            train_unet=True,
            train_text_encoder=False,
            conv_lora_dim=config.conv,
            conv_alpha=config.conv_alpha,
            is_flux=base.is_flux,
            network_config=config,
            network_type=config.type,
            transformer_only=config.transformer_only,
            is_transformer=base.is_transformer,
            base_model=base,
            **options,
        )
        network.force_to(base.device_torch, dtype=self.torch.float32)
        network._update_torch_multiplier()
        network.apply_to(None, base.unet, False, True)
        network.requires_grad_(False)
        network.eval()
        network.is_active = False
        return network

    def encode_texts(self, texts: list[str]) -> None:
        with self.torch.no_grad():
            self.texts = {text: self.base.encode_prompt(text) for text in texts}
        importlib.import_module("toolkit.unloader").unload_text_encoder(self.base)

    def use(self, adapter: str) -> None:
        self.network.is_active = False
        if not adapter:
            return
        weights = importlib.import_module("safetensors.torch").load_file(adapter)
        with self.torch.no_grad():
            for module in self.network.get_all_modules():
                module.reset_weights()
            left_over = self.network.load_weights(weights)
        unknown = sorted(key for key in left_over or () if not key.endswith("alpha"))
        if unknown:
            raise NotScored(f"{adapter}: {len(unknown)} tensors fit no layer, such as {unknown[0]}")
        self.network.is_active = True

    def read(self, image: str) -> Tensor:
        return read_picture(image)

    def encode(self, picture: Tensor) -> tuple[Tensor, int, int]:
        base = self.base
        with self.torch.no_grad():
            pixels = as_input(picture, base.vae_device_torch, base.vae_torch_dtype)
            latent = base.encode_images([pixels]).to(base.device_torch)
        return latent.float(), picture.shape[2], picture.shape[1]

    def noise(self, latent: Tensor, seed: int) -> Tensor:
        noise = seeded_noise(latent, seed)
        return _inside(noise) if self.job.family == "ideogram4" else noise

    def velocity(self, latent: Tensor, sigma: float, text: str | None) -> Tensor:
        base = self.base
        embedding = self._no_text() if text is None else self.texts[text]
        active, self.network.is_active = self.network.is_active, self.network.is_active and text is not None
        unconditional = getattr(base, "unconditional_lora", None)
        if unconditional is not None:
            unconditional.is_active = text is None
        try:
            with self.torch.no_grad():
                predicted = base.predict_noise(
                    latent.to(base.torch_dtype),
                    text_embeddings=embedding,
                    timestep=self.torch.tensor([sigma * 1000.0]),
                    guidance_scale=1.0,
                    guidance_embedding_scale=self.guidance,
                )
        finally:
            self.network.is_active = active
        return predicted.float()

    def _no_text(self) -> Any:
        """A text of no tokens: the negative branch reads the picture alone."""
        embeds = importlib.import_module("toolkit.advanced_prompt_embeds").AdvancedPromptEmbeds
        return embeds(text_embeds=[each[:0] for each in self.texts[""].text_embeds])

    def loss(self, latent: Tensor, picture: Tensor) -> float:
        base = self.base
        with self.torch.no_grad():
            decoded = base.decode_latents(latent, device=base.vae_device_torch, dtype=base.vae_torch_dtype)
        return pixel_loss(decoded[0], picture)


def _rank(file: str) -> int:
    with importlib.import_module("safetensors").safe_open(file, framework="pt") as opened:
        keys = [key for key in opened.keys() if key.endswith(_DOWN)]  # noqa: SIM118 - it is no dictionary
        ranks = [opened.get_slice(key).get_shape()[0] for key in keys]
    if not ranks:
        raise NotScored(f"{file} has no tensor named like {' or '.join(_DOWN)}")
    return int(max(ranks))


def _inside(noise: Tensor) -> Tensor:
    """The same noise at the same place of the picture."""
    count, channels, height, width = noise.shape
    patches = noise.view(count, channels // _PATCH**2, _PATCH, _PATCH, height, width)
    return patches.permute(0, 2, 3, 1, 4, 5).reshape(noise.shape)
