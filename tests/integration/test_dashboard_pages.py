"""The pages of offers, fleet and configuration in a real browser, in front of a real daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import httpx
import pytest
from selenium.webdriver.common.keys import Keys

from core.domain.tasks import TaskType
from miner.chain.fiber import sign_headers
from miner.daemon_client import stored_operator_token
from miner.dev import stack as dev_stack
from miner.dev.samples import SampleTask, sample_task
from miner.dev.stack import DevStack, daemon_process, dashboard_process, prepare_stack
from tests.doubles.browser import Browser, open_browser

SETTINGS = {"BACKEND": "none", "GPUS": "4xH100", "POLICY": "h100x4", "PROFILE": "h100x4", "MAX_JOBS": "100"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    """A daemon and its page; a validator has offered two tasks that are accepted and one that is too long."""
    stack = prepare_stack(tmp_path_factory.mktemp("pages") / "miner")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dev_stack, "START_LIMIT_S", 180.0)
        with daemon_process(stack, SETTINGS):
            for seed in (1, 2):
                offer(stack, sample_task(TaskType.INSTRUCT, Random(seed)), hours=3)
            offer(stack, sample_task(TaskType.INSTRUCT, Random(3)), hours=11)
            yield stack


@pytest.fixture(scope="module")
def url(stack: DevStack) -> Iterator[str]:
    with dashboard_process(stack) as page:
        yield f"http://127.0.0.1:{page.port}"


@pytest.fixture(scope="module")
def browser(url: str) -> Iterator[Browser]:
    with open_browser(url) as browser:
        yield browser
        assert browser.problems() == []


def offer(stack: DevStack, task: SampleTask, hours: float) -> None:
    sent = {**task.offer(), "hours_to_complete": hours, "model": "meta-llama/Llama-3.1-8B"}
    body = json.dumps({**sent, "model_params_count": 8_030_261_248}).encode()
    headers = sign_headers(stack.keys.validator, stack.keys.miner.ss58_address, body)
    reply = httpx.post(
        stack.url + task.offer_path, content=body, headers={**headers, "content-type": "application/json"}
    )
    assert reply.status_code == 200, reply.text


def test_offers_are_listed_narrowed_and_explained(browser: Browser) -> None:
    browser.open("/offers")
    browser.wait(lambda: len(browser.rows("Offers")) == 3)
    browser.open("/offers?accepted=false")
    browser.wait(lambda: ["refused" in row for row in browser.rows("Offers")] == [True])
    browser.click("table[aria-label=Offers] a")
    browser.sees("What would have to change")
    assert any("11 h are over the limit of 8 for instruct" in row for row in browser.rows("Rules"))
    browser.press("Backtest 7 days with rules.hours.instruct of 11")
    browser.wait(lambda: ["accepted" in row for row in browser.rows("Offers answered differently")] == [True])
    browser.open("/offers/nothing")
    browser.sees("no offer has the number")


def test_the_slider_shows_what_longer_tasks_would_have_brought(browser: Browser) -> None:
    browser.open("/offers")
    browser.sees("12 hours")
    browser.press("Compare")
    browser.sees("2 → 3")
    assert "Expected points" in browser.text()


def test_the_fleet_shows_who_has_which_gpu_until_when(browser: Browser) -> None:
    browser.open("/fleet")
    browser.wait(lambda: len(browser.rows("GPUs")) == 4)
    bars = browser.wait(lambda: browser.all(".schedule-track a.reserved"))
    assert len(bars) >= 2
    assert all((bar.get_attribute("title") or "").startswith("reserved: ") for bar in bars)
    browser.sees("No job waits for GPUs.")
    browser.sees("Nothing is measured yet")


def test_a_shipped_policy_is_changed_by_a_file_of_the_operators(browser: Browser, stack: DevStack) -> None:
    browser.open("/config")
    browser.wait(lambda: any("h100x4" in row and "in force" in row for row in browser.rows("Policies")))
    browser.open("/config/policies/h100x4")
    browser.press("Change it by a file of yours")
    browser.sees("not saved yet")
    editor = browser.one(".cm-content[aria-label]")  # it knows the keys from then on
    editor.click()
    editor.send_keys(Keys.CONTROL, Keys.END)
    editor.send_keys("rules:\n  max_ho")
    browser.wait(
        lambda: [one.text[:9] for one in browser.all(".cm-tooltip-autocomplete li")] == ["max_hours"]
    )
    editor.send_keys(Keys.ESCAPE)
    editor.send_keys("ur: 2")
    browser.wait(lambda: any("no such key" in one.text for one in browser.all(".problems .row")))
    assert "line 4, column 3" in browser.text()
    assert browser.wait(lambda: browser.all(".cm-line.line-error"))
    editor.send_keys(*[Keys.BACKSPACE] * 3, "s: 2")
    browser.wait(lambda: [one.text for one in browser.all(".diff .added")][-1:] == ["+  max_hours: 2"])
    browser.press("What does it change?")
    browser.sees("accepted 2 → 0")
    browser.press("Save")
    browser.write(".ask input", stored_operator_token(stack.data_dir))
    browser.press("Save", within=".ask")
    browser.sees("h100x4.yaml is saved.")
    file = stack.data_dir / "policies/h100x4.yaml"
    assert file.read_text() == "description: My h100x4\nextends: h100x4\nrules:\n  max_hours: 2\n"
    try:
        browser.open("/config/policies/h100x4")
        browser.wait(lambda: any("max_hours: 2" in one.text for one in browser.all(".effective")))
    finally:
        file.unlink()


def test_a_key_that_is_searched_is_inserted_where_it_belongs(browser: Browser) -> None:
    browser.open("/config/profiles/mine?copy_of=h100x4")
    browser.type_into("Search the keys", "limits.max_gpus")
    browser.click("button[aria-label='Insert limits.max_gpus']")
    browser.wait(lambda: "limits:\n  max_gpus:" in browser.one(".cm-content").text)


def test_a_phone_shows_every_page_without_scrolling_sideways(url: str) -> None:
    with open_browser(url, 390, 844) as browser:
        for path in ("/offers", "/offers/1", "/fleet", "/config", "/config/profiles/h100x4"):
            browser.open(path)
            browser.wait(lambda: browser.all("table tbody tr") or browser.all(".cm-content"))
            width = browser.driver.execute_script("return document.documentElement.scrollWidth")
            assert width <= 390, path


def test_nothing_comes_from_elsewhere(browser: Browser) -> None:
    """The editor too ships with the package: there may be no internet."""
    browser.open("/config/profiles/h100x4")
    browser.wait(lambda: browser.all(".cm-content"))
    script = "return performance.getEntriesByType('resource').map(one => one.name)"
    loaded: list[str] = browser.driver.execute_script(script)
    assert loaded
    assert all(one.startswith((browser.url, "data:", "blob:")) for one in loaded)


def test_a_page_that_was_opened_without_a_daemon_is_there_when_the_daemon_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dev_stack, "START_LIMIT_S", 180.0)
    stack = prepare_stack(tmp_path / "miner")
    with dashboard_process(stack) as page, open_browser(f"http://127.0.0.1:{page.port}") as browser:
        browser.open("/config")
        browser.sees("This page is opened again as soon as the daemon answers.")
        with daemon_process(stack, SETTINGS):
            browser.wait(lambda: any("h100x4" in row for row in browser.rows("Profiles")))
