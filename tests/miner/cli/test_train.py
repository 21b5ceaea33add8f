"""`god-miner train`: trainings of the operator's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from core.domain.errors import ConfigError
from miner.__main__ import app
from miner.cli import train
from miner.jobs.native_runs import NativeMode
from tests.miner.jobs.test_native_runs import rows

pytestmark = pytest.mark.process


#: A python that answers what it is asked about itself, and else what its script says.
FAKE = """#!/bin/sh
if [ "$1" = -c ]; then exec {python} "$@"; fi
echo "$@" >> {folder}/asked
cat {folder}/answer 2>/dev/null
exit {code}
"""


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fake(tmp_path)
    monkeypatch.setenv("TRAINER_PYTHON", str(tmp_path / "python"))
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}")
    rows(tmp_path, {"instruction": "a", "output": "b"})
    return tmp_path


def fake(folder: Path, code: int = 0, *answer: dict[str, Any]) -> None:
    path = folder / "python"
    path.write_text(FAKE.format(python=sys.executable, folder=folder, code=code))
    path.chmod(0o755)
    (folder / "answer").write_text("".join(json.dumps(one) + "\n" for one in answer))


def asked(folder: Path) -> list[str]:
    return (folder / "asked").read_text().splitlines()


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["train", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


NEW = ("--model", "base", "--data", "rows.json", "--profile", "cpu-native")


def test_a_training_is_started_in_the_training_environment_and_its_result_shown(setting: Path) -> None:
    (setting / "run").mkdir()
    (setting / "run/plan.json").write_text("{}")
    code, said = run("native", "run", *NEW, "--write-only")
    assert code == 0
    assert said.strip() == str(setting / "run/run.json")
    assert json.loads((setting / "run/run.json").read_text())["plan_path"] == str(setting / "run/plan.json")
    result = {
        "end": "finished",
        "submission": True,
        "best": {"value": 1.25, "step": 30},
        "base": {"value": 2.5, "step": 0},
        "steps": 40,
    }
    (setting / "run/result.json").write_text(json.dumps(result))
    code, said = run("native", "run")
    assert code == 0
    assert asked(setting) == [f"-m trainer.text --run {setting}/run/run.json"]
    assert "held-out eval_loss: 2.5000 → 1.2500 at step 30" in said
    assert f"the model: {setting}/run/model" in said
    code, said = run("native", "run", "--json")
    assert json.loads(said.splitlines()[-1])["event"] == "result"


def test_a_run_can_be_written_as_a_job_for_sbatch(setting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ACCOUNT", "lab")
    code, said = run("native", "run", *NEW, "--hours", "2", "--sbatch", "4")
    assert (code, said.strip()) == (0, str(setting / "run/job.sbatch"))
    text = (setting / "run/job.sbatch").read_text()
    for option in ("--gpus-per-node=4", "--cpus-per-task=64", "--time=125", "--account=lab", "--export=NIL"):
        assert f"#SBATCH {option}\n" in text
    assert "#SBATCH --export=ALL" not in text
    assert text.endswith(f"-m miner train native {setting}/run\n")
    assert not (setting / "asked").exists()
    subprocess.run(["bash", "-n", setting / "run/job.sbatch"], check=True)


def test_a_training_without_a_result_is_an_error_that_names_the_log(setting: Path) -> None:
    fake(setting, 7)
    code, said = run("native", "run", *NEW)
    assert code == 7
    assert f"{setting}/run/log" in said


def test_a_model_from_nothing_is_made_first(setting: Path) -> None:
    (setting / "book.txt").write_text("words")
    with pytest.raises(Exception, match="--tokenizer"):
        run("native", "run", "--mode", "pretrain", "--data", "book.txt", "--params", "1M")
    (setting / "run/base").mkdir(parents=True)
    (setting / "python").write_text(
        (setting / "python").read_text().replace("exit 0", f"echo '{{}}' > {setting}/run/base/config.json")
    )
    code, _ = run(
        "native", "run", "--mode", "pretrain", "--data", "book.txt", "--params", "1M", "--tokenizer", "base",
        "--profile", "cpu-native", "--write-only",
    )  # fmt: skip
    assert code == 0
    assert asked(setting) == [
        f"-m trainer.native.new_model {setting}/run/base --params 1M --tokenizer {setting}/base --length 2048"
    ]


def test_a_trace_is_shown_as_a_table(setting: Path) -> None:
    kernel = {"event": "kernel", "name": "aten::mm", "calls": 1140, "ms_per_step": 4.15, "share": 0.38}
    fake(setting, 0, kernel, {"event": "traced", "trace": "/t.json.gz", "table": "/k.txt"})
    code, said = run("native", "run", *NEW, "--trace")
    assert code == 0
    assert asked(setting) == [f"-m trainer.native.trace {setting}/run/run.json {setting}/run/trace"]
    assert "aten::mm  1,140         4.15  38.0%" in said
    assert "/t.json.gz" in said


def test_tokens_are_made_by_the_training_environment(setting: Path) -> None:
    (setting / "book.txt").write_text("words")
    fake(setting, 0, {"documents": 1, "tokens": 5})
    code, said = run("tokens", "book.txt", "out", "--tokenizer", "base")
    assert (code, json.loads(said)["tokens"]) == (0, 5)
    assert asked(setting) == [
        f"-m trainer.inputs.corpus {setting}/book.txt {setting}/out --tokenizer {setting}/base"
    ]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["native", "run"], "name --model and --data"),
        (["native", "run", "--model", "base"], "needs both"),
    ],
)
def test_a_mistake_is_reported_in_a_line(setting: Path, arguments: list[str], why: str) -> None:
    with pytest.raises(Exception, match=why):
        run(*arguments)


def test_the_choices_of_a_mode_are_the_trainer_s() -> None:
    assert get_args(train.ModeName) == tuple(NativeMode)


#: Answers what it is asked about itself like a python, and tells instead of scoring.
ECHO = """#!/bin/sh
if [ "$1" = -c ]; then exec {python} "$@"; fi
{{ for word in "$@"; do echo "$word"; done; env; }} > {seen}
exit 3
"""
MODELS = """
import json, sys
from pathlib import Path
from tests.trainer import tiny
folder = Path(sys.argv[1])
tiny.save(folder / "base"); tiny.save(folder / "other", seed=8)
(folder / "rows.json").write_text(json.dumps(tiny.chat_rows(8)))
"""
ROOT = Path(__file__).parents[3]


def files(folder: Path) -> list[str]:
    task = {
        "dataset_type": {
            "chat_column": "conversations",
            "chat_user_reference": "human",
            "chat_assistant_reference": "gpt",
        },
        "data": "rows.json",
    }
    (folder / "task.json").write_text(json.dumps(task))
    for name in ("base", "other"):
        (folder / name).mkdir(exist_ok=True)
    return ["eval", "--task", str(folder / "task.json"), "--base", str(folder / "base")]


def test_the_training_environment_is_started_with_what_was_asked_and_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, seen = tmp_path / "python", tmp_path / "seen"
    fake.write_text(ECHO.format(python=sys.executable, seen=seen))
    fake.chmod(0o755)
    monkeypatch.setenv("TRAINER_PYTHON", str(fake))
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.chdir(tmp_path)
    asked = [*files(tmp_path), "--model", str(tmp_path / "other"), "--rows", "5", "--json"]
    assert CliRunner().invoke(app, asked).exit_code == 3, "the scores' own exit code is ours"
    reported = seen.read_text()
    assert reported.startswith(
        f"-m\ntrainer.scoring.eval\n--task\n{tmp_path}/task.json\n--base\n{tmp_path}/base\n"
    )
    assert f"--model\n{tmp_path}/other\n--rows\n5\n--json\n" in reported
    assert "PYTHONPATH=" in reported
    assert "TQDM_DISABLE=1\n" in reported
    assert "hf_secret" not in reported


PICTURES = """#!{python}
import json, sys
assert sys.argv[1:3] == ["-m", "trainer.pictures.evaluate"]
job = json.load(open(sys.argv[3]))
rows = [
    dict(path=path, score=0.5 - 0.1 * at, text_losses=[0.4], no_text_losses=[0.6])
    for at, path in enumerate(job["adapters"])
]
json.dump(dict(pictures=["a.png"], adapters=rows, complete=True), open(job["report_path"], "w"))
"""


def test_pictures_are_scored_where_the_evaluators_stack_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "python"
    fake.write_text(PICTURES.format(python=sys.executable))
    fake.chmod(0o755)
    monkeypatch.setenv("GOD_MINER_PICTURES_PYTHON", str(fake))
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    model = {"family": "krea2", "base_path": "/b", "text_encoder_paths": ["/t"], "vae_path": "/v"}
    model["comfy_dir"] = "/c"
    task = {"model": model, "pictures_dir": str(tmp_path), "adapters": [""], "report_path": "/none"}
    (tmp_path / "task.json").write_text(json.dumps(task))
    (tmp_path / "ours").mkdir()
    asked = ["eval", "--task", str(tmp_path / "task.json"), "--model", str(tmp_path / "ours")]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "-20.00%" in done.output
    scores = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)
    assert [row["path"] for row in scores["adapters"]] == ["", f"{tmp_path}/ours/last.safetensors"]

    other = [*asked, "--base", str(tmp_path), "--rows", "5", "--allow-rewards"]
    refused = CliRunner().invoke(app, other)
    assert isinstance(refused.exception, ConfigError)
    refusals = [problem.where for problem in refused.exception.problems]
    assert refusals == ["--base", "--rows", "--allow-rewards"]


def test_a_folder_that_is_not_there_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, [*files(tmp_path), "--model", str(tmp_path / "none")])
    assert ended.exit_code == 2


@pytest.mark.thorough
def test_models_are_scored_in_the_real_training_environment(tmp_path: Path, training_python: str) -> None:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [training_python, "-c", MODELS, tmp_path], env=environment, check=True, capture_output=True
    )
    arguments = [*files(tmp_path), "--model", str(tmp_path / "other"), "--json"]
    settings = {"TRAINER_PYTHON": training_python, "DATA_DIR": str(tmp_path / "data")}
    ended = subprocess.run(
        [sys.executable, "-m", "miner", *arguments],
        env={**environment, **settings, "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert (report["rows"], [one["name"] for one in report["models"]]) == (8, ["base", "other"])
    assert report["models"][1]["over_base"]["rows"] == 8
