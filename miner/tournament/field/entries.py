"""Tasks and entries of the field, as `field pull` saved them, beside our own plans.

A saved directory has one folder per tournament with `tournament.json`, in it one per task with `task.json`
(the public API's answers, reduced), and in that one per entry, named by the first eight characters of the
hotkey. Folders of entries' own files without any `task.json` can be read too: as one task of each family.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from core.data.facts import assumed_facts
from core.domain.errors import GodMinerError
from core.domain.hardware import Hardware, parse_gpus
from core.domain.tasks import ImageModelType, TaskType, task_type_named
from core.domain.tournament_rules import CPUS_PER_GPU, MEMORY_PER_GPU, gpus_for
from core.domain.wire import TournamentType
from core.models.identify import facts_from_name
from core.planning.conditions import JobConditions
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.profile.resolve import LoadedProfile, load_profile, resolve_profile
from core.runs.run_files import tournament_reserve_s
from core.system.files import read_regular_file
from miner.tournament.field.recipes import HEADER, SMALL_FILES, FieldRecipe, read_recipe
from miner.tournament.public_api import (
    Entry,
    Tournament,
    TournamentTaskResult,
    mapping,
    task_result,
    tournament_of,
)
from miner.tournament.rules import training_pictures

# — our own plan for a task of the field

PROFILE = "steady"
#: What ai-toolkit calls each loss.
_LOSSES = {"l2": "mse", "l1": "mae"}


def own_plan(
    task_type: str | None, family: str | None, model_id: str | None, hours: float | None, rows: int | None
) -> tuple[FieldRecipe | None, str]:
    """Return our figures, or None and why there are none."""
    if task_type is None:
        return None, "the task is not known: there is no task.json"
    kind = task_type_named(task_type)
    if kind is None:
        return None, f"{task_type} is not a kind that we plan"
    if hours is None:
        return None, "the task's hours are not known"
    image = None
    if not kind.is_text:
        if family not in list(ImageModelType):
            return None, f"{family or 'the family'} is not a family that we plan"
        if rows is None:
            return None, "the number of pictures is not known"
        image = ImageModelType(family)
    try:
        plan = container_plan(kind, image, model_id or family or "", hours, rows)
    except (GodMinerError, ValueError) as error:
        return None, str(error).splitlines()[0]
    if not plan.verdict.feasible:
        return None, plan.verdict.reason
    return recipe_of_plan(plan), ""


@lru_cache(maxsize=256)
def container_plan(
    kind: TaskType, image: ImageModelType | None, model_id: str, hours: float, rows: int | None
) -> TrainingPlan:
    model = facts_from_name(model_id, None, image)
    data = assumed_facts(kind, rows, hours, image)
    count = gpus_for(kind, model.params_total)
    hardware = Hardware(
        gpus=parse_gpus(f"{count}xH100"), cpu_cores=CPUS_PER_GPU * count, memory_bytes=MEMORY_PER_GPU * count
    )
    profile = resolve_profile(_profile(), kind, model, data.pictures)
    own = profile.for_tournament(tournament_reserve_s(hours * 3600, image is not None))
    conditions = JobConditions(hardware, model_cached=True, publishes=False, pictures=True)
    task = TaskSpec(task_type=kind, hours=hours, image_type=image)
    return plan_task(task, model, data, hardware, own, conditions=conditions)


@lru_cache(maxsize=1)
def _profile() -> LoadedProfile:
    return load_profile(PROFILE)


def recipe_of_plan(plan: TrainingPlan) -> FieldRecipe:
    optimizer, steps, image = plan.optimizer, plan.steps, plan.image
    return FieldRecipe(
        trainer=str(plan.engine),
        steps=steps.total,
        shipped=steps.total,
        epochs=steps.epochs,
        batch=plan.batch.micro * plan.batch.world_size,
        accumulation=plan.batch.accumulation,
        optimizer=str(optimizer.name),
        lr=optimizer.learning_rate,
        schedule=str(optimizer.schedule),
        floor=optimizer.min_lr_ratio,
        warmup=optimizer.warmup_steps,
        cooldown=optimizer.cooldown_share,
        lora_rank=plan.adapter.rank if plan.adapter else None,
        lora_alpha=plan.adapter.alpha if plan.adapter else None,
        dropout=image.caption_dropout if image else plan.adapter.dropout if plan.adapter else None,
        loss=_LOSSES.get(str(plan.targets.image_loss), str(plan.targets.image_loss)) if image else None,
        ema=plan.ema.decay if plan.ema else 0.0,
        resolutions=image.resolutions if image else (),
    )


TASK, TOURNAMENT = "task.json", "tournament.json"
#: A directory of a whole season has fewer.
MOST_FOLDERS, MOST_FILES = 2000, 20_000
#: What says of an entry's folder that it is whole.
DONE = "pulled.json"
#: Of a whole answer of the API, where that was saved.
MOST_TASK_BYTES = 32 * 1024**2


class NoField(GodMinerError):
    """A directory without a file of any entry."""

    code = "no_field"


@dataclass(frozen=True, slots=True)
class FieldEntry:
    entry: Entry
    recipe: FieldRecipe


@dataclass(frozen=True, slots=True)
class FieldTask:
    task: TournamentTaskResult
    #: Best first.
    entries: tuple[FieldEntry, ...]

    @property
    def family(self) -> str:
        return self.task.family or self.task.task_type or "unknown"

    @property
    def pictures(self) -> int | None:
        """Pictures that the container gets."""
        if self.task.pictures is not None:
            return training_pictures(self.task.pictures)
        counted = [one.recipe.pictures for one in self.entries if one.recipe.pictures]
        return counted[0] if counted else None

    def own_plan(self) -> tuple[FieldRecipe | None, str]:
        task = self.task
        return own_plan(task.task_type, task.family, task.model_id, task.hours, self.pictures)


@dataclass(frozen=True, slots=True)
class OwnResults:
    """The results of one hotkey in the saved tournaments."""

    hotkey: str
    #: Tasks in which it has a place, and those in which that is the first.
    tasks: int
    first: int
    #: Tournaments that are over and that it took part in, and those that it won.
    tournaments: int
    won: int


def own_results(directory: Path, hotkey: str) -> OwnResults:
    places = [
        one.entry.rank
        for task in read_field(directory)
        for one in task.entries
        if one.entry.hotkey == hotkey and one.entry.rank is not None
    ]
    saved = read_tournaments(directory)[0]
    over = [one for one in saved if one.winner and hotkey in (*one.participants, one.boss)]
    won = sum(one.champion == hotkey for one in over)
    return OwnResults(hotkey, len(places), places.count(1), len(over), won)


def read_tournaments(directory: Path) -> tuple[list[Tournament], list[str]]:
    """Read tournaments that `pull` saved, and answers of the API in other files; return problems as well."""
    found: dict[str, Tournament] = {}
    problems = []
    for file in sorted(directory.rglob("*.json"))[:MOST_FILES]:
        if file.name in (TASK, DONE, HEADER, *SMALL_FILES):
            continue
        try:
            raw = mapping(_read_json(file))
        except NoField as error:
            problems.append(str(error))
            continue
        read = [tournament_of(one) for one in (raw, *(raw.get(kind) for kind in TournamentType))]
        found |= {one.tournament_id: one for one in read if one is not None}
        if file.name == TOURNAMENT and not any(read):
            problems.append(f"{file} describes no tournament: pull it again")
    return list(found.values()), problems


def read_field(directory: Path) -> list[FieldTask]:
    """Read every task below the directory. `NoField` if there is nothing."""
    if not directory.is_dir():
        raise NoField(f"{directory} is not a directory; `god-miner tournament field pull` makes one")
    found = [_read_task(file) for file in sorted(directory.rglob(TASK))[:MOST_FOLDERS]]
    if not found:
        loose = list(_loose_entries(directory))
        for family in dict.fromkeys(one.recipe.family for one in loose):
            task = TournamentTaskResult(directory.resolve().name, family=family)
            found.append(FieldTask(task, tuple(one for one in loose if one.recipe.family == family)))
    if not found:
        names = ", ".join((TASK, *SMALL_FILES))
        raise NoField(f"no file of an entry is below {directory}: {names} or *.safetensors")
    return sorted(found, key=lambda task: (task.family, task.task.hours or 0, task.task.task_id))


def _read_task(file: Path) -> FieldTask:
    raw = _read_json(file)
    task_id = raw.get("task_id") if isinstance(raw, dict) else None
    task = task_result(raw, task_id if isinstance(task_id, str) else file.parent.name)
    entries = [FieldEntry(entry, _recipe(file.parent / entry.hotkey[:8])) for entry in task.entries]
    return FieldTask(task, tuple(entries))


def _read_json(file: Path) -> Any:
    try:
        if file.stat().st_size > MOST_TASK_BYTES:
            raise NoField(f"{file} cannot be read: it is larger than {MOST_TASK_BYTES // 1024**2} MiB")
        return json.loads(read_regular_file(file))
    except (OSError, ValueError, RecursionError) as error:
        raise NoField(f"{file} cannot be read: {error}") from None


def _recipe(folder: Path) -> FieldRecipe:
    return read_recipe(folder) if folder.is_dir() else FieldRecipe()


def _loose_entries(directory: Path) -> Iterator[FieldEntry]:
    names = (*SMALL_FILES, HEADER, "*.safetensors")
    folders = sorted({file.parent for name in names for file in directory.rglob(name)})
    for folder in folders[:MOST_FOLDERS]:
        recipe = read_recipe(folder)
        if recipe != FieldRecipe():
            yield FieldEntry(Entry(folder.name), recipe)
