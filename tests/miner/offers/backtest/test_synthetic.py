from __future__ import annotations

from collections import Counter
from statistics import mean

import pytest

from miner.offers.backtest.synthetic import DATASET_BINS, STATED_ROWS, TASK_MIX, synthetic_offers
from miner.offers.past_offers import HistoricalOffer

LONG = {"days": 60.0, "per_day": 100.0}


@pytest.fixture(scope="module")
def offers() -> list[HistoricalOffer]:
    return list(synthetic_offers(1, **LONG))


def test_the_same_seed_gives_the_same_offers_and_another_others(offers: list[HistoricalOffer]) -> None:
    assert list(synthetic_offers(1, **LONG)) == offers
    assert list(synthetic_offers(2, **LONG)) != offers
    assert len({one.offer.task_id for one in offers}) == len(offers)


def test_arrivals_are_in_order_within_the_days_at_the_rate_asked_for(offers: list[HistoricalOffer]) -> None:
    assert [one.at for one in offers] == sorted(one.at for one in offers)
    assert 0 <= offers[0].at < offers[-1].at < 60 * 86_400
    assert len(offers) == pytest.approx(6000, rel=0.05)


def test_the_mix_of_types_is_the_validators(offers: list[HistoricalOffer]) -> None:
    seen = Counter(one.offer.task_type for one in offers)
    for task_type, share in TASK_MIX:
        assert seen[task_type] / len(offers) == pytest.approx(share, abs=0.02)


def test_hours_go_with_rows_and_models_with_types(offers: list[HistoricalOffer]) -> None:
    for one in offers:
        hours, rows = one.offer.hours_to_complete, one.rows
        if not one.offer.task_type.is_text:
            assert hours in (1, 2)
            assert 10 <= rows == (one.offer.ds_size or 0) <= 50
            continue
        assert any(low <= rows <= high and least <= hours <= most for low, high, least, most in DATASET_BINS)
        assert one.offer.ds_size == STATED_ROWS
        if one.offer.task_type.generates:
            assert (one.offer.model_params_count or 10**9) >= 10**9


def test_large_models_are_rare_and_some_counts_are_missing(offers: list[HistoricalOffer]) -> None:
    texts = [one.offer for one in offers if one.offer.task_type.is_text]
    large = mean((one.model_params_count or 0) >= 12 * 10**9 for one in texts)
    assert large == pytest.approx(0.05, abs=0.02)
    assert mean(one.model_params_count is None for one in texts) == pytest.approx(0.05, abs=0.02)
