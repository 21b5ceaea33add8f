"""Prompts per second of a GRPO step: TRL as Axolotl runs it, and our trainer, on the same prompts.

Needs the training environment's Python in GOD_MINER_TRAINING_PYTHON. Random Llamas on the CPU answer prompts
of 5 to 200 tokens; at every token a completion ends with a chance of about 1 in 75, at 256 tokens anyway.
Tests show that both sample the same tokens from the same random numbers, and that the same completions give
the same gradients (`test_sampling.py`, `test_trainers_prompts.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.report import Report
from benchmarks.training_python import reported

#: Steps that are measured, after one that warms up.
STEPS, QUICK_STEPS = 3, 1
#: Layers and width of the models; completions of a step, and of one of its passes.
MODELS = {"0.13 M": (2, 64), "7 M": (8, 256)}
COMPLETIONS, PASS = 64, 16
#: Seconds that a slow reward takes for a completion, twice: there are two such functions.
SLOW_S = 0.02
_COLUMNS = ("generation", "times", "step, TRL's loss", "times", "step of `steady`", "times")


def run(quick: bool) -> Report:
    steps = QUICK_STEPS if quick else STEPS
    asked = {"cases": list(_cases(steps)), "completions": COMPLETIONS, "pass": PASS}
    report = Report(
        f"GRPO steps of {COMPLETIONS} completions, prompts per second: TRL's own → ours",
        ("model", "trained", "completions of a prompt", *_COLUMNS),
    )
    report.data["cases"] = []
    for found in reported("benchmarks.grpo_step_worker", asked):
        report.data["cases"].append(found)
        if found["slow"]:
            report.notes.append(_slow_rewards(found))
        else:
            report.rows.append(_row(found))
    report.notes += _NOTES
    return report


def _cases(steps: int) -> Iterator[dict[str, Any]]:
    for model, (layers, hidden) in MODELS.items():
        for adapter in (False, True):
            for generations in (2, 8):
                shape = {"model": model, "layers": layers, "hidden": hidden, "steps": steps}
                yield {**shape, "adapter": adapter, "generations": generations, "slow": 0.0}
    shape = {"model": "0.13 M", "layers": 2, "hidden": 64, "steps": steps}
    yield {**shape, "adapter": True, "generations": 2, "slow": SLOW_S}


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    cells = []
    for side, what in (("ours", "generation"), ("ours", "step"), ("steady", "step")):
        before, after = (found["prompts"] / found[name][what] for name in ("trl", side))
        cells += [f"{before:.3g} → {after:.3g}", f"{after / before:.1f}"]
    trained = "adapter" if found["adapter"] else "everything"
    return (found["model"], trained, str(found["generations"]), *cells)


def _slow_rewards(found: dict[str, Any]) -> str:
    theirs, ours = (found[side]["wall"] / found["steps"] for side in ("trl", "ours"))
    alone = 2 * found["slow"] * COMPLETIONS
    return (
        f"Two rewards of {1000 * found['slow']:.0f} ms for a completion, {alone:.1f} s a step one after the "
        f"other: a step takes {theirs:.1f} s with TRL, {ours:.1f} s with ours (0.13 M, adapter, 2 each)."
    )


_NOTES = (
    "By CPU time of the training's process, one thread: other work on the machine counts little. Rewards by "
    "the clock: their processes work beside it.",
    "A step has the generation, the base's log-probs, the passes forward and back, the update. With TRL's "
    "loss, and with that of `steady`, which has the evaluation's KL on prompts in place of TRL's.",
    "On a CPU. On a GPU a step of a large model is bound by memory and by launching kernels: not measured.",
)
