"""Compare models on a task's rows, in the validator's metric: python -m trainer.scoring.eval --help.

`god-miner eval` starts this in the training environment. The base is scored like the others; each model is
compared with the base and with the first model row by row, as tournaments compare a challenger with the boss.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from core.domain.errors import GodMinerError
from core.domain.evaluation import normalised_rewards, reward_standing
from core.domain.records import Record, printable
from core.domain.tasks import DatasetType, GrpoDataset, TaskType
from core.domain.tournament_rules import BOSS_GATE
from core.runs.run_files import EvalTask, RunSpec
from trainer.errors import BadData, BadModel, BadReward
from trainer.inputs.model_loading import block_gpu_kernels
from trainer.inputs.text import TextTask, read_task
from trainer.inputs.tokens import load_tokenizer
from trainer.rewards.sandbox import Rewards
from trainer.rewards.source import REWARD_TABLE, write_rewards
from trainer.scoring.held_out import HeldOut, HeldOutSums

#: Places drawn at once: the generator's stream depends on it, so it is a part of the rule.
AT_ONCE = 2_000_000


class Comparison(Record):
    """Positive gaps mean that the challenger's loss is lower."""

    rows: int
    #: Rows on which the challenger is better by more than the dead zone, and on which the champion is.
    wins: int
    losses: int
    #: Of the decided rows, and its lower bound.
    win_rate: float
    win_rate_bound: float
    mean_gap: float
    mean_gap_bound: float
    #: What the mean gap's bound has to reach.
    gap_needed: float
    won: bool
    #: The chance to win on as many other rows of the same kind, and to be better by any mean gap.
    p_win: float
    p_better: float
    reason: str


def compare_models(champion: Sequence[float], challenger: Sequence[float]) -> Comparison:
    """Losses row by row, in the same order; rows that either model could not be scored on are left out."""
    pairs = [
        (loss, other_loss)
        for loss, other_loss in zip(champion, challenger, strict=True)
        if math.isfinite(loss) and math.isfinite(other_loss)
    ]
    gaps = [loss - other_loss for loss, other_loss in pairs]
    wins = sum(1 for gap in gaps if gap > BOSS_GATE.dead_zone)
    losses = sum(1 for gap in gaps if gap < -BOSS_GATE.dead_zone)
    level = abs(math.fsum(loss for loss, _ in pairs)) / max(len(pairs), 1)
    needed = max(BOSS_GATE.min_gap, BOSS_GATE.gap_share * level)
    win_rate = wins / (wins + losses) if wins + losses else 0.0
    mean_gap = math.fsum(gaps) / len(gaps) if gaps else 0.0
    rates, means = _draws(gaps) if gaps else ([0.0], [0.0])
    rate_bound, gap_bound = _bound(rates), _bound(means)
    p_win = _share_won(rates, means, win_rate - rate_bound, mean_gap - gap_bound, needed)
    if rate_bound < BOSS_GATE.win_rate:
        reason = (
            f"of {wins + losses} decided rows {wins} are won: {rate_bound:.1%} at the 1st percentile, "
            f"{BOSS_GATE.win_rate:.0%} needed"
        )
    elif gap_bound < needed:
        reason = f"the mean gap is {gap_bound:.4f} at the 1st percentile, {needed:.4f} needed"
    else:
        reason = (
            f"of {wins + losses} decided rows {wins} are won; at the 1st percentile {rate_bound:.1%} "
            f"({BOSS_GATE.win_rate:.0%} needed), and the mean gap is {gap_bound:.4f} ({needed:.4f} needed)"
        )
    return Comparison(
        rows=len(gaps),
        wins=wins,
        losses=losses,
        win_rate=win_rate,
        win_rate_bound=rate_bound,
        mean_gap=mean_gap,
        mean_gap_bound=gap_bound,
        gap_needed=needed,
        won=rate_bound >= BOSS_GATE.win_rate and gap_bound >= needed,
        p_win=p_win,
        p_better=_share_better(means),
        reason=reason,
    )


def _draws(gaps: Sequence[float]) -> tuple[Any, Any]:
    """Win rate and mean gap of draws of all rows with replacement.

    Which rows are decided is a matter of the draw as well; a draw that decides nothing is no evidence.
    """
    numpy = importlib.import_module("numpy")
    gap = numpy.asarray(gaps, dtype=numpy.float64)
    won, decided = (gap > BOSS_GATE.dead_zone).astype(float), (abs(gap) > BOSS_GATE.dead_zone).astype(float)
    generator = numpy.random.default_rng(BOSS_GATE.seed)
    size = max(1, min(BOSS_GATE.resamples, AT_ONCE // len(gap)))
    rates, means = [], []
    for start in range(0, BOSS_GATE.resamples, size):
        drawn = generator.integers(0, len(gap), size=(min(size, BOSS_GATE.resamples - start), len(gap)))
        counts = decided[drawn].sum(axis=1)
        rates.append(won[drawn].sum(axis=1) / numpy.maximum(counts, 1))
        means.append(gap[drawn].mean(axis=1))
    return numpy.concatenate(rates), numpy.concatenate(means)


def _bound(values: Any) -> float:
    return float(importlib.import_module("numpy").percentile(values, 100 * (1 - BOSS_GATE.confidence)))


def _share_won(rates: Any, means: Any, rate_margin: float, gap_margin: float, needed: float) -> float:
    """Return the share of draws, each taken as the evaluation's rows, in which the challenger would win. A
    draw's own bounds lie as far below its values as ours below ours: drawing from every draw again would
    change them little."""
    numpy = importlib.import_module("numpy")
    rates, means = numpy.asarray(rates), numpy.asarray(means)
    return float(((rates - rate_margin >= BOSS_GATE.win_rate) & (means - gap_margin >= needed)).mean())


def _share_better(means: Any) -> float:
    """Return the share of draws; equal means count half, so a model is neither better nor worse than
    itself."""
    numpy = importlib.import_module("numpy")
    means = numpy.asarray(means)
    return float((means > 0).mean() + 0.5 * (means == 0).mean())


ADAPTER = "adapter_config.json"


class ModelScore(Record):
    """One model's line of the table."""

    name: str
    metric: str
    score: float
    #: GRPO: the mean of each reward, and the KL to the base on the prompts.
    rewards: tuple[float, ...] = ()
    kl: float | None = None
    #: Against the base, and against the first model that was named.
    over_base: Comparison | None = None
    over_first: Comparison | None = None
    seconds: float


class EvalReport(Record):
    """Everything that is printed."""

    task_type: TaskType
    era: str
    rows: int
    dropped: dict[str, int]
    lower_is_better: bool
    models: tuple[ModelScore, ...]


def evaluate(
    task: EvalTask,
    base: Path,
    models: Sequence[Path],
    *,
    max_rows: int | None = None,
    allow_rewards: bool = False,
) -> EvalReport:
    """Score base and models; `GodMinerError` for data or models that cannot be scored."""
    kind = task.task_type
    if kind is None or kind.makes_rows:
        raise BadData("environment tasks are played, not scored on rows")
    if kind.generates and not allow_rewards:
        # A training's rewards run within the walls of its backend; here there are none but the child's.
        raise BadReward(
            "the task's reward code would run on this machine with your rights: look at it, and where you "
            "trust it say --allow-rewards"
        )
    tokenizer = load_tokenizer(str(base))
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="god-miner-eval-")))
        spec = _spec(task, kind, base, scratch)
        read = read_task(spec, tokenizer)
        rewards = _rewards(task.dataset_type, read, scratch, stack)
        rows = read.rows[:max_rows]
        held = HeldOut(spec, rows, tokenizer, rewards, max_prompts=len(rows))
        original = _load(base, base)
        measured = [_measure(held, "base", original, None)]
        for path in models:
            model = _load(path, base)
            measured.append(_measure(held, path.name or str(path), model, original))
            del model
    return EvalReport(
        task_type=kind,
        era=task.era,
        rows=len(held.rows),
        dropped=dict(read.dropped),
        lower_is_better=measured[0][1].lower_is_better,
        models=tuple(_lines(measured, rewards)),
    )


def _spec(task: EvalTask, kind: TaskType, base: Path, scratch: Path) -> RunSpec:
    place = str(scratch)
    return RunSpec(
        task_id="eval",
        task_type=kind,
        model_id=str(base),
        model_path=str(base),
        data_path=task.data,
        dataset=task.dataset_type,
        era=task.era,
        kl_coefficient=task.kl_coefficient,
        work_dir=place,
        submission_dir=place,
        progress_path=f"{place}/progress.jsonl",
        result_path=f"{place}/result.json",
        stop_path=f"{place}/stop",
        began_at=0.0,
        end_by=0.0,
        deadline_at=0.0,
    )


def _rewards(dataset: DatasetType, read: TextTask, scratch: Path, stack: ExitStack) -> Rewards | None:
    if not isinstance(dataset, GrpoDataset):
        return None
    write_rewards(dataset, scratch, era=read.spec.era)
    rewards = Rewards.open(scratch / REWARD_TABLE)
    stack.callback(rewards.close)
    return rewards


def _load(path: Path, base: Path) -> Any:
    """A full model, or an adapter on the base whatever base its own configuration names."""
    from trainer.inputs.state_space import use_fast_scan

    transformers, torch = importlib.import_module("transformers"), importlib.import_module("torch")
    options: dict[str, Any] = {"local_files_only": True}
    block_gpu_kernels()
    if torch.cuda.is_available():
        options |= {"dtype": torch.bfloat16, "device_map": "auto"}
    try:
        if (path / ADAPTER).is_file():
            model = transformers.AutoModelForCausalLM.from_pretrained(str(base), **options)
            use_fast_scan(model)
            return importlib.import_module("peft").PeftModel.from_pretrained(model, str(path)).eval()
        model = transformers.AutoModelForCausalLM.from_pretrained(str(path), **options).eval()
        use_fast_scan(model)
        return model
    except Exception as error:
        raise BadModel(f"{path} cannot be loaded: {type(error).__name__}: {str(error)[:300]}") from error


def _measure(held: HeldOut, name: str, model: Any, base: Any) -> tuple[str, HeldOutSums, float]:
    began = time.monotonic()
    measured = held.remember_base(model) if base is None else held.score(model, reference=base)
    return name, measured, time.monotonic() - began


def _lines(models: Sequence[tuple[str, HeldOutSums, float]], rewards: Rewards | None) -> list[ModelScore]:
    values = _standings([sums for _, sums, _ in models], rewards)
    lines = []
    for place, (name, measured, seconds) in enumerate(models):
        means, kl = measured.rewards() if rewards is not None else ((), None)
        lines.append(
            ModelScore(
                name=name,
                metric=measured.metric,
                score=values[place],
                rewards=means,
                kl=kl,
                over_base=_against(models[0][1], measured) if place > 0 else None,
                over_first=_against(models[1][1], measured) if place > 1 else None,
                seconds=round(seconds, 2),
            )
        )
    return lines


def _standings(models: Sequence[HeldOutSums], rewards: Rewards | None) -> list[float]:
    """GRPO as validators rank submissions: rewards normalised among the models, less the KL."""
    if rewards is None:
        return [model.value for model in models]
    raw = normalised_rewards([model.rewards()[0] for model in models])
    return [
        reward_standing(means, model.rewards()[1], rewards.weights)
        for means, model in zip(raw, models, strict=True)
    ]


def _against(champion: HeldOutSums, challenger: HeldOutSums) -> Comparison | None:
    places = sorted(champion.rows.keys() & challenger.rows.keys())
    if not places:
        return None
    return compare_models(
        [champion.rows[place] for place in places], [challenger.rows[place] for place in places]
    )


def comparison_table(report: EvalReport) -> str:
    """The report as a table for people."""
    better = "lower is better" if report.lower_is_better else "higher is better"
    dropped = ", ".join(f"{count} left out: {why}" for why, count in sorted(report.dropped.items()))
    rows = f"{report.rows} rows ({dropped})" if dropped else f"{report.rows} rows"
    lines = [
        f"{report.task_type}, evaluation of {report.era}, {rows}; {report.models[0].metric}, {better}",
        "",
        f"{'model':<24} {'score':>9}  {'wins : losses':>15}  {'mean gap':>9}  verdict against the base",
    ]
    for model in report.models:
        lines.append(f"{model.name[:24]:<24} {model.score:>9.4f}{_cell(model.over_base)}")
        if model.rewards:
            means = ", ".join(f"{mean:.4g}" for mean in model.rewards)
            lines.append(f"{'':<24} rewards {means}; KL {model.kl or 0.0:.4f}")
        if model.over_first is not None:
            lines.append(f"{'  against the first':<24} {'':>9}{_cell(model.over_first)}")
    return "\n".join(lines)


def _cell(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    verdict = "WINS" if comparison.won else "no win"
    numbers = f"{comparison.wins:>6} : {comparison.losses:<6}  {comparison.mean_gap:>9.4f}"
    return f"  {numbers}  {verdict}, P(win) {comparison.p_win:.0%}: {comparison.reason}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.scoring.eval", description=__doc__)
    parser.add_argument(
        "--model", action="append", default=[], type=Path, help="a model's or adapter's folder"
    )
    parser.add_argument(
        "--base", required=True, type=Path, help="the folder of the model that was trained from"
    )
    parser.add_argument("--task", required=True, type=Path, help="what to score on, see docs/evaluation.md")
    parser.add_argument("--rows", type=int, help="score on the first so many rows only")
    parser.add_argument("--allow-rewards", action="store_true", help="run the task's reward code here")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    try:
        report = evaluate(
            EvalTask.read(options.task),
            options.base,
            options.model,
            max_rows=options.rows,
            allow_rewards=options.allow_rewards,
        )
    except GodMinerError as error:
        if options.json:
            sys.stdout.write(json.dumps({"error": error.as_dict()}) + "\n")
        else:
            sys.stderr.write(printable(f"{error}\n"))
        return 1
    shown = report.model_dump_json(indent=2) if options.json else printable(comparison_table(report))
    sys.stdout.write(f"{shown}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
