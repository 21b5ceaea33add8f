"""The page beside a daemon with a long history: first look, memory, and what open pages cost."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine, subjects
from benchmarks.busy_store import fill_store
from benchmarks.load_kind import LoadKind
from benchmarks.report import Report, latency
from miner.dev.stack import DevStack, daemon_process, dashboard_process
from tests.doubles.browser import Browser, open_browser

JOBS, OFFERS, PAGES = 1_000, 10_000, 20
#: Each window is watched for so long.
WATCHED_S = 30.0
#: Offers of one round, all of them new, 50 at once.
ROUND = 1_000


def run(quick: bool) -> Report:
    looks, watched, rounds = (2, 5.0, 1) if quick else (5, WATCHED_S, 5)
    report = Report(
        f"The page, {JOBS:,} jobs and {OFFERS:,} offers",
        ("open pages", "daemon's CPU", "page's CPU", "page's RSS MB", "daemon's RSS MB"),
    )
    with subjects.ground() as stack:
        fill_store(stack, JOBS, OFFERS)
        settings = {"POLICY": "h100x4", "GPUS": "4xH100", **subjects.OPEN_LIMITS, **subjects.QUIET}
        with (
            daemon_process(stack, settings) as daemon,
            dashboard_process(stack) as page,
            open_browser() as browser,
        ):
            url = f"http://127.0.0.1:{page.port}"
            first = [_first_look(browser, url) for _ in range(looks)]
            for pages in (0, 1, PAGES):
                _open_tabs(browser, url, pages)
                report.rows.append(_watch(pages, daemon.pid, page.pid, watched, report))
            report.data["first_look_s"] = first
            offers = _offers_beside_pages(stack, daemon.port, browser, url, rounds)
            report.data["offers"] = offers
    p99 = {pages: latency(runs, "p99") for pages, runs in offers.items()}
    report.notes.append(
        f"New offers, 50 at once, p99: {p99[0]} ms without a page, {p99[PAGES]} ms with {PAGES} pages open "
        f"(medians of {rounds} rounds of {ROUND:,} in turns; everything shares two cores)."
    )
    report.notes.append(
        f"First look, from the address to the last number on the page, in Chromium on the same machine: "
        f"{median(first):.2f} s (min {min(first):.2f}, max {max(first):.2f}; {looks} looks)."
    )
    report.notes.append(
        f"CPU is the share of a core in {watched:g} s. A third of the tabs each: /, /jobs, a job."
    )
    return report


def _first_look(browser: Browser, url: str) -> float:
    browser.open("about:blank")
    began = time.perf_counter()
    browser.open(url, width=1360)
    browser.until(lambda: "Last decisions" in browser.text() and "Qwen" in browser.text("table"), "the page")
    return time.perf_counter() - began


def _open_tabs(browser: Browser, url: str, wanted: int) -> None:
    """Open this many tabs with the page; one without it stays."""
    driver = browser.driver
    driver.get("about:blank")
    for number in range(len(driver.window_handles) - 1, wanted):
        driver.switch_to.new_window("tab")
        driver.get(f"{url}{('/', '/jobs', '/jobs/3')[number % 3]}")
    driver.switch_to.window(driver.window_handles[0])


def _offers_beside_pages(
    stack: DevStack, port: int, browser: Browser, url: str, rounds: int
) -> dict[int, list[dict[str, Any]]]:
    """Pages open → what each round of offers took."""
    runs: dict[int, list[dict[str, Any]]] = {0: [], PAGES: []}
    subjects.load(stack, port, LoadKind.NEW_OFFER, ROUND, seed=10**6)
    for number in range(rounds):
        for pages, done in runs.items():
            _close_tabs(browser)
            _open_tabs(browser, url, pages)
            time.sleep(3.0)  # what opening costs is not what is measured
            seed = 2 * number + (pages > 0)
            done.append(subjects.load(stack, port, LoadKind.NEW_OFFER, ROUND, seed=seed))
    return runs


def _close_tabs(browser: Browser) -> None:
    driver = browser.driver
    first, *others = driver.window_handles
    for handle in others:
        driver.switch_to.window(handle)
        driver.close()
    driver.switch_to.window(first)


def _watch(pages: int, daemon: int, page: int, seconds: float, report: Report) -> tuple[str, ...]:
    # What the last tab's opening cost is not what it costs to stay open.
    time.sleep(3.0)
    before = _cpu_s(daemon), _cpu_s(page)
    time.sleep(seconds)
    shares = [(_cpu_s(pid) - spent) / seconds for pid, spent in zip((daemon, page), before, strict=True)]
    memory = machine.rss_mb(page), machine.rss_mb(daemon)
    report.data[f"{pages}_pages"] = {"cpu": shares, "rss_mb": memory}
    return (
        str(pages),
        f"{shares[0]:.1%}",
        f"{shares[1]:.1%}",
        f"{memory[0]:.0f}",
        f"{memory[1]:.0f}",
    )


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
