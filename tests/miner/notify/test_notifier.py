"""What is sent, when, and to whom; the targets are doubles."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from miner.api.alerts import Severity
from miner.fleet.fleet_file import NO_PRICES
from miner.notify import notifier as notify
from miner.notify.messages import NotifyMessage
from miner.notify.notifier import Notifier, ReportNotice
from miner.notify.targets import Delivery, NotifyTargets, target_names
from miner.observe.alerts import HOST, AlertSubject, gpu_subject
from miner.observe.redact import Redactor
from miner.offers.policies.schema import Policy
from miner.reports.report import send_due_reports
from miner.store.alerts import (
    AlertRow,
    NewAlert,
    add_silence,
    expire_alerts,
    newest_alerts,
    record_alert,
    record_resolution,
)
from miner.store.ranks import report_was_sent
from miner.store.store import Store
from tests.miner.history import DAY, HOUR, NOW

SECRET = "hunter2-hunter2"
PERIOD = 900.0


GPU = gpu_subject("0")


class PlayedTargets(NotifyTargets):
    """Targets that keep what they are sent; those in `down` take nothing."""

    def __init__(self, *urls: str) -> None:
        super().__init__(urls or ("json://127.0.0.1:1/",), Redactor([SECRET]))
        self.sent: list[tuple[str, NotifyMessage]] = []
        self.down: set[str] = set()

    async def deliver(
        self, messages: Mapping[int, Sequence[NotifyMessage]], seconds: float = 0.0
    ) -> dict[int, Delivery]:
        results = {}
        for number, wanted in messages.items():
            name = self.names[number]
            if name in self.down:
                results[number] = Delivery(name, 0, "refused")
                continue
            self.sent += [(name, message) for message in wanted]
            results[number] = Delivery(name, len(wanted))
        return results

    def take(self) -> list[tuple[str, str]]:
        """Title and body of each message since the last look."""
        taken, self.sent = self.sent, []
        return [(message.title, message.body) for _, message in taken]


class NotifyBench:
    """A notifier whose clock and targets the test controls; `deliver` does what its loop does."""

    def __init__(self, store: Store, *urls: str) -> None:
        self.store, self.now = store, NOW
        self.targets = PlayedTargets(*urls)
        self.restart()

    def restart(self) -> None:
        self.notifier = Notifier(
            self.store, self.targets, period=PERIOD, host="rack1", clock=lambda: self.now, collect=0.0
        )

    async def restarted(self) -> list[tuple[str, str]]:
        """What another process sends that reads the store at its start."""
        self.restart()
        await self.notifier.start()
        await self.notifier.stop()
        return await self.deliver()

    async def raised(self, rule: str, subject: AlertSubject = GPU, text: str = "it is hot") -> AlertRow:
        alert = NewAlert(rule, subject, Severity.WARNING, text)
        (row,) = await self.store.write(record_alert, alert, self.now, notify=True)
        self.notifier.add(row)
        return row

    async def resolved(self, rule: str, subject: AlertSubject = GPU) -> None:
        for row in await self.store.write(record_resolution, [rule], subject, "cool again", self.now):
            self.notifier.add(row)

    async def deliver(self, after: float = 1.0) -> list[tuple[str, str]]:
        self.now += after
        await self.notifier.send_due()
        return self.targets.take()


@pytest.fixture
def bench(store: Store) -> NotifyBench:
    return NotifyBench(store)


async def test_an_alert_goes_out_at_once_and_its_end_too(bench: NotifyBench) -> None:
    await bench.raised("gpu-hot")
    assert await bench.deliver() == [("god-miner on rack1: [warning] gpu-hot, gpu:0", "it is hot")]
    await bench.resolved("gpu-hot")
    assert await bench.deliver(PERIOD) == [("god-miner on rack1: [resolved] gpu-hot, gpu:0", "cool again")]
    assert await bench.deliver(PERIOD) == []


async def test_of_one_rule_there_is_one_message_in_a_period_and_a_digest_of_the_rest(
    bench: NotifyBench,
) -> None:
    await bench.raised("gpu-hot", gpu_subject("0"))
    assert len(await bench.deliver()) == 1
    for gpu in (1, 2, 3):
        await bench.raised("gpu-hot", gpu_subject(str(gpu)))
        assert await bench.deliver() == []
    await bench.raised("disk-low", HOST)
    assert [title for title, _ in await bench.deliver()] == ["god-miner on rack1: [warning] disk-low, host"]
    ((title, body),) = await bench.deliver(PERIOD)
    assert title == "god-miner on rack1: 3 alerts"
    assert body.splitlines() == [f"[warning] gpu-hot, gpu:{gpu}: it is hot" for gpu in (3, 2, 1)]


async def test_a_clock_that_is_put_back_keeps_nothing_waiting(bench: NotifyBench) -> None:
    bench.targets.down = set(bench.targets.names)
    await bench.raised("gpu-hot")
    assert await bench.deliver() == []
    bench.targets.down = set()
    await bench.raised("gpu-hot", gpu_subject("1"))
    ((title, _),) = await bench.deliver(-DAY)
    assert title == "god-miner on rack1: 2 alerts"


async def test_many_at_once_are_one_message(bench: NotifyBench) -> None:
    for number in range(120):
        await bench.raised(f"rule-{number}")
    ((title, body),) = await bench.deliver()
    assert title == "god-miner on rack1: 120 alerts"
    assert body.endswith("and 20 more: god-miner alerts list")


async def test_a_target_that_fails_is_tried_again_and_then_gets_what_it_missed(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    bench = NotifyBench(store, "json://good.example/", f"discord://123/{SECRET}")
    bench.targets.down = {"discord"}
    await bench.raised("gpu-hot")
    assert len(await bench.deliver()) == 1
    await bench.raised("disk-low", HOST)
    assert len(await bench.deliver()) == 1  # the failed one is not tried again yet
    state = bench.notifier.status()[1]
    assert (state.target, state.waiting, state.failures) == ("discord", 2, 1)
    assert await bench.deliver(notify.RETRY_SECONDS) == []
    assert bench.notifier.status()[1].failures == 2
    bench.targets.down = set()
    assert await bench.deliver(notify.RETRY_SECONDS) == []  # the pause has doubled
    assert [title for title, _ in await bench.deliver(notify.RETRY_SECONDS)] == [
        "god-miner on rack1: 2 alerts"
    ]
    assert bench.notifier.status()[1].waiting == 0
    assert SECRET not in caplog.text


async def test_alerts_and_ends_that_were_not_sent_are_sent_once_after_a_restart(bench: NotifyBench) -> None:
    await bench.raised("sent")
    await bench.deliver()
    await bench.raised("lost")
    bench.now += HOUR
    assert [title for title, _ in await bench.restarted()] == ["god-miner on rack1: [warning] lost, gpu:0"]
    assert await bench.restarted() == []
    await bench.resolved("sent")
    assert [title for title, _ in await bench.restarted()] == ["god-miner on rack1: [resolved] sent, gpu:0"]


async def test_old_silenced_expired_and_unwanted_alerts_are_not_sent_after_a_restart(
    bench: NotifyBench,
) -> None:
    def fill(connection: sqlite3.Connection) -> None:
        def add(rule: str, at: float, **how: Any) -> None:
            alert = NewAlert(rule, HOST, Severity.WARNING, "text")
            record_alert(connection, alert, at, **{"notify": True, **how})

        add_silence(connection, "silent-*", "*", "", NOW - HOUR, NOW + HOUR)
        add("silent-disk", NOW)
        add("old", NOW - 2 * DAY)
        add("unwanted", NOW, notify=False)
        add("expired", NOW - 7 * HOUR)
        expire_alerts(connection, ["expired"], NOW - 6 * HOUR, NOW)

    await bench.store.write(fill)
    assert await bench.restarted() == []


async def test_an_alert_that_comes_from_the_store_too_is_reported_once(bench: NotifyBench) -> None:
    await bench.raised("early")
    await bench.notifier.start()
    await bench.notifier.stop()
    assert len(await bench.deliver()) == 1
    (row,) = await bench.store.read(newest_alerts, 5)
    assert row.notified_at == bench.now


async def test_no_secret_no_control_character_and_no_call_of_everybody_is_in_a_message(
    bench: NotifyBench,
) -> None:
    hostile = "x" * 595 + SECRET  # its end would be cut off in the middle of the secret
    await bench.raised("half", GPU, hostile)
    assert SECRET[:5] not in str(await bench.deliver())
    hostile = f"{SECRET} hf_abcdefghijklmnopqrst \x1b[31m @everyone " + "x" * 5000
    await bench.raised("job_failed", GPU, hostile)
    ((_, body),) = await bench.deliver()
    assert SECRET not in body
    assert "hf_abc" not in body
    assert "\x1b" not in body
    assert "@everyone" not in body
    assert len(body) < 1000


async def test_without_targets_nothing_is_kept(store: Store) -> None:
    targets = PlayedTargets()
    targets.urls, targets.names = (), []
    notifier = Notifier(store, targets, period=PERIOD, host="h")
    notifier.add(AlertRow("gpu-hot", GPU, Severity.WARNING, "", id=1, raised_at=NOW, last_at=NOW))
    await notifier.start()
    assert notifier.status() == []
    await notifier.stop()


def test_targets_are_named_without_their_secrets() -> None:
    urls = {
        "json://127.0.0.1:8080/key": "json://127.0.0.1:8080",
        f"mailto://me:{SECRET}@mail.example": "mailto://mail.example",
        f"tgram://123456:{SECRET}/42": "tgram",
        f"slack://{SECRET}/b/c": "slack",
        f"https://discord.com/api/webhooks/1/{SECRET}": "https://discord.com",
        "json://[broken": "json",
    }
    assert target_names(list(urls)) == list(urls.values())
    assert target_names(["slack://a/b", "slack://c/d"]) == ["slack", "slack (2)"]


async def test_a_report_goes_to_mail_as_html_and_elsewhere_as_markdown(store: Store) -> None:
    bench = NotifyBench(store, "json://good.example/", "mailtos://me:pw@mail.example")
    bench.notifier.add_report(ReportNotice("Daily", "# text", "<p>text</p>"))
    await bench.notifier.send_due()
    assert [(message.format, message.body) for _, message in bench.targets.sent] == [
        ("markdown", "# text"),
        ("html", "<p>text</p>"),
    ]


async def test_a_report_is_sent_once_when_its_period_is_over_and_the_hour_has_come(
    bench: NotifyBench,
) -> None:
    midnight = NOW - NOW % DAY

    async def titles(at: float) -> list[str]:
        await send_due_reports(
            bench.store, bench.notifier, (Policy(), NO_PRICES), ("daily", "weekly"), at, str
        )
        return [title for title, _ in await bench.deliver()]

    assert await titles(midnight + 5 * HOUR) == []
    assert len(await titles(midnight + 6 * HOUR)) == 2
    assert await titles(midnight + 7 * HOUR) == []
    assert await bench.store.read(report_was_sent, "daily", midnight - DAY)
    assert [title[:25] for title in await titles(midnight + DAY + 6 * HOUR)] == ["god-miner on rack1: Daily"]


async def test_a_resolved_alert_that_was_still_held_is_shown_with_both_ends(bench: NotifyBench) -> None:
    await bench.raised("gpu-hot", gpu_subject("0"))
    await bench.deliver()
    row = await bench.raised("gpu-hot", gpu_subject("1"))
    bench.notifier.add(replace(row, resolved_at=bench.now, text="cool again"))
    ((title, body),) = await bench.deliver(PERIOD)
    assert title == "god-miner on rack1: 2 alerts"
    assert body.splitlines()[0] == "[resolved] gpu-hot, gpu:1: cool again"
