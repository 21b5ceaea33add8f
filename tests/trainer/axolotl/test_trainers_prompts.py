"""GRPO's trainer: cheaper steps of the same gradients, and rewards beside other work."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from axolotl.core.trainers.grpo.args import AxolotlGRPOConfig
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from datasets import Dataset
from transformers import TrainerCallback

from tests.trainer import tiny
from trainer.axolotl import trainers
from trainer.axolotl.trainers import PromptTrainer, _grouped, by_length
from trainer.rewards import calls
from trainer.rewards.source import REWARD_MODULE

CHANCE = random.Random(2)
ROWS = [{"prompt": tiny.sentence(CHANCE, CHANCE.randint(1, 30)), "extra_data": str(at)} for at in range(16)]
Rewards = Callable[..., list[float]]


def of_the_task(reward: Rewards) -> Rewards:
    """As the functions of the module that the trainer writes."""
    reward.__module__ = REWARD_MODULE
    return reward


@of_the_task
def words(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text.split())) for text in completions]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model") / "tiny")


def made(kind: Any, folder: Path, rewards: list[Rewards], *, adapter: bool = False, **options: Any) -> Any:
    model = tiny.load(folder)
    if adapter:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
    settings: dict[str, Any] = {
        "output_dir": str(folder.parent / "out"),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 2,
        "max_completion_length": 16,
        "beta": 0.04,
        "temperature": 0.9,
        "top_k": 50,
        "max_steps": 1,
        "max_grad_norm": 0.0,
        "learning_rate": 0.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        **options,
    }
    return kind(
        model=model,
        reward_funcs=rewards,
        args=AxolotlGRPOConfig(**settings),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tiny.tokenizer(),
    )


class KeptGradients(TrainerCallback):  # type: ignore[misc]
    def __init__(self, model: Any) -> None:
        self.model, self.gradients = model, dict[str, torch.Tensor]()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        named = self.model.named_parameters()
        self.gradients = {name: weight.grad.clone() for name, weight in named if weight.grad is not None}


def gradients_of(trainer: Any) -> dict[str, torch.Tensor]:
    kept = KeptGradients(trainer.model)
    trainer.add_callback(kept)
    torch.manual_seed(9)
    trainer.train()
    return kept.gradients


def trls_own(folder: Path, rewards: list[Rewards], **options: Any) -> Any:
    """TRL's trainer with our completions."""
    plain = made(AxolotlGRPOTrainer, folder, rewards, **options)
    rules = PromptTrainer._sampling_rules(plain)
    plain.together, plain._calls = None, None

    def single_turn(prompt_ids: Any, images: Any, more: Any) -> Any:
        return PromptTrainer._complete(plain, prompt_ids, rules), None

    plain._generate_single_turn = single_turn
    return plain


#: The last two depend on what is beside a completion in its pass: there the passes are TRL's.
LOSSES: list[dict[str, Any]] = [
    {"loss_type": "dapo"},
    {"loss_type": "grpo"},
    {"loss_type": "bnpo"},
    {"top_entropy_quantile": 0.5},
]


@pytest.mark.parametrize(("adapter", "loss"), [(True, LOSSES[0]), *((False, loss) for loss in LOSSES)])
def test_a_step_has_the_gradients_of_trls_own_on_the_same_completions(
    folder: Path, adapter: bool, loss: dict[str, Any]
) -> None:
    expected, gradients = (
        gradients_of(trls_own(folder, [words], adapter=adapter, **loss)),
        gradients_of(made(PromptTrainer, folder, [words], adapter=adapter, **loss)),
    )
    assert gradients.keys() == expected.keys()
    assert any(float(one.abs().max()) > 1e-4 for one in expected.values())
    for name, one in expected.items():
        torch.testing.assert_close(gradients[name], one, rtol=1e-4, atol=1e-6)


def test_the_parts_of_a_step_are_no_wider_than_what_is_in_them() -> None:
    prompts, completions = [3, 1, 2, 5], [2, 4, 1, 1]
    prompt_mask = torch.tensor([[0] * (5 - one) + [1] * one for one in prompts])
    completion_mask = torch.tensor([[1] * one + [0] * (4 - one) for one in completions])
    rows = torch.arange(4)
    batch = {
        "prompt_ids": prompt_mask * (rows[:, None] + 1),
        "prompt_mask": prompt_mask,
        "completion_ids": completion_mask * (rows[:, None] + 1),
        "completion_mask": completion_mask,
        "ref_per_token_logps": completion_mask.float(),
        "advantages": rows.float(),
        "num_items_in_batch": torch.tensor(8),
        "names": ["a", "b", "c", "d"],
    }
    first, last = by_length(batch, 2)
    assert first["names"] == ["d", "a"]
    assert last["names"] == ["b", "c"]
    assert first["advantages"].tolist() == [3.0, 0.0]
    assert [first["prompt_ids"].shape[1], first["completion_ids"].shape[1]] == [5, 2]
    assert [last["prompt_ids"].shape[1], last["ref_per_token_logps"].shape[1]] == [2, 4]
    for part in (first, last):
        assert part["prompt_mask"].any(dim=0).all()
        assert part["completion_mask"].any(dim=0).all()
        assert int(part["num_items_in_batch"]) == 8


def test_repeated_prompts_are_read_once() -> None:
    assert _grouped([[1], [1], [2], [2]], 2) == ([[1], [2]], 2)
    assert _grouped([[1], [1], [1], [1], [2], [2]], 2) == ([[1], [1], [2]], 2)
    assert _grouped([[1], [1], [1], [1]], 2) == ([[1], [1]], 2)
    assert _grouped([[1], [2], [2]], 2) == ([[1], [2], [2]], 1)


def test_rewards_get_completions_with_what_their_rows_know_and_all_of_a_step_at_once(folder: Path) -> None:
    seen: list[dict[str, Any]] = []

    @of_the_task
    def looking(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.append({"prompts": prompts, "completions": completions, **columns})
        return [0.0] * len(completions)

    made(PromptTrainer, folder, [looking, words]).train()
    (call,) = seen
    assert [len(call[name]) for name in ("prompts", "completions", "extra_data", "completion_ids")] == [8] * 4
    assert call["prompts"] == [ROWS[int(at)]["prompt"] for at in call["extra_data"]]
    assert call["extra_data"][::2] == call["extra_data"][1::2], "a prompt's completions follow each other"
    decoded = tiny.tokenizer().batch_decode(call["completion_ids"], skip_special_tokens=True)
    assert call["completions"] == decoded


def test_slow_rewards_are_computed_while_others_are_still_generated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No clock decides: each prompt waits until the reward of the first is called."""
    generating, seen, plain = threading.Event(), list[bool](), trainers.complete

    def complete(*arguments: Any, **named: Any) -> Any:
        generating.set()
        called.clear()
        finished = named.get("finished")

        def watched(prompt: int, found: Any) -> None:
            finished(prompt, found)
            called.wait(60)

        try:
            return plain(*arguments, **{**named, "finished": finished and watched})
        finally:
            generating.clear()

    called = threading.Event()

    @of_the_task
    def slow(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.append(generating.is_set())
        called.set()
        return words(prompts, completions)

    monkeypatch.setattr(trainers, "complete", complete)
    monkeypatch.setattr(calls, "SLOW", 0.0)
    trainer = made(PromptTrainer, folder, [slow], max_steps=4)
    rewarded: list[Any] = []
    calculate = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *named: rewarded.append(calculate(*named)) or rewarded[-1]
    trainer.train()
    assert seen[:4] == [False, False, False, True], "the first call loads, and one long call may be chance"
    assert [len(one) for one in rewarded] == [8] * 4


def test_an_operators_own_functions_get_all_that_trl_hands_over(folder: Path) -> None:
    seen: list[tuple[str, set[str]]] = []

    def plain(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.append((threading.current_thread().name, {*columns}))
        return words(prompts, completions)

    async def waiting(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
        seen.append(("async", {*columns}))
        return [None, *words(prompts, completions)[1:]]

    trainer = made(PromptTrainer, folder, [plain, waiting, words])
    trainer.train()
    handed = {"completion_ids", "extra_data", "trainer_state", "log_extra", "log_metric"}
    assert seen == [(threading.main_thread().name, handed), ("async", handed)]


def test_rewards_that_teach_nothing_are_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "PROMPTS", 4)
    said: list[str] = []
    equal = of_the_task(lambda prompts, completions, **_: [1.0] * len(completions))
    trainer = made(PromptTrainer, folder, [equal])
    trainer.watch = calls.RewardWatch([1.0], said.append)
    trainer.train()
    first, second = said
    assert first == "reward 0 gave 1 to every completion of 4 prompts: it teaches nothing"
    assert second.startswith("100% of 4 prompts had completions of equal reward")


class EndlessVllm:
    """In the place of TRL's, with a vLLM elsewhere: counts how often weights come."""

    llm, synced = None, 0

    def sync_weights(self) -> None:
        self.synced += 1

    def generate(self, prompts: list[list[int]], **named: Any) -> Any:
        return None, [[5, 6] for _ in prompts], [[[0.0], [0.0]] for _ in prompts], None


def test_vllm_gets_the_weights_for_every_generation_and_fails_as_a_generation(folder: Path) -> None:
    """Steps that a search for a rate takes back do not count: the number of the step is as before."""
    moments: list[str] = []

    @contextmanager
    def generating() -> Iterator[None]:
        moments.append("begun")
        yield
        moments.append("over")

    trainer = made(PromptTrainer, folder, [words])
    trainer.use_vllm, trainer.vllm_generation, trainer.generating = True, EndlessVllm(), generating
    for _ in range(2):
        completions, log_probs = trainer._generate_single_turn([[7], [7]], None, {})
        assert (completions, log_probs) == ([[5, 6]] * 2, [[0.0, 0.0]] * 2)
    assert trainer.vllm_generation.synced == 2
    assert moments == ["begun", "over"] * 2
