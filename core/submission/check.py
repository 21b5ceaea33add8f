"""Check a submission before publishing: find what evaluators would reject.

That includes the weights as a whole: every shard present, every tensor once, embeddings of the right size,
and an image adapter that its evaluation can load and that changes the model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from core.domain.tasks import ImageModelType
from core.models.image_families import IMAGE_FAMILIES
from core.submission import metadata
from core.submission.digests import FileDigest, OnBytesRead, digest_file, model_hash
from core.submission.faults import Fault, FaultKind, printable
from core.submission.folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CARD,
    CONFIG,
    IMAGE_WEIGHTS,
    INDEX,
    SHARD,
    WEIGHTS,
    SubmissionItem,
    SubmissionKind,
    json_object,
    open_plain,
)
from core.submission.safetensors import MAX_HEADER, BadHeader, SafetensorsHeader, StoredTensor

# An image adapter as its evaluation sees it: the modules that it loads, and whether they change the model.
#
# An adapter is a set of modules, each of a few tensors that are multiplied (`lora_up` with `lora_down`). If
# one factor is zero, the module changes nothing: that is how every adapter begins, so a file in which all
# modules are zero was written before anything was trained. Evaluators skip names that they do not know, or
# refuse the whole file.
#
# A healthy tensor shows that it is not zero within its first bytes. So only zero tensors are read to their
# end.

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
    if not backbone:
        return AdapterFindings((_no_module(name, header, encoders, family),))
    if unknown and image_type is not None and IMAGE_FAMILIES[image_type].flow is not None:
        return AdapterFindings((_unknown(name, unknown, "the evaluation refuses a file with one of them"),))
    if halves := _halves(modules):
        value = (
            f"half a pair in {len(halves)} of {len(modules)} modules, the first {printable(halves[0], 80)}"
        )
        rule = "must have both factors of each module, lora_A and lora_B or lora_down and lora_up"
        return AdapterFindings((Fault(FaultKind.LAYOUT, name, value, rule),))
    with open(open_plain(path), "rb", buffering=0) as file:
        idle = _idle_modules(file, modules)
    if (counted := backbone | encoders) <= idle:
        value = f"{len(counted)} modules that all add zero"
        rule = "must change the model: this file was written before anything was trained, or nothing ever was"
        return AdapterFindings((Fault(FaultKind.ZERO_DELTA, name, value, rule),))
    return AdapterFindings((), tuple(_remarks(name, idle, counted, unknown)))


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
    return any(record.adapter.fullmatch(module) for record in records)


def _no_module(name: str, header: SafetensorsHeader, encoders: Set[str], family: str) -> Fault:
    if encoders:
        value = f"modules of text encoders only ({len(encoders)})"
        rule = "must change the model itself: the evaluation refuses a change of text encoders alone"
        return Fault(FaultKind.LAYOUT, name, value, rule)
    first = next(iter(header.tensors), "none")
    value = f"{len(header.tensors)} tensors of unknown names, the first {printable(first, 80)}"
    rule = f"must have the names of an adapter for {family}: evaluators load nothing else"
    return Fault(FaultKind.LAYOUT, name, value, rule)


def _remarks(name: str, idle: Set[str], counted: Set[str], unknown: Sequence[str]) -> Iterator[Fault]:
    if dead := sorted(counted & idle):
        value = f"{len(dead)} of {len(counted)} modules that add zero, the first {printable(dead[0], 80)}"
        yield Fault(FaultKind.DEAD_WEIGHTS, name, value, "these were not trained")
    if unknown:
        yield _unknown(name, unknown, "the evaluation may skip these, or refuse the file")


def _unknown(name: str, unknown: Sequence[str], rule: str) -> Fault:
    value = f"{len(unknown)} names that are unknown, the first {printable(unknown[0], 80)}"
    return Fault(FaultKind.LAYOUT, name, value, rule)


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


_EMBEDDINGS = (
    "embed_tokens.weight",
    "lm_head.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "embed_out.weight",
)
#: Prefixes of training wrappers in the names of a model that was saved through them: no loader finds these.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module.")
_ANYWHERE = _WRAPPERS[:3]


def shard_faults(names: Set[str], index: SubmissionItem | None) -> Iterator[Fault]:
    """Check that a full model's files are one complete model."""
    shards = sorted(name for name in names if SHARD.fullmatch(name))
    if WEIGHTS in names and shards:
        rule = "a single file beside a model in parts: loaders take the first; keep the newer one only"
        yield Fault(FaultKind.BOTH_KINDS, WEIGHTS, f"{len(shards)} parts beside it", rule)
    elif WEIGHTS not in names and not shards:
        yield Fault(FaultKind.MISSING, WEIGHTS, "", "is missing: there are no weights to publish")
    if not shards:
        return
    totals = {name.split("-of-")[1] for name in shards}
    total = int(totals.pop().split(".")[0]) if len(totals) == 1 else -1
    numbers = {int(name[6:11]) for name in shards}
    if numbers != set(range(1, total + 1)):
        rule = "must be all parts of one model, numbered from 1; remove those of an earlier save"
        yield Fault(FaultKind.BAD_INDEX, shards[0], f"{len(shards)} parts in all", rule)
    if index is None:
        yield Fault(FaultKind.MISSING, INDEX, "", "is missing: without it the parts are not found")


def index_faults(
    names: Set[str], headers: Mapping[str, SafetensorsHeader], index: SubmissionItem
) -> Iterator[Fault]:
    """Check that the index names every tensor with the part that contains it."""
    document = json_object(INDEX, index)
    if isinstance(document, Fault):
        yield document
        return
    indexed = document.get("weight_map")
    if not isinstance(indexed, dict) or not all(isinstance(part, str) for part in indexed.values()):
        yield Fault(FaultKind.BAD_INDEX, f"{INDEX}: weight_map", "", "must be an object of tensors and files")
        return
    actual = {tensor: part for part, header in headers.items() for tensor in header.tensors}
    wrong = sorted(name for name in indexed.keys() | actual.keys() if indexed.get(name) != actual.get(name))
    if wrong and names >= headers.keys():
        value = f"{len(wrong)} tensors elsewhere than it says, the first {printable(wrong[0], 80)}"
        yield Fault(FaultKind.BAD_INDEX, INDEX, value, "does not match the parts; save the model again")


def tensor_faults(
    name: str,
    header: SafetensorsHeader,
    kind: SubmissionKind,
    vocabulary: int | None,
    not_finite: tuple[int, tuple[str, ...]],
) -> Iterator[Fault]:
    """Yield what is wrong with the tensors of one file."""
    if not any(tensor.count for tensor in header.tensors.values()):
        yield Fault(FaultKind.NO_WEIGHTS, name, "", "contains no weights at all; save the model again")
    count, first = not_finite
    if count:
        rule = "weights must be finite: the training diverged, or the saved type is too small"
        value = f"NaN or infinity in {count} of {len(header.tensors)} tensors ({printable(', '.join(first))})"
        yield Fault(FaultKind.NOT_FINITE, name, value, rule)
    wrapped = next((tensor for tensor in header.tensors if _is_wrapped(tensor)), None)
    if wrapped:
        rule = "names of a wrapper around the model, which no loader finds; unwrap the model before saving"
        yield Fault(FaultKind.WRAPPED, name, printable(wrapped, 80), rule)
    if vocabulary is not None and kind is not SubmissionKind.IMAGE:
        yield from _embeddings(name, header.tensors.values(), vocabulary)


def _embeddings(name: str, tensors: Iterable[StoredTensor], vocabulary: int) -> Iterator[Fault]:
    for tensor in tensors:
        embedding = len(tensor.shape) == 2 and tensor.name.endswith(_EMBEDDINGS)
        if embedding and tensor.shape[0] != vocabulary:
            where, rows = f"{name}: {printable(tensor.name)}", f"{tensor.shape[0]:,} rows"
            rule = f"must have the base model's {vocabulary:,} rows: add no tokens, resize nothing"
            yield Fault(FaultKind.VOCABULARY, where, rows, rule)


def _is_wrapped(name: str) -> bool:
    return name.startswith(_WRAPPERS) or any(wrapper in name for wrapper in _ANYWHERE)


#: More than the largest model that is trained here, in full precision.
MAX_BYTES = 400 * 10**9
#: Limit for all files together: many parts may have a large header each, and all are held in memory.
MAX_HEADERS = 4 * MAX_HEADER

DigestFile = Callable[[Path, OnBytesRead | None], FileDigest]


@dataclass(frozen=True, slots=True)
class BaseModelRef:
    """The base model: its name on the hub and its folder, as far as they are known, and the family of an
    image model."""

    model_id: str | None = None
    folder: Path | None = None
    image_type: ImageModelType | None = None

    def config(self) -> dict[str, Any] | None:
        if self.folder is None or not (self.folder / CONFIG).is_file():
            return None
        try:
            # The hub's cache contains links.
            config = json_object(CONFIG, (self.folder / CONFIG).resolve())
        except OSError:
            return None
        return None if isinstance(config, Fault) else config


@dataclass(frozen=True, slots=True)
class FileFact:
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SubmissionReport:
    """The result of the check. Without faults it may be published; with any it has no hash."""

    kind: SubmissionKind
    #: By published name.
    files: dict[str, FileFact]
    faults: tuple[Fault, ...]
    model_hash: str | None
    parameters: int = 0
    headers: dict[str, SafetensorsHeader] = field(default_factory=dict, repr=False)
    #: Findings that do not prevent publication.
    remarks: tuple[Fault, ...] = ()

    @property
    def size(self) -> int:
        return sum(fact.size for fact in self.files.values())


def examine(
    items: Mapping[str, SubmissionItem],
    kind: SubmissionKind,
    base: BaseModelRef | None = None,
    *,
    on_read: OnBytesRead | None = None,
    digest: DigestFile = digest_file,
) -> SubmissionReport:
    """Check everything that is to be published, reading each file once. No content makes this raise."""
    base = base or BaseModelRef()
    faults = list(_missing(items, kind))
    sizes = {name: _size(item) for name, item in items.items()}
    if sum(sizes.values()) > MAX_BYTES:
        rule = "is more than any model needs; look for what wrote it"
        faults.append(Fault(FaultKind.TOO_MUCH, "the folder", f"{sum(sizes.values()):,} bytes", rule))
        return SubmissionReport(kind, {}, tuple(faults), None)
    files: dict[str, FileFact] = {}
    weights: dict[str, FileDigest] = {}
    header_bytes = 0
    for name, item in sorted(items.items()):
        try:
            digested = _digest_item(item, on_read, digest)
        except BadHeader as error:
            faults.append(Fault(FaultKind.BAD_HEADER, name, "", str(error)))
        except OSError as error:
            why = f"cannot be read: {error.strerror or error}"
            faults.append(Fault(FaultKind.UNREADABLE, name, "", why))
        else:
            files[name] = FileFact(digested.size, digested.sha256)
            if digested.header is not None:
                weights[name] = digested
                header_bytes += digested.header.data_at
        if header_bytes > MAX_HEADERS:
            rule = "describe more tensors than any model has; save it again"
            faults.append(
                Fault(FaultKind.TOO_MUCH, "the headers of all parts", f"{header_bytes:,} bytes", rule)
            )
            return SubmissionReport(kind, {}, tuple(faults), None)
    headers = {name: digested.header for name, digested in weights.items() if digested.header is not None}
    faults += _document_faults(items, kind, base)
    faults += _weight_faults(items, kind, base, weights, headers)
    findings = _adapter_findings(items, kind, base, headers)
    faults += findings.faults
    count = sum(tensor.count for header in headers.values() for tensor in header.tensors.values())
    hashed = {} if faults else {name: (fact.size, fact.sha256) for name, fact in files.items()}
    digest_of_all = model_hash(hashed)
    return SubmissionReport(kind, files, tuple(faults), digest_of_all, count, headers, findings.remarks)


def _missing(items: Mapping[str, SubmissionItem], kind: SubmissionKind) -> Iterator[Fault]:
    needed = {
        SubmissionKind.ADAPTER: (ADAPTER_CONFIG, ADAPTER_WEIGHTS),
        SubmissionKind.FULL: (CONFIG,),
        SubmissionKind.IMAGE: (IMAGE_WEIGHTS,),
    }[kind]
    for name in needed:
        if name not in items:
            yield Fault(FaultKind.MISSING, name, "", f"is missing: without it there is no {kind} submission")
    if kind is SubmissionKind.FULL:
        yield from shard_faults(items.keys(), items.get(INDEX))


def _document_faults(
    items: Mapping[str, SubmissionItem], kind: SubmissionKind, base: BaseModelRef
) -> Iterator[Fault]:
    """Name what is wrong with the small files."""
    if kind is SubmissionKind.ADAPTER and ADAPTER_CONFIG in items:
        config = json_object(ADAPTER_CONFIG, items[ADAPTER_CONFIG])
        yield from [config] if isinstance(config, Fault) else metadata.adapter_faults(config, base.model_id)
    if kind is SubmissionKind.FULL and CONFIG in items:
        config, wanted = json_object(CONFIG, items[CONFIG]), base.config()
        if isinstance(config, Fault):
            yield config
        elif wanted is not None:
            yield from metadata.config_faults(config, wanted)
    if CARD in items and (fault := metadata.card_fault(items[CARD], base.model_id)):
        yield fault


def _weight_faults(
    items: Mapping[str, SubmissionItem],
    kind: SubmissionKind,
    base: BaseModelRef,
    weights: Mapping[str, FileDigest],
    headers: Mapping[str, SafetensorsHeader],
) -> Iterator[Fault]:
    """Name what is wrong with the weights."""
    rows = _vocabulary_rows(items, kind, base)
    for name, header in headers.items():
        bad = (weights[name].not_finite_count, weights[name].not_finite)
        yield from tensor_faults(name, header, kind, rows, bad)
    if kind is SubmissionKind.FULL and INDEX in items and headers:
        yield from index_faults(items.keys(), headers, items[INDEX])


def _adapter_findings(
    items: Mapping[str, SubmissionItem],
    kind: SubmissionKind,
    base: BaseModelRef,
    headers: Mapping[str, SafetensorsHeader],
) -> AdapterFindings:
    item, header = items.get(IMAGE_WEIGHTS), headers.get(IMAGE_WEIGHTS)
    if kind is not SubmissionKind.IMAGE or not isinstance(item, Path) or header is None:
        return AdapterFindings()
    if not any(tensor.count for tensor in header.tensors.values()):
        return AdapterFindings()
    try:
        return examine_image_adapter(IMAGE_WEIGHTS, item, header, base.image_type)
    except OSError as error:
        why = f"cannot be read: {error.strerror or error}"
        return AdapterFindings((Fault(FaultKind.UNREADABLE, IMAGE_WEIGHTS, "", why),))


def _vocabulary_rows(
    items: Mapping[str, SubmissionItem], kind: SubmissionKind, base: BaseModelRef
) -> int | None:
    """From the base's configuration, else from the model's own."""
    config = base.config()
    if config is None and kind is SubmissionKind.FULL and CONFIG in items:
        own = json_object(CONFIG, items[CONFIG])
        config = None if isinstance(own, Fault) else own
    return None if config is None else metadata.vocabulary_rows(config)


def _size(item: SubmissionItem) -> int:
    if isinstance(item, bytes):
        return len(item)
    try:
        return item.lstat().st_size
    except OSError:
        return 0


def _digest_item(item: SubmissionItem, on_read: OnBytesRead | None, digest: DigestFile) -> FileDigest:
    if isinstance(item, Path):
        return digest(item, on_read)
    return FileDigest(hashlib.sha256(item).hexdigest(), len(item))
