"""Models of the kinds that give trouble, each from its folder to a submission that loads as the base does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from core.domain.choices import Method
from core.domain.tasks import TaskType
from core.runs.run_files import RunEnd
from core.submission.metadata import COMPARED
from tests.trainer import odd_models, tiny
from tests.trainer.forks import ForkServer
from tests.trainer.runner.test_text_runner import execute, rescored
from tests.trainer.tasks import DATASETS, planned, task
from trainer.runner import text_runner

ALL = [
    ("gpt2", Method.LORA, TaskType.INSTRUCT),
    ("tied", Method.FULL, TaskType.INSTRUCT),
    ("mixture", Method.FULL, TaskType.CHAT),
    ("fewer_rows", Method.FULL, TaskType.INSTRUCT),
    ("no_padding", Method.LORA, TaskType.DPO),
    ("seeing", Method.LORA, TaskType.INSTRUCT),
    ("seeing", Method.FULL, TaskType.DPO),
]


@pytest.mark.parametrize(("kind", "method", "task_type"), ALL, ids=lambda one: str(one))
def test_it_is_trained_and_what_is_submitted_is_a_fine_tune_of_it(
    forks: ForkServer, profile: Path, tmp_path: Path, kind: str, method: Method, task_type: TaskType
) -> None:
    model = odd_models.save(tmp_path / "model", kind)
    run = planned(task(tmp_path, task_type, model=model), profile, method=method)
    result = execute(run, forks)
    assert (result.end, result.submission) == (RunEnd.FINISHED, True), result.detail
    assert result.best is not None
    base, ours = rescored(run)
    assert ours == pytest.approx(result.best.value, abs=2e-3)
    assert ours < base
    if method is Method.FULL:
        place = Path(run.submission_dir)
        assert names(place) == names(model)
        configs = [json.loads((folder / "config.json").read_text("utf-8")) for folder in (model, place)]
        wanted, have = ({key: config.get(key) for key in COMPARED} for config in configs)
        assert have == wanted


def names(folder: Path, file_name: str = "model") -> set[str]:
    tensors: set[str] = set()
    for file in folder.glob(f"{file_name}*.safetensors"):
        with safe_open(file, "pt") as weights:
            tensors |= set(weights.keys())
    return tensors


#: 10^15 rounds.
ENDLESS = 3 * "{% for one in range(99999) %}" + 3 * "{% endfor %}"


@pytest.mark.thorough_rows("normalizer")
@pytest.mark.parametrize("kind", ["template", "normalizer", "pattern"])
def test_a_tokenizer_that_never_encodes_a_row_is_a_bad_model_and_not_a_crash(
    forks: ForkServer, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A crash is tried again, and what never ends held the GPUs until the deadline."""
    monkeypatch.setattr(text_runner, "TRIAL_S", 3.0)
    model = tiny.save(tmp_path / "model", "llama")
    if kind == "template":
        settings = json.loads((model / "tokenizer_config.json").read_text("utf-8"))
        settings["chat_template"] = ENDLESS
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
    elif kind == "normalizer":
        odd_models.with_normalizer_bomb(model)
    else:
        odd_models.with_endless_pattern(model)
    rows = [{**row, "output": "a" * 80} for row in tiny.instruct_rows(60)]
    if kind == "template":
        chat = DATASETS[TaskType.CHAT].model_copy(update={"chat_template": "tokenizer_default"})
        run = planned(task(tmp_path, TaskType.CHAT, model=model, dataset=chat), profile)
    else:
        run = planned(task(tmp_path, TaskType.INSTRUCT, data=rows, model=model), profile)
    result = execute(run, forks, retries=True)
    assert (result.end, result.submission) == (RunEnd.BAD_MODEL, False)
    assert ("retry-limit" if kind == "pattern" else "did not encode the first rows") in result.detail
    assert not (Path(run.work_dir) / "data-2").exists(), "it is not tried again"
