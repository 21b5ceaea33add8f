"""The overview: is it alive, is it earning."""

from __future__ import annotations

from typing import Any

from miner.dashboard.layout import PageView, page, page_head
from miner.dashboard.parts import Facts, panel


@page("/", "Overview", place=10)
def overview_page(view: PageView) -> None:
    page_head("Overview")
    with panel("Daemon"):
        facts = Facts()

    def show(status: dict[str, Any]) -> None:
        facts.show({"Version": status["version"], "Hotkey": status["hotkey"], "Policy": status["policy"]})

    view.live("/status", show)
