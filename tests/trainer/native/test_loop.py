"""The training itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.run_files import RunEnd
from tests.trainer.native import tiny
from trainer.native import saving
from trainer.native.saving import BadCheckpoint


@pytest.mark.parametrize("full", [False, True])
def test_the_held_out_loss_falls_and_the_best_is_handed_in(tmp_path: Path, full: bool) -> None:
    coach = tiny.Recorder()
    made = tiny.loop(tmp_path, tiny.plan(full=full, steps=24), coach)
    before = made.evaluate()
    assert made.run() is RunEnd.FINISHED
    assert coach.losses[-1] < before - (0.2 if full else 0.05)
    assert coach.submitted[-1] == 24
    assert [step.number for step in coach.steps] == list(range(1, 25))
    assert coach.steps[0].rate < max(step.rate for step in coach.steps)
    assert coach.steps[-1].rate < 0.01 * max(step.rate for step in coach.steps)


def test_packed_rows_learn_the_same_as_single_ones(tmp_path: Path) -> None:
    """The first step of all rows at once: what packing changes is where they lie, not what they teach."""

    def norm_and_loss(packing: bool) -> tuple[float, float]:
        coach = tiny.Recorder()
        made = tiny.loop(tmp_path, tiny.plan(steps=1, micro=48), coach, packing=packing)
        if packing:
            windows = len(next(iter(made.order.steps()))[0][0])
            assert windows == 48  # wraps around: some windows twice
        made.train = tiny.Rows(made.train.tokens, tiny.Layout(packed=packing))
        made.order = tiny.Order(
            made.train.tokens.lengths,
            32,
            48 if not packing else len(made.order._sequences(0)),
            1,
            1,
            seed=7,
            packing=packing,
        )
        made.run()
        return coach.steps[0].norm, coach.steps[0].loss

    alone, packed = norm_and_loss(False), norm_and_loss(True)
    assert packed == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_a_run_that_was_cut_goes_on_to_the_same_last_bit(tmp_path: Path, full: bool, packing: bool) -> None:
    plan = tiny.plan(full=full, steps=10)
    cut = tiny.Recorder(stop_at=6)
    second = tiny.loop(tmp_path, plan, cut, packing=packing)
    assert second.run() is RunEnd.STOPPED
    state = saving.newest(tmp_path / "states")
    assert state is not None
    assert state.name == "checkpoint-4"

    rest = tiny.Recorder()
    third = tiny.loop(tmp_path, plan, rest, packing=packing)
    torch.manual_seed(99)
    third.resume(state)
    assert third.run() is RunEnd.FINISHED

    whole = tiny.Recorder()
    first = tiny.loop(tmp_path, plan, whole, packing=packing)
    first.run()
    assert [step.loss for step in rest.steps] == [step.loss for step in whole.steps[4:]]
    assert rest.losses == whole.losses[1:]
    for (name, one), (_, two) in zip(first.net.named_parameters(), third.net.named_parameters(), strict=True):
        assert torch.equal(one, two), name


def test_a_state_of_another_run_is_refused(tmp_path: Path) -> None:
    made = tiny.loop(tmp_path, tiny.plan(steps=5), tiny.Recorder())
    made.run()
    state = saving.newest(tmp_path / "states")
    assert state is not None
    other = tiny.loop(tmp_path, tiny.plan(steps=5), tiny.Recorder())
    other.shape = "larger"
    with pytest.raises(BadCheckpoint, match="another run"):
        other.resume(state)
    full = tiny.loop(tmp_path, tiny.plan(full=True, steps=5), tiny.Recorder())
    with pytest.raises(BadCheckpoint, match="another model"):
        full.resume(state)
    content = (state / "trained.safetensors").read_bytes()
    (state / "trained.safetensors").write_bytes(content[:-10])
    with pytest.raises(BadCheckpoint, match="not a whole state"):
        tiny.loop(tmp_path, tiny.plan(steps=5), tiny.Recorder()).resume(state)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    made = tiny.loop(tmp_path, tiny.plan(full=True), tiny.Recorder())
    with torch.no_grad():
        next(made.net.parameters()).fill_(float("nan"))
    assert made.run() is RunEnd.NAN


def test_accumulated_batches_teach_what_one_large_one_does(tmp_path: Path) -> None:
    at_once, in_parts = tiny.Recorder(), tiny.Recorder()
    tiny.loop(tmp_path, tiny.plan(micro=8), at_once).run()
    tiny.loop(tmp_path, tiny.plan(micro=2, accumulation=4), in_parts).run()
    assert [step.loss for step in in_parts.steps] == pytest.approx(
        [step.loss for step in at_once.steps], rel=1e-4
    )


def test_what_is_handed_in_loads_with_transformers_alone(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    made = tiny.loop(tmp_path, tiny.plan(full=True, steps=4), tiny.Recorder())
    made.run()
    saving.export(made.net, tmp_path / "out", tiny.ALONE)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(8)[None]
    torch.testing.assert_close(model(ids).logits, made.net.eval().model(ids).logits)


def test_an_adapter_that_is_handed_in_loads_with_peft_alone(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    made = tiny.loop(tmp_path, tiny.plan(steps=4), tiny.Recorder())
    made.run()
    saving.export(made.net, tmp_path / "out", tiny.ALONE)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model = PeftModel.from_pretrained(base, tmp_path / "out")
    ids = torch.arange(8)[None]
    torch.testing.assert_close(model(ids).logits, made.net.eval().model(ids).logits)
