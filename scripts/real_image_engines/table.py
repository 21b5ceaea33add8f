"""Print what `real_image_engines.sh` found: one line for each engine and family, and every failure in full.

python table.py RECORDS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

COLUMNS = "{:<11}{:<11}{:>9}{:>9}{:>9}{:>9}  {}"
#: Records of whole runs; every other name is that of a configuration.
TRAINED, REHEARSED = "trained", "rehearsed"


def lines_of(records: Iterable[dict[str, Any]]) -> list[str]:
    """The table's lines. A record is a training, a rehearsal, or one configuration."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["engine"], record["family"]), []).append(record)
    lines = [
        COLUMNS.format("engine", "family", "loaded", "trained", "seconds", "peak MB", "keys of the adapter")
    ]
    for (engine, family), group in sorted(groups.items()):
        whole = [record for record in group if record["name"] in (TRAINED, REHEARSED)]
        tried = [record for record in group if record not in whole]
        loaded = f"{sum(record['ok'] for record in tried)}/{len(tried)}" if tried else "-"
        trained = ("yes" if whole[0]["ok"] else "no") if whole else "-"
        seconds = f"{whole[0]['seconds']:.0f}" if whole else "-"
        peak = f"{max(record['peak_bytes'] for record in group) / 1e6:.0f}"
        said = next((record["said"] for record in reversed(group) if record["ok"]), "")
        lines.append(COLUMNS.format(engine, family, loaded, trained, seconds, peak, said.split("; ")[0]))
    return lines


def failures(records: Iterable[dict[str, Any]]) -> list[str]:
    return [
        f"failed: {record['name']} ({record['engine']}, {record['family']}): {record['said']}"
        for record in records
        if not record["ok"]
    ]


def main(path: str) -> int:
    records = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
    failed = failures(records)
    print("\n".join([*lines_of(records), *failed]))
    if not records:
        print("nothing was tried")
    return 1 if failed or not records else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
