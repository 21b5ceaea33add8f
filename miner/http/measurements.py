"""Measurements on the operator's port: the last hour from memory, minutes and hours from the store."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Query, Request, Response

from core.domain.units import MetricUnit
from miner.api.samples import (
    GPU_NUMBERS,
    HIGHEST,
    HOST_NUMBERS,
    ROLLUP_COLUMNS,
    FleetSamples,
    GpuHistory,
    GpuSample,
    HostSample,
    SampledNumber,
)
from miner.fleet.sampler import GpuSampler
from miner.fleet.samples import KEPT_SECONDS, SampleHistory, SampleT
from miner.http.operator import operator_only
from miner.store.samples import HOUR, MINUTE, rollups
from miner.store.store import Store

#: Points of one series; more could not be distinguished in a chart.
MAX_POINTS = 360
#: A longer time is answered by the hour.
MAX_HOURS_OF_MINUTES = 6.0
#: 6,000 rows of eight GPUs; a year of them would be 30 MB, all of it in memory.
MAX_HOURS = 31.0 * 24

#: A row's values; `asdict` takes five times as long.
_values = attrgetter(*ROLLUP_COLUMNS)


class MeasuringDaemon(Protocol):
    """The part of the daemon that measures."""

    @property
    def samples(self) -> SampleHistory: ...

    @property
    def sampler(self) -> GpuSampler: ...

    @property
    def store(self) -> Store: ...

    def clock(self) -> float: ...


def measurements_dependency(request: Request) -> MeasuringDaemon:
    daemon: MeasuringDaemon = request.app.state.daemon
    return daemon


Measured = Annotated[MeasuringDaemon, Depends(measurements_dependency)]


def build_measurements_router() -> APIRouter:
    router = APIRouter(dependencies=[Depends(operator_only)])
    router.add_api_route("/samples", show_samples, methods=["GET"], response_model=FleetSamples)
    router.add_api_route("/samples/history", show_history, methods=["GET"], response_model=GpuHistory)
    return router


async def show_samples(
    daemon: Measured, seconds: Annotated[float, Query(gt=0, le=KEPT_SECONDS)] = KEPT_SECONDS
) -> Response:
    """Show the measurements of GPUs and host in the last seconds."""
    history, since = daemon.samples, daemon.clock() - seconds
    gpus = []
    for gpu in history.gpus:
        gpus.append(f"{_text(gpu)}:{_text(_gpu_series(history.since(gpu, since)))}")
        await asyncio.sleep(0)  # an hour of one GPU takes 4 ms: requests of validators go in between
    head = {
        "interval_s": daemon.sampler.interval,
        "problem": daemon.sampler.problem,
        "host": _host_series(history.host_since(since)),
    }
    return _json(f'{_text(head)[:-1]},"gpus":{{{",".join(gpus)}}}}}')


async def show_history(
    daemon: Measured, hours: Annotated[float, Query(gt=0, le=MAX_HOURS)] = 24.0
) -> Response:
    """Show the minutes or hours of each GPU, from the store."""
    period = MINUTE if hours <= MAX_HOURS_OF_MINUTES else HOUR
    since = daemon.clock() - hours * HOUR

    def query(db: sqlite3.Connection) -> Response:
        gpus: dict[str, list[dict[str, Any]]] = {}
        for row in rollups(db, period, since - period):
            gpus.setdefault(row.gpu, []).append(dict(zip(ROLLUP_COLUMNS, _values(row), strict=True)))
        return _json(_text({"period_s": period, "gpus": gpus}))

    return await daemon.store.read(query)


def _gpu_series(samples: Sequence[GpuSample]) -> dict[str, Any]:
    newest = samples[-1] if samples else None
    return {
        **_thinned(samples, GPU_NUMBERS),
        "throttle": newest and newest.throttle,
        "ecc_errors": newest and newest.ecc_errors,
        "xids": [xid for sample in samples for xid in sample.xids],
        "power_limit_watts": newest and newest.power_limit_watts,
        "memory_total": newest and newest.memory_total,
    }


def _host_series(samples: Sequence[HostSample]) -> dict[str, Any]:
    newest = samples[-1] if samples else None
    return {
        **_thinned(samples, HOST_NUMBERS),
        "disk_free_bytes": newest and newest.disk_free_bytes,
        "disk_free_share": newest and newest.disk_free_share,
    }


def _thinned(samples: Sequence[SampleT], numbers: Iterable[SampledNumber]) -> dict[str, Any]:
    """Each series with at most `MAX_POINTS` points, each of as many samples, up to the newest: of some the
    highest value, of others the newest."""
    size = -(-len(samples) // MAX_POINTS) or 1
    kept = samples[len(samples) % size :]
    thinned: dict[str, Any] = {"at": [round(sample.at, 1) for sample in kept[size - 1 :: size]]}
    for number in numbers:
        if number.series:
            values = [getattr(sample, number.name) for sample in kept]
            if number.unit is MetricUnit.SHARE:
                values = [None if share is None else round(share, 4) for share in values]
            parts = [values[place::size] for place in range(size)]
            has_peaks = number.column in HIGHEST and size > 1
            thinned[number.series] = list(map(_highest, *parts)) if has_peaks else parts[-1]
    return thinned


def _highest(*values: float | None) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _text(value: Any) -> str:
    """FastAPI's own encoder would hold the event loop four times as long."""
    return json.dumps(value, separators=(",", ":"))


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")
