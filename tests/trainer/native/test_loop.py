"""The training itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.plan_parts import EmaPlan
from core.run_files import RunEnd
from tests.trainer.native import tiny
from trainer.callbacks import session
from trainer.callbacks.failures import NotANumber
from trainer.native import saving
from trainer.native.saving import BadCheckpoint


@pytest.fixture(autouse=True)
def agree_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take a millisecond here; the ranks of a real run compare notes every half second."""
    monkeypatch.setattr(session, "MOST_STEPS_APART", 1)


@pytest.mark.parametrize("full", [False, True])
def test_the_held_out_loss_falls_and_the_best_is_handed_in(tmp_path: Path, full: bool) -> None:
    outcome = tiny.loop(tmp_path, tiny.plan(full=full, steps=24)).run()
    assert (outcome.end, outcome.steps) == (RunEnd.FINISHED, 24)
    assert outcome.best is not None
    assert outcome.base is not None
    assert outcome.best.value < outcome.base.value - (0.2 if full else 0.05)
    told = tiny.told(tmp_path / "run")
    assert told.best[-1] == 24
    assert len(told.losses) == 24
    assert told.rates[0] < max(told.rates)
    assert told.rates[-1] < 0.05 * max(told.rates)


@pytest.mark.parametrize("full", [False, True])
def test_what_is_handed_in_loads_with_transformers_and_peft_alone(tmp_path: Path, full: bool) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    made = tiny.loop(tmp_path, tiny.plan(full=full, steps=4))
    made.run()
    submission = tmp_path / "run/submission"
    if full:
        model = AutoModelForCausalLM.from_pretrained(submission)
    else:
        model = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tmp_path / "model"), submission
        )
    ids = torch.arange(8)[None]
    torch.testing.assert_close(model(ids).logits, made.net.eval().model(ids).logits)


def test_packed_rows_teach_what_single_ones_do(tmp_path: Path) -> None:
    """All rows in one step: what packing changes is where they lie."""

    def first_step(packing: bool) -> tuple[float, float]:
        name = f"packing-{packing}"
        made = tiny.loop(tmp_path, tiny.plan(steps=1), name=name, packing=packing)
        made.train = tiny.Rows(made.train.tokens, tiny.Layout(packed=packing))
        sequences = len(made.order._sequences(0))
        made.order = tiny.Order(made.train.tokens.lengths, 32, sequences, 1, 1, seed=7, packing=packing)
        made.run()
        told = tiny.told(tmp_path / name)
        return told.losses[0], told.norms[0]

    assert first_step(True) == pytest.approx(first_step(False), rel=1e-4)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_a_run_that_was_cut_goes_on_to_the_same_last_bit(tmp_path: Path, full: bool, packing: bool) -> None:
    plan = tiny.plan(full=full, steps=10, ema=EmaPlan(decay=0.9))
    first = tiny.loop(tmp_path, plan, name="whole", packing=packing)
    first.run()

    cut = tiny.loop(tmp_path, plan, name="cut", packing=packing, stop_at=6)
    assert cut.run().end is RunEnd.STOPPED
    state = saving.newest(tmp_path / "cut/states")
    assert state is not None
    assert state.name == "checkpoint-6"

    rest = tiny.loop(tmp_path, plan, name="rest", packing=packing)
    torch.manual_seed(99)
    rest.resume(state)
    assert rest.run().end is RunEnd.FINISHED
    whole = tiny.told(tmp_path / "whole")
    assert tiny.told(tmp_path / "cut").losses == whole.losses[:6]
    assert tiny.told(tmp_path / "rest").losses == whole.losses[6:]
    assert tiny.told(tmp_path / "rest").held_out[-1] == whole.held_out[-1]
    for (name, one), (_, two) in zip(first.net.named_parameters(), rest.net.named_parameters(), strict=True):
        assert torch.equal(one, two), name


def test_a_state_of_another_run_is_refused(tmp_path: Path) -> None:
    made = tiny.loop(tmp_path, tiny.plan(steps=6), stop_at=5)
    made.run()
    state = saving.newest(tmp_path / "run/states")
    assert state is not None
    other = tiny.loop(tmp_path, tiny.plan(steps=6), name="other")
    other.shape = "larger"
    with pytest.raises(BadCheckpoint, match="another run"):
        other.resume(state)
    full = tiny.loop(tmp_path, tiny.plan(full=True, steps=6), name="full")
    with pytest.raises(BadCheckpoint, match="another model"):
        full.resume(state)
    content = (state / "trained.safetensors").read_bytes()
    (state / "trained.safetensors").write_bytes(content[:-10])
    with pytest.raises(BadCheckpoint, match="not a whole state"):
        tiny.loop(tmp_path, tiny.plan(steps=6), name="again").resume(state)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    made = tiny.loop(tmp_path, tiny.plan(full=True))
    begin = made.session.begin

    def begin_and_break() -> None:
        begin()
        with torch.no_grad():
            next(made.net.parameters()).fill_(float("nan"))

    made.session.begin = begin_and_break  # type: ignore[method-assign]
    with pytest.raises(NotANumber, match="model is broken"):
        made.run()
    assert not (tmp_path / "run/submission").exists()


def test_accumulated_batches_teach_what_one_large_one_does(tmp_path: Path) -> None:
    tiny.loop(tmp_path, tiny.plan(micro=8), name="at-once").run()
    tiny.loop(tmp_path, tiny.plan(micro=2, accumulation=4), name="in-parts").run()
    at_once, in_parts = tiny.told(tmp_path / "at-once"), tiny.told(tmp_path / "in-parts")
    assert in_parts.losses == pytest.approx(at_once.losses, rel=1e-4)
