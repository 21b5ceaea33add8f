"""What comes back of a process that does not behave."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner.publish.child import Child, Stalled, environment
from miner.publish.words import Event, Failed, Order, Published, Task, Trouble, event_in

ORDER = Order(task=Task.ACCOUNT)
DONE = '{"event":"published","repo":"a/b","model_hash":null}'


def child(tmp_path: Path, code: str) -> Child:
    return Child(ORDER, tmp_path, worker=(sys.executable, "-c", f"import sys, time, os\n{code}"))


async def run(made: Child, silence: float = 20.0) -> tuple[Event, list[Event]]:
    heard: list[Event] = []
    return await made.run(heard.append, silence), heard


async def test_whatever_else_is_printed_is_passed_over(tmp_path: Path) -> None:
    code = f"print('noise'); print('{{\"event\":\"boo\"}}'); print('x' * 3_000_000); print('{DONE}')"
    answer, heard = await run(child(tmp_path, code))
    assert isinstance(answer, Published)
    assert len(heard) == 1


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("sys.exit(7)", "status 7"),
        ("sys.stderr.write('first\\nlast words'); os._exit(1)", "last words"),
        ("os.kill(os.getpid(), 9)", "status -9"),
        ('print(\'{"event":"stage","stage":"check"}\')', "no answer"),
    ],
)
async def test_an_end_without_an_answer_is_one(tmp_path: Path, code: str, told: str) -> None:
    answer, _ = await run(child(tmp_path, code))
    assert isinstance(answer, Failed)
    assert answer.trouble is Trouble.CRASHED
    assert told in answer.text


async def test_silence_ends_it(tmp_path: Path) -> None:
    with pytest.raises(Stalled):
        await run(child(tmp_path, "time.sleep(600); open('outlived', 'w')"), silence=0.3)


async def test_one_that_has_answered_and_lives_on_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miner.children.END_SECONDS", 0.2)
    code = f"print('{DONE}', flush=True); os.close(1); time.sleep(60)"
    answer, _ = await run(child(tmp_path, code))
    assert isinstance(answer, Published)


async def test_one_that_is_cancelled_is_ended_at_once(tmp_path: Path) -> None:
    running = asyncio.create_task(run(child(tmp_path, "time.sleep(60)")))
    await asyncio.sleep(0.3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    answer, _ = await run(Child(ORDER, tmp_path, worker=("/no/such/program",)))
    assert isinstance(answer, Failed)
    assert "can't be started" in answer.text


def test_nothing_of_ours_is_in_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WALLET_PASSWORD", "OPERATOR_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    found = environment(tmp_path, deduplicate=False)
    assert "secret" not in found.values()
    assert found["HTTPS_PROXY"] == "http://proxy:3128"
    assert found["HF_HUB_DISABLE_XET"] == "1"


def test_an_order_does_not_show_its_token() -> None:
    assert "hf_x" not in repr(Order(task=Task.ACCOUNT, token="hf_xxxx"))


@given(st.binary(max_size=300))
def test_any_line_is_an_event_or_nothing(line: bytes) -> None:
    assert event_in(line) is None or b"event" in line
