"""The yardstick of text training: ours, the rules that won a tournament, and upstream, in equal time.

Needs the training environment's Python in GOD_MINER_TRAINING_PYTHON. Little models that have read a made-up
language are trained on six types of tasks with several kinds of data (`data.py`): by
`trainer.text`, which plans for itself with the profile `steady`; by the rules of the text trainer that won in
June 2026 (`winner_rules.py`); by upstream's default, and by that without its limit of ten steps. All are
scored on rows that none has seen, by the validator's metric, and compared row by row as in a boss round. Two
trainings by the same rules differ by some per cent: ours and the winner's are trained twice, and each is
compared with each.

    python -m benchmarks text_rules [--cell 'dpo-*'] [--variant no_search] [--quick]

Results go to `results/text_rules.jsonl` one by one; what is there already and still holds is not run again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.report import RESULTS, Report
from benchmarks.text_rules.cells import (
    CHOOSING_SEEDS,
    FAMILIES,
    QUICK,
    SEEDS,
    TYPES,
    Cell,
    all_cells,
    chosen_cells,
    shares,
)
from benchmarks.training_python import reported

#: CPU seconds of training for each side, evaluations and searches included.
SECONDS, QUICK_SECONDS = 40.0, 12.0
#: Of ours and of the winner's rules.
TRAININGS = 2
#: Cells at a time.
WORKERS = 2
SIDES = ("base", "upstream", "uncapped", "winner", "ours")
#: Techniques of ours, on and off: laid over the profile. They run on seeds that the table does not score.
VARIANTS = {
    "no_search": "targets: {lr_search_share: 0}",
    "no_search_rate_2": "targets: {lr_search_share: 0, learning_rate: x2}",
    "no_search_rate_4": "targets: {lr_search_share: 0, learning_rate: x4}",
    "beta2_95": "targets: {adam_beta2: 0.95}",
    "beta2_98": "targets: {adam_beta2: 0.98}",
    "no_least_steps": "targets: {least_steps: null}",
    "alpha_128": "targets: {lora_alpha: 128}",
    "cosine_floor_10": "targets: {lr_scheduler: cosine, min_lr_ratio: 0.1}",
    "cosine_floor_25": "targets: {lr_scheduler: cosine, min_lr_ratio: 0.25}",
    "held_out_1": "targets: {val_set_size: 0.01}",
    "held_out_6": "targets: {val_set_size: 0.06}",
    "never_early": "targets: {early_stopping_patience: null}",
    "epochs_4": "limits: {max_epochs: 4}",
    "epochs_8": "limits: {max_epochs: 8}",
    "held_out_200": "targets: {val_rows_min: 200}",
    "search_10": "targets: {lr_search_share: 0.1}",
    "rate_1.5": "targets: {learning_rate: x1.5}",
    "rate_2": "targets: {learning_rate: x2}",
    "rate_0.67": "targets: {learning_rate: x0.67}",
    "grpo_2": "targets: {grpo_generations: 2}",
    "grpo_4": "targets: {grpo_generations: 4}",
    "trl_kl": "targets: {grpo_prompt_kl: 0, grpo_beta: 0.04}",
    "trl_kl_0.5": "targets: {grpo_prompt_kl: 0, grpo_beta: 0.5}",
    "no_kl": "targets: {grpo_prompt_kl: 0}",
    "prompt_kl_1": "targets: {grpo_prompt_kl: 1}",
    "both_kl": "targets: {grpo_beta: 0.04}",
    "grpo_128": "targets: {effective_batch_size: 128}",
}
#: What the issue asks for.
SURELY_BETTER, SURELY_WORSE = 0.9, 0.1
BETTER_BAR, WORSE_BAR, LIFTED_BAR = 0.6, 0.1, 0.95
#: Differences are in per cent of a loss, but of no less than this: halving a tiny loss would rule an average.
LEAST_LEVEL = 0.5
#: What a cell counts that failed: as surely worse.
LOST = (0.0, -100.0)


def run(quick: bool, cells: Sequence[str] = (), variants: Sequence[str] = ()) -> Report:
    unknown = sorted(set(variants) - set(VARIANTS))
    if unknown:
        raise SystemExit(f"no variant is called {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    asked = asked_cells(quick, cells, variants)
    sides = ["base", "winner", "ours", *(f"ours:{name}" for name in variants)] if variants else list(SIDES)
    seconds = QUICK_SECONDS if quick else SECONDS
    trainings = 1 if quick else TRAININGS
    found = list(_results(asked, sides, seconds, trainings, {name: VARIANTS[name] for name in variants}))
    order = {cell.name: place for place, cell in enumerate(asked)}
    found.sort(key=lambda result: order[result["cell"]])
    results = [result for result in found if "error" not in result]
    failed = [result for result in found if "error" in result]
    report = variants_report(results, variants, seconds) if variants else report_of(results, seconds, failed)
    report.notes += [f"FAILED: {one['cell']}: {one['error'][-400:]}" for one in failed]
    return report


def asked_cells(quick: bool, patterns: Sequence[str], variants: Sequence[str]) -> list[Cell]:
    """Those of the table or, for techniques, some of those that are not in it."""
    if variants:
        return chosen_cells(patterns or (f"*-{CHOOSING_SEEDS[0]}",), CHOOSING_SEEDS)
    return chosen_cells(patterns or (QUICK if quick else ()))


def _results(
    cells: Sequence[Cell], sides: list[str], seconds: float, trainings: int, variants: dict[str, str]
) -> Iterator[dict[str, Any]]:
    def work(part: list[Cell]) -> list[dict[str, Any]]:
        asked = {
            "cells": [cell.name for cell in part],
            "sides": sides,
            "seconds": seconds,
            "trainings": trainings,
            "variants": variants,
            "records": str(RESULTS / "text_rules.jsonl"),
        }
        return list(reported("benchmarks.text_rules.worker", asked)) if part else []

    with ThreadPoolExecutor(WORKERS) as pool:
        for found in pool.map(work, shares(cells, WORKERS)):
            yield from found


# — what is told


class Verdict(NamedTuple):
    """Result of one side against another over some cells."""

    cells: int
    better: int
    worse: int
    #: In per cent of the other's score.
    mean: float

    @classmethod
    def of(cls, gaps: Iterable[tuple[float, float]]) -> Verdict:
        """Pairs of the chance to be better and the difference in per cent."""
        pairs = list(gaps)
        better = sum(chance >= SURELY_BETTER for chance, _ in pairs)
        worse = sum(chance <= SURELY_WORSE for chance, _ in pairs)
        return cls(len(pairs), better, worse, fmean(gap for _, gap in pairs) if pairs else 0.0)

    def __str__(self) -> str:
        return (
            f"better in {self.better}, worse in {self.worse} of {self.cells}, {self.mean:+.1f} % on average"
        )


def gap_of(result: dict[str, Any], side: str, rival: str) -> tuple[float, float]:
    """The chance to be better, and the difference in per cent of the rival's loss (rewards: of 1)."""
    found = result["against"][side][rival]
    level = 1.0 if Cell.of(result["cell"]).task.generates else abs(result["scores"][rival])
    return found["p_better"], 100 * found["mean_gap"] / max(level, LEAST_LEVEL)


def report_of(results: list[dict[str, Any]], seconds: float, failed: Sequence[dict[str, Any]] = ()) -> Report:
    report = Report(
        f"Held-out losses after at most {seconds:g} CPU seconds of training",
        ("cell", "data", *SIDES, "steps (lifted, winner, ours)", "P(ours beats winner)", "gap", "verdict"),
    )
    report.data["results"] = results
    by_type: dict[str, list[tuple[float, float]]] = defaultdict(list)
    lifted = []
    for result in results:
        chance, gap = gap_of(result, "ours", "winner")
        by_type[Cell.of(result["cell"]).type].append((chance, gap))
        lifted.append(gap_of(result, "ours", "uncapped"))
        report.rows.append(_row(result, chance, gap))
    for result in failed:
        by_type[Cell.of(result["cell"]).type].append(LOST)
        lifted.append(LOST)
    report.notes += verdicts(by_type, lifted)
    report.notes += [once(results, failed), *NOTES]
    return report


def verdicts(
    by_type: dict[str, list[tuple[float, float]]], lifted: Sequence[tuple[float, float]]
) -> list[str]:
    """Against the bars."""
    whole = Verdict.of(pair for pairs in by_type.values() for pair in pairs)
    missing = len(all_cells()) - whole.cells
    others = Verdict.of(lifted)
    types = {name: Verdict.of(pairs) for name, pairs in by_type.items()}
    behind = [name for name, verdict in types.items() if verdict.mean <= 0]
    enough = whole.better >= BETTER_BAR * whole.cells
    few = whole.worse <= WORSE_BAR * whole.cells
    share = others.better >= LIFTED_BAR * others.cells
    return [
        f"Against the winner's rules: {whole}.",
        *(f"  {name}: {verdict}" for name, verdict in types.items()),
        f"Against the lifted default: {others}.",
        f"Better than the winner's in {BETTER_BAR:.0%} of cells at P >= {SURELY_BETTER}: {_said(enough)}; "
        f"worse in {WORSE_BAR:.0%} at most: {_said(few)}; every type ahead: {_said(not behind)}"
        f"{' (' + ', '.join(behind) + ')' if behind else ''}; better than the lifted default in "
        f"{LIFTED_BAR:.0%}: {_said(share)}.",
        *([f"{missing} cells are missing: this is not the table yet."] if missing else []),
    ]


def once(results: Sequence[dict[str, Any]], failed: Sequence[dict[str, Any]]) -> str:
    """Verdicts of a table with one training for each side, averaged over all such tables."""
    chances = [result["against"]["ours"]["winner"]["chances"] for result in results]
    better = sum(fmean(chance >= SURELY_BETTER for chance in each) for each in chances)
    worse = len(failed) + sum(fmean(chance <= SURELY_WORSE for chance in each) for each in chances)
    return (
        "With one training of each side, on average over the pairs: "
        f"better in {better:.1f}, worse in {worse:.1f} of {len(results) + len(failed)}."
    )


def _said(held: bool) -> str:
    return "yes" if held else "NO"


def _row(result: dict[str, Any], chance: float, gap: float) -> tuple[str, ...]:
    cell, told = Cell.of(result["cell"]), result["told"]
    sides = ("uncapped", "winner", "ours")
    steps = ", ".join(f"{fmean(each['steps'] for each in told[side]):,.0f}" for side in sides)
    verdict = "better" if chance >= SURELY_BETTER else "worse" if chance <= SURELY_WORSE else "-"
    kind = f"{cell.kind} ({cell.alteration})" if cell.alteration else cell.kind
    scores = (f"{result['scores'][side]:.4f}" for side in SIDES)
    return (cell.name, kind, *scores, steps, f"{chance:.2f}", f"{gap:+.1f} %", verdict)


def variants_report(results: list[dict[str, Any]], variants: Sequence[str], seconds: float) -> Report:
    report = Report(
        f"Techniques against ours as it is, after {seconds:g} CPU seconds on {len(results)} cells",
        ("variant", "changes", "mean difference", "better", "worse", *TYPES),
    )
    report.data["results"] = results
    report.notes += verdicts_of_choosing(results)
    for name in variants:
        gaps = [(result["cell"], gap_of(result, f"ours:{name}", "ours")) for result in results]
        verdict = Verdict.of(gap for _, gap in gaps)
        types = [Verdict.of(gap for cell, gap in gaps if Cell.of(cell).type == kind) for kind in TYPES]
        report.rows.append(
            (
                name,
                VARIANTS[name],
                f"{verdict.mean:+.2f} %",
                f"{verdict.better}/{verdict.cells}",
                f"{verdict.worse}/{verdict.cells}",
                *(f"{each.mean:+.2f}" if each.cells else "-" for each in types),
            )
        )
    return report


def verdicts_of_choosing(results: list[dict[str, Any]]) -> list[str]:
    """Ours as it is against the winner's rules, on the cells that techniques are chosen on."""
    gaps = {result["cell"]: gap_of(result, "ours", "winner") for result in results}
    each = ", ".join(f"{cell} {gap:+.1f} % (P {chance:.2f})" for cell, (chance, gap) in gaps.items())
    return [f"Ours as it is against the winner's rules here: {Verdict.of(gaps.values())}. {each}."]


NOTES = [
    "Losses of instruct, chat and continuations, for kl with the KL. DPO: ln 2 = 0.6931 has learned nothing. "
    "GRPO: the validators' normalised rewards less half of the KL to the base, among the sides of its line, "
    "with a minus, so that less is better everywhere. "
    f"Ours and the winner's: means of {TRAININGS} trainings with other random numbers (--quick: one); P is "
    "the chance that one of ours is better than one of the winner's, on rows like these. "
    f"Seeds {', '.join(map(str, SEEDS))}; "
    + ", ".join(f"{family} is trained {method.value}" for family, method in FAMILIES.items())
    + ", on every side.",
]
