"""Two entries on the same inputs: by a real Docker Engine, and the verdicts of the gate."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from miner.backends.docker.client import DockerClient
from miner.cli.tournament_rehearse import _Rehearsed, _show
from miner.observe.redact import Redactor
from miner.tournament.checkout import CloneFailed
from miner.tournament.rehearsal.container import ContainerEnd
from miner.tournament.rehearsal.inputs import Opponent, RehearsalInputs, RehearsalOptions
from miner.tournament.rehearsal.rehearse import rehearse
from miner.tournament.rehearsal.report import OpponentClone, Rehearsal, TaskRehearsal
from miner.tournament.rehearsal.spar import Verdict, spar_data, spar_lines, sparred
from miner.tournament.rules import TASKS
from tests.doubles import base_image
from tests.doubles.dockerd import Dockerd
from tests.miner.tournament.rehearsal.test_rehearse import held
from tests.miner.tournament.rehearsed_entries import commit_all, make_entry

DOCKERFILE = f"""\
FROM {base_image.NAME}
COPY train.py /train.py
COPY scoring /{base_image.STACK}/trainer/scoring
ENTRYPOINT ["python", "/train.py"]
"""
#: It submits the model with one weight changed; the scorer below takes that weight for its loss.
TRAIN = """\
import os, pathlib, struct, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if LOSS is None:
    sys.exit(4)
model = pathlib.Path("/cache/models", options["--model"])
rows = pathlib.Path("/cache/datasets", options["--task-id"] + "_train_data.json")
print("rows", hash(rows.read_bytes()) != 0, len(rows.read_bytes()), flush=True)
place = pathlib.Path("/app/checkpoints", options["--task-id"], options["--expected-repo-name"])
place.mkdir(parents=True)
weights = (model / "model.safetensors").read_bytes()
(place / "model.safetensors").write_bytes(weights[:-4] + struct.pack("<f", LOSS))
(place / "config.json").write_bytes((model / "config.json").read_bytes())
"""
SCORER = """\
import json, pathlib, struct, sys
def loss(folder):
    return struct.unpack("<f", pathlib.Path(folder, "model.safetensors").read_bytes()[-4:])[0]
named = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folders = [value for name, value in zip(sys.argv[1:], sys.argv[2:]) if name == "--model"]
scores = [loss(named["--base"]), *map(loss, folders)]
def over(at, other):
    won = scores[at] < scores[other] - 0.01
    return {"won": won, "wins": 9, "losses": 1, "p_win": 0.9, "reason": "of 10 decided rows 9 are won"}
models = [
    {"metric": "eval_loss", "score": score, "over_base": over(at, 0) if at else None,
     "over_first": over(at, 1) if at > 1 else None}
    for at, score in enumerate(scores)
]
print(json.dumps({"models": models, "lower_is_better": True, "rows": 10, "dropped": {}}))
"""


def entry(directory: Path, loss: float | None, **more: str) -> Path:
    files = {
        "dockerfiles/standalone-text-trainer.dockerfile": DOCKERFILE,
        "train.py": f"LOSS = {loss}\n{TRAIN}",
        "scoring/__init__.py": "",
        "scoring/eval.py": SCORER,
    }
    return make_entry(directory, {**files, **more})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    head = json.dumps({"w": {"dtype": "F32", "shape": [500], "data_offsets": [0, 2000]}}).encode()
    weights = struct.pack("<Q", len(head)) + head + struct.pack("<500f", *[0.5] * 499, 3.0)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text(json.dumps({"architectures": ["A"], "hidden_size": 8}))
    return folder


def spar(
    docker_host: Dockerd,
    tmp_path: Path,
    model: Path,
    opponent: Opponent,
    say: Callable[[str], None] = lambda text: None,
) -> Rehearsal:
    options = RehearsalOptions(
        output=tmp_path / "out",
        tasks=[TASKS["instruct"]],
        inputs={"instruct": RehearsalInputs(model, "org/model")},
        hours=1.0,
        build_network="none",
        against=opponent,
    )
    with closing(DockerClient(docker_host.host)) as client:
        return rehearse(client, str(tmp_path / "ours"), options, say)


@pytest.mark.docker
@pytest.mark.usefixtures("unread_replies_collected")
@pytest.mark.parametrize(
    ("theirs", "verdict", "why"),
    [
        ({"loss": 2.5}, Verdict.WON, "of 10 decided rows"),
        ({"loss": 1.5}, Verdict.LOST, "of 10 decided rows"),
        ({"loss": None}, Verdict.WON, "the opponent fails: attempt 2 ended with exit code 4"),
        (
            {
                "loss": 1.5,
                "dockerfiles/standalone-text-trainer.dockerfile": f"FROM {base_image.NAME}\nRUN false\n",
            },
            Verdict.WON,
            "the opponent fails: the image is not built",
        ),
    ],
    ids=["won", "lost", "their training fails", "their build fails"],
)
def test_both_train_on_the_same_inputs_and_are_compared(
    docker_host: Dockerd, tmp_path: Path, model: Path, theirs: dict[str, Any], verdict: Verdict, why: str
) -> None:
    before = held(docker_host)
    entry(tmp_path / "ours", 2.0)
    other = entry(tmp_path / "theirs", **theirs)
    commit = (other / ".git" / "refs" / "heads").iterdir().__next__().read_text().strip()
    (other / "later").write_text("not what spars")
    commit_all(other)
    report = spar(docker_host, tmp_path, model, Opponent(str(other), commit))
    (task,) = report.tasks
    assert report.passed, task.problems
    (found,) = sparred(report)
    assert found.verdict is verdict
    assert found.why.startswith(why)
    assert report.opponent is not None
    assert report.opponent.commit == commit
    assert task.opponent is not None
    if theirs["loss"] is not None and not task.opponent.problems:
        assert [found.theirs, found.ours] == pytest.approx([theirs["loss"], 2.0])
        assert None not in (found.their_seconds, found.our_first_s, found.their_first_s)
        logs = [(tmp_path / "out/instruct" / f"{name}-1.txt").read_text() for name in ("log", "opponent")]
        assert logs[0] == logs[1]
    assert held(docker_host) <= before
    left = {path.name for path in (tmp_path / "out").rglob("*") if path.is_dir()}
    assert left == {"instruct"}


@pytest.mark.docker
@pytest.mark.usefixtures("unread_replies_collected")
def test_a_champion_that_cannot_be_cloned_ends_it_before_anything_is_built(
    docker_host: Dockerd, tmp_path: Path, model: Path
) -> None:
    entry(tmp_path / "ours", 2.0)
    with pytest.raises(CloneFailed):
        spar(docker_host, tmp_path, model, Opponent(str(tmp_path / "nowhere")))


@pytest.mark.docker
@pytest.mark.usefixtures("unread_replies_collected")
def test_an_interrupted_run_leaves_nothing_of_either(
    docker_host: Dockerd, tmp_path: Path, model: Path
) -> None:
    before = held(docker_host)
    entry(tmp_path / "ours", 2.0)
    entry(tmp_path / "theirs", 2.5)

    def interrupt(text: str) -> None:
        if "the opponent: exit code" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spar(docker_host, tmp_path, model, Opponent(str(tmp_path / "theirs")), interrupt)
    assert held(docker_host) <= before
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == {"instruct"}
    assert not [path for path in (tmp_path / "out/instruct").iterdir() if path.is_dir()]
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert not report["complete"]
    assert report["tasks"][0]["opponent"]["attempts"][0]["exit_code"] == 0


def trained(seconds: float, first: float, *problems: str, name: str = "dpo") -> TaskRehearsal:
    made = TaskRehearsal(name, "a dockerfile", 1.0, [ContainerEnd(0, seconds)], first, complete=True)
    made.problems += problems
    return made


def score(ours: float, theirs: float, **more: Any) -> dict[str, Any]:
    found = {"ours": ours, "against": theirs, "base": 3.0, "lower_is_better": True, "over_against": None}
    return {**found, "wins": None, "p_win": None, **more}


ROWS = {"won": True, "wins": 8, "losses": 2, "reason": "of 10 decided rows 8 are won"}


@pytest.mark.parametrize(
    ("ours", "theirs", "scored", "verdict", "why"),
    [
        ((), (), score(2, 2.1, over_against=ROWS), Verdict.WON, "of 10 decided rows 8 are won"),
        ((), (), score(2, 2.1, over_against={**ROWS, "won": False}), Verdict.LOST, "of 10 decided rows"),
        ((), (), score(2, 2, over_against={**ROWS, "wins": 0, "losses": 0}), Verdict.DRAWN, "no row differs"),
        ((), (), score(0.98, 1.0, wins=True), Verdict.WON, "2.00% better, 1% better needed"),
        ((), (), score(0.995, 1.0, wins=False), Verdict.LOST, "0.50% better, 1% better needed"),
        ((), (), score(1.5, 1.0, wins=True, lower_is_better=False), Verdict.WON, "50.00% better"),
        ((), (), score(-0.6, -0.5, wins=False, lower_is_better=False), Verdict.LOST, "20.00% worse"),
        ((), (), score(0.1, 0.0, wins=False), Verdict.LOST, "-0.1000"),
        ((), (), None, Verdict.UNKNOWN, "there is no score of this kind here"),
        ((), (), score(0.5, 0.5), Verdict.UNKNOWN, "not everything was compared"),
        (("NaN in it",), (), None, Verdict.LOST, "NaN in it"),
        ((), ("exit code 3",), score(2, 0), Verdict.WON, "the opponent fails: exit code 3"),
        (("exit code 1",), None, None, Verdict.LOST, "exit code 1"),
        ((), None, None, Verdict.UNKNOWN, "not finished"),
    ],
)
def test_the_verdict_of_a_task(
    ours: tuple[str, ...],
    theirs: tuple[str, ...] | None,
    scored: dict[str, Any] | None,
    verdict: Verdict,
    why: str,
) -> None:
    task = trained(60, 20, *ours)
    task.opponent = None if theirs is None else trained(90, 30, *theirs)
    task.score = scored
    (found,) = sparred(Rehearsal("us", "c" * 40, 1.0, 1, tasks=[task]))
    assert found.verdict is verdict
    assert found.why.startswith(why)


TABLE = """\
/entries/ours at cccccccccccc
against https://example.org/champion at dddddddddddd

task              opponent      ours  P(win)  result    trained: opponent, ours
instruct-kl         2.1000    2.0000     97%  won              1 min 30 s, 60 s
dpo                 0.4800    0.5000      4%  lost             1 min 30 s, 60 s
grpo                     –         –       –  won                       –, 60 s

instruct-kl: won: of 10 decided rows 8 are won
  first submission after 20 s, the opponent's after 30 s
dpo: lost: of 10 decided rows 2 are won
  first submission after 20 s, the opponent's after 30 s
grpo: won: the opponent fails: the image is not built: RUN false

~ the data are made up
~ dpo: no GPU: it trains on the CPU; validators give 1

2 of 3 won, by the gate of DATE; we lose dpo
report and logs: /out
next: god-miner tournament odds text --report /out/report.json
"""


def test_the_table_says_where_we_lose(capsys: pytest.CaptureFixture[str]) -> None:
    tasks = [trained(60, 20, name=name) for name in ("instruct-kl", "dpo", "grpo")]
    for task in tasks[:2]:
        task.opponent = trained(90, 30)
    tasks[0].score = score(2, 2.1, over_against=ROWS, p_win=0.97)
    lost = {**ROWS, "won": False, "reason": "of 10 decided rows 2 are won"}
    tasks[1].score = score(0.5, 0.48, over_against=lost, p_win=0.04)
    tasks[2].opponent = TaskRehearsal("grpo", "d", 1.0, problems=["the image is not built: RUN false"])
    for task in tasks:
        task.deviations = ["the data are made up"]
    tasks[1].deviations.append("no GPU: it trains on the CPU; validators give 1")
    opponent = OpponentClone("https://example.org/champion", "d" * 40)
    report = Rehearsal("/entries/ours", "c" * 40, 1.0, 1, tasks=tasks, opponent=opponent, output="/out")
    _show(_Rehearsed(report, Redactor(), None, 0), spar_lines(report))
    shown = capsys.readouterr().out
    assert shown.replace(report.as_dict()["rules_as_of"], "DATE") == TABLE  # type: ignore[arg-type]
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert [one["verdict"] for one in spar_data(report)] == ["won", "lost", "won"]
