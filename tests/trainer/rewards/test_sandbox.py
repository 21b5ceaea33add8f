"""Reward code that misbehaves in every way: the training goes on, and says why there were zeros."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from core.domain.evaluation import Era
from core.runs.progress import NoteEvent, parse_events
from tests.trainer.rewards.test_source import GOOD, task
from trainer.rewards import sandbox
from trainer.rewards.sandbox import PATIENCE, Rewards
from trainer.rewards.source import REWARD_TABLE, write_rewards

pytestmark = pytest.mark.process


DEAF = """
import signal, time
def f(completions):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
"""
LOOKING_AROUND = """
import os, sys
def f(completions):
    return ["HF_TOKEN" in os.environ, any("trainer" in name for name in sys.modules), len(os.environ)]
"""
WITHOUT_PRIVILEGES = """
def f(completions):
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    held = [int(status["Cap" + name], 16) for name in ("Inh", "Prm", "Eff", "Amb")]
    return [sum(held), int(open("/proc/self/oom_score_adj").read())]
"""
COUNTING = """
seen = []
def score(completions):
    seen.extend(completions)
    return [double(len(seen))] * len(completions)
def double(number):
    return 2 * number
"""
#: What the first row knows, and how many columns there are besides.
ASKING = """
def f(completions, extra_data=None, **kwargs):
    known = (extra_data or [None])[0]
    return [known["k"] if isinstance(known, dict) else float(known is not None), len(kwargs)]
"""


@contextmanager
def rewards(folder: Path, *sources: str, **options: Any) -> Iterator[Rewards]:
    options.setdefault("progress_path", str(folder / "progress.jsonl"))
    opened = Rewards.open(write_rewards(task(*sources), folder / "w", **options) / REWARD_TABLE)
    try:
        yield opened
    finally:
        opened.close()


def notes(folder: Path) -> list[str]:
    file = folder / "progress.jsonl"
    events = [line.event for line in parse_events(file.read_bytes())] if file.exists() else []
    return [event.text for event in events if isinstance(event, NoteEvent)]


#: Answers in the place of the worker that it runs in, on every descriptor that it finds.
ANSWERS = """
def f(completions):
    import os
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, {said!r}.encode() + b"\\n")
        except OSError:
            pass
    os._exit(0)
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long enough for a busy machine; nothing here waits for it."""
    for name in ("FIRST_CALL", "CALL", "END_S"):
        monkeypatch.setattr(sandbox, name, 600.0)


def test_a_supervisor_ends_although_a_fork_of_the_trainer_has_its_socket() -> None:
    """A data loader's workers are forks; a supervisor that is killed would leave a reward's processes."""
    worker = sandbox.RewardProcess()
    assert "rewards" in worker.request(
        {
            "place": 0,
            "source": "def f(completions): return [1.0]",
            "function": "f",
            "completions": ["x"],
            "columns": {},
        },
        sandbox.FIRST_CALL,
    )
    fork = os.fork()
    if fork == 0:
        signal.pause()
        os._exit(0)
    try:
        assert worker.end() != -signal.SIGKILL
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def f(completions): raise ValueError('no way')", "ValueError: no way"),
        ("def f(completions): return 1 / 0", "ZeroDivisionError"),
        ("def f(completions): return [1.0]", "returned 1 rewards for 2 completions"),
        ("def f(completions): return None", "TypeError"),
        ("def f(completions): return 'ab'", "returned str"),
        ("def f(completions): return ['x', 'y']", "no finite number"),
        ("def f(completions): return [float('nan'), float('inf')]", "no finite number"),
        ("def f(completions): return [None, None]", "no finite number"),
        (
            "import nothing_like_it\ndef f(completions): return [1, 1]",
            "imports nothing_like_it, which is not",
        ),
        ("def f(completions):\n    import nothing_like_it", "imports nothing_like_it.*REWARD_PACKAGES"),
        ("def f(completions):\n    import os\n    os._exit(3)", r"its process ended \(exit 3\)"),
        ("def f(completions):\n    import sys\n    sys.exit(0)", "SystemExit"),
        (
            "def f(completions):\n    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)",
            "its process ended",
        ),
        ("def f(completions): return f(completions)", "RecursionError"),
        ("def f(completions): raise ValueError('half \\ud800 a pair')", "half . a pair"),
        ("def f(completions): return [b'x' * (1 << 62)]", "MemoryError|OverflowError"),
        ("def f(completions:\n", "is no Python"),
    ],
)
def test_a_reward_that_fails_gives_zeros_and_a_reason(tmp_path: Path, source: str, reason: str) -> None:
    import re

    with rewards(tmp_path, GOOD, source) as opened:
        assert opened.call(1, ["a", "b"]) == [0.0, 0.0]
        assert opened.call(1, ["a", "b"]) == [0.0, 0.0]
        assert opened.call(0, ["ab"]) == [2.0], "the others go on"
    noted = notes(tmp_path)
    assert len(noted) == 1, "each reason once"
    assert re.search(reason, noted[0])


@pytest.mark.parametrize(
    "said",
    ['{"rewards": [1e999, NaN]}', '{"rewards": [1' + "0" * 400 + ', "1"]}', "[" * 100_000, '{"rewards": 3}'],
)
def test_a_reward_that_answers_for_its_worker_gives_zeros_too(tmp_path: Path, said: str) -> None:
    """A number without an end would make the model one, and an error would end the training."""
    with rewards(tmp_path, GOOD, ANSWERS.format(said=said)) as opened:
        assert opened.call(1, ["a", "b"]) == [0.0, 0.0]
        assert opened.call(0, ["ab"]) == [2.0]
    assert len(notes(tmp_path)) == 1


def test_a_reward_with_a_new_excuse_every_time_fills_no_disk(tmp_path: Path) -> None:
    source = "calls = []\ndef f(completions):\n    calls.append(1)\n    raise ValueError(len(calls))"
    with rewards(tmp_path, source) as opened:
        for _ in range(sandbox.MAX_REPORTED + 10):
            assert opened.call(0, ["a"]) == [0.0]
    assert len(notes(tmp_path)) == sandbox.MAX_REPORTED


@pytest.mark.parametrize(
    "source",
    [
        "def f(completions):\n    while True: pass",
        "def f(completions):\n    import time\n    time.sleep(600)",
        DEAF,
        "while True: pass\ndef f(completions): return [0]",
    ],
)
def test_a_reward_that_never_comes_back_is_ended_and_after_some_times_not_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(sandbox, "FIRST_CALL", 0.3)
    with rewards(tmp_path, source) as opened:
        for _ in range(PATIENCE):
            assert opened.call(0, ["a"]) == [0.0]
        monkeypatch.setattr(sandbox, "FIRST_CALL", 3600.0)
        monkeypatch.setattr(sandbox, "CALL", 3600.0)
        assert opened.call(0, ["a"]) == [0.0]  # at once
    assert notes(tmp_path)[-1].endswith("it never came back")


def test_what_a_reward_prints_or_leaves_behind_disturbs_nobody(tmp_path: Path) -> None:
    noisy = (
        "import os, sys\n"
        "def f(completions):\n"
        "    print('{\"rewards\": [9]}'); sys.stderr.write('x' * 100000); os.write(1, b'noise\\n')\n"
        "    open('left', 'w').write('x'); return [1.0 for _ in completions]\n"
    )
    with rewards(tmp_path, noisy) as opened:
        assert opened.call(0, ["a"]) == [1.0]
        assert opened.call(0, ["a", "b"]) == [1.0, 1.0]
    assert not Path("left").exists()


def test_a_reward_sees_nothing_of_our_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with rewards(tmp_path, LOOKING_AROUND) as opened:
        token, ours, count = opened.call(0, ["a", "b", "c"])
    assert (token, ours) == (0.0, 0.0)
    assert count < 15


ROWS: dict[str, Any] = {"extra_data": ["x", "y"], "prompts": ["p", "q"]}
JSON_ROWS = {"extra_data": ['{"k": 7}', '{"k": 8}']}


@pytest.mark.parametrize(
    ("source", "options", "columns", "numbers"),
    [
        ("def f(completions): return [1, float('nan')]", {}, {}, [1.0, 0.0]),
        ("def f(completions): return (1, 2.5)", {}, {}, [1.0, 2.5]),
        ("def f(completions): return iter([True, 2])", {}, {}, [1.0, 2.0]),
        ("def f(completions): return (value for value in [1, 2])", {}, {}, [1.0, 2.0]),
        (ASKING, {}, ROWS, [1.0, 0.0]),
        ("def f(completions): return [5, 5]", {}, ROWS, [5.0, 5.0]),
        (ASKING, {"era": Era.TOURNAMENTS}, {**ROWS, "trainer_state": object()}, [1.0, 1.0]),
        (ASKING, {"extra_is_json": True}, JSON_ROWS, [7.0, 0.0]),
        # As validators fall back: a TypeError over the arguments is not the end.
        ("def f(completions, extra_data=None): return [len(completions[0])] * 2", {}, {}, [3.0, 3.0]),
        ("def f(completions, extra_data): return [0, 0]", {}, {}, [0.0, 0.0]),
    ],
    ids=[
        "one bad number",
        "tuple",
        "iterator",
        "generator",
        "asks for the extra column, and offers pass no other",
        "asks for completions alone",
        "tournaments pass all columns",
        "data that were no text",
        "may do without its column",
        "cannot do without its column",
    ],
)
def test_a_function_gets_what_it_asks_for_and_gives_a_number_for_each(
    tmp_path: Path, source: str, options: dict[str, Any], columns: dict[str, Any], numbers: list[float]
) -> None:
    with rewards(tmp_path, source, **options) as opened:
        assert opened.call(0, ["abc", "d"], **columns) == numbers


def test_a_helper_is_at_hand_and_state_is_kept_between_calls(tmp_path: Path) -> None:
    with rewards(tmp_path, COUNTING) as opened:
        assert [opened.call(0, ["a"]), opened.call(0, ["b"])] == [[2.0], [4.0]]


def test_the_child_goes_with_us(tmp_path: Path) -> None:
    with rewards(tmp_path, "import os\ndef f(completions): return [os.getpid()]") as opened:
        pid = int(opened.call(0, ["a"])[0])
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


ESCAPING = """
import os, subprocess, sys
def f(completions):
    words = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(words, start_new_session=True)
    return [child.pid]
"""
ATTACKING = """
import os, signal
def f(completions, extra_data):
    went = []
    for name, attack in {
        "parent": lambda: os.kill(os.getppid(), signal.SIGKILL),
        "trainer": lambda: os.kill(extra_data[0], signal.SIGKILL),
        "result": lambda: open(extra_data[1], "w"),
        "submission": lambda: os.rename(extra_data[1], extra_data[1] + ".gone"),
        "progress": lambda: open(extra_data[2], "ab"),
    }.items():
        try:
            attack()
            went.append(name)
        except OSError:
            pass
    assert not went, went
    return [1.0] * len(completions)
"""
BOMB = """
import os, time
def f(completions):
    while True:
        try:
            os.fork()
        except OSError:
            pass
"""


def gone(pid: int) -> bool:
    """Ended, whether or not its parent has collected it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_child_in_a_session_of_its_own_does_not_outlive_the_call(tmp_path: Path) -> None:
    with rewards(tmp_path, ESCAPING) as opened:
        assert gone(int(opened.call(0, ["a"])[0]))
        assert opened.call(0, ["a"]) != [0.0], "the function itself is called again"


def test_a_reward_reaches_neither_the_trainer_nor_its_files(tmp_path: Path) -> None:
    progress, result = tmp_path / "progress.jsonl", tmp_path / "result.json"
    progress.touch()
    result.write_text("ours")
    with rewards(tmp_path, ATTACKING) as opened:
        known = [os.getpid(), str(result), str(progress)]
        assert opened.call(0, ["a", "b", "c"], extra_data=known) == [1.0, 1.0, 1.0]
    assert notes(tmp_path) == []
    assert result.read_text() == "ours"


def test_a_reward_that_only_forks_is_ended_with_all_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "god-miner-fork-test")  # passed on: how its processes are told from others

    def left() -> int:
        count = 0
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    count += b"LC_ALL=god-miner-fork-test" in (entry / "environ").read_bytes()
                except OSError:
                    continue
        return count

    with rewards(tmp_path, BOMB) as opened:
        assert opened.call(0, ["a"]) == [0.0]
    assert "more than 1024 processes" in notes(tmp_path)[0]
    until = time.monotonic() + 120
    while left() and time.monotonic() < until:
        time.sleep(0.1)
    assert left() == 0


def test_a_completion_that_a_function_cannot_take_costs_only_its_own_reward(tmp_path: Path) -> None:
    source = (
        "def f(completions, extra_data): return [1 / len(c) * x for c, x in zip(completions, extra_data)]"
    )
    with rewards(tmp_path, source) as opened:
        assert opened.call(0, ["a", "", "cd"], extra_data=[1, 2, 4]) == [1.0, 0.0, 2.0]
        assert opened.call(0, ["", "", "cd", "d"], extra_data=[1, 2, 4, 1]) == [0.0, 0.0, 2.0, 1.0]
    (noted,) = notes(tmp_path)
    assert "gives zeros: for each completion at which it raises: ZeroDivisionError" in noted, "once"


def test_without_whoever_starts_it_as_another_user_it_is_started_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sandbox.SOCKET_VARIABLE, str(tmp_path / "nobody listens"))
    with rewards(tmp_path, GOOD) as opened:
        assert opened.call(0, ["ab"]) == [2.0]


def test_large_questions_and_answers_pass(tmp_path: Path) -> None:
    with rewards(tmp_path, GOOD) as opened:
        assert opened.call(0, ["x" * 50_000] * 60) == [50_000.0] * 60


def test_reward_code_has_no_capability_and_goes_first_when_memory_runs_out(tmp_path: Path) -> None:
    with rewards(tmp_path, WITHOUT_PRIVILEGES) as opened:
        assert opened.call(0, ["a", "b"]) == [0.0, 1000.0]
