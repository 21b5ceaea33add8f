import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from click.testing import Result
from typer.testing import CliRunner

from core.domain.tasks import OFFERED_TASKS
from core.domain.wire import TournamentType
from miner.chain.fiber import (
    MINER_HOTKEY,
    NONCE,
    SIGNATURE,
    VALIDATOR_HOTKEY,
    is_signed,
    signable_get_messages,
    signable_post_message,
    signature_bytes,
)
from miner.cli import dev
from miner.dev import stack
from tests.doubles.each import each
from tests.miner.dev.serving import Handler, serving

pytestmark = pytest.mark.process


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default folder is relative, so each test has its own. A busy machine may answer late."""
    monkeypatch.setattr("miner.dev.validator.OFFER_LIMIT_S", 120.0)
    monkeypatch.setattr("miner.dev.validator.OTHER_LIMIT_S", 120.0)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def god_miner_dev(*arguments: str) -> Result:
    return CliRunner().invoke(dev.app, arguments, catch_exceptions=False)


class Miner:
    """Checks signatures, answers well, and keeps the last request."""

    def __call__(self, handler: Handler) -> None:
        self.path = handler.path
        self.body = handler.body
        key = stack.throwaway_keys(dev.DEFAULT_FOLDER).validator.public_key
        nonce, miner = handler.headers[NONCE], handler.headers[MINER_HOTKEY]
        signature = signature_bytes(handler.headers[SIGNATURE]) or b""
        message = (
            signable_post_message(nonce, miner, handler.body)
            if handler.command == "POST"
            else signable_get_messages(nonce, miner)[0]
        )
        if not is_signed(message, signature, key):
            handler.reply(401, b'{"error": "bad_credentials"}')
        elif handler.path.startswith("/training_repo"):
            handler.reply(200, json.dumps({"github_repo": "https://x/y", "commit_hash": COMMIT}).encode())
        elif handler.command == "POST":
            handler.reply(200, b'{"message": "yes", "accepted": true, "task_id": "t"}')
        else:
            handler.reply(404, b'{"error": "no_submission"}')


def test_choices_are_the_ones_that_the_rest_of_the_code_knows() -> None:
    assert set(get_args(dev.TaskName)) == {kind.name.lower() for kind in OFFERED_TASKS}
    assert set(get_args(dev.RepoType)) == {kind.value for kind in TournamentType}


def test_wallet_makes_keys_once_and_shows_them(elsewhere: Path) -> None:
    first = json.loads(god_miner_dev("wallet", "--json").stdout)
    assert first == json.loads(god_miner_dev("wallet", "--json").stdout)
    assert Path(first["wallets"]).is_relative_to(elsewhere)
    assert first["miner"] in god_miner_dev("wallet").stdout


def test_nodes_writes_the_file_and_prints_what_a_miner_needs(elsewhere: Path) -> None:
    result = god_miner_dev("nodes", "--dir", "else", "--stake", "5")
    nodes = json.loads((elsewhere / "else" / "nodes.json").read_text())
    assert nodes[0]["stake"] == 5
    settings = dict(line.split("=", 1) for line in result.stdout.splitlines())
    assert settings == json.loads(god_miner_dev("nodes", "--dir", "else", "--json").stdout)
    assert settings["CHAIN"] == "file"


@each(
    ("task_type", "offer_path", "start_path"),
    [
        ("instruct", "/task_offer/", "/start_training/"),
        ("chat", "/task_offer/", "/start_training/"),
        ("dpo", "/task_offer/", "/start_training/"),
        ("grpo", "/task_offer/", "/start_training_grpo/"),
        ("image", "/task_offer_image/", "/start_training_image/"),
    ],
)
def test_offer_start_and_submission_speak_of_the_same_task(
    task_type: str, offer_path: str, start_path: str
) -> None:
    miner = Miner()
    with serving(miner) as server:
        common = ("--type", task_type, "--url", server.url, "--seed", "7", "--json")
        offered = god_miner_dev("offer", *common)
        assert miner.path == offer_path
        task_id = json.loads(miner.body)["task_id"]
        started = god_miner_dev("start", *common)
        assert miner.path == start_path
        assert json.loads(miner.body)["task_id"] == task_id
        asked = god_miner_dev("submission", *common)
        assert miner.path == f"/get_latest_model_submission/{task_id}"
    assert [result.exit_code for result in (offered, started, asked)] == [0, 0, 0]
    outcomes = [json.loads(result.stdout)["outcome"] for result in (offered, started, asked)]
    assert outcomes == ["accepted", "start noted", "no submission"]


def test_a_task_may_be_changed_in_what_matters() -> None:
    miner = Miner()
    with serving(miner) as server:
        god_miner_dev(
            *("start", "--url", server.url, "--task-id", "t-1", "--model", "me/m", "--hours", "2.5"),
            *("--repo-name", "mine", "--dataset", "http://x/rows.json", "--compact"),
        )
    assert b'": ' not in miner.body
    sent = json.loads(miner.body)
    assert (sent["task_id"], sent["model"], sent["hours_to_complete"]) == ("t-1", "me/m", 2.5)
    assert (sent["expected_repo_name"], sent["dataset"]) == ("mine", "http://x/rows.json")


def test_a_forged_request_is_refused_which_is_a_usable_reply() -> None:
    with serving(Miner()) as server:
        for command in ("offer", "start", "submission", "repo"):
            result = god_miner_dev(command, "--url", server.url, "--forged", "--json")
            assert json.loads(result.stdout)["status"] == 401
            assert result.exit_code == (1 if command == "repo" else 0)


def test_a_key_of_ones_own_and_another_miners_hotkey_need_no_throwaway_keys(elsewhere: Path) -> None:
    keys = stack.throwaway_keys(elsewhere / "own")
    key = keys.wallet_path / "validator" / "hotkeys" / "default"
    seen: list[str] = []

    def answer(handler: Handler) -> None:
        seen.extend(handler.headers[name] for name in (VALIDATOR_HOTKEY, MINER_HOTKEY))
        handler.reply()

    with serving(answer) as server:
        god_miner_dev("offer", "--url", server.url, "--key", str(key), "--miner-hotkey", "5Elsewhere")
    assert seen == [keys.validator.ss58_address, "5Elsewhere"]
    assert not (elsewhere / dev.DEFAULT_FOLDER).exists()


def test_repo_asks_for_a_tournament_type() -> None:
    miner = Miner()
    with serving(miner) as server:
        result = god_miner_dev("repo", "--type", "image", "--url", server.url)
    assert miner.path == "/training_repo/image"
    assert "entered: https://x/y" in result.stdout


@pytest.mark.parametrize("as_json", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.parametrize("more", [{"commit_hash": COMMIT}, {}, {"commit_hash": COMMIT, "github_repo": 7}])
def test_the_token_of_an_entry_is_never_printed(as_json: tuple[str, ...], more: dict[str, object]) -> None:
    token = 'ghp_"quoted"' + "x" * 30
    reply = json.dumps({"github_repo": "https://x/y", "github_token": token, **more}).encode()
    with serving(lambda handler: handler.reply(200, reply)) as server:
        result = god_miner_dev("repo", "--url", server.url, *as_json)
    assert "xxx" not in result.output
    assert "ghp_" not in result.output
    assert "***" in result.output
    assert result.exit_code == (0 if more == {"commit_hash": COMMIT} else 1)


@pytest.mark.parametrize(
    ("status", "way_out"),
    [(404, "set TRAINING_REPO_TEXT_URL and TRAINING_REPO_TEXT_COMMIT"), (403, "--key"), (401, "--key")],
)
def test_a_miner_that_enters_nothing_is_exit_code_one(status: int, way_out: str) -> None:
    with serving(lambda handler: handler.reply(status, b'{"error": "not_entered"}')) as server:
        result = god_miner_dev("repo", "--url", server.url)
    assert result.exit_code == 1
    assert way_out in result.output


def test_a_reply_is_printed_with_what_a_validator_makes_of_it() -> None:
    with serving(lambda handler: handler.reply(200, b"[bold]hello")) as server:
        result = god_miner_dev("start", "--url", server.url)
    assert result.exit_code == 1
    assert "[bold]hello" in result.stdout
    assert "all starts resent" in result.stdout
    assert " ms" in result.stdout


def test_nobody_there_is_exit_code_one() -> None:
    result = god_miner_dev("offer", "--url", "http://127.0.0.1:1", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["status"] is None


@pytest.mark.parametrize("wrong", [("offer", "--type", "sonnet"), ("repo", "--type", "sonnet")], ids=str)
def test_an_unknown_choice_is_refused_with_the_known_ones(wrong: tuple[str, ...]) -> None:
    result = god_miner_dev(*wrong)
    assert result.exit_code == 2
    assert "instruct" in result.stderr or "environment" in result.stderr


def test_importing_the_commands_imports_nothing_heavy() -> None:
    code = "import sys; import miner.cli.dev; print([m for m in sys.modules if m.startswith('miner.dev')"
    heavy = "or m in ('httpx', 'uvloop', 'httptools', 'bittensor_core', 'pydantic', 'rich.table')])"
    root = Path(dev.__file__).parents[2]
    command = [sys.executable, "-c", f"{code} {heavy}"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
