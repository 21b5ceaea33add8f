"""What is asked of Docker to begin a run, and how often, whatever is there already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miner.engines.base import START_FILE, EngineSpec, Rejected, Unreachable
from miner.engines.docker import engine as module
from miner.engines.docker.client import Refused
from miner.engines.docker.config import LABEL_DATA, LABEL_KEY, House
from miner.engines.docker.engine import DockerEngine
from miner.engines.untrusted import put

KEY = "job-1-1"
BROKEN = Refused(500, "OCI runtime create failed: no such file or directory")


def box(ref: str, data: str = "id", status: str = "created") -> dict[str, Any]:
    labels = {LABEL_DATA: data, LABEL_KEY: KEY}
    return {"Id": ref, "Config": {"Labels": labels}, "State": {"Status": status}}


class Small:
    """A Docker with room for one container, and its client. `broken` can not be started; before each making
    the next of `meanwhile` happens."""

    make_s = 5.0

    def __init__(self, there: dict[str, Any] | None = None) -> None:
        self.there = there
        self.did: list[str] = []
        self.broken: tuple[str, ...] = ()
        self.removable = True
        #: Looks for which the name is held by a container that is not shown.
        self.hidden = 0.0
        self.meanwhile: list[Callable[[], None]] = []

    async def ask(self, _what: str, call: Callable[[Any], Any]) -> Any:
        return call(self._api())

    make = ask

    def _api(self) -> SimpleNamespace:
        return SimpleNamespace(
            info=dict,
            inspect_container=self._inspect,
            create_container_from_config=self._create,
            start=self._start,
            remove_container=self._remove,
        )

    def _inspect(self, _name: str) -> Mapping[str, Any]:
        if self.hidden > 0:
            self.hidden -= 1
        elif self.there is not None:
            return self.there
        raise Refused(404, "No such container")

    def _create(self, _body: Mapping[str, Any], _name: str) -> None:
        if self.meanwhile:
            self.meanwhile.pop(0)()
        if self.hidden > 0 or self.there is not None:
            raise Refused(409, "Conflict. The container name is already in use")
        self.there = box(f"new-{sum(one.startswith('made') for one in self.did)}")
        self.did.append(f"made {self.there['Id']}")

    def _start(self, ref: str) -> None:
        self.did.append(f"start {ref}")
        if ref in self.broken:
            raise BROKEN
        assert self.there is not None
        self.there["State"]["Status"] = "running"

    def _remove(self, ref: str, **_how: bool) -> None:
        self.did.append(f"remove {ref}")
        if not self.removable:
            raise Refused(500, "driver failed to remove root filesystem")
        self.there = None


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_AGAIN_S", 0.0)


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    return EngineSpec(KEY, ("python", "-c", "pass"), tmp_path)


async def submit(client: Small, spec: EngineSpec) -> str:
    made = DockerEngine(
        client,  # type: ignore[arg-type]
        House("id", Path("/wrapper.py"), "1:1"),
        image_of=lambda short: f"me/{short}",
        redact=str,
        trusted=(),
        training_uid=None,
    )
    return await made.submit(spec)


async def test_what_is_made_is_started(spec: EngineSpec) -> None:
    client = Small()
    assert await submit(client, spec) == "new-0"
    assert client.did == ["made new-0", "start new-0"]


@pytest.mark.parametrize("status", ["running", "exited"])
async def test_what_was_started_is_not_again(status: str, spec: EngineSpec) -> None:
    client = Small(box("old", status=status))
    assert await submit(client, spec) == "old"
    assert client.did == []


async def test_a_container_that_is_being_made_is_waited_for(spec: EngineSpec) -> None:
    client = Small(box("old"))
    client.hidden = 8  # one look before, and three tries of a making and a look
    assert await submit(client, spec) == "old"
    assert client.did == ["start old"]


async def test_a_name_that_is_let_go_of_is_taken(spec: EngineSpec) -> None:
    """The making by an earlier request came to nothing."""
    client = Small()
    client.hidden = 3
    assert await submit(client, spec) == "new-0"
    assert client.did == ["made new-0", "start new-0"]


async def test_a_container_that_never_shows_is_not_waited_for_for_ever(spec: EngineSpec) -> None:
    client = Small(box("old"))
    client.hidden, client.make_s = float("inf"), 0.05
    with pytest.raises(Unreachable, match="holds the name"):
        await submit(client, spec)
    assert client.did == []


async def test_a_container_made_before_that_can_not_be_started_is_made_anew_once(spec: EngineSpec) -> None:
    client = Small(box("old"))
    client.broken = ("old",)
    assert await submit(client, spec) == "new-0"
    assert client.did == ["start old", "remove old", "made new-0", "start new-0"]
    client = Small(box("old"))
    client.broken = ("old", "new-0")
    with pytest.raises(Rejected):
        await submit(client, spec)
    assert client.did[2:] == ["made new-0", "start new-0", "remove new-0"]


async def test_one_made_here_that_can_not_be_started_is_not_made_again(spec: EngineSpec) -> None:
    client = Small()
    client.broken = ("new-0",)
    with pytest.raises(Rejected):
        await submit(client, spec)
    assert client.did == ["made new-0", "start new-0", "remove new-0"]


async def test_one_that_can_be_neither_started_nor_removed_is_told(spec: EngineSpec) -> None:
    client = Small(box("old"))
    client.broken, client.removable = ("old",), False
    with pytest.raises(Rejected, match="runtime create failed"):
        await submit(client, spec)
    assert not any(one.startswith("made") for one in client.did)


async def test_a_stranger_who_takes_the_name_meanwhile_is_neither_started_nor_removed(
    spec: EngineSpec,
) -> None:
    client = Small(box("old"))
    client.broken = ("old",)
    client.meanwhile = [lambda: setattr(client, "there", box("theirs", "another"))]
    with pytest.raises(Rejected, match="not ours"):
        await submit(client, spec)
    assert client.did == ["start old", "remove old"]


@pytest.mark.parametrize("status", ["running", "exited"])
async def test_what_somebody_else_made_anew_and_started_is_not_started_again(
    status: str, spec: EngineSpec
) -> None:
    client = Small(box("old"))
    client.broken = ("old",)
    client.meanwhile = [lambda: setattr(client, "there", box("other", status=status))]
    assert await submit(client, spec) == "other"
    assert client.did == ["start old", "remove old"]


async def test_a_run_that_began_though_its_start_was_refused_is_not_begun_again(spec: EngineSpec) -> None:
    client = Small(box("old"))
    client.broken = ("old",)
    client.meanwhile = [lambda: put(spec.run_dir, START_FILE, b'{"at": 1}')]
    assert await submit(client, spec) == "new-0"
    assert client.did == ["start old", "remove old", "made new-0"]
