"""What comparing the files of an image run at its end costs, and whether the timeline has room for it.

The files are scored by the evaluator's own measure: pictures are drawn again from their noised selves, with
their caption and without, for some pictures and seeds. Three of five published comparisons chose the last
file anyway, and no gain on test pictures is published: by default only time that the steps leave is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from core.domain.choices import Engine
from core.domain.tasks import ImageModelType
from core.planning.candidate import RunCandidate, image_type
from core.planning.plan import CheckpointChoice
from core.planning.time.overheads import PhaseEstimate
from core.planning.time.schedule import LEAST_SAVES, RepeatTimes, StepSchedule
from core.planning.time.speed import forward_seconds
from core.profile.targets import CheckpointChoiceTarget

#: Forward passes for a picture and a seed, with and without caption: the evaluator's sampler steps times its
#: denoising strength, twice where it guides. Without caption krea2 and qwen-image need one pass a step, as
#: both sides of the guidance are the same. Other families cannot be scored: validators draw no SDXL any more.
RENDER_PASSES: dict[ImageModelType, int] = {
    ImageModelType.FLUX: 54,
    ImageModelType.Z_IMAGE: 18,
    ImageModelType.QWEN_IMAGE: 57,
    ImageModelType.KREA2: 60,
    ImageModelType.IDEOGRAM4: 92,
}
#: Flux's evaluation ignores its seeds: every one gives the same picture.
SEEDLESS = (ImageModelType.FLUX,)
#: Reading an adapter and putting it beside the model.
ATTACH_S = 5.0
#: Starting another Python with the model's libraries.
START_S = 60.0
#: Side of the pictures that the evaluator draws.
DRAWN = 1024


class ChoiceCost(NamedTuple):
    """Seconds: once, and for each file."""

    start_s: float
    file_s: float

    def of(self, files: int) -> float:
        return self.start_s + files * self.file_s


def can_score(s: RunCandidate) -> bool:
    """Whether files of this run can be compared at all."""
    return image_type(s) in RENDER_PASSES


def choice_cost(s: RunCandidate, asked: CheckpointChoiceTarget, start_s: float) -> ChoiceCost:
    """`start_s`: loading the model once more."""
    kind = image_type(s)
    assert kind is not None
    renders = asked.pictures * seeds_of(s, asked)
    return ChoiceCost(start_s, ATTACH_S + renders * RENDER_PASSES[kind] * forward_seconds(s, DRAWN))


def seeds_of(s: RunCandidate, asked: CheckpointChoiceTarget) -> int:
    return 1 if image_type(s) in SEEDLESS else asked.seeds


def affordable_files(asked: int, cost: ChoiceCost, seconds: float) -> int:
    """As many files as can be compared in so many seconds; 0 where not even two."""
    files = min(asked, math.floor((seconds - cost.start_s) / cost.file_s))
    return files if files >= 2 else 0


def with_files(schedule: StepSchedule, files: int, save_s: float, whole: int = 1) -> StepSchedule:
    """The same steps with evenly spread saves: so many, or a multiple where that would be too few for a run
    that is cut off. `whole`: saves fall on its multiples."""
    files *= math.ceil(LEAST_SAVES / files)
    every = max(math.ceil(schedule.total / files / whole), 1) * whole
    saves = math.ceil(schedule.total / every)
    return schedule._replace(
        eval_every=every, save_every=every, keep=max(schedule.keep, saves), save_s=saves * save_s
    )


def with_choice(
    s: RunCandidate,
    asked: CheckpointChoiceTarget,
    before: tuple[PhaseEstimate, ...],
    rate: RepeatTimes,
    fitted: Callable[[float], StepSchedule],
    seconds: float,
) -> tuple[StepSchedule, CheckpointChoice | None]:
    """The schedule for these seconds with a choice at its end; without one where there is no room.

    `fitted` makes the schedule for a number of seconds."""
    schedule = fitted(seconds)
    loading = sum(phase.seconds for phase in before if phase.name == "load")
    cost = choice_cost(s, asked, START_S + loading)
    with_saves = cost._replace(file_s=cost.file_s + rate.save_s)
    free = seconds - schedule.train_s
    files = affordable_files(min(asked.files, schedule.total), with_saves, max(free, asked.share * seconds))
    if files and with_saves.of(files) > free:
        schedule = fitted(seconds - with_saves.of(files))
    if not files or schedule.total < 2:
        return schedule, None
    whole = schedule.per_epoch if s.engine is Engine.KOHYA else 1
    schedule = with_files(schedule, files, rate.save_s, whole)
    files = min(files, math.ceil(schedule.total / schedule.save_every))
    if files < 2:
        return schedule, None
    seeds = seeds_of(s, asked)
    return schedule, CheckpointChoice(
        files=files,
        pictures=asked.pictures,
        seeds=seeds,
        seconds=cost.of(files),
        held_out=asked.held_out,
    )
