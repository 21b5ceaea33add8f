"""Speed and memory of inspecting a dataset, against `json.load` of the same file."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Report

MEGABYTES = 200
#: Each is run in a process of its own, with the file's path as argument, and prints what it found.
_SUBJECTS = {
    "json.load, all in memory": """
        import json
        rows = json.load(open(path, encoding="utf-8"))
        count = len(rows)
    """,
    "rows one at a time": """
        from core.data.rows import JsonRows
        with open(path, "rb") as file:
            count = sum(1 for _ in JsonRows(file))
    """,
    "rows, columns, sample, lengths": """
        from core.data.scan import facts_from_scan, scan_rows
        from core.data.rows import JsonRows
        from core.domain.tasks import InstructDataset
        dataset = InstructDataset(field_instruction="instruct", field_input="input", field_output="output")
        with open(path, "rb") as file:
            found, sample = scan_rows(JsonRows(file), dataset)
        count = facts_from_scan(dataset, found, sample).rows
    """,
}
#: The peak is not `ru_maxrss`, which a process inherits from the one that started it.
_AROUND = """
import json, sys, time
{imports}
path, began, burned = sys.argv[1], time.perf_counter(), time.process_time()
{code}
seconds, cpu = time.perf_counter() - began, time.process_time() - burned
status = open("/proc/self/status").read()
peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
print(json.dumps([count, seconds, cpu, peak]))
"""


def run(quick: bool) -> Report:
    rounds, size = (2, MEGABYTES // 10) if quick else (5, MEGABYTES)
    report = Report(
        f"A JSON array of {size} MB, looked at",
        ("how", "rows", "MB/s (min, max)", "MB per CPU second", "× json.load", "peak RSS MB"),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        write_rows(path, size * 10**6)
        # In turns, so that a busy moment of the machine meets all of them.
        runs = [{name: _once(code, path) for name, code in _SUBJECTS.items()} for _ in range(rounds)]
        actual = path.stat().st_size / 1e6
    by_json_load = median(one[next(iter(_SUBJECTS))][2] for one in runs)
    for name in _SUBJECTS:
        found = [one[name] for one in runs]
        speeds = [actual / seconds for _, seconds, _, _ in found]
        cpu = median(burned for _, _, burned, _ in found)
        report.data[name] = found
        report.rows.append(
            (
                name,
                f"{found[0][0]:,}",
                f"{median(speeds):.0f} ({min(speeds):.0f}, {max(speeds):.0f})",
                f"{actual / cpu:.0f}",
                f"{by_json_load / cpu:.1f}",
                f"{max(peak for _, _, _, peak in found):.0f}",
            )
        )
    report.notes.append(
        f"Medians of {rounds} runs, each in a process of its own, in turns; peaks are the highest. On a busy "
        "machine only the CPU seconds mean something; the multiple is of these."
    )
    return report


def write_rows(path: Path, size: int) -> None:
    """Text as tasks have it: a question, sometimes an input, an answer of a few hundred words."""
    picker = random.Random(1)
    words = [
        "".join(picker.choices("abcdefghijklmnopqrstuvwxyzé", k=picker.randint(2, 9))) for _ in range(5000)
    ]

    def text(most: int) -> str:
        return " ".join(picker.choices(words, k=picker.randint(0, most)))

    with path.open("w", encoding="utf-8") as file:
        mark = "["
        while file.tell() < size:
            row = {"instruct": text(300), "input": text(40), "output": text(500) + '\n"so"', "system": ""}
            file.write(f"{mark}{json.dumps(row, ensure_ascii=picker.random() < 0.5)}")
            mark = ", "
        file.write("]")


def _once(code: str, path: Path) -> Any:
    lines = [line[8:] for line in code.strip("\n").split("\n")]
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    rest = [line for line in lines if line not in imports]
    program = _AROUND.format(imports="\n".join(imports), code="\n".join(rest))
    made = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, check=True, text=True
    )
    return json.loads(made.stdout)
