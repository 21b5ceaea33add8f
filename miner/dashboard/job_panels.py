"""The panels of a job's page: its plan beside what was measured, its curves and its log."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nicegui import ui

from core.planning.plan import TrainingPlan
from miner.api.jobs import AttemptSeries, JobSeries, LogChunk
from miner.api.plans import PlanDetails, PlannedSpeed
from miner.dashboard.charts import LineChart, Series
from miner.dashboard.daemons import DaemonTrouble
from miner.dashboard.layout import PageView
from miner.dashboard.parts import (
    Column,
    Facts,
    KeyedRows,
    Table,
    Text,
    box,
    duration,
    empty,
    number,
    panel,
    percent,
    set_visible,
    size,
)

#: Lines that are followed, and at most found.
TAIL_LINES, MAX_FOUND = 200, 300
#: A search reads so many pieces of a megabyte at most.
MAX_PIECES = 32
PIECE_BYTES = 1 << 20


class PlanPanel:
    def __init__(self) -> None:
        with box("grid"):
            with panel("Plan", "w5") as self.panel:
                self._facts = Facts()
            with panel("Trade-offs", "w4"):
                self._concessions: KeyedRows[str] = KeyedRows(box("rows"), self._make_concession)
                self._none = empty("The plan gave nothing up.")
            with panel("Memory of one GPU", "w3"):
                self._total = Text("", "small")
                self._terms: Table[tuple[str, int]] = Table(
                    "Memory by purpose",
                    [
                        Column("Purpose", _purpose),
                        Column("Planned", _planned, number=True),
                    ],
                    key=_purpose,
                )

    @staticmethod
    def _make_concession(_concession: str) -> Callable[[str], None]:
        with box("stack"):
            what, why = Text("", "strong"), Text("", "small muted")

        def show(concession: str) -> None:
            title, _, reason = concession.partition(": ")
            what.show(title)
            why.show(reason)

        return show

    def show(self, answer: PlanDetails) -> None:
        self._facts.show(_plan_facts(answer.plan, answer.expected))
        set_visible(self._none, self._concessions.show(enumerate(answer.concessions)) == 0)
        memory = answer.memory
        beside = f"measured {size(memory.measured_bytes)}" if memory.measured_bytes else "not measured yet"
        self._total.show(f"planned {size(memory.estimate_bytes)}, {beside}")
        self._terms.show(term for term in memory.terms.items() if term[1])


def _purpose(term: tuple[str, int]) -> str:
    return term[0]


def _planned(term: tuple[str, int]) -> str:
    return size(term[1])


def _plan_facts(plan: TrainingPlan, expected: PlannedSpeed | None) -> dict[str, str | None]:
    batch, adapter, optimizer, steps = plan.batch, plan.adapter, plan.optimizer, plan.steps
    rows = batch.micro * batch.accumulation * batch.world_size
    speed = expected or PlannedSpeed(step_s=0.0, samples_s=0.0, tokens_s=None, mfu=None)
    return {
        "Engine": f"{plan.engine}, {plan.parallelism}",
        "Method": f"{plan.method}, rank {adapter.rank}" if adapter else str(plan.method),
        "Batch": f"{rows} = {batch.micro} × {batch.accumulation} × {batch.world_size} GPUs",
        "Sequence": f"{plan.sequence.length:,} tokens" if plan.sequence else None,
        "Steps": f"{steps.total:,}, {number(steps.epochs, 3)} epochs",
        "Learning rate": f"{optimizer.learning_rate:.3g}, {optimizer.schedule}, {optimizer.name}",
        "Evaluated": f"every {steps.eval_every:,} steps",
        "Step": duration(speed.step_s) if speed.step_s >= 2 else None,
        "Expected": f"{number(speed.tokens_s, 3)} tokens/s" if speed.tokens_s else None,
        "Expected MFU": percent(speed.mfu) if speed.mfu else None,
        "Profile": plan.profile.name,
    }


class JobCharts:
    def __init__(self) -> None:
        with box("grid even"):
            with panel("Training loss", "w6"):
                self._loss = LineChart("Training loss over steps", nothing="No step has been reported yet.")
            with panel("Held out", "w6"):
                self._held_out = LineChart(
                    "Held-out score over steps",
                    nothing="Not evaluated yet: the first score is that of the untouched model.",
                )
            with panel("Speed", "w3"):
                self._speed = LineChart("Tokens per second", height=140, from_zero=True)
            with panel("MFU and wait for data", "w3"):
                self._shares = LineChart(
                    "MFU and wait", shows="percent", height=140, from_zero=True, legend=True
                )
            with panel("Memory against the plan", "w3"):
                self._memory = LineChart(
                    "Memory in use",
                    shows="bytes",
                    height=140,
                    from_zero=True,
                    nothing="Not measured yet, or not available here.",
                )
            with panel("Learning rate", "w3"):
                self._rate = LineChart("Learning rate", shows="rate", height=140, from_zero=True)

    def show(self, answer: JobSeries) -> None:
        # The newest attempt has the accent, whatever their number.
        attempts = list(reversed(answer.attempts))
        self._loss.show(_curves(attempts, "loss"))
        self._held_out.show(_held_out(attempts, answer.metric))
        speed = _curves(attempts, "tokens_s") or _curves(attempts, "samples_s")
        self._speed.show(speed)
        newest = attempts[:1]
        self._shares.show([*_curves(newest, "mfu", "MFU"), *_curves(newest, "wait", "wait", colour=1)])
        self._memory.show(_memory(newest))
        self._rate.show(_curves(attempts, "lr"))


def _name(attempt: AttemptSeries, name: str) -> str:
    return name or f"attempt {attempt.number}"


def _curves(
    attempts: Sequence[AttemptSeries], key: str, name: str = "", colour: int | None = None
) -> list[Series]:
    found = []
    for place, attempt in enumerate(attempts):
        steps = attempt.steps
        values: Sequence[float | None] = getattr(steps, key)
        if any(value is not None for value in values):
            shown = place if colour is None else colour
            found.append(Series(_name(attempt, name), steps.step, values, colour=shown))
    return found


def _held_out(attempts: Sequence[AttemptSeries], metric: str | None) -> list[Series]:
    """Scores of each attempt; the level is that of the untouched model."""
    found = []
    for place, attempt in enumerate(attempts):
        evals = attempt.evals
        if not evals:
            continue
        base = evals[0].score if evals[0].step == 0 else None
        found.append(
            Series(
                f"{metric or 'score'}, {_name(attempt, '')}",
                [one.step for one in evals],
                [one.score for one in evals],
                colour=place,
                points=True,
                level=base if place == 0 else None,
            )
        )
    return found


def _memory(attempts: Sequence[AttemptSeries]) -> list[Series]:
    drawn = _curves(attempts, "memory_bytes", "measured")
    estimate = attempts[0].figures.memory_estimate_bytes if attempts else None
    if drawn and estimate:
        ends = [drawn[0].x[0], drawn[0].x[-1]]
        drawn.append(Series("the plan's estimate", ends, [estimate, estimate], colour=1, dashed=True))
    return drawn


class JobLog:
    def __init__(self, view: PageView, path: str) -> None:
        self._view, self._path = view, path
        with panel("Log") as self._panel:
            with box("row"):
                self._search = ui.input("Search the whole log").props("outlined dense clearable")
                self._search.style("width:280px").on("keydown.enter", self._find)
                self._search.on("clear", self._show_tail)
                ui.button("Search", color=None, on_click=self._find).props("flat no-caps").classes("plain")
                self._back = ui.button("Back to the end", color=None, on_click=self._show_tail)
                self._back.props("flat no-caps").classes("plain quiet hidden")
                self._about = Text("", "small muted")
            # The last line stays in view: the box is filled from its end.
            with box("log tail") as self._tail:
                self._text = Text("", tag="pre")
            self._tail.props('tabindex="0" role="log" aria-label="End of the log" aria-live="off"')
            with box("log hidden") as self._found:
                self._matches = Text("", tag="pre")
            self._found.props('tabindex="0" aria-label="Lines that match"')

    def start(self) -> None:
        with self._panel:
            self._view.live(f"{self._path}/log?tail={TAIL_LINES}", LogChunk, self._show, every=2.0)

    def _show(self, answer: LogChunk) -> None:
        self._text.show(answer.text or "(nothing is written yet)")
        if "hidden" in self._found.classes:
            ended = ", which has ended" if answer.ended else ""
            self._about.show(f"the last {TAIL_LINES} lines of attempt {answer.attempt}{ended}")

    def _show_tail(self) -> None:
        self._search.value = ""
        set_visible(self._tail, True)
        set_visible(self._found, False)
        set_visible(self._back, False)

    async def _find(self) -> None:
        wanted = str(self._search.value or "").strip()
        if not wanted:
            self._show_tail()
            return
        try:
            found, lines, whole = await self._matching(wanted.lower())
        except DaemonTrouble as error:
            self._about.show(str(error))
            return
        self._matches.show("\n".join(found) or "(no line has it)")
        most = f", the last {MAX_FOUND} are shown" if lines > MAX_FOUND else ""
        self._about.show(
            f"{lines} lines have it{most}" + ("" if whole else "; the log is longer than is searched")
        )
        set_visible(self._tail, False)
        set_visible(self._found, True)
        set_visible(self._back, True)

    async def _matching(self, wanted: str) -> tuple[list[str], int, bool]:
        """The last lines with this text, how many there are, and whether all of the log was read."""
        found: list[str] = []
        count, number, rest, start = 0, 0, "", ""
        for _ in range(MAX_PIECES):
            piece = await self._view.get(f"{self._path}/log?from={start}&limit={PIECE_BYTES}", LogChunk)
            lines = (rest + piece.text).split("\n")
            rest = lines.pop()
            for line in lines:
                number += 1
                if wanted in line.lower():
                    count += 1
                    found.append(f"{number:>6}  {line}")
            del found[:-MAX_FOUND]
            if piece.next == start or not piece.text:
                if wanted in rest.lower() and rest:
                    count += 1
                    found.append(f"{number + 1:>6}  {rest}")
                return found, count, True
            start = piece.next
        return found, count, False
