"""The worker's own parts; `test_sources_sdk` runs it as the process that it is."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner.chain import sdk_worker, sources
from miner.chain.metagraph import host_and_port
from miner.chain.sdk_worker import NodeUnavailable, axon_of
from tests.doubles.each import each

pytestmark = pytest.mark.process


@given(st.ip_addresses(), st.integers(1, 65535))
def test_an_axon_is_read_as_it_was_published(ip: object, port: int) -> None:
    assert axon_of(host_and_port(str(ip), port)) == (str(ip), port)


def test_no_axon_and_an_axon_without_a_port_are_none() -> None:
    assert axon_of(None) == (None, None)
    assert axon_of("1.2.3.4:0") == (None, None)


@each(
    ("price", "tempo", "tao"),
    [
        (0.02, 359, 0.4),
        (0.05, 360, 86_400 * 0.05 / 4332),
        (0.0, 359, None),
        (None, 359, None),
        (math.nan, 9, None),
    ],
)
def test_an_alpha_of_emission_is_worth_its_price_once_in_an_epoch(
    price: float | None, tempo: int, tao: float | None
) -> None:
    found = sdk_worker.tao_per_day(SimpleNamespace(price=price, tempo=tempo))
    assert found == (None if tao is None else pytest.approx(tao))


async def test_a_call_that_refuses_to_end_does_not_outlast_its_limit() -> None:
    release = asyncio.Event()

    async def stubborn() -> None:
        # What the SDK does when a submission is cancelled: it unsubscribes first, and waits for the reply.
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    with pytest.raises(NodeUnavailable, match=r"submitting: no answer in 0\.05 s"):
        await sdk_worker._with_timeout(0.05, "submitting", stubborn())
    release.set()
    await asyncio.sleep(0)


@pytest.mark.parametrize("error", [KeyError("number"), TypeError("not a dict"), AssertionError()])
async def test_whatever_the_sdk_trips_over_is_a_node_of_no_help(error: Exception) -> None:
    async def trip() -> None:
        raise error

    with pytest.raises(NodeUnavailable, match="reading: the answer makes no sense to the SDK"):
        await sdk_worker._with_timeout(1.0, "reading", trip())


def test_what_the_sdk_prints_does_not_get_into_the_answer() -> None:
    loud = (
        "import sys, os; from miner.chain import sdk_worker as w\n"
        "async def answer(r): print('hello'); os.write(1, b'world'); return {'netuid': r.netuid}\n"
        "w.run_request = answer; w.main()"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", loud],
        input=json.dumps({"netuid": 56, "node": "finney", "timeout": 1.0}),
        capture_output=True,
        text=True,
        check=True,
        env=sources._worker_environment(None),
    )
    assert json.loads(done.stdout) == {"answer": {"netuid": 56}}
    assert "world" in done.stderr
