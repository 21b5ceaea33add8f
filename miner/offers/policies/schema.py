"""The schema of a policy file: hard rules, the score, chances of success, what a task is worth, targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from core.config.files import ConfigFileModel
from core.domain.records import Record
from core.domain.selectors import Band, OneOrMany, TaskWord
from core.domain.units import Seconds
from core.models.facts import Family
from core.profile.schema import SectionSelector
from miner.offers.policies.yaml_types import Blackout, Hours, HoursLimit, TaskKindName

Share = Annotated[float, Field(ge=0, le=1)]


class ExperienceRule(Record):
    """Work that needs experience: own jobs that were published before."""

    when: SectionSelector = Field(default=SectionSelector(), description="Which offers. Unset: all.")
    published: int = Field(
        ge=1, description="How many of your jobs of the same task type must have been published."
    )


class PolicyRules(Record):
    """Hard rules: an offer that breaks one is refused, whatever its score."""

    tasks: Annotated[list[TaskWord], OneOrMany()] | None = Field(
        default=None, description="Only these task types. Unset: all."
    )
    families: Annotated[list[Family], OneOrMany()] | None = Field(
        default=None,
        description="Only these text model families (list in docs/profiles.md). Unset: all.",
        examples=["llama", "[qwen, gemma]"],
    )
    models_denied: list[str] = Field(
        default_factory=list,
        description="Refuse these models: case-insensitive patterns like `*/test-*`.",
    )
    size: Band | None = Field(default=None, description="Only text models of this size. Unset: any.")
    hours: dict[TaskKindName, Hours] = Field(
        default_factory=dict,
        description='Most hours by task type or image model: `8`, or `"<20"`. The most specific entry '
        "applies; "
        "`sd` is Stable Diffusion 1 and 2, which no engine here trains: they are always refused.",
    )
    max_hours: Hours | None = Field(default=None, description="Most hours for any task.")
    min_hours: float = Field(default=0.25, ge=0, description="Fewest hours.")
    max_jobs: int | None = Field(
        default=None, ge=0, description="Most jobs and held offers at once. Unset: as many as the GPUs allow."
    )
    blackout: Annotated[list[Blackout], OneOrMany()] = Field(
        default_factory=list,
        description="Hours (UTC) in which no job may run.",
    )
    min_success: Share = Field(
        default=0.0,
        description="Least chance of publishing a valid model.",
    )
    min_value: float | None = Field(
        default=None,
        description="Least expected points per GPU-hour. Unset: any.",
    )
    min_value_full: float | None = Field(
        default=None,
        description="The same for a task that takes the last GPU; the minimum rises with the share of held "
        "GPUs. "
        "Unset: `min_value`.",
    )
    min_value_full_size: Band | None = Field(
        default=None,
        description="Text models to which `min_value_full` and `value.gpu_hour` apply. Unset: all tasks.",
    )
    experience: dict[str, ExperienceRule] = Field(
        default_factory=dict,
        description="What must have been published before, each under a name of your choice.",
    )


class FitTerms(Record):
    """Terms for fitting an accepted task onto the GPUs."""

    max_wait: Seconds = Field(
        default=1800.0,
        description="Longest wait for GPUs; the deadline stays the same.",
    )
    fewer_gpus: bool = Field(
        default=True,
        description="Plan for fewer GPUs if the profile's number is not free. Lanes keep theirs.",
    )
    spare: Share = Field(
        default=0.1, description="Extra time for which GPUs are held, as a share of the plan."
    )
    start_delay: Seconds = Field(
        default=300.0,
        description="Extra time on top, for the time from offer to start.",
    )


class ScoreWeights(Record):
    """Points that each factor adds to the score at most."""

    task: float = Field(default=0.35, ge=0, description="`score.task` of the task type.")
    family: float = Field(default=0.25, ge=0, description="Success rate of the model's family.")
    success: float = Field(default=0.20, ge=0, description="Success rate of the task type.")
    time: float = Field(
        default=0.10, ge=0, description="1 at no hours, 0 at the most that `rules.hours` allows."
    )
    size: float = Field(default=0.05, ge=0, description="`score.size` of the model's size.")
    hardware: float = Field(default=0.05, ge=0, description="Share of the profile's training that fits here.")
    value: float = Field(
        default=0.0, ge=0, description="Expected points per GPU-hour, 1 from `score.good_value` on."
    )


class ScoreTerms(Record):
    """The score: the sum of weight × factor; each factor lies between 0 and 1."""

    threshold: float | None = Field(
        default=None, description="Refuse offers that do not score above this. Unset: none."
    )
    weights: ScoreWeights = Field(default=ScoreWeights(), description="Most that each factor adds.")
    task: dict[TaskKindName, Share] = Field(
        default_factory=dict,
        description="By task type or image model; the most specific entry applies. Not listed: 0.",
    )
    size: dict[Band, Share] = Field(
        default_factory=dict, description="By model size; the first matching band applies. Not listed: 0."
    )
    good_value: float = Field(
        default=2.0, gt=0, description="Points per GPU-hour that make the factor `value` 1."
    )


class SuccessTerms(Record):
    """Chances of publishing a valid model in time: priors, and how own history moves them."""

    prior_weight: float = Field(default=10.0, gt=0, description="How many recent jobs a prior counts as.")
    half_life: Seconds = Field(default=14 * 86_400.0, gt=0, description="Age at which a job counts half.")
    prior: Share = Field(default=0.9, description="Prior where nothing more specific is given.")
    task: dict[TaskKindName, Share] = Field(
        default_factory=dict, description="Priors by task type or image model."
    )
    family: dict[Family, Share] = Field(default_factory=dict, description="Priors by model family.")
    size: dict[Band, Share] = Field(
        default_factory=dict, description="Priors by model size; history uses the same bands."
    )


#: Exponent of the loss of a shortened training, if a policy does not say.
TRAINING_EXPONENT = 0.3


class ValueTerms(Record):
    """Worth of a task: the validators' scoring, and how good this miner expects to be."""

    win_points: float = Field(default=3.0, ge=0, description="Points for the best submission of a task.")
    penalty: float = Field(default=1.0, ge=0, description="Points lost without a valid submission.")
    win_chance: dict[TaskKindName, Share] = Field(
        default_factory=dict,
        description="Chance that a published model is the best, by task type or image model.",
    )
    win_prior: Share = Field(default=0.1, description="The same if not listed.")
    punished: dict[TaskKindName, Share] = Field(
        default_factory=dict,
        description="Images: chance that a published model is among the worst, which lose points.",
    )
    training_exponent: dict[TaskKindName, Annotated[float, Field(ge=0, le=2)]] = Field(
        default_factory=dict,
        description="A training cut to a share s of the profile's wins sˣ as often; x by task type or "
        "image model, "
        "0.3 if not listed.",
    )
    gpu_hour: float = Field(
        default=1.2,
        ge=0,
        description="`gpu_strategy: by_value`: points that others would bring in an hour of the last free "
        "GPU. Earlier ones cost less, by the third power of the share of GPUs held.",
    )


class Goal(Record):
    """Goals to reach within a time, which counts from the first job."""

    within: Seconds = Field(gt=0, description="How long from the first job.")
    jobs: int | None = Field(default=None, ge=1, description="Published models.")
    top: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="Rank as a share of all miners: 0.05 is the best twentieth."
    )
    success_rate: Share | None = Field(default=None, description="Success rate within that time.")


class PolicyTargets(Record):
    """Targets that reports and the page compare with. No decision depends on them."""

    success_rate: Share = Field(
        default=0.95, description="Published, of the jobs that this miner took on; at least."
    )
    completion_hours: float = Field(default=6.0, gt=0, description="Mean hours from start to end; at most.")
    utilization: Share = Field(default=0.8, description="Mean GPU utilisation, idle or not; at least.")
    completion_rate: Share = Field(
        default=0.99, description="Jobs with a submission, of all that ended; at least."
    )
    penalty_rate: Share = Field(
        default=0.02, description="Jobs without a submission, of all that ended; at most."
    )
    first_place_rate: Share = Field(default=0.8, description="Tasks won, of all that ended; at least.")
    tournament_win_rate: Share = Field(default=0.6, description="Tournaments won; at least.")
    goals: dict[str, Goal] = Field(
        default_factory=dict, description="What is to be reached by when, each under a name of your choice."
    )


class Policy(ConfigFileModel):
    """One policy file."""

    description: str = Field(default="", description="One line for `policy list`.")
    extends: str | None = Field(default=None, description="Name or path of the policy that this one changes.")
    hardware: str | None = Field(
        default=None,
        description="Made for, like 4xH100; default of `policy check` and `backtest`.",
    )
    profile: str | None = Field(
        default=None,
        description="Tuning profile that goes with it, used if PROFILE is `auto`.",
    )
    notes: list[str] = Field(default_factory=list, description="Remarks.")
    rules: PolicyRules = Field(default=PolicyRules(), description="Hard rules.")
    fitting: FitTerms = Field(default=FitTerms(), description="How tasks get GPUs.")
    score: ScoreTerms = Field(default=ScoreTerms(), description="The score and its threshold.")
    success: SuccessTerms = Field(default=SuccessTerms(), description="Chances of success.")
    value: ValueTerms = Field(default=ValueTerms(), description="What a task is worth.")
    targets: PolicyTargets = Field(default=PolicyTargets(), description="What is to be reached.")


def by_kind(table: Mapping[str, float], kinds: tuple[str, ...], otherwise: float) -> float:
    """Return the entry of the most exact kind that is listed."""
    return next((table[kind] for kind in kinds if kind in table), otherwise)


def hours_limit_for(rules: PolicyRules, kinds: tuple[str, ...]) -> tuple[str, HoursLimit] | None:
    """Return the limit that binds, with its key."""
    limits = [(f"rules.hours.{kind}", rules.hours[kind]) for kind in kinds if kind in rules.hours][:1]
    if rules.max_hours is not None:
        limits.append(("rules.max_hours", rules.max_hours))
    return min(limits, key=lambda limit: (limit[1].hours, not limit[1].below), default=None)
