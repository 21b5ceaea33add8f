"""`god-miner policy backtest`: what would have been, had the policy been another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from miner.commands import completion
from miner.commands.chosen import gpus_here
from miner.commands.output import say_json, terminal

if TYPE_CHECKING:
    from core.hardware import Hardware
    from core.profile.load import LoadedProfile
    from miner.offers.backtest import Backtest, Run
    from miner.offers.history import Outcome
    from miner.offers.policies.load import LoadedPolicy
    from miner.offers.reading import StoredOffer
    from miner.offers.replay import Entry
    from miner.settings import Settings

DEFAULT_FLEET = "4xH100"


Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="A policy's name or path; several are compared. Unset: POLICY.",
        autocompletion=completion.policies,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="What if? Like hours.InstructTextTask=12; may be repeated."),
]
Profile = Annotated[
    str | None,
    typer.Option(
        help="Plan by this tuning profile. Unset: PROFILE, or where it is auto the policy's own.",
        autocompletion=completion.profiles,
    ),
]
Fleet = Annotated[
    str | None,
    typer.Option(
        help="On these GPUs, like 8xH100. Unset: for the policy in force this host's, if it has any; "
        "otherwise what the policy is made for."
    ),
]
Since = Annotated[
    str | None, typer.Option(help="Only offers from then on: 2d, 12h, or a date like 2025-10-01.")
]
OffersFile = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="Offers from this file instead of the books."),
]
OneOffer = Annotated[
    str | None, typer.Option(help="Explain what becomes of this one: its number, or its task's id.")
]
Dirs = Annotated[
    list[Path] | None,
    typer.Option("--dir", help="Look here for policies before POLICY_DIR."),
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs: every answer.")]


def backtest(
    policies: Policies = None,
    changes: Set = None,
    profile: Profile = None,
    fleet: Fleet = None,
    since: Since = None,
    jsonl: OffersFile = None,
    offer: OneOffer = None,
    directories: Dirs = None,
    as_json: AsJson = False,
) -> None:
    """Play the offers that came against another policy, profile or fleet: what would have been accepted, how
    busy the GPUs, what it was worth. With --set: before and after."""
    from core.hardware import Hardware, parse_gpus
    from miner.offers.policies.load import read_settings
    from miner.settings import load_settings

    settings = load_settings()
    here = None if policies else gpus_here(settings)
    loaded = _policies(policies, settings, directories or (), here)
    gpus = parse_gpus(fleet) if fleet else here and here.gpus
    gpus = gpus or parse_gpus(loaded[0].hardware or DEFAULT_FLEET)
    chosen, why = _profile(profile, settings, loaded, Hardware(gpus=gpus))
    if not as_json:
        typer.echo(f"on {gpus}, planned by profile {chosen.name}: {why}")
    test, stored = _offers(settings, loaded[0], chosen, Hardware(gpus=gpus), since, jsonl)
    runs = [test.run(policy.name, policy) for policy in loaded]
    if stored:
        runs.insert(0, test.told("as decided", [_entry(one) for one in stored]))
    if changes:
        extra = read_settings(changes)
        runs += [test.run(f"{one.name}, {' '.join(changes)}", one.changed(extra)) for one in loaded]
    if offer is not None:
        _explain(runs, offer, stored, as_json)
    else:
        _show(runs, chosen.name, as_json)


def _profile(
    name: str | None, settings: Settings, policies: Sequence[LoadedPolicy], hardware: Hardware
) -> tuple[LoadedProfile, str]:
    """One for all policies, and why. `ConfigError` for one that is made for other machinery."""
    from core.errors import ConfigError, Problem
    from core.hardware import parse_gpus
    from core.profile.load import load_profile
    from miner.offers.policies.choice import Chosen, profile_in_force

    first = policies[0]
    chosen = Chosen(name, "--profile") if name else profile_in_force(settings, first, hardware)
    loaded = load_profile(chosen.name, (settings.profile_dir,))
    if loaded.hardware and parse_gpus(loaded.hardware).is_cpu is not hardware.gpus.is_cpu:
        rule = (
            f"is made for {loaded.hardware}, and {first.name} is played on {hardware.gpus} ({chosen.why}); "
            f"choose another with --profile, like {first.profile or 'h100x4'}"
        )
        raise ConfigError("backtest", [Problem("profile", loaded.name, rule)])
    others = {one.name: one.profile for one in policies if one.profile not in (None, loaded.name)}
    named = "; ".join(f"policy {policy} names {profile}" for policy, profile in others.items())
    return loaded, f"{chosen.why}; {named}" if named else chosen.why


def _policies(
    names: Sequence[str] | None, settings: Settings, directories: Sequence[Path], here: Hardware | None
) -> list[LoadedPolicy]:
    """What the environment sets on top holds for the policy in force, not for one that is asked about."""
    from miner.offers.policies.choice import on_top, policy_in_force
    from miner.offers.policies.load import load_policy

    places = (*directories, settings.policy_dir)
    if names:
        return [load_policy(name, places) for name in names]
    return [load_policy(policy_in_force(settings, here).name, places, on_top(settings))]


def _offers(
    settings: Settings,
    policy: LoadedPolicy,
    profile: LoadedProfile,
    hardware: Hardware,
    since: str | None,
    jsonl: Path | None,
) -> tuple[Backtest, list[StoredOffer]]:
    from miner.commands.moments import moment
    from miner.offers.backtest import Backtest
    from miner.offers.offered import from_lines

    now = time.time()
    start = 0.0 if since is None else moment(since, now)
    if jsonl is not None:
        with jsonl.open(encoding="utf-8") as lines:
            offers = [one for one in from_lines(lines, jsonl.name) if one.at >= start]
        return Backtest(offers, profile, hardware, policy.terms), []
    stored, outcomes = _from_books(settings, start, now)
    offers = [one.offered for one in stored]
    return Backtest(offers, profile, hardware, policy.terms, outcomes), stored


def _from_books(settings: Settings, start: float, now: float) -> tuple[list[StoredOffer], list[Outcome]]:
    from miner.offers.reading import reading, stored_offers
    from miner.store.outcomes import outcomes

    with reading(settings.data_dir) as connection:
        return stored_offers(connection, since=start), outcomes(connection, now)


def _entry(stored: StoredOffer) -> Entry:
    from miner.offers.replay import Entry

    return Entry(stored.offered, stored.decision, stored.decision.value)


def _show(runs: Sequence[Run], profile: str, as_json: bool) -> None:
    from miner.backtest_view import as_data, pages
    from miner.offers.backtest import differences

    if as_json:
        say_json([{**as_data(run), "profile": profile} for run in runs])
        return
    changes = differences(runs[-2], runs[-1]) if len(runs) > 1 else []
    console = terminal()
    for page in pages(runs, changes):
        console.print(page)


def _explain(runs: Sequence[Run], which: str, stored: Sequence[StoredOffer], as_json: bool) -> None:
    """What each run made of one offer, with all that it had accepted before."""
    from miner.decision_view import as_data, heading
    from miner.decision_view import pages as decision_pages

    found = [(run.summary.name, _find(run, which, stored)) for run in runs]
    if as_json:
        data = {name: as_data(entry.offered.offer, entry.decision) for name, entry in found}
        say_json(data)
        return
    console = terminal()
    console.print(heading(found[0][1].offered.offer))
    for name, entry in found:
        console.print(f"\n{name}", style="bold underline")
        for page in decision_pages(entry.offered.offer, entry.decision):
            console.print(page)


def _find(run: Run, which: str, stored: Sequence[StoredOffer]) -> Entry:
    from miner.offers.reading import NoSuchOffer

    task_id = next((one.offer.task_id for one in stored if str(one.number) == which), which)
    for entry in reversed(run.entries):
        if entry.offered.offer.task_id == task_id:
            return entry
    raise NoSuchOffer(f"no offer with the number or task id {which!r} is among those that were played")
