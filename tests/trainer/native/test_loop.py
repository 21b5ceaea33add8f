"""The training itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.plan_parts import EmaPlan
from core.progress import NoteEvent, events_in
from core.run_files import RunEnd
from tests.trainer.native import tiny
from trainer.callbacks import session
from trainer.callbacks.failures import NotANumber
from trainer.inputs.rows import LabelledRow
from trainer.native import judging, saving
from trainer.native.batches import Layout, Rows
from trainer.native.loop import Loop
from trainer.scoring.supervised import row_losses


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
        made.train = Rows(made.train.tokens, Layout(packed=packing))
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
    assert rest.resume(state) == state
    assert rest.run().end is RunEnd.FINISHED
    whole = tiny.told(tmp_path / "whole")
    assert tiny.told(tmp_path / "cut").losses == whole.losses[:6]
    assert tiny.told(tmp_path / "rest").losses == whole.losses[6:]
    assert tiny.told(tmp_path / "rest").held_out[-1] == whole.held_out[-1]
    for (name, one), (_, two) in zip(first.net.named_parameters(), rest.net.named_parameters(), strict=True):
        assert torch.equal(one, two), name


def notes(folder: Path) -> list[str]:
    events = [line.event for line in events_in((folder / "progress.jsonl").read_bytes())]
    return [event.text for event in events if isinstance(event, NoteEvent)]


def test_a_state_that_is_torn_or_of_another_run_is_left_for_an_older_one_or_none(tmp_path: Path) -> None:
    made = tiny.loop(tmp_path, tiny.plan(steps=12), stop_at=9)
    made.run()
    states = [path for _, path in saving.states_in(tmp_path / "run/states")]
    older, newest = states[-2:]
    assert newest.name == "checkpoint-9"

    other = tiny.loop(tmp_path, tiny.plan(steps=12), name="other")
    other.shape = "larger"
    assert other.resume(newest) is None
    assert ["of another run" in note for note in notes(tmp_path / "other")] == [True, True]

    full = tiny.loop(tmp_path, tiny.plan(full=True, steps=12), name="full")
    before = [weight.detach().clone() for weight in full.net.parameters()]
    assert full.resume(newest) is None
    assert all("of another model" in note for note in notes(tmp_path / "full"))
    assert all(torch.equal(one, two) for one, two in zip(before, full.net.parameters(), strict=True))

    for torn in ("trained.safetensors", "rank0.pt", "place.json"):
        content = (newest / torn).read_bytes()
        (newest / torn).write_bytes(content[: len(content) // 2])
        again = tiny.loop(tmp_path, tiny.plan(steps=12), name=f"after-{torn}")
        assert again.resume(newest) == older
        assert again.place.step == saving.step_of(older)
        assert "not a whole state" in notes(tmp_path / f"after-{torn}")[0]
        (newest / torn).write_bytes(content)


def test_gradients_that_are_no_numbers_move_nothing_and_three_in_a_row_end_the_run(tmp_path: Path) -> None:
    made = tiny.loop(tmp_path, tiny.plan(steps=40))
    made.net.register_forward_hook(
        lambda net, given, found: found * float("nan") if net.training and made.place.step >= 6 else found
    )
    outcome = made.run()
    assert outcome.end is RunEnd.NAN
    assert outcome.steps <= 10
    assert outcome.best is not None
    assert (tmp_path / "run/submission/adapter_model.safetensors").exists()
    assert all(torch.isfinite(weight).all() for weight in made.net.parameters())


@pytest.mark.parametrize("full", [False, True])
def test_the_divergence_from_the_base_is_part_of_loss_and_score_as_validators_have_it(
    tmp_path: Path, full: bool
) -> None:
    plan = tiny.plan(full=full, steps=24)
    free, tied = tiny.loop(tmp_path, plan, name="free"), tiny.loop(tmp_path, plan, name="tied", kl=50.0)
    free.run()
    outcome = tied.run()
    assert outcome.base is not None
    assert outcome.base.metric == "eval_loss+kl"
    assert outcome.base.value == pytest.approx(tiny.told(tmp_path / "free").held_out[0], rel=1e-5)

    held = tiny.rows(tmp_path / "again", 8, seed=9)
    ids = [held[index].ids.tolist() for index in range(8)]
    marks = [held[index].trained.tolist() for index in range(8)]
    rows = [
        LabelledRow(one, [token if counts else -100 for token, counts in zip(one, mark, strict=True)])
        for one, mark in zip(ids, marks, strict=True)
    ]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")

    def apart(made: Loop) -> tuple[float, float]:
        found = row_losses(made.net.model, rows, 0, reference=base, kl=True)
        return sum(found.rows.values()) / 8, found.kl_total / found.kl_tokens

    (_, far), (loss, near) = apart(free), apart(tied)
    assert near < 0.5 * far
    whole = judging.evaluate(tied.net, Rows(held, Layout(by_row=True)), tiny.ALONE, 4)
    assert whole == pytest.approx(loss + 50 * near, rel=1e-4)


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
