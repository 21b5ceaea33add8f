"""A stand-in for the stack that validators know: FastAPI, one dependency per check, substrate-interface.

Written from the facts of the protocol, to compare with on the same machine in the same run. What costs it
time is kept as it is there: two plain `def` dependencies per offer, which hand out the configuration and
the worker (a hop to the thread pool each), header parameters, a keypair built and asked per request, nonces
and stakes in dictionaries, and `uvicorn.run` with its own defaults. It checks less than we do and stores
nothing. At log level info it writes what the real one writes: two lines of its own and uvicorn's.

    python -m benchmarks.reference_stack PORT STAKES_JSON [warning|info]
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import uvicorn
from fastapi import Depends, FastAPI, Header, HTTPException, Request
from pydantic import BaseModel
from substrateinterface import Keypair

log = logging.getLogger("reference")

LOG_FORMAT = "%(asctime)s.%(msecs)03d | %(levelname)-8s | %(name)s:%(funcName)s:%(lineno)d - %(message)s"
WINDOW_NS = 120_000_000_000
KEPT_S = 120.0
MIN_STAKE = 1000.0


class ReferenceTaskType(StrEnum):
    INSTRUCT = "InstructTextTask"
    IMAGE = "ImageTask"
    DPO = "DpoTask"
    GRPO = "GrpoTask"
    CHAT = "ChatTask"


class Offer(BaseModel):
    ds_size: int | None = None
    model: str
    hours_to_complete: float
    task_id: str
    task_type: ReferenceTaskType
    model_params_count: int | None = None


class Answer(BaseModel):
    message: str
    accepted: bool


@dataclass
class State:
    """State that the dependencies share: known hotkeys and used nonces."""

    stakes: dict[str, float]
    nonces: dict[str, float] = field(default_factory=dict)

    def take(self, nonce: str) -> bool:
        if nonce in self.nonces:
            return False
        try:
            stamp = int(nonce.split("_")[0])
        except ValueError:
            return False
        if stamp > 10**20:
            return False
        self.nonces[nonce] = time.time() + KEPT_S
        return abs(time.time_ns() - stamp) <= WINDOW_NS


@lru_cache
def _state() -> State:
    return State(json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))


def get_state() -> State:
    return _state()


@dataclass
class Worker:
    """Stand-in for the training."""

    busy_until: float | None = None


@lru_cache
def _worker() -> Worker:
    return Worker()


def get_worker() -> Worker:
    return _worker()


async def check_stake(
    state: Annotated[State, Depends(get_state)],
    validator_hotkey: Annotated[str, Header(alias="validator-hotkey")],
) -> None:
    stake = state.stakes.get(validator_hotkey)
    if stake is None:
        raise HTTPException(403, "Hotkey not found in metagraph")
    if stake < MIN_STAKE:
        raise HTTPException(403, f"Insufficient stake: {stake}")


async def check_signature(
    request: Request,
    state: Annotated[State, Depends(get_state)],
    validator_hotkey: Annotated[str, Header(alias="validator-hotkey")],
    miner_hotkey: Annotated[str, Header(alias="miner-hotkey")],
    nonce: Annotated[str, Header()],
    signature: Annotated[str, Header()],
) -> None:
    if not state.take(nonce):
        raise HTTPException(401, "The nonce is not valid")
    digest = hashlib.sha256(await request.body()).hexdigest()
    if not is_signed(f"{nonce}:{miner_hotkey}:{digest}", signature, validator_hotkey):
        raise HTTPException(401, "The signature is not valid")


def is_signed(message: str, signature: str, hotkey: str) -> bool:
    try:
        return bool(Keypair(ss58_address=hotkey).verify(message, signature))
    except ValueError:
        return False


async def task_offer(
    offer: Offer,
    _state: Annotated[State, Depends(get_state)],
    worker: Annotated[Worker, Depends(get_worker)],
) -> Answer:
    log.info("An offer arrived")
    if worker.busy_until is not None and worker.busy_until > time.time():
        return Answer(message="There is another job", accepted=False)
    if offer.hours_to_complete > 12:
        return Answer(message="This takes too long", accepted=False)
    log.info("The offer is accepted")
    return Answer(message=f"Yes, I take {offer.task_id}", accepted=True)


async def health() -> dict[str, str]:
    return {"status": "ok"}


def build() -> FastAPI:
    app = FastAPI()
    checks = [Depends(check_stake), Depends(check_signature)]
    app.add_api_route("/task_offer/", task_offer, methods=["POST"], dependencies=checks)
    app.add_api_route("/task_offer_image/", task_offer, methods=["POST"], dependencies=checks)
    app.add_api_route("/healthz", health)
    return app


if __name__ == "__main__":
    level = sys.argv[3] if len(sys.argv) > 3 else "warning"
    logging.basicConfig(
        stream=sys.stdout,
        format="%(asctime)s.%(msecs)03d | %(levelname)-8s | %(name)s:%(funcName)s:%(lineno)d - %(message)s",
    )
    log.setLevel(level.upper())
    uvicorn.run(build(), host="127.0.0.1", port=int(sys.argv[1]), log_level=level)
