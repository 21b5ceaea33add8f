"""Conversations of software-engineering agents become rows where they were submitted, edit and fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.each import each
from trainer.environments.swe import DATASET, MOST_LETTERS, MOST_OBSERVATION, edits, swe_row, swe_rows

EDIT = "THOUGHT: fix it\n\n```bash\nsed -i 's/a/b/' src/x.py\n```"
LOOK = "THOUGHT: look\n\n```bash\ncat src/x.py\n```"
DONE = "```bash\necho DONE\n```"


def published(
    *answers: str, status: str = "Submitted", observation: str = "<output>x</output>"
) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "Fix the bug."},
    ]
    for answer in answers:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": observation}]
    return {
        "instance_id": "a__b-1",
        "messages": messages,
        "exit_status": status,
        "trajectory_format": "mini-swe-agent-1",
    }


def test_a_row_is_the_conversation_up_to_the_last_answer() -> None:
    row = swe_row(published(LOOK, EDIT, DONE))
    assert row is not None
    assert [turn["role"] for turn in row["messages"]] == [
        "system",
        "user",
        *["assistant", "user"] * 2,
        "assistant",
    ]
    assert row["messages"][-1]["content"] == DONE
    assert all(set(turn) == {"role", "content"} for turn in row["messages"])


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(published(EDIT, DONE, status="incomplete"), id="not submitted"),
        pytest.param({**published(EDIT), "exit_status": None}, id="without a status"),
        pytest.param(published(LOOK, DONE), id="without an edit"),
        pytest.param(published(EDIT, "y" * MOST_LETTERS), id="too long"),
        pytest.param(published(), id="without an answer"),
        pytest.param({**published(EDIT), "messages": "no conversation"}, id="no messages"),
        pytest.param({**published(EDIT), "messages": [{"role": "user", "content": None}]}, id="no text"),
        pytest.param(
            {
                **published(EDIT),
                "messages": [
                    *published(EDIT)["messages"],
                    {"role": "user", "content": "again"},
                    {"role": "assistant", "content": EDIT},
                ],
            },
            id="two questions in a row",
        ),
    ],
)
def test_what_teaches_nothing_is_left_out(raw: dict[str, Any]) -> None:
    assert swe_row(raw) is None


def test_long_observations_are_cut_in_the_middle_and_the_task_is_not() -> None:
    raw = published(LOOK, EDIT, DONE, observation="begin " + "z" * 9_000 + " end")
    raw["messages"][1]["content"] = "t" * 5_000
    row = swe_row(raw)
    assert row is not None
    observation = row["messages"][3]["content"]
    assert MOST_OBSERVATION - 40 < len(observation) <= MOST_OBSERVATION
    assert (observation[:6], observation[-4:]) == ("begin ", " end")
    assert len(row["messages"][1]["content"]) == 5_000


@each(
    ("command", "changes"),
    [
        ("sed -i 's/a/b/' x.py", True),
        ("sed -n -i.bak 's/a/b/' x.py", True),
        ("cat <<'EOF' > src/new.py\nx = 1\nEOF", True),
        ("echo x >> setup.cfg", True),
        ("python - <<'EOF'\nPath('x').write_text('y')\nEOF", True),
        ("git apply fix.diff", True),
        ("tee a.py < b.py", True),
        ("sed -n '1,20p' x.py", False),
        ("pytest 2>&1 | tail", False),
        ("ls > /dev/null", False),
        ("grep -rn 'a' src", False),
        ("python -c 'def f(a) -> int: return a if a > 3 else 0'", False),
        ("git diff -- src/x.py > patch.txt && cat patch.txt", False),
        ("python fix.py >> src/x.py", True),
    ],
)
def test_an_edit_is_known_by_its_command(command: str, changes: bool) -> None:
    assert edits(f"I do this:\n\n```bash\n{command}\n```") == changes
    assert not edits(command)


def test_rows_come_from_the_requested_dataset_once_each(tmp_path: Path) -> None:
    folder, other = tmp_path / DATASET, tmp_path / "org--other"
    for place in (folder, other):
        place.mkdir()
        (place / "broken.jsonl").write_text('{"messages": ')
        lines = [published(EDIT, DONE), published(EDIT, DONE), published(LOOK), published(LOOK, EDIT, DONE)]
        (place / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(swe_rows([str(folder), str(other)], 10)) == 2
    assert len(swe_rows([str(folder)], 1)) == 1
    assert swe_rows([str(other), str(tmp_path / "gone")], 10) == []


def test_rows_come_from_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / DATASET
    folder.mkdir()
    table = pyarrow.Table.from_pylist([published(LOOK, EDIT, DONE), published(LOOK, DONE)])
    parquet.write_table(table, folder / "train-00000-of-00001.parquet")
    assert len(swe_rows([str(folder)], 10)) == 1
