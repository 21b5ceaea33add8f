"""Alerts of the program: kinds, subjects, and the way to raise one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol

from core.domain.job_states import EndReason
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

    # Tournaments
    TOURNAMENT_RULES_CHANGED = "tournament_rules_changed"
    TOURNAMENT_ENTRY = "tournament_entry"

    # Policies and profiles
    POLICY_PROBLEM = "policy_problem"
    POLICY_NOT_IN_FORCE = "policy_not_in_force"
    PROFILE_PROBLEM = "profile_problem"
    PROFILE_NOT_IN_FORCE = "profile_not_in_force"
    ALERTS_PROBLEM = "alerts_problem"
    FILES_HANG = "files_hang"

    # Backends
    NO_BACKEND = "no_backend"
    BACKEND_GONE = "backend_gone"
    BACKEND_CANNOT_TRAIN = "backend_cannot_train"
    BACKEND_BACK = "backend_back"

    # Jobs
    JOBS = "jobs"
    ATTEMPT_LOST = "attempt_lost"
    BAD_SUBMISSION = "bad_submission"
    GPU_LOST = "gpu_lost"
    JOB_BUG = "job_bug"
    JOB_FAILED = "job_failed"
    JOB_HUNG = "job_hung"
    JOB_MISNAMED = "job_misnamed"
    # A step that has failed several times, by the reason that is waited out
    JOB_NETWORK = "job_network"
    JOB_RATE_LIMITED = "job_rate_limited"
    JOB_HUB_REFUSED = "job_hub_refused"
    JOB_DISK_FULL = "job_disk_full"
    JOB_BACKEND_GONE = "job_backend_gone"
    JOB_NO_GPU = "job_no_gpu"
    JOB_PREEMPTED = "job_preempted"
    JOB_NOT_STARTED = "job_not_started"

    @property
    def is_good_news(self) -> bool:
        """True if something works again: noted, but not an alarm."""
        return self in ENDED_BY_GOOD_NEWS


#: Good news, and the alerts that it ends.
ENDED_BY_GOOD_NEWS: Mapping[AlertKind, frozenset[AlertKind]] = {
    AlertKind.GPU_BACK: frozenset({AlertKind.GPU_OUT}),
    AlertKind.INVENTORY_RECOVERED: frozenset({AlertKind.INVENTORY_UNREADABLE}),
    AlertKind.METAGRAPH_RECOVERED: frozenset(
        {AlertKind.METAGRAPH_STALE, AlertKind.CHAIN, AlertKind.WRONG_CHAIN, AlertKind.NO_SUCH_SUBNET}
    ),
    AlertKind.BACKEND_BACK: frozenset(
        {AlertKind.NO_BACKEND, AlertKind.BACKEND_GONE, AlertKind.BACKEND_CANNOT_TRAIN}
    ),
}
#: Alerts of steps that keep failing.
STEP_FAILURES: Mapping[EndReason, AlertKind] = {
    EndReason.NETWORK: AlertKind.JOB_NETWORK,
    EndReason.RATE_LIMITED: AlertKind.JOB_RATE_LIMITED,
    EndReason.HUB_REFUSED: AlertKind.JOB_HUB_REFUSED,
    EndReason.DISK_FULL: AlertKind.JOB_DISK_FULL,
    EndReason.BACKEND_GONE: AlertKind.JOB_BACKEND_GONE,
    EndReason.NO_GPU: AlertKind.JOB_NO_GPU,
    EndReason.PREEMPTED: AlertKind.JOB_PREEMPTED,
    EndReason.NOT_STARTED: AlertKind.JOB_NOT_STARTED,
}


class SubjectKind(StrEnum):
    """The kinds of things that alerts and metrics are about."""

    GPU = "gpu"
    JOB = "job"
    HOST = "host"
    MINER = "miner"
    VALIDATOR = "validator"


class AlertSubject(NamedTuple):
    """The thing that an alert is about. As text, in the store and in replies: `gpu:ID`, `job:7`, `host`."""

    kind: SubjectKind
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> AlertSubject:
        kind, _, name = text.partition(":")
        if kind not in set(SubjectKind):
            raise ValueError(f"{text!r} is not a subject; write it like gpu:ID, job:7, host or miner")
        return cls(SubjectKind(kind), name)

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else self.kind.value

    @property
    def label(self) -> str:
        """The subject in a sentence; empty for the miner as a whole."""
        if self.kind is SubjectKind.MINER:
            return ""
        return f"{'GPU' if self.kind is SubjectKind.GPU else self.kind.value} {self.name}".strip()

    def with_text(self, text: str) -> str:
        return f"{self.label}: {text}" if self.label else text

    @property
    def fields(self) -> dict[str, object]:
        """The fields by which events of this subject are found."""
        fields: dict[str, object] = {"subject": str(self)}
        if self.kind is SubjectKind.JOB:
            fields["job_id"] = int(self.name)
        elif self.kind is SubjectKind.GPU:
            fields["gpu"] = self.name
        return fields


MINER, HOST = AlertSubject(SubjectKind.MINER), AlertSubject(SubjectKind.HOST)


def gpu_subject(gpu: str) -> AlertSubject:
    return AlertSubject(SubjectKind.GPU, gpu)


def job_subject(job_id: int) -> AlertSubject:
    return AlertSubject(SubjectKind.JOB, str(job_id))


def validator_subject(hotkey: str) -> AlertSubject:
    return AlertSubject(SubjectKind.VALIDATOR, hotkey)


class SendAlert(Protocol):
    """Raises an alert of the program, with a text for people. Must not fail or wait."""

    def __call__(self, kind: AlertKind, text: str, subject: AlertSubject = MINER) -> None: ...


class Alerts:
    """Count and log alerts, and pass them on. Raising one never fails and never waits. Threads may raise them
    too, once `loop` is set."""

    def __init__(self, metrics: Metrics, listener: SendAlert | None = None) -> None:
        self._metrics = metrics
        #: Stores the alert.
        self.listener = listener
        #: The daemon's event loop.
        self.loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, kind: AlertKind, text: str, subject: AlertSubject = MINER) -> None:
        if self.loop is not None and not _runs_here(self.loop):
            with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has ended
                self.loop.call_soon_threadsafe(self, kind, text, subject)
            return
        if kind.is_good_news:
            log.info("%s: %s", kind, subject.with_text(text))
        else:
            self._metrics.alerts.labels(kind).inc()
            log.warning("alert %s: %s", kind, subject.with_text(text))
        if self.listener is not None:
            try:
                self.listener(kind, text, subject)
            except Exception:  # whoever raises an alert has other things to do
                log.exception("the alert %s could not be passed on", kind)


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
