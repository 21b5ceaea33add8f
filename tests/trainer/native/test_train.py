"""The training itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.domain.choices import Attention, LrSchedule, Optimizer
from core.planning.plan import EmaPlan, LrSearchPlan, PrecisionPlan, TrainingPlan
from core.runs.run_files import RunEnd
from tests.trainer.native import tiny
from trainer.inputs.tokens import LabelledRow
from trainer.native import checkpoints, evaluation
from trainer.native.batches import BatchLayout, TokenRows
from trainer.native.train import NativeProber, Trainer, resume, run_loop
from trainer.scoring.held_out import row_losses
from trainer.session import session
from trainer.session.failures import NotANumber

pytestmark = pytest.mark.small


@pytest.fixture(autouse=True)
def agree_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take a millisecond here; the ranks of a real run compare notes every half second."""
    monkeypatch.setattr(session, "MAX_STEPS_BETWEEN_AGREEMENTS", 1)


@pytest.mark.parametrize("full", [False, True])
def test_the_held_out_loss_falls_and_the_best_is_submitted(tmp_path: Path, full: bool) -> None:
    outcome = run_loop(tiny.training(tmp_path, tiny.plan(full=full, steps=24)))
    assert (outcome.end, outcome.steps) == (RunEnd.FINISHED, 24)
    assert outcome.best is not None
    assert outcome.base is not None
    assert outcome.best.value < outcome.base.value
    reported = tiny.reported(tmp_path / "run")
    assert reported.best[-1] == outcome.best.step
    assert len(reported.losses) == len(reported.sizes) == 24
    assert all(1 <= size <= tiny.plan().sequence.length for size in reported.sizes)
    assert reported.rates[0] < max(reported.rates)
    assert reported.rates[-1] < 0.05 * max(reported.rates)


@pytest.mark.parametrize("full", [False, True])
def test_what_is_submitted_loads_with_transformers_and_peft_alone(tmp_path: Path, full: bool) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trainer = tiny.training(tmp_path, tiny.plan(full=full, steps=4))
    run_loop(trainer)
    submission = tmp_path / "run/submission"
    if full:
        model = AutoModelForCausalLM.from_pretrained(submission)
    else:
        model = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tmp_path / "model"), submission
        )
    ids = torch.arange(8)[None]
    torch.testing.assert_close(model(ids).logits, trainer.setup.net.eval().model(ids).logits)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_a_run_that_was_cut_goes_on_to_the_same_last_bit(tmp_path: Path, full: bool, packing: bool) -> None:
    plan = tiny.plan(full=full, steps=10, ema=EmaPlan(decay=0.9))
    first = tiny.training(tmp_path, plan, name="whole", packing=packing)
    run_loop(first)

    cut = tiny.training(tmp_path, plan, name="cut", packing=packing, stop_at=6)
    assert run_loop(cut).end is RunEnd.STOPPED
    state = checkpoints.newest_checkpoint(tmp_path / "cut/states")
    assert state is not None
    assert state.name == "checkpoint-6"

    rest = tiny.training(tmp_path, plan, name="rest", packing=packing)
    torch.manual_seed(99)
    assert resume(rest, state) == state
    assert run_loop(rest).end is RunEnd.FINISHED
    whole = tiny.reported(tmp_path / "whole")
    assert tiny.reported(tmp_path / "cut").losses == whole.losses[:6]
    assert tiny.reported(tmp_path / "rest").losses == whole.losses[6:]
    assert tiny.reported(tmp_path / "rest").held_out[-1] == whole.held_out[-1]
    for (name, one), (_, two) in zip(
        first.setup.net.named_parameters(), rest.setup.net.named_parameters(), strict=True
    ):
        assert torch.equal(one, two), name


def test_a_state_that_is_torn_or_of_another_run_is_left_for_an_older_one_or_none(tmp_path: Path) -> None:
    trainer = tiny.training(tmp_path, tiny.plan(steps=12), stop_at=9)
    run_loop(trainer)
    states = [path for _, path in checkpoints.checkpoints_in(tmp_path / "run/states")]
    older, newest = states[-2:]
    assert newest.name == "checkpoint-9"

    other = tiny.training(tmp_path, tiny.plan(steps=12), name="other")
    other.setup.shape = "larger"
    assert resume(other, newest) is None
    assert ["of another run" in note for note in tiny.notes(tmp_path / "other", "resume")] == [True, True]

    full = tiny.training(tmp_path, tiny.plan(full=True, steps=12), name="full")
    before = [weight.detach().clone() for weight in full.setup.net.parameters()]
    assert resume(full, newest) is None
    assert all("of another model" in note for note in tiny.notes(tmp_path / "full", "resume"))
    assert all(torch.equal(one, two) for one, two in zip(before, full.setup.net.parameters(), strict=True))

    for torn in ("trained.safetensors", "rank0.pt", "position.json"):
        content = (newest / torn).read_bytes()
        (newest / torn).write_bytes(content[: len(content) // 2])
        again = tiny.training(tmp_path, tiny.plan(steps=12), name=f"after-{torn}")
        assert resume(again, newest) == older
        assert again.position.step == checkpoints.step_of(older)
        assert "not a whole state" in tiny.notes(tmp_path / f"after-{torn}", "resume")[0]
        (newest / torn).write_bytes(content)


def test_gradients_that_are_no_numbers_move_nothing_and_three_in_a_row_end_the_run(tmp_path: Path) -> None:
    trainer = tiny.training(tmp_path, tiny.plan(steps=40))
    trainer.setup.net.register_forward_hook(
        lambda net, given, output: (
            output * float("nan") if net.training and trainer.position.step >= 6 else output
        )
    )
    outcome = run_loop(trainer)
    assert outcome.end is RunEnd.NAN
    assert outcome.steps <= 10
    assert outcome.best is not None
    assert (tmp_path / "run/submission/adapter_model.safetensors").exists()
    assert all(torch.isfinite(weight).all() for weight in trainer.setup.net.parameters())


@pytest.mark.parametrize("full", [False, True])
def test_the_divergence_from_the_base_is_part_of_loss_and_score_as_validators_have_it(
    tmp_path: Path, full: bool
) -> None:
    plan = tiny.plan(full=full, steps=24)
    free, tied = (
        tiny.training(tmp_path, plan, name="free"),
        tiny.training(tmp_path, plan, name="tied", kl=50.0),
    )
    run_loop(free)
    outcome = run_loop(tied)
    assert outcome.base is not None
    assert outcome.base.metric == "eval_loss+kl"
    assert outcome.base.value == pytest.approx(tiny.reported(tmp_path / "free").held_out[0], rel=1e-5)

    held = tiny.rows(tmp_path / "again", 8, seed=9)
    ids = [held[index].ids.tolist() for index in range(8)]
    marks = [held[index].trained.tolist() for index in range(8)]
    rows = [
        LabelledRow(one, [token if counts else -100 for token, counts in zip(one, mark, strict=True)])
        for one, mark in zip(ids, marks, strict=True)
    ]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")

    def apart(trainer: Trainer) -> tuple[float, float]:
        losses = row_losses(trainer.setup.net.model, rows, 0, reference=base, kl=True)
        return sum(losses.rows.values()) / 8, losses.kl_total / losses.kl_tokens

    (_, far), (loss, near) = apart(free), apart(tied)
    assert near < far
    whole = evaluation.HeldOutLoss(
        tied.setup.net, TokenRows(held, BatchLayout(by_row=True)), tiny.ALONE, 4
    ).score()
    assert whole == pytest.approx(loss + 50 * near, rel=1e-4)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    trainer = tiny.training(tmp_path, tiny.plan(full=True))
    begin = trainer.session.begin

    def begin_and_break() -> None:
        begin()
        with torch.no_grad():
            next(trainer.setup.net.parameters()).fill_(float("nan"))

    trainer.session.begin = begin_and_break  # type: ignore[method-assign]
    with pytest.raises(NotANumber, match="model is broken"):
        run_loop(trainer)
    assert not (tmp_path / "run/submission").exists()


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in trainer.setup.net.parameters()]


def prober_of(trainer: Trainer) -> NativeProber:
    assert isinstance(trainer.host.prober, NativeProber)
    return trainer.host.prober


def probed(prober: NativeProber, steps: int = 3) -> list[float]:
    """Losses of the last candidate, which has the planned rate."""
    losses: list[float] = []
    for factor in (30.0, 1.0):
        prober.restore()
        losses = [prober.step(factor, place) for place in range(steps)]
    return losses


def with_optimizer(base: TrainingPlan, **changes: Any) -> TrainingPlan:
    return base.model_copy(update={"optimizer": base.optimizer.model_copy(update=changes)})


FULL = tiny.plan(full=True, steps=6)
BF16 = tiny.plan(full=True, steps=6, precision=PrecisionPlan(bf16=True, tf32=False, attention=Attention.SDPA))


PLANS = {
    "full": FULL,
    "adapter": tiny.plan(steps=6),
    "accumulated": tiny.plan(micro=2, accumulation=2, steps=6),
    "bf16 with masters": with_optimizer(BF16, fp32_master=True),
    "bf16 without": with_optimizer(BF16),
    "Muon": with_optimizer(FULL, name=Optimizer.MUON),
}


@pytest.mark.parametrize("name", PLANS)
def test_after_all_probes_the_training_is_the_one_that_would_have_been(tmp_path: Path, name: str) -> None:
    plan = PLANS[name]
    without = tiny.training(tmp_path, plan, name="without")
    run_loop(without)
    trainer = tiny.training(tmp_path, plan, name="with")
    prober = prober_of(trainer)
    prober.begin()
    probed(prober)
    assert not all(map(torch.equal, weights(trainer), weights(without)))
    prober.restore()
    prober.end()
    run_loop(trainer)
    assert tiny.reported(tmp_path / "with").losses == tiny.reported(tmp_path / "without").losses
    assert all(map(torch.equal, weights(trainer), weights(without)))


def test_a_probes_steps_are_those_that_the_training_begins_with(tmp_path: Path) -> None:
    plan = tiny.plan(full=True, steps=6)
    constant = plan.optimizer.model_copy(update={"schedule": LrSchedule.CONSTANT, "warmup_steps": 0})
    plan = plan.model_copy(update={"optimizer": constant})
    trainer = tiny.training(tmp_path, plan)
    prober = prober_of(trainer)
    prober.begin()
    losses = probed(prober)
    prober.restore()
    prober.end()
    run_loop(trainer)
    assert tiny.reported(tmp_path / "run").losses[:3] == losses


def test_a_training_whose_rate_is_far_too_low_finds_a_better_one(tmp_path: Path) -> None:
    plan = tiny.plan(full=True, steps=12, lr_search=LrSearchPlan(share=0.2))
    low = plan.optimizer.model_copy(update={"learning_rate": 1e-4})
    trainer = tiny.training(tmp_path, plan.model_copy(update={"optimizer": low}))
    outcome = run_loop(trainer)
    assert trainer.session.peak > 3
    assert outcome.steps == 12
    assert outcome.best is not None
    assert outcome.base is not None
    assert outcome.best.value < outcome.base.value
