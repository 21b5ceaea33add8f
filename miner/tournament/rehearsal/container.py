"""Run a trainer's container as validators do: their limits, their isolation, their clock.

A validator kills the container with SIGKILL once `hours` are over, counted from its start. What this machine
cannot give (memory, CPUs, GPUs, a bridge) is left out and named as a deviation.
"""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from core.domain.errors import GodMinerError
from core.domain.tournament_rules import CACHE, CHECKPOINTS, CPUS_PER_GPU, MEMORY_PER_GPU
from core.domain.units import show_bytes
from miner.backends.docker.client import DockerClient, DockerRefused
from miner.tournament.rehearsal.cache_layout import RehearsedTask
from miner.tournament.rules import shared_memory

#: On all containers and networks of a rehearsal: a path in its output directory.
LABEL = "god-miner.rehearsal"
_LOOK_S = 0.2
#: For Docker to end a container that it was told to kill.
_KILL_S = 60.0
#: Log streams are silent as long as the training is.
_SILENCE_S = 24 * 3600.0
_HELPER_S = 3600.0


@dataclass(frozen=True)
class TrainingMachine:
    """The resources that Docker can give to a container here."""

    memory_bytes: int
    cpus: int
    #: Their UUIDs.
    gpus: tuple[str, ...] = ()


def training_machine(client: DockerClient, gpus: Sequence[str] = ()) -> TrainingMachine:
    info = client.call_blocking(lambda api: api.info(), client.query_timeout_s)
    return TrainingMachine(int(info["MemTotal"]), int(info["NCPU"]), tuple(gpus))


@contextmanager
def internal_network(client: DockerClient, output: Path) -> Iterator[tuple[str, str | None]]:
    """A bridge without a way out, as validators have one: its name, or `none` and why there is no bridge."""
    name = f"god-miner-rehearsal-{uuid.uuid4().hex[:8]}"
    try:
        client.call_blocking(
            lambda api: api.create_network(name, driver="bridge", internal=True, labels={LABEL: str(output)}),
            client.create_timeout_s,
        )
    except DockerRefused as refused:
        yield "none", f"no network at all: Docker cannot make an internal bridge here ({refused})"
        return
    try:
        yield name, None
    finally:
        with contextlib.suppress(DockerRefused):
            client.call_blocking(lambda api: api.remove_network(name), client.create_timeout_s)


@dataclass(frozen=True)
class ContainerOptions:
    """Docker's options of one training, and their differences from the validators'."""

    image: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    cache: Path
    checkpoints: Path
    #: Below the checkpoints: where the submission is expected.
    place: Path
    prefix: str
    memory_bytes: int
    cpus: int
    shared_memory: str
    gpus: tuple[str, ...]
    network: str
    deviations: tuple[str, ...] = ()

    def host_config(self, api: Any) -> dict[str, object]:
        from docker.types import DeviceRequest, Mount

        gpus = [DeviceRequest(device_ids=list(self.gpus), capabilities=[["gpu"]])] if self.gpus else None
        found: dict[str, object] = api.create_host_config(
            mounts=[
                Mount(CHECKPOINTS, str(self.checkpoints), type="bind"),
                Mount(CACHE, str(self.cache), type="bind", read_only=True),
            ],
            mem_limit=self.memory_bytes,
            nano_cpus=self.cpus * 10**9,
            shm_size=self.shared_memory,
            device_requests=gpus,
            security_opt=["no-new-privileges"],
            cap_drop=["ALL"],
            network_mode=self.network,
        )
        return found


def container_options(
    rehearsed: RehearsedTask,
    machine: TrainingMachine,
    *,
    image: str,
    network: str,
    cache: Path,
    checkpoints: Path,
) -> ContainerOptions:
    task, task_id = rehearsed.task, rehearsed.task_id
    gpus = machine.gpus[: task.gpus]
    memory, cpus = MEMORY_PER_GPU * task.gpus, CPUS_PER_GPU * task.gpus
    deviations = []
    if len(gpus) < task.gpus:
        here = f"{len(gpus)} GPUs" if gpus else "no GPU: it trains on the CPU"
        deviations.append(f"{here}; validators give {task.gpus}")
    if machine.memory_bytes < memory:
        deviations.append(
            f"memory limit {show_bytes(machine.memory_bytes)}; validators give {show_bytes(memory)}"
        )
    if machine.cpus < cpus:
        deviations.append(f"{machine.cpus} CPUs; validators give {cpus}")
    arguments = task.arguments(
        task_id=task_id,
        model_id=rehearsed.model_id,
        repository=rehearsed.repository,
        hours=rehearsed.hours,
        trigger_word=rehearsed.trigger_word,
    )
    return ContainerOptions(
        image=image,
        command=tuple(arguments),
        environment={
            **task.variables(task_id=task_id, hotkey=rehearsed.hotkey),
            **rehearsed.more_environment,
        },
        cache=cache,
        checkpoints=checkpoints,
        place=checkpoints / task_id / rehearsed.repository,
        prefix="text-trainer" if task.image_type is None else "image-trainer",
        memory_bytes=min(memory, machine.memory_bytes),
        cpus=min(cpus, machine.cpus),
        shared_memory=shared_memory(task.gpus),
        gpus=gpus,
        network=network,
        deviations=tuple(deviations),
    )


@dataclass
class ContainerEnd:
    """The end of a container."""

    exit_code: int
    seconds: float
    #: Killed because its time was over: validators count this as success.
    timed_out: bool = False
    out_of_memory: bool = False

    @property
    def is_success(self) -> bool:
        return self.timed_out or self.exit_code == 0


@dataclass
class TrainerContainer:
    """One training, from its start to its removal; use as `with`, or call `close`."""

    client: DockerClient
    options: ContainerOptions
    log_file: Path
    on_line: Callable[[str], None] = lambda line: None
    name: str = field(init=False)
    _reader: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.name = f"{self.options.prefix}-{uuid.uuid4().hex[:12]}"

    @property
    def place(self) -> Path:
        return self.options.place

    def start(self) -> None:
        options = self.options

        def create_and_start(api: Any) -> None:
            made = api.create_container(
                options.image,
                command=list(options.command),
                name=self.name,
                environment=dict(options.environment),
                host_config=options.host_config(api),
                labels={LABEL: str(options.checkpoints)},
            )
            api.start(made["Id"])

        try:
            self.client.call_blocking(create_and_start, self.client.create_timeout_s)
        except BaseException:
            self.close()
            raise
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def __enter__(self) -> TrainerContainer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_running(self) -> bool:
        return bool(self._state()["Running"])

    def wait(self, limit_s: float, on_look: Callable[[], None] = lambda: None) -> ContainerEnd:
        """Wait for its end; kill it `limit_s` after its start. `on_look` is called now and then."""
        ends = time.monotonic() + limit_s
        timed_out = False
        while self.is_running():
            on_look()
            if time.monotonic() >= ends:
                timed_out = True
                self._kill()
                break
            time.sleep(min(_LOOK_S, max(ends - time.monotonic(), 0.0)))
        return self._end(timed_out)

    def wait_for(self, event: Callable[[], bool], limit_s: float) -> float | None:
        """Wait for an event while the container runs; return the seconds until it, or None."""
        began = time.monotonic()
        while not event():
            if not self.is_running() or time.monotonic() - began >= limit_s:
                return None
            time.sleep(_LOOK_S / 4)
        return round(time.monotonic() - began, 2)

    def copy_out(self, path: str, target: Path) -> bool:
        """Copy a file of the container, running or not; False if it is not there."""
        try:
            chunks, _ = self._call(lambda api: api.get_archive(self.name, path))
            data = b"".join(chunks)
        except DockerRefused:
            return False
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                if member.isfile() and (file := archive.extractfile(member)):
                    target.write_bytes(file.read())
                    return True
        return False

    def close(self) -> None:
        """Remove the container, running or not."""
        with contextlib.suppress(DockerRefused):  # it was never created
            self._call(lambda api: api.remove_container(self.name, v=True, force=True))
        if self._reader is not None:
            self._reader.join(_KILL_S)
            self._reader = None

    def _kill(self) -> None:
        with contextlib.suppress(DockerRefused):  # it has ended by itself
            self._call(lambda api: api.kill(self.name, signal="SIGKILL"))
        ends = time.monotonic() + _KILL_S
        while self.is_running() and time.monotonic() < ends:
            time.sleep(_LOOK_S / 4)

    def _end(self, timed_out: bool) -> ContainerEnd:
        if self._reader is not None:
            self._reader.join(_KILL_S)
        state = self._state()
        seconds = _seconds_between(state["StartedAt"], state["FinishedAt"])
        return ContainerEnd(int(state["ExitCode"]), seconds, timed_out, bool(state.get("OOMKilled")))

    def _state(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._call(lambda api: api.inspect_container(self.name))["State"]
        return found

    def _call(self, call: Callable[[Any], Any]) -> Any:
        return self.client.call_blocking(call, self.client.create_timeout_s)

    def _read_log(self) -> None:
        """With a connection of its own: it is silent as long as the training is."""
        with closing(DockerClient(self.client.host)) as client, self.log_file.open("ab") as log:

            def follow(api: Any) -> None:
                rest = b""
                for piece in api.logs(self.name, stream=True, follow=True):
                    log.write(piece)
                    log.flush()
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        self.on_line(line.decode("utf-8", "replace").rstrip())
                if rest:
                    self.on_line(rest.decode("utf-8", "replace"))

            with contextlib.suppress(GodMinerError):
                client.call_blocking(follow, _SILENCE_S)


def _seconds_between(began: str, ended: str) -> float:
    first, last = (datetime.fromisoformat(text[:26].rstrip("Z") + "+00:00") for text in (began, ended))
    return max((last - first).total_seconds(), 0.0)


def run_helper(
    client: DockerClient,
    image: str,
    command: Sequence[str],
    folder: Path,
    *,
    read_only: Mapping[Path, str] | None = None,
    gpus: Sequence[str] = (),
    as_root: bool = False,
) -> tuple[int, str]:
    """Run a program of the image without a network, with `folder` at /rehearsal: exit code and output. It
    has the memory and the CPUs of a training with as many GPUs."""
    from docker.types import DeviceRequest, Mount

    mounts = [Mount("/rehearsal", str(folder), type="bind")]
    mounts += [
        Mount(place, str(path), type="bind", read_only=True) for path, place in (read_only or {}).items()
    ]
    requests = [DeviceRequest(device_ids=list(gpus), capabilities=[["gpu"]])] if gpus else None

    def work(api: Any) -> tuple[int, str]:
        info, share = api.info(), max(len(gpus), 1)
        made = api.create_container(
            image,
            entrypoint=list(command),
            command=[],
            user="0:0" if as_root else f"{os.getuid()}:{os.getgid()}",
            environment={"HOME": "/tmp", "USER": "rehearsal"},  # noqa: S108 - in there
            host_config=api.create_host_config(
                mounts=mounts,
                network_mode="none",
                mem_limit=min(MEMORY_PER_GPU * share, int(info["MemTotal"])),
                nano_cpus=min(CPUS_PER_GPU * share, int(info["NCPU"])) * 10**9,
                device_requests=requests,
                shm_size="1g",
                security_opt=["no-new-privileges"],
                cap_drop=["ALL"],
                # Of use to root alone: files of other users, such as the trainer's.
                cap_add=["CHOWN", "DAC_OVERRIDE"],
            ),
            labels={LABEL: str(folder)},
        )
        try:
            api.start(made["Id"])
            code = int(api.wait(made["Id"])["StatusCode"])
            return code, api.logs(made["Id"]).decode("utf-8", "replace")
        finally:
            api.remove_container(made["Id"], v=True, force=True)

    return client.call_blocking(work, _HELPER_S)


def take_over(client: DockerClient, image: str, folder: Path) -> None:
    """Make files that a container's root has written the operator's own."""
    if os.getuid() == 0:
        return
    run_helper(
        client, image, ["chown", "-R", f"{os.getuid()}:{os.getgid()}", "/rehearsal"], folder, as_root=True
    )


def give_to_root(client: DockerClient, image: str, folder: Path) -> None:
    """Make a new directory like the validators' volume: root alone may write to it."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    if os.getuid() != 0:
        run_helper(client, image, ["chown", "0:0", "/rehearsal"], folder, as_root=True)
