"""A stand-in for the subnet's public API on loopback. Tournaments, tasks and miners in it are invented."""

from __future__ import annotations

import json
from typing import Any

from tests.doubles.flaky import FlakyServer, Reply, Request

HOTKEYS = tuple(f"5Made{letter}" + letter.lower() * 42 for letter in "ABCDE")
COLDKEY = "5Cash" + "k" * 43


class PublicApiSite(FlakyServer):
    def __init__(self) -> None:
        super().__init__(doors=2)
        #: Path → what it answers.
        self.pages: dict[str, Any] = {
            "/tournament/fees": {
                "text_tournament_fee_rao": 710_000_000,
                "image_tournament_fee_rao": 410_000_000,
                "environment_tournament_fee_rao": 610_000_000,
            },
            f"/tournament/balance/{COLDKEY}": {"coldkey": COLDKEY, "balance_rao": 1_500_000_000},
        }

    def answer(self, request: Request) -> Reply:
        page = self.pages.get(request.path)
        if page is None:
            return Reply(404, {"Content-Type": "application/json"}, b'{"detail": "Not Found"}')
        body = json.dumps(page).encode()
        etag = f'"{len(body)}-{hash(body) & 0xFFFF}"'
        if request.headers.get("if-none-match") == etag:
            return Reply(304, {"ETag": etag})
        return Reply(200, {"Content-Type": "application/json", "ETag": etag}, body)

    def add_tournament(self, kind: str, tournament_id: str, tasks: list[dict[str, Any]], **more: Any) -> None:
        """A tournament that is the latest of its kind, and the pages of its tasks."""
        rows = [{"task_id": task["task_id"], "task_type": task.get("task_type")} for task in tasks]
        details = {
            "tournament_id": tournament_id,
            "tournament_type": kind,
            "status": "completed",
            "winner_hotkey": HOTKEYS[0],
            "base_winner_hotkey": HOTKEYS[1],
            "participants": [{"hotkey": hotkey, "final_position": None} for hotkey in HOTKEYS],
            "rounds": [{"round_number": 1, "is_final_round": False, "status": "completed", "tasks": rows}],
            **more,
        }
        self.pages[f"/tournament/{tournament_id}/details"] = details
        self.pages.setdefault("/tournament/latest/details", {})[kind] = details
        for task in tasks:
            self.pages[f"/auditing/tasks/{task['task_id']}"] = task
