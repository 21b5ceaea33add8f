"""What a report looks like, and that hostile names stay text in it."""

from __future__ import annotations

import re
import sqlite3
from html.parser import HTMLParser
from typing import Any

import markdown
import pytest

from miner.api.reports import PeriodKind, Report
from miner.observe.redact import Redactor
from miner.offers.policies.load import load_policy
from miner.reports.report import build_report, last_period, redacted_report
from miner.reports.text import as_html, as_markdown, as_text
from miner.store.database import insert_row
from miner.store.store import Store
from tests.miner.history import HOUR, NOW, add_job, add_rollup

HOSTILE = "org/<script src='https://evil.example/x.js'></script>|\x1b[31m[a](https://evil.example)@everyone"


@pytest.fixture
async def report(store: Store) -> dict[str, Any]:
    def fill(connection: sqlite3.Connection) -> None:
        add_job(connection, "one", NOW - HOUR, model=HOSTILE, gain=0.1)
        for hour in range(1, 4):
            add_rollup(connection, NOW - hour * HOUR, "GPU-<b>0", busy=hour / 4)
        alert = {"rule": "job_failed", "subject": "job:1", "severity": "warning", "text": HOSTILE}
        insert_row(connection, "alerts", **alert, raised_at=NOW - HOUR, last_at=NOW, times=1)

    await store.write(fill)
    policy = load_policy("h100x4").terms
    return await store.read(build_report, last_period(PeriodKind.DAILY, NOW), policy)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)


def test_html_is_one_file_without_scripts_or_anything_from_outside(report: Report) -> None:
    page, tags = as_html(report), _Tags()
    tags.feed(page)
    assert not tags.tags & {"script", "link", "img", "iframe", "object", "a", "style", "b"}
    assert not tags.attributes & {"src", "href", "onload", "onclick", "xlink:href"}
    assert "url(" not in page
    assert "&lt;script src=&#x27;https://evil.example/x.js&#x27;&gt;" in page
    assert {"svg", "rect", "table"} <= tags.tags


def with_example(report: Report, text: str) -> Report:
    """The report with this text in its first alert."""
    alert = report.alerts[0].model_copy(update={"example": text})
    return report.model_copy(update={"alerts": [alert, *report.alerts[1:]]})


def test_secrets_are_removed_before_a_renderer_escapes_them(report: Report) -> None:
    token = "hf_abcdefghijklmnopqrstu"
    clean = redacted_report(with_example(report, f"refused: {token}"), Redactor())
    for page in (as_markdown(clean), as_html(clean), as_text(clean)):
        assert "hf" not in page
        assert "refused" in page


def test_the_picture_has_a_cell_for_each_hour(report: Report) -> None:
    page = as_html(report)
    assert page.count("<rect") == 24
    assert page.count("fill='none'") == 21
    bar = next(line for line in as_text(report).splitlines() if line.startswith("GPU-<b>0"))
    assert bar.endswith("·" * 21 + "▇▅▃")


def test_text_fits_a_terminal_and_has_no_control_characters(report: Report) -> None:
    text = as_text(report)
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)
    assert re.search(r"Published models +1 +0", text)
    assert "not known" in text


def test_markdown_keeps_hostile_names_in_their_cells(report: Report) -> None:
    text = as_markdown(report)
    row = next(line for line in text.splitlines() if "evil.example" in line and "instruct" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 8
    assert not re.search(r"(?<!\\)\]\(", text)
    assert "@everyone" not in text
    assert "\x1b" not in text


def test_the_html_that_apprise_makes_for_mail_has_no_element_from_a_hostile_name(
    report: Report,
) -> None:
    hostile = with_example(report, "<img src=x onerror=alert(1)> [c](javascript:alert(2)) &#60;b>")
    page, tags = markdown.markdown(as_markdown(hostile), extensions=["tables"]), _Tags()
    tags.feed(page)
    assert not tags.tags & {"script", "img", "a", "b"}
    assert "&lt;img src=x onerror=alert(1)&gt; [c](javascript:alert(2)) &amp;#60;b&gt;" in page
