"""Models side by side on a task's rows, in the validator's metric: PYTHON -m trainer.eval --help.

`god-miner eval` starts this in the training environment. The base is scored like the others; each model is
held against the base and against the first model, row by row, as tournaments compare a challenger with the
boss.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from core.errors import GodMinerError
from core.eval_task import EvalTask
from core.facts import Record, printable
from core.rewarded import normalised, standing
from core.run_files import RunSpec
from core.tasks import DatasetType, GrpoDataset, TaskType
from trainer.errors import BadData, BadModel, BadReward
from trainer.inputs.text import TextTask, read_task
from trainer.inputs.tokens import load_tokenizer
from trainer.rewards import TABLE, write_rewards
from trainer.sandbox import Rewards
from trainer.scoring.held_out import HeldOut, Measured
from trainer.scoring.paired import Comparison, compare

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


class Report(Record):
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
    most_rows: int | None = None,
    allow_rewards: bool = False,
) -> Report:
    """`GodMinerError` for data or models that cannot be scored."""
    kind = task.task_type
    if kind is None:
        raise BadData("environment tasks are played, not scored on rows")
    if kind is TaskType.GRPO and not allow_rewards:
        # A training's rewards run within the walls of its engine; here there are none but the child's.
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
        rows = read.rows[:most_rows]
        held = HeldOut(spec, rows, tokenizer, rewards, most_prompts=len(rows))
        original = _load(base, base)
        found = [_measure(held, "base", original, None)]
        for path in models:
            model = _load(path, base)
            found.append(_measure(held, path.name or str(path), model, original))
            del model
    return Report(
        task_type=kind,
        era=task.era,
        rows=len(held.rows),
        dropped=dict(read.dropped),
        lower_is_better=found[0][1].lower_is_better,
        models=tuple(_lines(found, rewards)),
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
    rewards = Rewards.open(scratch / TABLE)
    stack.callback(rewards.close)
    return rewards


def _load(path: Path, base: Path) -> Any:
    """A full model, or an adapter on the base whatever base its own configuration names."""
    transformers, torch = importlib.import_module("transformers"), importlib.import_module("torch")
    options: dict[str, Any] = {"local_files_only": True}
    if torch.cuda.is_available():
        options |= {"dtype": torch.bfloat16, "device_map": "auto"}
    try:
        if (path / ADAPTER).is_file():
            model = transformers.AutoModelForCausalLM.from_pretrained(str(base), **options)
            return importlib.import_module("peft").PeftModel.from_pretrained(model, str(path)).eval()
        return transformers.AutoModelForCausalLM.from_pretrained(str(path), **options).eval()
    except Exception as error:
        raise BadModel(f"{path} cannot be loaded: {type(error).__name__}: {str(error)[:300]}") from error


def _measure(held: HeldOut, name: str, model: Any, base: Any) -> tuple[str, Measured, float]:
    began = time.monotonic()
    measured = held.remember_base(model) if base is None else held.score(model, reference=base)
    return name, measured, time.monotonic() - began


def _lines(found: Sequence[tuple[str, Measured, float]], rewards: Rewards | None) -> list[ModelScore]:
    values = _standings([one for _, one, _ in found], rewards)
    lines = []
    for place, (name, measured, seconds) in enumerate(found):
        means, kl = measured.rewards() if rewards is not None else ((), None)
        lines.append(
            ModelScore(
                name=name,
                metric=measured.metric,
                score=values[place],
                rewards=means,
                kl=kl,
                over_base=_against(found[0][1], measured) if place > 0 else None,
                over_first=_against(found[1][1], measured) if place > 1 else None,
                seconds=round(seconds, 2),
            )
        )
    return lines


def _standings(found: Sequence[Measured], rewards: Rewards | None) -> list[float]:
    """GRPO as validators rank submissions: rewards normalised among the models, less the KL."""
    if rewards is None:
        return [one.value for one in found]
    raw = normalised([one.rewards()[0] for one in found])
    return [standing(means, one.rewards()[1], rewards.weights) for means, one in zip(raw, found, strict=True)]


def _against(champion: Measured, challenger: Measured) -> Comparison | None:
    places = sorted(champion.rows.keys() & challenger.rows.keys())
    if not places:
        return None
    return compare([champion.rows[one] for one in places], [challenger.rows[one] for one in places])


def table(report: Report) -> str:
    """For people."""
    better = "lower is better" if report.lower_is_better else "higher is better"
    gone = ", ".join(f"{count} left out: {why}" for why, count in sorted(report.dropped.items()))
    lines = [
        f"{report.task_type}, evaluation of {report.era}, {report.rows} rows{f' ({gone})' if gone else ''}; "
        f"{report.models[0].metric}, {better}",
        "",
        f"{'model':<24} {'score':>9}  {'wins : losses':>15}  {'mean gap':>9}  verdict against the base",
    ]
    for one in report.models:
        lines.append(f"{one.name[:24]:<24} {one.score:>9.4f}{_shown(one.over_base)}")
        if one.rewards:
            means = ", ".join(f"{mean:.4g}" for mean in one.rewards)
            lines.append(f"{'':<24} rewards {means}; KL {one.kl or 0.0:.4f}")
        if one.over_first is not None:
            lines.append(f"{'  against the first':<24} {'':>9}{_shown(one.over_first)}")
    return "\n".join(lines)


def _shown(found: Comparison | None) -> str:
    if found is None:
        return ""
    verdict = "WINS" if found.won else "no win"
    return f"  {found.wins:>6} : {found.losses:<6}  {found.mean_gap:>9.4f}  {verdict}: {found.reason}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.eval", description=__doc__)
    parser.add_argument(
        "--model", action="append", default=[], type=Path, help="a model's or adapter's folder"
    )
    parser.add_argument(
        "--base", required=True, type=Path, help="the folder of the model that was trained from"
    )
    parser.add_argument("--task", required=True, type=Path, help="what to score on, see docs/training.md")
    parser.add_argument("--rows", type=int, help="score on the first so many rows only")
    parser.add_argument("--allow-rewards", action="store_true", help="run the task's reward code here")
    parser.add_argument("--json", action="store_true", help="for programs")
    given = parser.parse_args(arguments)
    try:
        report = evaluate(
            EvalTask.read(given.task),
            given.base,
            given.model,
            most_rows=given.rows,
            allow_rewards=given.allow_rewards,
        )
    except GodMinerError as error:
        if given.json:
            sys.stdout.write(json.dumps({"error": error.as_dict()}) + "\n")
        else:
            sys.stderr.write(printable(f"{error}\n"))
        return 1
    shown = report.model_dump_json(indent=2) if given.json else printable(table(report))
    sys.stdout.write(f"{shown}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
