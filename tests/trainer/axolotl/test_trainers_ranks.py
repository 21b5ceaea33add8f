"""GRPO's trainer on two ranks: the rewards and gradients of TRL's own on the same completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.trainer import tiny
from tests.trainer.axolotl.test_trainers_prompts import gradients_of, made, of_the_task, trls_own
from tests.trainer.forks import ForkServer
from tests.trainer.sharding import together
from trainer.axolotl.trainers import PromptTrainer


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
