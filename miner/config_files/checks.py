"""Check a text that somebody is writing, in the child process: what is wrong in which line, what differs from
the saved file, which values were edited, and the effects of that."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from core.config.yaml_lines import KeyPath, LocatedYaml, dotted_path, parse_yaml
from core.data.facts import DatasetFacts, assumed_facts
from core.domain.errors import ConfigError, Problem
from core.domain.hardware import Hardware, parse_gpus
from core.domain.tasks import ImageModelType, TaskType
from core.domain.units import show_bytes, show_params, show_seconds
from core.domain.wire import MinerTaskOffer
from core.models.facts import ModelFacts
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task, usable_hours
from core.profile.explain import ProfileFinding, ProfileFindingLevel, check_profile
from core.profile.resolve import PROFILE_KIND, LoadedProfile, load_profile
from core.recipes.dry_run import check_profile_plan, flatten, plan_differences
from miner.alerts.rules import AlertRule, LoadedAlertRules, alert_rules_of_text, load_alert_rules
from miner.api.config_files import (
    EditedValue,
    FileKind,
    PlanChange,
    PlanEffects,
    PlanFigures,
    RuleChange,
    RuleEffects,
    RuleValueChange,
    TaskEffects,
    TextCheck,
    TextProblem,
)
from miner.api.offers import BacktestComparison, ChangedAnswer
from miner.config_files.files import LoadedFile
from miner.config_files.what_if import BacktestOrder, CheckOrder
from miner.offers.backtest.policy_check import policy_findings
from miner.offers.backtest.replay import Backtest, DecisionChange, PastOffers, decision_changes
from miner.offers.parsed_offer import parse_offer
from miner.offers.past_offers import OfferFilter
from miner.offers.policies.load import POLICY_KIND, LoadedPolicy, load_policy
from miner.offers.views import backtest_figures
from miner.store.database import open_store

#: The newest offers: 10,000 take 10 to 20 seconds and 280 MB.
MAX_BACKTEST_OFFERS = 10_000
MAX_LISTED_CHANGES = 200
#: How far back typical tasks and a policy's backtest look, and how many offers they take.
_DAYS = 14.0
_MAX_OFFERS = 1000
_MAX_TASKS = 7
_MAX_DIFFERENCES = 60
#: Tasks as validators send them, for a miner that has not been asked for such yet: (type, model, hours).
_SAMPLES: tuple[tuple[TaskType, str, int | None, float], ...] = (
    (TaskType.INSTRUCT, "unsloth/Llama-3.1-8B-Instruct", 8_030_261_248, 4.0),
    (TaskType.DPO, "Qwen/Qwen2.5-3B-Instruct", 3_085_938_688, 3.0),
    (TaskType.GRPO, "Qwen/Qwen2.5-7B-Instruct", 7_615_616_512, 5.0),
    (TaskType.CHAT, "unsloth/Llama-3.3-70B-Instruct", 70_553_706_496, 6.0),
    (TaskType.IMAGE, "stabilityai/stable-diffusion-xl-base-1.0", None, 2.0),
    (TaskType.IMAGE, "rayonlabs/FLUX.1-dev", None, 2.0),
)
Effects = RuleEffects | PlanEffects | BacktestComparison
MAX_EDITS = 100
_ERROR = ProfileFindingLevel.ERROR


def read_past_offers(store_dir: str, since: float, now: float, most: int = MAX_BACKTEST_OFFERS) -> PastOffers:
    with open_store(Path(store_dir)) as connection:
        return PastOffers.read(connection, OfferFilter(since=since, most=most), now)


def compare_policies(
    test: Backtest, before: LoadedPolicy, after: LoadedPolicy, most: int = MAX_BACKTEST_OFFERS
) -> BacktestComparison:
    """Return both policies' figures, and the offers that they answer differently."""
    runs = test.run("now", before), test.run("changed", after)
    changes = decision_changes(*runs)
    return BacktestComparison(
        offers=len(test.offers),
        is_limited=len(test.offers) >= most,
        policy=before.name,
        profile=test.profile.name,
        gpus=str(test.hardware.gpus),
        before=backtest_figures(runs[0]),
        after=backtest_figures(runs[1]),
        changed=len(changes),
        changes=[_changed_answer(change) for change in reversed(changes[-MAX_LISTED_CHANGES:])],
    )


def backtest_changes(order: BacktestOrder) -> BacktestComparison:
    """Carry out an order: the policy in force against the same with other values."""
    policy = order.terms.loaded_policy()
    changed = policy.with_overrides(order.changes)
    past = read_past_offers(order.store_dir, order.since, order.now)
    test = past.backtest(order.terms.loaded_profile(), order.terms.hardware, policy.terms)
    return compare_policies(test, policy, changed)


def _changed_answer(change: DecisionChange) -> ChangedAnswer:
    past = change.after.historical
    return ChangedAnswer(
        at=past.at,
        task_id=past.offer.task_id,
        task_type=past.offer.task_type,
        model=past.offer.model,
        hours=past.offer.hours_to_complete,
        accepted=change.after.decision.accepted,
        why=change.why,
        points=change.after.value.points if change.after.value else None,
    )


# Effects of an edit: plan and memory of typical tasks for a profile, the last weeks' offers for a policy


class TypicalTask(NamedTuple):
    label: str
    task: TaskSpec
    model: ModelFacts
    data: DatasetFacts
    stated_params: int | None

    @property
    def kind(self) -> tuple[TaskType, ImageModelType | None]:
        return self.task.task_type, self.task.image_type

    def plan(self, profile: LoadedProfile, hardware: Hardware) -> TrainingPlan:
        return plan_task(
            self.task,
            self.model,
            self.data,
            hardware,
            profile,
            stated_params=self.stated_params,
            explained=False,
        )


def changes_of(order: CheckOrder, edited: LoadedFile, directories: Sequence[Path]) -> Effects:
    """Compare with the present file of this name. A new name is compared with what it extends, or else with
    what is in force."""
    if isinstance(edited, LoadedAlertRules):
        return RuleEffects(rules=list(_rule_changes(_rules_before(order), edited)))
    past = read_past_offers(order.store_dir, order.now - _DAYS * 86_400, order.now, _MAX_OFFERS)
    if isinstance(edited, LoadedProfile):
        before = _before(order, edited, lambda name: load_profile(name, directories))
        return _plan_changes(before or order.terms.loaded_profile(), edited, order, past)
    overrides = order.terms.overrides
    there = _before(order, edited, lambda name: load_policy(name, directories, overrides))
    there = there or order.terms.loaded_policy()
    test = past.backtest(order.terms.loaded_profile(), order.terms.hardware, there.terms)
    return compare_policies(test, there, edited, _MAX_OFFERS)


def _rules_before(order: CheckOrder) -> LoadedAlertRules:
    try:
        return load_alert_rules(Path(order.file))
    except ConfigError:  # what is saved cannot be used
        return load_alert_rules()


def _rule_changes(before: LoadedAlertRules, after: LoadedAlertRules) -> Iterator[RuleChange]:
    for name in dict.fromkeys((*before.rules, *after.rules)):
        there, here = (_flat_rule(rules.rules.get(name)) for rules in (before, after))
        if there != here:
            keys = [key for key in dict.fromkeys((*there, *here)) if there.get(key) != here.get(key)]
            values = [
                RuleValueChange(key=key, before=_word(there.get(key)), after=_word(here.get(key)))
                for key in keys
            ]
            yield RuleChange(
                rule=name, what="new" if not there else "off" if not here else "changed", values=values
            )


def _flat_rule(rule: AlertRule | None) -> dict[str, object]:
    return flatten(rule.model_dump(mode="json", by_alias=True, exclude_none=True)) if rule else {}


def _before(order: CheckOrder, edited: Any, load: Any) -> Any:
    """Return the saved file, else its parent; None if neither loads."""
    names = [order.file if order.saved is not None else order.name, edited.content.extends]
    for name in filter(None, names):
        try:
            return load(name)
        except ConfigError:
            continue
    return None


def _plan_changes(
    before: LoadedProfile, after: LoadedProfile, order: CheckOrder, past: PastOffers
) -> PlanEffects:
    hardware = order.terms.hardware
    if after.hardware and parse_gpus(after.hardware).is_cpu is not hardware.gpus.is_cpu:
        hardware = Hardware(gpus=parse_gpus(after.hardware))
    offers = [one.offer for one in reversed(past.stored)]
    return PlanEffects(
        gpus=str(hardware.gpus),
        before=before.name,
        tasks=[_task_effects(task, before, after, hardware) for task in typical_tasks(offers)],
    )


def typical_tasks(newest: Sequence[MinerTaskOffer]) -> list[TypicalTask]:
    """Choose one task of each type and size that was offered lately; then of types that were not."""
    samples = (
        MinerTaskOffer(
            model=model, hours_to_complete=hours, task_id="sample", task_type=kind, model_params_count=params
        )
        for kind, model, params, hours in _SAMPLES
    )
    chosen: dict[tuple[Any, ...], TypicalTask] = {}
    kinds = set()
    for offer in newest:
        task = _typical(offer)
        size = round(task.model.params_total / 4e9)
        kinds.add((task.task.task_type, task.task.image_type))
        chosen.setdefault((task.task.task_type, task.task.image_type, size), task)
    several = list(chosen.values())[:_MAX_TASKS]
    more = [
        task for task in map(_typical, samples) if (task.task.task_type, task.task.image_type) not in kinds
    ]
    return (several + more)[:_MAX_TASKS]


def _typical(offer: MinerTaskOffer) -> TypicalTask:
    parsed, hours = parse_offer(offer), usable_hours(offer.hours_to_complete)
    task = TaskSpec(task_type=offer.task_type, hours=hours, image_type=parsed.image_type)
    data = assumed_facts(offer.task_type, parsed.rows, hours, parsed.image_type)
    size = "" if parsed.image_type else f", {show_params(parsed.params)}"
    label = f"{offer.task_type.word} {offer.model}{size}, {hours:g} h"
    return TypicalTask(label, task, parsed.model, data, parsed.planned_params)


def _task_effects(
    task: TypicalTask, before: LoadedProfile, after: LoadedProfile, hardware: Hardware
) -> TaskEffects:
    plans = task.plan(before, hardware), task.plan(after, hardware)
    return TaskEffects(
        task=task.label,
        before=_figures(plans[0]),
        after=_figures(plans[1]),
        differences=list(_differences(*plans))[:_MAX_DIFFERENCES],
    )


def _figures(plan: TrainingPlan) -> PlanFigures:
    return PlanFigures(
        feasible=plan.verdict.feasible,
        reason=plan.verdict.reason,
        gpus=str(plan.gpus),
        batch=f"{plan.batch.micro} × {plan.batch.accumulation} × {plan.batch.world_size}",
        memory_bytes=plan.memory.total_bytes,
        budget_bytes=plan.memory.budget_bytes,
        seconds=plan.time.total_s,
        slack_s=plan.time.slack_s,
        epochs=plan.steps.epochs,
        gave_way=[str(concession) for concession in plan.concessions],
    )


def _differences(before: TrainingPlan, after: TrainingPlan) -> Iterator[PlanChange]:
    shown = {"configuration": _word, "memory": show_bytes, "time": show_seconds}
    for difference in plan_differences(before, after):
        show = shown[difference.part]
        yield PlanChange(
            part=difference.part,
            what=difference.what,
            before=show(difference.before),
            after=show(difference.after),
        )


def _word(value: Any) -> str:
    return "–" if value is None else str(value)


def check_text(order: CheckOrder) -> TextCheck:
    """Carry out an order."""
    directories = [Path(order.directory)]
    loaded: LoadedFile | None = None
    try:
        loaded = load_text(order, order.text)
        findings = _findings(loaded)
        problems = [_located(one.level, one.where, one.message, order) for one in findings]
    except ConfigError as error:
        problems = [
            _located(ProfileFindingLevel.ERROR, one.where, _words(one), order) for one in error.problems
        ]
    is_valid = not any(problem.level == "error" for problem in problems)
    changes: Effects | None = None
    if order.effects and is_valid and loaded is not None:
        changes = changes_of(order, loaded, directories)
    return TextCheck(
        valid=is_valid,
        problems=problems,
        diff=_diff(order),
        edited=edited_values(order.saved or "", order.text),
        effects=changes,
    )


def load_text(order: CheckOrder, text: str) -> LoadedFile:
    """Load what the file would be with this text. `ConfigError`."""
    if order.kind == FileKind.ALERTS:
        return alert_rules_of_text(text, Path(order.file))
    file, directories = Path(order.file), [Path(order.directory)]
    if order.kind == FileKind.PROFILES:
        return LoadedProfile(order.name, PROFILE_KIND.layers_of_text(text, file, directories))
    layers = POLICY_KIND.layers_of_text(text, file, directories)
    return LoadedPolicy(order.name, layers, order.terms.overrides)


def _findings(loaded: LoadedFile) -> list[ProfileFinding]:
    if isinstance(loaded, LoadedAlertRules):
        return []
    if isinstance(loaded, LoadedProfile):
        return check_profile(loaded, check_profile_plan)
    return policy_findings(loaded)


def _words(problem: Problem) -> str:
    shown = f"{problem.value}: " if problem.value else ""
    return f"{shown}{problem.rule}"


def _located(level: ProfileFindingLevel, where: str, text: str, order: CheckOrder) -> TextProblem:
    """Find the line and the column of `h100x4.yaml:12: targets.lora_r`, or of a key alone."""
    name = re.escape(Path(order.file).name)
    stated = re.match(rf"{name}:(\d+)(?: \([^)]*\))?(?:: (.*))?$", where)
    key = (stated[2] or "") if stated else where.rpartition(": ")[2]
    line = int(stated[1]) if stated else _line_of(key, order.text)
    lines, word = order.text.splitlines(), key.rpartition(".")[2]
    shown = lines[line - 1] if line is not None and line <= len(lines) else ""
    # A file may extend the shipped one of its own name: then the line may be one of that.
    if line is None or word not in shown:
        shown = text if key == where else f"{where}: {text}"
        return TextProblem(level=level, line=None, column=None, key=key, text=shown)
    column = shown.find(word) if word else len(shown) - len(shown.lstrip())
    return TextProblem(level=level, line=line, column=column + 1, key=key, text=text)


def _line_of(key: str, text: str) -> int | None:
    try:
        lines = parse_yaml(text, "").lines
    except ConfigError:
        return None
    return next((line for path, line in lines.items() if dotted_path(path) == key), None)


def _diff(order: CheckOrder) -> str:
    name = Path(order.file).name
    before, after = (text.splitlines() for text in (order.saved or "", order.text))
    return "\n".join(difflib.unified_diff(before, after, f"{name} (saved)", f"{name} (edited)", lineterm=""))


def edited_values(before: str, after: str) -> list[EditedValue]:
    """Return what differs between two texts of a file, without what they extend. Values of environment
    variables may be secrets, and are left out."""
    try:
        there, here = (dict(_written(parse_yaml(text, ""))) for text in (before, after))
    except ConfigError:
        return []
    found = [
        EditedValue(path=dotted_path(path), before=there.get(path), after=here.get(path))
        for path in dict.fromkeys((*there, *here))
        if there.get(path) != here.get(path)
    ]
    return [_without_secrets(one) for one in found[:MAX_EDITS]]


def _written(located: LocatedYaml) -> Iterator[tuple[KeyPath, Any]]:
    waiting: list[tuple[KeyPath, Any]] = [((), located.data)]
    while waiting:
        path, value = waiting.pop(0)
        if isinstance(value, dict) and value:
            waiting += [((*path, key), inner) for key, inner in value.items()]
        elif path:
            yield path, value


def _without_secrets(one: EditedValue) -> EditedValue:
    if "env" not in one.path.split("."):
        return one
    before, after = (value if value is None else "(set)" for value in (one.before, one.after))
    return EditedValue(path=one.path, before=before, after=after)
