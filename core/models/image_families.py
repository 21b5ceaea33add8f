"""The image families: one record each, with everything that the code knows of it.

A new family is a value of `ImageModelType`, one of `Family`, a record here and a template in `configs/base`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import Field

from core.domain.choices import Engine
from core.domain.records import Record
from core.domain.tasks import ImageModelType
from core.domain.tournament_rules import NOISES
from core.models.facts import Family, ImageFacts


class ExtraWeights(NamedTuple):
    """A small weight file beside the model: the field of `ImageFiles`, its repository and its name."""

    field: str
    repository: str
    pattern: str
    #: What goes wrong without it.
    purpose: str


def _names(blocks: str, also: str | None = None) -> re.Pattern[str]:
    """`diffusion_model.` and `lora_unet_` before the model's own names stand for all families; `also` is a
    pattern of other names."""
    own = rf"(?:diffusion_model\.|lora_unet_)(?:{blocks})(?:[._].+)?"
    return re.compile(f"{own}|{also}" if also else own)


class PictureRecipe(Record):
    """Numbers of one training; the defaults are those of a family without a record of its own."""

    rank: int = Field(default=16, ge=1)
    #: None: the rank, a scale of 1.
    alpha: float | None = Field(default=None, gt=0)
    rate: float = Field(default=2e-4, gt=0)
    #: Searched in the names of the diffusion model's linear layers (`blocks.3.attn.wq`), or None for all.
    targets: str | None = None
    #: Cases (a picture at a noise level) in a step, one pass each: it costs time and no memory.
    batch: int = Field(default=1, ge=1)
    #: Compute a block's activations again in the backward pass. Switched on where memory runs out.
    checkpointing: bool = True
    warm_up_steps: int = Field(default=20, ge=0)
    weight_decay: float = Field(default=0.01, ge=0)
    #: Of the gradients' norm; 0: none.
    clip: float = Field(default=1.0, ge=0)
    ema_decay: float = Field(default=0.99, ge=0, lt=1)
    #: Pictures kept out of the training to choose by: this share, at least so many. Too few pictures: none.
    held_out_share: float = Field(default=0.1, ge=0, lt=1)
    held_out_least: int = Field(default=3, ge=0)
    #: Share of the time that screening candidates may take.
    evaluation_share: float = Field(default=0.08, gt=0, lt=1)
    #: In the beginning the rate, and this many times as high and as low ones, are tried; 1: none are. Each
    #: trial takes such a share of the time.
    rate_factor: float = Field(default=3.0, ge=1)
    trial_share: float = Field(default=0.035, gt=0, lt=0.1)
    #: Noise draws for each band with which the best candidates are compared at the end.
    confirm_noises: int = Field(default=4, ge=1, le=NOISES)
    #: Train again once the curve is past its optimum: at such rates, and on all pictures.
    second_member: bool = True
    #: None: until the clock or the curve ends the training.
    max_steps: int | None = Field(default=None, ge=0)


class PublishedFile(NamedTuple):
    """A file of a repository on the hub."""

    repository: str
    path: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class FlowRules:
    """The evaluation of a family since September 2026: how ComfyUI loads it, and the recipe to begin with."""

    #: ComfyUI's name of the way in which the encoders' outputs are put together.
    clip_type: str
    encoders: tuple[PublishedFile, ...]
    #: z-image is encoded by the `vae` folder of the task's repository, with diffusers, where that is there.
    vae: PublishedFile
    #: Only where the evaluator takes another base than the task's.
    base: PublishedFile | None = None
    #: Shift of the model's sampling object; it does not move the noise levels that are scored.
    shift: float | None = None
    #: An input of the model.
    guidance: float | None = None
    #: Whether the evaluator's numbers differ from a training's: candidates are scored on a second copy.
    twin: bool = False
    recipe: PictureRecipe = field(default_factory=PictureRecipe)


@dataclass(frozen=True)
class ImageFamily:
    """One kind of diffusion model."""

    family: Family
    #: Those that train it, the usual one first.
    engines: tuple[Engine, ...]
    #: Layers, width, MLP, heads of the backbone.
    shape: tuple[int, int, int, int]
    facts: ImageFacts
    #: Matches an adapter's names of modules of the backbone, in every spelling that evaluations load.
    #: Checked with real adapters of all engines.
    adapter: re.Pattern[str]
    #: What a model's name says, where offers name no image type.
    name_pattern: str | None = None
    #: How often a picture comes per epoch, as validators prepare datasets: `10_lora` or `1_lora` directories.
    repeats: int = 1
    #: ai-toolkit reads the text encoder from this repository, not from the model's directory.
    text_encoder: str | None = None
    #: ai-toolkit reads the VAE from the `vae` directory here, or in the directory it is given.
    vae: str | None = None
    extra: ExtraWeights | None = None
    #: Seconds of a step relative to the planner's prior, on an H100. Measured by others, or bounded by the
    #: steps that their runs finished, at batch 1 and 512, 768 and 1024 with checkpointing: krea2 1.26 s,
    #: qwen-image 4.45, z-image 1.54, ideogram4 2.02; Flux at 1024 in sd-scripts 2.6. Other hosts took 0.6
    #: times as long (krea2).
    slowness: float = 1.0
    #: None if validators do not score the family.
    flow: FlowRules | None = None
    #: Hours of its tournament tasks; None if tournaments have none.
    tournament_hours: float | None = None
    #: Repositories that validators put beside the model, in the hub's own layout.
    companions: tuple[str, ...] = ()

    def template(self, engine: Engine) -> str:
        """The file in `configs/base` that a configuration of this engine starts from."""
        words = f"{engine}_{self.facts.image_type}".replace("-", "_")
        return f"{words}.toml" if engine is Engine.KOHYA else f"{words}.yaml"


def _facts(
    image_type: ImageModelType, params: tuple[int, int, int], per_rank: tuple[int, int], tokens: int = 4608
) -> ImageFacts:
    """`params`: backbone, text encoders, VAE; `per_rank`: adapter weights of backbone and text encoders."""
    return ImageFacts(
        image_type=image_type,
        backbone_params=params[0],
        text_encoder_params=params[1],
        vae_params=params[2],
        tokens_at_1024=tokens,
        adapter_params_per_rank=per_rank[0],
        text_adapter_params_per_rank=per_rank[1],
    )


#: SDXL's U-Net has no single shape: its record describes the 1280-wide transformer blocks, where the
#: parameters are. Adapter parameters per rank were counted from the real modules for SDXL and Flux (text
#: encoders: CLIP-L and bigG, CLIP-L and T5). For the rest they follow from the shapes of the blocks; their
#: text encoders are never trained. The first pattern that a name matches counts: `FLUX.1-Krea` is a Flux.
IMAGE_FAMILIES: Mapping[ImageModelType, ImageFamily] = {
    ImageModelType.SDXL: ImageFamily(
        Family.SDXL,
        (Engine.KOHYA,),
        (70, 1280, 5120, 20),
        _facts(
            ImageModelType.SDXL, (2_567_000_000, 818_000_000, 84_000_000), (2_652_000, 903_168), tokens=4096
        ),
        _names(
            "input_blocks|middle_block|output_blocks|down_blocks|mid_block|up_blocks|time_embed|label_emb|out",
            r"unet\.(?:down_blocks|mid_block|up_blocks)\..+",
        ),
        repeats=10,
    ),
    ImageModelType.Z_IMAGE: ImageFamily(
        Family.Z_IMAGE,
        (Engine.AI_TOOLKIT,),
        (34, 3840, 10240, 30),
        _facts(ImageModelType.Z_IMAGE, (6_150_000_000, 4_020_000_000, 84_000_000), (2_480_640, 0)),
        _names(
            "layers|noise_refiner|context_refiner|x_embedder|cap_embedder|t_embedder|final_layer",
            r"transformer\.(?:layers|noise_refiner|context_refiner)\..+",
        ),
        name_pattern=r"z-?image",
        extra=ExtraWeights(
            "assistant_lora",
            "ostris/zimage_turbo_training_adapter",
            "zimage_turbo_training_adapter*.safetensors",
            "a turbo model loses its few-step quality without it",
        ),
        slowness=3.5,
        flow=FlowRules(
            clip_type="lumina2",
            encoders=(
                PublishedFile("Comfy-Org/z_image_turbo", "split_files/text_encoders/qwen_3_4b.safetensors"),
            ),
            vae=PublishedFile("Comfy-Org/z_image_turbo", "split_files/vae/ae.safetensors"),
            recipe=PictureRecipe(rate=3e-4),
        ),
        tournament_hours=1.0,
    ),
    ImageModelType.QWEN_IMAGE: ImageFamily(
        Family.QWEN_IMAGE,
        (Engine.AI_TOOLKIT,),
        (60, 3072, 12288, 24),
        _facts(ImageModelType.QWEN_IMAGE, (20_400_000_000, 8_290_000_000, 127_000_000), (9_216_000, 0)),
        _names(
            "transformer_blocks|img_in|txt_in|time_text_embed|norm_out|proj_out",
            r"(?:transformer\.)?transformer_blocks\..+",
        ),
        name_pattern=r"qwen-?image",
        extra=ExtraWeights(
            "recovery_adapter",
            "ostris/accuracy_recovery_adapters",
            "qwen_image_torchao_uint3.safetensors",
            "a quantised base falls back to 8 bits",
        ),
        slowness=4.0,
        flow=FlowRules(
            clip_type="qwen_image",
            encoders=(
                PublishedFile(
                    "Comfy-Org/Qwen-Image_ComfyUI",
                    "split_files/text_encoders/qwen_2.5_vl_7b_fp8_scaled.safetensors",
                ),
            ),
            vae=PublishedFile("Comfy-Org/Qwen-Image_ComfyUI", "split_files/vae/qwen_image_vae.safetensors"),
            shift=3.0,
            twin=True,
            # The field's are rank 8 on attention alone: measured, that learns far less.
            recipe=PictureRecipe(rate=1e-4),
        ),
        tournament_hours=1.5,
    ),
    ImageModelType.IDEOGRAM4: ImageFamily(
        Family.IDEOGRAM,
        (Engine.AI_TOOLKIT,),
        (34, 4608, 12288, 18),
        _facts(ImageModelType.IDEOGRAM4, (9_300_000_000, 8_770_000_000, 84_000_000), (3_307_520, 0)),
        _names("layers|input_proj|llm_cond_proj|t_embedding|adaln_proj|final_layer"),
        name_pattern=r"ideogram",
        text_encoder="Qwen/Qwen3-VL-8B-Instruct",
        extra=ExtraWeights(
            "unconditional_lora",
            "ostris/ideogram_4_unconditional_lora",
            "ideogram_4_unconditional_lora*.safetensors",
            "the negative pass runs without it",
        ),
        slowness=3.4,
        flow=FlowRules(
            clip_type="ideogram4",
            encoders=(
                PublishedFile("Comfy-Org/Ideogram-4", "text_encoders/qwen3vl_8b_fp8_scaled.safetensors"),
            ),
            vae=PublishedFile("Comfy-Org/Ideogram-4", "vae/flux2-vae.safetensors"),
            base=PublishedFile("Comfy-Org/Ideogram-4", "diffusion_models/ideogram4_fp8_scaled.safetensors"),
            twin=True,
        ),
        tournament_hours=1.0,
    ),
    ImageModelType.FLUX: ImageFamily(
        Family.FLUX,
        (Engine.KOHYA, Engine.AI_TOOLKIT),
        (57, 3072, 12288, 24),
        _facts(ImageModelType.FLUX, (11_900_000_000, 4_885_000_000, 84_000_000), (4_781_000, 1_984_512)),
        _names(
            "double_blocks|single_blocks|img_in|txt_in|time_in|vector_in|guidance_in|final_layer",
            r"transformer\.(?:single_)?transformer_blocks\..+"
            r"|transformer\.(?:x_embedder|context_embedder|time_text_embed|norm_out|proj_out)(?:\..+)?",
        ),
        name_pattern=r"flux",
        slowness=1.95,
        flow=FlowRules(
            clip_type="flux",
            encoders=(
                PublishedFile("comfyanonymous/flux_text_encoders", "t5xxl_fp16.safetensors"),
                PublishedFile("comfyanonymous/flux_text_encoders", "clip_l.safetensors"),
            ),
            vae=PublishedFile("rayonlabs/FLUX.1-dev", "ae.safetensors"),
            guidance=3.5,
            recipe=PictureRecipe(rate=3e-4),
        ),
        tournament_hours=0.75,
        companions=(
            "openai/clip-vit-large-patch14",
            "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k",
            "google/t5-v1_1-xxl",
        ),
    ),
    ImageModelType.KREA2: ImageFamily(
        Family.KREA,
        (Engine.AI_TOOLKIT,),
        (28, 6144, 16384, 48),
        _facts(ImageModelType.KREA2, (12_900_000_000, 4_440_000_000, 127_000_000), (3_354_624, 0)),
        _names("blocks|txtfusion|txtmlp|tmlp|tproj|first|last"),
        name_pattern=r"krea",
        text_encoder="Qwen/Qwen3-VL-4B-Instruct",
        vae="Qwen/Qwen-Image",
        slowness=1.7,
        flow=FlowRules(
            clip_type="krea2",
            encoders=(PublishedFile("Comfy-Org/Krea-2", "text_encoders/qwen3vl_4b_fp8_scaled.safetensors"),),
            vae=PublishedFile("Comfy-Org/Krea-2", "vae/qwen_image_vae.safetensors"),
        ),
        tournament_hours=1.0,
    ),
}
_NAMES = tuple(
    (re.compile(record.name_pattern), image_type)
    for image_type, record in IMAGE_FAMILIES.items()
    if record.name_pattern is not None
)


def image_type_from_name(model_id: str) -> ImageModelType:
    """Offers name no image type; SDXL is what most of those models are."""
    low = model_id.lower()
    return next((kind for part, kind in _NAMES if part.search(low)), ImageModelType.SDXL)


#: Stable Diffusion 1 and 2 in policies. Validators call them sdxl too: only the name of a model distinguishes
#: them.
OLDER_SD = "sd"
_OLDER_SD_NAME = re.compile(
    rf"stable-?diffusion-?v?-?[12](?!\d)|(?<![a-z])sd-?v?-?[12](?![0-9x])|^{OLDER_SD}$"
)


def is_older_sd(model_id: str) -> bool:
    """Return True for Stable Diffusion 1 or 2, by its name: no engine here trains them, and no evaluation
    scores them."""
    return _OLDER_SD_NAME.search(model_id.lower().replace("_", "-")) is not None


def families_of(engine: Engine) -> list[ImageModelType]:
    """The image types that an engine trains."""
    return [image_type for image_type in ImageModelType if engine in IMAGE_FAMILIES[image_type].engines]
