"""Offers and configuration on the operator's port: list and explain offers; show, check and save files; and
what other values would have answered."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse

from core.domain.hardware import Hardware, parse_gpus
from core.domain.tasks import TaskType
from miner.api.config_files import (
    ConfigFileList,
    ConfigFileText,
    EditedValue,
    FileKind,
    TextCheck,
    TextToCheck,
    TextToSave,
)
from miner.api.offers import BacktestReport, BacktestRequest, OfferDetails, OfferList
from miner.config_files.files import ConfigFiles
from miner.config_files.what_if import BacktestOrder, CheckOrder, TermsInForce, WhatIf
from miner.http.operator import MAX_ROW, Daemon, OperatorDaemon, operator_only
from miner.offers.past_offers import OfferFilter, find_stored_offer, stored_offers
from miner.offers.policy_runtime import PolicyRuntime
from miner.offers.views import offer_details, offer_summary

MAX_OFFERS_LISTED = 500
_DAY = 86_400.0
#: What a backtest is played on where nobody knows the GPUs and the policy names none.
_DEFAULT_GPUS = "4xH100"


def what_if_dependency(request: Request) -> WhatIf:
    what_if: WhatIf = request.app.state.what_if
    return what_if


Asked = Annotated[WhatIf, Depends(what_if_dependency)]
router = APIRouter(dependencies=[Depends(operator_only)])


@router.get("/offers")
async def list_offers(
    daemon: Daemon,
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

    return await daemon.store.read(query)


@router.get("/offers/{offer}")
async def explain_offer(offer: str, daemon: Daemon) -> OfferDetails:
    """Explain an offer, by number or by the task's id: every rule, every factor, and what would have to
    change."""

    def query(db: sqlite3.Connection) -> OfferDetails:
        return offer_details(find_stored_offer(db, offer))

    return await daemon.store.read(query)


@router.post("/backtest")
async def backtest(wanted: BacktestRequest, daemon: Daemon, what_if: Asked) -> BacktestReport:
    """Replay the offers of some days with other values in the policy in force: before and after. One at a
    time, in a process of its own; 429 meanwhile."""
    now = time.time()
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


# Configuration


def config_files(daemon: Daemon) -> ConfigFiles:
    return ConfigFiles(daemon.settings, daemon.policy_runtime)


Files = Annotated[ConfigFiles, Depends(config_files)]


@router.get("/config")
async def list_files(files: Files) -> ConfigFileList:
    """List every profile and policy that has a name, whose it is, and what is in force."""
    return await asyncio.to_thread(files.overview)


@router.get("/config/{kind}/{name}")
async def show_file(
    kind: FileKind, name: str, files: Files, subject: Annotated[str, Query(max_length=100)] = ""
) -> ConfigFileText:
    """Show the text, the values with all that it extends and their origins, and every key that there is."""
    return await asyncio.to_thread(files.show, kind, name, subject)


@router.post("/config/{kind}/{name}/check")
async def check_file(
    kind: FileKind, name: str, wanted: TextToCheck, daemon: Daemon, what_if: Asked
) -> TextCheck:
    """Check a text: problems by line, the difference from what is saved, and the edit's effects."""
    order = await _check_order(daemon, kind, name, wanted.text)
    return await what_if.check(order.model_copy(update={"effects": wanted.effects}), "check of a text")


@router.put("/config/{kind}/{name}", response_model=ConfigFileText)
async def save_file(
    kind: FileKind, name: str, wanted: TextToSave, daemon: Daemon, what_if: Asked, request: Request
) -> Response | ConfigFileText:
    """Save the operator's file and keep the former as `.bak`: 422 if it has mistakes, 409 if it has changed
    since it was read. Shipped files are never written."""
    saving: asyncio.Lock = request.app.state.saving
    async with saving:  # checked and written before another save begins
        files, text = config_files(daemon), wanted.text.rstrip() + "\n"
        await asyncio.to_thread(files.check_writable, kind, name)
        checked = await what_if.check(await _check_order(daemon, kind, name, text), "check of a save")
        if not checked.valid:
            return _refusal(name, checked)
        await asyncio.to_thread(files.save, kind, name, text, wanted.digest)
        what = f"{kind.value}/{name}.yaml was saved on the operator's port: {_edits_in_words(checked.edited)}"
        edited = [value.model_dump(mode="json") for value in checked.edited]
        await daemon.store.add_event("config_saved", text=what, edited=edited)
        # As every second: the reply says whether the file is in force.
        await daemon.reload_files()
        return await asyncio.to_thread(files.show, kind, name)


async def _check_order(daemon: OperatorDaemon, kind: FileKind, name: str, text: str) -> CheckOrder:
    """Make an order to check a text without its effects."""
    files = config_files(daemon)
    file = files.path(kind, name)
    return CheckOrder(
        kind=kind.value,
        name=name,
        file=str(file),
        directory=str(file.parent),
        text=text,
        saved=await asyncio.to_thread(files.saved_text, kind, name),
        effects=False,
        terms=terms_in_force(daemon.policy_runtime, daemon.fleet.inventory.installed),
        store_dir=str(daemon.settings.store_dir),
        now=time.time(),
    )


def _refusal(name: str, checked: TextCheck) -> Response:
    message = f"{name}.yaml is not saved: it has mistakes"
    problems = [problem.model_dump(mode="json") for problem in checked.problems]
    refused = {"error": "bad_config", "message": message, "problems": problems}
    return JSONResponse(refused, HTTPStatus.UNPROCESSABLE_ENTITY)


def _edits_in_words(edited: Sequence[EditedValue]) -> str:
    """`targets.lora_r 16 → 32, and 3 more`."""
    first = [f"{value.path} {_word(value.before)} → {_word(value.after)}" for value in edited[:5]]
    rest = [f"and {len(edited) - 5} more"] if len(edited) > 5 else []
    return ", ".join(first + rest) or "no value has changed"


def _word(value: Any) -> str:
    return "–" if value is None else str(value)[:60]
