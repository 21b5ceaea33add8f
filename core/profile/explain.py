"""Answer questions about a profile: values for a task, their effects, differences, and mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, BeforeValidator, JsonValue
from pydantic.fields import FieldInfo

from core.domain.errors import ConfigError
from core.domain.records import Record
from core.domain.tasks import ImageModelType, TaskType
from core.domain.units import parse_bytes, parse_params, parse_seconds, show_bytes, show_params, show_seconds
from core.models.facts import Family, ModelFacts
from core.models.identify import facts_from_name
from core.profile.declare import (
    DOUBTFUL,
    IGNORED,
    Effect,
    EngineCase,
    EngineEffect,
    effects,
)
from core.profile.limits import ContainerTargets, ProfileLimits, SlurmTargets
from core.profile.resolve import (
    LoadedProfile,
    engine_for,
    resolve_profile,
    selector_matches,
)
from core.profile.schema import ResolvedProfile, SectionSelector
from core.profile.targets import Targets

#: One model per size that profiles distinguish, and each kind of image model.
SIZES: tuple[tuple[str, int], ...] = (
    ("Llama-1B", 1_236_000_000),
    ("Qwen-3B", 3_086_000_000),
    ("Qwen-4B", 4_022_000_000),
    ("Llama-8B", 8_030_000_000),
    ("Qwen-14B", 14_770_000_000),
    ("Qwen-32B", 32_764_000_000),
    ("CodeLlama-34B", 33_744_000_000),
    ("Mixtral-8x7B", 46_703_000_000),
    ("Llama-70B", 70_554_000_000),
)


class Subject(NamedTuple):
    """A task on a model, as far as profiles distinguish them."""

    task_type: TaskType
    model: ModelFacts
    #: Training pictures, or None if not known or for a text task.
    pictures: int | None = None

    @property
    def label(self) -> str:
        name = self.model.architecture if self.model.is_image else self.model.model_id
        number = f", {self.pictures} pictures" if self.pictures is not None else ""
        return f"{self.task_type.word} {name}{number}"


def text_subject(task_type: TaskType, model_id: str, params: int | None = None) -> Subject:
    return Subject(task_type, facts_from_name(model_id, params))


def representative_subjects() -> list[Subject]:
    """Every text task at every size, every image model type."""
    texts = [text_subject(task, name, params) for task in TaskType if task.is_text for name, params in SIZES]
    images = [Subject(TaskType.IMAGE, facts_from_name(kind.value, None, kind)) for kind in ImageModelType]
    return texts + images


def engine_case_of(profile: ResolvedProfile, about: Subject) -> EngineCase:
    image = about.model.image.image_type if about.model.image else None
    return EngineCase(about.task_type, image, engine_for(profile.targets, about.task_type, image))


#: Environment variables have no declaration of their own.
_ENV_EFFECTS: dict[str, Effect] = {
    "NCCL_NTHREADS": Effect(IGNORED).because("NCCL takes 64, 128, 256 or 512 and warns at anything else"),
    "NCCL_NET_GDR_LEVEL": Effect(IGNORED).because(
        "between hosts only; inside one, NVLink carries the traffic"
    ),
    "NCCL_BUFFSIZE": Effect(DOUBTFUL).because(
        "per connection and channel, 4 MiB by default: a larger one helps networks, not NVLink, and takes "
        "memory on several GPUs"
    ),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Effect(DOUBTFUL).because(
        "with PyTorch's default, 3, the other ranks end at once when one fails; 1 first aborts NCCL's "
        "communicators, which can itself hang"
    ),
    "CUDA_LAUNCH_BLOCKING": Effect(IGNORED).because("0 is CUDA's default"),
}
_PARTS: dict[str, type[BaseModel]] = {
    "targets": Targets,
    "limits": ProfileLimits,
    "container": ContainerTargets,
    "slurm": SlurmTargets,
}
#: Every effect of a profile's values, by dotted path.
EFFECTS: tuple[tuple[str, Effect], ...] = (
    *((f"{name}.{key}", effect) for name, part in _PARTS.items() for key, effect in effects(part)),
    *((f"env.{key}", effect) for key, effect in _ENV_EFFECTS.items()),
)


class EffectAnnotation(NamedTuple):
    path: str
    effect: EngineEffect
    text: str


def annotations_for(profile: ResolvedProfile, case: EngineCase) -> list[EffectAnnotation]:
    """Annotate the values that an operator wrote, not the defaults."""
    return [
        EffectAnnotation(path, effect.kind, effect.text)
        for path, effect in EFFECTS
        if profile.is_set(path) and effect.occurs(_value_at(profile, path), profile.targets, case)
    ]


def _value_at(profile: ResolvedProfile, path: str) -> object:
    part, _, key = path.partition(".")
    return profile.env[key] if part == "env" else getattr(getattr(profile, part), key)


class ProfileSetting(NamedTuple):
    """One value for one subject."""

    path: str
    value: JsonValue
    #: "h100x4.yaml:12", "default", with the section in brackets.
    origin: str
    #: Before the factors of `scale`.
    unscaled: float | None


def profile_settings(profile: ResolvedProfile, defaults: bool = False) -> list[ProfileSetting]:
    """Flat, in the order of the schema; with `defaults` also the values that nobody wrote."""
    return [
        ProfileSetting(
            path, value, str(profile.origin(path)), profile.before_scale.get(path.partition(".")[2])
        )
        for path, value in flat_values(profile).items()
        if defaults or profile.is_set(path)
    ]


def flat_values(profile: ResolvedProfile) -> dict[str, JsonValue]:
    """JSON values by dotted path."""
    flat: dict[str, JsonValue] = {}
    for part in ("targets", "limits", "container", "slurm"):
        section: Record = getattr(profile, part)
        values: dict[str, Any] = section.model_dump(mode="json")
        # Sizes and times as numbers; a stored profile has them with their units.
        values |= {name: value for name, value in section if type(value) in (int, float)}
        flat.update({f"{part}.{key}": value for key, value in values.items()})
    flat.update({f"env.{key}": value for key, value in profile.env.items()})
    for engine, keys in profile.engine_config.model_dump(mode="json").items():
        flat.update({f"engine_config.{engine}.{key}": value for key, value in keys.items()})
    return flat


class ProfileRemark(NamedTuple):
    """An annotation and all subjects that it applies to."""

    path: str
    effect: EngineEffect
    text: str
    value: JsonValue
    origin: str
    subjects: tuple[str, ...]


def explain_profile(profile: LoadedProfile, about: Sequence[Subject] | None = None) -> list[ProfileRemark]:
    """Say what engines make of the profile's values: one remark per value and annotation."""
    remarks: dict[tuple[str, str, str], ProfileRemark] = {}
    for subject in about or representative_subjects():
        resolved = resolve_profile(profile, subject.task_type, subject.model, subject.pictures)
        values = flat_values(resolved)
        for note in annotations_for(resolved, engine_case_of(resolved, subject)):
            origin = str(resolved.origin(note.path))
            key = (note.path, note.text, origin)
            before = remarks[key].subjects if key in remarks else ()
            remarks[key] = ProfileRemark(*note, values[note.path], origin, (*before, subject.label))
    return list(remarks.values())


class ProfileDifference(NamedTuple):
    """A value that differs between two profiles; None and an empty origin where one does not have it."""

    path: str
    left: JsonValue
    right: JsonValue
    left_origin: str
    right_origin: str


def diff_profiles(left: LoadedProfile, right: LoadedProfile, about: Subject) -> list[ProfileDifference]:
    """Compare for one subject: two profiles may agree on one task and differ on the next."""
    here, there = (
        resolve_profile(profile, about.task_type, about.model, about.pictures) for profile in (left, right)
    )
    ours, theirs = flat_values(here), flat_values(there)
    paths = list(ours | theirs)
    return [
        ProfileDifference(
            path, ours.get(path), theirs.get(path), str(here.origin(path)), str(there.origin(path))
        )
        for path in paths
        if ours.get(path) != theirs.get(path) or (path in ours) is not (path in theirs)
    ]


class ProfileFindingLevel(StrEnum):
    ERROR = "error"
    WARNING = "warning"


class ProfileFinding(NamedTuple):
    """One line of `profile check`."""

    level: ProfileFindingLevel
    #: A section, a path or a subject.
    where: str
    message: str


#: Plans a subject with a resolved profile and reports what is wrong. The planner provides it.
PlanCheck = Callable[[ResolvedProfile, Subject], Iterable[ProfileFinding]]


def check_profile(profile: LoadedProfile, plan_check: PlanCheck | None = None) -> list[ProfileFinding]:
    """Check all sections for all representative subjects; with `plan_check` down to the rendered config."""
    findings: dict[ProfileFinding, None] = {}
    # A narrow size band or a rare family has no representative: a subject for each section.
    of_sections = {name: _subject_of(when) for name, when in profile.selectors}
    for subject in [*representative_subjects(), *filter(None, of_sections.values())]:
        try:
            resolved = resolve_profile(profile, subject.task_type, subject.model, subject.pictures)
        except ConfigError as error:
            problems = [
                ProfileFinding(ProfileFindingLevel.ERROR, subject.label, str(problem))
                for problem in error.problems
            ]
            findings.update(dict.fromkeys(problems))
            continue
        findings.update(dict.fromkeys(plan_check(resolved, subject) if plan_check else ()))
    unreachable = "matches nothing: its conditions exclude each other"
    for name in (name for name, subject in of_sections.items() if subject is None):
        findings[ProfileFinding(ProfileFindingLevel.ERROR, f"sections.{name}", unreachable)] = None
    findings.update(dict.fromkeys(_harmful_values(profile)))
    return list(findings)


def _subject_of(when: SectionSelector) -> Subject | None:
    """A subject that the selector matches; None if nothing can."""
    low, high = (when.size.low, when.size.high) if when.size else (0, None)
    params = (low + high) // 2 if high is not None else max(low, 8_000_000_000)
    names = [family.value for family in when.family or [Family.LLAMA]]
    texts = [text_subject(task, name, params) for task in TaskType if task.is_text for name in names]
    images = [Subject(TaskType.IMAGE, facts_from_name(kind.value, None, kind)) for kind in ImageModelType]
    if when.pictures is not None:
        low, high = when.pictures.low, when.pictures.high
        number = low if high is None else (low + high) // 2
        images = [subject._replace(pictures=number) for subject in images]
    subjects = texts + images
    return next((s for s in subjects if selector_matches(when, s.task_type, s.model, s.pictures)), None)


def _harmful_values(profile: LoadedProfile) -> Iterator[ProfileFinding]:
    try:
        remarks = explain_profile(profile)
    except ConfigError:
        return  # already reported, subject by subject
    for remark in remarks:
        if remark.effect is EngineEffect.HARMFUL:
            yield ProfileFinding(ProfileFindingLevel.WARNING, f"{remark.origin}: {remark.path}", remark.text)


_UNITS: tuple[tuple[Callable[[Any], float], Callable[[float], str]], ...] = (
    (parse_bytes, show_bytes),
    (parse_seconds, show_seconds),
    (parse_params, show_params),
)


def format_value(path: str, value: JsonValue) -> str:
    """Format a value as in a profile: sizes, durations and ranges with their units."""
    if value is None:
        return "–"
    part, _, name = path.partition(".")
    model = _PARTS.get(part)
    if model is not None and isinstance(value, int | float) and not isinstance(value, bool):
        return _format_measure(model.model_fields[name], value)
    if isinstance(value, dict) and value.keys() == {"low", "high"}:
        low, high = value["low"], value["high"]
        return str(low) if low == high else f"{low}-{high}"
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return {"True": "yes", "False": "no"}.get(str(value), str(value))


def _format_measure(field: FieldInfo, value: float) -> str:
    kinds = get_args(field.annotation)
    rules = [*field.metadata, *(rule for kind in kinds for rule in getattr(kind, "__metadata__", ()))]
    for rule in rules:
        for parse, show in _UNITS:
            if isinstance(rule, BeforeValidator) and rule.func is parse:
                return show(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
