"""Laws of steps, fitted on points whose law is known."""

from __future__ import annotations

import pytest

from miner.tournament.field.laws import LawPoint, clock_law, laws_of, power_law


def test_a_power_law_is_found_again() -> None:
    points = [LawPoint(round(900 * (n / 24) ** 0.5), n) for n in (9, 16, 25, 36, 45)]
    law = power_law(points)
    assert (law.text, law.points) == ("900 · (n/24)^0.50", 5)
    assert law.off == pytest.approx(0, abs=0.002)


def test_a_law_of_the_clock_is_found_again() -> None:
    points = [LawPoint(round((3600 * hours - 500) / 1.5), 20, hours) for hours in (0.5, 0.75, 1.0, 1.5)]
    law = clock_law(points)
    assert law.text == "(3600·h − 500) / 1.500"
    assert law.off == pytest.approx(0, abs=0.002)


def test_one_point_is_called_one_point() -> None:
    found = laws_of("flux", [LawPoint(700, 13, 0.75, 1e-4, 0.07)])
    assert [law.text for law in found.laws] == [
        "one point: 700 steps at n 13",
        "one point: 700 steps at 0.75 h",
    ]
    assert found.lr == (1e-4, 1e-4, 1e-4)


def test_two_points_prove_nothing_of_a_law_with_two_parameters() -> None:
    law = power_law([LawPoint(400, 10), LawPoint(800, 40)])
    assert (law.points, law.off) == (2, None)


def test_points_at_one_place_have_a_span_and_no_law() -> None:
    law = clock_law([LawPoint(900, 20, 1.0), LawPoint(1200, 30, 1.0), LawPoint(1000, 40, 1.0)])
    assert law.text == "only at 1 h: 900 to 1,200 steps, median 1,000"
    assert law.off == pytest.approx(1 - 1000 / 1200)


def test_longer_tasks_with_fewer_steps_have_no_law_of_the_clock() -> None:
    law = clock_law([LawPoint(900, 20, 0.5), LawPoint(800, 20, 1.0), LawPoint(700, 20, 1.5)])
    assert law.text.startswith("no law of the clock")


def test_the_better_law_comes_first_and_unknown_figures_cost_only_their_own() -> None:
    points = [
        LawPoint(round(900 * (n / 24) ** 0.5), n, hours) for n, hours in ((9, 1.0), (20, 0.5), (40, 0.75))
    ]
    found = laws_of("z-image", [*points, LawPoint(5000)])
    assert (found.points, found.laws[0].points) == (4, 3)
    assert found.laws[0].text == "900 · (n/24)^0.50"
    assert found.lr is None
    assert power_law([LawPoint(5000)]) is None
