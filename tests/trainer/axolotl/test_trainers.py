"""Pairs and prompts in the real trainers of Axolotl and TRL."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from trl import DPOConfig, DPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from core.domain.evaluation import Era, evaluation_rules
from core.domain.tasks import DpoDataset
from tests.trainer import tiny
from tests.trainer.axolotl.test_trainers_prompts import gradients_of, made, of_the_task, trls_own
from tests.trainer.forks import ForkServer
from tests.trainer.inputs.test_instruct_in_axolotl import TOKENIZERS, texts
from tests.trainer.sharding import adapted, together
from trainer.axolotl.trainers import (
    PAIR_METRICS,
    PairTrainer,
    PromptTrainer,
    RawPromptTrainer,
    fresh_weights,
    merged_weights,
)
from trainer.inputs.dpo_grpo import cut_pair, pair_rows
from trainer.inputs.tables import PAIR_COLUMNS
from trainer.scoring import forward

DATASET = DpoDataset(field_prompt="prompt", field_chosen="chosen", field_rejected="rejected")
LENGTH = 40


def rows(count: int, seed: int) -> list[dict[str, str]]:
    chance = random.Random(seed)
    return [{name: texts(chance) for name in ("prompt", "chosen", "rejected")} for _ in range(count)]


@pytest.mark.parametrize("habit", TOKENIZERS)
def test_pairs_of_tournaments_are_encoded_and_cut_as_trl_does(habit: str) -> None:
    tokenizer, rules = tiny.tokenizer(**TOKENIZERS[habit]), evaluation_rules(Era.TOURNAMENTS)
    data = rows(300, 3)
    stand_in: Any = SimpleNamespace(_tokenizer=tokenizer)
    arguments = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    theirs = DPOTrainer._prepare_dataset(stand_in, Dataset.from_list(data), tokenizer, arguments, "train")
    for ours, theirs_row in zip(pair_rows(DATASET, data, tokenizer, rules), theirs, strict=True):
        assert [list(side) for side in ours] == [theirs_row[name] for name in PAIR_COLUMNS]
        shorter, room = cut_pair(ours, rules, LENGTH), max(LENGTH - len(theirs_row["prompt_ids"]), 0)
        if not room:
            assert shorter is None
        elif shorter is not None:
            kept = [
                theirs_row["prompt_ids"],
                theirs_row["chosen_ids"][:room],
                theirs_row["rejected_ids"][:room],
            ]
            assert [list(side) for side in shorter] == kept


def test_encoded_pairs_pass_through_the_trainer_unchanged() -> None:
    encoded = Dataset.from_list([{"prompt_ids": [5], "chosen_ids": [6, 3], "rejected_ids": [7, 3]}])
    nothing: Any = None
    assert PairTrainer._prepare_dataset(nothing, encoded, nothing, nothing, "train") is encoded


def test_pairs_that_are_not_encoded_are_refused_instead_of_encoded_in_another_way() -> None:
    nothing: Any = None
    with pytest.raises(ValueError, match="not encoded"):
        PairTrainer._prepare_dataset(nothing, Dataset.from_list(rows(2, 1)), nothing, nothing, "train")


def test_prompts_of_offers_have_no_token_for_the_beginning() -> None:
    tokenizer = tiny.tokenizer(adds_begin=True)
    stand_in: Any = SimpleNamespace(processing_class=tokenizer)
    ids, images, more = RawPromptTrainer._tokenize_prompts(stand_in, ["sum of apples", "hello"])
    assert ids == tokenizer(["sum of apples", "hello"], add_special_tokens=False)["input_ids"]
    assert tokenizer.bos_token_id not in ids[0]
    assert (images, more) == (None, {})


ROWS = 6
#: Of attention and of the output layer itself.
ADAPTER = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
KINDS = ("llama", "gpt2", "adapter", "continued adapter")


class TheirTrainer(DPOTrainer):  # type: ignore[misc]
    """TRL's, with rows that are encoded."""

    _prepare_dataset = PairTrainer._prepare_dataset


def model_of(kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    if kind == "gpt2":
        shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 320, "n_positions": 64}
        return GPT2LMHeadModel(GPT2Config(**shape))
    model = tiny.model("llama", seed=seed)
    return get_peft_model(model, ADAPTER) if kind == "continued adapter" else model


def trainer_of(trainer: Any, folder: Path, kind: str, **arguments: Any) -> Any:
    rows = [
        {
            "prompt_ids": [5, 6, 7] * at,
            "chosen_ids": [8 + at] * (at + 2),
            "rejected_ids": [30 + at] * (9 - at),
        }
        for at in range(ROWS)
    ]
    options = {"gradient_checkpointing": False, "per_device_train_batch_size": ROWS} | arguments
    made = trainer(
        model=model_of(kind, 3),
        ref_model=None if "adapter" in kind else model_of(kind, 5),
        args=DPOConfig(str(folder), use_cpu=True, bf16=False, report_to=[], **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny.tokenizer(),
        # Axolotl leaves it to TRL to add the adapter. One that is there already is trained on from.
        peft_config=ADAPTER if kind == "adapter" else None,
    )
    if "adapter" in kind:
        torch.manual_seed(4)
        with torch.no_grad():
            for weight in made.model.parameters():
                if weight.requires_grad:
                    weight += 0.3 * torch.randn_like(weight)
    return made


def step(trainer: Any) -> tuple[float, list[Tensor], dict[str, float], list[int]]:
    """Loss, gradients, what is logged, and the positions that each pass through an output layer had."""
    seen = list[int]()
    hooks = [
        model.get_output_embeddings().register_forward_hook(
            lambda layer, given, logits: seen.append(logits.shape[0] * logits.shape[1])
        )
        for model in (trainer.model, trainer.ref_model)
        if model is not None
    ]
    inputs = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model.train(), inputs)
    loss.backward()
    gradients = [weight.grad for weight in trainer.model.parameters() if weight.grad is not None]
    trainer.log({})
    for hook in hooks:
        hook.remove()
    logged = trainer.state.log_history[-1]
    return float(loss), gradients, {name: logged[name] for name in PAIR_METRICS}, seen


@pytest.mark.parametrize("ready", [False, True], ids=["beside", "precomputed"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_gradients_and_metrics_are_trls(tmp_path: Path, kind: str, ready: bool) -> None:
    theirs = trainer_of(TheirTrainer, tmp_path / "theirs", kind, precompute_ref_log_probs=ready)
    loss, gradients, metrics, seen = step(theirs)
    ours = trainer_of(PairTrainer, tmp_path / "ours", kind, precompute_ref_log_probs=ready)
    same, others, own, fewer = step(ours)
    # The first row has no prompt, and nothing predicts the first tokens of its answers.
    answers = sum(at + 2 + 9 - at for at in range(ROWS)) - 2
    assert seen == [seen[0]] * (1 if ready else 2)
    assert answers < seen[0]
    assert fewer == [answers] * len(seen)
    assert loss != pytest.approx(0.6931, abs=1e-3), "the model is not the base"
    assert same == pytest.approx(loss, rel=1e-5)
    assert own == pytest.approx(metrics, rel=1e-4)
    assert len(others) == len(gradients)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


def test_recomputed_layers_and_logits_in_pieces_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, gradients, _, _ = step(trainer_of(TheirTrainer, tmp_path / "theirs", "adapter"))
    monkeypatch.setattr(forward, "PIECE", 4 * 320 * 7)  # of seven tokens
    ours = trainer_of(PairTrainer, tmp_path / "ours", "adapter", gradient_checkpointing=True)
    same, others, _, _ = step(ours)
    assert same == pytest.approx(loss, rel=1e-5)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


def test_metrics_are_means_over_the_passes_since_the_last_log(tmp_path: Path) -> None:
    trainer = trainer_of(PairTrainer, tmp_path, "llama", per_device_train_batch_size=2)
    trainer.model.train()
    margins = list[float]()
    for inputs in trainer.get_train_dataloader():
        trainer.compute_loss(trainer.model, inputs)
        margins.append(float(trainer.pair_means[-1][PAIR_METRICS.index("rewards/margins")]))
    trainer.model.eval()
    trainer.log({"eval_loss": 1.0})  # an evaluation between two logs of the training
    trainer.model.train()
    trainer.log({"loss": 1.0})
    assert len(margins) == ROWS // 2
    assert trainer.state.log_history[-1]["rewards/margins"] == pytest.approx(sum(margins) / len(margins))
    assert "eval_rewards/margins" not in trainer.state.log_history[-2]


def test_the_base_that_is_computed_beforehand_is_trls(tmp_path: Path) -> None:
    tables = [
        trainer_of(kind, tmp_path / kind.__name__, "llama", precompute_ref_log_probs=True).train_dataset
        for kind in (TheirTrainer, PairTrainer)
    ]
    for name in ("ref_chosen_logps", "ref_rejected_logps"):
        assert tables[1][name] == pytest.approx(list(tables[0][name]), rel=1e-5)


@pytest.mark.parametrize(
    "arguments",
    [
        {"loss_type": ["ipo"]},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        {"ld_alpha": 0.5},
        {"use_weighting": True},
        {"f_divergence_type": "forward_kl"},
    ],
    ids=lambda arguments: next(iter(arguments)) + str(next(iter(arguments.values()))),
)
def test_what_needs_more_than_the_answers_is_left_to_trl(tmp_path: Path, arguments: dict[str, Any]) -> None:
    loss, gradients, _, seen = step(trainer_of(TheirTrainer, tmp_path / "theirs", "llama", **arguments))
    same, others, _, all_of_them = step(trainer_of(PairTrainer, tmp_path / "ours", "llama", **arguments))
    assert all_of_them[0] == seen[0]
    assert same == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(others, gradients)


def test_an_evaluation_has_all_logits(tmp_path: Path) -> None:
    trainer = trainer_of(PairTrainer, tmp_path, "llama")
    inputs = next(iter(trainer.get_train_dataloader()))
    trainer.compute_loss(trainer.model.train(), inputs)
    _, logits, _ = trainer.prediction_step(trainer.model.eval(), inputs, prediction_loss_only=False)
    assert logits.shape[:2] == inputs["input_ids"].shape


@of_the_task
def beside_others(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    """Depends on what is in the call, and on the order."""
    return [len(text) + 0.1 * place for place, text in enumerate(completions)]


def trained(trainer: Any) -> tuple[dict[str, torch.Tensor], list[list[float]]]:
    found: list[list[float]] = []
    calculate = trainer._calculate_rewards

    def kept(*named: Any) -> Any:
        rewards = calculate(*named)
        found.extend(rewards.tolist())
        return rewards

    trainer._calculate_rewards = kept
    return gradients_of(trainer), found


def a_step(rank: int) -> None:
    folder = Path("tiny").absolute()
    expected, rewards = trained(trls_own(folder, [beside_others]))
    gradients, own = trained(made(PromptTrainer, folder, [beside_others]))
    assert own == rewards
    assert len(own) == 16, "those of both ranks"
    assert own[:8] != own[8:]
    assert gradients.keys() == expected.keys()
    assert any(float(one.abs().max()) > 1e-4 for one in expected.values())
    for key, one in expected.items():
        torch.testing.assert_close(gradients[key], one, rtol=1e-4, atol=1e-6)
    # A rank sees its own completions; the gradient is that of all.
    first = [one.clone() for one in gradients.values()]
    for one in first:
        torch.distributed.broadcast(one, 0)
    for one, mine in zip(first, gradients.values(), strict=True):
        torch.testing.assert_close(mine, one)


def test_two_ranks_take_the_step_that_trls_own_takes(forks: ForkServer, tmp_path: Path) -> None:
    tiny.save(tmp_path / "tiny")
    assert together(forks, tmp_path, a_step)


class Engine:
    """Weights by name, as vLLM holds them: lost by sleeping, the base's after reading its files."""

    def __init__(self, base: Any) -> None:
        self._files = {name: weight.clone() for name, weight in base.state_dict().items()}
        self.weights: dict[str, torch.Tensor] = {}
        self.generated_with: dict[str, torch.Tensor] = {}
        model = SimpleNamespace(load_weights=self.weights.update)
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner))

    def wake_up(self, tags: list[str]) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def sleep(self, level: int) -> None:
        self.weights.clear()

    def collective_rpc(self, method: str) -> None:
        assert method == "reload_weights"
        self.weights.update(self._files)


def generation_of(model: Any, base: Any) -> Any:
    """TRL's, as its start would leave it where vLLM can be started."""
    generation = VLLMGeneration.__new__(VLLMGeneration)
    generation.__dict__.update(
        model=model,
        mode="colocate",
        enable_sleep_mode=True,
        llm=Engine(base),
        accelerator=SimpleNamespace(is_main_process=True),
        _dist=SimpleNamespace(is_fsdp=False, gather_params=lambda _: torch.no_grad()),
    )
    return generation


def generate(generation: Any) -> dict[str, torch.Tensor]:
    """The order of TRL's trainer: hand over, then wake and read files, generate, sleep."""
    generation.sync_weights()
    generation.llm.wake_up(tags=["weights"])
    generation.llm.collective_rpc("reload_weights")
    found = dict(generation.llm.weights)
    generation.llm.sleep(level=2)
    return found


def test_vllm_generates_with_the_trained_weights_after_it_has_slept() -> None:
    model, base = tiny.model(seed=1), tiny.model(seed=2)
    generation = generation_of(model, base)
    for _ in range(2):
        with fresh_weights(generation):
            found = generate(generation)
        for name, weight in model.named_parameters():
            assert torch.equal(found[name], weight)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.01)
    assert "sync_weights" not in generation.__dict__


def test_adapters_are_added_and_leave_a_bf16_base_as_it_was() -> None:
    model, base = adapted().to(torch.bfloat16), tiny.model().to(torch.bfloat16)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    expected = {name: weight.clone() for name, weight in base.named_parameters()}
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    for name, layer in layers.items():
        own = f"{name.removeprefix('base_model.model.')}.weight"
        added = layer.get_delta_weight("default").float()
        assert float(added.abs().max()) > 0
        expected[own] = (expected[own].float() + added).to(torch.bfloat16)
    generation = generation_of(model, base)
    with fresh_weights(generation):
        found = generate(generation)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_what_is_not_plain_is_handed_over_by_trl() -> None:
    assert merged_weights(tiny.model()) is None
    odd = adapted()
    layer = next(layer for layer in odd.modules() if hasattr(layer, "lora_A"))
    layer.base_layer = torch.nn.Sequential(layer.base_layer)
    assert merged_weights(odd) is None
