"""What the scorer in the image is asked, and what becomes of its answer; the rehearsal's own test runs it in
a real image."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.domain.evaluation import Era
from core.domain.tasks import ImageModelType
from core.runs.picture_run import (
    AdapterScore,
    PictureEvaluation,
    PictureModel,
    PictureRun,
    PictureScores,
)
from core.runs.run_files import EvalTask
from miner.backends.docker.client import DockerClient
from miner.tournament.rehearsal import scoring
from miner.tournament.rehearsal.scoring import (
    CannotScore,
    FolderScore,
    ImageScorer,
    NoScorer,
    load_problems,
    same_weights,
    score_games,
    score_pictures,
    score_text,
)
from miner.tournament.rules import TASKS, TournamentTask
from tests.trainer.session.simulated import safetensors, write_adapter

CLIENT = DockerClient("unix:///nowhere")


class Image:
    """In the place of a container: the command, what it saw, and a report of the test's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[Path], str], code: int = 0) -> None:
        self.answer, self.code = answer, code
        self.errors = "Traceback\nRuntimeError: what went wrong\n"
        self.commands: list[str] = []
        self.seen: Mapping[Path, str] = {}
        monkeypatch.setattr(scoring, "run_helper", self.run)

    def run(
        self,
        client: object,
        image: str,
        command: Sequence[str],
        folder: Path,
        *,
        read_only: Mapping[Path, str],
        gpus: Sequence[str],
    ) -> tuple[int, str]:
        self.commands.append(command[-1])
        self.seen = read_only
        (folder / "errors.txt").write_text(self.errors, encoding="utf-8")
        if text := self.answer(folder):
            (folder / "score.json").write_text(text, encoding="utf-8")
        return self.code, ""


def scored(task: TournamentTask, folder: Path, against: Path | None = None) -> FolderScore:
    scorer = ImageScorer(CLIENT, "image", task, folder, Path("/ours"), against)
    return score_text(scorer, base=Path("/b"), rows=Path("/r"))


def comparison(won: bool, p_win: float) -> dict[str, Any]:
    return {"won": won, "p_win": p_win, "reason": "of 90 decided rows 80 are won", "mean_gap": 0.2}


def report(*scores: float) -> str:
    models = [
        {
            "metric": "eval_loss",
            "score": score,
            "over_base": comparison(True, 0.99) if place else None,
            "over_first": comparison(False, 0.2) if place > 1 else None,
        }
        for place, score in enumerate(scores)
    ]
    return json.dumps({"models": models, "lower_is_better": True, "rows": 90, "dropped": {"too long": 3}})


def test_ours_stands_beside_the_base_and_the_champion(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    image = Image(monkeypatch, lambda folder: "a library's greeting\n" + report(3.0, 2.0, 1.9))
    found = scored(TASKS["instruct-kl"], tmp_path, Path("/boss"))
    assert (found.base, found.against, found.ours) == (3.0, 2.0, 1.9)
    assert (found.wins, found.p_win, found.beats_base) == (False, 0.2, True)
    assert image.seen == {
        Path("/r"): "/rows.json",
        Path("/b"): "/base",
        Path("/ours"): "/ours",
        Path("/boss"): "/against",
    }
    # The champion comes first: the others are compared with it.
    assert image.commands[0].index("/against") < image.commands[0].index("/ours")
    assert "3 rows left out: too long" in found.summary()
    assert "against the other folder: would not win, P(win) 20%" in found.summary()


@pytest.mark.parametrize("text", ['{"rows": 90}', '{"models": [1, 2]}', '{"models": [], "rows": 1}'])
def test_the_report_of_another_version_is_a_problem_of_its_task(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Image(monkeypatch, lambda folder: text)
    with pytest.raises(CannotScore, match="cannot be read by this version"):
        scored(TASKS["instruct"], tmp_path)


@pytest.mark.parametrize(
    "name", [name for name, task in TASKS.items() if task.task_type not in (None, "EnvTask")]
)
def test_the_scorer_can_read_every_kinds_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    Image(monkeypatch, lambda folder: report(3.0, 2.0))
    scored(TASKS[name], tmp_path)
    task = EvalTask.read(tmp_path / "task.json")
    assert task.task_type == TASKS[name].task_type
    assert (task.era, task.data) == (Era.TOURNAMENTS, "/rows.json")
    assert task.kl_coefficient == (0.5 if "USE_KL" in TASKS[name].environment else None)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("", "exit code 1: Traceback; RuntimeError: what went wrong"),
        (
            json.dumps({"error": {"code": "bad_model", "message": "/ours cannot be loaded"}}),
            "/ours cannot be",
        ),
    ],
)
def test_what_cannot_be_loaded_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str, why: str
) -> None:
    Image(monkeypatch, lambda folder: answer, code=1)
    with pytest.raises(CannotScore, match=why):
        scored(TASKS["chat"], tmp_path)


@pytest.mark.parametrize(("ours", "wins"), [(0.506, True), (0.504, False)])
def test_rewards_win_by_one_percent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ours: float, wins: bool
) -> None:
    def answer(folder: Path) -> str:
        found = json.loads(report(0.1, 0.5, ours))
        for model in found["models"]:
            model["over_base"] = model["over_first"] = None
        return json.dumps(found | {"lower_is_better": False})

    Image(monkeypatch, answer)
    found = scored(TASKS["grpo"], tmp_path, Path("/boss"))
    assert (found.wins, found.p_win) == (wins, None)
    assert f"other folder: would {'' if wins else 'not '}win" in found.summary()


def test_somebody_elses_image_has_no_scorer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    image = Image(monkeypatch, lambda folder: "", code=1)
    image.errors = (
        "/usr/bin/python: Error while finding module: ModuleNotFoundError: No module named 'trainer'"
    )
    with pytest.raises(NoScorer):
        scored(TASKS["chat"], tmp_path)


def pictures_scored(tmp_path: Path) -> FolderScore:
    for name in ("ours/checkpoints/last.safetensors", "boss/last.safetensors", "one.png", "one.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    model = PictureModel(
        family=ImageModelType.KREA2,
        base_path="/cache/b",
        text_encoder_paths=("/cache/t",),
        vae_path="/cache/v",
        comfy_dir="/app/ComfyUI",
    )
    paths = dict.fromkeys(("submission_dir", "work_dir", "progress_path", "outcome_path", "stop_path"), "/x")
    order = PictureRun(model=model, pictures_dir="/p", model_id="o/m", end_by=0.0, **paths)
    (tmp_path / "run.json").write_text(order.model_dump_json(), encoding="utf-8")
    scorer = ImageScorer(
        CLIENT, "image", TASKS["krea2"], tmp_path / "scratch", tmp_path / "ours", tmp_path / "boss"
    )
    pictures = [tmp_path / "one.png"]
    return score_pictures(scorer, cache=tmp_path / "cache", order=tmp_path / "run.json", pictures=pictures)


@pytest.mark.parametrize(("ours", "wins"), [(0.0989, True), (0.0991, False)])
def test_pictures_win_with_a_loss_one_percent_lower(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ours: float, wins: bool
) -> None:
    def answer(folder: Path) -> str:
        job = PictureEvaluation.read(folder / "job.json")
        assert {path.name for path in (folder / "pictures").iterdir()} == {"one.png", "one.txt"}
        assert job.model.base_path == "/cache/b"
        rows = zip(job.adapters, (0.2, ours, 0.1), strict=True)
        adapters = tuple(AdapterScore(path=path, score=score) for path, score in rows)
        return PictureScores(pictures=("one.png",), adapters=adapters, complete=True).model_dump_json()

    image = Image(monkeypatch, answer)
    found = pictures_scored(tmp_path)
    assert (found.base, found.ours, found.against, found.wins) == (0.2, ours, 0.1, wins)
    assert "trainer.pictures.evaluate /rehearsal/job.json" in image.commands[0]


def test_pictures_that_were_not_scored_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def answer(folder: Path) -> str:
        ours = AdapterScore(path="/ours/checkpoints/last.safetensors", error="1 key is not loaded")
        rows = (AdapterScore(path="", score=0.2), ours)
        return PictureScores(adapters=rows, reason="the time is over").model_dump_json()

    Image(monkeypatch, answer)
    with pytest.raises(CannotScore, match=r"/ours/checkpoints/last.safetensors.*time is over; 1 key"):
        pictures_scored(tmp_path)


def test_weights_that_are_not_finite_and_another_architecture_are_problems(tmp_path: Path) -> None:
    base, ours = tmp_path / "base", tmp_path / "ours"
    base.mkdir()
    (base / "config.json").write_text(
        json.dumps({"architectures": ["A"], "hidden_size": 8}), encoding="utf-8"
    )
    ours.mkdir()
    write_adapter(ours)
    config = {"base_model_name_or_path": "org/model", "peft_type": "LORA"}
    (ours / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert load_problems(ours, TASKS["chat"], base, "org/model") == ()
    nan = bytearray(safetensors())
    nan[-4:] = struct.pack("<f", float("nan"))
    (ours / "adapter_model.safetensors").write_bytes(nan)
    assert "NaN" in load_problems(ours, TASKS["chat"], base, "org/model")[0]
    full = tmp_path / "full"
    full.mkdir()
    (full / "model.safetensors").write_bytes(safetensors())
    (full / "config.json").write_text(json.dumps({"architectures": ["B"]}), encoding="utf-8")
    assert any("architectures" in one for one in load_problems(full, TASKS["chat"], base, "org/model"))


def test_a_copy_of_the_base_is_no_fine_tune(tmp_path: Path) -> None:
    """However its tensors are spread over files; one bit makes it another model."""
    base, ours = tmp_path / "base", tmp_path / "ours"
    for folder, names in ((base, ("a", "b")), (ours, ("b", "a"))):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"architectures": ["A"]}), encoding="utf-8")
        for at, name in enumerate(names):
            content = safetensors(name=name)
            (folder / f"model-{at + 1:05}-of-00002.safetensors").write_bytes(content)
        index = {name: f"model-{at + 1:05}-of-00002.safetensors" for at, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert same_weights(ours, base)
    (problem,) = load_problems(ours, TASKS["chat"], base, "org/model")
    assert "those of the base" in problem
    trained = ours / "model-00001-of-00002.safetensors"
    trained.write_bytes(trained.read_bytes()[:-1] + b"\1")
    assert not same_weights(ours, base)
    assert not same_weights(tmp_path, base)


def match(game: str, against: str, score: float | None, **forfeits: int) -> dict[str, Any]:
    return {
        "game": game, "names": ["ours", against], "score": score,
        "wins": 9, "draws": 1, "losses": 10, "forfeits": [forfeits, {}],
    }  # fmt: skip


def shells(**rewards: float | None) -> list[dict[str, Any]]:
    """None: it played nothing."""
    questions = ("How many?", "How large?")
    return [
        {
            "name": name, "reward": reward, "submitted": 1, "ended": "all tasks played",
            "tasks": [{"question": one, "reward": reward} for one in questions if reward is not None],
        }
        for name, reward in rewards.items()
    ]  # fmt: skip


def games_scored(
    tmp_path: Path, against: Path | None = None, names: tuple[str, ...] = ("othello", "intercode")
) -> FolderScore | None:
    task = replace(TASKS["environment"], dataset={"environment_names": list(names)})
    scorer = ImageScorer(CLIENT, "image", task, tmp_path / "scratch", Path("/r"), against)
    return score_games(scorer, base=Path("/b"))


def test_ours_plays_the_base_and_the_champion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = {
        "matches": [match("othello", "base", 0.9, no_call=2), match("othello", "against", 0.4)],
        "shell_tasks": shells(ours=0.5, base=0.3, against=0.8),
    }
    image = Image(monkeypatch, lambda folder: json.dumps(report))
    found = games_scored(tmp_path, against=Path("/champion"))
    assert (found.ours, found.base, found.beats_base) == (pytest.approx(0.7), pytest.approx(0.2), True)
    assert (found.against, found.wins) == (pytest.approx(0.7), False)
    assert image.seen == {Path("/b"): "/base", Path("/r"): "/ours", Path("/champion"): "/against"}
    command = image.commands[0]
    assert "trainer.environments.play /ours --json --base /base" in command
    assert "--against /base --against /against --game othello --game intercode" in command
    assert "othello against base: 9 won, 1 drawn, 10 lost; forfeited 2 no_call" in found.summary()
    assert "intercode, ours: reward 0.50, 1 of 2 tasks submitted" in found.summary()


@pytest.mark.parametrize(
    ("othello", "clobber", "shell", "wins"),
    [
        # A clear loss of one counts no more than a narrow win of another.
        (0.1, 0.6, 0.52, True),
        (0.4, 0.4, 0.9, False),
        # Shell tasks have to be at least as good, and have to be played.
        (0.9, 0.9, 0.4, False),
        (0.9, 0.9, None, None),
    ],
)
def test_environments_are_won_one_by_one(
    othello: float,
    clobber: float,
    shell: float | None,
    wins: bool | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    matches = [match("othello", "against", othello), match("clobber", "against", clobber)]
    matches.append(match("othello", "base", 0.5))
    report = {"matches": matches, "shell_tasks": shells(ours=shell, base=0.5, against=0.5)}
    Image(monkeypatch, lambda folder: json.dumps(report))
    found = games_scored(tmp_path, against=Path("/champion"), names=("othello", "clobber", "intercode"))
    assert found.wins is wins
    assert f"intercode, ours: reward {'none' if shell is None else f'{shell:.2f}'}" in found.summary()


def test_shell_tasks_are_compared_where_both_played_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours, base = shells(ours=0.6, base=0.5)
    ours["tasks"].append({"question": "One more?", "reward": 0.0})
    Image(monkeypatch, lambda folder: json.dumps({"matches": [], "shell_tasks": [ours, base]}))
    found = games_scored(tmp_path, names=("intercode",))
    assert (found.ours, found.base) == (pytest.approx(0.6), pytest.approx(0.5))


def test_what_ended_a_score_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = {"matches": [match("othello", "base", None)], "failure": "CUDA out of memory"}
    Image(monkeypatch, lambda folder: json.dumps(report), code=1)
    with pytest.raises(CannotScore, match="CUDA out of memory"):
        games_scored(tmp_path)


def test_a_part_of_a_score_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = {"matches": [match("othello", "base", 0.9)], "failure": "no shell here"}
    Image(monkeypatch, lambda folder: json.dumps(report), code=1)
    found = games_scored(tmp_path)
    assert "not everything was played: no shell here" in found.summary()


def test_what_is_not_played_here_has_no_score(tmp_path: Path) -> None:
    assert games_scored(tmp_path, names=("swe_infinite", "chess")) is None


def test_a_match_without_a_game_is_no_score(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Image(monkeypatch, lambda folder: json.dumps({"matches": [match("othello", "base", None)]}))
    with pytest.raises(CannotScore, match="no game or shell task"):
        games_scored(tmp_path)
