"""`god-miner policy backtest` and `policy generate`: replay past or made-up offers under another policy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from core.domain.errors import ConfigError, Problem
from miner.cli import options
from miner.cli.options import DEFAULT_GPUS, load_settings, local_hardware, parse_time
from miner.cli.output import echo, echo_json, print_pages, terminal

if TYPE_CHECKING:
    from core.domain.hardware import Hardware
    from core.profile.resolve import LoadedProfile
    from miner.offers.backtest.replay import BacktestRun, PastOffers, ReplayedOffer
    from miner.offers.past_offers import HistoricalOffer, StoredOffer
    from miner.offers.policies.load import LoadedPolicy
    from miner.settings import Settings


Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="Name or path of a policy (repeatable, to compare). Default: POLICY.",
        autocompletion=options.complete_policies,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a value, e.g. hours.InstructTextTask=12 (repeatable), and compare."),
]
Profile = Annotated[
    str | None,
    typer.Option(
        help="Tuning profile to plan with. Default: PROFILE, or with PROFILE=auto the policy's own.",
        autocompletion=options.complete_profiles,
    ),
]
Fleet = Annotated[
    str | None,
    typer.Option(
        help="GPUs, e.g. 8xH100. Default: for the policy in force this host's, if any; otherwise those"
        " the policy is made for."
    ),
]
Since = Annotated[
    str | None, typer.Option(help="Start time: 2d or 12h ago, or a date like 2025-10-01. Default: all.")
]
OffersFile = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="File of offers, as JSON lines. Default: the store."),
]
OneOffer = Annotated[str | None, typer.Option(help="Explain this offer only: its number, or its task's id.")]
Dirs = Annotated[
    list[Path] | None,
    typer.Option("--dir", help="Directory to search before POLICY_DIR (repeatable)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, with every answer.")]


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
    """Replay past offers against another policy, profile or fleet: accepted offers, GPU use, value.

    With --set: before and after."""
    from core.domain.hardware import Hardware, parse_gpus
    from miner.offers.backtest.replay import Backtest, PastOffers
    from miner.offers.policies.load import parse_overrides

    settings = load_settings()
    here = None if policies else local_hardware(settings)
    loaded = _policies(policies, settings, directories or (), here)
    gpus = parse_gpus(fleet) if fleet else here and here.gpus
    gpus = gpus or parse_gpus(loaded[0].hardware or DEFAULT_GPUS)
    chosen, why = _profile_for(profile, settings, loaded, Hardware(gpus=gpus))
    if not as_json:
        typer.echo(f"on {gpus}, planned by profile {chosen.name}: {why}")
    now, hardware = time.time(), Hardware(gpus=gpus)
    start = 0.0 if since is None else parse_time(since, now)
    if jsonl is None:
        past = _past_offers(settings, start, now)
        test = past.backtest(chosen, hardware, loaded[0].terms)
    else:
        past = PastOffers()
        test = Backtest(_offers_in_file(jsonl, start), chosen, hardware, loaded[0].terms)
    runs = [test.run(policy.name, policy) for policy in loaded]
    if past.stored:
        runs.insert(0, past.as_decided(test))
    if changes:
        extra = parse_overrides(changes)
        what = " ".join(changes)
        runs += [test.run(f"{policy.name}, {what}", policy.with_overrides(extra)) for policy in loaded]
    if offer is not None:
        _explain_offer(runs, offer, past.stored, as_json)
    else:
        _print_runs(runs, chosen.name, as_json)


def _profile_for(
    name: str | None, settings: Settings, policies: Sequence[LoadedPolicy], hardware: Hardware
) -> tuple[LoadedProfile, str]:
    """Return one profile for all policies, and why. Raise `ConfigError` if it is made for other hardware."""
    from core.domain.hardware import parse_gpus
    from core.profile.resolve import load_profile
    from miner.offers.policies.load import ChosenName, active_profile_name

    first = policies[0]
    chosen = ChosenName(name, "--profile") if name else active_profile_name(settings, first, hardware)
    loaded = load_profile(chosen.name, (settings.profile_dir,))
    if loaded.hardware and parse_gpus(loaded.hardware).is_cpu is not hardware.gpus.is_cpu:
        rule = (
            f"is made for {loaded.hardware}, and {first.name} is played on {hardware.gpus} ({chosen.why}); "
            f"choose another with --profile, like {first.profile or 'h100x4'}"
        )
        raise ConfigError("backtest", [Problem("profile", loaded.name, rule)])
    others = {policy.name: policy.profile for policy in policies if policy.profile not in (None, loaded.name)}
    named = "; ".join(f"policy {policy} names {profile}" for policy, profile in others.items())
    return loaded, f"{chosen.why}; {named}" if named else chosen.why


def _policies(
    names: Sequence[str] | None, settings: Settings, directories: Sequence[Path], here: Hardware | None
) -> list[LoadedPolicy]:
    """Load the policies; overrides from the environment apply to the policy in force only."""
    from miner.offers.policies.load import active_policy_name, load_policy, settings_overrides

    places = (*directories, settings.policy_dir)
    if names:
        return [load_policy(name, places) for name in names]
    return [load_policy(active_policy_name(settings, here).name, places, settings_overrides(settings))]


def _past_offers(settings: Settings, start: float, now: float) -> PastOffers:
    from miner.offers.backtest.replay import PastOffers
    from miner.offers.past_offers import OfferFilter
    from miner.store.database import open_store

    with open_store(settings.store_dir) as connection:
        return PastOffers.read(connection, OfferFilter(since=start), now)


def _offers_in_file(file: Path, start: float) -> list[HistoricalOffer]:
    from miner.offers.past_offers import read_offer_lines

    with file.open(encoding="utf-8") as lines:
        return [offer for offer in read_offer_lines(lines, file.name) if offer.at >= start]


def _print_runs(runs: Sequence[BacktestRun], profile: str, as_json: bool) -> None:
    from miner.cli.render.offers import backtest_pages
    from miner.offers.backtest.replay import decision_changes
    from miner.offers.views import policy_backtest

    if as_json:
        echo_json([{**policy_backtest(run).model_dump(mode="json"), "profile": profile} for run in runs])
        return
    changes = decision_changes(runs[-2], runs[-1]) if len(runs) > 1 else []
    print_pages(backtest_pages(runs, changes))


def _explain_offer(
    runs: Sequence[BacktestRun], which: str, stored: Sequence[StoredOffer], as_json: bool
) -> None:
    """Explain one offer in each run, given everything that the run had accepted before."""
    from miner.cli.render.offers import decision_pages, offer_heading
    from miner.offers.views import decision_details

    entries = [(run.summary.name, _find_entry(run, which, stored)) for run in runs]
    if as_json:
        data = {name: decision_details(entry.historical.offer, entry.decision) for name, entry in entries}
        echo_json(data)
        return
    console = terminal()
    console.print(offer_heading(entries[0][1].historical.offer))
    for name, entry in entries:
        console.print(f"\n{name}", style="bold underline")
        print_pages(decision_pages(entry.historical.offer, entry.decision))


def _find_entry(run: BacktestRun, which: str, stored: Sequence[StoredOffer]) -> ReplayedOffer:
    from miner.offers.past_offers import NoSuchOffer

    task_id = next((offer.offer.task_id for offer in stored if str(offer.number) == which), which)
    for entry in reversed(run.entries):
        if entry.historical.offer.task_id == task_id:
            return entry
    raise NoSuchOffer(f"no offer with the number or task id {which!r} is among those that were played")


def generate(
    days: Annotated[float, typer.Option(min=0.01, max=366, help="Days to cover.")] = 7,
    per_day: Annotated[
        float, typer.Option(min=0.01, max=100_000, help="Mean number of offers per day.")
    ] = 60,
    seed: Annotated[int, typer.Option(help="Seed; the same seed gives the same offers.")] = 1,
    start: Annotated[str, typer.Option(help="First day (UTC), e.g. 2025-10-01.")] = "2025-10-01",
    write: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File to write. Default: the terminal.")
    ] = None,
) -> None:
    """Generate offers as JSON lines, drawn as validators draw them, to try a policy on.

    How often a miner is asked is not known: say it with --per-day."""
    from datetime import UTC, datetime

    from miner.offers.backtest.synthetic import synthetic_offers
    from miner.offers.past_offers import offer_to_line

    try:
        begins = datetime.fromisoformat(start)
    except ValueError as error:
        raise ConfigError("generate", [Problem("--start", start, str(error))]) from None
    at = (begins if begins.tzinfo else begins.replace(tzinfo=UTC)).timestamp()
    lines = (offer_to_line(offer) for offer in synthetic_offers(seed, days=days, per_day=per_day, start=at))
    if write is None:
        for line in lines:
            echo(line)
        return
    text = "".join(f"{line}\n" for line in lines)
    write.write_text(text, encoding="utf-8")
    echo(f"wrote {write}: {text.count(chr(10))} offers", err=True)
