"""Comparison of our rules with upstream's present files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from core.domain.tournament_rules import FACTS, POOL
from miner.__main__ import app
from miner.tournament import rules_watch
from miner.tournament.polite_client import PoliteClient
from miner.tournament.rules_watch import (
    Constants,
    Member,
    Unreadable,
    check_rules,
    compare_fact,
    difference,
    is_same,
)
from tests.doubles.upstream import UPSTREAM_FACTS, UpstreamSite, upstream_files, write_upstream

CHANGED = {
    "TOURNAMENT_TEXT_PARTICIPATION_FEE_RAO": 900_000_000,
    "TOURNAMENT_IMAGE_TASK_TYPES": "never read",
    "TOURNAMENT_SCHEDULE_ENVIRONMENT_HOUR": 10,
    "SMALL_TOURNAMENT_ADVANCE": 3,
    "models.model_id": [*(model.name for model in POOL[1:]), "some/newer-model"],
    "BOSS_ROUND_TIE_DEADZONE_NATS": 0.02,
}
FIVE = """\
environment: hour of the start, UTC: 9 → 10
round 1: entries that go on: 2 → 3
text, round 1: pool of newer models: 17 of them → 17; new: some/newer-model; gone: LiquidAI/LFM2.5-230M
text: fee, TAO: 0.7 → 0.9
boss: dead zone, nats: 0.01 → 0.02"""


@pytest.fixture(autouse=True)
def _licence_of_the_double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_watch, "FACTS", UPSTREAM_FACTS)
    monkeypatch.setattr(rules_watch, "PAUSE_S", 0.0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def site() -> Iterator[UpstreamSite]:
    with UpstreamSite(CHANGED) as opened:
        yield opened


@pytest.mark.process
def test_five_changed_constants_are_named_and_nothing_else(site: UpstreamSite, tmp_path: Path) -> None:
    found = check_rules(site.url, cache=tmp_path)
    assert sorted(map(str, found.changes)) == sorted(FIVE.splitlines())
    assert found.compared == sum(fact.constant is not None for fact in FACTS)
    assert found.problem is None
    assert all(change.uses and change.file in site.files for change in found.changes)


def test_files_without_a_change_have_none(tmp_path: Path) -> None:
    found = check_rules(str(write_upstream(tmp_path / "upstream")), cache=tmp_path)
    assert (found.changes, found.problem) == ((), None)


@pytest.mark.process
def test_the_command_says_what_changed_and_ends_with_1(site: UpstreamSite) -> None:
    run = CliRunner().invoke(app, ["tournament", "rules", "--check", "--upstream", site.url])
    assert run.exit_code == 1
    assert run.stdout == Path(__file__).with_name("rules_check.txt").read_text("utf-8")
    data = CliRunner().invoke(app, ["tournament", "rules", "--upstream", site.url, "--json"])
    assert len(json.loads(data.stdout)["check"]["changes"]) == 5


@pytest.mark.process
def test_without_a_network_the_command_says_how_old_the_rules_are(site: UpstreamSite) -> None:
    address = site.url
    site.__exit__(None, None, None)
    run = CliRunner().invoke(app, ["tournament", "rules", "--check", "--upstream", address])
    assert run.exit_code == 1
    assert "rules are not compared" in run.stdout.replace("\n    ", " ")
    assert "the rules here are of 2026-09-17, " in run.stdout


def test_a_file_that_is_gone_is_one_change_and_a_whole_repository_is_none(tmp_path: Path) -> None:
    folder = write_upstream(tmp_path / "upstream")
    (folder / "validator/tournament/gpu_requirements.py").unlink()
    (change,) = check_rules(str(folder), cache=tmp_path).changes
    assert str(change).endswith("gpu_requirements.py: 6 rules read there → the file is gone")
    found = check_rules(str(tmp_path / "nowhere"), cache=tmp_path)
    assert not found.changes
    assert found.problem is not None


def test_every_file_of_the_double_is_read_and_written_as_upstream_writes() -> None:
    text = upstream_files()["validator/tournament/constants.py"].decode()
    assert "FORCED_R1_ENVIRONMENT: EnvironmentName | None = EnvironmentName.INTERCODE" in text
    assert Constants.of(text)["FINAL_ROUND_IMAGE_TASK_DISTRIBUTION"] == {
        "KREA2": 2,
        "IDEOGRAM4": 2,
        "QWEN_IMAGE": 1,
        "Z_IMAGE": 1,
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("X = 5 * 60  # seconds", 300),
        ("Y = 1.5\nX = Y + 1.0", 2.5),
        ("X: tuple[int, ...] = (1, -2)", (1, -2)),
        ("X = [(4.0, 1.5), (float('inf'), 6.0)]", ((4.0, 1.5), (float("inf"), 6.0))),
        ("X = {Kind.A_B: 1}", {"A_B": 1}),
        ("class Kind(str, Enum):\n    A = 'a-b'\nX = Kind.A", "a-b"),
        ("class X(str, Enum):\n    A = 'a'\n    B = 'b'\n    def f(self): ...", ("a", "b")),
        ("X = frozenset({'a'})", ("a",)),
        ("X = 1\nX = 2", 2),
    ],
)
def test_values_are_read_as_python_has_them(text: str, value: object) -> None:
    assert Constants.of(text)["X"] == value


@pytest.mark.parametrize(
    "text",
    [
        "X = __import__('os').system('touch /tmp/ran')",
        "X = open('/etc/passwd').read()",
        "X = 9 ** 9 ** 9",
        "X = 'a' * 1000000000",
        "X = 1e17 * 1e17",
        "X = " + "1+" * 20_000 + "1",
        "X = 1 / 0",
        "X = X",
        "Y = X\nX = Y",
        "X = " + "-" * 5000 + "1",
        "X = " + "(" * 150 + "1" + ")" * 150 + "[0]",
        "X = {[]: 1}",
        "A = [1] * 2\nX = A",
        "\n".join(["A0 = (1,)", *(f"A{n} = (A{n - 1}, A{n - 1})" for n in range(1, 40)), "X = A39"]),
        "X = (",
        "X = 'a\0'",
        "if True:\n    X = 1",
        "Y = 1",
    ],
)
def test_whatever_would_have_to_be_run_is_not_read(text: str) -> None:
    with pytest.raises(Unreadable):
        Constants.of(text)["X"]


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        (1.0, 1, True),
        (1, True, False),
        ("/app/checkpoints", "/app/checkpoints/", True),
        ("qwen-image", Member("QWEN_IMAGE"), True),
        ("qwen-image", "QWEN_IMAGE", False),
        (("a", "b"), ("b", "a"), False),
        (frozenset({"a", "b"}), ("b", "a"), True),
        (frozenset({"a"}), ("a", "a"), False),
        ({"a": 1}, {"a": 2}, False),
        (0.1, "0.1", False),
        ("ab", ("a", "b"), False),
        ("a", None, False),
    ],
)
def test_rules_are_the_same_as_people_would_say(ours: object, theirs: object, same: bool) -> None:
    assert is_same(ours, theirs) is same


def test_a_number_beyond_all_bounds_is_a_change_and_no_crash(tmp_path: Path) -> None:
    folder = write_upstream(tmp_path / "upstream", {"CPUS_PER_GPU": 10**400})
    (change,) = check_rules(str(folder), cache=tmp_path).changes
    assert change.constant == "CPUS_PER_GPU"


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("core/constants/environments.py", "{name} = " + "A" * 300_000),
        (
            "core/oversampled_later_models.json",
            '{{"models": [{{"model_id": ' + "[" * 900 + "]" * 900 + "}}]}}",
        ),
    ],
)
def test_a_hostile_file_is_a_short_change(path: str, content: str) -> None:
    fact = next(fact for fact in FACTS if fact.source.path == path and fact.constant)
    change = compare_fact(fact, content.format(name=fact.constant).encode())
    assert change is not None
    assert len(change.new) <= 500


def test_rules_are_shown_in_80_columns_with_the_rounds_first() -> None:
    short, everything = (
        CliRunner().invoke(app, ["tournament", "rules", *more]).stdout for more in ((), ("--all",))
    )
    assert "instruct-large of 30-72B on 8\n            GPUs" in short
    assert everything.startswith(short.rpartition("\n\n")[0])
    assert "validator/tournament/constants.py@0791bb6e, 2026-09-17\n" in everything
    assert [line for line in everything.splitlines() if len(line) > 80] == []


def test_what_is_shown_has_no_control_codes() -> None:
    assert difference("a", "b\x1b[31m\n") == ("a", "b\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}")


@pytest.mark.process
def test_an_answer_from_the_cache_counts_as_no_answer(site: UpstreamSite, tmp_path: Path) -> None:
    check_rules(site.url, cache=tmp_path)
    site.__exit__(None, None, None)
    with PoliteClient(tmp_path) as client:
        assert client.get(f"{site.url}/NOTICE", max_bytes=1000).stale
    found = check_rules(site.url, cache=tmp_path)
    assert not found.compared
    assert found.problem is not None
