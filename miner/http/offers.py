"""Offers on the operator's port: list, explain, and what another policy would have answered."""

from __future__ import annotations

import sqlite3
import time
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from core.domain.hardware import Hardware, parse_gpus
from core.domain.tasks import TaskType
from miner.api.offers import BacktestReport, BacktestRequest, OfferDetails, OfferList
from miner.config_files.what_if import BacktestOrder, TermsInForce, WhatIf
from miner.http.operator import MAX_ROW, operator_only
from miner.offers.past_offers import OfferFilter, find_stored_offer, stored_offers
from miner.offers.policy_runtime import PolicyRuntime
from miner.offers.views import offer_details, offer_summary

MAX_OFFERS_LISTED = 500
_DAY = 86_400.0
#: What a backtest is played on where nobody knows the GPUs and the policy names none.
_DEFAULT_GPUS = "4xH100"


def build_offers_router() -> APIRouter:
    router = APIRouter(dependencies=[Depends(operator_only)])
    router.add_api_route("/offers", list_offers, methods=["GET"])
    router.add_api_route("/offers/{offer}", explain_offer, methods=["GET"])
    router.add_api_route("/backtest", backtest, methods=["POST"])
    return router


async def list_offers(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_OFFERS_LISTED)] = 50,
    before: Annotated[int | None, Query(ge=0, le=MAX_ROW)] = None,
    accepted: bool | None = None,
    task_type: TaskType | None = None,
    q: Annotated[str, Query(max_length=200)] = "",
) -> OfferList:
    """List offers, newest first. `next` is the value of `before` for earlier ones; null at the end."""

    def query(db: sqlite3.Connection) -> OfferList:
        wanted = OfferFilter(
            before=before, accepted=accepted, task_type=task_type, text=q.strip(), most=limit
        )
        rows = [offer_summary(offer) for offer in reversed(stored_offers(db, wanted))]
        return OfferList(offers=rows, next=rows[-1].id if len(rows) == limit else None)

    return await request.app.state.daemon.store.read(query)  # type: ignore[no-any-return]


async def explain_offer(offer: str, request: Request) -> OfferDetails:
    """Explain an offer, by number or by the task's id: every rule, every factor, and what would have to
    change."""

    def query(db: sqlite3.Connection) -> OfferDetails:
        return offer_details(find_stored_offer(db, offer))

    return await request.app.state.daemon.store.read(query)  # type: ignore[no-any-return]


async def backtest(wanted: BacktestRequest, request: Request) -> BacktestReport:
    """Replay the offers of some days with other values in the policy in force: before and after."""
    daemon, now = request.app.state.daemon, time.time()
    what_if: WhatIf = request.app.state.what_if
    order = BacktestOrder(
        store_dir=str(daemon.settings.store_dir),
        since=now - wanted.days * _DAY,
        now=now,
        terms=terms_in_force(daemon.policy_runtime, daemon.fleet.inventory.installed),
        changes=wanted.overrides,
    )
    comparison = await what_if.backtest(order)
    return BacktestReport(**dict(comparison), days=wanted.days, overrides=wanted.overrides)


def terms_in_force(runtime: PolicyRuntime, installed: Hardware | None) -> TermsInForce:
    """Return what decides at this moment; without known GPUs, on those that the policy is made for."""
    gpus = runtime.policy.hardware or _DEFAULT_GPUS
    return TermsInForce.of(runtime.policy, runtime.profile, installed or Hardware(gpus=parse_gpus(gpus)))
