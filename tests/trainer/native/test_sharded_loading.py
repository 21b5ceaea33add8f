"""A model that is split over processes is read in shards, whatever transformers makes of its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core.domain.choices import Parallelism
from core.planning.plan import FsdpPlan, TrainingPlan
from core.profile.targets import Targets
from tests.trainer import odd_models
from tests.trainer.forks import ForkServer
from tests.trainer.native import tiny
from tests.trainer.native.allocated import bytes_allocated
from tests.trainer.sharding import together
from trainer.native import distributed
from trainer.native import model as nets
from trainer.native.distributed import NativeCommunicator, full_tensor

pytestmark = pytest.mark.small


DORA = Targets(dora=True)


def split_plan(**changes: Any) -> TrainingPlan:
    return tiny.plan(world=2, **{"parallelism": Parallelism.FSDP, "fsdp": FsdpPlan(), **changes})


def loaded(rank: int, plan: TrainingPlan) -> nets.LossModel:
    ranks = NativeCommunicator(rank, 2, tiny.CPU)
    torch.manual_seed(1)
    mesh = distributed.shard_mesh(plan, ranks)
    model, attention = nets.load_model(Path("model"), plan, tiny.CPU, mesh)
    net = nets.LossModel(model, attention)
    distributed.shard(net, plan, mesh, tiny.CPU)
    return net


def load_and_measure(rank: int) -> None:
    peaks = {}
    for name, plan in (("full", split_plan(full=True)), ("lora", split_plan())):
        nets_kept: list[nn.Module] = []
        file = Path("model/model.safetensors").stat().st_size
        peaks[name] = bytes_allocated(
            lambda plan=plan, kept=nets_kept: kept.append(loaded(rank, plan)), mapped=file
        )
        whole = sum(weight.numel() * weight.element_size() for weight in nets_kept[0].parameters())
        peaks[f"{name} whole"] = whole
    Path(f"peaks-{rank}").write_text(json.dumps(peaks))


def in_bf16(folder: Path) -> None:
    """Store the model in another format than it is trained in, so that everything read is copied to
    memory."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)


@pytest.mark.parametrize("tied", [False, True])
def test_no_rank_ever_holds_more_than_its_shards_and_a_matrix(
    forks: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # else transformers reads in threads of its own
    shape = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 8, "vocab_size": 512}
    tiny.model_folder(tmp_path / "model", tie_word_embeddings=tied, **shape)
    in_bf16(tmp_path / "model")
    assert together(forks, tmp_path, load_and_measure)
    for rank in (0, 1):
        peaks = json.loads((tmp_path / f"peaks-{rank}").read_text())
        matrix = 512 * 64 * 4
        for method in ("full", "lora"):
            assert peaks[method] < peaks[f"{method} whole"] / 2 + 2 * matrix
            assert peaks[method] > peaks[f"{method} whole"] / 2 - matrix


def compare_with_the_whole(rank: int) -> None:
    """Compare each weight of every rank's model and all buffers, with and without an adapter."""
    register_fused()
    experts = "experts" in Path("model/config.json").read_text()
    plans = [split_plan(full=True), split_plan(), split_plan(targets=DORA)]
    for plan in plans[: 2 if experts else 3]:  # PEFT has no DoRA for experts
        alone = plan.model_copy(update={"parallelism": Parallelism.DDP})
        torch.manual_seed(1)
        plain = nets.LossModel(*nets.load_model(Path("model"), alone, tiny.CPU))
        net = loaded(rank, plan)
        wanted, found = dict(plain.named_parameters()), dict(net.named_parameters())
        assert wanted.keys() == found.keys()
        for name, weight in found.items():
            assert wanted[name].requires_grad == weight.requires_grad, name
            torch.testing.assert_close(full_tensor(weight.detach()), wanted[name].detach(), msg=name)
        buffers = dict(net.named_buffers())
        for name, buffer in plain.named_buffers():
            torch.testing.assert_close(buffers[name], buffer, msg=name)
        same_pass(plain, net)


def same_pass(plain: nets.LossModel, net: nets.LossModel) -> None:
    """Losses are those of the whole model, which no stand-in would give."""
    from trainer.native.batches import BatchLayout, collate

    rows = tiny.rows(Path(f"rows-{torch.distributed.get_rank()}"), 4)
    batch = collate(rows, ((0,), (1,), (2,), (3,)), BatchLayout(by_row=True))
    for one in (plain, net):
        one.eval()
    torch.testing.assert_close(net(batch).detach(), plain(batch).detach(), rtol=1e-5, atol=1e-5)


def of_experts(folder: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, **shape)
    MixtralForCausalLM(config).save_pretrained(folder)


def of_cut_tensors(folder: Path) -> None:
    """Queries, keys and values are cut out of one tensor: a rank's rows of them are others there."""
    from safetensors.torch import load_file, save_file

    tiny.model_folder(folder, num_key_value_heads=4)
    weights = load_file(folder / "model.safetensors")
    for layer in ("model.layers.0.self_attn.", "model.layers.1.self_attn."):
        parts = [weights.pop(f"{layer}{part}_proj.weight") for part in "qkv"]
        weights[f"{layer}fused.weight"] = torch.cat(parts)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def register_fused() -> None:
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Chunk, WeightConverter

    targets = [f"self_attn.{part}_proj.weight" for part in "qkv"]
    converter = WeightConverter("self_attn.fused.weight", targets, [Chunk(dim=0)])
    register_checkpoint_conversion_mapping("llama", [converter])


def of_odd_sizes(folder: Path) -> None:
    """Tied, and rows that two ranks cannot share evenly."""
    tiny.model_folder(folder, vocab_size=65, intermediate_size=37, tie_word_embeddings=True)


def of_transposed_matrices(folder: Path) -> None:
    odd_models.save(folder, "gpt2")


@pytest.mark.parametrize("make", [of_experts, of_cut_tensors, of_odd_sizes, of_transposed_matrices])
def test_a_model_read_in_shards_equals_the_whole(
    forks: ForkServer, tmp_path: Path, make: Callable[[Path], Any]
) -> None:
    make(tmp_path / "model")
    assert together(forks, tmp_path, compare_with_the_whole)
