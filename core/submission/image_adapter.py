"""An image adapter as its evaluation sees it: the modules that it loads, and whether they change the model.

An adapter is a set of modules, each of a few tensors that are multiplied (`lora_up` with `lora_down`). If one
factor is zero, the module changes nothing: that is how every adapter begins, so a file in which all modules
are zero was written before anything was trained. Evaluators skip names that they do not know, or refuse the
whole file.

A healthy tensor shows that it is not zero within its first bytes. So only zero tensors are read to their end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from core.domain.tasks import ImageModelType
from core.models.image_families import IMAGE_FAMILIES
from core.submission.faults import Fault, FaultKind, printable
from core.submission.folder import open_plain
from core.submission.safetensors import SafetensorsHeader, StoredTensor

#: Suffixes that the evaluation's loader looks for behind a module's name.
_PART = re.compile(
    r"(?P<module>.+?)(?:\.|(?=_lora\.))(?P<part>"
    r"_?lora\.(?:up|down)\.weight|lora_(?:up|down|mid)\.weight|lora_[AB](?:\.default)?(?:\.weight)?"
    r"|alpha|dora_scale|lokr_w[12](?:_[ab])?|lokr_t2|hada_w[12]_[ab]|hada_t[12]|diff|diff_b)"
)
#: Parts that only count beside one another.
_PAIRS = (("lora_up", "lora_down"), ("lora_B", "lora_A"), ("lora.up", "lora.down"))
#: Magnitudes and biases, which are not factors of the change.
_NO_FACTORS = ("dora_scale", "diff_b")
_ENCODER = re.compile(r"lora_(?:prior_)?te\d?_.+|text_encoders?(?:_\d)?\..+|(?:clip_[lgh]|t5xxl)\..+")
#: Numbers of either sign that are zero: with the sign alone set, the last byte is 0x80.
_ZEROS = b"\x00\x80"
_FIRST, _BLOCK = 4096, 1 << 20
_ZERO_BLOCK = bytes(_BLOCK)


@dataclass(frozen=True)
class AdapterFindings:
    """Faults that disqualify a file, and others that are only worth knowing."""

    faults: tuple[Fault, ...] = ()
    remarks: tuple[Fault, ...] = ()


def examine_image_adapter(
    name: str, path: Path, header: SafetensorsHeader, image_type: ImageModelType | None
) -> AdapterFindings:
    """Examine it as an adapter of `image_type`, or of any family. `OSError` if the file cannot be read."""
    modules, others = _modules(header)
    backbone = {module for module in modules if _is_backbone(module, image_type)}
    encoders = {module for module in modules if module not in backbone and _ENCODER.fullmatch(module)}
    unknown = [module for module in modules if module not in backbone | encoders] + others
    family = image_type or "any family"
    if not backbone | encoders or not (backbone or _encoders_count(image_type)):
        return AdapterFindings((_no_module(name, header, encoders, family),))
    if halves := _halves(modules):
        value = (
            f"half a pair in {len(halves)} of {len(modules)} modules, the first {printable(halves[0], 80)}"
        )
        rule = "must have both factors of each module, lora_A and lora_B or lora_down and lora_up"
        return AdapterFindings((Fault(FaultKind.LAYOUT, name, value, rule),))
    with open(open_plain(path), "rb", buffering=0) as file:
        idle = _idle_modules(file, modules)
    counted = backbone | encoders if _encoders_count(image_type) else backbone
    if counted <= idle:
        return AdapterFindings((_zero_delta(name, counted, encoders - counted - idle, family),))
    return AdapterFindings((), tuple(_remarks(name, family, idle, counted, encoders - counted, unknown)))


def _modules(header: SafetensorsHeader) -> tuple[dict[str, dict[str, StoredTensor]], list[str]]:
    """The tensors of each module by their part, and the names of all other tensors."""
    modules: dict[str, dict[str, StoredTensor]] = {}
    others: list[str] = []
    for name, tensor in header.tensors.items():
        match = _PART.fullmatch(name)
        if match is None:
            others.append(name)
        else:
            modules.setdefault(match["module"], {})[match["part"].lstrip("_")] = tensor
    return modules, others


def _is_backbone(module: str, image_type: ImageModelType | None) -> bool:
    records = IMAGE_FAMILIES.values() if image_type is None else [IMAGE_FAMILIES[image_type]]
    return any(record.adapter.modules.fullmatch(module) for record in records)


def _encoders_count(image_type: ImageModelType | None) -> bool:
    return image_type is None or IMAGE_FAMILIES[image_type].adapter.encoders


def _no_module(name: str, header: SafetensorsHeader, encoders: Set[str], family: str) -> Fault:
    if encoders:
        value = f"modules of text encoders only ({len(encoders)})"
        rule = f"must change the model itself: the evaluation of {family} loads no text encoder's part"
        return Fault(FaultKind.LAYOUT, name, value, rule)
    first = next(iter(header.tensors), "none")
    value = f"{len(header.tensors)} tensors of unknown names, the first {printable(first, 80)}"
    rule = f"must have the names of an adapter for {family}: evaluators load nothing else"
    return Fault(FaultKind.LAYOUT, name, value, rule)


def _zero_delta(name: str, counted: Set[str], unused: Set[str], family: str) -> Fault:
    value = f"{len(counted)} modules that all add zero"
    if unused:
        value += f", and {len(unused)} of text encoders, which the evaluation of {family} does not load"
    rule = "must change the model: this file was written before anything was trained, or nothing ever was"
    return Fault(FaultKind.ZERO_DELTA, name, value, rule)


def _remarks(
    name: str, family: str, idle: Set[str], counted: Set[str], unused: Set[str], unknown: Sequence[str]
) -> Iterator[Fault]:
    if dead := sorted(counted & idle):
        value = f"{len(dead)} of {len(counted)} modules that add zero, the first {printable(dead[0], 80)}"
        yield Fault(FaultKind.DEAD_WEIGHTS, name, value, "these were not trained")
    if unused:
        value = f"{len(unused)} modules of text encoders"
        rule = f"the evaluation of {family} loads the model's part alone: leave the text encoders as they are"
        yield Fault(FaultKind.DEAD_WEIGHTS, name, value, rule)
    if unknown:
        value = f"{len(unknown)} names that are unknown, the first {printable(unknown[0], 80)}"
        yield Fault(FaultKind.LAYOUT, name, value, "the evaluation may skip these, or refuse the file")


def _halves(modules: Mapping[str, Mapping[str, StoredTensor]]) -> list[str]:
    """Modules with one factor of a pair."""
    return [
        module
        for module, parts in modules.items()
        if any(_has(parts, first) is not _has(parts, second) for first, second in _PAIRS)
    ]


def _has(parts: Mapping[str, StoredTensor], start: str) -> bool:
    return any(part.startswith(start) for part in parts)


def _idle_modules(file: BinaryIO, modules: Mapping[str, Mapping[str, StoredTensor]]) -> set[str]:
    """Modules that change nothing."""
    idle = set()
    for module, parts in modules.items():
        factors = [tensor for part, tensor in parts.items() if part not in _NO_FACTORS]
        if not factors or any(_is_zero(file, tensor) for tensor in factors):
            idle.add(module)
    return idle


def _is_zero(file: BinaryIO, tensor: StoredTensor) -> bool:
    at, size = tensor.begin, _FIRST
    while at < tensor.end:
        file.seek(at)
        block = file.read(min(size, tensor.end - at))
        if not block:
            raise OSError("the file was cut while it was read")
        if block != _ZERO_BLOCK[: len(block)] and block.strip(_ZEROS):
            return False
        at, size = at + len(block), _BLOCK
    return True
