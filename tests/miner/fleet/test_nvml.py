"""The driver's view of the cards, through the worker process, against a library that fails on demand."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from core.hardware import Link
from miner.fleet.looks import CannotLook, Look, NoDriver
from miner.fleet.nvml import NvmlSource
from tests.doubles.nvml import DRIVER_NOT_LOADED, LOST, UNKNOWN, NvmlHost, uuid

Host = Callable[..., NvmlHost]


@asynccontextmanager
async def source(**more: Any) -> AsyncIterator[NvmlSource]:
    made = NvmlSource(**more)
    try:
        yield made
    finally:
        await made.close()


async def one_look(**more: Any) -> Look:
    async with source(**more) as made:
        return await made.look()


@pytest.mark.parametrize("count", [4, 8])
async def test_every_card_is_seen_with_what_it_can_do(nvml_host: Host, count: int) -> None:
    nvml_host(count)
    look = await one_look()
    assert [card.id for card in look.cards] == [uuid(index) for index in range(count)]
    assert [card.index for card in look.cards] == list(range(count))
    first = look.cards[0]
    assert (first.kind.name, first.kind.link, first.kind.compute_capability) == (
        "H100-SXM",
        Link.NVLINK,
        (9, 0),
    )
    assert (first.total_bytes, first.used_bytes, first.processes) == (81559 * 2**20, 4 * 2**20, 0)
    assert (look.source, look.errors) == ("driver 550.127.05", {})


async def test_cards_on_a_switch_are_all_linked(nvml_host: Host) -> None:
    nvml_host(4)
    look = await one_look()
    everyone = {uuid(index) for index in range(4)}
    assert all(card.linked == everyone - {card.id} for card in look.cards)


async def test_bridged_cards_are_linked_in_pairs(nvml_host: Host) -> None:
    host = nvml_host(4)
    host.set(topology="pairs")
    for index in range(4):
        host.card(index, name="NVIDIA H100 PCIe")
    look = await one_look()
    assert [card.linked for card in look.cards] == [{uuid(1)}, {uuid(0)}, {uuid(3)}, {uuid(2)}]
    assert look.cards[0].kind.link is Link.NVLINK_PAIR


async def test_cards_without_links_are_on_the_bus(nvml_host: Host) -> None:
    nvml_host(2).set(topology="none")
    look = await one_look()
    assert [card.linked for card in look.cards] == [frozenset(), frozenset()]
    assert look.cards[0].kind.link is Link.PCIE


async def test_an_older_driver_is_asked_in_its_own_words(nvml_host: Host) -> None:
    nvml_host(1).card(0, is_old=1, used_mib=600)
    (card,) = (await one_look()).cards
    assert card.used_bytes == 600 * 2**20


async def test_a_lost_card_is_told_by_its_place_and_the_others_are_seen(nvml_host: Host) -> None:
    nvml_host(4).card(2, error=LOST)
    look = await one_look()
    assert [card.index for card in look.cards] == [0, 1, 3]
    assert look.errors[2].startswith("NVML says: ")
    assert "lost" in look.errors[2].lower()


async def test_each_look_sees_what_is_now(nvml_host: Host) -> None:
    host = nvml_host(2)
    async with source() as made:
        assert len((await made.look()).cards) == 2
        host.card(1, used_mib=70000, processes=2)
        busy = (await made.look()).cards[1]
        assert (busy.used_bytes, busy.processes) == (70000 * 2**20, 2)
        host.card(0, error=UNKNOWN)
        assert 0 in (await made.look()).errors
        host.card(0, error=0)
        assert (await made.look()).errors == {}
        host.set(count=1)
        assert len((await made.look()).cards) == 1


async def test_slices_are_cards_of_their_own(nvml_host: Host) -> None:
    nvml_host(2).card(0, slices=2)
    look = await one_look()
    assert [card.id[:3] for card in look.cards] == ["MIG", "MIG", "GPU"]
    assert [card.index for card in look.cards] == [0, 1, 2]
    assert look.cards[0].kind.name.endswith("SLICE")
    assert look.cards[0].linked == frozenset()


async def test_a_card_that_is_to_be_cut_up_and_is_not_yet_is_none(nvml_host: Host) -> None:
    nvml_host(2).card(1, slices=0)
    look = await one_look()
    assert ([card.index for card in look.cards], list(look.errors)) == ([0], [1])


async def test_a_host_without_a_driver_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with pytest.raises(NoDriver):
        await one_look()


async def test_a_driver_that_does_not_run_is_trouble_and_not_absence(nvml_host: Host) -> None:
    nvml_host(4).set(init_error=DRIVER_NOT_LOADED)
    with pytest.raises(CannotLook, match="NVML says") as raised:
        await one_look()
    assert not isinstance(raised.value, NoDriver)


async def test_a_driver_that_hangs_is_given_up_and_asked_anew(nvml_host: Host) -> None:
    host = nvml_host(2)
    async with source(timeout=120.0, start_timeout=120.0) as made:
        await made.look()
        host.card(0, delay_ms=60_000)
        made._timeout = 0.3
        with pytest.raises(CannotLook, match=r"did not answer within 0\.3 s"):
            await made.look()
        host.card(0, delay_ms=0)
        made._timeout = 120.0
        assert len((await made.look()).cards) == 2


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("raise SystemExit(3)", "ended with status 3"),
        ("print('hello', flush=True); input(); input()", "of no help"),
        ("print('{\"cards\": 7}', flush=True); input(); input()", "of no help"),
        ("print('x' * 3_000_000, flush=True); input(); input()", "of no help"),
    ],
)
async def test_a_worker_that_talks_nonsense_is_trouble(program: str, told: str) -> None:
    with pytest.raises(CannotLook, match=told):
        await one_look(worker=(sys.executable, "-c", program))


async def test_a_worker_that_can_not_be_started_is_trouble() -> None:
    with pytest.raises(CannotLook, match="of no help"):
        await one_look(worker=("/nonexistent/python",))


async def test_the_worker_gets_nothing_of_the_environment_that_is_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    monkeypatch.setenv("WALLET_PASSWORD", "of the operator")
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "all")
    program = f"import os, pathlib; pathlib.Path({str(seen)!r}).write_text(repr(dict(os.environ)))"
    with pytest.raises(CannotLook):
        await one_look(worker=(sys.executable, "-c", program))
    text = seen.read_text()
    assert "of the operator" not in text
    assert "NVIDIA_VISIBLE_DEVICES" in text


async def test_processes_that_no_signal_ends_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a driver that hangs: whoever is killed there goes on hanging."""
    hanging: list[asyncio.subprocess.Process] = []
    monkeypatch.setattr(asyncio.subprocess.Process, "kill", lambda one: hanging.append(one))
    made = NvmlSource(start_timeout=0.05, worker=(sys.executable, "-c", "import time; time.sleep(60)"))
    for _ in range(6):
        with pytest.raises(CannotLook):
            await made.look()
    assert len(hanging) == 3
    monkeypatch.undo()
    for process in hanging:
        process.kill()
    await made.close()
    with pytest.raises(CannotLook, match="did not answer"):
        await made.look()
    await made.close()
