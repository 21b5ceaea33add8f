"""`god-miner tournament rehearse`: what validators do with a commit, on the operator's own Docker."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.domain.records import without_terminal_codes
from core.domain.units import show_bytes, show_dollars, show_seconds
from miner.cli.options import (
    AsJson,
    end_on_signals,
    load_settings,
    parse_build_arguments,
    read_json_object,
    with_options,
)
from miner.cli.output import echo, echo_json

if TYPE_CHECKING:
    from miner.backends.docker.client import DockerClient
    from miner.observe.redact import Redactor
    from miner.settings import Settings
    from miner.tournament.rehearsal.inputs import Opponent, RehearsalInputs, RehearsalOptions, Say
    from miner.tournament.rehearsal.report import Rehearsal
    from miner.tournament.rules import TournamentTask

_WIDTH = 80
_SILENCE_S = 30.0
#: By what made it: why `clean` does not remove it.
_WHY_NOT = {
    "running": "its rehearsal runs",
    "kept": "--keep was given; --all removes it",
    "unknown": "its rehearsal is not known here; --all removes it",
}


@dataclass(frozen=True)
class TrialOptions:
    """The options of `rehearse` and `spar` as they are written."""

    commit: Annotated[str | None, typer.Option(help="Commit of that repository. Default: its head.")] = None
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="Task kind (repeatable); round1, knockout or boss for a round of texts, image-boss of "
            "pictures; text or image for all of a kind. Default: instruct."
        ),
    ] = None
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[KIND=]DIR|NAME",
            help="Model to train from: a directory, its name on the hub, or an architecture to make a tiny "
            "one of (lfm2, falcon_h1, granite, llama, qwen3).",
        ),
    ] = None
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="[KIND=]FILE", help="Rows as a JSON file, or a zip of pictures."),
    ] = None
    dataset: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="A dataset that the entry requests (repeatable)."),
    ] = None
    hub_cache: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="The hub's cache with what image families need."),
    ] = None
    trigger_word: Annotated[str | None, typer.Option(help="The trigger word of image tasks.")] = None
    hours: Annotated[
        float | None,
        typer.Option(min=0.001, help="Hours of each task. Default: the usual hours of its kind."),
    ] = None
    gpu: Annotated[
        list[str] | None,
        typer.Option(help="GPU UUID (repeatable), or none for the CPU. Default: idle GPUs."),
    ] = None
    argument: Annotated[
        list[str] | None,
        typer.Option("--build-arg", metavar="NAME=VALUE", help="For a stand-in base; validators give none."),
    ] = None
    build_network: Annotated[str | None, typer.Option(help="The network of the build: host, none, …")] = None
    output: Annotated[
        Path | None, typer.Option(help="A new directory for report.json and logs. Default: in DATA_DIR.")
    ] = None
    keep: Annotated[bool, typer.Option("--keep", help="Leave images, caches and submissions there.")] = False

    def read(
        self, settings: Settings, tasks: list[TournamentTask], hide: Redactor, say: Say
    ) -> RehearsalOptions:
        """Read what is written, and fetch the models that are named."""
        from miner.tournament.rehearsal.inputs import RehearsalOptions

        tasks = _with_stand_ins(tasks, self.model or [])
        inputs = _inputs(settings, tasks, self.model or [], self.data or [])
        by_default = settings.data_dir / "rehearsals" / time.strftime("%Y%m%d-%H%M%S")
        return RehearsalOptions(
            output=_output(self.output or by_default),
            tasks=[_sized(task, inputs[task.name]) for task in tasks],
            commit=self.commit,
            datasets=_datasets(settings, tasks, self.dataset or [], say),
            inputs=inputs,
            hours=self.hours,
            hub_cache=self.hub_cache.resolve() if self.hub_cache else None,
            trigger_word=self.trigger_word,
            gpus=_gpus(settings, self.gpu or []),
            build_arguments=parse_build_arguments(self.argument or []),
            build_network=self.build_network,
            hide=hide,
            keep=self.keep,
        )


@dataclass(frozen=True)
class RehearseOptions(TrialOptions):
    """The options of `rehearse` alone."""

    against: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Another submission, such as the champion's."),
    ] = None
    kill: Annotated[
        bool, typer.Option("--kill", help="Kill one more training after its first submission.")
    ] = False


@with_options
def rehearse(
    options: RehearseOptions,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[COMMIT|URL|DIR]",
            help="A commit of this checkout, or a repository. Default: the head of this checkout.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Do with a commit what validators do: clone, build, run, kill at the limit, upload, score.

    Exit code 1 if any task failed. Without --model and --data a text task gets a tiny model and made-up rows,
    which shows that everything works and not how good it is. Image tasks need --model; without --data they
    get made-up pictures. A tenth of the data is kept for the score. Reward code of GRPO tasks runs in
    containers without a network. Ctrl-C ends everything that was started."""
    from miner.tournament.rehearsal.report import report_lines

    against = options.against.resolve() if options.against else None
    found = _rehearsed(options, source, against, kill=options.kill)
    report = found.report
    _show(found, report.as_dict() if as_json else report_lines(report))
    if not report.passed:
        raise typer.Exit(1)


@with_options
def spar(
    options: TrialOptions,
    champion: Annotated[
        str, typer.Argument(metavar="CHAMPION_REPO", help="The other entry: an address or a directory.")
    ],
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[COMMIT|URL|DIR]", help="Ours, as for rehearse. Default: the head of this checkout."
        ),
    ] = None,
    champion_commit: Annotated[
        str | None, typer.Option(help="The champion's commit. Default: the head of its repository.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rehearse our entry and the champion's on the same tasks and inputs, and say where we lose.

    Both are built and trained under the validators' options, one after the other, and compared by the gate
    of the boss round. The champion's programs are a stranger's: they run in containers, and its build has the
    network. A champion whose build or training fails loses that task; that is no failure of ours. Exit code 1
    if ours failed or something could not be compared."""
    from miner.tournament.rehearsal.inputs import Opponent
    from miner.tournament.rehearsal.spar import Verdict, spar_data, spar_lines, sparred

    found = _rehearsed(options, source, Opponent(champion, champion_commit))
    report = found.report
    _show(found, {**report.as_dict(), "spar": spar_data(report)} if as_json else spar_lines(report))
    if not report.passed or any(one.verdict is Verdict.UNKNOWN for one in sparred(report)):
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Rehearsed:
    """A report, and what it takes to show it."""

    report: Rehearsal
    hide: Redactor
    #: In dollars, as far as there are prices.
    cost: float | None
    gpus: int


def _rehearsed(
    options: TrialOptions, source: str | None, against: Path | Opponent | None, *, kill: bool = False
) -> _Rehearsed:
    """Rehearse by the options."""
    from miner.backends.docker.client import docker_client
    from miner.observe.redact import Redactor
    from miner.tournament.rehearsal.rehearse import rehearse as rehearse_all

    settings = load_settings()
    hide = Redactor(settings.secrets())
    tasks = _tasks(options.task or ["instruct"])
    place, commit = _source(source, options.commit)
    end_on_signals()
    with closing(docker_client(settings)) as client, _progress(hide) as say:
        _mention_leftovers(client, settings, say)
        read = replace(options, commit=commit).read(settings, tasks, hide, say)
        chosen = replace(read, against=against, kill=kill)
        try:
            report = rehearse_all(client, place, chosen, say)
        except KeyboardInterrupt:
            if (partial := chosen.output / "report.json").exists():
                echo(f"interrupted; what was found until then is in {partial}", err=True)
            raise
    return _Rehearsed(report, hide, _cost(settings, chosen.gpus, report.seconds), len(chosen.gpus))


def _show(found: _Rehearsed, shown: dict[str, Any] | Iterator[str]) -> None:
    """Print a report without secrets, as JSON or as lines, with its cost."""
    from miner.reports.report import redact_report

    if isinstance(shown, dict):
        echo_json({**redact_report(shown, found.hide), "cost": found.cost})
        return
    for line in shown:
        echo(found.hide(without_terminal_codes(line)))
    if found.cost is not None:
        taken = show_seconds(found.report.seconds)
        echo(f"cost: {show_dollars(found.cost)} for {found.gpus} GPUs and {taken}")


def clean(
    outputs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR]...", help="What --output named, besides those in DATA_DIR."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also what --keep kept, and what cannot be told to be whose.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Remove what killed rehearsals left: containers, images, networks, checkouts, caches, checkpoints.

    What a rehearsal that runs has made is never removed. Reports and logs stay. Exit code 1 if something
    could not be removed."""
    from miner.backends.docker.client import docker_client
    from miner.tournament.rehearsal.leftovers import find_leftovers, remove_leftover

    settings = load_settings()
    found: list[dict[str, object]] = []
    with closing(docker_client(settings)) as client:
        for one in find_leftovers(client, [*_rehearsals(settings), *(outputs or [])]):
            goes = one.may_go(everything=everything)
            problem = remove_leftover(client, one) if goes and not dry_run else None
            removed = goes and not dry_run and problem is None
            found.append({**one.as_dict(), "unwanted": goes, "removed": removed, "problem": problem})
            if not as_json:
                why = f"left alone ({_WHY_NOT.get(one.state, one.state)})"
                done = ("would be removed" if dry_run else problem or "removed") if goes else why
                size = f", {show_bytes(one.size_bytes)}" if one.size_bytes is not None else ""
                echo(f"{one.kind} {one.name}{size}: {done}")
    if as_json:
        echo_json(found)
    elif not found:
        echo("Rehearsals have left nothing.")
    if any(one["problem"] for one in found):
        raise typer.Exit(1)


def _rehearsals(settings: Settings) -> list[Path]:
    """Output directories of rehearsals that named none."""
    return sorted((settings.data_dir / "rehearsals").glob("*"))


def _mention_leftovers(client: DockerClient, settings: Settings, say: Callable[[str], None]) -> None:
    from miner.tournament.rehearsal.leftovers import find_leftovers

    found = [one for one in find_leftovers(client, _rehearsals(settings)) if one.may_go(everything=False)]
    if found:
        kinds = Counter(one.kind for one in found)
        counts = ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in kinds.items())
        say(f"killed rehearsals left {counts.replace('directorys', 'directories')}:")
        say("  see `god-miner tournament clean --dry-run`")


@contextmanager
def _progress(hide: Callable[[str], str]) -> Iterator[Callable[[str], None]]:
    """Lines with their time, without secrets. A step that is silent for long is named again, so that it does
    not look dead."""
    began = time.monotonic()
    lock, ended = threading.Lock(), threading.Event()
    last, last_at = "", began

    def show(text: str) -> None:
        echo(f"{time.monotonic() - began:6.0f} s  {text}"[:_WIDTH].rstrip(), err=True)

    def say(text: str) -> None:
        nonlocal last, last_at
        # Of a progress bar, which draws over itself, the last state.
        text = hide(without_terminal_codes(text.rstrip().rpartition("\r")[2]))
        with lock:
            last, last_at = text, time.monotonic()
            show(text)

    def say_again() -> None:
        nonlocal last_at
        while not ended.wait(1):
            with lock:
                if last and time.monotonic() - last_at >= _SILENCE_S:
                    last_at = time.monotonic()
                    show(f"  still at: {last.strip()}")

    thread = threading.Thread(target=say_again, daemon=True)
    thread.start()
    try:
        yield say
    finally:
        ended.set()
        thread.join()


def _tasks(names: list[str]) -> list[TournamentTask]:
    from miner.tournament.rules import ROUNDS, TASKS, tasks_of_round

    found: dict[str, TournamentTask] = {}
    for name in names:
        if name in TASKS:
            several = [TASKS[name]]
        elif name in ROUNDS:
            several = tasks_of_round(name)
        else:
            several = [task for task in TASKS.values() if task.tournament == name]
        if not several:
            kinds = ", ".join([*TASKS, *ROUNDS, "text", "image"])
            raise typer.BadParameter(f"{name!r} is not a kind of task; known kinds: {kinds}")
        found |= {task.name: task for task in several}
    return list(found.values())


def _with_stand_ins(tasks: list[TournamentTask], models: list[str]) -> list[TournamentTask]:
    """The tasks with the architectures that are named for their stand-ins."""
    named = _by_kind(models, tasks, "--model")
    return [
        replace(task, stand_in=named[task.name]) if _is_architecture(named.get(task.name), task) else task
        for task in tasks
    ]


def _is_architecture(model: str | None, task: TournamentTask) -> bool:
    return (
        model is not None
        and task.image_type is None
        and re.fullmatch(r"[a-z][a-z0-9_]*", model) is not None
        and not Path(model).exists()
    )


def _sized(task: TournamentTask, given: RehearsalInputs) -> TournamentTask:
    """The task with the size of the operator's model, by which validators count GPUs."""
    from core.models.identify import facts_from_config

    if task.image_type is not None or given.model is None or not (given.model / "config.json").is_file():
        return task
    facts = facts_from_config(read_json_object(given.model / "config.json"), given.model_id)
    return replace(task, billions=facts.params_total / 1e9)


def _source(source: str | None, commit: str | None) -> tuple[str, str | None]:
    """A repository and a commit, named as for `check`."""
    from miner.tournament.check.entry import named_source

    place, named = named_source(source)
    if commit is not None and named is not None:
        raise typer.BadParameter(f"{source!r} is a commit already, so --commit says it twice")
    return place, commit or named


def _output(directory: Path) -> Path:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise typer.BadParameter(f"{directory} is not an empty directory: name a new one by --output")
    return directory.resolve()


def _by_kind(written: list[str], tasks: list[TournamentTask], option: str) -> dict[str, str]:
    """`KIND=VALUE` for one kind, `VALUE` for all that are rehearsed."""
    names = {task.name for task in tasks}
    found: dict[str, str] = {}
    for text in written:
        kind, equals, value = text.partition("=")
        if equals and kind in names:
            found[kind] = value
        elif equals and not Path(text).exists():
            raise typer.BadParameter(f"{option} {text}: {kind} is not rehearsed; add --task {kind}")
        else:
            found = {**dict.fromkeys(names, text), **found}
    return found


def _inputs(
    settings: Settings, tasks: list[TournamentTask], models: list[str], data: list[str]
) -> dict[str, RehearsalInputs]:
    from miner.tournament.rehearsal.inputs import STAND_IN_MODEL, RehearsalInputs

    named_models, named_data = _by_kind(models, tasks, "--model"), _by_kind(data, tasks, "--data")
    found = {}
    for task in tasks:
        model, path = named_models.get(task.name), None
        if model == task.stand_in:
            model = None
        if model is not None:
            path = Path(model).resolve() if Path(model).exists() else _fetched(settings, model, task)
            model = model if "/" in model and not Path(model).exists() else f"local/{path.name}"
        rows = named_data.get(task.name)
        found[task.name] = RehearsalInputs(
            path, model or STAND_IN_MODEL, Path(rows).resolve() if rows else None
        )
    return found


def _datasets(
    settings: Settings, tasks: list[TournamentTask], named: list[str], say: Callable[[str], None]
) -> dict[str, Path]:
    """The directories by dataset, each one that validators give; name requested ones that are not given."""
    from core.domain.tournament_rules import AS_OF, DATASETS, MOST_DATASETS

    found: dict[str, Path] = {}
    for text in named:
        name, equals, directory = text.partition("=")
        if not equals or not directory:
            raise typer.BadParameter(f"--dataset {text}: write NAME=DIR, such as {DATASETS[0]}=./poker")
        if name not in DATASETS:
            raise typer.BadParameter(
                f"--dataset {name}: not on the validators' list of {AS_OF}, which has {', '.join(DATASETS)}"
            )
        if name in found:
            raise typer.BadParameter(f"--dataset {name}: named twice")
        found[name] = Path(directory).expanduser().resolve()
    if len(found) > MOST_DATASETS:
        raise typer.BadParameter(f"--dataset: validators give at most {MOST_DATASETS}, not {len(found)}")
    if found and all(task.image_type for task in tasks):
        raise typer.BadParameter("--dataset: validators give none to image tasks")
    for kind in sorted({task.tournament for task in tasks if task.image_type is None}):
        repository = settings.training_repo(kind)
        for name in repository.datasets if repository else ():
            if name not in found:
                say("your settings request a dataset that is not given by --dataset:")
                say(f"  {name}")
    return found


def _fetched(settings: Settings, model: str, task: TournamentTask) -> Path:
    """A model of the hub, in the daemon's cache."""
    from miner.inputs.fetch import JobInputs
    from miner.observe.redact import Redactor

    if model.count("/") != 1 or model.startswith((".", "/")):
        raise typer.BadParameter(f"--model {model}: there is no such file or directory")
    echo(f"fetching {model}", err=True)
    inputs = JobInputs(settings, Redactor(settings.secrets()))
    done = asyncio.run(inputs.fetch_model(model, task.image_type, lambda what, did, total: None))
    return done.path


def _cost(settings: Settings, gpus: tuple[str, ...], seconds: float) -> float | None:
    """Return the dollars for the GPUs of a rehearsal, which has them from its first task's build on."""
    from miner.backends.build_fleet import scan_once
    from miner.fleet.costs import GpuCosts
    from miner.fleet.fleet_file import gpu_prices

    prices = gpu_prices(settings)
    kinds = scan_once(settings)[0].inventory.kinds if prices.by_kind else {}
    return GpuCosts(prices, kinds).of(gpus, seconds)


def _gpus(settings: Settings, named: list[str]) -> tuple[str, ...]:
    if named == ["none"]:
        return ()
    if named:
        return tuple(named)
    from miner.backends.build_fleet import scan_once

    inventory = scan_once(settings)[0].inventory
    if inventory.installed is None or inventory.installed.gpus.is_cpu:
        return ()
    usable = [gpu.id for gpu in inventory.gpus if gpu.unusable_reason is None]
    # A job of the daemon may train there.
    free = tuple(name for name in usable if name not in inventory.unclean)
    if inventory.gpus and not free:
        raise typer.BadParameter("no GPU here is free: wait, or name one by --gpu UUID, or --gpu none")
    return free
