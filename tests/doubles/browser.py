"""A real Chromium without a window, and what tests wait for in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.doubles.required import missing

#: A busy machine takes its time; nothing waits longer than it has to.
PATIENCE_S = 60.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
)


class Browser:
    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str, *, width: int = 1360, height: int = 900, dark: bool = False) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(url)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str = "body") -> str:
        """What the first such element shows; empty if there is none."""
        script = "const e = document.querySelector(arguments[0]); return e ? e.innerText : ''"
        return str(self.driver.execute_script(script, selector))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, true: Callable[[], Any], what: str = "") -> Any:
        """Wait for a condition; a page that was just built anew is looked at again."""
        message = f"{what}\n{self.driver.current_url}"
        waiting = WebDriverWait(self.driver, PATIENCE_S, 0.1, ignored_exceptions=[Exception])
        try:
            return waiting.until(lambda _driver: true(), message)
        except Exception:
            raise AssertionError(f"{what} did not come; the page shows:\n{self.text()[:3000]}") from None

    def sees(self, text: str, selector: str = "body") -> None:
        self.until(lambda: text in self.text(selector), f"{text!r} in {selector}")

    def click(self, text: str, selector: str = "button") -> None:
        """Click what shows exactly this text."""

        def press() -> bool:
            for element in self.all(selector):
                if element.is_displayed() and element.text.strip() == text:
                    element.click()
                    return True
            return False

        self.until(press, f"a {selector} {text!r} to click")

    def type_into(self, label: str, text: str) -> None:
        def write() -> bool:
            for element in self.all(f'input[aria-label="{label}"]'):
                if element.is_displayed():
                    element.send_keys(Keys.CONTROL + "a")
                    element.send_keys(text)
                    return True
            return False

        self.until(write, f"an input {label!r}")

    def errors(self) -> list[str]:
        """What the page's own scripts complained about since the last time."""
        return [one["message"] for one in self.driver.get_log("browser") if one["level"] == "SEVERE"]


@contextmanager
def open_browser() -> Iterator[Browser]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        missing("chromium and chromedriver are not installed: apt install chromium chromium-driver")
    options = Options()
    options.binary_location = chromium
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield Browser(chrome)
    finally:
        chrome.quit()
