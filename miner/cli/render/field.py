"""Pages of the field: each task's entries beside our plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from miner.tournament.field.entries import FieldEntry, FieldTask, OwnResults
from miner.tournament.field.recipes import FieldRecipe

_COLUMNS = ("entry", "#", "steps", "b×a", "LR", "schedule", "r/α", "drop", "loss", "EMA", "Σ LR")
_LEFT = frozenset({"entry", "schedule", "loss"})
_CUT = {
    "constant_with_warmup": "constant+w",
    "cosine_with_min_lr": "cosine→",
    "cosine_with_restarts": "cosine↺",
}


def field_pages(tasks: Sequence[FieldTask], ranks: int) -> Iterator[RenderableType]:
    for task in tasks:
        yield Text(_heading(task), style="bold")
        yield from _task_pages(task, ranks)
        yield ""


def _heading(task: FieldTask) -> str:
    facts = [task.family]
    if task.task.task_type and task.task.task_type != task.family:
        facts.append(task.task.task_type)
    facts.append(task.task.task_id[:8] if task.task.task_type else task.task.task_id)
    if task.task.hours is not None:
        facts.append(f"{task.task.hours:g} h")
    if task.pictures is not None:
        facts.append(f"n {task.pictures} training pictures")
    return "  ".join(facts)


def _task_pages(task: FieldTask, ranks: int) -> Iterator[RenderableType]:
    shown = [one for one in task.entries if one.entry.rank is None or one.entry.rank <= ranks]
    shown = [one for one in shown if one.recipe != FieldRecipe() or one.entry.rank is not None]
    ours, why = task.own_plan()
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    for name in _COLUMNS:
        table.add_column(name, no_wrap=True, justify="left" if name in _LEFT else "right")
    for one in shown:
        rank = str(one.entry.rank) if one.entry.rank is not None else "–"
        table.add_row(one.entry.hotkey[:8], rank, *_cells(one.recipe))
    if ours is not None:
        table.add_row("our plan", "", *_cells(ours), style="bold")
    yield table
    yield from (Text(line, style="dim") for line in _remarks(shown, ours, why))


def _cells(recipe: FieldRecipe) -> tuple[str, ...]:
    shipped = recipe.shipped or recipe.steps
    of = f"/{recipe.steps}" if shipped and recipe.steps and recipe.steps != shipped else ""
    alpha = f"/{recipe.lora_alpha:g}" if recipe.lora_alpha is not None else ""
    return (
        f"{shipped}{of}" if shipped else "–",
        f"{recipe.batch}×{recipe.accumulation or 1}" if recipe.batch else "–",
        _number(recipe.lr),
        _CUT.get(recipe.schedule or "", recipe.schedule or "–")[:10],
        f"{recipe.lora_rank}{alpha}" if recipe.lora_rank else "–",
        f"{recipe.dropout:g}" if recipe.dropout is not None else "–",
        (recipe.loss or "–")[:6],
        ("–" if recipe.ema is None else "off" if recipe.ema == 0 else f"{recipe.ema:g}"),
        _number(recipe.rate_sum),
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"


def _remarks(shown: Sequence[FieldEntry], ours: FieldRecipe | None, why: str) -> Iterator[str]:
    for one in shown:
        for note in one.recipe.notes[:3]:
            yield f"{one.entry.hotkey[:8]}: {note}"
        if one.recipe == FieldRecipe():
            reason = f" ({one.entry.why})" if one.entry.why else ""
            yield f"{one.entry.hotkey[:8]}: none of its files says what it trained with{reason}"
    if ours is None:
        yield f"no plan of ours: {why}"
        return
    best = next((one.recipe for one in shown if one.entry.rank == 1), None)
    if best is not None and best.rate_sum and ours.rate_sum:
        times = ours.rate_sum / best.rate_sum
        yield f"our sum of rates is {times:.2g} times that of rank 1"


def field_data(tasks: Sequence[FieldTask], ranks: int, own: OwnResults | None) -> dict[str, object]:
    """The same for programs."""
    rows = []
    for task in tasks:
        ours, why = task.own_plan()
        entries = [one for one in task.entries if one.entry.rank is None or one.entry.rank <= ranks]
        rows.append(
            {
                "task": task.task.task_id,
                "task_type": task.task.task_type,
                "family": task.family,
                "model": task.task.model_id,
                "hours": task.task.hours,
                "pictures": task.pictures,
                "entries": [
                    {"hotkey": one.entry.hotkey, "rank": one.entry.rank, "loss": one.entry.loss}
                    | _recipe_data(one.recipe)
                    for one in entries
                ],
                "our_plan": None if ours is None else _recipe_data(ours)["recipe"],
                "no_plan_because": why or None,
            }
        )
    results = None if own is None else asdict(own)
    return {"tasks": rows, "own_results": results}


def _recipe_data(recipe: FieldRecipe) -> dict[str, object]:
    return {"recipe": {**asdict(recipe), "rate_sum": recipe.rate_sum}}
