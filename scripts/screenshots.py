"""Make the pictures of the page in docs/images (python scripts/screenshots.py).

A miner trains a little model on the CPU, and Chromium looks at it. Needs chromium, chromium-driver, and a
training environment in TRAINER_PYTHON.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx

from miner.dev import demo, demo_inputs
from miner.dev.demo_inputs import LoopbackSite
from miner.dev.samples import SampleTask, example_task
from miner.dev.stack import DevStack, daemon_process, dashboard_process, prepare_stack
from miner.dev.validator import ValidatorClient

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.doubles.browser import Browser, open_browser  # noqa: E402

IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 150_000
#: When the training is shown: after so many points of its curve.
POINTS = """const paths = document.querySelectorAll('[aria-label="Training loss over steps"] path');
return Math.max(0, ...[...paths].map(one => one.getAttribute('d').split(/[LC]/).length))"""
#: Name, address, a text to wait for, height.
PAGES = [
    ("jobs", "/jobs", "little-llama", 420),
    ("alerts", "/alerts", "gpu-memory", 760),
    ("report", "/report", "GPU-hours", 900),
    ("offers", "/offers", "little-llama", 760),
    ("fleet", "/fleet", "cpu", 640),
    ("config", "/config", "Profiles", 760),
]


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="god-miner-pictures-") as folder, ExitStack() as parts:
        stack = prepare_stack(Path(folder))
        site = parts.enter_context(LoopbackSite())
        site.add_model(demo_inputs.MODEL_ID, demo_inputs.model_files())
        rows = site.add_file("/rows.json", demo_inputs.training_rows())
        settings = demo.demo_settings(site, stack.folder) | {"TRAINER_PYTHON": os.environ["TRAINER_PYTHON"]}
        parts.enter_context(daemon_process(stack, settings))
        page = parts.enter_context(dashboard_process(stack))
        browser = parts.enter_context(open_browser())
        url = f"http://127.0.0.1:{page.port}"
        refused = [example_task(kind, seed) for seed, kind in enumerate(("dpo", "image", "chat"))]
        asyncio.run(_play(stack, refused, demo.demo_task(rows)))
        browser.open(f"{url}/jobs/1", width=1360, height=960)
        browser.until(lambda: browser.run(POINTS) >= 8, "a curve")
        _save(browser, "job")
        browser.open(url, width=1360, height=790, dark=True)
        browser.until(lambda: browser.all(".spark polyline"), "a job in training")
        _save(browser, "overview")
        browser.open(url, width=390, height=1180)
        browser.until(lambda: browser.all(".spark polyline"), "a job in training")
        _save(browser, "phone")
        for name, path, text, height in PAGES:
            browser.open(f"{url}{path}", width=1360, height=height)
            try:
                browser.sees(text, "main")
            except AssertionError as error:
                print(f"{name}: {str(error)[:200]}", file=sys.stderr)
                continue
            _save(browser, name)


async def _play(stack: DevStack, offers: list[SampleTask], task: SampleTask) -> None:
    keys = stack.keys
    async with (
        ValidatorClient(stack.url, keys.validator, keys.miner.ss58_address) as validator,
        httpx.AsyncClient(base_url=stack.operator_url, headers=stack.operator_headers()) as operator,
    ):
        await demo.wait_for_trial(operator)
        for one in offers:
            await validator.offer(one)
        await validator.offer(task)
        await validator.start(task)


def _save(browser: Browser, name: str) -> None:
    time.sleep(1.0)  # charts draw after their data has come
    path = IMAGES / f"{name}.png"
    browser.driver.save_screenshot(str(path))
    size = path.stat().st_size
    print(f"{path.relative_to(ROOT)}: {size / 1000:.0f} kB" + (" (too large)" if size > MAX_BYTES else ""))


if __name__ == "__main__":
    main()
