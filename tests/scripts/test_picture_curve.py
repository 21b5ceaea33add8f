"""The curve of a picture training, as the page on tournaments shows it."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

from core.runs.progress import EvalEvent, NoteEvent, encode_event
from core.runs.run_files import HeldOutScore
from scripts.picture_curve import curve_of, lines_of


def test_every_score_is_a_point_and_the_line_is_what_was_submitted(tmp_path: Path) -> None:
    scores = ((0, 1.0, False), (10, 0.5, True), (20, 0.75, False), (40, 0.25, True))
    events = [
        EvalEvent(t=1.0, score=HeldOutScore(value=value, step=step), best=best, seconds=0.1)
        for step, value, best in scores
    ]
    progress = tmp_path / "progress.jsonl"
    progress.write_bytes(b"".join(map(encode_event, (NoteEvent(t=1.0, kind="choice", text="x"), *events))))
    drawn = ET.fromstring("\n".join(lines_of(curve_of(progress))))
    parts = {name: [part for part in drawn if part.tag.endswith(name)] for name in ("circle", "path", "text")}
    assert [(one.get("cx"), one.get("cy")) for one in parts["circle"]] == [
        ("56.0", "24.0"),
        ("172.0", "158.7"),
        ("288.0", "91.3"),
        ("520.0", "226.0"),
    ]
    assert parts["path"][-1].get("d") == "M56 24.0H172.0V158.7H520.0V226.0H520"
    assert [one.text for one in parts["text"]][-2:] == ["the untouched base, 1.000", "the best, 0.250"]
