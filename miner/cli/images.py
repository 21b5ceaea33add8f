"""`god-miner images`: the containers that training runs in."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from core.domain.errors import GodMinerError
from miner.cli.options import AsJson, load_settings, parse_build_arguments
from miner.cli.output import echo, echo_json

if TYPE_CHECKING:
    from miner.backends.docker.images import ImageStatus
    from miner.settings import Settings

app = typer.Typer(no_args_is_help=True, help="List, check, build and prune the images that training runs in.")

Which = Annotated[list[str] | None, typer.Argument(help="Images: text, image, toolkit. Default: all.")]


@app.command("list")
def list_images(which: Which = None, as_json: AsJson = False) -> None:
    """List the images, and whether they are the ones built here."""
    looks = _inspect_images(load_settings(), which)
    if as_json:
        echo_json([look.as_dict() for look in looks])
    else:
        _print(looks)


@app.command()
def check(which: Which = None, as_json: AsJson = False) -> None:
    """Start each image as a training would. Exit code 1 if a needed one cannot be used.

    Needed are those named here; without a name, those that tasks accepted by the policy train in."""
    settings = load_settings()
    looks = _inspect_images(settings, which)
    needed = set(which) if which else _needed_images(settings)
    problems = {look.short: _problem(settings, look) for look in looks}
    unusable = {short for short, problem in problems.items() if problem is not None}
    if as_json:
        echo_json(
            [
                {
                    **look.as_dict(),
                    "usable": look.short not in unusable,
                    "needed": look.short in needed,
                    "problem": problems[look.short],
                }
                for look in looks
            ]
        )
    else:
        for look in looks:
            use = "" if look.short in needed else " (the policy accepts no task for it)"
            echo(f"{look.short}: {look.name}: {problems[look.short] or look.text}{use}")
            if look.fix and look.short in needed:
                echo(f"  → {look.fix}")
    if unusable & needed:
        raise typer.Exit(1)


@app.command()
def prune(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed, and remove nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove earlier builds of our images that nothing uses.

    Kept is what a container was made from and what has a tag. The build that a data directory uses has one in
    god-miner-pinned; once such a directory is gone, remove its tag with `docker rmi`."""
    from miner.backends.docker.client import docker_client
    from miner.backends.docker.images import TrainerImages, earlier_builds, remove_build

    settings = load_settings()
    removed = []
    with closing(docker_client(settings)) as client:
        for build in earlier_builds(client, TrainerImages(settings)):
            problem = None if dry_run else remove_build(client, build.id)
            removed.append({"id": build.id, "size_bytes": build.size_bytes, "kept_because": problem})
            if not as_json:
                done = "would be removed" if dry_run else problem or "removed"
                echo(f"{build.id.removeprefix('sha256:')[:12]} {build.size_bytes / 1e9:.1f} GB: {done}")
    if as_json:
        echo_json(removed)
    elif not removed:
        echo("There are no earlier builds.")


@app.command()
def build(
    which: Which = None,
    argument: Annotated[
        list[str] | None,
        typer.Option(
            "--build-arg", metavar="NAME=VALUE", help="Value of an ARG of the Dockerfile (repeatable)."
        ),
    ] = None,
    context: Annotated[Path | None, typer.Option(help="Checkout to build from. Default: this one.")] = None,
    network: Annotated[
        str | None, typer.Option(help="Network of the build: host, none, … Default: Docker's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Build images from dockerfiles/ and pin them until the next build."""
    from miner.backends.docker.client import docker_client
    from miner.backends.docker.images import IMAGE_KINDS, ImageBuild, TrainerImages, build_image, source_root

    settings = load_settings()
    root = context.resolve() if context else source_root()
    images = TrainerImages(settings)
    build = ImageBuild(root, parse_build_arguments(argument or []), network)
    pins = {}
    with closing(docker_client(settings)) as client:
        for short in which or IMAGE_KINDS:
            images.name(short)
            pin = build_image(client, images, short, build, on_line=partial(echo, err=True))
            pins[short] = {"name": pin.name, "id": pin.id, "source": pin.source}
            if not as_json:
                echo(f"{short}: {pin.name} is {pin.id}")
    if as_json:
        echo_json(pins)


def _inspect_images(settings: Settings, which: list[str] | None) -> list[ImageStatus]:
    from miner.backends.docker.client import docker_client
    from miner.backends.docker.images import TrainerImages, image_statuses

    images = TrainerImages(settings)
    for short in which or ():
        images.name(short)
    with closing(docker_client(settings)) as client:
        return [found for found in image_statuses(client, images) if which is None or found.short in which]


def _needed_images(settings: Settings) -> set[str]:
    """Return the images that tasks accepted by the policy train in."""
    from core.domain.tasks import OFFERED_TASKS, TaskType
    from miner.offers.policies.load import active_policy_name, load_policy, settings_overrides

    policy = load_policy(
        active_policy_name(settings, None).name, [settings.policy_dir], settings_overrides(settings)
    )
    accepted = set(policy.terms.rules.tasks or OFFERED_TASKS)
    pictures = {"image", "toolkit"} if TaskType.IMAGE in accepted else set()
    return pictures | ({"text"} if accepted - {TaskType.IMAGE} else set())


def _problem(settings: Settings, look: ImageStatus) -> str | None:
    from miner.backends.docker.images import ImageState
    from miner.backends.trial import missing_in_image

    if look.state is ImageState.MISSING:
        return look.text

    async def tried() -> str | None:
        from miner.backends.registry import build_backend

        settings.data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".check-", dir=settings.data_dir) as folder:
            backend = await build_backend(settings, "docker", Path(folder))
            try:
                lacks = await missing_in_image(backend, Path(folder), look.short)
            except GodMinerError as error:
                return str(error)
            finally:
                await backend.close()
        return "; ".join(f"{engine}: {why}" for engine, why in lacks.items()) or None

    return asyncio.run(tried())


def _print(looks: list[ImageStatus]) -> None:
    for look in looks:
        size = f", {look.size_bytes / 1e9:.1f} GB" if look.size_bytes else ""
        which = f" ({look.id.removeprefix('sha256:')[:12]}{size})" if look.id else ""
        echo(f"{look.short}: {look.name}{which}: {look.text}")
        if look.fix:
            echo(f"  → {look.fix}")
