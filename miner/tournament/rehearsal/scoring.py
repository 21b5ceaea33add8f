"""Load and score what a rehearsal would upload, inside the image that trained it, without a network.

Texts by `trainer.scoring.eval`: the validator's loss row by row, against the base and against another folder,
such as the champion's, with the bounds of the boss round and the chance to win. Pictures: see
`picture_scoring`; environment tasks: `game_scoring`.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from core.domain.errors import GodMinerError
from core.domain.evaluation import Era
from core.domain.tasks import TaskType
from core.submission.check import BaseModelRef
from core.submission.faults import BadSubmission, FaultKind
from core.submission.prepare import check_submission
from miner.backends.docker.client import DockerClient
from miner.tournament.rehearsal.container import run_helper
from miner.tournament.rules import LEAST_GAIN, TournamentTask

#: Where everything lies in the container; `run_helper` mounts the folder here.
INSIDE = Path("/rehearsal")
OURS, AGAINST, _ROWS, BASE = "/ours", "/against", "/rows.json", "/base"
_NO_SCORER = re.compile(r"No module named '?trainer\b|python: not found")
REPORT, _TASK, _ERRORS = "score.json", "task.json", "errors.txt"


class CannotScore(GodMinerError):
    """The submission could not be loaded or scored; the scorer's own words."""

    code = "cannot_score"


class NoScorer(GodMinerError):
    """An image of somebody else's trainer: it has none of our scorers."""

    code = "no_scorer"

    def __init__(self) -> None:
        super().__init__("the image has no scorer of ours: it is only checked what evaluators load")


@dataclass(frozen=True)
class FolderScore:
    """One submission beside its base and, where one was named, another submission."""

    metric: str
    base: float
    ours: float
    lower_is_better: bool = True
    against: float | None = None
    rows: int | None = None
    #: `Comparison` of the trainer's scorer, by its fields. None: not compared row by row.
    over_base: Mapping[str, Any] | None = None
    over_against: Mapping[str, Any] | None = None
    #: Whether the challenge would be won, where another submission was named.
    wins: bool | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())

    @property
    def beats_base(self) -> bool:
        return self.ours < self.base if self.lower_is_better else self.ours > self.base

    @property
    def p_win(self) -> float | None:
        found = self.over_against or self.over_base
        # The scorer is that of the rehearsed commit, which may be older.
        return None if found is None or "p_win" not in found else float(found["p_win"])

    def summary(self) -> str:
        """Lines of at most 80 columns, but for the reason."""
        better = "lower" if self.lower_is_better else "higher"
        lines = [f"{self.metric} ({better} is better): base {self.base:.4f}, ours {self.ours:.4f}"]
        for name, found in (("base", self.over_base), ("other folder", self.over_against)):
            if found is not None:
                verdict = "would win" if found["won"] else "would not win"
                chance = f", P(win) {found['p_win']:.0%}" if "p_win" in found else ""
                lines.append(f"against the {name}: {verdict}{chance}: {found['reason']}")
        if self.against is not None:
            lines.append(f"the other folder: {self.against:.4f}")
        if self.over_against is None and self.wins is not None:
            lines.append(f"against the other folder: {'would win' if self.wins else 'would not win'}")
        return "\n".join([*lines, *self.notes])

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "beats_base": self.beats_base, "p_win": self.p_win}


def load_problems(repository: Path, task: TournamentTask, base: Path, model_id: str) -> tuple[str, ...]:
    """What evaluators would reject in the repository: another architecture, other sizes, weights that are not
    finite, missing parts. Whether a library loads it shows `score_text`."""
    try:
        reference = BaseModelRef(model_id, base if base.is_dir() else None, task.image_type)
        checked = check_submission(repository, reference, _task_type(task), as_is=True)
    except BadSubmission as bad:
        return (str(bad),)
    # A card is read by nobody who scores, and what lies beside the model is only uploaded.
    harmless = (FaultKind.BAD_CARD, FaultKind.STRAY)
    return tuple(str(fault) for fault in checked.faults if fault.kind not in harmless)


def score_text(
    client: DockerClient,
    image: str,
    task: TournamentTask,
    *,
    folder: Path,
    base: Path,
    rows: Path,
    repository: Path,
    against: Path | None = None,
    max_rows: int | None = None,
    gpus: Sequence[str] = (),
) -> FolderScore:
    """Score a text submission as the evaluator finds it. `folder` is a scratch directory; `rows` were not
    trained on. `CannotScore` with the scorer's words: a submission that does not load is one."""
    began = time.monotonic()
    asked = {
        "dataset_type": dict(task.dataset),
        "data": _ROWS,
        "era": Era.TOURNAMENTS,
        "kl_coefficient": _kl_coefficient(task),
    }
    write_json(folder / _TASK, asked)
    seen = {rows: _ROWS, base: BASE, repository: OURS}
    # The one that is named first is what the others are compared with.
    models = [*([AGAINST] if against else []), OURS]
    if against is not None:
        seen[against] = AGAINST
    arguments = ["--task", str(INSIDE / _TASK), "--base", BASE, "--json", "--allow-rewards"]
    for model in models:
        arguments += ["--model", model]
    arguments += ["--rows", str(max_rows)] if max_rows else []
    command = shlex.join(["python", "-m", "trainer.scoring.eval", *arguments])
    report = run_scorer(client, image, f"{command} > {INSIDE / REPORT}", folder, seen, gpus)
    with readable_report():
        if "error" in report:
            raise CannotScore(str(report["error"].get("message", report["error"])))
        scores = report["models"]
        ours = scores[-1]
        other = scores[1]["score"] if against else None
        wins = ours["over_first"]["won"] if ours["over_first"] else None
        if wins is None and other is not None:  # GRPO: without losses of rows
            gain = ours["score"] - other
            wins = gains(-gain if report["lower_is_better"] else gain, other)
        return FolderScore(
            metric=ours["metric"],
            base=scores[0]["score"],
            ours=ours["score"],
            lower_is_better=report["lower_is_better"],
            against=other,
            rows=report["rows"],
            over_base=ours["over_base"],
            over_against=ours["over_first"],
            wins=wins,
            seconds=round(time.monotonic() - began, 1),
            notes=tuple(f"{count} rows left out: {why}" for why, count in report["dropped"].items()),
        )


@contextmanager
def readable_report() -> Iterator[None]:
    """Read a scorer's report, which comes from the entry's image: another commit may write another form."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        text = f"the scorer's report cannot be read by this version: {type(error).__name__}: {error}"
        raise CannotScore(text) from None


def gains(gain: float, other: float) -> bool:
    """Whether a challenger is so much better that it wins, where rows are not compared."""
    return gain >= LEAST_GAIN * abs(other)


def _kl_coefficient(task: TournamentTask) -> float | None:
    return float(task.environment["KL_COEF"]) if task.environment.get("USE_KL") == "1" else None


def _task_type(task: TournamentTask) -> TaskType | None:
    if task.image_type is not None:
        return TaskType.IMAGE
    known = {str(one) for one in TaskType}
    return TaskType(task.task_type) if task.task_type in known else None


def run_scorer(
    client: DockerClient,
    image: str,
    command: str,
    folder: Path,
    seen: Mapping[Path, str],
    gpus: Sequence[str],
) -> dict[str, Any]:
    """The scorer's report. Its errors get into a file of their own, so that the report is nothing else."""
    for name in (REPORT, _ERRORS):
        (folder / name).unlink(missing_ok=True)
    shell = ["sh", "-c", f"{{ {command}; }} 2> {INSIDE / _ERRORS}"]
    code, output = run_helper(client, image, shell, folder, read_only=dict(seen), gpus=gpus)
    try:
        text = (folder / REPORT).read_text("utf-8")
        found = json.loads(text[text.index("{") :])
    except (OSError, ValueError):
        errors = folder / _ERRORS
        said = errors.read_text("utf-8", "replace") if errors.exists() else output
        if _NO_SCORER.search(said):
            raise NoScorer from None
        last = "; ".join(said.strip().splitlines()[-3:])
        raise CannotScore(f"the scorer ended with exit code {code}: {last[-500:] or 'no output'}") from None
    if not isinstance(found, dict):
        raise CannotScore("the scorer's report is not an object")
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
