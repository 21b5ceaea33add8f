"""What a rehearsal shows while it runs: lines of a stranger's program."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from core.domain.tournament_rules import DATASETS
from miner.cli.tournament_rehearse import _datasets, _progress, _sized, _tasks, _with_stand_ins
from miner.observe.redact import Redactor
from miner.settings.model import Settings
from miner.tournament.rehearsal.inputs import RehearsalInputs
from miner.tournament.rules import TASKS


def shown(capsys: pytest.CaptureFixture[str], line: str, *secrets: str) -> str:
    with _progress(Redactor(secrets)) as say:
        say(line)
    return capsys.readouterr().err


def test_tokens_and_our_own_secrets_are_masked(capsys: pytest.CaptureFixture[str]) -> None:
    said = shown(capsys, f"  | token hf_{'a1' * 17} and wandb-key-1 end", "wandb-key-1")
    assert said.endswith("  | token *** and *** end\n")


def test_a_secret_with_colours_in_it_is_masked(capsys: pytest.CaptureFixture[str]) -> None:
    assert "a1a1" not in shown(capsys, f"hf_{'a1' * 8}\x1b[91m{'a1' * 8}\x1b[0m")


@pytest.mark.parametrize(
    "line",
    [
        "\x1b[91mred\x1b[0m",
        "\x1b]0;title\x07red",
        "\x1b]8;;https://a\x1b\\red",
        "10 %\rred",
        "\x1b[2J\x1b(Bred",
    ],
)
def test_terminal_codes_are_left_out(capsys: pytest.CaptureFixture[str], line: str) -> None:
    assert shown(capsys, line).endswith(" s  red\n")


REQUESTED = {"training_repo_environment_url": "https://github.com/you/entry"}
REQUESTED |= {"training_repo_environment_commit": "a" * 40}
REQUESTED |= {"training_repo_environment_datasets": ["RZ412/PokerBench", "albarji/ballmatro"]}


def test_requested_datasets_that_are_not_given_are_named(tmp_path: Path) -> None:
    said: list[str] = []
    given = [f"RZ412/PokerBench={tmp_path}"]
    found = _datasets(Settings(**REQUESTED), [TASKS["environment"]], given, said.append)
    assert found == {"RZ412/PokerBench": tmp_path}
    assert said == ["your settings request a dataset that is not given by --dataset:", "  albarji/ballmatro"]
    assert _datasets(Settings(**REQUESTED), [TASKS["chat"]], [], said.append) == {}
    assert len(said) == 2


@pytest.mark.parametrize(
    ("kind", "given", "problem"),
    [
        ("chat", ["PokerBench"], "write NAME=DIR"),
        ("chat", ["RZ412/PokerBench="], "write NAME=DIR"),
        ("chat", ["RZ412/PokerBench=.", "RZ412/PokerBench=."], "named twice"),
        ("chat", ["org/mine=."], "not on the validators' list"),
        ("flux", ["RZ412/PokerBench=."], "none to image tasks"),
        ("chat", [f"{name}=." for name in DATASETS[:3]], "at most 2, not 3"),
    ],
)
def test_datasets_that_validators_would_not_give_are_refused(
    kind: str, given: list[str], problem: str
) -> None:
    with pytest.raises(typer.BadParameter, match=problem):
        _datasets(Settings(), [TASKS[kind]], given, lambda text: None)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["round1"], "instruct instruct-2 instruct-pool"),
        (["knockout"], "instruct-kl dpo grpo"),
        (["boss"], "instruct-kl instruct-kl-2 instruct-large dpo grpo continuous"),
        (["image-boss"], "krea2 krea2-2 ideogram4 ideogram4-2 qwen-image z-image"),
        (["instruct", "round1"], "instruct instruct-2 instruct-pool"),
    ],
)
def test_a_round_is_rehearsed_task_by_task(words: list[str], names: str) -> None:
    assert " ".join(task.name for task in _tasks(words)) == names


@pytest.mark.parametrize("word", ["image-round1", "environment-boss", "round2"])
def test_a_round_that_is_not_known_in_full_is_refused(word: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"known kinds: .*round1, knockout, boss, image-knockout"):
        _tasks([word])


def test_a_stand_in_has_the_architecture_that_is_named_and_a_model_its_gpus(tmp_path: Path) -> None:
    tasks = _with_stand_ins(_tasks(["round1"]), ["instruct-pool=falcon_h1", f"instruct={tmp_path}"])
    assert [task.stand_in for task in tasks] == ["qwen2", "qwen2", "falcon_h1"]
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336,'
        ' "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}'
    )
    given = RehearsalInputs(tmp_path, "local/llama")
    assert [_sized(task, given).gpus for task in _tasks(["boss"])] == [4, 4, 4, 4, 4, 4]
    assert [_sized(task, given).gpus for task in tasks] == [2, 2, 2]
    assert [task.gpus for task in _tasks(["boss"])] == [2, 2, 8, 2, 2, 4]
