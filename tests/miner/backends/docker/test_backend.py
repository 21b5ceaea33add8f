"""The calls to Docker that start a run, whatever is there already; and missing images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miner.backends.base import START_FILE, AttemptSpec, BackendRejected, BackendUnreachable
from miner.backends.docker import backend as module
from miner.backends.docker.backend import DockerBackend
from miner.backends.docker.client import DockerRefused
from miner.backends.docker.container import LABEL_DATA, LABEL_KEY, ContainerDefaults
from miner.backends.docker.images import UnknownImage
from miner.support.untrusted_files import write_untrusted
from tests.doubles.backend_bench import context_in

KEY = "job-1-1"
BROKEN = DockerRefused(500, "OCI runtime create failed: no such file or directory")


def container(ref: str, data: str = "id", status: str = "created") -> dict[str, Any]:
    labels = {LABEL_DATA: data, LABEL_KEY: KEY}
    return {"Id": ref, "Config": {"Labels": labels}, "State": {"Status": status}}


class FakeDocker:
    """A Docker with room for one container, and its client. `broken` cannot be started; before each creation
    the next of `meanwhile` happens."""

    create_timeout_s = 5.0

    def __init__(self, container_now: dict[str, Any] | None = None) -> None:
        self.container_now = container_now
        self.calls: list[str] = []
        self.broken: tuple[str, ...] = ()
        self.removable = True
        #: Looks for which the name is held by a container that is not shown.
        self.hidden = 0.0
        self.meanwhile: list[Callable[[], None]] = []
        self.images: tuple[str, ...] = ()
        self.image_status = 404

    async def query(self, _what: str, call: Callable[[Any], Any]) -> Any:
        return call(self._api())

    create = query

    def _api(self) -> SimpleNamespace:
        return SimpleNamespace(
            info=dict,
            inspect_image=self._inspect_image,
            inspect_container=self._inspect,
            create_container_from_config=self._create,
            start=self._start,
            remove_container=self._remove,
        )

    def _inspect(self, _name: str) -> Mapping[str, Any]:
        if self.hidden > 0:
            self.hidden -= 1
        elif self.container_now is not None:
            return self.container_now
        raise DockerRefused(404, "No such container")

    def _inspect_image(self, reference: str) -> dict[str, str]:
        if reference not in self.images:
            raise DockerRefused(self.image_status, "No such image")
        return {"Id": reference}

    def _create(self, _body: Mapping[str, Any], _name: str) -> None:
        if self.meanwhile:
            self.meanwhile.pop(0)()
        if self.hidden > 0 or self.container_now is not None:
            raise DockerRefused(409, "Conflict. The container name is already in use")
        self.container_now = container(f"new-{sum(call.startswith('create') for call in self.calls)}")
        self.calls.append(f"create {self.container_now['Id']}")

    def _start(self, ref: str) -> None:
        self.calls.append(f"start {ref}")
        if ref in self.broken:
            raise BROKEN
        self.container_now["State"]["Status"] = "running"

    def _remove(self, ref: str, **_how: bool) -> None:
        self.calls.append(f"remove {ref}")
        if not self.removable:
            raise DockerRefused(500, "driver failed to remove root filesystem")
        self.container_now = None


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CREATE_POLL_S", 0.0)


@pytest.fixture
def spec(tmp_path: Path) -> AttemptSpec:
    return AttemptSpec(KEY, ("python", "-c", "pass"), tmp_path)


def backend_on(
    client: FakeDocker, image_of: Callable[[str], str] = lambda short: f"me/{short}"
) -> DockerBackend:
    defaults = ContainerDefaults("id", Path("/wrapper.py"), "1:1")
    context = context_in(Path("/backends"), data_id="id")
    return DockerBackend(context, client, defaults, image_of)  # type: ignore[arg-type]


async def submit(client: FakeDocker, spec: AttemptSpec) -> str:
    return await backend_on(client).submit(spec)


async def test_a_created_container_is_started(spec: AttemptSpec) -> None:
    client = FakeDocker()
    assert await submit(client, spec) == "new-0"
    assert client.calls == ["create new-0", "start new-0"]


@pytest.mark.parametrize("status", ["running", "exited"])
async def test_a_started_container_is_not_started_again(status: str, spec: AttemptSpec) -> None:
    client = FakeDocker(container("old", status=status))
    assert await submit(client, spec) == "old"
    assert client.calls == []


async def test_a_container_in_creation_is_waited_for(spec: AttemptSpec) -> None:
    client = FakeDocker(container("old"))
    client.hidden = 8  # one look before, and three tries of a creation and a look
    assert await submit(client, spec) == "old"
    assert client.calls == ["start old"]


async def test_a_freed_name_is_used(spec: AttemptSpec) -> None:
    """The creation by an earlier request failed."""
    client = FakeDocker()
    client.hidden = 3
    assert await submit(client, spec) == "new-0"
    assert client.calls == ["create new-0", "start new-0"]


async def test_a_container_that_never_appears_is_not_waited_for_for_ever(spec: AttemptSpec) -> None:
    client = FakeDocker(container("old"))
    client.hidden, client.create_timeout_s = float("inf"), 0.05
    with pytest.raises(BackendUnreachable, match="holds the name"):
        await submit(client, spec)
    assert client.calls == []


async def test_an_older_container_that_cannot_be_started_is_created_again_once(spec: AttemptSpec) -> None:
    client = FakeDocker(container("old"))
    client.broken = ("old",)
    assert await submit(client, spec) == "new-0"
    assert client.calls == ["start old", "remove old", "create new-0", "start new-0"]
    client = FakeDocker(container("old"))
    client.broken = ("old", "new-0")
    with pytest.raises(BackendRejected):
        await submit(client, spec)
    assert client.calls[2:] == ["create new-0", "start new-0", "remove new-0"]


async def test_a_new_container_that_cannot_be_started_is_not_created_again(spec: AttemptSpec) -> None:
    client = FakeDocker()
    client.broken = ("new-0",)
    with pytest.raises(BackendRejected):
        await submit(client, spec)
    assert client.calls == ["create new-0", "start new-0", "remove new-0"]


async def test_a_container_that_can_be_neither_started_nor_removed_is_rejected(spec: AttemptSpec) -> None:
    client = FakeDocker(container("old"))
    client.broken, client.removable = ("old",), False
    with pytest.raises(BackendRejected, match="runtime create failed"):
        await submit(client, spec)
    assert not any(call.startswith("create") for call in client.calls)


async def test_a_stranger_s_container_of_the_same_name_is_left_alone(
    spec: AttemptSpec,
) -> None:
    client = FakeDocker(container("old"))
    client.broken = ("old",)
    client.meanwhile = [lambda: setattr(client, "container_now", container("theirs", "another"))]
    with pytest.raises(BackendRejected, match="not ours"):
        await submit(client, spec)
    assert client.calls == ["start old", "remove old"]


@pytest.mark.parametrize("status", ["running", "exited"])
async def test_a_container_that_another_request_started_is_not_started_again(
    status: str, spec: AttemptSpec
) -> None:
    client = FakeDocker(container("old"))
    client.broken = ("old",)
    client.meanwhile = [lambda: setattr(client, "container_now", container("other", status=status))]
    assert await submit(client, spec) == "other"
    assert client.calls == ["start old", "remove old"]


async def test_a_run_that_began_although_its_start_was_refused_is_not_started_again(
    spec: AttemptSpec,
) -> None:
    client = FakeDocker(container("old"))
    client.broken = ("old",)
    client.meanwhile = [lambda: write_untrusted(spec.run_dir / START_FILE, b'{"at": 1}')]
    assert await submit(client, spec) == "new-0"
    assert client.calls == ["start old", "remove old", "create new-0"]


async def test_missing_images_are_named() -> None:
    client = FakeDocker()
    client.images = ("me/text", "me/image", "me/toolkit")
    assert await backend_on(client).missing_images() == {}
    assert await backend_on(client).identity("text") == "me/text"
    client.images = ("me/text",)
    missing = await backend_on(client).missing_images()
    assert set(missing) == {"image", "toolkit"}
    assert "me/image: god-miner images build" in missing["image"]
    with pytest.raises(BackendUnreachable, match="lacks the image"):
        await backend_on(client).identity("image")
    client.image_status = 500
    with pytest.raises(BackendUnreachable):
        await backend_on(client).missing_images()


async def test_unreadable_pins_make_every_image_missing() -> None:
    def unreadable(_short: str) -> str:
        raise UnknownImage("images.json cannot be read")

    backend = backend_on(FakeDocker(), unreadable)
    assert set(await backend.missing_images()) == {"text", "image", "toolkit"}
    with pytest.raises(BackendUnreachable, match=r"images\.json"):
        await backend.identity("text")
