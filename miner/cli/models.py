"""`god-miner models`: the cache of base models."""

from __future__ import annotations

import asyncio
import time
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.domain.units import parse_bytes, show_bytes, show_params, show_seconds
from miner.cli.options import AsJson, load_settings
from miner.cli.output import echo, echo_json

if TYPE_CHECKING:
    from miner.inputs.model_cache import CachedModel, ModelCache
    from miner.settings import Settings

app = typer.Typer(no_args_is_help=True, help="List, fetch and remove cached base models.")

Images = Annotated[str | None, typer.Option("--image", help="Type of an image model: sdxl, flux, …")]


@app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List cached models: size, last use, and which jobs need them."""
    cache = _cache(load_settings())
    models = sorted((*cache.snapshots(), *cache.unfinished()), key=attrgetter("used_at"), reverse=True)
    total = sum(model.bytes for model in models)
    if as_json:
        rows = [_as_json(cache, model) for model in models]
        echo_json({"folder": str(cache.folder), "bytes": total, "quota": int(cache.quota), "models": rows})
        return
    for model in models:
        commit = model.commit[:10] if model.commit else "unfinished"
        numbers = cache.leases.by_model().get(model.model, [])
        jobs = f"  needed by job {', '.join(map(str, numbers))}" if numbers else ""
        echo(f"{show_bytes(model.bytes):>10}  {_ago(model.used_at):>14}  {model.model} {commit}{jobs}")
    echo(f"{show_bytes(total):>10}  of {show_bytes(cache.quota)} (MODEL_CACHE_BYTES) in {cache.folder}")


@app.command()
def fetch(
    model: Annotated[str, typer.Argument(help="Name of the model on the hub: owner/name.")],
    image: Images = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a model before a job needs it, or say why it cannot be fetched."""
    from core.domain.tasks import ImageModelType
    from miner.observe.redact import Redactor

    settings = load_settings()
    try:
        kind = ImageModelType(image) if image else None
    except ValueError:
        known = ", ".join(ImageModelType)
        raise typer.BadParameter(f"{image!r} is not a type of image model; known types: {known}") from None
    path, facts = asyncio.run(_fetch(settings, model, kind, Redactor(settings.secrets()), as_json))
    if as_json:
        echo_json({"path": str(path), "facts": facts.model_dump(mode="json")})
    else:
        echo(f"{model}: {show_params(facts.params_total)} parameters, {facts.architecture}, in {path}")


@app.command()
def prune(
    models: Annotated[
        list[str] | None, typer.Argument(help="Models to remove. Default: all models that no job needs.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", help="Size to shrink the cache to, e.g. 100GB, least recently used models first."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed, and remove nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove models that no job needs."""
    cache = _cache(load_settings())
    try:
        left = parse_bytes(to) if to else 0
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    gone = cache.prune(left, models or (), dry_run)
    if as_json:
        rows = [{"model": one.model, "commit": one.commit, "bytes": one.bytes} for one in gone]
        echo_json({"removed": not dry_run, "models": rows})
        return
    for one in gone:
        echo(f"{show_bytes(one.bytes):>10}  {one.model} {(one.commit or 'unfinished')[:10]}")
    what = "would be removed" if dry_run else "removed"
    echo(f"{show_bytes(sum(one.bytes for one in gone)):>10}  {what}")
    for model in sorted(set(models or ()) - {one.model for one in gone}):
        echo(f"{model} is not in the cache, or a job needs it: see `god-miner models list`", err=True)


async def _fetch(settings: Settings, model: str, kind: Any, redact: Any, quiet: bool) -> tuple[Path, Any]:
    from miner.inputs.fetch import JobInputs

    printed_at = 0.0

    def show(_what: str, did: int, total: int | None) -> None:
        nonlocal printed_at
        if not quiet and time.monotonic() - printed_at > 2:
            printed_at = time.monotonic()
            echo(f"{show_bytes(did)} of {show_bytes(total) if total else '?'}", err=True)

    done = await JobInputs(settings, redact).fetch_model(model, kind, show)
    return done.path, done.facts


def _cache(settings: Settings) -> ModelCache:
    from miner.inputs.model_cache import ModelCache

    return ModelCache(settings.model_cache_dir, settings.model_cache_bytes, settings.min_free_disk_bytes)


def _as_json(cache: ModelCache, one: CachedModel) -> dict[str, object]:
    jobs = cache.leases.by_model().get(one.model, [])
    row = {"model": one.model, "commit": one.commit, "bytes": one.bytes, "used_at": one.used_at}
    return {**row, "path": str(one.path), "jobs": jobs}


def _ago(at: float) -> str:
    return f"{show_seconds(max(time.time() - at, 0))} ago"
