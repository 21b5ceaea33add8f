"""Several processes train what one does, and end with a reason when one of them does not."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.runs.progress import ControlEvent, parse_events
from core.runs.run_files import TrainerExitCode
from tests.trainer.forks import ROOT, ForkServer
from tests.trainer.native import tiny
from trainer.native import distributed

pytestmark = pytest.mark.small


DIED, HUNG, OTHER = "ddp:full:2:die", "ddp:lora:2:hang", "ddp:lora:2:other-rows"


@pytest.fixture(scope="module")
def runs(forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("ranks")
    tiny.model_folder(folder / "model")
    return Runs(forks, folder)


class Runs:
    """Each is started when a test first asks for it."""

    def __init__(self, forks: ForkServer, folder: Path) -> None:
        self.forks, self.folder = forks, folder

    def codes(self, case: str) -> list[int]:
        left = self.folder / f"codes-{case}"
        if not left.exists():
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            command = ("-m", "tests.trainer.native.rank", str(self.folder), case)
            code, said = self.forks.run(command, environment, self.folder)
            assert code == 0, said
        return list(json.loads(left.read_text()))

    def said(self, case: str, rank: int = 0) -> str:
        self.codes(case)
        return (self.folder / f"said-{case}-{rank}").read_text()

    def reported(self, case: str) -> tiny.Reported:
        assert not any(self.codes(case)), self.said(case)
        return tiny.reported(self.folder / case)


def same_curve(one: tiny.Reported, other: tiny.Reported) -> None:
    assert other.losses[:8] == pytest.approx(one.losses[:8], abs=1e-4)
    assert other.norms[:8] == pytest.approx(one.norms[:8], abs=1e-4)
    # How often is judged on the way is the clock's business.
    ends = [other.held_out[0], other.held_out[-1]]
    assert ends == pytest.approx([one.held_out[0], one.held_out[-1]], abs=1e-4)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_two_processes_whole_or_in_shards_see_the_losses_of_one(runs: Runs, method: str, how: str) -> None:
    same_curve(runs.reported(f"single:{method}:1"), runs.reported(f"{how}:{method}:2"))
    name = "model.safetensors" if method == "full" else "adapter_model.safetensors"
    weights = load_file(runs.folder / f"single:{method}:1/submission" / name)
    handed_in = load_file(runs.folder / f"{how}:{method}:2/submission" / name)
    assert handed_in.keys() == weights.keys()
    for key, value in weights.items():
        torch.testing.assert_close(handed_in[key], value, rtol=1e-3, atol=1e-4)


def test_averaged_weights_that_are_sharded_are_those_of_one_process(runs: Runs) -> None:
    alone, case = "single:full:1:ema", "fsdp:full:2:ema"
    same_curve(runs.reported(alone), runs.reported(case))
    weights, others = (
        load_file(runs.folder / each / "submission/model.safetensors") for each in (alone, case)
    )
    for key, value in weights.items():
        torch.testing.assert_close(others[key], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("how", "method"), [("ddp", "lora"), ("fsdp", "full")])
def test_tied_to_its_base_a_model_learns_the_same_on_two_processes(runs: Runs, how: str, method: str) -> None:
    tied = runs.reported(f"single:{method}:1:kl")
    same_curve(tied, runs.reported(f"{how}:{method}:2:kl"))
    assert tied.losses[-1] > runs.reported(f"single:{method}:1").losses[7]


@pytest.mark.parametrize("method", ["lora", "full"])
def test_split_and_with_its_base_before_it_a_model_prefers_the_same(runs: Runs, method: str) -> None:
    """DPO's first passes are made before there is an optimizer."""
    same_curve(runs.reported(f"single:{method}:1:dpo"), runs.reported(f"fsdp:{method}:2:dpo"))


def test_gradients_of_a_split_model_are_summed_over_passes(runs: Runs) -> None:
    same_curve(runs.reported("single:full:1"), runs.reported("fsdp:full:2:parts"))


@pytest.mark.parametrize("case", ["ddp:lora:2", "fsdp:full:2"])
def test_asked_by_the_control_file_all_ranks_change_their_passes_at_once_and_learn_the_same(
    runs: Runs, case: str
) -> None:
    """Optimizer and schedule go on: the losses are those of a run that nobody has asked anything."""
    same_curve(runs.reported(f"single:{case.split(':')[1]}:1"), runs.reported(f"{case}:control"))
    events = parse_events((runs.folder / f"{case}:control" / "progress.jsonl").read_bytes())
    said = [line.event for line in events if isinstance(line.event, ControlEvent)]
    per_gpu = 8 // int(case[-1])
    assert [(event.number, event.applied, event.micro) for event in said] == [
        (1, True, 1),
        (2, True, per_gpu),
    ]
    assert [event.duty for event in said] == [0.8, 1.0]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_go_on_where_they_were_cut(runs: Runs, how: str) -> None:
    case = f"{how}:full:2"
    whole = runs.reported(case).losses[:8]
    assert not any(runs.codes(f"{case}:resume")), runs.said(f"{case}:resume")
    rest = runs.reported(case).losses[8:]
    assert 0 < len(rest) < 8
    assert rest == whole[-len(rest) :]


def test_a_rank_that_is_gone_ends_the_other_with_the_reason(runs: Runs) -> None:
    assert runs.codes(DIED)[1] == 7
    assert runs.codes(DIED)[0] not in (0, 7)
    # Mostly the connection says so at once; what is on its way may hide it until the watch looks.
    why = runs.said(DIED)
    assert "another process of this training is gone or silent" in why or "waiting for the other" in why


def test_a_rank_that_stands_still_ends_all_with_its_stacks(runs: Runs) -> None:
    assert runs.codes(HUNG)[1] == TrainerExitCode.HUNG
    assert runs.codes(HUNG)[0] != 0
    assert "gone or silent" in runs.said(HUNG)
    assert "most recent call first" in runs.said(HUNG, 1)
    assert re.search(r"stands still: nothing done for \d+ s", runs.said(HUNG, 1))


def test_ranks_with_other_rows_end_with_that_reason(runs: Runs) -> None:
    assert runs.codes(OTHER) == [TrainerExitCode.BAD_DATA, TrainerExitCode.BAD_DATA]
    assert "the ranks have different rows, this one's differ" in runs.said(OTHER, 1)


def test_one_process_needs_no_group() -> None:
    with distributed.join_process_group(cpu=True) as alone:
        assert alone.rank == 0
        assert alone.sum(1.0, 2.0) == [1.0, 2.0]
        assert alone.any(True)
        assert not torch.distributed.is_initialized()


def test_a_plan_for_gpus_without_gpus_fails_with_a_way_out() -> None:
    with (
        pytest.raises(distributed.GpuNotVisible, match="nvidia-smi"),
        distributed.join_process_group(cpu=False),
    ):
        pass


def test_the_decoders_layers_are_found_under_adapters(tmp_path: Path) -> None:
    trainer = tiny.training(tmp_path, tiny.plan())
    assert len(distributed.layers_of(trainer.setup.net)) == 2
