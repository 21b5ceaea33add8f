"""What Axolotl would do to a model, and does not here."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import kl_div

from tests.trainer import odd_models
from tests.trainer.forks import ForkServer
from tests.trainer.fsdp_on_cpu.sitecustomize import shard
from tests.trainer.sharding import adapted, together
from trainer.axolotl import patches as kl_module
from trainer.axolotl.patches import (
    freeze_vision,
    goes_with_its_layer,
    keep_imports_out_of_collections,
    leave_out_trackio,
    limit_tokens_to_vocabulary,
    mean_kl,
    save_few_rows_here,
    shard_by_layer,
    sharded_parts,
)


def test_trackio_is_there_only_for_who_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in (False, True):
        monkeypatch.delitem(sys.modules, "trackio", raising=False)
        leave_out_trackio({"use_trackio": asked})
        there = importlib.util.find_spec("trackio") is not None
        assert there is asked


def test_few_rows_are_saved_without_a_process_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset: Any = importlib.import_module("datasets").Dataset
    monkeypatch.setattr(dataset, "save_to_disk", dataset.save_to_disk)  # put back afterwards
    module: Any = importlib.import_module("datasets.arrow_dataset")
    monkeypatch.setattr(module.mp, "get_context", lambda how: pytest.fail(f"{how}s processes"))
    save_few_rows_here()
    dataset.from_dict({"row": [1, 2, 3]}).save_to_disk(str(tmp_path / "rows"), num_proc=1)
    assert dataset.load_from_disk(str(tmp_path / "rows"))["row"][:] == [1, 2, 3]


def test_imported_objects_are_left_out_of_garbage_collections() -> None:
    before = len(gc.get_objects())
    try:
        keep_imports_out_of_collections()
        assert len(gc.get_objects()) < before / 10
    finally:
        gc.unfreeze()


def test_axolotls_own_tokenizer_knows_no_token_beyond_the_models_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = odd_models.save(tmp_path, "fewer_rows")
    module = importlib.import_module("axolotl.loaders.tokenizer")
    assert max(module.AutoTokenizer.from_pretrained(folder)("<picture>")["input_ids"]) >= odd_models.ROWS
    monkeypatch.setattr(module, "AutoTokenizer", module.AutoTokenizer)  # put back afterwards
    limit_tokens_to_vocabulary()
    assert max(module.AutoTokenizer.from_pretrained(folder)("<picture>")["input_ids"]) < odd_models.ROWS


def test_what_text_never_reaches_is_not_trained() -> None:
    """Several processes would wait for gradients that never come."""
    model = odd_models.seeing()
    assert freeze_vision(model) > 0
    ids = torch.arange(8)[None]
    model.train()
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    assert [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None] == []
    assert not any(one.requires_grad for name, one in model.named_parameters() if "vision" in name)


def test_of_a_model_that_only_reads_everything_is_trained() -> None:
    model = odd_models.mixture()
    assert freeze_vision(model) == 0
    assert all(one.requires_grad for one in model.parameters())


def an_adapter_goes_with_its_layer(rank: int) -> None:
    """Axolotl's own preparation, with its parts and with ours: the same steps from fewer of them."""
    axolotl: Any = importlib.import_module("axolotl.monkeypatch.accelerate.fsdp2")
    accelerator = an_accelerator()
    ids = torch.arange(5, 21).reshape(2, 8) + rank
    learned = []
    for parts in (1 + 2 + 2 * 7 * 2, 1 + 2):
        base = adapted()
        for name, weight in base.named_parameters():
            if "lora_" not in name:
                weight.data = weight.data.bfloat16()
        model = axolotl.fsdp2_prepare_model(accelerator, base).train()
        assert len(sharded_parts(model)) == parts
        optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=1e-3)
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trained = {name: one.full_tensor() for name, one in model.named_parameters() if one.requires_grad}
        assert len(trained) == 2 * 7 * 2
        assert all(one.dtype == torch.float32 for one in trained.values())
        learned.append(trained)
        shard_by_layer()
    for name, one in learned[0].items():
        torch.testing.assert_close(learned[1][name], one, rtol=1e-4, atol=1e-5)


def an_accelerator() -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    shard(importlib.import_module("accelerate.state"))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        mixed_precision_policy="bf16",
    )
    return Accelerator(fsdp_plugin=plugin, cpu=True)


def test_fewer_parts_take_the_same_steps(forks: ForkServer, tmp_path: Path) -> None:
    assert together(forks, tmp_path, an_adapter_goes_with_its_layer)


def test_what_is_quantised_or_no_linear_layer_is_left_to_axolotl() -> None:
    from peft.tuners.lora import LoraLayer

    parts = [part for part in adapted().modules() if isinstance(part, LoraLayer)]
    assert len(parts) == 14
    assert all(map(goes_with_its_layer, parts))
    one, other, third, fourth = parts[:4]
    one.base_layer.weight = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    other.base_layer.bias = torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    third.lora_embedding_A["default"] = torch.nn.Parameter(torch.zeros(4, 8))
    fourth.lora_magnitude_vector["default"] = torch.nn.Linear(1, 1)
    assert not any(map(goes_with_its_layer, parts[:4]))


def logits(seed: int, rows: int = 3, length: int = 9, words: int = 17) -> torch.Tensor:
    return torch.randn(rows, length, words, generator=torch.Generator().manual_seed(seed)) * 2


def labels(rows: int = 3, length: int = 9) -> torch.Tensor:
    marked = torch.arange(rows * length).reshape(rows, length) % 17
    marked[:, :3] = -100
    marked[1, 6:] = -100
    return marked


def of_labels(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    learned = labels() != -100
    found: torch.Tensor = mean_kl(mine[learned], theirs[learned])
    return found


def test_it_is_the_mean_over_positions_of_what_the_library_computes() -> None:
    mine, theirs = logits(1)[0], logits(2)[0]
    log_p, log_q = mine.log_softmax(-1), theirs.log_softmax(-1)
    expected = kl_div(log_q, log_p, log_target=True, reduction="sum") / len(mine)
    assert mean_kl(mine, theirs).item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_model_that_is_still_the_base_has_none() -> None:
    same = logits(1)
    assert of_labels(same, same.clone()).item() == pytest.approx(0, abs=1e-6)


def test_its_gradient_reaches_the_trained_model_alone_and_points_back_to_the_base() -> None:
    mine, theirs = logits(1).requires_grad_(), logits(2)
    before = of_labels(mine, theirs)
    before.backward()
    assert mine.grad is not None
    closer = mine.detach() - 5.0 * mine.grad
    assert of_labels(closer, theirs) < before.detach()


def test_piece_by_piece_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = of_labels(logits(1), logits(2))
    monkeypatch.setattr(kl_module, "KL_CHUNK", 4)
    assert of_labels(logits(1), logits(2)).item() == pytest.approx(whole.item(), rel=1e-5)


def test_a_batch_with_nothing_to_learn_has_none() -> None:
    nothing = logits(1)[0, :0].requires_grad_()
    found = mean_kl(nothing, logits(2)[0, :0])
    found.backward()
    assert found.item() == 0
