"""What a rehearsal shows while it runs: lines of a stranger's program."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from core.domain.tournament_rules import DATASETS
from miner.cli.tournament_rehearse import _datasets, _progress
from miner.observe.redact import Redactor
from miner.settings.model import Settings
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
