"""`god-miner images`: the containers that training runs in."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from core.errors import GodMinerError
from miner.commands.output import say, say_json

if TYPE_CHECKING:
    from miner.engines.docker.looking import Look
    from miner.settings import Settings

app = typer.Typer(no_args_is_help=True, help="The images that training runs in.")

AsJson = Annotated[bool, typer.Option("--json", help="For machines: JSON.")]
Which = Annotated[
    list[str] | None, typer.Argument(help="text, image or toolkit; all of them if none is named.")
]


@app.command("list")
def list_images(which: Which = None, as_json: AsJson = False) -> None:
    """What is there, and whether it is what was built here."""
    looks = _look(_settings(), which)
    if as_json:
        say_json([look.as_dict() for look in looks])
    else:
        _print(looks)


@app.command()
def check(which: Which = None, as_json: AsJson = False) -> None:
    """Try each image as a training would use it. Exit code 1 if one that is needed cannot be used.

    Needed are those named here; without a name, those that tasks accepted by the policy train in."""
    settings = _settings()
    looks = _look(settings, which)
    needed = set(which) if which else _needed(settings)
    found = []
    for look in looks:
        problem = _problem(settings, look)
        usable = problem is None
        found.append({**look.as_dict(), "usable": usable, "needed": look.short in needed, "problem": problem})
    if as_json:
        say_json(found)
    else:
        for image in found:
            use = "" if image["needed"] else " (the policy accepts no task for it)"
            say(f"{image['short']}: {image['name']}: {image['problem'] or image['text']}{use}")
            if image["fix"] and image["needed"]:
                say(f"  → {image['fix']}")
    if not all(image["usable"] or not image["needed"] for image in found):
        raise typer.Exit(1)


@app.command()
def prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove earlier builds of our images that nothing uses: each takes as much disk as the present one.

    Kept is what a container was made from and what has a tag. The build that a data directory uses has one in
    god-miner-pinned; once such a directory is gone, remove its tag with `docker rmi`."""
    from miner.engines.docker.building import earlier_builds, remove_build
    from miner.engines.docker.client import Client
    from miner.engines.docker.images import Images

    settings = _settings()
    removed = []
    with closing(Client(settings.docker_host)) as client:
        for build in earlier_builds(client, Images(settings)):
            problem = None if dry_run else remove_build(client, build.id)
            removed.append({"id": build.id, "size_bytes": build.size_bytes, "kept_because": problem})
            if not as_json:
                done = "would be removed" if dry_run else problem or "removed"
                say(f"{build.id.removeprefix('sha256:')[:12]} {build.size_bytes / 1e9:.1f} GB: {done}")
    if as_json:
        say_json(removed)
    elif not removed:
        say("There are no earlier builds.")


@app.command()
def build(
    which: Which = None,
    argument: Annotated[
        list[str] | None, typer.Option("--build-arg", metavar="NAME=VALUE", help="For the dockerfile's ARG.")
    ] = None,
    context: Annotated[Path | None, typer.Option(help="The checkout; this one if not given.")] = None,
    network: Annotated[str | None, typer.Option(help="The network of the build: host, none, …")] = None,
    as_json: AsJson = False,
) -> None:
    """Build images from dockerfiles/ and pin what was built: that runs until the next build."""
    from miner.engines.docker.building import build as build_one
    from miner.engines.docker.building import source_root
    from miner.engines.docker.client import Client
    from miner.engines.docker.images import KINDS, Images

    settings = _settings()
    root = context.resolve() if context else source_root()
    images = Images(settings)
    pins = {}
    with closing(Client(settings.docker_host)) as client:
        for short in which or KINDS:
            images.name(short)
            pin = build_one(
                client,
                images,
                short,
                root=root,
                arguments=_arguments(argument or []),
                network=network,
                told=lambda line: say(line, err=True),
            )
            pins[short] = {"name": pin.name, "id": pin.id, "source": pin.source}
            if not as_json:
                say(f"{short}: {pin.name} is {pin.id}")
    if as_json:
        say_json(pins)


def _settings() -> Settings:
    from miner.settings import load_settings

    return load_settings()


def _look(settings: Settings, which: list[str] | None) -> list[Look]:
    from miner.engines.docker.client import Client
    from miner.engines.docker.images import Images
    from miner.engines.docker.looking import look

    images = Images(settings)
    for short in which or ():
        images.name(short)
    with closing(Client(settings.docker_host)) as client:
        return [found for found in look(client, images) if which is None or found.short in which]


def _needed(settings: Settings) -> set[str]:
    """The images that tasks accepted by the policy train in."""
    from core.tasks import TaskType
    from miner.offers.policies.choice import on_top, policy_in_force
    from miner.offers.policies.load import load_policy

    policy = load_policy(policy_in_force(settings, None).name, [settings.policy_dir], on_top(settings))
    accepted = set(policy.terms.rules.tasks or TaskType)
    pictures = {"image", "toolkit"} if TaskType.IMAGE in accepted else set()
    return pictures | ({"text"} if accepted - {TaskType.IMAGE} else set())


def _problem(settings: Settings, look: Look) -> str | None:
    from miner.engines.docker.looking import ImageState
    from miner.engines.trial import lacking_in

    if look.state is ImageState.MISSING:
        return look.text

    async def tried() -> str | None:
        from miner.engines.choose import trial_engine

        settings.data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".check-", dir=settings.data_dir) as folder:
            engine = await trial_engine(settings, "docker", Path(folder))
            try:
                lacks = await lacking_in(engine, Path(folder), look.short)
            except GodMinerError as error:
                return str(error)
            finally:
                await engine.close()
        return "; ".join(f"{engine}: {why}" for engine, why in lacks.items()) or None

    return asyncio.run(tried())


def _arguments(written: list[str]) -> dict[str, str]:
    found = {}
    for one in written:
        name, equals, value = one.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{one!r} must be written NAME=VALUE")
        found[name] = value
    return found


def _print(looks: list[Look]) -> None:
    for look in looks:
        size = f", {look.size_bytes / 1e9:.1f} GB" if look.size_bytes else ""
        which = f" ({look.id.removeprefix('sha256:')[:12]}{size})" if look.id else ""
        say(f"{look.short}: {look.name}{which}: {look.text}")
        if look.fix:
            say(f"  → {look.fix}")
