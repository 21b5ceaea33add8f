"""Build an entry's image as validators do: classic builder, no cache, the whole repository, a time limit.

Validators give no build arguments, no target and no secrets; the network is open. The limit is over the whole
stream, from sending the context to the image's id. The base image that Docker has already is not pulled
again: a validator's machine may have to pull it within the limit.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

from core.domain.errors import GodMinerError
from core.domain.records import without_terminal_codes
from core.domain.tournament_rules import BUILD_LIMIT_S, DOCKERFILE_DIRECTORIES
from core.domain.units import show_seconds
from miner.backends.docker.client import DockerClient

_STEP = re.compile(r"Step (\d+)/(\d+) : (.*)", re.DOTALL)
_MADE = re.compile(r"---> ([0-9a-f]{12})")
#: Of the output, for the report of a failure.
_KEPT_LINES = 30
_REMOVE_S = 300.0
#: Docker ends the container of an interrupted step by itself: SIGKILL, then what it must write.
_STEP_END_S = 60.0
_DISK_FULL = "see docker system df, god-miner tournament clean, god-miner images prune"


@dataclass
class BuildStep:
    """One instruction; `seconds` of one that failed go to the end of the build."""

    number: int
    instruction: str
    seconds: float = 0.0

    @property
    def is_base(self) -> bool:
        """True if the time of the step is that of pulling an image."""
        return self.instruction.upper().startswith("FROM ")


@dataclass
class Build:
    """The build of one Dockerfile."""

    dockerfile: str
    image: str | None = None
    #: Why there is no image.
    problem: str | None = None
    seconds: float = 0.0
    size_bytes: int = 0
    steps: list[BuildStep] = field(default_factory=list)
    #: Whether a base image was downloaded.
    pulled: bool = False
    #: The last lines of the output.
    tail: list[str] = field(default_factory=list)
    #: Ids of the images that the steps made, oldest first.
    made: list[str] = field(default_factory=list)

    @property
    def base_seconds(self) -> float:
        """Time for base images: nearly all of it is their download."""
        return sum(step.seconds for step in self.steps if step.is_base)

    @property
    def own_seconds(self) -> float:
        return self.seconds - self.base_seconds


def find_dockerfile(root: Path, name: str) -> str | None:
    """The Dockerfile that a validator takes, relative to the repository's root."""
    paths = (f"{directory}/{name}" for directory in DOCKERFILE_DIRECTORIES)
    return next((path for path in paths if (root / path).is_file()), None)


def no_dockerfile(name: str) -> str:
    places = ", ".join(f"{directory}/{name}" for directory in DOCKERFILE_DIRECTORIES)
    return f"no Dockerfile: neither of {places} is in the commit"


def build_entry(
    client: DockerClient,
    root: Path,
    name: str,
    tag: str,
    *,
    arguments: Mapping[str, str] | None = None,
    network: str | None = None,
    limit_s: float = BUILD_LIMIT_S,
    on_line: Callable[[str], None] = lambda line: None,
    on_step: Callable[[str], None] = lambda image: None,
) -> Build:
    """Build the Dockerfile `name` of the checkout at `root`. A failure is a part of the result. `on_step`
    gets the image of each step, which has no name."""
    path = find_dockerfile(root, name)
    if path is None:
        return Build(name, problem=no_dockerfile(name))

    build = Build(path)

    def work(api: Any) -> Build:
        return _Building(api, build, limit_s, on_line, on_step).run(
            path=str(root),
            dockerfile=path,
            tag=tag,
            buildargs=dict(arguments or {}),
            network_mode=network,
        )

    try:
        return client.call_blocking(work, limit_s + 60)
    except BaseException:  # interrupted, too
        with contextlib.suppress(GodMinerError):
            remove_entry(client, build)
        raise


def remove_entry(client: DockerClient, build: Build) -> None:
    """Remove what a build has made, also one that failed: its finished steps are images without a name."""

    def remove(api: Any) -> None:
        ends = time.monotonic() + _STEP_END_S
        for image in (build.image, *reversed(build.made)):
            if image is not None:
                while _removal_conflicts(api, image) and time.monotonic() < ends:
                    time.sleep(0.1)

    client.call_blocking(remove, _REMOVE_S)


def _removal_conflicts(api: Any, image: str) -> bool:
    """Remove the image; return whether a container holds it, as that of a step just interrupted does."""
    import docker

    try:
        api.remove_image(image, force=True)
    except docker.errors.APIError as error:  # 404: gone with the one before
        return bool(error.status_code == HTTPStatus.CONFLICT)
    return False


class _Building:
    def __init__(
        self,
        api: Any,
        build: Build,
        limit_s: float,
        on_line: Callable[[str], None],
        on_step: Callable[[str], None],
    ) -> None:
        self._api, self._build, self._limit_s = api, build, limit_s
        self._on_line, self._on_step = on_line, on_step
        self._began = time.monotonic()
        self._step_began = self._began
        self._tail: deque[str] = deque(maxlen=_KEPT_LINES)

    def run(self, **options: Any) -> Build:
        from docker.types import CancellableStream

        replies: list[Any] = []
        hooks = self._api.hooks["response"]
        hooks.append(keep := lambda reply, **_: replies.append(reply))
        try:
            lines = self._api.build(nocache=True, rm=True, forcerm=True, decode=True, **options)
        finally:
            hooks.remove(keep)
        # Docker ends the build of a client that goes away.
        stream = CancellableStream(lines, replies[-1])
        left = self._limit_s - (time.monotonic() - self._began)
        timer = threading.Timer(max(left, 0.0), stream.close)
        timer.start()
        try:
            self._follow(stream)
        finally:
            timer.cancel()
            lines.close()
            replies[-1].close()
        return self._finish(str(options["tag"]))

    def _follow(self, lines: Iterator[Mapping[str, Any]]) -> None:
        for line in lines:
            if "error" in line:
                # Docker reports a failure within the stream, and ends it as after a success.
                self._build.problem = without_terminal_codes(str(line["error"])).strip()
                self._tail.append(self._build.problem)
            self._build.pulled |= str(line.get("status")).startswith("Pulling")
            text = without_terminal_codes(str(line.get("stream") or "")).strip()
            if step := _STEP.match(text):
                self._end_step()
                self._build.steps.append(BuildStep(int(step[1]), " ".join(step[3].split())))
            elif (made := _MADE.fullmatch(text)) and not self._build.steps[-1].is_base:
                self._build.made.append(made[1])
                self._on_step(made[1])
            if text:
                self._tail.append(text)
                self._on_line(text)

    def _end_step(self) -> None:
        now = time.monotonic()
        if self._build.steps:
            self._build.steps[-1].seconds = now - self._step_began
        self._step_began = now

    def _finish(self, tag: str) -> Build:
        import docker

        build = self._build
        self._end_step()
        build.seconds = time.monotonic() - self._began
        build.tail = list(self._tail)
        if "no space left on device" in (build.problem or "").lower():
            build.problem = f"{build.problem}; {_DISK_FULL}"
        if build.problem is None and build.seconds >= self._limit_s:
            step = build.steps[-1] if build.steps else None
            where = f" in step {step.number}: {step.instruction[:200]}" if step else ""
            build.problem = f"not built within {show_seconds(self._limit_s)}: ended{where}"
        if build.problem is None:
            try:
                found = self._api.inspect_image(tag)
                build.image, build.size_bytes = str(found["Id"]), int(found.get("Size") or 0)
            except docker.errors.ImageNotFound:
                build.problem = "Docker ended the build without an image"
        return build
