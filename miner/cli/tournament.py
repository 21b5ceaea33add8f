"""`god-miner tournament`: check an entry, prepare one, rehearse it, and see what the field trains with."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from core.domain.errors import ConfigError
from core.domain.wire import TournamentType
from core.system.files import temporary_tree
from miner.cli import tournament_odds, tournament_rehearse, tournament_rules
from miner.cli.options import (
    AsJson,
    end_on_signals,
    load_settings,
    profile_directories,
    read_json_object,
    read_record,
    with_options,
)
from miner.cli.output import echo, echo_json, terminal

if TYPE_CHECKING:
    from miner.settings import Settings
    from miner.tournament.check.entry import CheckedEntry, RuleFinding
    from miner.tournament.prepare import PreparedEntry

app = typer.Typer(no_args_is_help=True, help="Tournaments: check, prepare and rehearse an entry.")

app.command()(tournament_rehearse.rehearse)
app.command()(tournament_rehearse.spar)
app.command()(tournament_rehearse.clean)
app.command()(tournament_rules.rules)
app.command()(tournament_odds.odds)

Kinds = Annotated[
    list[TournamentType] | None, typer.Option("--kind", help="Kind to enter (repeatable). Default: all.")
]
#: How each state of a rule is printed.
_STYLES = {"passed": "green", "failed": "bold red", "unknown": "yellow"}
_SHOWN = {"passed": "passed", "failed": "FAILED", "unknown": "by hand"}


@app.callback()
def tournament() -> None:
    """Tournaments: check, prepare and rehearse an entry."""


@dataclass(frozen=True)
class CheckOptions:
    """The options of `check`."""

    commit: Annotated[str | None, typer.Option(help="The commit of a URL or DIR.")] = None
    kind: Kinds = None
    upstream: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="A checkout of the validators' repository, for the licence."
        ),
    ] = None
    other: Annotated[
        list[str] | None, typer.Option(metavar="DIR|URL", help="Another entry to compare with; repeatable.")
    ] = None
    trust: Annotated[
        bool, typer.Option("--trust", help="Run another's code also where bubblewrap does not work.")
    ] = False
    offline: Annotated[bool, typer.Option("--offline", help="Ask nothing of the network.")] = False


@app.command()
@with_options
def check(
    options: CheckOptions,
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="[COMMIT|URL|DIR]",
            help="A commit of this checkout, or a repository's address or directory. Default: HEAD here.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check an entry by every rule of admission. Exit code 1 if one is broken, or after ten minutes.

    "by hand" marks what cannot be checked here, with what to do about it.

    Code of the checked repository is run for rule 9 only: its trainer.runner.command_line parses the
    validators' argument lines, in a sandbox (bubblewrap) without a network, without your files and
    environment, for a minute at most. Where bubblewrap does not work, this checkout's own code is run
    without a sandbox, and another's only with --trust."""
    from miner.tournament.check.checks import is_admitted, run_checks
    from miner.tournament.check.entry import USUAL_KINDS, open_entry, run_within_limit

    settings, problem = _settings()
    findings: list[RuleFinding] = []

    def on_finding(finding: RuleFinding) -> None:
        echo(f"{finding.number:>2} {finding.rule}: {_SHOWN[finding.state]}", err=True)
        findings.append(finding)

    end_on_signals()
    with temporary_tree("god-miner-check-") as folder:
        opened = partial(
            open_entry,
            subject,
            folder,
            commit=options.commit,
            kinds=options.kind or USUAL_KINDS,
            settings=settings,
            settings_problem=problem,
            others=options.other or (),
            upstream=options.upstream,
            trust=options.trust,
            offline=options.offline,
            now=datetime.now(UTC),
            say=lambda line: echo(line, err=True),
        )
        entry = run_within_limit(opened, run_checks, on_finding)
    admitted = is_admitted(findings)
    if as_json:
        echo_json({"admitted": admitted, **_check_data(entry, findings)})
    else:
        _print_findings(entry, findings)
    if not admitted:
        raise typer.Exit(1)


@app.command()
def replay(
    task: Annotated[
        str, typer.Argument(help="A picture task's id, or a file with the public API's answer on it.")
    ],
    scores: Annotated[
        Path,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Output of `god-miner eval --json` on all the task's pictures: of entries' adapters, in"
            " paths that hold their hotkeys, and of ours, last.",
        ),
    ],
    ours: Annotated[
        str | None, typer.Option(help="Our adapter's path in the scores. Default: the last.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rank an adapter among the entries of a picture task that is over.

    Finds the hidden test pictures by the entries' published losses. Exit code 1 if no set of pictures fits
    clearly.
    """
    from dataclasses import asdict

    from core.runs.picture_run import PictureScores
    from miner.tournament.public_api import open_public_api, task_result
    from miner.tournament.replay import replay as replayed

    if Path(task).is_file():
        result = task_result(read_json_object(Path(task)), Path(task).stem)
    else:
        with open_public_api(load_settings()) as public:
            result = public.task(task)
    found = replayed(result, read_record(scores, PictureScores), ours)
    hidden = found.hidden
    if as_json:
        echo_json({**asdict(found), "place": found.place, "found": hidden.found})
    else:
        sure = "clearly" if hidden.found else "NOT clearly: score the adapters of more entries"
        echo(f"hidden pictures, {sure}: {', '.join(hidden.names)}")
        known = len(hidden.entries)
        echo(f"off by {hidden.off:.1e} for {known} entries; the next best by {hidden.next_off:.1e}")
        echo(f"ours: {found.ours:.6f}, place {found.place} of {len(found.ranked) + 1}")
        for entry in found.ranked[:10]:
            loss = entry.loss or 0.0
            echo(f"  {entry.hotkey[:8]}  {loss:.6f}  ours {found.ours / loss - 1:+.2%}")
    raise typer.Exit(0 if hidden.found else 1)


@app.command()
def prepare(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty directory.")],
    profile: Annotated[
        str, typer.Option(help="Name or file of the profile to train by, with all that it extends.")
    ] = "steady",
    upstream: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="A checkout of the validators' repository: licence and notice."
        ),
    ] = None,
    kind: Kinds = None,
    as_json: AsJson = False,
) -> None:
    """Make an entry out of this checkout's HEAD: a repository with one commit, ready to be pushed.

    Only what a training needs goes in: no daemon, no tests. Without --upstream its licence is missing."""
    from dataclasses import asdict

    from miner.backends.docker.images import source_root
    from miner.tournament.check.entry import USUAL_KINDS
    from miner.tournament.entry_watch import note_prepared
    from miner.tournament.prepare import DISTINCT, NOT_DISTINCT, prepare_entry

    end_on_signals()
    made = prepare_entry(
        source_root(),
        directory,
        kinds=kind or USUAL_KINDS,
        profile=profile,
        profile_directories=profile_directories(None),
        upstream=upstream,
        say=lambda line: echo(line, err=True),
    )
    settings, _ = _settings()
    if settings is not None:
        note_prepared(settings.data_dir, made.directory, made.kinds)
    if as_json:
        shown = {**asdict(made), "directory": str(made.directory), "kinds": [str(one) for one in made.kinds]}
        echo_json({**shown, "distinct": list(DISTINCT), "not_distinct": list(NOT_DISTINCT)})
    else:
        _print_prepared(made, upstream)


def _print_prepared(made: PreparedEntry, upstream: Path | None) -> None:
    from miner.tournament.check.entry import USUAL_KINDS
    from miner.tournament.checkout import few
    from miner.tournament.prepare import DISTINCT, NOT_DISTINCT

    named = f" --upstream {upstream}" if upstream else ""
    if set(made.kinds) != set(USUAL_KINDS):
        named += "".join(f" --kind {kind}" for kind in made.kinds)
    lines = [
        f"{made.directory}: {made.files} files, {made.size_bytes / 1e6:.1f} MB",
        f"commit {made.commit}, from god-miner's commit {made.made_from}",
        f"profile {made.profile}" + (f", by way of {', '.join(made.layers[:-1])}" if made.layers[1:] else ""),
    ]
    lines.append(f"REVIEW.md explains {made.explained} places to the reviewer")
    if made.unexplained:
        lines += [
            f"and not {len(made.unexplained)}: {few(made.unexplained)}",
            "→ write above each what it is for, `# For a reviewer: …`, commit, and prepare again",
        ]
    if made.uncommitted:
        lines.append(f"Not committed in the checkout, so not in the entry: {few(made.uncommitted)}.")
    if not made.licensed:
        lines += [
            "LICENSE.md and NOTICE of the validators' repository are missing: it would be refused.",
            "→ prepare it with --upstream CHECKOUT, a checkout of that repository",
        ]
    lines += ["", "What makes an entry distinct:", *(f"- {one}" for one in DISTINCT)]
    lines += ["What does not:", *(f"- {one}" for one in NOT_DISTINCT)]
    lines += [
        "As it is now, this entry is a copy of every other that was prepared from the same commit: change "
        "what its trainer does, and commit that.",
        "",
        "Next:",
        f"→ god-miner tournament check {made.directory}{named}",
        "→ push it to a repository of your own, then set TRAINING_REPO_*_URL and _COMMIT",
    ]
    for line in lines:
        indent = "  " if line.startswith(("- ", "→ ")) else ""
        echo(textwrap.fill(line, 80, subsequent_indent=indent, break_long_words=False) if line else "")


def _settings() -> tuple[Settings | None, str]:
    try:
        return load_settings(), ""
    except ConfigError as error:
        return None, f"the settings cannot be used: {error.problems[0] if error.problems else error}"


def _check_data(entry: CheckedEntry, findings: list[RuleFinding]) -> dict[str, object]:
    return {
        "source": entry.source,
        "commit": entry.clone.commit,
        "default_head": entry.head_commit,
        "kinds": [str(one) for one in entry.kinds],
        "rules": [finding.as_dict() for finding in findings],
    }


def _print_findings(entry: CheckedEntry, findings: list[RuleFinding]) -> None:
    """One rule a row, of 80 columns at most: it is read from top to bottom."""
    from rich.table import Table
    from rich.text import Text

    console = terminal()
    console.width = min(console.width, 80)
    console.print(Text(f"{entry.clone.commit} of {entry.source}"))
    console.print(Text(f"for {', '.join(str(kind) for kind in entry.kinds)}\n"))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(f"{finding.rule}: ", "bold").append(finding.text, "not bold")
        for note in finding.notes:
            text.append(f"\n- {note}", "not bold")
        if finding.to_do:
            text.append(f"\n→ {finding.to_do}", "not bold cyan")
        state = str(finding.state)
        table.add_row(Text(str(finding.number)), Text(_SHOWN[state], _STYLES[state]), text)
    console.print(table)
    counts = {state: sum(finding.state == state for finding in findings) for state in _STYLES}
    console.print(
        Text(
            f"\n{counts['passed']} passed, {counts['failed']} failed, "
            f"{counts['unknown']} cannot be known here: do these by hand"
        )
    )
