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
    assert len({past.offer.task_id for past in offers}) == len(offers)


def test_arrivals_are_in_order_within_the_days_at_the_rate_asked_for(offers: list[HistoricalOffer]) -> None:
    assert [past.at for past in offers] == sorted(past.at for past in offers)
    assert 0 <= offers[0].at < offers[-1].at < 60 * 86_400
    assert len(offers) == pytest.approx(6000, rel=0.05)


def test_the_mix_of_types_is_the_validators(offers: list[HistoricalOffer]) -> None:
    seen = Counter(past.offer.task_type for past in offers)
    for task_type, share in TASK_MIX:
        assert seen[task_type] / len(offers) == pytest.approx(share, abs=0.02)


def test_hours_go_with_rows_and_models_with_types(offers: list[HistoricalOffer]) -> None:
    for past in offers:
        hours, rows = past.offer.hours_to_complete, past.rows
        if not past.offer.task_type.is_text:
            assert hours in (1, 2)
            assert 10 <= rows == (past.offer.ds_size or 0) <= 50
            continue
        assert any(low <= rows <= high and least <= hours <= most for low, high, least, most in DATASET_BINS)
        assert past.offer.ds_size == STATED_ROWS
        if past.offer.task_type.generates:
            assert (past.offer.model_params_count or 10**9) >= 10**9


def test_large_models_are_rare_and_some_counts_are_missing(offers: list[HistoricalOffer]) -> None:
    texts = [offer.offer for offer in offers if offer.offer.task_type.is_text]
    large = mean((offer.model_params_count or 0) >= 12 * 10**9 for offer in texts)
    assert large == pytest.approx(0.05, abs=0.02)
    assert mean(offer.model_params_count is None for offer in texts) == pytest.approx(0.05, abs=0.02)
