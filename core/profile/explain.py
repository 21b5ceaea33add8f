"""Profiles as answers: what a profile says for a task, what becomes of it, what differs, what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from pydantic import JsonValue

from core.errors import ConfigError
from core.model_facts import facts_from_name
from core.models import Family, ModelFacts
from core.profile.annotation_rules import RULES
from core.profile.annotations import Annotation, Case, Effect, engine_for
from core.profile.load import LoadedProfile
from core.profile.resolve import matches, resolve, selectors
from core.profile.schema import ResolvedProfile, When
from core.tasks import ImageModelType, TaskType

#: One model per size that profiles tell apart, and each kind of image model.
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
    """A task on a model, as far as profiles care."""

    task_type: TaskType
    model: ModelFacts

    @property
    def words(self) -> str:
        short = self.task_type.value.removesuffix("Task").removesuffix("Text").lower()
        return f"{short} {self.model.architecture if self.model.is_image else self.model.model_id}"


def subject(task_type: TaskType, model_id: str, params: int | None = None) -> Subject:
    return Subject(task_type, facts_from_name(model_id, params))


def representative() -> list[Subject]:
    """Every text task at every size, every image model type."""
    texts = [subject(task, name, params) for task in TaskType if task.is_text for name, params in SIZES]
    images = [Subject(TaskType.IMAGE, facts_from_name(kind.value, None, kind)) for kind in ImageModelType]
    return texts + images


def case_of(profile: ResolvedProfile, about: Subject) -> Case:
    image = about.model.image.image_type if about.model.image else None
    return Case(about.task_type, image, engine_for(profile.targets, about.task_type, image))


def annotate(profile: ResolvedProfile, case: Case) -> list[Annotation]:
    """Of the values that an operator wrote; defaults need no apology."""
    return [
        Annotation(rule.path, rule.effect, rule.text)
        for rule in RULES
        if profile.is_set(rule.path) and rule.applies(profile.targets, case)
    ]


class Setting(NamedTuple):
    """One value as it stands for one subject."""

    path: str
    value: JsonValue
    #: "h100x4.yaml:12", "default", with the section in brackets.
    origin: str
    #: Before the factors of `scale`.
    unscaled: float | None


def settings(profile: ResolvedProfile, defaults: bool = False) -> list[Setting]:
    """Flat, in the order of the schema; with `defaults` also what nobody wrote."""
    return [
        Setting(path, value, str(profile.origin(path)), profile.before_scale.get(path.partition(".")[2]))
        for path, value in flat(profile).items()
        if defaults or profile.is_set(path)
    ]


def flat(profile: ResolvedProfile) -> dict[str, JsonValue]:
    """By dotted path; plain JSON values."""
    found: dict[str, JsonValue] = {}
    for part in ("targets", "limits", "container"):
        values: dict[str, Any] = getattr(profile, part).model_dump(mode="json")
        found.update({f"{part}.{key}": value for key, value in values.items()})
    found.update({f"env.{key}": value for key, value in profile.env.items()})
    for engine, keys in profile.engine_config.model_dump(mode="json").items():
        found.update({f"engine_config.{engine}.{key}": value for key, value in keys.items()})
    return found


class Remark(NamedTuple):
    """An annotation and all the subjects that it was found for."""

    path: str
    effect: Effect
    text: str
    value: JsonValue
    origin: str
    subjects: tuple[str, ...]


def explain(profile: LoadedProfile, about: Sequence[Subject] | None = None) -> list[Remark]:
    """What becomes of the profile's values, said once per value and remark."""
    found: dict[tuple[str, str, str], Remark] = {}
    for each in about or representative():
        resolved = resolve(profile, each.task_type, each.model)
        values = flat(resolved)
        for note in annotate(resolved, case_of(resolved, each)):
            origin = str(resolved.origin(note.path))
            key = (note.path, note.text, origin)
            before = found[key].subjects if key in found else ()
            found[key] = Remark(*note, values[note.path], origin, (*before, each.words))
    return list(found.values())


class Difference(NamedTuple):
    """A value that two profiles do not share; None and an empty origin where one does not have it."""

    path: str
    left: JsonValue
    right: JsonValue
    left_origin: str
    right_origin: str


def diff(left: LoadedProfile, right: LoadedProfile, about: Subject) -> list[Difference]:
    """For one subject: two profiles may agree on one task and differ on the next."""
    one, two = (resolve(profile, about.task_type, about.model) for profile in (left, right))
    ours, theirs = flat(one), flat(two)
    paths = [*ours, *(path for path in theirs if path not in ours)]
    return [
        Difference(path, ours.get(path), theirs.get(path), str(one.origin(path)), str(two.origin(path)))
        for path in paths
        if ours.get(path) != theirs.get(path) or (path in ours) is not (path in theirs)
    ]


class Level(StrEnum):
    ERROR = "error"
    WARNING = "warning"


class Finding(NamedTuple):
    """Something `profile check` has to say."""

    level: Level
    #: A section, a path or a subject.
    where: str
    message: str


#: Plans a subject with a resolved profile and says what is wrong with the result. The planner brings its own.
PlanCheck = Callable[[ResolvedProfile, Subject], Iterable[Finding]]


def check(profile: LoadedProfile, plan_check: PlanCheck | None = None) -> list[Finding]:
    """Every section against every representative subject; with `plan_check` down to the rendered config."""
    found: dict[Finding, None] = {}
    for each in [*representative(), *_for_each_section(profile)]:
        try:
            resolved = resolve(profile, each.task_type, each.model)
        except ConfigError as error:
            problems = [Finding(Level.ERROR, each.words, str(problem)) for problem in error.problems]
            found.update(dict.fromkeys(problems))
            continue
        found.update(dict.fromkeys(plan_check(resolved, each) if plan_check else ()))
    found.update(dict.fromkeys(_dead(profile)))
    found.update(dict.fromkeys(_harm(profile)))
    return list(found)


def _for_each_section(profile: LoadedProfile) -> list[Subject]:
    """A narrow band of sizes or an odd family may lie between the representative ones."""
    found = [_subject_of(when) for _, when in selectors(profile)]
    return [each for each in found if each is not None]


def _dead(profile: LoadedProfile) -> Iterator[Finding]:
    for name, when in selectors(profile):
        if _subject_of(when) is None:
            yield Finding(
                Level.ERROR, f"sections.{name}", "matches nothing: its conditions exclude each other"
            )


def _subject_of(when: When) -> Subject | None:
    """Something that the section is for; None if nothing can be."""
    low, high = (when.size.low, when.size.high) if when.size else (0, None)
    params = (low + high) // 2 if high is not None else max(low, 8_000_000_000)
    names = [family.value for family in when.family or [Family.LLAMA]]
    texts = [subject(task, name, params) for task in TaskType if task.is_text for name in names]
    images = [Subject(TaskType.IMAGE, facts_from_name(kind.value, None, kind)) for kind in ImageModelType]
    return next((each for each in texts + images if matches(when, each.task_type, each.model)), None)


def _harm(profile: LoadedProfile) -> Iterator[Finding]:
    try:
        remarks = explain(profile)
    except ConfigError:
        return  # already told, subject by subject
    for remark in remarks:
        if remark.effect is Effect.HARMFUL:
            yield Finding(Level.WARNING, f"{remark.origin}: {remark.path}", remark.text)
