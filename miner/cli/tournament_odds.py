"""`god-miner tournament odds`: the chance to win a tournament, and what an entry is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from core.domain.wire import TournamentType
from miner.cli.options import AsJson, load_settings, read_json_object, with_options
from miner.cli.output import echo, echo_json

if TYPE_CHECKING:
    from core.domain.tournament_rules import TournamentRules
    from miner.settings import Settings
    from miner.tournament.odds.bracket import Chances
    from miner.tournament.odds.history import FieldFacts
    from miner.tournament.odds.report import EntryPrices, Odds
    from miner.tournament.public_api import Tournament

_SHARE = {"min": 0.0, "max": 1.0}


@dataclass(frozen=True)
class OddsOptions:
    """The options of `odds`."""

    p: Annotated[
        list[str] | None,
        typer.Option(
            "--p",
            metavar="[KIND=]P",
            help="Our chance to win a task of a kind from the champion; repeatable.",
        ),
    ] = None
    report: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Take chances from the JSON of spar, rehearse --against, eval or replay; repeatable.",
        ),
    ] = None
    draw: Annotated[
        list[str] | None,
        typer.Option(metavar="[KIND=]SHARE", help="The chance that a task is drawn; repeatable."),
    ] = None
    correlation: Annotated[
        float,
        typer.Option(min=0.0, max=0.95, help="Between our tasks, as far as we do not know how good we are."),
    ] = 0.0
    entrants: Annotated[
        int | None, typer.Option(min=0, max=256, help="Others that enter. Default: the median.")
    ] = None
    challenger_wins: Annotated[
        float | None, typer.Option(**_SHARE, help="Share of the boss's tasks that the best other wins.")
    ] = None
    falls: Annotated[
        float | None, typer.Option(**_SHARE, help="The chance that a champion falls in a week.")
    ] = None
    agreement: Annotated[
        float | None, typer.Option(**_SHARE, help="How alike two tasks rank the others: 0 to 1.")
    ] = None
    alpha_price: Annotated[float | None, typer.Option(min=0.0, help="TAO for one alpha of the subnet.")] = (
        None
    )
    fee: Annotated[float | None, typer.Option(min=0.0, help="TAO. Default: by the rules.")] = None
    gpu_hours: Annotated[float, typer.Option(min=0.0, help="GPU-hours of the preparation.")] = 0.0
    gpu_price: Annotated[
        float | None, typer.Option(min=0.0, help="USD for a GPU-hour. Default: GPU_PRICE_PER_HOUR.")
    ] = None
    tao_price: Annotated[float | None, typer.Option(min=0.01, help="USD for a TAO. Default: TAO_PRICE.")] = (
        None
    )
    weeks: Annotated[int, typer.Option(min=1, max=520, help="Weeks of a reign that count at most.")] = 26
    directory: Annotated[
        Path | None,
        typer.Option(
            "--from",
            exists=True,
            file_okay=False,
            help="What `field pull --past` saved. Default: its default.",
        ),
    ] = None
    brackets: Annotated[int, typer.Option(min=100, max=10_000_000, help="Brackets to simulate.")] = 100_000
    seed: Annotated[int, typer.Option(help="Of the simulation.")] = 0

    def chances(self) -> Chances:
        from miner.tournament.odds.bracket import Chances
        from miner.tournament.odds.reports import chances_in, mean_chances

        found = [one for file in self.report or () for one in chances_in(file, read_json_object(file))]
        for kind in dict.fromkeys(one.task for one in found if one.stand_in):
            echo(f"{kind}: measured with a tiny model or made-up data, which says little", err=True)
        win, draw = mean_chances(found)
        given, usual = _shares(self.p, "--p")
        drawn, all_drawn = _shares(self.draw, "--draw")
        if all_drawn is not None:
            raise typer.BadParameter("--draw: write KIND=SHARE")
        return Chances({**win, **given}, usual, {**draw, **drawn}, self.correlation)

    def money(self, rules: TournamentRules, settings: Settings) -> EntryPrices:
        from miner.tournament.odds.report import EntryPrices

        gpu_usd = settings.gpu_price_per_hour if self.gpu_price is None else self.gpu_price
        tao_usd = settings.tao_price if self.tao_price is None else self.tao_price
        if self.gpu_hours and (gpu_usd is None or not tao_usd):
            raise typer.BadParameter("--gpu-hours: name the prices by --gpu-price and --tao-price, in USD")
        fee = rules.fee_tao if self.fee is None else self.fee
        return EntryPrices(fee, self.gpu_hours, gpu_usd or 0.0, tao_usd, self.alpha_price, self.weeks)

    def facts(self, counted: FieldFacts) -> FieldFacts:
        """The counted figures, but for those that the operator names."""
        own = {
            name: value
            for name in ("entrants", "challenger_wins", "falls", "agreement")
            if (value := getattr(self, name)) is not None
        }
        return replace(counted, **own)


@with_options
def odds(
    options: OddsOptions,
    kind: Annotated[TournamentType, typer.Argument(help="Kind of tournament.")],
    backtest: Annotated[
        bool, typer.Option("--backtest", help="Only forecast past tournaments: how right would it have been?")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Simulate a tournament: our chance to win it, what an entry is worth in TAO, and whether to enter.

    Our chances against the champion come from reports or from --p. How strong the others are is a mean of
    what past tournaments show and of an assumption (docs/tournaments.md, The odds); the last table shows what
    other assumptions would change. Nothing is asked of the network. Exit code 1 if nothing can be
    forecast."""
    from core.domain.tournament_rules import TOURNAMENTS

    rules, settings = TOURNAMENTS[kind], load_settings()
    past = _past(options.directory or settings.data_dir / "tournament" / "field")
    if backtest:
        _backtest(past, rules, as_json)
        return
    found = _odds(options, rules, past, settings)
    if as_json:
        echo_json(found.as_dict())
        return
    from miner.tournament.odds.report import odds_lines

    for line in odds_lines(found):
        echo(line)


def _odds(
    options: OddsOptions, rules: TournamentRules, past: Sequence[Tournament], settings: Settings
) -> Odds:
    from miner.tournament.odds.history import by_date, field_facts, history_of, kind_share
    from miner.tournament.odds.report import odds_of

    history = history_of(by_date(past, rules.kind))
    boss = rules.round("boss")
    facts = options.facts(field_facts(history, sum(one.count for one in boss.tasks) if boss else 0))
    money, share = options.money(rules, settings), kind_share(past, rules.kind)
    return odds_of(
        rules, options.chances(), history, facts, money, share, brackets=options.brackets, seed=options.seed
    )


def _backtest(past: Sequence[Tournament], rules: TournamentRules, as_json: bool) -> None:
    from dataclasses import asdict

    from miner.tournament.odds.history import backtest
    from miner.tournament.odds.report import backtest_lines

    found = backtest(past, rules)
    if found is None:
        echo(
            f"fewer than two {rules.kind} tournaments that are over are saved: "
            "god-miner tournament field pull --past 12",
            err=True,
        )
        raise typer.Exit(1)
    if as_json:
        echo_json(asdict(found))
    else:
        for line in backtest_lines(found, rules):
            echo(line)


def _past(directory: Path) -> list[Tournament]:
    from miner.tournament.field.entries import read_tournaments

    found, problems = read_tournaments(directory) if directory.is_dir() else ([], [])
    for problem in problems:
        echo(problem, err=True)
    return found


def _shares(written: Sequence[str] | None, option: str) -> tuple[dict[str, float], float | None]:
    """`KIND=SHARE` for a kind, `SHARE` for all others."""
    found: dict[str, float] = {}
    usual = None
    for text in written or ():
        name, _, value = text.rpartition("=")
        try:
            share = float(value)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise typer.BadParameter(f"{option} {text}: write KIND=0.6, or 0.6 for all, between 0 and 1")
        if name:
            found[_known(name, option)] = share
        else:
            usual = share
    return found, usual


def _known(name: str, option: str) -> str:
    from miner.tournament.rules import TASKS

    if name not in TASKS:
        raise typer.BadParameter(f"{option} {name}: not a kind of task; known are {', '.join(TASKS)}")
    return name
