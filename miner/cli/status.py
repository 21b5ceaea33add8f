"""`god-miner` alone: how things stand, and what to do next, in ten lines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from miner.cli.options import load_settings
from miner.cli.output import echo_json, show_time, terminal

if TYPE_CHECKING:
    from miner.api.fleet import FleetGpu, FleetStatus
    from miner.api.jobs import JobSummary
    from miner.api.status import NextTournament, Standing
    from miner.settings import Settings

#: Taken from the overview as they are.
_SEEN = ("daemon", "fleet", "jobs", "ended", "alerts", "money")
#: Lines that are folded, not cut.
_WHOLE = ("next", "last 24 h")
_FIRST_STEP = "`god-miner doctor` says what is missing; docs/first-entry.md leads to a tournament entry"
#: Jobs of each kind in one line.
_NAMED = 3


def show_status(*, as_json: bool) -> None:
    """Print how things stand: the daemon, GPUs, jobs, alerts, the next tournaments, and what to do next."""
    from miner.cli.render.terminal import fact_table, one_line_cells

    standing = _standing(load_settings(), time.time())
    if as_json:
        echo_json(standing)
        return
    table = fact_table(())
    for name, text in _lines(standing):
        table.add_row(name, text if name in _WHOLE else one_line_cells(text)[0])
    terminal().print(table)


def _standing(settings: Settings, now: float) -> Standing:
    from miner.api.status import Overview, Standing
    from miner.daemon_client import DaemonRefused, NoDaemon, get, operator_url
    from miner.store.database import FILE_NAME, NoStore

    fields: dict[str, Any] = {
        "at": now,
        "daemon": None,
        "fleet": None,
        "tournaments": _tournaments(settings, now),
    }
    fields |= {"jobs": [], "ended": [], "alerts": [], "problem": None, "money": None}
    store_problem = None
    try:
        operator_url(settings)  # fails before the client is imported
        seen = get(settings, "/overview", Overview)
        fields |= {name: getattr(seen, name) for name in _SEEN}
    except (NoDaemon, DaemonRefused) as error:
        fields["problem"] = str(error)
        try:
            fields |= _stored(settings)
        except NoStore as error:
            store_problem = error
    standing = Standing(**fields, next_step="")
    hint = None
    if store_problem is not None:
        is_older = (settings.store_dir / FILE_NAME).exists()
        hint = f"`god-miner run`: {store_problem}" if is_older else _FIRST_STEP
    return standing.model_copy(update={"next_step": _next_step(standing, hint)})


def _stored(settings: Settings) -> dict[str, object]:
    """Jobs and alerts without a daemon."""
    from miner.store.database import open_store

    with open_store(settings.store_dir) as db:
        from miner.api.alerts import Alert
        from miner.fleet.costs import GpuCosts
        from miner.fleet.fleet_file import gpu_prices
        from miner.jobs.views import job_summary
        from miner.reports.money import period_money
        from miner.store.alerts import open_alerts
        from miner.store.jobs import OPEN_JOBS, newest_ended_jobs, newest_jobs

        now, prices = time.time(), gpu_prices(settings)
        costs = GpuCosts.read(db, prices)
        return {
            "money": period_money(db, now - 86_400, now, prices),
            "jobs": [job_summary(db, row, costs=costs) for row in newest_jobs(db, 50, OPEN_JOBS)],
            "ended": [job_summary(db, row, costs=costs) for row in newest_ended_jobs(db, _NAMED)],
            "alerts": Alert.of_each(open_alerts(db)),
        }


def _tournaments(settings: Settings, now: float) -> list[NextTournament]:
    from core.domain.wire import TournamentType
    from miner.api.status import NextTournament
    from miner.tournament.rules import next_start

    found = []
    for kind in TournamentType:
        repo = settings.training_repo(kind.value)
        starts_at = next_start(kind, datetime.fromtimestamp(now, UTC)).timestamp()
        entry = f"{repo.url} {repo.commit}" if repo else None
        found.append(NextTournament(kind=kind, starts_at=starts_at, entry=entry))
    return sorted(found, key=lambda one: one.starts_at)


def _next_step(standing: Standing, hint: str | None) -> str:
    """The first thing that is missing or wrong."""
    failed = next((job for job in standing.ended if job.state == "failed"), None)
    if hint is not None:
        return hint
    if standing.daemon is not None and standing.daemon.troubles:
        return f"`god-miner doctor`: {standing.daemon.troubles[0]}"
    if any(alert.severity == "critical" for alert in standing.alerts):
        return "`god-miner alerts list`: something critical is wrong"
    if standing.daemon is None and (standing.jobs or any(one.entry for one in standing.tournaments)):
        return "`god-miner run` starts the daemon: jobs wait for it, and validators ask it for your entry"
    if not any(one.entry for one in standing.tournaments):
        return "`god-miner tournament check`: no entry is handed out, and only tournaments pay"
    if failed is not None:
        return f"`god-miner jobs show {failed.id}` says why job {failed.id} failed"
    return "`god-miner tournament rehearse` tries the entry as validators would run it"


def _lines(standing: Standing) -> Iterator[tuple[str, str]]:
    from core.domain.units import show_seconds

    daemon = standing.daemon
    if daemon is None:
        yield "daemon", f"{standing.problem}"
    else:
        up = f"up for {show_seconds(daemon.uptime_seconds)} as {daemon.hotkey[:8]}…"
        yield "daemon", f"{up}, {daemon.backend or 'no backend'}, policy {daemon.policy}"
        for trouble in daemon.troubles:
            yield "trouble", trouble
    yield "GPUs", _gpus(standing.fleet)
    begun = [job for job in standing.jobs if job.state != "queued"]
    queued = [job for job in standing.jobs if job.state == "queued"]
    yield "running", _jobs(begun, standing.at) or "nothing"
    yield "queued", _jobs(queued, standing.at) or "nothing"
    yield "ended", _jobs(standing.ended, standing.at) or "nothing yet"
    if standing.money is not None:
        from miner.reports.money import money_line

        yield "last 24 h", money_line(standing.money)
    alerts = Counter(f"{alert.rule} ({alert.subject})" for alert in standing.alerts)
    yield "alerts", ", ".join(list(alerts)[:_NAMED]) + _more(len(alerts)) or "none"
    starts = (f"{one.kind} {show_time(one.starts_at, seconds=False)}" for one in standing.tournaments)
    yield "next starts", ", ".join(starts)
    entries = [one for one in standing.tournaments if one.entry]
    yield "entry", "; ".join(f"{one.kind}: {one.entry}" for one in entries) or "none is handed out"
    yield "next", standing.next_step


def _gpus(fleet: FleetStatus | None) -> str:
    if fleet is None:
        return "`god-miner fleet show` looks for them"
    if not fleet.gpus:
        return fleet.trouble or "none"
    kinds = Counter(gpu.kind for gpu in fleet.gpus)
    states = Counter(_state(gpu) for gpu in fleet.gpus)
    which = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{which}: " + ", ".join(f"{count} {state}" for state, count in states.items())


def _state(gpu: FleetGpu) -> str:
    if gpu.out is not None:
        return "out"
    if gpu.task_id is not None:
        return "at work"
    return "reserved" if gpu.claim is not None else "used by others" if gpu.others else "idle"


def _jobs(jobs: Sequence[JobSummary], now: float) -> str:
    return "; ".join(_job(job, now) for job in jobs[:_NAMED]) + _more(len(jobs))


def _job(job: JobSummary, now: float) -> str:
    from miner.cli.render.jobs import current_activity, time_left

    model = job.model.rsplit("/", 1)[-1]
    if job.ended_at is None:
        doing = ", ".join(filter(None, (current_activity(job), time_left(job, now))))
        return f"{job.id} {model}: {doing}"
    gain = job.result.gain if job.result else None
    return f"{job.id} {job.end_reason}" + (f" {gain:+.1%}" if gain is not None else "")


def _more(count: int) -> str:
    return f" and {count - _NAMED} more" if count > _NAMED else ""
