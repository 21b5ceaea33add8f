"""Steps whose sequences are shared out over other passes than planned."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.runs.progress import ControlEvent, parse_events
from core.runs.run_files import RunControl, RunEnd
from tests.trainer.native import tiny
from trainer.native import model as nets
from trainer.native.batches import BatchLayout, SampleOrder, TokenRows, collate
from trainer.native.loader import BatchLoader, regrouped
from trainer.native.optimizer import Stepper
from trainer.native.train import Trainer, run_loop
from trainer.session import session

pytestmark = pytest.mark.small


MICRO, ACCUMULATION = 4, 2


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 100))
def test_every_sequence_is_in_one_pass_and_passes_are_few_and_alike(
    micro: int, accumulation: int, most: int
) -> None:
    numbers = iter(range(micro * accumulation))
    step = [tuple((next(numbers),) for _ in range(micro)) for _ in range(accumulation)]
    passes = regrouped(step, most)
    assert list(itertools.chain(*passes)) == list(itertools.chain(*step))
    sizes = [len(one) for one in passes]
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    assert len(passes) == -(-micro * accumulation // most)
    assert regrouped(step, micro) == step


class Variant(NamedTuple):
    layout: BatchLayout
    kl: float = 0.0
    full: bool = True


VARIANTS = {
    "tokens": Variant(BatchLayout()),
    "rows weigh the same": Variant(BatchLayout(by_row=True)),
    "fixed length": Variant(BatchLayout(length=32, by_row=True)),
    "packed": Variant(BatchLayout(length=32, packed=True)),
    "pairs": Variant(BatchLayout(pairs=True)),
    "tied to a frozen base": Variant(BatchLayout(by_row=True), kl=2.0),
    "tied to itself without adapters": Variant(BatchLayout(by_row=True), kl=2.0, full=False),
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_gradients_do_not_depend_on_the_size_of_a_pass(tmp_path: Path, variant: Variant) -> None:
    plan = tiny.plan(full=variant.full, micro=MICRO, accumulation=ACCUMULATION)
    path = tiny.model_folder(tmp_path / "model")
    torch.manual_seed(1)
    model, attention = nets.load_model(path, plan, tiny.CPU)
    with torch.no_grad():  # an adapter that does nothing has no divergence
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    net: nets.LossModel = nets.LossModel(model, attention)
    if variant.layout.pairs:
        net = nets.DpoLossModel(model, attention, 0.1)
    elif variant.kl:
        base = nets.frozen_base(path, plan, tiny.CPU) if variant.full else None
        net = nets.KlLossModel(model, attention, variant.kl, base)
    stepper = Stepper(net, plan, tiny.ALONE)
    file = tiny.rows(tmp_path / "rows", pairs=variant.layout.pairs)
    lengths = file.lengths.reshape(-1, 2).max(axis=1) if variant.layout.pairs else file.lengths
    reference = torch.linspace(-2, 2, len(lengths)) if variant.layout.pairs else None
    order = SampleOrder(lengths, 32, MICRO, ACCUMULATION, 1, packing=variant.layout.packed)
    step = next(order.for_rank(0))

    def gradients(most: int) -> tuple[float, list[torch.Tensor]]:
        batches = [collate(file, micro, variant.layout, reference) for micro in regrouped(step, most)]
        count, learned = (
            sum(values) for values in zip(*((b.count, b.learned) for b in batches), strict=True)
        )
        loss = stepper._gradients(batches, net.shares(count, learned, tiny.CPU))
        found = [weight.grad.clone() for weight in net.parameters() if weight.grad is not None]
        stepper.masters.zero_grad()
        return float(loss), found

    loss, planned = gradients(MICRO)
    assert any(bool(gradient.any()) for gradient in planned)
    for most in (1, 3, MICRO * ACCUMULATION):
        other_loss, other = gradients(most)
        assert other_loss == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(other, planned, rtol=1e-3, atol=1e-5)


def test_what_was_read_ahead_is_shared_out_anew_and_growth_can_be_undone(tmp_path: Path) -> None:
    file = tiny.rows(tmp_path / "rows")
    order = SampleOrder(file.lengths, 32, 2, 4, 1)
    loader = BatchLoader(TokenRows(file, BatchLayout(by_row=True)), order, ahead=4)
    steps = iter(loader)

    def sizes(batches: Any) -> list[int]:
        return [len(batch.ids) for batch in batches]

    try:
        assert sizes(next(steps)) == [2, 2, 2, 2]
        assert loader.regroup(3) == (3, "")
        assert sizes(next(steps)) == [2, 3, 3]
        micro, refusal = loader.regroup(2)
        assert (micro, refusal) == (2, "")
        assert loader.undo_growth() is None
        assert loader.regroup(100) == (8, "")
        grown = next(steps)
        assert sizes(grown) == [8]
        micro, refusal = loader.regroup(7)
        assert (micro, refusal) == (4, "")
        assert "2 passes of 4 either way" in loader.regroup(5).refusal
        assert loader.regroup(8) == (8, "")
        next(steps)
        undone = loader.undo_growth()
        assert undone is not None
        assert undone[0] == 4
        assert sizes(undone[1]) == sizes(next(steps)) == [4, 4]
        assert loader.regroup(None) == (2, "")
        assert sum(batch.tokens for batch in next(steps)) > 0
    finally:
        loader.close()


def asked(trainer: Trainer, requests: dict[int, RunControl]) -> None:
    """Requests are there after these steps."""
    trainer.session.take_control = lambda: requests.pop(trainer.session.step, None)


def answers(folder: Path) -> list[ControlEvent]:
    events = [line.event for line in parse_events((folder / "progress.jsonl").read_bytes())]
    return [event for event in events if isinstance(event, ControlEvent)]


@pytest.fixture(autouse=True)
def agree_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_STEPS_BETWEEN_AGREEMENTS", 1)


def test_memory_that_runs_out_after_growth_leads_back_to_the_size_before(tmp_path: Path) -> None:
    """Not once but whenever a long row comes; what was trained before stays, and no step is lost."""
    plan = tiny.plan(full=True, micro=2, accumulation=4, steps=12)
    undisturbed = tiny.training(tmp_path, plan, name="undisturbed")
    run_loop(undisturbed)

    trainer = tiny.training(tmp_path, plan, name="grown")
    asked(trainer, {3: RunControl(number=1, micro=3), 5: RunControl(number=2, micro=4)})
    grown: list[int] = []

    def runs_out(net: Any, given: Any, output: torch.Tensor) -> None:
        if net.training and trainer.session.step >= 7 and len(given[0].ids) > 3:
            grown.append(trainer.session.step)
            if len(grown) == 1:  # of the second pass: what the first has added to the gradients is dropped
                return
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    trainer.setup.net.register_forward_hook(runs_out)
    outcome = run_loop(trainer)
    assert (outcome.end, outcome.steps) == (RunEnd.FINISHED, 12)
    said = [(event.number, event.applied, event.micro) for event in answers(tmp_path / "grown")]
    assert said == [(1, True, 3), (2, True, 4), (2, False, 3)]
    assert (
        answers(tmp_path / "grown")[-1].text == "after step 7: memory ran out: back to 3 sequences in a pass"
    )
    expected = tiny.reported(tmp_path / "undisturbed").losses
    assert tiny.reported(tmp_path / "grown").losses == pytest.approx(expected, rel=1e-3)


def test_memory_that_runs_out_without_growth_ends_the_run(tmp_path: Path) -> None:
    trainer = tiny.training(tmp_path, tiny.plan(full=True, micro=4, steps=8))
    asked(trainer, {2: RunControl(number=1, micro=2)})

    def runs_out(net: Any, given: Any, output: torch.Tensor) -> None:
        if net.training and trainer.session.step >= 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    trainer.setup.net.register_forward_hook(runs_out)
    with pytest.raises(torch.OutOfMemoryError):
        run_loop(trainer)
    assert [event.micro for event in answers(tmp_path / "run")] == [2]
