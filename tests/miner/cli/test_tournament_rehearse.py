"""What a rehearsal shows while it runs: lines of a stranger's program."""

from __future__ import annotations

import pytest

from miner.cli.tournament_rehearse import _progress
from miner.observe.redact import Redactor


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
