"""The tournaments' pool of newer models, each through the container's own entry point to a submission that
loads: every kind of task, every weight and adapters, both engines."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.loadable import load
from core.domain.choices import Engine, Method
from core.domain.tasks import TaskType
from core.planning.plan import TrainingPlan
from core.runs.run_files import RESULT_FILE, RunEnd, RunResult
from tests.trainer import odd_models
from tests.trainer.forks import ForkServer
from tests.trainer.tasks import DATASETS, ROWS, write_profile
from trainer import text
from trainer.runner import command_line
from trainer.runner import main as main_module
from trainer.runner.planning import PROFILE_VARIABLE
from trainer.runner.text_runner import TextRunner

FAMILIES = ("lfm2", "falcon_h1", "granite", "minicpm5", "kanana", "nanbeige")
KINDS = {
    "instruct": TaskType.INSTRUCT,
    "instruct-kl": TaskType.INSTRUCT,
    "chat": TaskType.CHAT,
    "dpo": TaskType.DPO,
    "grpo": TaskType.GRPO,
}
#: All combinations but one: nothing generates natively, and a plan takes Axolotl for it by itself.
CASES = [
    f"{family}-{engine}-{method}-{kind}"
    for family in FAMILIES
    for engine in (Engine.AXOLOTL, Engine.NATIVE)
    for method in (Method.LORA, Method.FULL)
    for kind in KINDS
    if not (engine is Engine.NATIVE and kind == "grpo")
]
FEW: dict[str, Any] = {"max_steps": 2, "eval_steps": 2, "save_steps": 2, "val_rows_max": 4}


@pytest.fixture(autouse=True)
def this_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The entry point ends the descendants of its process, of which the fork server is one here."""
    for name in ("adopt_orphans", "kill_descendants"):
        monkeypatch.setattr(main_module, name, lambda: None)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.kept(
    *("falcon_h1-axolotl-lora-instruct", "falcon_h1-axolotl-lora-grpo", "falcon_h1-native-full-instruct-kl"),
    *("lfm2-axolotl-full-instruct-kl", "lfm2-native-lora-dpo", "granite-native-lora-instruct"),
    *("granite-axolotl-full-dpo", "minicpm5-axolotl-lora-dpo", "kanana-axolotl-lora-chat"),
    *("kanana-native-full-chat", "nanbeige-axolotl-full-grpo", "nanbeige-native-lora-instruct-kl"),
)
@pytest.mark.parametrize("case", CASES)
def test_it_trains_in_the_container_and_its_submission_loads(
    forks: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    family, engine, method, kind = case.split("-", 3)
    model = odd_models.save(tmp_path / "cache" / "models" / f"org--{family}", family)
    sections = {"grpo": {"targets": {"gradient_accumulation_steps": 1}}}
    profile = write_profile(
        tmp_path / "profile.yaml", targets={**FEW, "engine": engine, "method": method}, sections=sections
    )
    monkeypatch.setenv(PROFILE_VARIABLE, str(profile))
    monkeypatch.setenv(command_line.WORK_VARIABLE, str(tmp_path / "work"))
    if kind == "instruct-kl":
        monkeypatch.setenv("USE_KL", "true")
        monkeypatch.setenv("KL_COEF", "0.3")
    assert trained(forks, tmp_path, monkeypatch, f"org/{family}", KINDS[kind]) == 0
    result = RunResult.model_validate_json((tmp_path / "work" / "77" / RESULT_FILE).read_bytes())
    assert (result.end, result.submission, result.steps) == (RunEnd.FINISHED, True, 2), result.detail
    assert result.best is not None
    plan = TrainingPlan.from_json((tmp_path / "work" / "77" / "launch-1" / "plan.json").read_bytes())
    assert (plan.engine, plan.method) == (engine, method)
    load(tmp_path / "checkpoints" / "77" / "ours", model)


def trained(
    forks: ForkServer, folder: Path, monkeypatch: pytest.MonkeyPatch, model: str, task_type: TaskType
) -> int:
    """The exit code of the validator's command line."""
    rows = folder / "cache" / "datasets" / "77_train_data.json"
    rows.parent.mkdir()
    rows.write_text(json.dumps(ROWS[task_type](40)), encoding="utf-8")
    monkeypatch.setattr(command_line, "CACHE", folder / "cache")
    monkeypatch.setattr(command_line, "CHECKPOINTS", folder / "checkpoints")
    monkeypatch.setattr(command_line, "process_start", time.time)
    start = partial(forks.start, patch="all_rows_are_judged")
    monkeypatch.setattr(text, "TextRunner", partial(TextRunner, start=start))
    options = {
        "task-id": "77",
        "model": model,
        "dataset": "https://example.org/rows",
        "dataset-type": DATASETS[task_type].model_dump_json(),
        "task-type": task_type.value,
        "file-format": "s3",
        "expected-repo-name": "ours",
        "hours-to-complete": "1",
    }
    return text.main([word for name, value in options.items() for word in (f"--{name}", value)])
