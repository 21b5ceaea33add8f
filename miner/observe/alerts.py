"""Alerts for the operator. A new kind is a line in `AlertKind`, a new channel a call in `Alerts`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Protocol

from core.domain.errors import GodMinerError
from miner.observe.metrics import Metrics

log = logging.getLogger(__name__)


class AlertKind(StrEnum):
    """Every kind of alert. Values are stored with events and label a metric: they never change."""

    # The host and its GPUs
    CLOCK_JUMPED = "clock_jumped"
    FLEET_FILE_PROBLEM = "fleet_file_problem"
    GPU_OUT = "gpu_out"
    GPU_BACK = "gpu_back"
    INVENTORY_UNREADABLE = "inventory_unreadable"
    INVENTORY_RECOVERED = "inventory_recovered"
    HOTKEY_LOCKED = "hotkey_locked"

    # The chain
    CHAIN = "chain"
    WRONG_CHAIN = "wrong_chain"
    NO_SUCH_SUBNET = "no_such_subnet"
    BAD_NODES_FILE = "bad_nodes_file"
    METAGRAPH_STALE = "metagraph_stale"
    METAGRAPH_RECOVERED = "metagraph_recovered"

    # Policies and profiles
    POLICY_PROBLEM = "policy_problem"
    POLICY_NOT_IN_FORCE = "policy_not_in_force"
    PROFILE_PROBLEM = "profile_problem"
    PROFILE_NOT_IN_FORCE = "profile_not_in_force"
    ALERTS_PROBLEM = "alerts_problem"
    FILES_HANG = "files_hang"

    # Engines
    NO_ENGINE = "no_engine"
    ENGINE_GONE = "engine_gone"
    ENGINE_CANNOT_TRAIN = "engine_cannot_train"
    ENGINE_BACK = "engine_back"

    # Jobs
    JOBS = "jobs"
    ATTEMPT_LOST = "attempt_lost"
    BAD_SUBMISSION = "bad_submission"
    GPU_LOST = "gpu_lost"
    JOB_BUG = "job_bug"
    JOB_FAILED = "job_failed"
    JOB_HUNG = "job_hung"
    JOB_MISNAMED = "job_misnamed"
    # A step that has failed several times: `job_` and its `EndReason`, one for each that is waited out.
    JOB_NETWORK = "job_network"
    JOB_RATE_LIMITED = "job_rate_limited"
    JOB_HUB_REFUSED = "job_hub_refused"
    JOB_DISK_FULL = "job_disk_full"
    JOB_ENGINE_GONE = "job_engine_gone"
    JOB_NO_GPU = "job_no_gpu"
    JOB_PREEMPTED = "job_preempted"
    JOB_NOT_STARTED = "job_not_started"

    @property
    def is_good_news(self) -> bool:
        """Something works again: noted, but no alarm."""
        return self in _GOOD_NEWS


_GOOD_NEWS = frozenset(
    {
        AlertKind.GPU_BACK,
        AlertKind.INVENTORY_RECOVERED,
        AlertKind.METAGRAPH_RECOVERED,
        AlertKind.ENGINE_BACK,
    }
)

#: What good news brings to an end.
ENDED_BY: Mapping[AlertKind, frozenset[AlertKind]] = {
    AlertKind.GPU_BACK: frozenset({AlertKind.GPU_OUT}),
    AlertKind.INVENTORY_RECOVERED: frozenset({AlertKind.INVENTORY_UNREADABLE}),
    AlertKind.METAGRAPH_RECOVERED: frozenset(
        {AlertKind.METAGRAPH_STALE, AlertKind.CHAIN, AlertKind.WRONG_CHAIN, AlertKind.NO_SUCH_SUBNET}
    ),
    AlertKind.ENGINE_BACK: frozenset(
        {AlertKind.NO_ENGINE, AlertKind.ENGINE_GONE, AlertKind.ENGINE_CANNOT_TRAIN}
    ),
}

#: Who else is notified of an alert: the kind, the text, and the GPU if any. Must not fail or wait.
AlertListener = Callable[[AlertKind, str, str | None], None]
#: How the rest of the daemon raises an alert: the kind, and a text for people.
SendAlert = Callable[[AlertKind, str], None]


class EventRecorder(Protocol):
    """The part of the store that alerts need."""

    def add_event(self, kind: str, task_id: str | None = None, **data: Any) -> asyncio.Future[None]: ...


class Alerts:
    """Count, log and store alerts. Raising one never fails and never waits. Threads may raise them too, once
    `loop` is set."""

    def __init__(self, metrics: Metrics, events: EventRecorder) -> None:
        self._metrics = metrics
        self._events = events
        self._listeners: list[AlertListener] = []
        #: The daemon's event loop.
        self.loop: asyncio.AbstractEventLoop | None = None

    def add_listener(self, listener: AlertListener) -> None:
        self._listeners.append(listener)

    def __call__(self, kind: AlertKind, text: str, gpu: str | None = None) -> None:
        if self.loop is not None and not _runs_here(self.loop):
            with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has ended
                self.loop.call_soon_threadsafe(self, kind, text, gpu)
            return
        data: dict[str, object] = {"gpu": gpu} if gpu else {}
        if kind.is_good_news:
            log.info("%s: %s", kind, text)
        else:
            self._metrics.alerts.labels(kind).inc()
            log.warning("alert %s: %s", kind, text)
            data["alert"] = True
        try:
            self._events.add_event(kind, None, text=text, **data).add_done_callback(_log_if_unsaved)
        except GodMinerError:  # the store is not open yet, closed already, or its disk is full
            log.debug("the alert %s is not stored", kind)
        for listener in self._listeners:
            try:
                listener(kind, text, gpu)
            except Exception:  # whoever raises an alert has other things to do
                log.exception("a listener failed at the alert %s", kind)


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _log_if_unsaved(future: asyncio.Future[None]) -> None:
    if not future.cancelled() and future.exception() is not None:
        log.debug("an alert is not stored: %s", future.exception())
