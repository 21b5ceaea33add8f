"""The worth of an entry: its fee and GPUs against the weeks of a reign, all in TAO."""

from __future__ import annotations

from dataclasses import dataclass

from miner.tournament.odds.bracket import Placings

#: Weeks of a reign that are counted, unless the operator says otherwise.
WEEKS = 26


@dataclass(frozen=True, slots=True)
class Stakes:
    """The cost of an entry, and the prizes of its places."""

    cost: float
    #: The emission of this kind in a week, and the shares of the places, best first.
    weekly: float
    places: tuple[float, ...]
    #: The chance that a champion of this kind loses the title in a week.
    falls: float
    #: No reign counts for longer.
    weeks: int = WEEKS

    def place(self, number: int) -> float:
        """A week's prize of this place."""
        return self.weekly * self.places[number - 1] if number <= len(self.places) else 0.0

    @property
    def reign(self) -> float:
        """Weeks that a new champion is paid for, on average."""
        stays = 1.0 - self.falls
        return float(self.weeks) if stays >= 1 else (1 - stays**self.weeks) / self.falls


@dataclass(frozen=True, slots=True)
class Worth:
    """The result of an entry: its mean and its quantiles, in TAO."""

    expected: float
    low: float
    median: float
    high: float
    #: The chance not to lose money.
    pays: float
    #: An entry pays from this chance to win on, at as many second and third places; above 1 it never does.
    breaks_even: float


#: Of the spread that is shown.
LOW, HIGH = 0.05, 0.95


def worth(placings: Placings, stakes: Stakes) -> Worth:
    """Every result with its chance, exactly: only the places are simulated."""
    share = placings.share
    lost = 1.0 - share(placings.won) - share(placings.second) - share(placings.third)
    results = [
        (-stakes.cost, lost),
        (stakes.place(2) - stakes.cost, share(placings.second)),
        (stakes.place(3) - stakes.cost, share(placings.third)),
    ]
    stays, left = 1.0 - stakes.falls, share(placings.won)
    for week in range(1, stakes.weeks + 1):
        ends = left if week == stakes.weeks else left * stakes.falls
        results.append((week * stakes.place(1) - stakes.cost, ends))
        left *= stays
    results.sort()
    beside = share(placings.second) * stakes.place(2) + share(placings.third) * stakes.place(3)
    prize = stakes.reign * stakes.place(1)
    return Worth(
        expected=sum(value * chance for value, chance in results),
        low=_quantile(results, LOW),
        median=_quantile(results, 0.5),
        high=_quantile(results, HIGH),
        pays=sum(chance for value, chance in results if value >= 0),
        breaks_even=max(stakes.cost - beside, 0.0) / prize if prize > 0 else 2.0,
    )


def _quantile(results: list[tuple[float, float]], share: float) -> float:
    passed = 0.0
    for value, chance in results:
        passed += chance
        if passed >= share - 1e-12:
            return value
    return results[-1][0]
