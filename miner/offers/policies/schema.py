"""The schema of a policy file: hard rules, the score, chances of success, what a task is worth."""

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

    when: SectionSelector = Field(
        default=SectionSelector(), description="Which offers; all, where nothing is written."
    )
    published: int = Field(
        ge=1, description="How many own jobs of the same task type must have been published before."
    )


class PolicyRules(Record):
    """Hard rules: an offer that breaks one is refused, whatever its score."""

    tasks: Annotated[list[TaskWord], OneOrMany()] | None = Field(
        default=None, description="Only these task types. Unset: all."
    )
    families: Annotated[list[Family], OneOrMany()] | None = Field(
        default=None,
        description="Only these families of text models; `unknown` is one of them. Unset: all.",
    )
    models_denied: list[str] = Field(
        default_factory=list,
        description="Never these models: names with * and ?, like `*/test-*`; case does not matter.",
    )
    size: Band | None = Field(default=None, description="Only text models of this size. Unset: any.")
    hours: dict[TaskKindName, Hours] = Field(
        default_factory=dict,
        description='Hours at most, by task type or image model: `8`, or `"<20"`. '
        "The most exact entry counts; `sd` is Stable Diffusion 1 and 2, by the model's name.",
    )
    max_hours: Hours | None = Field(default=None, description="Hours at most, whatever the kind of task.")
    min_hours: float = Field(default=0.25, ge=0, description="Offers of fewer hours are refused.")
    max_jobs: int | None = Field(
        default=None, ge=0, description="Jobs and held offers at once. Unset: as many as there are GPUs for."
    )
    blackout: Annotated[list[Blackout], OneOrMany()] = Field(
        default_factory=list,
        description="Hours (UTC) in which no job may run: `22:00-06:00`, `Sat,Sun 08:00-12:00`.",
    )
    min_success: Share = Field(
        default=0.0,
        description="The least chance of publishing a valid model, from priors and history.",
    )
    min_value: float | None = Field(
        default=None,
        description="The least expected value of an hour of one GPU, in the validators' points. Unset: any.",
    )
    min_value_full: float | None = Field(
        default=None,
        description="The same for a task that takes the last GPU; in between it rises with the share of GPUs "
        "that are held. Unset: `min_value` throughout.",
    )
    min_value_full_size: Band | None = Field(
        default=None,
        description="`min_value_full` applies only to text models of this size, like `<65B`; `min_value` to "
        "others. Unset: all.",
    )
    experience: dict[str, ExperienceRule] = Field(
        default_factory=dict,
        description="What must have been published before; each entry has a name of your choice.",
    )


class FitTerms(Record):
    """How an accepted task is fitted onto the GPUs."""

    max_wait: Seconds = Field(
        default=1800.0,
        description="The longest that a task may wait for its GPUs; its deadline stays the same.",
    )
    fewer_gpus: bool = Field(
        default=True,
        description="Where the profile's number of GPUs is not free, plan for fewer. Lanes keep theirs.",
    )
    spare: Share = Field(
        default=0.1, description="How much longer than planned GPUs are held, as a share of the plan."
    )
    start_delay: Seconds = Field(
        default=300.0,
        description="How much longer in addition, since the start comes some time after the offer.",
    )


class ScoreWeights(Record):
    """What each factor adds to the score at most."""

    task: float = Field(default=0.35, ge=0, description="`score.task` of the task type.")
    family: float = Field(default=0.25, ge=0, description="The success rate of the model's family.")
    success: float = Field(default=0.20, ge=0, description="The success rate of the task type.")
    time: float = Field(
        default=0.10, ge=0, description="Short tasks: 1 at no hours, 0 at the most that `rules.hours` allows."
    )
    size: float = Field(default=0.05, ge=0, description="`score.size` of the model's size.")
    hardware: float = Field(
        default=0.05, ge=0, description="The share of the training that the profile asks for that fits here."
    )
    value: float = Field(
        default=0.0, ge=0, description="Expected value of a GPU's hour, 1 from `score.good_value` on."
    )


class ScoreTerms(Record):
    """The score: the sum of weight × factor; each factor lies between 0 and 1."""

    threshold: float | None = Field(
        default=None, description="An offer's score must be above this. Unset: the score decides nothing."
    )
    weights: ScoreWeights = Field(default=ScoreWeights(), description="What each factor adds at most.")
    task: dict[TaskKindName, Share] = Field(
        default_factory=dict,
        description="By task type or image model, the most exact entry first; 0 for what is not listed.",
    )
    size: dict[Band, Share] = Field(
        default_factory=dict, description="By size of the model, the first band that fits; 0 for any other."
    )
    good_value: float = Field(
        default=2.0, gt=0, description="Value of a GPU's hour that counts as 1 in the factor `value`."
    )


class SuccessTerms(Record):
    """Chances of publishing a valid model in time: priors, and how own history moves them."""

    prior_weight: float = Field(default=10.0, gt=0, description="How many jobs of today a prior counts as.")
    half_life: Seconds = Field(
        default=14 * 86_400.0, gt=0, description="The age at which a job counts half: 14d."
    )
    prior: Share = Field(default=0.9, description="The prior where nothing more exact is written.")
    task: dict[TaskKindName, Share] = Field(
        default_factory=dict, description="Priors by task type or image model."
    )
    family: dict[Family, Share] = Field(default_factory=dict, description="Priors by model family.")
    size: dict[Band, Share] = Field(
        default_factory=dict, description="Priors by size of the model; history is kept by these bands."
    )


#: What a shortened training loses, where a policy does not say.
TRAINING_EXPONENT = 0.3


class ValueTerms(Record):
    """What a task is worth: the validators' scoring, and how good this miner expects to be."""

    win_points: float = Field(default=3.0, ge=0, description="Points for the best submission of a task.")
    penalty: float = Field(default=1.0, ge=0, description="Points lost without a valid submission.")
    win_chance: dict[TaskKindName, Share] = Field(
        default_factory=dict,
        description="The chance that a published model is the best, by task type or image model.",
    )
    win_prior: Share = Field(default=0.1, description="The same where it is not listed.")
    punished: dict[TaskKindName, Share] = Field(
        default_factory=dict,
        description="The chance that a published model is among the worst, which lose points: images only.",
    )
    training_exponent: dict[TaskKindName, Annotated[float, Field(ge=0, le=2)]] = Field(
        default_factory=dict,
        description="A training cut to a share s of what the profile asks for wins s to this power as often; "
        "0.3 where it is not listed.",
    )


class Policy(ConfigFileModel):
    """One policy file."""

    description: str = Field(default="", description="One line for `policy list`.")
    extends: str | None = Field(
        default=None, description="Name of a policy, or path of a file, that this one extends."
    )
    hardware: str | None = Field(
        default=None,
        description="The hardware it is made for, like 4xH100: the default of `policy check` and `backtest`.",
    )
    profile: str | None = Field(
        default=None,
        description="The tuning profile that it goes with; the daemon uses it where PROFILE is `auto`.",
    )
    notes: list[str] = Field(default_factory=list, description="What of its source is not set here, and why.")
    rules: PolicyRules = Field(default=PolicyRules(), description="Hard rules.")
    fitting: FitTerms = Field(default=FitTerms(), description="How tasks are fitted onto the GPUs.")
    score: ScoreTerms = Field(default=ScoreTerms(), description="The score and its threshold.")
    success: SuccessTerms = Field(default=SuccessTerms(), description="Chances of success.")
    value: ValueTerms = Field(default=ValueTerms(), description="What a task is worth.")


def by_kind(table: Mapping[str, float], kinds: tuple[str, ...], otherwise: float) -> float:
    """Return the entry of the most exact kind that is listed."""
    return next((table[kind] for kind in kinds if kind in table), otherwise)


def hours_limit_for(rules: PolicyRules, kinds: tuple[str, ...]) -> tuple[str, HoursLimit] | None:
    """Return the limit that binds, with its key."""
    limits = [(f"rules.hours.{kind}", rules.hours[kind]) for kind in kinds if kind in rules.hours][:1]
    if rules.max_hours is not None:
        limits.append(("rules.max_hours", rules.max_hours))
    return min(limits, key=lambda limit: (limit[1].hours, not limit[1].below), default=None)
