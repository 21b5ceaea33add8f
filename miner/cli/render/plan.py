"""A plan for people: on the terminal, side by side with another one, and as the files that an attempt
would get.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from core.domain.choices import Engine
from core.domain.decisions import IDLE_HOST
from core.domain.errors import ConfigError
from core.domain.units import show_bytes, show_params, show_seconds
from core.planning.plan import TrainingPlan
from core.recipes.base import RenderedRun
from core.recipes.dry_run import example_inputs, flatten, plan_differences, render_example
from core.recipes.launch import run_script
from core.recipes.render import render
from miner.cli.render.terminal import plain_table


def write_plan(plan: TrainingPlan, folder: Path) -> list[Path]:
    """Write everything that an attempt would get, and what starts it; only the plan if it is refused."""
    files = {"plan.json": plan.to_json() + "\n"}
    if plan.verdict.feasible:
        inputs = example_inputs(plan.task.task_type, plan.model.model_id)
        made = render(plan, inputs)
        files |= {**made.files, "run.sh": run_script(made)}
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in files.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def template_changes(made: RenderedRun) -> list[tuple[str, Any, Any]]:
    """Return what differs from the engine's template: (key, template, plan)."""
    base, config = flatten(made.base), flatten(made.config)
    keys = [*base, *(key for key in config if key not in base)]
    return [(key, base.get(key), config.get(key)) for key in keys if base.get(key) != config.get(key)]


#: Cells of a bar on a terminal of 80 columns.
BAR = 20
Page = Text | Table


def plan_pages(plan: TrainingPlan, on_fewer: Sequence[TrainingPlan] = ()) -> Iterator[Page]:
    """Yield the pages of a plan, top to bottom. `on_fewer`: the same task on fewer GPUs."""
    yield _heading(plan)
    yield _numbers(plan)
    if on_fewer:
        yield Text("\nOn fewer GPUs", style="bold")
        yield _counts_table((plan, *on_fewer))
    yield Text(f"\nMemory of one GPU, at its worst: {plan.memory.phase}", style="bold")
    yield _memory_table(plan)
    yield Text("\nTimeline", style="bold")
    yield _timeline_table(plan)
    if plan.concessions:
        yield Text("\nGave way", style="bold")
        yield Text("\n".join(f"  {one}" for one in plan.concessions))
    if plan.notes:
        yield Text("\nNotes", style="bold")
        yield Text("\n".join(f"  {note}" for note in plan.notes))
    if plan.verdict.feasible:
        yield from _configuration_pages(plan)


def comparison_pages(before: TrainingPlan, after: TrainingPlan) -> Iterator[Page]:
    """Yield what changes from one plan to another."""
    yield _heading(after)
    changed = plan_differences(before, after)
    if not changed:
        yield Text(f"nothing changes against profile {before.profile.name}")
        return
    shown = {"configuration": _value, "memory": show_bytes, "time": show_seconds}
    table = plain_table(
        "", "what", f"before ({before.profile.name})", f"now ({after.profile.name})", header_style="dim"
    )
    for part, what, there, here in changed:
        table.add_row(part, what, shown[part](there), shown[part](here))
    yield table
    for verdict in (before.verdict, after.verdict):
        if not verdict.feasible:
            yield Text(f"refused ({verdict.code}): {verdict.reason}", style="red")


def _heading(plan: TrainingPlan) -> Text:
    task = plan.task.task_type.value + (f" ({plan.task.image_type.value})" if plan.task.image_type else "")
    first = (
        f"{task}, {plan.model.model_id}, {show_params(plan.model.params_total)} parameters, "
        f"{plan.task.hours:g} h, {plan.data.rows:,} rows, profile {plan.profile.name}\n"
    )
    verdict = plan.verdict
    if verdict.feasible:
        answer = Text("feasible", style="green bold")
        answer.append(f": {plan.gpus} of {plan.available}, ends {show_seconds(plan.time.slack_s)} early", "")
    else:
        answer = Text(f"refused ({verdict.code})", style="red bold")
        answer.append(f": {verdict.reason}", "")
    return Text(first).append_text(answer).append("\n")


def _numbers(plan: TrainingPlan) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("what", "value", "why"):
        style = "dim" if column == "why" else None
        table.add_column(column, overflow="fold", style=style, no_wrap=column == "what")
    for path, value in _main_numbers(plan):
        table.add_row(path, value, _reasons(plan, path))
    return table


def _counts_table(plans: Sequence[TrainingPlan]) -> Table:
    """Return a table of GPU counts; worth is a share of all that the profile asks for (docs/planning.md)."""
    table = plain_table("gpus", "epochs", "steps", "time", "GPU-hours", "worth", header_style="dim")
    for plan in plans:
        hours = plan.time.total_s / 3600
        table.add_row(
            f"{plan.gpus.count}",
            f"{plan.steps.epochs:.3g}",
            f"{plan.steps.total:,}",
            show_seconds(plan.time.total_s),
            f"{plan.gpus.count * hours:.1f}",
            f"{IDLE_HOST.net(plan.steps.share, plan.gpus.count, hours):.0%}",
        )
    return table


def _reasons(plan: TrainingPlan, path: str) -> str:
    """Return the reason for a value; with its source if it comes from a profile."""
    reason = plan.reasons.get(path)
    if reason is None:
        return ""
    return reason.text if reason.source in ("planner", "default") else f"{reason.text}, {reason.source}"


def _main_numbers(plan: TrainingPlan) -> Iterator[tuple[str, str]]:
    batch, steps, precision = plan.batch, plan.steps, plan.precision
    yield "gpus", str(plan.gpus)
    if plan.gpus.nodes > 1:
        yield "nodes", f"{plan.gpus.nodes}, {plan.gpus.per_node} GPUs each"
    yield "parallelism", plan.parallelism.value
    yield "engine", plan.engine.value
    yield "method", plan.method.value
    if plan.adapter:
        yield "adapter.rank", f"{plan.adapter.rank} ({show_params(plan.adapter.params)} parameters)"
        yield "adapter.alpha", f"{plan.adapter.alpha:g}"
    yield "batch.micro", str(batch.micro)
    yield "batch.accumulation", f"{batch.accumulation} (effective {batch.effective})"
    if plan.image is None:
        packed = "packed" if plan.sequence.packing else "not packed"
        yield "sequence.length", f"{plan.sequence.length} ({packed})"
    else:
        yield "image.resolutions", ", ".join(map(str, plan.image.resolutions))
        if (recipe := plan.image.recipe) is not None:
            yield "image.twin", "yes" if plan.image.twin else "no"
            yield "held out", f"{recipe.held_out_share:.0%}, at least {recipe.held_out_least}"
    yield "optimizer.name", plan.optimizer.name.value
    yield "optimizer.learning_rate", f"{plan.optimizer.learning_rate:g}"
    yield "optimizer.schedule", plan.optimizer.schedule.value
    yield "optimizer.warmup_steps", str(plan.optimizer.warmup_steps)
    yield "steps.epochs", f"{steps.epochs:.3g}"
    if (seen := plan.prompt_coverage) is not None:
        yield "prompts seen", f"{seen:.0%} of {plan.data.rows - steps.eval_rows:,}"
    yield "steps.total", f"{steps.total:,}"
    if plan.engine is not Engine.PICTURES:
        yield "steps.eval_every", f"{steps.eval_every} ({steps.eval_rows} rows)"
    if plan.goal is not None:
        yield "goal", str(plan.goal)
    if plan.engine is not Engine.PICTURES:
        yield "steps.save_every", f"{steps.save_every} (keeps {steps.keep_checkpoints})"
    yield "precision.gradient_checkpointing", "on" if precision.gradient_checkpointing else "off"
    if plan.image is None:
        yield "precision.attention", precision.attention.value


def _memory_table(plan: TrainingPlan) -> Table:
    """Return memory by term, as bars against the budget."""
    memory = plan.memory
    table = plain_table("term", "GB", "", "how", right=("GB",), header_style="dim")
    for term in sorted(memory.terms, key=attrgetter("bytes"), reverse=True):
        table.add_row(f"  {term.name}", _gb(term.bytes), _bar(term.bytes, memory.budget_bytes), term.why)
    table.add_row("  total", _gb(memory.total_bytes), _bar(memory.total_bytes, memory.budget_bytes), "")
    table.add_row("  budget", _gb(memory.budget_bytes), "", f"of {_gb(memory.capacity_bytes)} GB on the GPU")
    others = ", ".join(f"{peak.phase} {_gb(peak.bytes)}" for peak in memory.other_peaks)
    if others:
        table.add_row("  other moments", "", "", others)
    return table


def _timeline_table(plan: TrainingPlan) -> Table:
    """Return the timeline from now to the deadline: when each phase begins and how long it takes."""
    time, at = plan.time, 0.0
    table = plain_table("phase", "from", "for", "", "how", right=("from", "for"), header_style="dim")
    for phase in time.phases:
        table.add_row(
            f"  {phase.name}",
            show_seconds(at),
            show_seconds(phase.seconds),
            _span(at, phase.seconds, time.deadline_s),
            phase.why,
        )
        at += phase.seconds
    table.add_row("  free", show_seconds(at), show_seconds(time.slack_s), "", "")
    reserve = time.deadline_s - time.reserve_s
    table.add_row("  reserve", show_seconds(reserve), show_seconds(time.reserve_s), "", "kept free")
    table.add_row("  deadline", show_seconds(time.deadline_s), "", "", _speed(plan))
    return table


def _speed(plan: TrainingPlan) -> str:
    rate = plan.time.throughput
    speed = f"{rate:.2g} pictures/s" if plan.image else f"{rate:,.0f} tokens/s"
    source = "measured" if plan.time.measured else plan.time.prior
    return f"{speed}, {plan.time.utilisation:.0%} of peak ({source})"


def _configuration_pages(plan: TrainingPlan) -> Iterator[Page]:
    """Yield what the engine gets, compared with its template."""
    try:
        made = render_example(plan)
    except ConfigError as error:
        yield Text(f"\nThe configuration would not run: {error}", style="red bold")
        return
    differing = template_changes(made)
    if plan.engine is Engine.NATIVE and not differing:
        yield Text("\nThe native trainer reads the plan itself", style="bold")
        return
    if plan.engine is Engine.PICTURES and not differing:
        yield Text("\nThe picture trainer's recipe is the family's own", style="bold")
        return
    yield Text(f"\n{plan.engine.value} configuration, against the template", style="bold")
    table = plain_table("key", "template", "plan", header_style="dim")
    for key, there, here in differing:
        table.add_row(f"  {key}", _value(there), _value(here))
    yield table
    if made.notes:
        yield Text("\n".join(f"  {note}" for note in made.notes), style="dim")


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _gb(count: float) -> str:
    return show_bytes(count) if count < 5e7 else f"{count / 1e9:.1f}"


def _bar(part: float, whole: float) -> str:
    cells = min(round(part / whole * BAR), BAR) if whole else 0
    return "█" * cells or "▏"


def _span(start: float, length: float, whole: float) -> str:
    if whole <= 0:
        return ""
    before = min(round(start / whole * BAR), BAR - 1)
    cells = max(min(round(length / whole * BAR), BAR - before), 1)
    return " " * before + "█" * cells
