"""Headless Chromium, driven by Selenium: what a page shows, waited for."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from selenium import webdriver
from selenium.common.exceptions import (
    ElementNotInteractableException,
    StaleElementReferenceException,
    TimeoutException,
)
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.doubles.required import missing

#: For a busy machine.
PATIENCE_SECONDS = 240.0

T = TypeVar("T")


class Browser:
    """One window on the page at `url`."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver, self.url = driver, url

    def open(self, path: str, *, width: int | None = None, height: int = 900, dark: bool = False) -> None:
        """Open a path, or another address; with a width, in a window of that size and in that theme."""
        if width is not None:
            feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
            self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(self.url + path if path.startswith("/") else path)

    def wait(self, condition: Callable[[], T]) -> T:
        """Return what the condition gives as soon as it is true."""
        # What is drawn anew, or still moves into its place, is there a moment later.
        ignored = [StaleElementReferenceException, ElementNotInteractableException]
        waiting = WebDriverWait(self.driver, PATIENCE_SECONDS, 0.1, ignored_exceptions=ignored)
        return waiting.until(lambda _: condition())

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.wait(lambda: next(iter(self.all(selector)), None))  # type: ignore[return-value]

    def rows(self, caption: str) -> list[str]:
        """The rows of the table with this caption, as text."""
        return [row.text for row in self.all(f'table[aria-label="{caption}"] tbody tr')]

    def text(self, selector: str = "body") -> str:
        """What the first such element shows; empty if there is none."""
        script = "const e = document.querySelector(arguments[0]); return e ? e.innerText : ''"
        return str(self.run(script, selector))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, true: Callable[[], Any], what: str = "what was waited for") -> None:
        """Wait for a condition; otherwise tell what the page shows instead."""
        try:
            self.wait(true)
        except TimeoutException:
            raise AssertionError(f"{what} did not come; the page shows:\n{self.text()[:3000]}") from None

    def shows(self, selector: str) -> bool:
        """Whether such an element is there and drawn. The page itself is asked: no element can be stale."""
        script = (
            "return [...document.querySelectorAll(arguments[0])].some(e => e.getClientRects().length > 0)"
        )
        return bool(self.run(script, selector))

    def sees(self, words: str, selector: str = "body") -> None:
        self.until(lambda: words in self.text(selector), f"{words!r} in {selector}")

    def press(self, label: str, within: str = "body") -> None:
        """Press the button with this label."""

        def pressed() -> bool:
            for one in self.all(f"{within} button"):
                if one.text == label and one.is_displayed():
                    self.run("arguments[0].click()", one)
                    return True
            return False

        self.until(pressed, f"a button {label!r} in {within}")

    def click(self, selector: str) -> None:
        """Click the first such element, wherever on the page it is."""

        def clicked() -> bool:
            found = self.all(selector)
            if found:
                self.run("arguments[0].click()", found[0])
            return bool(found)

        self.until(clicked, selector)

    def type_into(self, label: str, text: str) -> None:
        """Replace what is in the input with this label."""
        self.write(f'input[aria-label="{label}"]', text)

    def write(self, selector: str, text: str) -> None:
        """Replace what is in the first such input that is shown."""

        def write() -> bool:
            for element in self.all(selector):
                if element.is_displayed():
                    element.send_keys(Keys.CONTROL + "a")
                    element.send_keys(text)
                    return True
            return False

        self.until(write, f"an input {selector}")

    def problems(self) -> list[str]:
        """What the browser's console has to complain about since the last look. Not that a connection was
        cut: a page that is left before it is connected does that, and so does a server that ends."""
        lines = self.driver.get_log("browser")
        messages = [line["message"] for line in lines if line["level"] == "SEVERE"]
        cut = ("WebSocket connection to", "/_nicegui_ws/", "favicon")
        return [message for message in messages if not any(word in message for word in cut)]


@contextmanager
def open_browser(url: str = "", width: int = 1280, height: int = 1000) -> Iterator[Browser]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        missing("Chromium and its driver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        f"--window-size={width},{height}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    try:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        yield Browser(chrome, url)
    finally:
        chrome.quit()
