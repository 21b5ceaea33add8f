"""Child processes that do one piece of work and answer in lines."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner.inputs import messages as input_messages
from miner.publish import messages as publish_messages
from miner.publish.messages import PROTOCOL, PublishedRepo, PublishEvent, PublishOrder, PublishTask
from miner.support.subprocess import ChildAnswer, ChildSilent, run_child, run_order, worker_environment

pytestmark = pytest.mark.process


ENVIRONMENT = worker_environment()
ORDER = PublishOrder(task=PublishTask.ACCOUNT)
DONE = '{"event":"published","repo":"a/b","model_hash":null}'


def python(code: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, time\n{code}"]


async def answer_of(
    code: str, silence: float = 300.0
) -> tuple[ChildAnswer[PublishEvent], list[PublishEvent]]:
    events: list[PublishEvent] = []
    answer = await run_order(
        PROTOCOL, ORDER, events.append, environment=ENVIRONMENT, silence=silence, command=python(code)
    )
    return answer, events


async def test_a_child_gets_its_order_and_its_lines_are_passed_on() -> None:
    lines: list[bytes] = []
    code = "print('a' + input()); print('b', file=sys.stderr); sys.exit(5)"
    result = await run_child(python(code), b"order\n", lines.append, environment=ENVIRONMENT, max_line=100)
    assert (lines, result.code, result.noise) == ([b"aorder\n"], 5, b"b\n")


async def test_lines_that_are_not_events_are_skipped() -> None:
    code = f"print('noise'); print('{{\"event\":\"boo\"}}'); print('x' * 3_000_000); print('{DONE}')"
    answer, events = await answer_of(code)
    assert isinstance(answer.event, PublishedRepo)
    assert events == [answer.event]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sys.exit(7)", "status 7"),
        ("sys.stderr.write('first\\nlast line'); os._exit(1)", "no answer: last line"),
        ("os.kill(os.getpid(), 9)", "status -9"),
    ],
)
async def test_an_end_without_an_event_says_how_the_child_ended(code: str, expected: str) -> None:
    answer, _ = await answer_of(code)
    assert answer.event is None
    assert expected in answer.ending


async def test_a_silent_child_is_ended() -> None:
    with pytest.raises(ChildSilent):
        await answer_of("time.sleep(60)", silence=0.2)


async def test_a_child_that_lives_on_after_its_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miner.support.subprocess.END_SECONDS", 0.2)
    answer, _ = await answer_of(f"print('{DONE}', flush=True); os.close(1); time.sleep(60)")
    assert isinstance(answer.event, PublishedRepo)


async def test_a_cancelled_child_is_gone() -> None:
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    code = "print(os.getpid(), flush=True); time.sleep(60)"
    task = asyncio.create_task(
        run_child(python(code), b"\n", lines.put_nowait, environment=ENVIRONMENT, max_line=100)
    )
    pid = int(await lines.get())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_program_that_does_not_exist_is_an_os_error() -> None:
    with pytest.raises(OSError, match="nothing"):
        await run_child(["/nothing"], b"", print, environment=ENVIRONMENT, max_line=100)


def test_the_environment_finds_our_code_and_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WALLET_PASSWORD", "OPERATOR_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    environment = worker_environment(MORE="1")
    assert "secret" not in environment.values()
    assert (environment["MORE"], environment["PATH"]) == ("1", os.environ["PATH"])
    assert (Path(environment["PYTHONPATH"].split(os.pathsep)[0]) / "miner/support/subprocess.py").exists()


@given(st.binary(max_size=300))
def test_any_line_is_an_event_or_nothing(line: bytes) -> None:
    for protocol in (input_messages.PROTOCOL, publish_messages.PROTOCOL):
        assert protocol.event_in(line) is None or b"event" in line
