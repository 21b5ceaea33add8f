"""The words in which a profile's field is declared, beside its type and description.

`Called` says what the plan, the engines and guides call it; an `Effect` says what an engine makes of some
values. Both are data in the field's `Annotated[...]`: error messages, the planner's reasons and `profile
explain` read them there. Facts about the engines (axolotl 0.19, sd-scripts 0.10, ai-toolkit 0.12, NCCL 2)
were measured or read in their sources. The operator's intent is kept in every case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel

from core.domain.choices import Engine
from core.domain.tasks import ImageModelType, TaskType

T = TypeVar("T")


class NameSystem(StrEnum):
    PLAN = "plan"  # the number of the plan that the field becomes
    AXOLOTL = "axolotl"
    KOHYA = "kohya"
    AI_TOOLKIT = "ai_toolkit"  # by dotted path within the process
    GUIDES = "guides"  # and other tools


@dataclass(frozen=True, slots=True)
class Called:
    """Names of a field in other systems."""

    plan: str | tuple[str, ...] = ()
    axolotl: str | tuple[str, ...] = ()
    kohya: str | tuple[str, ...] = ()
    ai_toolkit: str | tuple[str, ...] = ()
    guides: str | tuple[str, ...] = ()

    def names(self, system: NameSystem) -> tuple[str, ...]:
        names = getattr(self, system.value)
        return (names,) if isinstance(names, str) else names


def field_names(*parts: type[BaseModel]) -> dict[NameSystem, dict[str, str]]:
    """Map each system's names to the fields of these parts of a profile."""
    return {
        system: {
            name: field_name
            for part in parts
            for field_name, called in _declared(part, Called)
            for name in called.names(system)
        }
        for system in NameSystem
    }


class EngineEffect(StrEnum):
    RENAMED = "renamed"  # the engine has the idea under another name or in another form
    OURS = "done by us"  # no engine has it; our trainer's callbacks do it
    IGNORED = "no effect"  # accepted and without consequence
    DOUBTFUL = "doubtful"  # works, and the evidence speaks against it
    HARMFUL = "harmful"  # breaks the run or the result as it stands


RENAMED, OURS, IGNORED, DOUBTFUL, HARMFUL = EngineEffect


class EngineCase(NamedTuple):
    """The task and the engine that an annotation is for."""

    task_type: TaskType
    image_type: ImageModelType | None
    engine: Engine


class Where(NamedTuple):
    """The cases in which an effect occurs. All that is given must hold."""

    engines: tuple[Engine, ...] = tuple(Engine)
    image: ImageModelType | None = None
    text: bool | None = None
    rl: bool | None = None
    pairs: bool | None = None

    def includes(self, case: EngineCase) -> bool:
        task = case.task_type
        return (
            case.engine in self.engines
            and self.image in (None, case.image_type)
            and self.text in (None, task.is_text)
            and self.rl in (None, task.is_rl)
            and self.pairs in (None, task.has_pairs)
        )


ANYWHERE = Where()
TEXT, IMAGES = Where(text=True), Where(text=False)
AXOLOTL, NATIVE = Where((Engine.AXOLOTL,)), Where((Engine.NATIVE,))
KOHYA, AI_TOOLKIT = Where((Engine.KOHYA,)), Where((Engine.AI_TOOLKIT,))
OTHER_THAN_AXOLOTL = Where((Engine.KOHYA, Engine.AI_TOOLKIT, Engine.NATIVE))
OTHER_THAN_NATIVE = Where((Engine.AXOLOTL, Engine.KOHYA, Engine.AI_TOOLKIT))
KOHYA_FLUX, SDXL = KOHYA._replace(image=ImageModelType.FLUX), Where(image=ImageModelType.SDXL)

#: A test of a value.
Test = Callable[[Any], bool]


def anything(_value: object) -> bool:
    return True


def given(value: object) -> bool:
    return value is not None


def switched_on(value: object) -> bool:
    return bool(value)


def at_least(number: float) -> Test:
    def test(value: float | None) -> bool:
        return value is not None and value >= number

    return test


def above(number: float) -> Test:
    def test(value: float | None) -> bool:
        return value is not None and value > number

    return test


def below(number: float) -> Test:
    def test(value: float | None) -> bool:
        return value is not None and value < number

    return test


def between(low: float, high: float) -> Test:
    def test(value: float) -> bool:
        return low < value < high

    return test


def outside(low: float, high: float) -> Test:
    def test(value: float) -> bool:
        return not low <= value <= high

    return test


def one_of(*values: object) -> Test:
    def test(value: object) -> bool:
        return value in values

    return test


def none_of(*values: object) -> Test:
    def test(value: object) -> bool:
        return value not in values

    return test


@dataclass(frozen=True, slots=True)
class Effect:
    """An engine's treatment of some values of a field: `Effect(DOUBTFUL, TEXT, above(4)).because("…")`."""

    kind: EngineEffect
    where: Where = ANYWHERE
    value: Test = anything
    #: Tests of other targets, by name.
    beside: Mapping[str, Test] = field(default_factory=dict)
    text: str = ""

    def because(self, text: str) -> Effect:
        return replace(self, text=text)

    def occurs(self, value: object, targets: BaseModel, case: EngineCase) -> bool:
        return (
            self.where.includes(case)
            and self.value(value)
            and all(test(getattr(targets, name)) for name, test in self.beside.items())
        )


def effects(part: type[BaseModel]) -> Iterator[tuple[str, Effect]]:
    """Yield each field of a part of the profile with each of its effects."""
    return _declared(part, Effect)


def _declared(part: type[BaseModel], kind: type[T]) -> Iterator[tuple[str, T]]:
    for name, info in part.model_fields.items():
        for word in info.metadata:
            if isinstance(word, kind):
                yield name, word
