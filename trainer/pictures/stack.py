"""Everything that touches ComfyUI: the evaluation's own stack, loaded as the evaluation loads it.

Nothing of it is imported before a `Stack` is made: where ComfyUI lies, and whether there is a GPU, is settled
then.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from core.domain.tournament_rules import BANDS
from core.models.image_families import IMAGE_FAMILIES, FlowRules
from core.runs.picture_run import PictureModel
from trainer.errors import BadModel
from trainer.pictures.adapter import PREFIX, linear_layers
from trainer.pictures.measure import case_noise, flow_losses, noisy, sigma_of
from trainer.session.failures import is_oom, one_line

#: The evaluation's own batch.
CASES_AT_ONCE = 2
_SAMPLER_SEED = 42
#: How its loader reports that something of an adapter is not used.
_UNUSED = ("lora key not loaded:", "NOT LOADED ")

#: A `ModelPatcher` of ComfyUI.
FlowModel = Any
#: Predicts the picture from a noised latent and its noise levels.
Predict = Callable[[Tensor, Tensor], Tensor]


class BadAdapter(ValueError):
    """A file that the evaluation would refuse."""


@dataclass(frozen=True)
class TrainedPicture:
    """A picture as the training and the measure need it."""

    name: str
    digest: str
    caption: str
    #: What the VAE made of it, and what the model sees.
    encoded: Tensor
    latent: Tensor


class Stack:
    """ComfyUI with the conditionings of one task's texts."""

    def __init__(self, model: PictureModel) -> None:
        flow = IMAGE_FAMILIES[model.family].flow
        if flow is None:
            raise BadModel(f"{model.family} is a family that the evaluation does not know: nothing trains it")
        self.model = model
        self._rules: FlowRules = flow
        self._conditionings: dict[str, Any] = {}
        #: The last base took so long from the disk.
        self.load_s = 0.0
        import_comfyui(Path(model.comfy_dir))
        import comfy.model_management

        self._memory = comfy.model_management
        self.device: torch.device = comfy.model_management.get_torch_device()

    # — loading, in the order in which memory is needed

    def load_base(self, path: str) -> FlowModel:
        import comfy.model_sampling
        import comfy.sd

        if not Path(path).is_file():
            raise BadModel(f"{path} is not a file: the base is one weight file in the repository's root")
        began = time.monotonic()
        with _bad_model_of(f"{path} is not loaded by ComfyUI"):
            # A model whose weights come and go while gradients need them cannot be trained.
            base = comfy.sd.load_diffusion_model(path, model_options={}, disable_dynamic=True)
        self.load_s = time.monotonic() - began
        self._check_family(base, path)
        base.model.requires_grad_(False)
        if self._rules.shift is not None:
            from comfy_extras.nodes_model_advanced import ModelSamplingAuraFlow

            base = ModelSamplingAuraFlow().patch_aura(base, self._rules.shift)[0]
        sampling = base.model.model_sampling
        if (
            not isinstance(sampling, comfy.model_sampling.CONST)
            or getattr(sampling, "noise_scale", 1.0) != 1.0
        ):
            raise BadModel(f"{path} is no rectified flow with noise of size 1: its target is not known")
        return base

    def _check_family(self, base: FlowModel, path: str) -> None:
        known = IMAGE_FAMILIES[self.model.family].adapter
        for name, _ in linear_layers(base.model.diffusion_model, None):
            if known.fullmatch(PREFIX + name) is None:
                raise BadModel(f"{path} is no {self.model.family}: that has no layer {name}")

    @torch.no_grad()
    def encode_pictures(
        self, base: FlowModel, pictures: Sequence[tuple[str, str, Image.Image, str]]
    ) -> list[TrainedPicture]:
        """Encode prepared pictures, each with its name, digest and caption."""
        encoded: list[TrainedPicture] = []
        with _bad_model_of(f"{self.model.vae_path} encodes no pictures"):
            encode = self._vae()
            for name, digest, picture, caption in pictures:
                latent = encode(picture).float().cpu()
                if not torch.isfinite(latent).all():
                    raise BadModel(f"{self.model.vae_path} makes no finite numbers of {name}")
                scaled = base.model.process_latent_in(latent.clone()).float().cpu()
                encoded.append(TrainedPicture(name, digest, caption, latent, scaled))
            del encode
        self._memory.unload_all_models()
        return encoded

    def _vae(self) -> Callable[[Image.Image], Tensor]:
        path = Path(self.model.vae_path)
        if path.is_dir():
            from diffusers import AutoencoderKL

            kl = AutoencoderKL.from_pretrained(str(path), torch_dtype=torch.float32)
            return partial(_encode_with_diffusers, kl.eval().requires_grad_(False).to(self.device))
        import comfy.sd
        import comfy.utils

        vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(path)), dtype=torch.float32)
        vae.first_stage_model.eval().requires_grad_(False)
        if getattr(getattr(vae.first_stage_model, "regularization", None), "sample", False):
            raise BadModel(f"{path} draws its latents at random: the evaluation takes the mean")
        return partial(_encode_with_comfyui, vae)

    @torch.no_grad()
    def encode_texts(self, texts: Sequence[str]) -> None:
        """Encode the texts that will be predicted with; the encoders are not needed afterwards."""
        import comfy.sd
        import folder_paths
        import node_helpers

        paths = self.model.text_encoder_paths
        with _bad_model_of(f"{' and '.join(paths)} encode no texts"):
            clip = comfy.sd.load_text_encoder_state_dicts(
                [_encoder_weights(Path(path)) for path in paths],
                embedding_directory=folder_paths.get_folder_paths("embeddings"),
                clip_type=getattr(comfy.sd.CLIPType, self._rules.clip_type.upper()),
                model_options={},
            )
            for text in dict.fromkeys(texts):
                conditioning = clip.encode_from_tokens_scheduled(clip.tokenize(text))
                if self._rules.guidance is not None:
                    conditioning = node_helpers.conditioning_set_values(
                        conditioning, {"guidance": self._rules.guidance}
                    )
                self._conditionings[text] = conditioning
            del clip
        self._memory.unload_all_models()

    # — predicting

    def predicting(
        self, model: FlowModel, picture: TrainedPicture, text: str, use: Callable[[Predict], None]
    ) -> None:
        """Call `use` within ComfyUI's sampling of this picture with this text, as the evaluation does."""
        import comfy.samplers

        guider = comfy.samplers.CFGGuider(model)
        guider.set_conds(self._conditionings[text], [])
        guider.set_cfg(1.0)
        levels = torch.tensor([sigma_of(band) for band in reversed(range(BANDS))] + [0.0])
        guider.sample(
            torch.zeros_like(picture.encoded),
            picture.encoded,
            _Visit(use),
            levels,
            disable_pbar=True,
            seed=_SAMPLER_SEED,
        )

    @torch.no_grad()
    def losses(
        self,
        model: FlowModel,
        picture: TrainedPicture,
        text: str,
        draws: int,
        bands: Iterable[int] = range(BANDS),
    ) -> list[list[float]]:
        """The loss of each case, by band and draw."""
        rows: list[list[float]] = []

        def visit(predict: Predict) -> None:
            for band in bands:
                sigma, noise = sigma_of(band), case_noise(picture.latent, picture.digest, band, draws)
                noised, target = noisy(picture.latent, noise, sigma), noise - picture.latent
                row: list[float] = []
                for start in range(0, draws, CASES_AT_ONCE):
                    part = noised[start : start + CASES_AT_ONCE].to(self.device)
                    denoised = predict(part, torch.full((len(part),), sigma, device=self.device))
                    wanted = target[start : start + CASES_AT_ONCE].to(self.device)
                    row += flow_losses(part, denoised, wanted, sigma).cpu().tolist()
                rows.append(row)

        self.predicting(model, picture, text, visit)
        return rows

    def try_predicting(self, model: FlowModel, picture: TrainedPicture) -> None:
        """`BadModel` where base, encoders and VAE do not belong together."""
        base, encoder = self.model.base_path, self.model.text_encoder_paths[0]
        with _bad_model_of(f"{base} predicts nothing with {encoder}"):
            self.losses(model, picture, "", 1, (0,))

    def check_repeatable(self, model: FlowModel, picture: TrainedPicture) -> None:
        """`BadAdapter` if the same cases have another loss the second time: the evaluation refuses that."""
        ends = (0, BANDS - 1)
        first, again = (self.losses(model, picture, picture.caption, 1, ends) for _ in range(2))
        if not numpy.allclose(first, again, rtol=1e-5, atol=1e-7):
            raise BadAdapter("its predictions do not repeat")

    # — adapters

    def with_adapter(self, base: FlowModel, file: Path) -> FlowModel:
        """Load a file as the evaluation does; `BadAdapter` if it would be refused."""
        import comfy.sd
        import comfy.utils

        try:
            weights, metadata = comfy.utils.load_torch_file(str(file), safe_load=True, return_metadata=True)
        except Exception as error:
            raise BadAdapter(f"{file.name} cannot be read: {error}") from error
        with _unused_entries() as unused:
            patched, _ = comfy.sd.load_lora_for_models(base, None, weights, 1.0, 1.0, lora_metadata=metadata)
        if unused:
            raise BadAdapter(f"{len(unused)} entries are not loaded, the first {unused[0].strip()}")
        if not patched.patches:
            raise BadAdapter("no weight is patched by it")
        return patched

    @contextmanager
    def training(self) -> Iterator[None]:
        """Compute with operations that have gradients."""
        self._memory.in_training = True
        try:
            yield
        finally:
            self._memory.in_training = False

    def release(self) -> None:
        """Take all models off the GPU; the next prediction loads what it needs."""
        self._memory.unload_all_models()
        self._memory.soft_empty_cache()


@dataclass
class _Visit:
    """A sampler of ComfyUI that samples nothing."""

    use: Callable[[Predict], None]

    def sample(
        self,
        model_wrap: Any,
        sigmas: Tensor,
        extra_args: dict[str, Any],
        callback: object,
        noise: Tensor,
        latent_image: Tensor,
        denoise_mask: object = None,
        disable_pbar: bool = False,
    ) -> Tensor:
        self.use(partial(model_wrap, **extra_args))
        return latent_image


def import_comfyui(folder: Path) -> None:
    """Make `comfy` importable, on the CPU where torch sees no GPU."""
    if not (folder / "comfy").is_dir():
        raise BadModel(f"{folder} is no checkout of ComfyUI")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    from comfy.cli_args import args

    if not torch.cuda.is_available():
        args.cpu = args.use_pytorch_cross_attention = True


@contextmanager
def _bad_model_of(failed: str) -> Iterator[None]:
    """Any error but of memory as `BadModel`, in one line."""
    try:
        yield
    except Exception as error:
        if is_oom(error) or isinstance(error, BadModel):
            raise
        raise BadModel(f"{failed}: {one_line(error)}") from error


@contextmanager
def _unused_entries() -> Iterator[list[str]]:
    """The loader's messages on what it leaves out."""
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (message := record.getMessage()).startswith(_UNUSED):
                messages.append(message)

    listener = Listener()
    logging.getLogger().addHandler(listener)
    try:
        yield messages
    finally:
        logging.getLogger().removeHandler(listener)


def _pixels(picture: Image.Image, scale: float) -> Tensor:
    return torch.from_numpy(numpy.array(picture, dtype=numpy.float32) / scale)


def _encode_with_comfyui(vae: Any, picture: Image.Image) -> Tensor:
    latent: Tensor = vae.encode(_pixels(picture, 255.0).unsqueeze(0))
    return latent


def _encoder_weights(path: Path) -> dict[str, Tensor]:
    """Read an encoder as ComfyUI's own loader does: one file, or a folder of the hub's shards."""
    import comfy.utils

    weights: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else (path,):
        part, metadata = comfy.utils.load_torch_file(str(file), safe_load=True, return_metadata=True)
        weights |= comfy.utils.convert_old_quants(part, model_prefix="", metadata=metadata)[0]
    return weights


def _encode_with_diffusers(vae: Any, picture: Image.Image) -> Tensor:
    pixels = (_pixels(picture, 127.5) - 1.0).permute(2, 0, 1).unsqueeze(0).to(vae.device)
    latent: Tensor = vae.encode(pixels).latent_dist.mode()
    return latent


# What training asks of a model that was written for inference


def blocks_of(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The repeated blocks, where nearly all activations are."""
    for child in model.children():
        if isinstance(child, torch.nn.ModuleList):
            yield from child


def make_trainable(model: torch.nn.Module) -> None:
    """Keep blocks that add to their inputs in place (flux) from changing what gradients need."""
    for block in blocks_of(model):
        if _changes_inputs(block):
            block.forward = partial(_run_on_copies, block.forward)
            for part in block.modules():
                if type(part).__name__.endswith("Norm"):
                    part.register_forward_pre_hook(_copy_inputs)


def recompute_blocks(model: torch.nn.Module) -> None:
    """From now on, keep no activations of a block, but compute them again in the backward pass."""
    for block in blocks_of(model):
        block.forward = partial(_run_and_forget, block.forward)


def _changes_inputs(block: torch.nn.Module) -> bool:
    return type(block).__module__ == "comfy.ldm.flux.layers"


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.requires_grad else value


def _copy_inputs(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(map(_copied, inputs))


def _run_on_copies(forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return forward(*map(_copied, args), **{name: _copied(value) for name, value in named.items()})


def _run_and_forget(forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **named)
    return checkpoint(forward, *args, use_reentrant=False, **named)
