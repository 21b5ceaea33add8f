"""The operator's page in a real browser: every page, a lost and returned daemon, the password, no action
without the token; and a real training on the CPU, live, which is then cancelled."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from core.domain.tasks import TaskType
from miner.daemon_client import stored_operator_token
from miner.dev import demo, demo_inputs
from miner.dev import stack as dev_stack
from miner.dev.demo_inputs import LoopbackSite
from miner.dev.samples import SampleTask, example_task
from miner.dev.stack import ChildProcess, DevStack, daemon_process, dashboard_process, prepare_stack
from miner.dev.validator import ValidatorClient
from tests.doubles.browser import Browser, open_browser

PASSWORD = "a password for the page"
#: No disk is so large.
ALWAYS_FIRES = "rules: {disk-full: {when: {below: 900TB, clear: 901TB}}}\n"
PAGES = {
    "/": "Overview",
    "/jobs": "Jobs",
    "/jobs/1": "#1",
    "/compare?jobs=1": "Side by side",
    "/alerts": "Alerts",
    "/report": "Published models",
}


@dataclass
class Page:
    """A daemon and its page."""

    stack: DevStack
    daemon: ChildProcess
    dashboard: ChildProcess

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.dashboard.port}"

    @property
    def token(self) -> str:
        return stored_operator_token(self.stack.data_dir)

    def wait_for_trial(self) -> None:
        """Before that a plan takes another engine, which begins a minute later."""

        async def wait() -> None:
            headers = self.stack.operator_headers()
            async with httpx.AsyncClient(base_url=self.stack.operator_url, headers=headers) as operator:
                assert await demo.wait_for_trial(operator) is None

        asyncio.run(wait())

    def send(self, *tasks: SampleTask, start: bool) -> None:
        """As a validator does."""

        async def play() -> None:
            keys = self.stack.keys
            async with ValidatorClient(self.stack.url, keys.validator, keys.miner.ss58_address) as validator:
                for task in tasks:
                    await validator.offer(task)
                    if start:
                        await validator.start(task)

        asyncio.run(play())


@pytest.fixture(autouse=True, scope="module")
def _patient() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dev_stack, "START_LIMIT_S", 180.0)
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A daemon that trains nothing, with a job that waits."""
    stack = prepare_stack(tmp_path_factory.mktemp("page"))
    stack.data_dir.mkdir(parents=True, exist_ok=True)
    (stack.data_dir / "alerts.yaml").write_text(ALWAYS_FIRES)
    with daemon_process(stack) as daemon, dashboard_process(stack) as dashboard:
        made = Page(stack, daemon, dashboard)
        made.send(example_task("instruct", 0), start=True)
        made.send(example_task("dpo", 1), start=False)
        yield made


@pytest.mark.parametrize("path", PAGES)
def test_every_page_shows_what_the_daemon_says(browser: Browser, page: Page, path: str) -> None:
    browser.open(page.url + path, width=1360)
    browser.sees(PAGES[path], "main")
    browser.until(lambda: "unreachable" not in browser.text(".banner"))
    # An earlier page may have something to complain about, too: its server is gone.
    assert not [text for text in browser.problems() if page.url in text]
    # The phone shows the same, without a line that is wider than it.
    browser.open(page.url + path, width=390, height=844, dark=True)
    browser.sees(PAGES[path], "main")
    assert browser.run("return document.documentElement.scrollWidth") <= 390
    assert browser.run("return document.body.classList.contains('body--dark')")


def test_the_overview_shows_jobs_gpus_and_decisions(browser: Browser, page: Page) -> None:
    browser.open(page.url, width=1360)
    browser.sees("Answering")
    for text in ("#1", "queued", "Job success rate", "accepted", "H100"):
        browser.sees(text)
    first = browser.text("header + main, main")
    page.send(example_task("chat", 5), start=True)
    browser.until(lambda: "#2" in browser.text() and browser.text("main") != first, "the second job")


def test_jobs_are_picked_and_compared_and_the_address_keeps_the_filters(browser: Browser, page: Page) -> None:
    browser.open(f"{page.url}/jobs?state=queued", width=1360)
    browser.until(lambda: browser.rows("Jobs"), "a job")
    browser.click("table[aria-label=Jobs] td:nth-last-child(2) a")
    browser.sees("Compare 1")
    assert "state=queued" in browser.driver.current_url
    assert "✓ picked" in browser.rows("Jobs")[0]
    browser.click("a[href^='/compare?']")
    browser.until(lambda: any("queued" in row for row in browser.rows("Side by side")), "the job's column")


def test_reserved_gpus_are_shown_with_what_they_are_reserved_for(browser: Browser, page: Page) -> None:
    offer = example_task("dpo", 1).model.rpartition("/")[2]
    browser.open(page.url, width=1360)
    browser.sees(" reserved · ", "main")  # in the line at the top
    browser.until(lambda: "reserved until" in browser.text(".gpu-row"), "a reserved GPU")
    browser.open(f"{page.url}/fleet", width=1360)
    browser.sees(f"offer {offer}", 'table[aria-label="GPUs"]')
    browser.until(lambda: f"offer {offer}" in [bar.text for bar in browser.all(".schedule-track a")])
    browser.until(lambda: any("reserved until" in row for row in browser.rows("GPUs")), "a reserved GPU")


def test_the_keyboard_reaches_the_content_and_the_theme_stays(browser: Browser, page: Page) -> None:
    browser.open(page.url, width=1360)
    browser.sees("Answering")
    browser.run("document.querySelector('.nicegui-skip-link').focus()")
    assert browser.run("return document.activeElement.innerText") == "Skip to main content"
    browser.press("Theme: auto")
    browser.press("Theme: light")
    browser.sees("Theme: dark")
    browser.until(lambda: browser.run("return document.cookie").count("dark"))
    browser.open(f"{page.url}/jobs")
    browser.sees("Theme: dark")
    assert browser.run("return document.body.classList.contains('body--dark')")
    browser.press("Theme: dark")
    browser.sees("Theme: auto")


def test_a_daemon_that_is_lost_is_reported_and_comes_back_without_a_reload(
    browser: Browser, page: Page
) -> None:
    browser.open(page.url, width=1360)
    browser.sees("#1")
    browser.run("window.neverReloaded = true")
    page.daemon.stop()
    browser.sees("has been unreachable since", ".banner")
    browser.sees("god-miner doctor", ".banner")
    assert "#1" in browser.text("main")  # what is known stays
    shows_no_good_news(browser)
    # Neither does a page that is opened now, and is shown what this one knows.
    first = browser.driver.current_window_handle
    browser.driver.switch_to.new_window("tab")
    browser.open(page.url, width=1360)
    browser.sees("has been unreachable since", ".banner")
    shows_no_good_news(browser)
    browser.driver.close()
    browser.driver.switch_to.window(first)
    page.daemon.start()
    browser.until(lambda: "unreachable" not in browser.text("header"), "the end of the banner")
    page.send(example_task("instruct", 9), start=True)
    browser.sees(example_task("instruct", 9).model.rpartition("/")[2])
    browser.sees("Answering", "main")
    browser.until(lambda: browser.run(GREEN_THINGS), "something green")
    assert browser.run("return window.neverReloaded")


#: How many things on the page have the colour of good news.
GREEN_THINGS = """const probe = document.body.appendChild(document.createElement('i'));
probe.style.color = 'var(--good)';
const green = getComputedStyle(probe).color;
probe.remove();
const colours = one => [getComputedStyle(one).color, getComputedStyle(one, '::before').backgroundColor];
const shown = [...document.querySelectorAll('main *')].filter(one => one.getClientRects().length);
return shown.filter(one => colours(one).includes(green)).length"""


def shows_no_good_news(browser: Browser) -> None:
    browser.sees("Not answering for", "main")
    browser.sees("Current alerts are unknown", "main")
    assert "Nothing is wrong" not in browser.text("main")
    browser.until(lambda: browser.run(GREEN_THINGS) == 0, "a page without good news")


def test_nothing_is_changed_without_the_token(browser: Browser, page: Page) -> None:
    browser.open(f"{page.url}/jobs/1")
    browser.press("Cancel job")
    browser.sees("Cancel job 1?", ".q-dialog")
    browser.press("Cancel job", ".q-dialog")
    browser.sees("Type the operator's token", ".q-dialog")
    browser.type_into("Operator token", "not the token of anybody")
    browser.press("Cancel job", ".q-dialog")
    browser.sees("not the daemon's token", ".q-dialog")
    browser.type_into("Operator token", page.token)
    browser.press("Cancel job", ".q-dialog")
    browser.sees("cancelled", "main")
    # The token is known to the page's process now, and to nobody else.
    browser.press("Retry job")
    browser.sees("Retry job 1?", ".q-dialog")
    assert not browser.shows('input[aria-label="Operator token"]')
    # This daemon has no backend: it refuses, and the page says why.
    browser.press("Retry job", ".q-dialog")
    browser.sees("no backend", ".q-dialog")
    whole = "return document.documentElement.outerHTML"
    browser.until(lambda: page.token not in browser.run(whole), "a page without the token")


def test_an_alert_is_silenced_until_the_silence_is_ended(browser: Browser, page: Page) -> None:
    browser.open(f"{page.url}/alerts", width=1360)
    browser.press("Silence", ".alert-row")
    browser.press("8 h", ".q-dialog")
    browser.sees("Silence disk-full of host for 8 h?", ".q-dialog")
    if browser.shows('input[aria-label="Operator token"]'):
        browser.type_into("Operator token", page.token)
    browser.press("Silence", ".q-dialog:last-of-type .row:last-child")
    browser.sees(", silenced", "main")
    browser.press("End it", "main")
    browser.press("End it", ".q-dialog")
    browser.until(lambda: ", silenced" not in browser.text("main"), "an alert without a silence")


def test_pages_that_no_browser_connects_to_take_little_memory_from_those_that_are_open(
    browser: Browser, page: Page
) -> None:
    """Monitors, link previews and curl never open the websocket."""
    with dashboard_process(page.stack) as dashboard:
        url = f"http://127.0.0.1:{dashboard.port}"
        tabs = []
        for path in ("/", "/jobs", "/"):
            browser.driver.switch_to.new_window("tab")
            tabs.append(browser.driver.current_window_handle)
            browser.open(url + path, width=1360)
            browser.sees("#1", "main")
            browser.run("window.neverReloaded = true")
        for _ in range(30):
            urllib.request.urlopen(url).read()
        assert memory_mb(dashboard.pid) < 250  # such pages once took 7 MB each
        page.send(example_task("dpo", 77), start=True)
        for tab in tabs:
            browser.driver.switch_to.window(tab)
            browser.sees(example_task("dpo", 77).model.rpartition("/")[2], "main")
            assert browser.run("return window.neverReloaded")
            browser.driver.close()
        browser.driver.switch_to.window(browser.driver.window_handles[0])


def memory_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


def test_with_a_password_nothing_is_seen_before_it(browser: Browser, page: Page) -> None:
    with dashboard_process(page.stack, {"DASHBOARD_PASSWORD": PASSWORD}) as locked:
        url = f"http://localhost:{locked.port}"
        browser.driver.delete_all_cookies()
        browser.open(f"{url}/jobs")
        browser.sees("Password of the page")
        for typed in ("not it at all", PASSWORD):
            browser.write("input[type=password]", typed)
            browser.press("Log in")
            browser.until(lambda: "not the password" in browser.text() or "Answering" in browser.text())
        browser.sees("Answering")
        browser.press("Log out")
        browser.sees("Password of the page")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/static/page.css")


@pytest.fixture
def training(tmp_path: Path, training_python: str) -> Iterator[Page]:
    """A daemon that trains a little model on the CPU."""
    stack = prepare_stack(tmp_path / "miner")
    with ExitStack() as parts:
        site = parts.enter_context(LoopbackSite())
        site.add_model(demo_inputs.MODEL_ID, demo_inputs.model_files())
        settings = demo.demo_settings(site, stack.folder) | {"TRAINER_PYTHON": training_python}
        daemon = parts.enter_context(daemon_process(stack, settings))
        dashboard = parts.enter_context(dashboard_process(stack))
        made = Page(stack, daemon, dashboard)
        made.wait_for_trial()
        task = demo.demo_task(site.add_file("/rows.json", demo_inputs.training_rows()))
        assert task.task_type is TaskType.INSTRUCT
        made.send(task, start=True)
        yield made


@pytest.mark.small
@pytest.mark.training
def test_a_training_is_live_and_ends_when_it_is_cancelled(browser: Browser, training: Page) -> None:
    curve = """const all = [...document.querySelectorAll('[aria-label="Training loss over steps"] path')];
    return Math.max(0, ...all.map(one => one.getAttribute('d').split(/[LC]/).length))"""
    browser.open(f"{training.url}/jobs/1", width=1360)
    browser.sees("little-llama", "h1")
    browser.run("window.neverReloaded = true")
    browser.until(lambda: browser.run(curve) > 2, "the first points of the curve")
    before = browser.run(curve)
    browser.until(lambda: browser.run(curve) > before, "further points")
    for text in ("tokens/s", "better than the base", "LoRA", "training 1"):
        browser.until(lambda text=text: text.lower() in browser.text("main").lower(), text)
    browser.until(lambda: browser.rows("Memory by purpose"), "the plan's memory")
    browser.press("Cancel job")
    browser.type_into("Operator token", training.token)
    browser.press("Cancel job", ".q-dialog")
    browser.sees("cancelled", "main")
    assert browser.run("return window.neverReloaded")
    # The token is known now.
    browser.press("Retry job")
    browser.sees("Retry job 1?", ".q-dialog")
    browser.press("Retry job", ".q-dialog")
    browser.until(
        lambda: browser.text(".page .state.strong") not in ("", "cancelled"), "a job that is open again"
    )
