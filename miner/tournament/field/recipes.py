"""The training settings of one entry, from the small files beside its weights.

`config.yaml` is ai-toolkit's and `adapter_config.json` PEFT's; the header of the weights has the adapter's
ranks and what sd-scripts (`ss_…`) and ai-toolkit (`training_info`) write into it; `README.md` has Axolotl's
configuration or the list of values that transformers writes. All of it is text from outside: a value of
another type than expected is not there. Pickles such as `training_args.bin` are never opened.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from math import cos, pi
from pathlib import Path
from typing import Any

import yaml

from core.domain.tasks import ImageModelType
from core.submission.safetensors import BadHeader, SafetensorsHeader, read_header
from miner.tournament.public_api import mapping, number, sequence, text

CONFIG, ADAPTER, README, ARGUMENTS = "config.yaml", "adapter_config.json", "README.md", "training_args.json"
SMALL_FILES = (CONFIG, ADAPTER, README, ARGUMENTS)
#: What is kept of a header.
HEADER = "header.json"
#: No file that is read is larger.
MOST_BYTES = 256 * 1024
#: Keys of a header's metadata that are kept: not what names the pictures or their captions.
_METADATA = re.compile(
    r"ss_(?!tag_frequency|bucket_info|datasets|dataset_dirs|reg_dataset)\w+|training_info|software"
)
_LONGEST_VALUE = 500


@dataclass(frozen=True, slots=True)
class FieldRecipe:
    """The figures of one training. None: no file says."""

    trainer: str | None = None
    #: Of the base model of pictures, as tasks name it.
    family: str | None = None
    #: Asked for, and those of the file that was submitted.
    steps: int | None = None
    shipped: int | None = None
    epochs: float | None = None
    batch: int | None = None
    accumulation: int | None = None
    optimizer: str | None = None
    lr: float | None = None
    schedule: str | None = None
    #: The end of a decay, as a share of the peak; steps of warm-up; the last part, which alone decays.
    floor: float | None = None
    warmup: int | None = None
    cooldown: float | None = None
    lora_rank: int | None = None
    lora_alpha: float | None = None
    #: Of captions, for pictures; of the adapter, for texts.
    dropout: float | None = None
    loss: str | None = None
    #: 0: none.
    ema: float | None = None
    resolutions: tuple[int, ...] = ()
    #: Pictures that sd-scripts counted.
    pictures: int | None = None
    notes: tuple[str, ...] = ()

    def over(self, other: FieldRecipe) -> FieldRecipe:
        """This recipe, with the other's figures where it has none."""
        missing = {
            field.name: getattr(other, field.name)
            for field in fields(self)
            if field.name != "notes" and getattr(self, field.name) in (None, ())
        }
        return replace(self, **missing, notes=(*self.notes, *other.notes))

    @property
    def rate_sum(self) -> float | None:
        """Sum of the learning rates of all steps that were submitted: how far the weights could go."""
        done = self.shipped or self.steps
        if self.lr is None or done is None:
            return None
        shape = self.warmup or 0, self.floor or 0.0, self.cooldown or 0.0
        mean = mean_factor(self.schedule or "constant", self.steps or done, done, *shape)
        return None if mean is None else self.lr * done * mean


#: Steps of which a schedule's mean is taken, so that no number of steps takes a minute.
_SAMPLES = 2000


def mean_factor(
    schedule: str, total: int, done: int, warmup: int = 0, floor: float = 0.0, cooldown: float = 0.0
) -> float | None:
    """Return the mean rate over the first `done` of `total` steps relative to its peak, if it is known."""
    factor = _SHAPES.get(schedule)
    if factor is None or total < 1 or done < 1:
        return None
    done = min(done, total)
    count = min(done, _SAMPLES)
    sampled = 0.0
    for at in range(count):
        step = (at + 0.5) * done / count
        if step < warmup:
            sampled += step / warmup
        else:
            sampled += factor((step - warmup) / max(total - warmup, 1), floor, cooldown)
    return sampled / count


def _constant(_at: float, _floor: float, _cooldown: float) -> float:
    return 1.0


def _linear(at: float, floor: float, _cooldown: float) -> float:
    return floor + (1 - floor) * (1 - at)


def _cosine(at: float, floor: float, _cooldown: float) -> float:
    return floor + (1 - floor) * (1 + cos(pi * at)) / 2


def _with_cooldown(at: float, floor: float, cooldown: float) -> float:
    return 1.0 if cooldown <= 0 or at < 1 - cooldown else floor + (1 - floor) * (1 - at) / cooldown


_SHAPES = {
    "constant": _constant,
    "constant_with_warmup": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_min_lr": _cosine,
    "warmup_stable_decay": _with_cooldown,
}


def read_recipe(folder: Path) -> FieldRecipe:
    """Read what the files of one entry say. The configuration of the engine goes before what is derived."""
    parsed = [
        _parsed(file, reader) for name, reader in _READERS.items() for file in sorted(folder.rglob(name))[:1]
    ]
    found = FieldRecipe()
    for recipe in [*parsed, *_headers(folder)]:
        found = found.over(recipe)
    return found


class _Unreadable(ValueError):
    """A file of another form than its name says."""


def _parsed(file: Path, reader: Callable[[str], FieldRecipe]) -> FieldRecipe:
    """Parse a file. One that cannot be read becomes a note, so that nobody misses the entry."""
    try:
        return reader(_read(file))
    except (OSError, _Unreadable) as error:
        why = text(" ".join(str(error).split()), 80) or "no reason"
        return FieldRecipe(notes=(f"{file.name} cannot be read: {why}",))


def _read(file: Path) -> str:
    with file.open("rb") as opened:
        return opened.read(MOST_BYTES).decode("utf-8", "replace")


def _headers(folder: Path) -> Iterator[FieldRecipe]:
    """Kept headers, or those of weights in the folder."""
    for file in sorted(folder.rglob(HEADER))[:1]:
        yield _parsed(file, _kept_header)
        return
    weights = sorted(folder.rglob("*.safetensors"))
    submitted = [file for file in weights if file.name in ("last.safetensors", "adapter_model.safetensors")]
    for file in (submitted or weights)[:1]:
        try:
            with file.open("rb") as opened:
                yield recipe_of_header(header_summary(read_header(opened)))
        except (BadHeader, OSError) as error:
            yield FieldRecipe(notes=(f"{file.name} {error}",))


def header_summary(header: SafetensorsHeader) -> dict[str, object]:
    """Reduce a header to counts of types and ranks, some names, and known keys of its metadata."""
    tensors = header.tensors.values()
    down = [tensor for tensor in tensors if _is_down(tensor.name)]
    ranks = Counter(
        min(tensor.shape) if len(tensor.shape) == 2 else tensor.shape[0] for tensor in down if tensor.shape
    )
    return {
        "bytes": header.size,
        "tensors": len(header.tensors),
        "types": dict(Counter(tensor.dtype for tensor in tensors)),
        "ranks": {str(rank): count for rank, count in ranks.most_common(20)},
        "names": [name[:200] for name in list(header.tensors)[:3]],
        "text_encoder_tensors": sum(
            name.startswith(("lora_te", "text_encoder", "te_")) for name in header.tensors
        ),
        "metadata": {
            key: value[:_LONGEST_VALUE] for key, value in header.metadata.items() if _METADATA.fullmatch(key)
        },
    }


def _is_down(name: str) -> bool:
    return name.endswith((".lora_A.weight", ".lora_down.weight", ".lora_A.default.weight"))


def _kept_header(content: str) -> FieldRecipe:
    return recipe_of_header(_json_object(content))


def recipe_of_header(kept: Any) -> FieldRecipe:
    """From what `header_summary` kept."""
    header = mapping(kept)
    metadata = {
        key: _json(value) if isinstance(value, str) else value
        for key, value in mapping(header.get("metadata")).items()
    }
    ranks = mapping(header.get("ranks"))
    rank = _whole(int(next(iter(ranks)))) if ranks and next(iter(ranks)).isdigit() else None
    notes = [f"several ranks: {', '.join(list(ranks)[:4])}"] if len(ranks) > 1 else []
    if number(header.get("text_encoder_tensors")):
        notes.append("trains the text encoder too")
    trained = FieldRecipe(
        shipped=_whole(mapping(metadata.get("training_info")).get("step")), lora_rank=rank, notes=tuple(notes)
    )
    return trained.over(_sd_scripts(metadata))


def _sd_scripts(ss: Mapping[str, Any]) -> FieldRecipe:
    if not any(key.startswith("ss_") for key in ss) or ss.get("ss_network_module") is None:
        return FieldRecipe()
    rates = [number(ss.get(key), least=0) for key in ("ss_unet_lr", "ss_learning_rate")]
    resolution = re.findall(r"\d+", str(ss.get("ss_resolution", "")))
    optimizer = text(ss.get("ss_optimizer"))
    return FieldRecipe(
        trainer="sd-scripts",
        family=_family(ss.get("ss_base_model_version")),
        steps=_whole(ss.get("ss_max_train_steps")),
        shipped=_whole(ss.get("ss_steps")),
        epochs=number(ss.get("ss_epoch"), least=0),
        batch=_whole(ss.get("ss_total_batch_size") or ss.get("ss_batch_size_per_device")),
        accumulation=_whole(ss.get("ss_gradient_accumulation_steps")),
        optimizer=optimizer.split("(")[0].rsplit(".", 1)[-1] if optimizer else None,
        lr=next((rate for rate in rates if rate), None),
        schedule=text(ss.get("ss_lr_scheduler")),
        warmup=_whole(ss.get("ss_lr_warmup_steps")),
        lora_rank=_whole(ss.get("ss_network_dim")),
        lora_alpha=number(ss.get("ss_network_alpha"), least=0),
        dropout=number(ss.get("ss_caption_dropout_rate"), least=0),
        loss=text(ss.get("ss_loss_type")),
        ema=0.0,
        resolutions=tuple(sorted({int(side[:5]) for side in resolution})),
        pictures=_whole(ss.get("ss_num_train_images")),
    )


def _ai_toolkit(content: str) -> FieldRecipe:
    config = mapping(mapping(_yaml(content)).get("config"))
    process = mapping(next(iter(sequence(config.get("process"))), None))
    if not process:
        raise _Unreadable("it is no configuration of ai-toolkit")
    train, network = mapping(process.get("train")), mapping(process.get("network"))
    dataset = mapping(next(iter(sequence(process.get("datasets"))), None))
    rate, ema = number(train.get("lr"), least=0), mapping(train.get("ema_config"))
    lowest = number(mapping(train.get("lr_scheduler_params")).get("eta_min"), least=0)
    sides = dataset.get("resolution")
    of_sides = sides if isinstance(sides, list) else [sides]
    notes = ["caption dropout has no effect: text embeddings are cached"]
    dropout = number(dataset.get("caption_dropout_rate"), least=0)
    return FieldRecipe(
        trainer="ai-toolkit",
        family=_family(mapping(process.get("model")).get("arch")),
        steps=_whole(train.get("steps")),
        batch=_whole(train.get("batch_size")),
        accumulation=_whole(
            train.get("gradient_accumulation") or train.get("gradient_accumulation_steps") or 1
        ),
        optimizer=text(train.get("optimizer")),
        lr=rate,
        schedule=text(train.get("lr_scheduler")) or "constant",
        floor=lowest / rate if lowest is not None and rate else None,
        lora_rank=_whole(network.get("linear")),
        lora_alpha=number(network.get("linear_alpha"), least=0),
        dropout=dropout if dropout is not None else 0.0,
        loss=text(train.get("loss_type")) or "mse",
        ema=(number(ema.get("ema_decay"), least=0) if ema.get("use_ema") else 0.0),
        resolutions=tuple(whole for side in of_sides if (whole := _whole(side))),
        notes=tuple(notes) if dropout and train.get("cache_text_embeddings") else (),
    )


def _family(engines_name: Any) -> str | None:
    """`zimage:turbo` and `qwen_image` are ai-toolkit's names, `sdxl_base_v1-0` and `flux1` sd-scripts'."""
    name = (text(engines_name, 40) or "").lower()
    plain = re.sub(r"[^a-z0-9]", "", name)
    return next(
        (str(kind) for kind in ImageModelType if plain.startswith(kind.replace("-", ""))), name or None
    )


def _peft(content: str) -> FieldRecipe:
    config = _json_object(content)
    return FieldRecipe(
        lora_rank=_whole(config.get("r")),
        lora_alpha=number(config.get("lora_alpha"), least=0),
        dropout=number(config.get("lora_dropout"), least=0),
    )


_FENCE = "```yaml\n"


def _readme(content: str) -> FieldRecipe:
    """Axolotl's configuration, else the values that transformers lists."""
    begin = content.find(_FENCE)
    end = content.find("\n```", begin + len(_FENCE))
    if 0 <= begin < end:
        with suppress(_Unreadable):
            found = _axolotl(mapping(_yaml(content[begin + len(_FENCE) : end])))
            if found.lr is not None:
                return found
    listed = dict(re.findall(r"^- ([a-z_]{1,60}): (.{1,200})$", content, re.MULTILINE))
    rate = _float(listed.get("learning_rate"))
    if rate is None:
        return FieldRecipe()
    return FieldRecipe(
        trainer="transformers",
        steps=_whole(_float(listed.get("training_steps"))),
        epochs=_float(listed.get("num_epochs")),
        batch=_whole(_float(listed.get("train_batch_size"))),
        accumulation=_whole(_float(listed.get("gradient_accumulation_steps"))) or 1,
        optimizer=text(listed.get("optimizer"), 40),
        lr=rate,
        schedule=text(listed.get("lr_scheduler_type")),
        warmup=_whole(_float(listed.get("lr_scheduler_warmup_steps"))),
    )


def _axolotl(config: Mapping[str, Any]) -> FieldRecipe:
    rate = _float(config.get("learning_rate"))
    ratio = number(config.get("cosine_min_lr_ratio"), least=0)
    return FieldRecipe(
        trainer="Axolotl",
        steps=_whole(config.get("max_steps")),
        epochs=number(config.get("num_epochs"), least=0),
        batch=_whole(config.get("micro_batch_size")),
        accumulation=_whole(config.get("gradient_accumulation_steps")),
        optimizer=text(config.get("optimizer")),
        lr=rate,
        schedule=text(config.get("lr_scheduler")),
        floor=ratio,
        warmup=_whole(config.get("warmup_steps")),
        lora_rank=_whole(config.get("lora_r")),
        lora_alpha=number(config.get("lora_alpha"), least=0),
        dropout=number(config.get("lora_dropout"), least=0),
        loss=text(config.get("rl")),
    )


def _arguments(content: str) -> FieldRecipe:
    """The arguments of a transformers trainer, where they were saved as JSON."""
    found = _json_object(content)
    steps = _whole(found.get("max_steps"))
    return FieldRecipe(
        trainer="transformers",
        steps=steps,
        epochs=number(found.get("num_train_epochs"), least=0),
        batch=_whole(found.get("per_device_train_batch_size")),
        accumulation=_whole(found.get("gradient_accumulation_steps")),
        optimizer=text(found.get("optim")),
        lr=_float(found.get("learning_rate")),
        schedule=text(found.get("lr_scheduler_type")),
        warmup=_whole(found.get("warmup_steps")),
    )


_READERS = {CONFIG: _ai_toolkit, ARGUMENTS: _arguments, README: _readme, ADAPTER: _peft}


class _WithoutMerges(yaml.SafeLoader):
    """Merge keys are refused: with few lines of them a mapping has more pairs than memory holds."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise yaml.YAMLError("merge keys are not read")


def _yaml(content: str) -> Any:
    try:
        return yaml.load(content, _WithoutMerges)  # noqa: S506 - a safe loader
    except RecursionError:
        raise _Unreadable("it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, AttributeError, TypeError) as error:
        raise _Unreadable(str(error)) from None


def _json_object(content: str) -> Mapping[str, Any]:
    found = _json(content)
    if not isinstance(found, dict):
        raise _Unreadable("it is no JSON object")
    return found


def _json(content: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content[:_LONGEST_VALUE]


def _whole(value: Any) -> int | None:
    """A count of something, from 1 on."""
    found = number(value, least=1)
    return int(found) if found is not None and found <= 1e9 else None


def _float(value: Any) -> float | None:
    """A number, also as text: YAML reads 1e-4 as one."""
    try:
        return number(float(value) if isinstance(value, str) else value, least=0)
    except ValueError:
        return None
