"""Load and score what a rehearsal would upload, inside the image that trained it, without a network.

Texts by `trainer.scoring.eval`: the validator's loss row by row, against the base and against another folder,
such as the champion's, with the bounds of the boss round and the chance to win. In an environment task the
submission plays the model that it began with, and another submission if one is named; each plays the same
shell tasks. Pictures are scored by `trainer.pictures.evaluate` on the model that our trainer was ordered to
train, kept from its container: an image of somebody else's trainer has none, and no scorer of ours.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from core.data.pictures import PICTURE_SUFFIXES
from core.domain.errors import GodMinerError
from core.domain.evaluation import Era
from core.domain.tasks import INTERCODE, PVP_GAMES, TaskType
from core.domain.tournament_rules import CACHE, LEAST_GAIN, NOISES
from core.recipes.launch import PICTURE_RUN_FILE
from core.runs.picture_run import PictureEvaluation, PictureRun, PictureScores
from core.submission.check import BaseModelRef
from core.submission.faults import BadSubmission, FaultKind
from core.submission.prepare import check_submission
from core.submission.safetensors import StoredTensor, read_header
from miner.backends.docker.client import DockerClient
from miner.tournament.rehearsal.container import TrainerContainer, run_helper
from miner.tournament.rehearsal.upload import choose_image_file
from miner.tournament.rules import TournamentTask

#: Where everything lies in the container; `run_helper` mounts the folder here.
INSIDE = Path("/rehearsal")
OURS, AGAINST, _ROWS, BASE = "/ours", "/against", "/rows.json", "/base"
_NO_SCORER = re.compile(r"No module named '?trainer\b|python: not found")
REPORT, _TASK, _ERRORS = "score.json", "task.json", "errors.txt"
#: Bytes of two tensors that are compared at once.
_COMPARED = 16 * 1024**2


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

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "beats_base": self.beats_base, "p_win": self.p_win}


def load_problems(repository: Path, task: TournamentTask, base: Path, model_id: str) -> tuple[str, ...]:
    """Name what evaluators would reject in the repository: another architecture, other sizes, weights that
    are not finite, missing parts. `score_text` shows whether a library loads it."""
    try:
        reference = BaseModelRef(model_id, base if base.is_dir() else None, task.image_type)
        checked = check_submission(repository, reference, _task_type(task), as_is=True)
    except BadSubmission as bad:
        return (str(bad),)
    # A card is read by nobody who scores, and what lies beside the model is only uploaded.
    harmless = (FaultKind.BAD_CARD, FaultKind.STRAY)
    problems = tuple(str(fault) for fault in checked.faults if fault.kind not in harmless)
    if not problems and task.image_type is None and same_weights(repository, base):
        return ("its weights are those of the base: evaluators take it for no fine-tune, and it is last",)
    return problems


def same_weights(folder: Path, base: Path) -> bool:
    """Return True if both have the same tensors, byte for byte, however they are spread over files."""
    ours, theirs = _tensors(folder), _tensors(base)
    if not ours or {name: (one.dtype, one.shape) for name, (_, one) in ours.items()} != {
        name: (one.dtype, one.shape) for name, (_, one) in theirs.items()
    }:
        return False
    return all(_same_bytes(*ours[name], *theirs[name]) for name in ours)


def _tensors(folder: Path) -> dict[str, tuple[Path, StoredTensor]]:
    found: dict[str, tuple[Path, StoredTensor]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found |= {name: (path, tensor) for name, tensor in read_header(file).tensors.items()}
    return found


def _same_bytes(path: Path, tensor: StoredTensor, other_path: Path, other: StoredTensor) -> bool:
    with path.open("rb") as one, other_path.open("rb") as two:
        one.seek(tensor.begin)
        two.seek(other.begin)
        left = tensor.end - tensor.begin
        while left > 0:
            size = min(left, _COMPARED)
            if one.read(size) != two.read(size):
                return False
            left -= size
    return True


@dataclass(frozen=True)
class ImageScorer:
    """The image that trained a task, to score a repository beside the base and another submission."""

    client: DockerClient
    image: str
    task: TournamentTask
    #: A scratch directory.
    folder: Path
    repository: Path
    against: Path | None = None
    gpus: Sequence[str] = ()
    #: Only find out whether there is a score at all.
    brief: bool = False

    def run(self, command: str, seen: Mapping[Path, str]) -> dict[str, Any]:
        """Return the scorer's report. Its errors get into a file of their own."""
        for name in (REPORT, _ERRORS):
            (self.folder / name).unlink(missing_ok=True)
        shell = ["sh", "-c", f"{{ {command}; }} 2> {INSIDE / _ERRORS}"]
        seen = {**seen, self.repository: OURS, **({self.against: AGAINST} if self.against else {})}
        code, output = run_helper(self.client, self.image, shell, self.folder, read_only=seen, gpus=self.gpus)
        try:
            text = (self.folder / REPORT).read_text("utf-8")
            found = json.loads(text[text.index("{") :])
        except (OSError, ValueError):
            errors = self.folder / _ERRORS
            said = errors.read_text("utf-8", "replace") if errors.exists() else output
            if _NO_SCORER.search(said):
                raise NoScorer from None
            last = "; ".join(said.strip().splitlines()[-3:])
            raise CannotScore(
                f"the scorer ended with exit code {code}: {last[-500:] or 'no output'}"
            ) from None
        if not isinstance(found, dict):
            raise CannotScore("the scorer's report is not an object")
        return found


def score_text(scorer: ImageScorer, *, base: Path, rows: Path) -> FolderScore:
    """Score a text submission as the evaluator finds it; `rows` were not trained on. Raise `CannotScore` with
    the scorer's words: a submission that does not load is one."""
    began = time.monotonic()
    asked = {
        "dataset_type": dict(scorer.task.dataset),
        "data": _ROWS,
        "era": Era.TOURNAMENTS,
        "kl_coefficient": _kl_coefficient(scorer.task),
    }
    write_json(scorer.folder / _TASK, asked)
    # The one that is named first is what the others are compared with.
    models = [*([AGAINST] if scorer.against else []), OURS]
    arguments = ["--task", str(INSIDE / _TASK), "--base", BASE, "--json", "--allow-rewards"]
    for model in models:
        arguments += ["--model", model]
    command = shlex.join(["python", "-m", "trainer.scoring.eval", *arguments])
    report = scorer.run(f"{command} > {INSIDE / REPORT}", {rows: _ROWS, base: BASE})
    with readable_report():
        if "error" in report:
            raise CannotScore(str(report["error"].get("message", report["error"])))
        scores = report["models"]
        ours = scores[-1]
        other = scores[1]["score"] if scorer.against else None
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
    """Return True if a challenger is better by enough to win without a comparison of rows."""
    return gain >= LEAST_GAIN * abs(other)


def _kl_coefficient(task: TournamentTask) -> float | None:
    return float(task.environment["KL_COEF"]) if task.environment.get("USE_KL") == "1" else None


def _task_type(task: TournamentTask) -> TaskType | None:
    if task.image_type is not None:
        return TaskType.IMAGE
    known = {str(one) for one in TaskType}
    return TaskType(task.task_type) if task.task_type in known else None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


# — environment tasks: the model plays by `trainer.environments.play`

#: Games of a match, and shell tasks; with as many forfeits a match ends.
GAMES = 20
#: Without a GPU, where an answer takes seconds, or to see whether there is a score at all.
FEW_GAMES = 2
#: No pair of games of a match begins later, nor a shell task of a model.
MATCH_S = 300.0


def score_games(scorer: ImageScorer, *, base: Path) -> FolderScore | None:
    """Score by the mean over the task's environments: the share of points against the base, or the reward of
    shell tasks. Return None if none of the environments is played here."""
    began = time.monotonic()
    names = [name for name in scorer.task.dataset["environment_names"] if name in (*PVP_GAMES, INTERCODE)]
    if not names:
        return None
    scorer.folder.mkdir(parents=True, exist_ok=True)
    others = [BASE, *([AGAINST] if scorer.against else [])]
    games = GAMES if scorer.gpus and not scorer.brief else FEW_GAMES
    arguments = ["--json", "--base", BASE, "--games", str(games), "--seconds", str(MATCH_S)]
    for option, values in (("--against", others), ("--game", names)):
        arguments += [word for value in values for word in (option, value)]
    command = shlex.join(["python", "-m", "trainer.environments.play", OURS, *arguments])
    report = scorer.run(f"{command} > {INSIDE / REPORT}", {base: BASE})
    with readable_report():
        matches, shells = report["matches"], report.get("shell_tasks", [])
        against_base = _points(matches, shells, BASE)
        against_other = _points(matches, shells, AGAINST)
        notes = tuple(_notes(matches, shells))
        failure = str(report.get("failure", ""))
        if failure:
            notes = (f"not everything was played: {failure}", *notes)
    if not against_base:
        why = failure or "no game or shell task was played to its end"
        raise CannotScore(f"there is no score against the base: {why}")
    ours, theirs = _means(against_base)
    other = _means(against_other)[1] if against_other else None
    return FolderScore(
        metric=f"points of games and shell tasks, {', '.join(against_base)}",
        base=theirs,
        ours=ours,
        lower_is_better=False,
        against=other,
        wins=_outranks(against_other) if set(against_other) == set(names) else None,
        seconds=round(time.monotonic() - began, 1),
        notes=notes,
    )


def _points(
    matches: Sequence[Mapping[str, Any]], shells: Sequence[Mapping[str, Any]], against: str
) -> dict[str, tuple[float, float]]:
    """By environment: ours, and the other's."""
    other = Path(against).name
    found = {}
    for match in matches:
        if match["names"][1] == other and match["score"] is not None:
            found[str(match["game"])] = (float(match["score"]), 1 - float(match["score"]))
    rewards = {
        str(one["name"]): {task["question"]: float(task["reward"]) for task in one["tasks"]} for one in shells
    }
    mine, theirs = rewards.get(Path(OURS).name, {}), rewards.get(other, {})
    # Time may have been over for one of them before the other had played as many.
    if both := [question for question in mine if question in theirs]:
        found[INTERCODE] = (fmean(mine[one] for one in both), fmean(theirs[one] for one in both))
    return found


def _means(points: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
    ours, other = zip(*points.values(), strict=True)
    return sum(ours) / len(points), sum(other) / len(points)


def _outranks(points: Mapping[str, tuple[float, float]]) -> bool:
    """Return True if ours is first and no worse at shell tasks; the better of two entries has the whole point
    of an environment."""
    ours, other = points.get(INTERCODE, (0.0, 0.0))
    return ours >= other and sum((mine > theirs) - (mine < theirs) for mine, theirs in points.values()) > 0


def _notes(matches: Sequence[Mapping[str, Any]], shells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe what was played; a training must first get rid of forfeits."""
    lines = []
    for match in matches:
        counts = f"{match['wins']} won, {match['draws']} drawn, {match['losses']} lost"
        kinds = ", ".join(f"{count} {kind}" for kind, count in match["forfeits"][0].items())
        forfeited = f"; forfeited {kinds}" if kinds else ""
        lines.append(f"{match['game']} against {match['names'][1]}: {counts}{forfeited}")
    for one in shells:
        reward = "none" if one["reward"] is None else f"{float(one['reward']):.2f}"
        submitted = f"{one['submitted']} of {len(one['tasks'])} tasks submitted, {one['ended']}"
        lines.append(f"{INTERCODE}, {one['name']}: reward {reward}, {submitted}")
    return lines


# — pictures, by `trainer.pictures.evaluate`

#: Noise draws for each band without a GPU, or to see whether there is a score at all; validators take 16.
FEW_NOISES = 1
#: For loading and scoring.
LIMIT_S = 3000.0
_PICTURES, _JOB = "pictures", "job.json"


def keep_order(container: TrainerContainer, work: str, folder: Path) -> Path | None:
    """Copy the picture trainer's order out of its work directory, running or not; None if another engine
    trained."""
    kept = folder / PICTURE_RUN_FILE
    return kept if container.copy_out(f"{work}/launch-1/{PICTURE_RUN_FILE}", kept) else None


def pictures_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.suffix in PICTURE_SUFFIXES]


def score_pictures(scorer: ImageScorer, *, cache: Path, order: Path, pictures: Sequence[Path]) -> FolderScore:
    """Score by the validator's measure, on the model that was trained. `pictures` were not trained on, and
    have captions beside them."""
    began = time.monotonic()
    folder, against = scorer.folder, scorer.against
    (folder / _PICTURES).mkdir(parents=True, exist_ok=True)
    for picture in pictures[:1] if scorer.brief else pictures:
        for path in (picture, picture.with_suffix(".txt")):
            if path.exists():
                shutil.copyfile(path, folder / _PICTURES / path.name)
    files = ["", _image_file(scorer.repository, OURS)]
    files += [_image_file(against, AGAINST)] if against else []
    noises = NOISES if scorer.gpus and not scorer.brief else FEW_NOISES
    try:
        model = PictureRun.read(order).model
    except ValueError as error:
        raise CannotScore(f"the trainer's order cannot be read by this version: {error}") from None
    job = PictureEvaluation(
        model=model,
        adapters=tuple(files),
        pictures_dir=str(INSIDE / _PICTURES),
        report_path=str(INSIDE / REPORT),
        noises=noises,
        end_by=time.time() + LIMIT_S,
    )
    (folder / _JOB).write_text(job.model_dump_json(), encoding="utf-8")
    # Tokenizers are found there by their names, as in the training.
    variables = f"HF_HUB_CACHE={CACHE}/hf_cache"
    python = '"${GOD_MINER_PICTURES_PYTHON:-python}"'
    command = f"{variables} {python} -m trainer.pictures.evaluate {INSIDE / _JOB}"
    report = scorer.run(command, {cache: CACHE})
    with readable_report():
        found = PictureScores.model_validate(report)
    scores = {row.path: row.score for row in found.adapters if row.score is not None}
    if missing := [path or "the base" for path in files if path not in scores]:
        reasons = "; ".join(filter(None, (found.reason, *(row.error for row in found.adapters))))
        raise CannotScore(f"{', '.join(missing)} cannot be scored: {reasons}")
    other = scores[files[2]] if against else None
    return FolderScore(
        metric="flow error",
        base=scores[""],
        ours=scores[files[1]],
        against=other,
        wins=None if other is None else gains(other - scores[files[1]], other),
        seconds=round(time.monotonic() - began, 1),
        notes=(f"on {len(found.pictures)} pictures, with {noises} of {NOISES} noises", *found.notes),
    )


def _image_file(repository: Path, inside: str) -> str:
    """The file that the evaluator would load; `repository` may also be a folder with just that file."""
    paths = [path.relative_to(repository).as_posix() for path in repository.rglob("*") if path.is_file()]
    choice = choose_image_file(paths)
    chosen = choice.newer or choice.older or ("last.safetensors" if "last.safetensors" in paths else None)
    if chosen is None:
        raise CannotScore(f"{repository} has no weights that an evaluator of pictures would load")
    return f"{inside}/{chosen}"
