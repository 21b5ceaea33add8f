"""Print docs/api.md from the routes of the operator's port (make docs)."""

from __future__ import annotations

from miner.http.apps import api_page

if __name__ == "__main__":
    print(api_page(), end="")
