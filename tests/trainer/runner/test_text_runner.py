"""Text runs through real Axolotl, each in a few seconds: what is learned, when it ends, what goes wrong."""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from benchmarks.loadable import load
from core.domain.choices import Method
from core.domain.tasks import GrpoDataset, RewardFunction, TaskType
from core.runs.progress import (
    CheckpointEvent,
    ControlEvent,
    EvalEvent,
    NoteEvent,
    ProgressEvent,
    StepEvent,
    parse_events,
)
from core.runs.run_files import CONTROL_FILE, RunEnd, RunResult, RunSpec
from tests.trainer import tiny
from tests.trainer.forks import ForkServer
from tests.trainer.tasks import plan_of, planned, task, write_profile
from trainer.handoff import LaunchSpec, TrainingFailure
from trainer.inputs.tables import read_table
from trainer.runner import text_runner
from trainer.runner.processes import StopRequest
from trainer.runner.text_runner import TextRunner
from trainer.scoring.held_out import HeldOut
from trainer.session.submission import submission_kind


def execute(run: RunSpec, forks: ForkServer, *, retries: bool = False, patch: str = "") -> RunResult:
    start = functools.partial(forks.start, patch=f"all_rows_are_judged {patch}")
    return TextRunner(run, StopRequest(Path(run.stop_path)), retries=retries, start=start).execute()


def events(run: RunSpec) -> list[ProgressEvent]:
    data = Path(run.progress_path).read_bytes()
    return [line.event for line in parse_events(data) if line.event is not None]


def launch_spec(run: RunSpec, launch: int = 1) -> LaunchSpec:
    return LaunchSpec.model_validate_json(
        (Path(run.work_dir) / f"launch-{launch}" / "launch.json").read_bytes()
    )


def submitted_model(run: RunSpec) -> Any:
    """As anybody loads it, with plain transformers and peft."""
    return load(Path(run.submission_dir), Path(run.model_path))


def held_out(run: RunSpec) -> HeldOut:
    prepared = launch_spec(run).prepared
    return HeldOut.open(run, prepared, tiny.tokenizer(adds_begin=True))


def rescored(run: RunSpec) -> tuple[float, float]:
    """Base and submission, scored anew on the held-out rows by the validator's metric."""
    held = held_out(run)
    base = AutoModelForCausalLM.from_pretrained(run.model_path).eval()
    return held.remember_base(base).value, held.score(submitted_model(run), reference=base).value


@pytest.mark.parametrize(
    ("task_type", "method"),
    [(TaskType.INSTRUCT, Method.LORA), (TaskType.CHAT, Method.FULL), (TaskType.DPO, Method.LORA)],
)
def test_what_is_submitted_loads_anywhere_and_is_better_than_the_base_on_held_out_rows(
    forks: ForkServer, profile: Path, tmp_path: Path, task_type: TaskType, method: Method
) -> None:
    run = planned(task(tmp_path, task_type), profile, method=method)
    result = execute(run, forks)
    assert (result.end, result.submission, result.steps) == (RunEnd.FINISHED, True, 20), result.detail
    assert result.best is not None
    assert result.base is not None
    base, ours = rescored(run)
    assert base == pytest.approx(result.base.value, abs=1e-3)
    assert ours == pytest.approx(result.best.value, abs=1e-3)
    assert ours < base
    assert submission_kind(Path(run.submission_dir)) == ("adapter" if method is Method.LORA else "full")


def test_the_same_run_is_the_same_training(forks: ForkServer, tmp_path: Path) -> None:
    """But for rounding: the adapter begins with weights of the plan's seed too."""
    losses = []
    for attempt in ("first", "second"):
        profile = write_profile(tmp_path / f"{attempt}.yaml", targets={"max_steps": 3})
        run = planned(task(tmp_path / attempt, TaskType.INSTRUCT), profile)
        assert execute(run, forks, patch="unseeded").end is RunEnd.FINISHED
        steps = [event for event in events(run) if isinstance(event, StepEvent)]
        losses.append([event.loss for event in steps])
        for step in steps[1:]:  # the first has no time before it
            assert step.tokens_s is not None
            assert step.samples_s is not None
            assert 1 <= step.tokens_s / step.samples_s <= plan_of(run).sequence.length
    assert len(losses[0]) == 3
    # Other weights make the second loss another by some thousandths.
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


#: Every token counts, so hardly any two completions are worth the same: each step has something to learn.
LETTERS = """
def letters(completions, **kwargs):
    return [one.count("a") / (len(one) + 1) for one in completions]
"""


@pytest.mark.thorough_rows("full")
@pytest.mark.parametrize(("method", "rate"), [(Method.LORA, 2e-2), (Method.FULL, 5e-3)])
def test_a_task_with_rewards_raises_them(
    forks: ForkServer, tmp_path: Path, method: Method, rate: float
) -> None:
    """Several times over, judged at fixed steps: neither the draws of a sample nor the clock decide."""
    profile = write_profile(
        tmp_path / "grpo.yaml",
        targets={"learning_rate": rate, "val_rows_max": 16, "micro_batch_size": 16},
        sections={"grpo": {"targets": {"grpo_generations": 8, "gradient_accumulation_steps": 1}}},
    )
    rewards = [RewardFunction(reward_func=LETTERS, reward_weight=1.0)]
    dataset = GrpoDataset(field_prompt="prompt", reward_functions=rewards)
    run = planned(task(tmp_path, TaskType.GRPO, 600, rows=100, dataset=dataset), profile, method=method)
    result = execute(run, forks, patch="judged_every:10")
    assert (result.end, result.steps) == (RunEnd.FINISHED, 20), result.detail
    base, *scores = [event.score for event in events(run) if isinstance(event, EvalEvent)]
    assert [score.step for score in scores] == [10, 20]
    best = result.best
    assert best in scores
    assert best is not None
    assert best.rewarded is not None
    assert not best.lower_is_better
    assert best.value > 0  # gains over the base's rewards, less KL
    assert best.rewarded.means[0] > best.rewarded.base[0]
    assert not any(score.beats(best) for score in (base, *scores))
    # What was submitted is that one: of the others the KL is another.
    reference = AutoModelForCausalLM.from_pretrained(run.model_path).eval()
    held = held_out(run)
    held.remember_base(reference)
    again = held.rewarded(held.score(submitted_model(run), reference=reference))
    assert again is not None
    assert again.kl == pytest.approx(best.rewarded.kl, abs=1e-3)
    assert again.means[0] > again.base[0]


def rates(run: RunSpec) -> list[float]:
    return [event.lr for event in events(run) if isinstance(event, StepEvent) and event.lr is not None]


def test_a_machine_slower_than_planned_ends_decayed_and_in_time(
    forks: ForkServer, endless: Path, tmp_path: Path
) -> None:
    """By a clock that only steps advance: 40 fit, where thousands were planned."""
    run = planned(task(tmp_path, TaskType.INSTRUCT, 600), endless)
    result = execute(run, forks, patch="cut_off:8 steps_take:0.2")
    assert result.end is RunEnd.CLOCK
    assert 30 < result.steps < 40
    factors = rates(run)
    assert max(factors) == pytest.approx(1e-3, rel=0.01)
    assert factors[-1] < 0.05 * max(factors)


def stopped(run: RunSpec, forks: ForkServer) -> tuple[Path, int]:
    """Asked to stop after its first submission: the checkpoint that it leaves, and its steps."""

    result = execute(run, forks, patch="slower_steps asked_to_stop_after_the_first_submission")
    assert (result.end, result.exit_code) == (RunEnd.STOPPED, 0), result.detail
    checkpoint = [event for event in events(run) if isinstance(event, CheckpointEvent)][-1]
    assert checkpoint.step == result.steps
    return Path(checkpoint.path), result.steps


def gone_on(run: RunSpec, folder: Path, checkpoint: Path) -> RunSpec:
    """The same run, from there, with a folder and a time of its own and the same submission."""
    folder.mkdir()
    later = time.time() - run.began_at
    own: dict[str, Any] = {"work_dir": str(folder), "resume_from": str(checkpoint)}
    own |= {key: getattr(run, key) + later for key in ("began_at", "end_by", "deadline_at")}
    names = {"progress_path": "progress.jsonl", "result_path": "result.json", "stop_path": "stop"}
    return run.model_copy(update=own | {key: str(folder / name) for key, name in names.items()})


def test_asked_to_stop_it_saves_ends_and_can_be_resumed_with_the_same_schedule(
    forks: ForkServer, tmp_path: Path
) -> None:
    profile = write_profile(
        tmp_path / "profile.yaml", targets={"max_steps": 40, "eval_steps": 10, "lr_scheduler": "linear"}
    )
    first = planned(task(tmp_path / "first", TaskType.INSTRUCT), profile)
    checkpoint, done = stopped(first, forks)
    assert done < 40
    before = [event.score.value for event in events(first) if isinstance(event, EvalEvent) and event.best]
    second = gone_on(first, tmp_path / "second", checkpoint)
    again = execute(second, forks)
    assert (again.end, again.steps) == (RunEnd.FINISHED, 40)
    steps = [event for event in events(second) if isinstance(event, StepEvent)]
    assert steps[0].step == done + 1
    # Linear from the peak at step 2 to nothing at step 40.
    assert steps[0].lr == pytest.approx(1e-3 * (40 - done) / 38, rel=0.1)
    assert again.best is not None
    assert again.best.value <= min(before)


def test_out_of_memory_climbs_down_the_ladder_and_finishes(
    forks: ForkServer, profile: Path, tmp_path: Path
) -> None:
    run = planned(task(tmp_path, TaskType.INSTRUCT), profile)
    result = execute(run, forks, retries=True, patch="out_of_memory_above_one_row")
    assert (result.end, result.submission) == (RunEnd.FINISHED, True), result.detail
    notes = [event.text for event in events(run) if isinstance(event, NoteEvent) and event.kind == "remedy"]
    assert notes == ["after oom: micro_batch_size 2 → 1"]
    assert any(event.event == "oom" for event in events(run))
    failed = TrainingFailure.model_validate_json(launch_spec(run).failure_path(0).read_bytes())
    assert (failed.end, failed.moment) == (RunEnd.OOM, "train")
    assert "Tried to allocate" in failed.detail


def test_a_model_that_breaks_is_noticed_and_what_was_best_before_stays(
    forks: ForkServer, profile: Path, tmp_path: Path
) -> None:
    run = planned(task(tmp_path, TaskType.INSTRUCT), profile)
    result = execute(run, forks, patch="broken_after_ten_steps")
    assert (result.end, result.submission, int(result.exit_code)) == (RunEnd.NAN, True, 0)
    assert result.best is not None
    assert result.best.step <= 10
    submitted_model(run)


def test_a_crash_is_retried_once_and_then_reported_with_its_cause(
    forks: ForkServer, profile: Path, tmp_path: Path
) -> None:
    run = planned(task(tmp_path, TaskType.INSTRUCT), profile)
    result = execute(run, forks, retries=True, patch="raises_at_step_five")
    assert result.end is RunEnd.CRASHED
    assert "device-side assert" in result.detail
    assert result.submission  # of the first evaluation, so validators upload it all the same
    assert len(list(Path(run.work_dir).glob("launch-*"))) == 2


def test_an_engine_without_our_plugin_is_no_success(
    forks: ForkServer, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Axolotl only logs that it could not import a plugin, trains to the end and exits 0."""
    monkeypatch.setattr(text_runner, "PLUGIN", "trainer.not_there.Plugin")
    run = planned(task(tmp_path, TaskType.INSTRUCT), profile)
    result = execute(run, forks)
    assert (result.end, result.submission) == (RunEnd.CRASHED, False)
    assert "never loaded our plugin" in result.detail


@pytest.mark.parametrize(
    ("task_type", "kl", "loss", "at_labels"),
    [
        (TaskType.INSTRUCT, None, "AnswerLogits._batch_loss", False),
        (TaskType.INSTRUCT, 0.3, "add_kl.<locals>.with_kl", True),
        (TaskType.DPO, None, "MicroBatchSplitter._partial_loss", None),
        (TaskType.GRPO, None, "MicroBatchSplitter._partial_loss", None),
    ],
)
def test_the_engines_trainer_has_our_loss_and_what_axolotl_ignores(
    forks: ForkServer,
    tmp_path: Path,
    task_type: TaskType,
    kl: float | None,
    loss: str,
    at_labels: bool | None,
) -> None:
    """Logits of prompts are left out where nothing else reads them."""
    profile = write_profile(tmp_path / "p.yaml", targets={"dataloader_drop_last": True, "max_steps": 2})
    run = planned(task(tmp_path, task_type).model_copy(update={"kl_coefficient": kl}), profile)
    assert execute(run, forks, patch="dumps_arguments").end is RunEnd.FINISHED
    arguments = json.loads(Path(launch_spec(run).launch_dir, "arguments.json").read_text("utf-8"))
    assert (arguments["loss"], arguments["at_labels"]) == (loss, at_labels)
    assert arguments["dataloader_drop_last"] is True
    assert "SessionCallback" in arguments["callbacks"]
    if task_type is not TaskType.INSTRUCT:
        assert arguments["ddp_find_unused_parameters"] is False


@pytest.mark.parametrize(
    ("task_type", "metric"), [(TaskType.DPO, "eval_loss"), (TaskType.GRPO, "reward-margin")]
)
def test_the_engines_own_loss_may_decide_but_not_where_it_is_meaningless(
    forks: ForkServer, tmp_path: Path, task_type: TaskType, metric: str
) -> None:
    """Axolotl reads held-out pairs by the training's columns, and GRPO's loss is zero for any model."""
    said = {"eval_metric": "loss", "max_steps": 3, "eval_steps": 3, "val_rows_max": 4}
    run = planned(task(tmp_path, task_type), write_profile(tmp_path / "p.yaml", targets=said))
    result = execute(run, forks)
    assert (result.end, result.submission) == (RunEnd.FINISHED, True), result.detail
    assert result.best is not None
    assert result.base is not None
    assert (result.best.metric, result.base.metric) == (metric, metric)
    assert result.best.lower_is_better == (metric == "eval_loss")


def test_new_rows_at_an_old_place_are_trained_on(forks: ForkServer, profile: Path, tmp_path: Path) -> None:
    """Axolotl's cache of prepared rows knows paths and settings, not contents."""
    run = planned(task(tmp_path, TaskType.INSTRUCT, data=tiny.instruct_rows(100, seed=1)), profile)
    assert execute(run, forks).submission
    Path(run.data_path).write_text(json.dumps(tiny.instruct_rows(100, seed=2)), encoding="utf-8")
    assert execute(run, forks).submission
    first, second = (read_table(path) for path in Path(run.work_dir).glob("data-*/*/train"))
    assert list(first) != list(second)
    cached = [path for path in (Path(run.work_dir) / "prepared").iterdir() if path.is_dir()]
    assert len(cached) == 2


def test_a_single_row_is_trained_on_and_submitted_without_a_score(
    forks: ForkServer, profile: Path, tmp_path: Path
) -> None:
    data = [{"instruct": "\0 \ud83e", "input": None, "output": "apples \U0001f34e \0"}]
    run = planned(task(tmp_path, TaskType.INSTRUCT, data=data), profile)
    result = execute(run, forks)
    assert (result.end, result.submission) == (RunEnd.FINISHED, True), result.detail
    assert (result.best, result.steps > 0) == (None, True)
    submitted_model(run)


def test_rows_without_a_use_end_a_run_without_a_plan_with_their_reason(
    forks: ForkServer, tmp_path: Path
) -> None:
    data = [{"prompt": "a", "chosen": "b", "rejected": "b"}] * 50
    result = execute(task(tmp_path, TaskType.DPO, data=data), forks, retries=True)
    assert (result.end, result.submission, int(result.exit_code)) == (RunEnd.BAD_DATA, False, 20)
    assert "equal" in result.detail


def test_a_trial_that_was_killed_with_its_run_is_no_reason_against_the_next(
    forks: ForkServer, tmp_path: Path
) -> None:
    """A run that is requeued begins in the same place."""
    run = task(tmp_path, TaskType.DPO, data=[{"prompt": "a", "chosen": "b", "rejected": "b"}] * 50)
    trial = Path(run.work_dir) / "data-1" / "trial"
    trial.parent.mkdir(parents=True)
    trial.touch()
    os.utime(trial, (0, 0))
    assert execute(run, forks, retries=True).end is RunEnd.BAD_DATA


def test_rewards_that_cannot_work_end_the_run_with_their_reason(forks: ForkServer, tmp_path: Path) -> None:
    source = "def apples(completions):\n    import os\n    os._exit(1)"
    rewards = [RewardFunction(reward_func=source, reward_weight=1.0)]
    dataset = GrpoDataset(field_prompt="prompt", reward_functions=rewards)
    result = execute(task(tmp_path, TaskType.GRPO, dataset=dataset), forks)
    assert (result.end, result.submission) == (RunEnd.BAD_REWARD, False), result.detail


STEPS = 8


@pytest.mark.thorough_rows("axolotl-Dpo", "axolotl-InstructTextTask-True-2")
@pytest.mark.parametrize(
    ("engine", "task_type", "packing", "micro"),
    [
        ("axolotl", TaskType.INSTRUCT, False, 2),
        ("axolotl", TaskType.DPO, False, 2),
        ("native", TaskType.INSTRUCT, False, 2),
        ("axolotl", TaskType.INSTRUCT, True, 2),
        ("axolotl", TaskType.INSTRUCT, True, 8),
        ("axolotl", TaskType.DPO, False, 8),
    ],
)
def test_smaller_or_larger_passes_from_the_middle_on_change_no_loss(
    forks: ForkServer, tmp_path: Path, engine: str, task_type: TaskType, packing: bool, micro: int
) -> None:
    """Optimizer, schedule and order go on: only rounding differs. Packed as Axolotl does it for attention of
    variable lengths, all sequences of a micro-batch in one row."""
    targets = {
        "sample_packing": packing,
        "sequence_len": 64,
        "engine": engine,
        "max_steps": STEPS,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "lora_dropout": 0.0,
    }
    raw = {"axolotl": {"multipack_real_batches": False}} if packing else {}
    profile = write_profile(tmp_path / "profile.yaml", targets=targets, engine_config=raw)
    model = tiny.save(tmp_path / "model")
    results: list[RunResult] = []
    curves: list[list[float | None]] = []
    for name, patch in (("undisturbed", ""), ("asked", f"asks_after:3:{micro}:0.8")):
        control = str(tmp_path / name / CONTROL_FILE)
        run = planned(task(tmp_path / name, task_type, model=model, control_path=control), profile)
        plan = plan_of(run)
        assert (plan.engine, plan.batch.micro, plan.sequence.packing) == (engine, 4, packing)
        results.append(execute(run, forks, patch=f"judged_every:{STEPS} {patch}"))
        assert results[-1].end is RunEnd.FINISHED, results[-1].detail
        curves.append([event.loss for event in events(run) if isinstance(event, StepEvent)])
    assert len(curves[0]) == STEPS
    # Joined micro-batches are one mean over their labels, which are not quite as many in each.
    close = 2e-2 if packing and micro > 4 else 1e-4
    assert curves[1] == pytest.approx(curves[0], rel=close)
    undisturbed, asked = (result.best for result in results)
    assert undisturbed is not None
    assert asked is not None
    assert asked.value == pytest.approx(undisturbed.value, rel=close)
    (answer,) = [event for event in events(run) if isinstance(event, ControlEvent)]
    assert (answer.number, answer.applied, answer.micro, answer.duty) == (7, True, micro, 0.8)
    assert answer.text == f"after step 3: sequences in a pass 4 → {micro}; duty 1 → 0.8"
